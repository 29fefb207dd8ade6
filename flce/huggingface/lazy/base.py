"""`LazyBase`: the base class of both kinds of lazy logits, with their state, their views and the real logits."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flce.core.log import find_caller
from flce.huggingface.head_call import HeadCall, StaleLogitsError, register_wrapper_hooks, version_of
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.usage import report_materialized
from flce.huggingface.wrappers import current_checkpoint, suspend_checkpoint


class View(NamedTuple):
    """The relation of a view to the lazy logits whose memory it shares.

    Attributes:
        root: the lazy logits that own the memory.
        parent: the root, or the view from which this view was computed.
        cut: the function that computes the view from the real logits of the parent.
        mode: the grad mode and the inference mode of this function, or None within a graph.
        is_full: whether the view has all entries of the root, in order, and autograd allows writes to it.
    """

    root: LazyBase
    parent: LazyBase
    cut: Callable[[Tensor], Tensor]
    mode: tuple[bool, bool] | None
    is_full: bool


class Origin(NamedTuple):
    """The relation of an unread copy to the lazy logits that it was copied from, and the function that copies them."""

    parent: LazyBase
    copy: Callable[[Tensor], Tensor] | None


@dataclass(eq=False)
class Family:
    """Lazy logits and their views, which share one memory.

    Attributes:
        views: the members except the root.
        views_of_token: the views that `LazyBase._make_views_real` has computed, by the number of each of their tokens.
        num_computed: the number of `views` in `views_of_token`.
        hooks: names of the users' hooks on the gradient. Nodes of the autograd graph refer to this set.
        copies: unread copies that need a gradient.
        is_bypassed: whether a copy was read or changed: its gradient does not pass through these logits.
        has_views: whether views exist within a graph of ``torch.compile``, where `views` is not used.
        seen: the version of the real logits after the last operation.
        graph: the node of their memory in the autograd graph, at this version.
        is_written: whether the real logits were written to, or an autograd.Function has returned a member.
    """

    views: list[weakref.ref[Any]] = field(default_factory=list)
    views_of_token: dict[int, list[weakref.ref[Any]]] = field(default_factory=dict)
    num_computed: int = 0
    hooks: set[str] = field(default_factory=set)
    copies: list[weakref.ref[Any]] = field(default_factory=list)
    is_bypassed: bool = False
    has_views: bool = False
    seen: Any = None
    graph: Any = None
    is_written: bool = False

    def forget_copies(self) -> None:
        """Separate the existing copies before the values change."""
        for copy in live_objects(self.copies):
            copy._origin = None
        self.copies, self.is_bypassed = [], False


def live_objects(refs: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (live for live in [ref() for ref in refs] if live is not None)


def outside_checkpoint(state: LazyState) -> contextlib.AbstractContextManager[None]:
    """Return a context for computing real logits outside of a checkpoint, so that both of its passes use them."""
    return suspend_checkpoint() if state.is_outside_checkpoint else contextlib.nullcontext()


_lazy_families_of_checkpoint: weakref.WeakKeyDictionary[Any, set[Family]] = weakref.WeakKeyDictionary()
"""For each checkpoint: logits from outside of it that were lazy at their first use in its first pass."""


class LazyBase:
    """Lazy logits: a state, and the real logits after they were computed.

    If the real logits of one member of a family are computed, the real logits of the root are computed, and views of
    them for the members. So a write to one member is visible in all, as in stock. A copy belongs to another family.
    """

    _state: LazyState
    _real: Tensor | None
    _view: View | None
    _family: Family
    _origin: Origin | None = None
    # For the input of a function that a reentrant checkpoint computes again: see `LazyLogits._become_recomputed`.
    _recomputation: Any = None
    # The node in the autograd graph; None if the logits need no gradient; True for a leaf and under `torch.compile`.
    _node: Any = True
    # A meta tensor with the shape and strides of stock's logits, which distinguishes views from copies.
    _meta_tensor: Tensor | None

    def _init(self, state: LazyState, view: View | None, meta_tensor: Tensor | None) -> None:
        self._state, self._view, self._meta_tensor, self._real = state, view, meta_tensor, None
        self._family = Family() if view is None else view.root._family

    def _root(self) -> LazyBase:
        """Return the lazy logits that own the memory."""
        return self if self._view is None else self._view.root

    def _is_full(self) -> bool:
        return self._view is None or self._view.is_full

    def _set_state(self, state: LazyState) -> None:
        """Replace the state after an in-place operation."""
        self._state = state

    def materialize(self) -> Tensor:
        """Compute the real logits without a warning, or return them if they exist already.

        For a view, all logits are computed, because the view shares their memory. To compute only the logits of some
        tokens, copy the view: ``logits[:, -1].clone().materialize()``.

        Returns:
            An ordinary tensor of this object's shape, dtype and device, connected to the hidden states and
            the head in the autograd graph as stock logits are.

        Raises:
            RuntimeError: the hidden states or the head were changed since the model ran.
        """
        if self._get_real() is None and self._state.calls:
            self._state.calls[0].usage.materialized["materialize()"] += 1
            self._state.calls[0].usage.has_gradient_use |= self._state.requires_grad
        return self._materialize()

    @property
    def is_materialized(self) -> bool:
        """True if the real logits exist."""
        return self._get_real() is not None

    def _get_real(self) -> Tensor | None:
        """Return the real logits, or None if they do not exist."""
        if self._real is None and self._view is not None and self._view.root._get_real() is not None:
            self._compute_view()
        return self._real

    def _compute_view(self) -> None:
        """Compute this view, and the views between it and the root, from the real logits of the root."""
        missing: list[Any] = [self]
        while missing[-1]._view.parent._real is None:
            missing.append(missing[-1]._view.parent)
        # A view is computed from its parent, so that hooks on the parent receive the gradient of the view.
        with outside_checkpoint(self._root()._state):
            for lazy in reversed(missing):
                view = lazy._view
                with contextlib.nullcontext() if view.mode is None else grad_mode(*view.mode):
                    lazy._real = view.cut(view.parent._real)

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
            self._family.seen, self._family.graph = version_of(real), _graph_of_memory(real)
            self._leave_origin()

    def _leave_origin(self) -> None:
        """Note that the gradient of this copy, which is read or changed, does not pass through its origins."""
        origin, self._origin = self._origin, None
        while origin is not None:
            origin.parent._family.is_bypassed = True
            origin = origin.parent._root()._origin

    def _make_copies_real(self) -> None:
        """Compute the copies from these real logits, whose hooks their gradients then pass through."""
        copies, self._family.copies = self._family.copies, []
        for copied in live_objects(copies):
            origin, copied._origin = copied._origin, None
            with outside_checkpoint(copied._state), grad_mode(True, False):
                copied._set_real(origin.copy(origin.parent._materialize()))
            copied._family.hooks.update(self._family.hooks)
            copied._make_views_real()
            copied._update_nodes(always=True)
            copied._make_copies_real()

    def _make_views_real(self) -> None:
        """Compute the real tensors of all views before a possible write, if the real logits exist."""
        family = self._family
        if self._root()._real is not None:
            self._update_nodes()
            new, family.num_computed = family.views[family.num_computed :], len(family.views)
            for view in live_objects(new):
                with contextlib.suppress(RuntimeError):  # autograd no longer allows this view
                    view._get_real()
                for token in view._token_numbers():
                    family.views_of_token.setdefault(token, []).append(weakref.ref(view))

    def _token_numbers(self) -> set[int]:
        """Return the numbers of the tokens whose logits share memory with this view."""
        root: Any = self._root()
        meta_tensor, vocab_size = cast(Tensor, self._meta_tensor), root._state.vocab_size
        numbers = {(meta_tensor.storage_offset() - root._meta_tensor.storage_offset()) // vocab_size}
        for size, stride in zip(meta_tensor.shape, meta_tensor.stride(), strict=True):
            if stride >= vocab_size:  # a dimension of tokens
                numbers = {number + i * (stride // vocab_size) for number in numbers for i in range(size)}
        return numbers

    def _update_nodes(self, always: bool = False, writers: Sequence[LazyBase] = ()) -> None:
        """Update the nodes of the family after an operation on real logits that has written to them (or ``always``).

        ``writers``: arguments of the operation. Nodes of views of other tokens stay: their gradients do not change.
        """
        root, family = self._root(), self._family
        version = None if root._real is None else version_of(root._real)
        is_written, family.seen = version != family.seen, version
        if is_written:
            family.forget_copies()
            family.is_written, family.graph = True, _graph_of_memory(root._real)
        if is_written or always:
            writers = [lazy for lazy in writers if lazy._family is family]
            views: Iterable[weakref.ref[Any]] = family.views
            if writers and root._node is not None and not any(lazy._is_full() for lazy in writers):
                tokens = {token for lazy in writers for token in lazy._token_numbers()}
                views = {id(ref): ref for token in tokens for ref in family.views_of_token[token]}.values()
            for lazy in (root, *live_objects(views)):
                lazy._take_over_node(is_written)

    def _update_before_operation(self, real: Tensor) -> None:
        self._refuse_stale_node()
        self._update_nodes()
        if self._node is None and real.requires_grad:
            self._take_over_node(is_written=True)

    def _refuse_stale_node(self) -> None:
        """Raise RuntimeError within an ``autograd.Function`` that got these logits after a write through a real view of
        them. Nothing has noticed the write, so the gradient of the Function's input would leave it out."""
        family, real = self._family, self._root()._real
        if torch.is_grad_enabled() or self._node is None or real is None or version_of(real) == family.seen:
            return
        if _graph_of_memory(real) is not family.graph and (function := running_function(self)) is not None:
            raise RuntimeError(
                f"{function.__name__}.apply() of logits that were written to through a view, after they were computed: "
                "its gradient would leave out the write. Call logits.materialize() before the write, and use its result"
            )

    def _take_over_node(self, is_written: bool) -> None:
        """Move to the place of the real logits in the autograd graph."""

    def _real_for_operation(self) -> Tensor | None:
        """Return the real logits if an operation has to use them, or None if it has to use the lazy logits.

        Both passes of a checkpoint have to save the same tensors. So logits from outside of a checkpoint that were lazy
        at first stay lazy for all operations in it. A checkpoint within another checkpoint uses real logits.
        """
        real, family = self._get_real(), self._family
        checkpoint = current_checkpoint() if self._state.is_outside_checkpoint else None
        if checkpoint is None:
            return real
        lazy_families = _lazy_families_of_checkpoint.setdefault(checkpoint, set())
        if real is None and family not in lazy_families:
            others = [other for other, families in _lazy_families_of_checkpoint.items() if family in families]
            if not all(other.forward_completed for other in others):
                return materialize_and_report(self._state, "a checkpoint within another", self._materialize)
            lazy_families.add(family)
        is_used = family not in lazy_families or family.is_written or family.hooks
        return real if is_used else None

    def _compute(self) -> Tensor:
        state = self._state
        # Use the modes of the head's call, not of the first read. Writes to the logits may need gradients later, so
        # gradients are always enabled.
        inference = not torch.compiler.is_compiling() and state.tensors[0].is_inference()
        with grad_mode(True, inference), outside_checkpoint(state):
            return register_wrapper_hooks(state.logits(), state.calls)

    def _is_small_view(self) -> bool:
        """Return True for a view of so few logits that a read of it should not compute all logits."""
        # In a graph all views count as small, because the compiler removes unused results.
        if self._view is None:
            return False
        return self._meta_tensor is None or 4 * self._meta_tensor.numel() <= math.prod(self._view.root._state.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, real = self._state, self._get_real()
        if real is not None:
            return repr(real)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def _graph_of_memory(real: Tensor | None) -> Any:
    """Return the node of a tensor, or of the tensor whose view it is. A write through a view changes it."""
    if real is None or torch.compiler.is_compiling():
        return None
    return (real if real._base is None else real._base).grad_fn


def running_function(argument: Any) -> type | None:
    """Return the ``autograd.Function`` whose forward pass is running with this object as argument, or None."""
    # From PyTorch 2.14 on `apply` has no Python frame.
    functions = _functions_by_forward_code()
    frame: Any = sys._getframe(1)
    while frame is not None:
        function = functions.get(frame.f_code)
        values = () if function is None else frame.f_locals.values()
        if any(v is argument or (isinstance(v, tuple) and any(x is argument for x in v)) for v in values):
            return function
        frame = frame.f_back
    return None


def _functions_by_forward_code() -> dict[Any, type]:
    """Return the class of each ``autograd.Function`` of this process, by the code of its ``forward``."""
    functions: dict[Any, type] = {}
    classes: list[Any] = [torch.autograd.Function]
    while classes:
        function = classes.pop()
        classes += function.__subclasses__()
        functions[getattr(inspect.unwrap(function.forward), "__code__", None)] = function
    return functions


def is_lazy(value: Any) -> bool:
    """Return True if ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


def without_logits(outputs: Any) -> Any:
    """Return the outputs without lazy logits, and warn if there are any."""
    is_dict = isinstance(outputs, dict)
    values = outputs.values() if is_dict else outputs if type(outputs) in (tuple, list) else ()
    if not any(map(is_lazy, values)):
        return outputs
    find_caller().warn(
        "nn.DataParallel would gather the logits of all GPUs on one GPU, so a model patched by flce returns no logits "
        "in training with labels. Use torchrun or accelerate launch to train on several GPUs",
        UserWarning,
    )
    if is_dict:
        return type(outputs)(**{name: value for name, value in outputs.items() if not is_lazy(value)})
    return type(outputs)(None if is_lazy(value) else value for value in outputs)


# The class of lazy logits in eager mode (False) and under `torch.compile` (True). `tensor` sets it.
CLASS_BY_COMPILING: dict[bool, Any] = {}


def make_lazy(state: LazyState, view: View | None = None, meta_tensor: Tensor | None = None) -> Any:
    """Return lazy logits with this state: a plain object under the compiler, a tensor otherwise."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled() and state.requires_grad:
        state = state.detach()
    # The meta tensor is for views, which a graph does not need to distinguish from copies.
    return CLASS_BY_COMPILING[compiling]._wrap(state, view, None if compiling else meta_tensor)


@contextlib.contextmanager
def grad_mode(grad: bool, inference: bool) -> Iterator[None]:
    is_other_mode = not torch.compiler.is_compiling() and inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if is_other_mode else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


def note_bypassing_gradient(calls: Sequence[HeadCall], value: Any) -> None:
    """Note that a gradient will not pass through the logits, if ``value`` requires one."""
    for call in calls:
        call.has_bypassing_gradient |= value.requires_grad


def state_of(logits: Any) -> LazyState | None:
    """Return the state of lazy logits, or None for real ones."""
    is_unread = isinstance(logits, LazyBase) and logits._get_real() is None
    return logits._state if is_unread else None


def register_results(state: LazyState, values: Iterable[Any]) -> None:
    """Register values that were computed without the logits. Hooks of wrappers run for gradients of these values."""
    for value in values:
        if isinstance(value, Tensor):
            note_bypassing_gradient(state.calls, value)
            register_wrapper_hooks(value, state.calls)


def materialize_and_report(state: LazyState, func: Any, compute: Callable[[], Tensor]) -> Tensor:
    """Call ``compute`` for the logits that ``func`` needs. Count this, then warn or raise, as ``on_materialize`` says.

    If the logits can no longer be computed, no warning is given.
    """
    if torch.compiler.is_compiling():  # a graph has no frames of the caller, and a warning would end it
        return compute()
    if state.settings.on_materialize == "raise":
        report_materialized(state, func)
    try:
        logits = compute()
    except StaleLogitsError:
        raise
    except Exception:  # usually out of memory: the warning names the reason
        report_materialized(state, func)
        raise
    report_materialized(state, func)
    return logits
