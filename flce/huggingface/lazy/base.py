"""What both kinds of lazy logits share: the state, the family, and the real logits."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.huggingface.head_call import HeadCall, register_wrapper_hooks
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.staleness import StaleLogitsError, versions_of
from flce.huggingface.usage import EXPLICIT_MATERIALIZE, forbid_materialized, report_materialized
from flce.huggingface.wrappers import current_checkpoint, suspend_checkpoint

# Functions that cut real logits, in order. With each whether gradients were recorded, and inference mode; None within a
# graph.
Steps = tuple[tuple[Callable[[Tensor], Tensor], tuple[bool, bool] | None], ...]


class View(NamedTuple):
    """How lazy logits share the memory of others.

    Attributes:
        root: the lazy logits that have the memory.
        steps: cut the view from the root's real logits.
        is_full: the view has all entries of the root, in their order, and autograd lets it be written to.
    """

    root: LazyBase
    steps: Steps
    is_full: bool

    def real(self) -> Tensor:
        """The real logits of the view. Those of the root have to exist."""
        assert self.root._real is not None
        with outside_checkpoint(self.root._state):
            return repeated(self.steps, self.root._real)


def repeated(steps: Steps, real: Tensor) -> Tensor:
    for cut, mode in steps:
        with contextlib.nullcontext() if mode is None else grad_mode(*mode):
            real = cut(real)
    return real


@dataclass(eq=False)
class Family:
    """Lazy logits and their views, which share one memory.

    Attributes:
        views: all but the root.
        hooks: hooks of users that wait for the gradient. Nodes of the autograd graph refer to this set.
        copies: each copy that needs a gradient, and its family. Such a gradient does not pass through these logits.
        origin: computes the root, a copy, from the real logits that it is a copy of. None: it is no copy, is real, was
            changed since, or its arguments may have changed.
        has_views: within a graph of ``torch.compile``, where they are not listed.
        seen: the version of the real logits when they were last looked at.
        is_written: the real logits were written to, or an autograd.Function has returned these.
    """

    views: list[weakref.ref[Any]] = field(default_factory=list)
    hooks: set[str] = field(default_factory=set)
    copies: list[tuple[weakref.ref[Any], Family]] = field(default_factory=list)
    origin: Steps | None = None
    has_views: bool = False
    seen: Any = None
    is_written: bool = False

    def is_bypassed(self) -> bool:
        """Whether a gradient of a copy cannot pass through these logits."""
        families = [self]
        for family in families:  # the list grows
            families += [copied for _, copied in family.copies]
        # Real logits may have been written to where no version shows it.
        return any(family.origin is None or self.seen is not None for family in families[1:])

    def make_copies_real(self, real: Tensor) -> None:
        """Compute the copies from the real logits of the root, which their gradients pass through then."""
        sources = [(self, real)]
        while sources:
            source, real = sources.pop()
            copies, source.copies = source.copies, []
            for ref, family in copies:
                copy = repeated(family.origin or (), real)
                sources.append((family, copy))
                family.hooks.update(source.hooks)
                for lazy in live_objects([ref]):
                    lazy._set_real(copy)
                    lazy._update_nodes(always=True)


def live_objects(refs: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (one for one in [ref() for ref in refs] if one is not None)


def outside_checkpoint(state: LazyState) -> contextlib.AbstractContextManager[None]:
    """Where real logits are made: outside of a checkpoint that was given lazy ones, whose recomputation finds them."""
    return suspend_checkpoint() if state.is_outside_checkpoint else contextlib.nullcontext()


_LAZY_IN: weakref.WeakKeyDictionary[Any, set[Family]] = weakref.WeakKeyDictionary()
"""The logits from outside of a checkpoint that were lazy when its first pass began to use them."""


class LazyBase:
    """What both kinds of lazy logits share: the state, and the real logits once they exist.

    Whatever makes one member of a family real makes the root real, and repeats the views on it. So a write to one shows
    in all, as in stock. A copy has a family of its own.
    """

    _state: LazyState
    _real: Tensor | None
    _view: View | None
    _family: Family
    # Of the autograd graph, which these logits stand at: None for nowhere, True for a leaf, or within a graph.
    _node: Any = True
    # A tensor without data that has the shape and strides of stock's logits: tells views from copies.
    _meta_tensor: Tensor | None

    def _init(self, state: LazyState, view: View | None, meta_tensor: Tensor | None) -> None:
        self._state, self._view, self._meta_tensor, self._real = state, view, meta_tensor, None
        self._family = Family() if view is None else view.root._family

    def _root(self) -> LazyBase:
        """The lazy logits that have the memory."""
        return self if self._view is None else self._view.root

    def _is_full(self) -> bool:
        return self._view is None or self._view.is_full

    def _set_state(self, state: LazyState) -> None:
        """Change in place."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """Compute the real logits, or return them if they have been computed before. No warning is given.

        Of a view all logits are computed, whose memory it shares; ``logits[:, -1].clone().materialize()`` computes the
        logits of these tokens only.

        Returns:
            An ordinary tensor of this object's shape, dtype and device, connected to the hidden states and
            the head in the autograd graph as stock logits are.

        Raises:
            RuntimeError: the hidden states or the head were changed since the model ran.
        """
        if self._get_real() is None and self._state.calls:
            self._state.calls[0].usage.materialized[EXPLICIT_MATERIALIZE] += 1
            self._state.calls[0].usage.has_gradient_use |= self._state.requires_grad
        return self._materialize()

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits exist."""
        return self._get_real() is not None

    def _get_real(self) -> Tensor | None:
        """The real logits, if they exist."""
        if self._real is None and self._view is not None and self._view.root._get_real() is not None:
            self._real = self._view.real()
        return self._real

    def _materialize(self) -> Tensor:
        if self._get_real() is None:
            root = self._root()
            root._set_real(root._compute())
        real = self._get_real()
        assert real is not None
        return real

    def _set_real(self, real: Tensor) -> None:
        self._real = real
        if self._view is None:
            self._family.seen, self._family.origin = versions_of(real), None

    def _make_views_real(self) -> None:
        """Make the views real, if the memory exists: it may be written to."""
        if self._root()._real is not None:
            for view in live_objects(self._family.views):
                with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows
                    view._get_real()

    def _update_nodes(self, always: bool = False) -> None:
        """After an operation of real logits: if it has written to them, give the family their places in the graph."""
        root, family = self._root(), self._family
        version = None if root._real is None else versions_of(root._real)
        written, family.seen = version != family.seen, version
        if written:
            # The copies that there are come from what was there before.
            family.copies, family.is_written = [], True
        if written or always:
            family.views = [ref for ref in family.views if ref() is not None]
            for lazy in (root, *live_objects(family.views)):
                lazy._take_over_node(written)

    def _take_over_node(self, written: bool) -> None:
        """Take the place of the real logits in the graph."""

    def _update_before_operation(self, real: Tensor) -> None:
        """Before an operation: take the place that the real logits have in the graph by now."""

    def _known(self) -> Tensor | None:
        """The real logits, if operations are done to them.

        Both passes of a checkpoint save the same tensors: logits from outside of it that were lazy at first stay lazy
        for its operations. The second pass of a checkpoint within another is given real ones.
        """
        real, family = self._get_real(), self._family
        if self._state.is_outside_checkpoint and (here := current_checkpoint()) is not None:
            lazy_families = _LAZY_IN.setdefault(here, set())
            if real is None and family not in lazy_families:
                if any(family in others and not around.forward_completed for around, others in _LAZY_IN.items()):
                    return materialize_and_report(self._state, "a checkpoint within another", self._materialize)
                lazy_families.add(family)
            if family in lazy_families and not (family.is_written or family.hooks):
                return None
        return real

    def _compute(self) -> Tensor:
        state = self._state
        # In the mode of the head, not of who reads them first. What has no gradient is no less fit to be written to.
        inference = not torch.compiler.is_compiling() and state.tensors[0].is_inference()
        with grad_mode(True, inference), outside_checkpoint(state):
            return register_wrapper_hooks(state.logits(), state.calls)

    def _read_values(self) -> Tensor:
        """The values of a small view, in memory of their own."""
        values = self._compute()
        self._state.note_values()
        return values

    def _is_small_view(self) -> bool:
        """Whether this is a view of so few logits that reading is no reason to compute all."""
        # A graph drops what it does not use: there each view is made by itself.
        if self._view is None:
            return False
        return self._meta_tensor is None or 4 * self._meta_tensor.numel() <= math.prod(self._view.root._state.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, real = self._state, self._get_real()
        if real is not None:
            return repr(real)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


# The class of lazy logits, by whether the compiler is at work: `tensor` and `graphs` set it.
CLASS_BY_COMPILING: dict[bool, Any] = {}


def make_lazy(state: LazyState, view: View | None = None, meta_tensor: Tensor | None = None) -> Any:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled() and state.requires_grad:
        state = state.detach()
    # Graphs have no writes that would show: they need no meta tensor.
    return CLASS_BY_COMPILING[compiling]._wrap(state, view, None if compiling else meta_tensor)


@contextlib.contextmanager
def grad_mode(grad: bool, inference: bool) -> Iterator[None]:
    other = not torch.compiler.is_compiling() and inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if other else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


def note_bypassing_gradient(calls: Sequence[HeadCall], value: Any) -> None:
    """Note that gradients will pass by the logits, if ``value`` has some."""
    for call in calls:
        call.has_bypassing_gradient |= value.requires_grad


def state_of(logits: Any) -> LazyState | None:
    """What logits would be computed from; None where they are real."""
    lazy = isinstance(logits, LazyBase) and logits._get_real() is None
    return logits._state if lazy else None


def register_results(state: LazyState, values: Iterable[Any]) -> None:
    """Say that ``values`` were made without the logits: wrappers wait for gradients, which come to these instead."""
    for value in values:
        if isinstance(value, Tensor):
            note_bypassing_gradient(state.calls, value)
            register_wrapper_hooks(value, state.calls)


def materialize_and_report(state: LazyState, func: Any, compute: Callable[[], Tensor]) -> Tensor:
    """The logits that ``compute`` returns, counted and with a warning, or an error, as ``patch_model`` was told to.

    Where they can no longer be computed, nothing is said of logits that were.

    Args:
        state: of the logits.
        func: what needs them.
        compute: computes them.
    """
    if torch.compiler.is_compiling():  # it has no frames to look at, and a warning would break the graph
        return compute()
    usage = state.calls[0].usage if state.calls else None
    report_arguments = func, state.settings.on_materialize, usage, state.requires_grad
    forbid_materialized(*report_arguments)
    values_before = any(call.has_returned_values for call in state.calls)
    try:
        logits = compute()
    except StaleLogitsError:
        raise
    except Exception:  # memory, as a rule, for want of which the warning is wanted
        report_materialized(*report_arguments)
        raise
    report_materialized(*report_arguments, values_before=values_before)
    return logits
