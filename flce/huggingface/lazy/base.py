"""What both kinds of lazy logits share: the state, the family, and the real logits."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flce.huggingface.head_call import HeadCall, watch_gradient
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.staleness import StaleLogitsError, versions_of
from flce.huggingface.usage import ASKED_FOR, forbid_materialized, say_materialized
from flce.huggingface.wrappers import outside_of_checkpoint


@dataclass(eq=False)
class Step:
    """One operation that made a view or a copy, to be repeated.

    Attributes:
        func: the function of PyTorch.
        run: the same of a state.
        args, named: arguments behind the first, without lazy logits.
        piece: which of several results; None: there is one.
        mode: whether gradients were recorded, and inference mode; None: within a graph.
        versions: of arguments that are tensors.
    """

    func: Callable[..., Any]
    run: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    piece: int | None
    mode: tuple[bool, bool] | None
    versions: list[tuple[Tensor, Any]]

    def of_state(self, state: LazyState) -> LazyState:
        return self._repeat(self.run, state)

    def of_real(self, real: Tensor) -> Tensor:
        return self._repeat(self.func, real)

    def can_repeat(self) -> bool:
        """Whether the arguments are what they were."""
        return all(versions_of(tensor) == version for tensor, version in self.versions)

    def _repeat(self, function: Callable[..., Any], first: Any) -> Any:
        mode = self.mode
        if mode is None or mode == (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
            made = function(first, *self.args, **self.named)
        else:
            with grad_mode(*mode):
                made = function(first, *self.args, **self.named)
        return made if self.piece is None else made[self.piece]


@dataclass(eq=False)
class Origin:
    """What lazy logits are a view or a copy of.

    Attributes:
        lazy: other lazy logits; of a view those that have the memory.
        steps: what makes these logits of those.
        is_view: they share the memory.
        changes: those of the family at that time.
    """

    lazy: LazyBase
    steps: tuple[Step, ...]
    is_view: bool
    changes: int

    def state(self) -> LazyState:
        state = self.lazy._state
        for step in self.steps:
            state = step.of_state(state)
        return state

    def real(self) -> Tensor:
        """The real logits. Those of the origin have to exist."""
        real = self.lazy._real
        assert real is not None
        with outside(self.lazy._state):
            for step in self.steps:
                real = step.of_real(real)
        return real

    def is_unchanged(self) -> bool:
        """Whether a copy can still be made of the real logits of its origin."""
        family = self.lazy._family
        return family.changes == self.changes and not family.is_written() and all(s.can_repeat() for s in self.steps)

    @property
    def is_piece(self) -> bool:
        """Whether an operation with several results has made it."""
        return any(step.piece is not None for step in self.steps)


@dataclass(eq=False)
class Hooked:
    """Whether a hook waits for the gradient of lazy logits. Their places in the autograd graph refer to it.

    Attributes:
        source: the same of what these logits are a copy of.
    """

    source: Hooked | None = None
    now: bool = False

    def anywhere(self) -> bool:
        """Whether one waits here, or at what these logits come from."""
        hooked: Hooked | None = self
        while hooked is not None and not hooked.now:
            hooked = hooked.source
        return hooked is not None


@dataclass(eq=False)
class Family:
    """Lazy logits and their views, which share one memory, and the copies that were made of them.

    Attributes:
        memory: the real logits of what has the memory; None: they do not exist.
        changes: how many operations in place were recorded.
        views: all but the root.
        copies: of which the gradients may have to come to a hook.
        has_views: within a graph of ``torch.compile``, where they are not listed.
    """

    hooked: Hooked
    memory: Tensor | None = None
    changes: int = 0
    views: list[weakref.ref[Any]] = field(default_factory=list)
    copies: list[weakref.ref[Any]] = field(default_factory=list)
    has_views: bool = False
    _made_as: Any = None
    _seen: Any = None

    def set_memory(self, real: Tensor) -> None:
        self.memory, self._made_as, self._seen = real, versions_of(real), versions_of(real)

    def is_written(self) -> bool:
        """Whether the real logits were changed since they were made."""
        return self.memory is not None and versions_of(self.memory) != self._made_as

    def was_written_now(self) -> bool:
        """Whether the real logits were changed since the last call."""
        before, self._seen = self._seen, None if self.memory is None else versions_of(self.memory)
        return bool(before != self._seen)

    def make_real(self) -> None:
        """Make the views real, if the memory exists: it may be written to."""
        if self.memory is not None:
            for view in alive(self.views):
                with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows
                    view._existing()

    def allows_change(self, requires_grad: bool) -> bool:
        """Whether autograd would let the views of logits see an operation in place."""
        for view in alive(self.views):
            if view._state.requires_grad != requires_grad or (requires_grad and view._origin.is_piece):
                return False
        return not self.has_views


def alive(refs: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (one for one in [ref() for ref in refs] if one is not None)


def outside(state: LazyState) -> contextlib.AbstractContextManager[None]:
    """Where real logits are made: outside of a checkpoint that was given lazy ones, whose recomputation finds them."""
    inside = not torch.compiler.is_compiling() and any(call.is_outside for call in state.calls)
    return outside_of_checkpoint() if inside else contextlib.nullcontext()


class LazyBase:
    """What both kinds of lazy logits share: the state, and the real logits once they exist.

    Whatever makes one member of a family real makes the root real, and repeats the views on it. So a write to one shows
    in all, as in stock. A copy has a family of its own. It is made from its origin only if a hook waits there.
    """

    _state: LazyState
    _real: Tensor | None
    _origin: Origin | None
    # The values of a small view, in memory of their own, for operations that only read.
    _values: Tensor | None
    _family: Family
    _changes: int  # of the family, that are in the state
    # A tensor without data that has the shape and strides of stock's logits: tells views from copies.
    _shadow: Tensor | None

    def _init(self, state: LazyState, origin: Origin | None, shadow: Tensor | None) -> None:
        self._state, self._origin, self._shadow, self._real, self._values = state, origin, shadow, None, None
        if origin is None:
            self._family = Family(Hooked())
        else:
            family = origin.lazy._family
            self._family = family if origin.is_view else Family(Hooked(family.hooked))
        self._changes = self._family.changes

    def _is_view(self) -> bool:
        return self._origin is not None and self._origin.is_view

    def _root(self) -> LazyBase:
        """What has the memory."""
        origin = self._origin
        return origin.lazy if origin is not None and origin.is_view else self

    def _become(self, state: LazyState) -> None:
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
        if self._existing() is None and self._state.calls:
            self._state.calls[0].usage.materialized[ASKED_FOR] += 1
            self._state.calls[0].usage.used |= self._state.requires_grad
        return self._make_real()

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits exist."""
        return self._existing() is not None

    def _existing(self) -> Tensor | None:
        """The real logits, if they exist. Brings this object up to date."""
        origin = self._origin
        if self._real is None and origin is not None and origin.is_view:
            root = origin.lazy
            if root._existing() is not None:
                self._set_real(origin.real())
            elif self._changes != self._family.changes:
                self._state, self._values, self._changes = origin.state(), None, self._family.changes
        return self._real

    def _set_real(self, real: Tensor | None) -> None:
        self._real, self._values = real, None
        if real is not None and not self._is_view():
            self._family.set_memory(real)

    def _make_real(self) -> Tensor:
        if self._existing() is None:
            root = self._root()
            root._set_real(root._compute())
            if root._origin is not None:  # a copy, not made from what it is a copy of
                note_passing(root._state.calls, root._state)
        real = self._existing()
        assert real is not None
        return real

    def _await_gradient(self) -> None:
        """Make copies real from here on down: a hook, or who asks for the place in the graph, waits for gradients."""
        self._make_real()
        families = [self._family]
        while families:
            family = families.pop()
            copies, family.copies = family.copies, []
            for copy in alive(copies):
                if copy._existing() is None and copy._origin is not None and copy._origin.is_unchanged():
                    copy._origin.lazy._existing()
                    copy._set_real(copy._origin.real())
                    families.append(copy._family)

    def _follow(self, always: bool = False) -> None:
        """After an operation of real logits: if it has written to them, give the family their places in the graph."""
        family, written = self._family, self._family.was_written_now()
        if written or always:
            family.views = [ref for ref in family.views if ref() is not None]
            for lazy in (self._root(), *alive(family.views)):
                lazy._stand_behind(written)

    def _stand_behind(self, written: bool) -> None:
        """Take the place of the real logits in the graph."""

    def _catch_up(self, real: Tensor) -> None:
        """Before an operation: take the place that the real logits have in the graph by now."""

    def _compute(self) -> Tensor:
        state = self._state
        # In the mode of the head, not of who reads them first. What has no gradient is no less fit to be written to.
        inference = not torch.compiler.is_compiling() and state.tensors[0].is_inference()
        with grad_mode(True, inference), outside(state):
            real = watch_gradient(state.logits(), state.calls)
            return real if self._shadow is None or self._is_view() else _laid_out(real, self._shadow)

    def _read(self) -> Tensor:
        """The values of a small view."""
        if self._values is None:
            self._values = self._compute()
            self._state.note_values()
        return self._values

    def _is_small(self) -> bool:
        """Whether this is a view of so few logits that reading is no reason to compute all."""
        # A graph drops what it does not use: there each view is made by itself.
        if not self._is_view():
            return False
        return self._shadow is None or 4 * self._shadow.numel() <= math.prod(self._root()._state.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, values = self._state, self._values if self._existing() is None else self._real
        if values is not None:
            return repr(values)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def _laid_out(real: Tensor, shadow: Tensor) -> Tensor:
    """With the strides that stock's logits would have; those made from hidden states have their classes last."""
    sizes = zip(real.shape, real.stride(), shadow.stride(), strict=True)
    if all(size == 1 or mine == stocks for size, mine, stocks in sizes):
        return real
    return torch.empty_strided(shadow.shape, shadow.stride(), dtype=real.dtype, device=real.device).copy_(real)


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


# The class of lazy logits, by whether the compiler is at work: `tensor` and `graphs` set it.
CLASSES: dict[bool, Any] = {}


def make_lazy(state: LazyState, origin: Origin | None = None, shadow: Tensor | None = None) -> Any:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled() and state.requires_grad:
        state = state.detach()
    # Graphs have no writes that would show: they need no shadow.
    return CLASSES[compiling]._wrap(state, origin, None if compiling else shadow)


@contextlib.contextmanager
def grad_mode(grad: bool, inference: bool) -> Iterator[None]:
    other = not torch.compiler.is_compiling() and inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if other else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


def note_passing(calls: Sequence[HeadCall], value: Any) -> None:
    """Note that gradients will pass by the logits, if ``value`` has some."""
    for call in calls:
        call.passed_by |= value.requires_grad


def state_of(logits: Any) -> LazyState | None:
    """What logits would be computed from; None where they are real."""
    lazy = isinstance(logits, LazyBase) and logits._existing() is None
    return logits._state if lazy else None


def made_of(state: LazyState, values: Iterable[Any]) -> None:
    """Say that ``values`` were made without the logits: wrappers wait for gradients, which come to these instead."""
    for value in values:
        if isinstance(value, Tensor):
            note_passing(state.calls, value)
            watch_gradient(value, state.calls)


def told(state: LazyState, func: Any, compute: Callable[[], Tensor]) -> Tensor:
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
    needed = func, state.settings.on_materialize, usage, state.requires_grad
    forbid_materialized(*needed)
    values_before = any(call.gave_values for call in state.calls)
    try:
        logits = compute()
    except StaleLogitsError:
        raise
    except Exception:  # memory, as a rule, for want of which the warning is wanted
        say_materialized(*needed)
        raise
    say_materialized(*needed, values_before=values_before)
    return logits
