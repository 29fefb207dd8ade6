"""How an operation of PyTorch with lazy logits among its arguments finds its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.core.callers import caller
from flce.huggingface.head_call import add_hook
from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import LazyBase, Source, grad_mode, is_lazy, made_of, make_lazy, note_passing, told
from flce.huggingface.lazy.elementwise import to_dtype
from flce.huggingface.lazy.fold import NoLazyFormError
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.lazy.tables import Operation
from flce.huggingface.usage import MaterializedLogitsWarning, name_of
from flce.huggingface.wrappers import asks_for_wrapper, is_wrapper_hook
from flce.torch_ops.frames import is_differentiated_forward, is_transformed


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with lazy logits among its arguments."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    if getattr(func, "__name__", None) in tables.REFLECTED and torch.compiler.is_compiling() and not is_lazy(args[0]):
        func, args = tables.REFLECTED[func.__name__], args[::-1]
    if is_transformed() and not torch.compiler.is_compiling():
        with private.clear_interpreter_stack():  # real logits are no part of the transform
            args, kwargs = realise(args, func), realise(kwargs, func)
        return func(*args, **kwargs)
    operation = None if is_differentiated_forward() else tables.OPERATIONS.get(func)
    if func in tables.BROADCAST:
        result = _broadcast(*args, **kwargs)
    elif args and is_lazy(args[0]):
        result = _of_lazy(args[0], func, operation, args[1:], kwargs)
    elif func in tables.COMMUTES and len(args) == 2 and not kwargs:
        result = _of_lazy(args[1], func, operation, args[:1], kwargs)
    else:
        result = NotImplemented
    return _of_real(func, args, kwargs) if result is NotImplemented else result


def _of_lazy(lazy: Any, func: Any, operation: Operation | None, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of lazy logits; NotImplemented where it takes the real ones."""
    if func is torch.Tensor.register_hook and lazy._state.calls and is_wrapper_hook(args[-1]):
        lazy._look_around()
        return add_hook(args[-1], lazy._state.calls)
    if func in tables.GRAPH and not torch.compiler.is_compiling():
        if asks_for_wrapper():
            with torch._C.DisableTorchFunctionSubclass():
                return func(lazy, *args, **kwargs)
        _check_graph(lazy, func)
        lazy._asked = True
        lazy._hooked.now |= name_of(func) != "grad_fn"
    real = lazy._existing()
    if func in tables.METADATA and isinstance(lazy, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy if real is None else real, *args, **kwargs)
    if real is not None:
        if lazy._moved():
            lazy._follow(func)
        return NotImplemented
    if func is torch.Tensor.__repr__:
        return LazyBase.__repr__(lazy)
    if func is torch.Tensor.__iter__:
        return iter(torch.unbind(lazy))
    if operation is None or lazy._state.one_class:
        return NotImplemented
    run, state, states, named = operation.run, lazy._state, _states(args), _states(kwargs)
    if operation.kind == "in place":
        # Not where other logits share the memory, which would have to change as well, nor where the change is to be
        # hidden from gradients.
        if lazy._viewed_source() is not None or lazy._viewed or (state.requires_grad and not torch.is_grad_enabled()):
            return NotImplemented
        result = _attempt(run, state, *states, **named)
        result = result if result is NotImplemented else _attempt(to_dtype, result, state.dtype)
        if result is NotImplemented or result.shape != state.shape:
            return NotImplemented
        source = _source_of_changed(lazy, result, func, states, named)
        lazy._become(result)
        lazy._source = source
        return lazy
    return _wrapped(lazy, func, operation, _attempt(run, state, *states, **named), states, named)


def _source_of_changed(lazy: Any, result: LazyState, func: Any, args: Any, kwargs: Any) -> Source | None:
    """What a copy comes from that is about to become `result`, in place. Its gradient still passes there if it can."""
    before = lazy._source
    several = any(isinstance(value, LazyState) for value in (*args, *kwargs.values()))
    if torch.compiler.is_compiling() or (before is None and not several):
        return None
    if before is None or several or not before.is_unchanged():
        note_passing(result.calls, result)
        return None

    def repeat(real: Tensor) -> Tensor:
        copy = before.repeat(real)
        func(copy, *args, **kwargs)
        return copy

    return _source(before.lazy, repeat, is_view=False)


def _broadcast(*tensors: Any) -> Any:
    """Lazy logits and tensors that are broadcast to their shape."""
    lazy = [tensor for tensor in tensors if is_lazy(tensor)]
    if len(lazy) != 1 or lazy[0]._existing() is not None:
        return NotImplemented
    shape = lazy[0].shape
    others = [tensor.shape for tensor in tensors if tensor is not lazy[0]]
    if any(len(other) > len(shape) for other in others) or torch.broadcast_shapes(shape, *others) != shape:
        return NotImplemented
    return tuple([tensor if tensor is lazy[0] else tensor.expand(shape) for tensor in tensors])


def _of_several(state: LazyState, shadow: Tensor | None = None) -> Any:
    """Lazy logits that come from several others."""
    lazy = make_lazy(state.copied(), None, shadow)
    note_passing(state.calls, lazy)
    return lazy


def _of_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation of real logits, in which lazy ones are replaced by them."""
    if func in tables.LIKE:
        return func(*_stand_ins(args), **{"memory_format": torch.contiguous_format, **kwargs})
    if func in tables.NEW:
        return func(*_stand_ins(args[:1]), *args[1:], **kwargs)
    if func in tables.AS and not is_lazy(args[0]):
        return func(args[0], *_stand_ins(args[1:]), **_stand_ins(kwargs))
    reads = func in tables.READING and "out" not in kwargs
    real, named = realise(args, func, small=reads), realise(kwargs, func, small=reads)
    written = [] if reads else [value for value in (*args, *kwargs.values()) if is_lazy(value)]
    for lazy in written:
        lazy._relatives()  # views and copies of the memory as it is now: it may be written to, or exchanged
    result = func(*real, **named)
    for lazy in written:
        lazy._follow(func)
    if args and result is real[0]:  # in place, or there was nothing to do
        return args[0]
    return kwargs["out"] if "out" in kwargs and result is named["out"] else result


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except NoLazyFormError:
        return NotImplemented
    except TypeError as error:
        # Arguments that we do not know: torch will judge them. An error from further in is one.
        if torch.compiler.is_compiling() or error.__traceback__ is None or error.__traceback__.tb_next is None:
            return NotImplemented
        raise


def _states(value: Any) -> Any:
    """Arguments with lazy logits replaced by their states; by the real ones where they exist."""

    def state_of(lazy: Any) -> Any:
        real = lazy._existing()
        return lazy._state if real is None else real

    return _replaced(value, state_of)


# Asked for before Mapping, which Python code answers for.
_SINGLE = (Tensor, str, int, float, torch.dtype, torch.device, slice, type(None), type(Ellipsis))


def _replaced(value: Any, replacement: Callable[[Any], Any]) -> Any:
    """Replace the lazy logits in arguments, however nested."""
    if isinstance(value, LazyBase):
        return replacement(value)
    if isinstance(value, _SINGLE):
        return value
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, replacement) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _replaced(item, replacement) for key, item in value.items()}
    return value


def _wrapped(lazy: LazyBase, func: Any, operation: Operation, result: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, with states made lazy logits that remember what they are views of."""
    if type(result) is tuple:
        last: list[Any] = [None, ()]

        def piece(i: int) -> Callable[[Tensor], Tensor]:
            def of(real: Tensor) -> Tensor:
                if last[0] is not real:  # all pieces are cut at once
                    last[:] = real, func(real, *args, **kwargs)
                return last[1][i]

            return of

        return tuple(_view(lazy, part, piece(i)) for i, part in enumerate(result))
    if not isinstance(result, LazyState):
        made_of(lazy._state, result if isinstance(result, tuple) else (result,))
        return result
    if (
        operation.kind == "view"
        and result is not lazy._state
        and not (func is torch.Tensor.__getitem__ and _copies(args[0]))
    ):
        return _view(lazy, result, lambda real: func(real, *args, **kwargs))
    contiguous = lazy._viewed_source() is None if lazy._shadow is None else lazy._shadow.is_contiguous()
    if result is lazy._state and (func is not torch.Tensor.contiguous or contiguous):
        return lazy  # as stock: nothing to do
    if result.ops == lazy._state.ops:
        result = result.copied()
    shadow = None
    if operation.kind == "elementwise" and lazy._shadow is not None and not lazy._shadow.is_contiguous():
        shadow = torch.empty_like(lazy._shadow, dtype=result.dtype)  # keeps the strides
    if any(isinstance(value, LazyState) for value in (*args, *kwargs.values())):
        return _of_several(result, shadow)
    return make_lazy(result, _source(lazy, lambda real: func(real, *args, **kwargs), is_view=False), shadow)


def _source(lazy: LazyBase, repeat: Callable[[Tensor], Tensor], is_view: bool) -> Source:
    """With ``repeat`` in today's grad mode."""
    if torch.compiler.is_compiling():
        return Source(lazy, repeat, is_view)
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def repeated(real: Tensor) -> Tensor:
        with grad_mode(*mode):
            return repeat(real)

    return Source(lazy, repeated, is_view)


def _view(lazy: LazyBase, state: LazyState, repeat: Callable[[Tensor], Tensor]) -> Any:
    """A view, or the copy that it is where the strides allow no view."""
    if lazy._shadow is None:
        return make_lazy(state, _source(lazy, repeat, is_view=True))
    with private.disable_torch_function():
        shadow = repeat(lazy._shadow)
    is_view = shadow.untyped_storage()._cdata == lazy._shadow.untyped_storage()._cdata
    if not is_view:
        state = state.copied()
    return make_lazy(state, _source(lazy, repeat, is_view), shadow if is_view else None)


def _copies(index: Any) -> bool:
    """Whether indexing copies, rather than views."""
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, list) or (isinstance(item, Tensor) and item.dim() > 0) for item in items)


def _check_graph(lazy: LazyBase, func: Any) -> None:
    """RuntimeError for a hook that would wait in vain for a gradient that is computed without these logits."""
    if not any(call.passed_by for call in lazy._state.calls):
        return
    message = (
        f"logits.{name_of(func)} after the loss, or after something else was made from the logits without computing "
        "them: its gradient does not pass through them. Call logits.materialize() before that, and use what it returns."
    )
    if name_of(func) == "grad_fn":  # perhaps only looked at
        caller().warn(message, MaterializedLogitsWarning)
    else:
        raise RuntimeError(message)


def realise(value: Any, func: Any, detach: bool = False, small: bool = False) -> Any:
    """Replace lazy logits by real ones in arguments, however nested, and say so the first time.

    Args:
        value: arguments of ``func``.
        func: what needs the logits.
        detach: without their autograd graph.
        small: small views may be replaced by values of their own.
    """

    def real(lazy: Any) -> Tensor:
        unknown = lazy._existing() is None
        apart = small and unknown and lazy._is_small()
        compute = lazy._read if apart else lazy._make_real
        untold = unknown and not (apart and lazy._values is not None)
        logits = told(lazy._state, func, compute) if untold else compute()
        if apart or detach:
            note_passing(lazy._state.calls, lazy._state)
        return logits.detach() if detach and not apart else logits

    return _replaced(value, real)


def _stand_ins(value: Any) -> Any:
    """Replace lazy logits by one element, expanded: enough for operations that only read metadata."""

    def one(lazy: Any) -> Tensor:
        like = _states(lazy)
        return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)

    return _replaced(value, one)
