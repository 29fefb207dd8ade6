"""How an operation of PyTorch with lazy logits among its arguments finds its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.core.callers import caller
from flce.huggingface.head_call import add_hook
from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import LazyBase, Origin, Step, alive, is_lazy, made_of, make_lazy, note_passing, told
from flce.huggingface.lazy.elementwise import to_dtype
from flce.huggingface.lazy.fold import NoLazyFormError
from flce.huggingface.lazy.indexing import of_sizes
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.lazy.tables import Operation
from flce.huggingface.staleness import versions_of
from flce.huggingface.usage import MaterializedLogitsWarning, name_of
from flce.huggingface.wrappers import asks_for_wrapper, is_in_nested_checkpoints, is_wrapper_hook


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with lazy logits among its arguments."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    compiling = torch.compiler.is_compiling()
    if compiling and getattr(func, "__name__", None) in tables.REFLECTED and not is_lazy(args[0]):
        func, args = tables.REFLECTED[func.__name__], args[::-1]
    if not compiling and private.peek_interpreter_stack() is not None:
        with private.clear_interpreter_stack():  # real logits are no part of the transform
            args, kwargs = realise(args, func), realise(kwargs, func)
        return func(*args, **kwargs)
    operation = None if private.forward_mode._current_level >= 0 else tables.OPERATIONS.get(func)
    result = NotImplemented
    if func in tables.BROADCAST:
        result = _broadcast(*args, **kwargs)
    elif args and isinstance(args[0], LazyBase):
        result = _of_lazy(args[0], func, operation, args[1:], kwargs)
    elif func in tables.COMMUTES and len(args) == 2 and not kwargs:
        result = _of_lazy(args[1], func, operation, args[:1], kwargs)
    return _of_real(func, args, kwargs) if result is NotImplemented else result


def _of_lazy(lazy: Any, func: Any, operation: Operation | None, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of lazy logits; NotImplemented where it takes the real ones."""
    real = lazy._existing()
    if real is not None:
        lazy._catch_up(real)
    calls = lazy._state.calls  # empty in a graph
    # The recomputation of a checkpoint within a checkpoint is given real logits.
    nested = (
        calls and private.saved_tensors_hooks(True) and any(c.is_outside for c in calls) and is_in_nested_checkpoints()
    )
    if operation is None or lazy._state.one_class or nested:
        return _unlisted(lazy, real, func, args, kwargs)
    if real is not None and not _repeats_checkpoint(lazy):
        return NotImplemented
    state, states, named, plain, simple = lazy._state, args, kwargs, True, not kwargs
    for value in args:  # most have no lazy logits in them
        items = value if type(value) is tuple else (value,)
        simple = simple and all([isinstance(item, _PLAIN) for item in items])  # noqa: C419 - faster
    if not simple:
        states, named = _states(args), _states(kwargs)
        plain = not any([isinstance(value, LazyState) for value in (*states, *named.values())])  # noqa: C419 - faster
    try:
        result = operation.run(state, *states, **named)
    except NoLazyFormError:
        return NotImplemented
    except TypeError as error:
        # Arguments that we do not know: torch will judge them. An error from further in is one.
        if torch.compiler.is_compiling() or error.__traceback__ is None or error.__traceback__.tb_next is None:
            return NotImplemented
        raise
    if type(result) is LazyState:
        if result is state and (func is not torch.Tensor.contiguous or _is_contiguous(lazy)):
            return lazy  # as stock: nothing to do
        if operation.kind == "in place":
            return _changed(lazy, result, _step(func, operation.run, states, named), plain)
        step = _step(func, operation.run, states, named)
        if operation.kind == "view" and (simple or func is not torch.Tensor.__getitem__ or not _copies(args[0])):
            return _view(lazy, result, step)
        return _copy(lazy, result, step if plain else None, keeps_strides=operation.kind == "elementwise")
    if type(result) is tuple:
        steps = _pieces(func, operation.run, states, named, len(result))
        return tuple([_view(lazy, part, step) for part, step in zip(result, steps, strict=True)])
    made_of(state, (result,))
    return result


def _step(func: Any, run: Any, args: Any, named: Any, piece: int | None = None) -> Step:
    if torch.compiler.is_compiling():
        return Step(func, run, args, named, piece, None, [])
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return Step(func, run, args, named, piece, mode, [(tensor, versions_of(tensor)) for tensor in tensors])


def _pieces(func: Any, run: Any, args: Any, named: Any, count: int) -> list[Step]:
    """A step for each of several results; all of them are cut at once."""
    last: dict[bool, tuple[Any, Any]] = {}

    def once(function: Any) -> Callable[..., Any]:
        def cut(first: Any, *args: Any, **named: Any) -> Any:
            kind = isinstance(first, LazyState)
            if kind not in last or last[kind][0] is not first:
                last[kind] = first, function(first, *args, **named)
            return last[kind][1]

        return cut

    parts = once(func), once(run)
    return [_step(*parts, args, named, piece) for piece in range(count)]


def _unlisted(lazy: Any, real: Tensor | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What is not in the table of operations: metadata, hooks, the place in the graph; else NotImplemented."""
    if func in tables.METADATA and isinstance(lazy, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy if real is None else real, *args, **kwargs)
    if func is torch.Tensor.register_hook and lazy._state.calls and is_wrapper_hook(args[-1]):
        return add_hook(args[-1], lazy._state.calls)
    if func in tables.GRAPH and not torch.compiler.is_compiling():
        return _of_graph(lazy, func, args, kwargs)
    if real is None and func is torch.Tensor.__repr__:
        return LazyBase.__repr__(lazy)
    if real is None and func is torch.Tensor.__iter__:
        return iter(torch.unbind(lazy))
    if real is None and func is torch.Tensor.requires_grad_ and (args or kwargs) in ((), {}, (True,)):
        return lazy if lazy._state.requires_grad else NotImplemented
    if real is None and func is torch.Tensor.detach_:
        return _detach(lazy)
    return NotImplemented


def _of_graph(lazy: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook of a user, or ``grad_fn``: of the real logits, which copies are made from then."""
    nowhere = lazy._real is None and not lazy._state.requires_grad
    if (nowhere and isinstance(lazy, Tensor)) or asks_for_wrapper():
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy, *args, **kwargs)
    _check_graph(lazy, func)
    if lazy._existing() is None:
        told(lazy._state, func, lazy._make_real)
    lazy._await_gradient()
    lazy._family.make_real()
    lazy._family.hooked.now |= name_of(func) != "grad_fn"
    result = func(lazy._real, *args, **kwargs)
    lazy._follow(always=True)
    return result


def _detach(lazy: Any) -> Any:
    """``detach_()``, which changes no value. Of a view it is an error, PyTorch's."""
    if lazy._is_view():
        with private.disable_torch_function():
            lazy._shadow.detach_()
    if lazy._family.has_views or any(True for _ in alive(lazy._family.views)):  # whose gradients still come
        return NotImplemented
    lazy._become(lazy._state.detach())
    lazy._origin, lazy._family.copies = None, []
    return lazy


def _repeats_checkpoint(lazy: Any) -> bool:
    """Whether logits that exist are to be taken for lazy ones.

    In a checkpoint around code that uses logits from outside, the logits may have been lazy in the first pass, and
    have been read since.
    """
    family = lazy._family
    outside = not torch.compiler.is_compiling() and any(call.is_outside for call in lazy._state.calls)
    from_function = lazy._real.requires_grad != lazy._state.requires_grad  # an autograd.Function has returned them
    return outside and not from_function and not family.hooked.anywhere() and not family.is_written()


def _is_contiguous(lazy: Any) -> bool:
    return not lazy._is_view() if lazy._shadow is None else bool(lazy._shadow.is_contiguous())


def _changed(lazy: Any, result: LazyState, step: Step, plain: bool) -> Any:
    """Lazy logits after an operation in place, which is recorded once for the family."""
    family, root, state = lazy._family, lazy._root(), lazy._state
    hidden = state.requires_grad and not torch.is_grad_enabled()  # from gradients
    if hidden or family.memory is not None or not family.allows_change(root._state.requires_grad):
        return NotImplemented
    try:
        result = to_dtype(result, state.dtype)
    except NoLazyFormError:
        return NotImplemented
    if result.shape != state.shape or (root is not lazy and not plain):
        return NotImplemented
    if root is not lazy:  # of a view of all logits, in their order
        shadow = lazy._shadow
        if shadow.numel() != root._shadow.numel() or not (shadow.is_contiguous() and root._shadow.is_contiguous()):
            return NotImplemented
        result = of_sizes(result, root._state.shape[:-1])
    if result.requires_grad != root._state.requires_grad and (root is not lazy or family.views):
        return NotImplemented
    origin = root._origin
    if origin is not None:  # of a copy
        if plain and origin.is_unchanged():
            steps = () if root is lazy else lazy._origin.steps

            def change(real: Tensor) -> Tensor:
                part = real
                for view in steps:
                    part = view.of_real(part)
                step.of_real(part)
                return real

            origin = replace(origin, steps=(*origin.steps, replace(step, func=change, args=(), named={})))
        else:
            note_passing(result.calls, result)
            origin = None
    family.changes, family.copies = family.changes + 1, []
    root._become(result)
    root._origin, root._changes = origin, family.changes
    for view in alive(family.views):
        if view is not root:
            view._become(view._origin.state())
            view._changes, view._values = family.changes, None
    lazy._existing()
    return lazy


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
        lazy._family.make_real()
    result = func(*real, **named)
    for lazy in written:
        lazy._follow()
    if args and result is real[0]:  # in place, or there was nothing to do
        return args[0]
    return kwargs["out"] if "out" in kwargs and result is named["out"] else result


def _states(value: Any) -> Any:
    """Arguments with lazy logits replaced by their states; by the real ones where they exist."""

    def state_of(lazy: Any) -> Any:
        real = lazy._existing()
        return lazy._state if real is None or _repeats_checkpoint(lazy) else real

    return _replaced(value, state_of)


# Asked for before Mapping, which Python code answers for.
_SINGLE = (Tensor, str, int, float, torch.dtype, torch.device, slice, type(None), type(Ellipsis))
# Arguments without lazy logits in them.
_PLAIN = (str, int, float, torch.dtype, torch.device, slice, type(None), type(Ellipsis))


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


def _copy(lazy: LazyBase, result: LazyState, step: Step | None, keeps_strides: bool) -> Any:
    """Lazy logits with memory of their own. Without a step they come from several others."""
    if step is None or result.ops == lazy._state.ops:
        result = result.copied()
    shadow, origin = lazy._shadow if keeps_strides else None, lazy._origin
    if shadow is not None and ((origin is not None and origin.is_view) or not shadow.is_contiguous()):
        with private.disable_torch_function():
            shadow = torch.empty_like(shadow)
    made = make_lazy(result, None if step is None else Origin(lazy, (step,), False, lazy._family.changes), shadow)
    if step is None:
        note_passing(result.calls, made)
    return made


def _view(lazy: LazyBase, state: LazyState, step: Step) -> Any:
    """A view, or the copy that it is where the strides allow no view."""
    before, shadow = lazy._shadow, None
    if before is None:
        lazy._family.has_views = True
    else:
        with private.disable_torch_function():
            shadow = step.func(before, *step.args, **step.named)
        shadow = shadow if step.piece is None else shadow[step.piece]
        if shadow.untyped_storage()._cdata != before.untyped_storage()._cdata:
            return make_lazy(state.copied(), Origin(lazy, (step,), False, lazy._family.changes))
    origin = lazy._origin
    if origin is None or not origin.is_view:
        return make_lazy(state, Origin(lazy, (step,), True, lazy._family.changes), shadow)
    return make_lazy(state, replace(origin, steps=(*origin.steps, step)), shadow)


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
