"""`dispatch`: runs a function of PyTorch with lazy logits among its arguments; called by the classes of lazy logits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.core import private
from flce.core.log import find_caller
from flce.huggingface.head_call import add_wrapper_hook
from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import (
    LazyBase,
    Origin,
    View,
    is_lazy,
    live_objects,
    make_lazy,
    materialize_and_report,
    note_bypassing_gradient,
    register_results,
)
from flce.huggingface.lazy.elementwise import to_dtype
from flce.huggingface.lazy.indexing import with_token_sizes
from flce.huggingface.lazy.normal_form import NoLazyFormError
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.lazy.tables import Operation
from flce.huggingface.usage import MaterializedLogitsWarning, name_of
from flce.huggingface.wrappers import calling_module, is_wrapper_hook
from flce.ops.dtensors import full_tensor

_GRAD: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function with lazy logits among its arguments, on their states if possible, else on the real logits."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    compiling = torch.compiler.is_compiling()
    if compiling and getattr(func, "__name__", None) in tables.REFLECTED and not is_lazy(args[0]):
        func, args = tables.REFLECTED[func.__name__], args[::-1]
    if not compiling and private.peek_interpreter_stack() is not None:
        with private.clear_interpreter_stack():  # the transform does not differentiate the real logits
            args, kwargs = materialize_arguments(args, func), materialize_arguments(kwargs, func)
        return func(*args, **kwargs)
    operation = None if private.forward_ad._current_level >= 0 else tables.OPERATIONS.get(func)
    result = NotImplemented
    if func is torch.broadcast_tensors:
        result = _broadcast(*args, **kwargs)
    elif args and isinstance(args[0], LazyBase):
        result = _run_on_state(args[0], func, operation, args[1:], kwargs)
    elif func in tables.COMMUTATIVE and len(args) == 2 and not kwargs:
        result = _run_on_state(args[1], func, operation, args[:1], kwargs)
    elif operation is not None and operation.kind == "of views" and args:
        first, *others = args[0] or (None,)
        if isinstance(first, LazyBase) and all([is_lazy(other) and other._family is first._family for other in others]):  # noqa: C419
            result = _run_on_state(first, func, operation, (others, *args[1:]), kwargs)
    return _run_on_real(func, args, kwargs) if result is NotImplemented else result


def _run_on_state(lazy: Any, func: Any, operation: Operation | None, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function on the state of lazy logits. Return NotImplemented if it needs the real logits."""
    real = lazy._get_real()
    if real is not None:
        lazy._update_before_operation(real)
    if lazy._state.calls and private.saved_tensors_hooks(True):  # these may be a checkpoint's
        real = lazy._real_for_operation()
    if lazy._state.teacher is not None and func not in tables.OF_DIFFERENCES:
        operation = None
    has_form = lazy._state.class_dim == -1 or (lazy._state.class_dim == 1 and func in (F.cross_entropy, F.nll_loss))
    if operation is None or not has_form:
        return _run_unlisted(lazy, real, func, args, kwargs)
    if real is not None:
        return NotImplemented
    meta_tensor = lazy._meta_tensor
    is_contiguous = lazy._view is None if meta_tensor is None else meta_tensor.is_contiguous()
    if operation.kind == "elementwise" and not is_contiguous and meta_tensor is not None and _is_permuted(meta_tensor):
        return NotImplemented
    state, states, keyword_states = lazy._state, args, kwargs
    items = [item for value in args for item in (value if type(value) is tuple else (value,))]
    has_plain_arguments = not kwargs and all([isinstance(item, _PLAIN_TYPES) for item in items])  # noqa: C419 - faster
    if not all([type(item) in _FLAT_TYPES for item in (*items, *kwargs.values())]):  # noqa: C419 - faster
        states, keyword_states = _states_or_real(args), _states_or_real(kwargs)
        if any(isinstance(x, LazyState) and x.class_dim != -1 for x in (*states, *keyword_states.values())):
            return NotImplemented
    if state.division is not None and state.is_dtensor:
        states = tuple([full_tensor(value) for value in states])
        keyword_states = {name: full_tensor(value) for name, value in keyword_states.items()}
    try:
        result = operation.run(state, *states, **keyword_states)
    except NoLazyFormError:
        return NotImplemented
    except TypeError as error:
        # A TypeError of the call itself: PyTorch has to check the arguments. Errors from within the operation are real.
        if torch.compiler.is_compiling() or error.__traceback__ is None or error.__traceback__.tb_next is None:
            return NotImplemented
        raise
    if type(result) is tuple:
        views: Any = lambda x: func(x, *states, **keyword_states)  # noqa: E731
        if not torch.compiler.is_compiling():  # compute all views in one call
            views = functools.lru_cache(maxsize=1)(views)
        cuts = [lambda x, index=index: views(x)[index] for index in range(len(result))]
        return tuple([_make_view(lazy, view, cut, is_single=False) for view, cut in zip(result, cuts, strict=True)])
    if not isinstance(result, LazyState):
        register_results(state, (result,))
        return result if state.division is None else state.division.place_result(result)
    if not has_plain_arguments and any(isinstance(value, LazyState) for value in (*states, *keyword_states.values())):
        note_bypassing_gradient(result.calls, result)  # a hook on the other logits would never run
    if result is state and (func is not torch.Tensor.contiguous or is_contiguous):
        return lazy  # as in stock, the operation changes nothing
    if operation.kind == "in place":
        is_error = func is torch.Tensor.detach_ and lazy._view is not None  # PyTorch cannot detach views in place
        return NotImplemented if is_error or state.is_outside_checkpoint else _change_in_place(lazy, result)
    is_view = operation.kind == "view"
    if is_view and func is torch.Tensor.__getitem__ and not has_plain_arguments:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        # An index with lists or tensors copies.
        is_view = not any(isinstance(item, list) or (isinstance(item, Tensor) and item.dim() > 0) for item in index)
        if is_view and not torch.compiler.is_compiling():  # a tensor in the index may be written to later
            states = (tuple([int(item) if isinstance(item, Tensor) else item for item in index]),)
    if is_view:
        return _make_view(lazy, result, lambda x: func(x, *states, **keyword_states))
    copy = (lambda x: func(x, *states, **keyword_states)) if has_plain_arguments else None
    return _make_copy(lazy, result.as_copy() if result.ops == state.ops else result, copy)


def _run_unlisted(lazy: Any, real: Tensor | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run functions outside of the table of operations: metadata, hooks, ``grad_fn``. Else return NotImplemented."""
    if lazy._recomputation is not None and func == _GRAD.__get__:
        return lazy._pass_gradients()
    if func == _REQUIRES_GRAD.__set__ and args == (True,) and calling_module() == "torch.utils.checkpoint":
        return None if real is None and lazy._become_recomputed() else NotImplemented
    if func in tables.METADATA and isinstance(lazy, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy if real is None else real, *args, **kwargs)
    if func is torch.Tensor.register_hook and lazy._state.calls and is_wrapper_hook(args[-1]):
        return add_wrapper_hook(args[-1], lazy._state.calls)
    if func in tables.GRAPH_ACCESS and not torch.compiler.is_compiling():
        return _run_graph_access(lazy, func, args, kwargs)
    if real is None and func is torch.Tensor.__repr__:
        return LazyBase.__repr__(lazy)
    if real is None and func is torch.Tensor.__iter__:
        return iter(torch.unbind(lazy))
    if real is None and func is torch.Tensor.requires_grad_ and (args or kwargs) in ((), {}, (True,)):
        return lazy if lazy._state.requires_grad else NotImplemented
    return NotImplemented


def _run_graph_access(lazy: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Set a hook of a user on the real logits, or return their ``grad_fn``."""
    has_no_node = lazy._real is None and not lazy._state.requires_grad
    # These wrappers only test whether the tensor has a `grad_fn`.
    is_tested = calling_module() in ("torch.nn.parallel.distributed", "deepspeed.runtime.utils")
    if (has_no_node and isinstance(lazy, Tensor)) or is_tested:
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy, *args, **kwargs)
    is_bypassed = lazy._family.is_bypassed or any(call.has_bypassing_gradient for call in lazy._state.calls)
    if is_bypassed:
        message = (
            f"logits.{name_of(func)} after the loss, or after something else was computed from the logits without "
            "storing them: its gradient does not pass through the logits. Call logits.materialize() before that, and "
            "use its result."
        )
        if name_of(func) != "grad_fn":
            raise RuntimeError(message)
        find_caller().warn(message, MaterializedLogitsWarning)  # the caller may only print it
    if lazy._get_real() is None:
        materialize_and_report(lazy._state, func, lazy._materialize)
    lazy._make_views_real()
    if name_of(func) != "grad_fn":
        lazy._family.hooks.add(name_of(func))
    if not is_bypassed:
        lazy._root()._make_copies_real()
    result = func(lazy._real, *args, **kwargs)
    lazy._update_nodes(always=True)
    return result


def _is_permuted(meta_tensor: Tensor) -> bool:
    """Return True if a copy of stock logits with these strides is not contiguous."""
    with private.disable_torch_function():
        return not torch.empty_like(meta_tensor).is_contiguous()


def _change_in_place(lazy: Any, result: LazyState) -> Any:
    """Replace the states of a family after an in-place operation. Return NotImplemented if members differ."""
    family, state = lazy._family, lazy._state
    try:
        result = to_dtype(result, state.dtype)
    except NoLazyFormError:
        return NotImplemented
    members = [lazy._root(), *live_objects(family.views)]
    are_alike = all([m._is_full() and m._state.requires_grad == result.requires_grad for m in members])  # noqa: C419
    is_without_gradient = state.requires_grad and not torch.is_grad_enabled()
    has_other_members = family.has_views or (len(members) > 1 and not are_alike)
    if is_without_gradient or result.shape != state.shape or has_other_members:
        return NotImplemented
    family.forget_copies()
    lazy._root()._leave_origin()
    # In stock code the gradient of another member passes through this one or not: it depends on the head's bias.
    family.is_bypassed = len(members) > 1
    for member in members:
        member._set_state(result if member is lazy else with_token_sizes(result, member._state.shape[:-1]))
    return lazy


def _broadcast(*tensors: Any) -> Any:
    """Broadcast tensors to the shape of lazy logits, which must be the only ones and the largest."""
    lazy = [tensor for tensor in tensors if is_lazy(tensor)]
    if len(lazy) != 1 or lazy[0]._real_for_operation() is not None:
        return NotImplemented
    shape = lazy[0].shape
    others = [tensor.shape for tensor in tensors if tensor is not lazy[0]]
    if any(len(other) > len(shape) for other in others) or torch.broadcast_shapes(shape, *others) != shape:
        return NotImplemented
    return tuple([tensor if tensor is lazy[0] else tensor.expand(shape) for tensor in tensors])


def _run_on_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function with the real logits instead of the lazy logits in its arguments."""
    position = tables.READS_METADATA.get(func)
    if position is not None and [index for index, value in enumerate(args) if is_lazy(value)] == [position]:
        like = _states_or_real(args[position])
        expanded = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
        return func(*args[:position], expanded, *args[position + 1 :], **kwargs)
    only_reads = func in tables.READ_ONLY and "out" not in kwargs
    real = materialize_arguments(args, func, allow_small_views=only_reads)
    keyword_values = materialize_arguments(kwargs, func, allow_small_views=only_reads)
    written = [] if only_reads else [value for value in (*args, *kwargs.values()) if is_lazy(value)]
    for lazy in written:
        lazy._make_views_real()
    result = func(*real, **keyword_values)
    for lazy in written:
        lazy._update_nodes(writers=written)
    if args and result is real[0]:  # an in-place operation, or one that changes nothing
        return args[0]
    return kwargs["out"] if "out" in kwargs and result is keyword_values["out"] else result


def _states_or_real(value: Any) -> Any:
    """Replace lazy logits in arguments by the real logits if they exist, else by their states."""

    def state_of(lazy: Any) -> Any:
        real = lazy._real_for_operation()
        return lazy._state if real is None else real

    return _map_lazy_logits(value, state_of)


# Types of arguments that cannot contain lazy logits.
_PLAIN_TYPES = (str, int, float, torch.dtype, torch.device, slice, type(None), type(Ellipsis))
_FLAT_TYPES = {bool, Tensor, torch.nn.Parameter, *_PLAIN_TYPES}


def _map_lazy_logits(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """Replace the lazy logits in nested arguments."""
    if isinstance(value, LazyBase):
        return replacement(value)
    if isinstance(value, (tuple, list)):
        items = [x if type(x) in _FLAT_TYPES else _map_lazy_logits(x, replacement) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: x if type(x) in _FLAT_TYPES else _map_lazy_logits(x, replacement) for key, x in value.items()}
    return value


def _make_copy(lazy: LazyBase, state: LazyState, copy: Callable[[Tensor], Tensor] | None) -> Any:
    """Return a copy with this state. `copy` computes it from real logits; None: its arguments may change."""
    copied = make_lazy(state)
    if copied._node is not None and not torch.compiler.is_compiling():
        copied._origin = Origin(lazy, copy)
        if copy is None:
            copied._leave_origin()
        else:
            lazy._family.copies.append(weakref.ref(copied))
    return copied


def _make_view(lazy: LazyBase, state: LazyState, cut: Callable[[Tensor], Tensor], is_single: bool = True) -> Any:
    """Return a view, or a copy if the strides do not allow a view. ``is_single``: False for one of several views."""
    root, is_full = (lazy, True) if lazy._view is None else (lazy._view.root, lazy._view.is_full)
    before = lazy._meta_tensor
    if before is None:
        lazy._family.has_views = True
        return make_lazy(state, View(root, lazy, cut, None, False))
    with private.disable_torch_function():
        meta_tensor = cut(before)
    if meta_tensor.untyped_storage()._cdata != before.untyped_storage()._cdata:
        return _make_copy(lazy, state.as_copy(), cut)
    has_all_entries = meta_tensor.is_contiguous() and meta_tensor.numel() == before.numel()
    has_all_entries &= meta_tensor.shape[-1:] == before.shape[-1:]  # also if there are no tokens
    is_full = is_full and is_single and state.class_dim == -1 and has_all_entries
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return make_lazy(state, View(root, lazy, cut, mode, is_full), meta_tensor)


def materialize_arguments(value: Any, func: Any, detach: bool = False, allow_small_views: bool = False) -> Any:
    """Replace lazy logits by real logits in nested arguments of ``func``. Report computed logits.

    ``allow_small_views``: whether to compute only the values of small views, in separate memory.
    """

    def real(lazy: Any) -> Tensor:
        is_unread = lazy._get_real() is None
        if detach:
            lazy._refuse_stale_node()
        reads_view_alone = allow_small_views and is_unread and lazy._is_small_view()
        compute = lazy._compute if reads_view_alone else lazy._materialize
        logits = materialize_and_report(lazy._state, func, compute) if is_unread else compute()
        if reads_view_alone or detach:
            note_bypassing_gradient(lazy._state.calls, lazy._state)
        return logits.detach() if detach and not reads_view_alone else logits

    return _map_lazy_logits(value, real)
