"""Logits that have not been computed: the head's inputs, and what has been done to the logits since.

A :class:`LazyLogits` stands where ``hidden @ weight.T + bias`` would. It goes through what model code does
between the head and the loss (casts, scalar factors, tanh, reshapes, slices), becomes the fused loss at
``torch.nn.functional.cross_entropy``, and turns into real logits, once and with a warning, under anything
else.

Two classes carry the same state, because no single kind of object serves both eager mode and the compiler:

* :class:`LazyLogits`, in eager mode, is a tensor without storage (a wrapper subclass). So ``isinstance(x,
  torch.Tensor)`` holds for trainers and ``ModelOutput``. An object that only *claims* to be a tensor
  through ``__class__`` would be cast to one by C++ code that skips ``__torch_function__``
  (``autograd.Function.apply``, DDP, collectives) and crash. Ours has a ``grad_fn`` that leads to the hidden
  states and the head, and a ``__torch_dispatch__``, so such code gets right values and right gradients too.
* :class:`TracedLazyLogits`, under ``torch.compile``, is a plain Python object with ``__torch_function__``:
  the compiler cannot build a wrapper subclass within a graph, but follows plain objects with
  ``fullgraph=True``.

What the logits are made from, and what becomes of it, is in :mod:`.lazy_state`; what each torch operation does,
in :mod:`.lazy_ops`. Here: the classes, and how an operation finds its way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flce.huggingface import lazy_ops
from flce.huggingface.head_call import add_hook, keep_until_read, pass_gradient, watch_gradient, weights_of
from flce.huggingface.lazy_state import LazyState, StackState, State
from flce.huggingface.usage import ASKED_FOR, caller
from flce.huggingface.wrappers import ddp_hook, is_wrapper_hook


class MaterializedLogitsWarning(UserWarning):
    """An operation that has no lazy form has made the full logits."""


class MaterializedLogitsError(RuntimeError):
    """The same where ``patch_model(model, on_materialize="raise")`` forbids it."""


# -------------------------------------------------------------------------------------------------- classes


class LazyBase:
    """What both kinds of lazy logits share: the state, the real logits once they exist, and their views.

    Stock logits and their views share memory, so an in-place write to one shows in all. Lazy ones remember
    where they came from: the first write makes the root of the family real, the others views of that.
    """

    _state: State
    _real: Tensor | None
    # Where a view came from: its parent, and how to repeat the view on the parent's real logits.
    _source: tuple[LazyBase, Callable[[Tensor], Tensor]] | None
    _written: bool  # on the root of a family of views: written to in place
    _follows_source: bool  # on a view: `_real` is a view of the parent's real logits
    _viewed: bool  # has views
    _adopted: bool  # has the state of what it is a copy of, see `LazyLogits._adopt`
    # Of the shape and strides that stock's logits would have, without data: tells views from copies.
    _shadow: Tensor | None

    def _init(
        self,
        state: State,
        source: tuple[LazyBase, Callable[[Tensor], Tensor]] | None,
        shadow: Tensor | None = None,
    ) -> None:
        self._state, self._source, self._shadow = state, source, shadow
        self._real, self._written, self._follows_source, self._viewed, self._adopted = None, False, False, False, False
        if source is not None:
            source[0]._viewed = True

    def _become(self, state: State) -> None:
        """Change in place."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """Compute the real logits, or return them if they have been computed before. No warning is given.

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

    def _make_real(self) -> Tensor:
        real = self._existing()
        if real is None:
            real = self._compute()
            self._real = real
        return real

    def _compute(self) -> Tensor:
        return watch_gradient(self._state.logits(), self._state.calls)

    @property
    def is_materialized(self) -> bool:
        """Whether the real logits exist."""
        return self._existing() is not None

    def _existing(self) -> Tensor | None:
        if self._source is not None and not self._follows_source:
            parent, repeat = self._source
            # A view of real logits is one of theirs; one that was read before they were written to, as well.
            if self._root()._written or (self._real is None and parent._existing() is not None):
                self._real, self._follows_source = repeat(parent._make_real()), True
        return self._real

    def _is_foreign(self) -> bool:
        """Whether the state is not what this object stands for in the autograd graph."""
        return False

    def _root(self) -> LazyBase:
        root: LazyBase = self
        while root._source is not None:
            root = root._source[0]
        return root

    def _prepare_write(self, func: Any) -> None:
        """Before an in-place operation: from now on this family's real logits share memory."""
        root = self._root()
        if root._existing() is None:
            _say_materialized(func, root._state)
        root._make_real()
        root._written = True

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, real = self._state, self._existing()
        if real is not None:
            return repr(real)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def _contiguous_shadow(state: State) -> Tensor:
    return torch.empty(state.shape, dtype=state.dtype, device="meta")


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. Made by a patched output embedding."""

    @staticmethod
    def _wrap(state: State, source: Any = None, shadow: Tensor | None = None) -> LazyLogits:
        shadow = _contiguous_shadow(state) if shadow is None else shadow
        lazy: LazyLogits = _InGraph.apply(None, state, shadow, *state.tensors)
        lazy._init(state, source, shadow)
        return lazy

    def _is_foreign(self) -> bool:
        # Code below __torch_function__ (an autograd.Function) has put another node behind a copy of ours.
        with torch._C.DisableTorchFunctionSubclass():
            node, requires_grad = self.grad_fn, self.requires_grad
        if node is None:
            return requires_grad
        return not (self._adopted or isinstance(node, _InGraph._backward_cls) or self._adopt(node))

    def _adopt(self, node: Any) -> bool:
        """Take the state of what DDP has copied without gradients; its part of backward becomes a hook."""
        hook = ddp_hook(node)
        if hook is None:
            return False
        copied: Any = node.next_functions[self.output_nr][0]
        if not isinstance(copied, _InGraph._backward_cls):
            return False
        self._state, self._adopted = getattr(copied, "state"), True  # noqa: B009  # an attribute of its ctx
        if self._state.calls:
            add_hook(hook, self._state.calls)
        return True

    def _compute(self) -> Tensor:
        if not self._is_foreign():
            return super()._compute()
        real = self._state.logits()
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            behind: Tensor = _Behind.apply(self, real.detach())
        return behind

    def _become(self, state: State) -> None:
        if state.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _InGraph.apply(self, state, None, *state.tensors)
        self._state = state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, _name(func), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code that does not ask __torch_function__. Gradients are recorded above this level.
        with torch._C.DisableTorchFunction():
            args, kwargs = _realise(args, func, detach=True), _realise(kwargs or {}, func, detach=True)
        return func(*args, **kwargs)


class _InGraph(torch.autograd.Function):
    """A :class:`LazyLogits`'s place in the autograd graph, for code that skips ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits | None, state: State, shadow: Any, *tensors: Tensor) -> Tensor:
        ctx.state = state
        ctx.set_materialize_grads(False)
        if lazy is not None:  # changed in place: from here on this is where it stands
            ctx.mark_dirty(lazy)
            return lazy
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits,
            state.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=state.dtype,
            device=state.device,
        )
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted, state = ctx.needs_input_grad[3:], ctx.state
        if grad is None:
            return None, None, None, *(None for _ in wanted)
        grad = pass_gradient(grad, state.calls)
        with weights_of(state.calls):
            leaves = [t.detach().requires_grad_(need) for t, need in zip(state.tensors, wanted, strict=True)]
            logits = state.with_tensors(leaves).logits()
            grads = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], grad))
        return None, None, None, *(next(grads) if need else None for need in wanted)


class _Behind(torch.autograd.Function):
    """Real logits whose gradient goes where that of a :class:`LazyLogits` does."""

    @staticmethod
    def forward(ctx: Any, lazy: Tensor, real: Tensor) -> Tensor:
        return real.view_as(real)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class TracedLazyLogits(LazyBase):
    """Lazy logits under ``torch.compile``: a plain object, which the compiler can make and follow.

    It is not a ``torch.Tensor``; where a compiled model returns it, call :meth:`materialize` or use it in
    any torch function.
    """

    @staticmethod
    def _wrap(state: State, source: Any = None, shadow: Tensor | None = None) -> TracedLazyLogits:
        lazy = TracedLazyLogits()
        lazy._init(state, source, shadow)
        return lazy

    def _become(self, state: State) -> None:
        self._state = state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, _name(func), args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        return self._state.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._state.dtype

    @property
    def device(self) -> torch.device:
        return self._state.device

    @property
    def ndim(self) -> int:
        return self._state.ndim

    @property
    def requires_grad(self) -> bool:
        return self._state.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._state.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.materialize(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        # Only what the class does not define gets here.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"lazy logits have no attribute {name!r}")
        member = getattr(torch.Tensor, name)
        if callable(member):
            return lambda *args, **kwargs: _dispatch(member, name, (self, *args), kwargs)
        return getattr(_realise(self, member), name)


def _define_methods() -> None:
    """Give the plain class the lazy operations, and the operators, which Python looks up on classes."""

    def method(name: str, member: Any) -> Callable[..., Any]:
        def call(self: TracedLazyLogits, *args: Any, **kwargs: Any) -> Any:
            return _dispatch(member, name, (self, *args), kwargs)

        call.__name__ = name
        return call

    operators = """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul
        rmatmul neg abs eq ne lt le gt ge getitem setitem float int bool array
    """.split()  # noqa: SIM905
    lazy = [*lazy_ops.OPERATIONS, *lazy_ops.IN_PLACE]
    for name in [f"__{op}__" for op in operators] + [n for n in lazy if n != "data" and n not in lazy_ops.LOSSES]:
        if hasattr(torch.Tensor, name) and name not in TracedLazyLogits.__dict__:
            setattr(TracedLazyLogits, name, method(name, getattr(torch.Tensor, name)))
    TracedLazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def make_lazy(state: State, source: Any = None, shadow: Tensor | None = None) -> LazyLogits | TracedLazyLogits:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    if not torch.is_grad_enabled():
        state = state.detach()
    if torch.compiler.is_compiling():
        return TracedLazyLogits._wrap(state, source)  # no shadow: graphs have no writes that would show
    lazy = LazyLogits._wrap(state, source, shadow)
    if source is None and state.settings.keep_logits:
        keep_until_read(lazy)
    return lazy


# ------------------------------------------------------------------------------------------------- dispatch


def _dispatch(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with lazy logits among its arguments."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    if name in lazy_ops.COMMUTES and len(args) == 2 and not kwargs and not is_lazy(args[0]):
        args = (args[1], args[0])
    lazy = args[0] if args and is_lazy(args[0]) else None
    if lazy is not None and name == "register_hook" and lazy._state.calls and is_wrapper_hook(args[-1]):
        return add_hook(args[-1], lazy._state.calls)
    by_itself = isinstance(lazy, LazyLogits) and (lazy._existing() is None or lazy._is_foreign())
    if by_itself and name in lazy_ops.METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if lazy is not None and lazy._existing() is None:
        if name in lazy_ops.GRADIENT_HOOKS:
            _check_hooks(lazy, name)
        if name == "__repr__":
            return LazyBase.__repr__(lazy)
        if name == "__iter__":
            return iter(torch.unbind(lazy))
        result = NotImplemented if lazy._is_foreign() else _run_lazily(lazy, func, name, args[1:], kwargs)
        if result is not NotImplemented:
            leaves = isinstance(result, Tensor) and not is_lazy(result)
            return watch_gradient(result, lazy._state.calls) if leaves else result
    elif name in lazy_ops.JOINS and args and isinstance(args[0], Sequence):
        state = _attempt(lazy_ops.JOINS[name], _states(args[0]), *args[1:], **kwargs)
        if state is not NotImplemented:
            return make_lazy(state)
    if lazy is not None and _writes(name):
        lazy._prepare_write(func)
    if name in lazy_ops.LIKE:
        return func(*_stand_ins(args), **{"memory_format": torch.contiguous_format, **kwargs})
    if name in lazy_ops.NEW:
        return func(*_stand_ins(args[:1]), *args[1:], **kwargs)
    if name in lazy_ops.AS and not is_lazy(args[0]):
        return func(args[0], *_stand_ins(args[1:]), **_stand_ins(kwargs))
    return func(*_realise(args, func), **_realise(kwargs, func))


def _run_lazily(lazy: LazyBase, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs, state = _states(args), _states(kwargs), lazy._state
    if isinstance(state, StackState):
        if name not in lazy_ops.STACK_OPERATIONS:
            return NotImplemented
        result = _attempt(lazy_ops.STACK_OPERATIONS[name], state, *args, **kwargs)
        return _wrapped(lazy, func, name, result, args, kwargs)
    if name in lazy_ops.LOSSES:
        return lazy_ops.LOSSES[name](state, *args, **kwargs)  # an error of the loss is the caller's
    if name in lazy_ops.IN_PLACE:
        # Not where other logits share the memory, which would have to change as well, nor where the change is to be
        # hidden from gradients.
        if lazy._source is not None or lazy._viewed or (state.requires_grad and not torch.is_grad_enabled()):
            return NotImplemented
        result = _attempt(lazy_ops.IN_PLACE[name], state, *args, **kwargs)
        result = result if result is NotImplemented else lazy_ops.to_dtype(result, state.dtype)
        if result is NotImplemented or result.shape != state.shape:
            return NotImplemented
        lazy._become(result)
        return None if name == "__setitem__" else lazy
    if name not in lazy_ops.OPERATIONS:
        return NotImplemented
    return _wrapped(lazy, func, name, _attempt(lazy_ops.OPERATIONS[name], state, *args, **kwargs), args, kwargs)


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        # Arguments that we do not know: torch will judge them. An error from further in is one.
        if torch.compiler.is_compiling() or error.__traceback__ is None or error.__traceback__.tb_next is None:
            return NotImplemented
        raise


def _states(value: Any) -> Any:
    """Arguments with lazy logits replaced by their states; by the real ones where they exist."""
    if is_lazy(value):
        real = value._make_real() if value._is_foreign() else value._existing()
        return value._state if real is None else real
    if type(value) in (tuple, list):
        return type(value)(_states(item) for item in value)
    if type(value) is dict:
        return {key: _states(item) for key, item in value.items()}
    return value


def _wrapped(lazy: LazyBase, func: Any, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, with states made lazy logits that remember what they are views of."""
    if isinstance(result, tuple):
        if any(part is NotImplemented for part in result):
            return NotImplemented

        def piece(i: int) -> Callable[[Tensor], Tensor]:
            return lambda real: func(real, *args, **kwargs)[i]

        return tuple(_view(lazy, part, piece(i)) for i, part in enumerate(result))
    if not isinstance(result, (LazyState, StackState)):
        return result
    if name in lazy_ops.VIEWS and not (name == "__getitem__" and _copies(args[0])):
        view = _view(lazy, result, lambda real: func(real, *args, **kwargs))
        if isinstance(result, StackState) and isinstance(lazy._state, LazyState):
            view._make_real()  # one class, no longer than the tokens: of use as it is, for as long as it is wanted
        return view
    contiguous = lazy._source is None if lazy._shadow is None else lazy._shadow.is_contiguous()
    if result is lazy._state and (name != "contiguous" or contiguous):
        return lazy  # as stock: nothing to do
    return make_lazy(result)


def _view(lazy: LazyBase, state: State, repeat: Callable[[Tensor], Tensor]) -> Any:
    """A view, or the copy that it is where the strides allow no view."""
    if lazy._shadow is None:
        return make_lazy(state, (lazy, repeat))
    with torch._C.DisableTorchFunction():
        shadow = repeat(lazy._shadow)
    copied = shadow.untyped_storage()._cdata != lazy._shadow.untyped_storage()._cdata
    return make_lazy(state) if copied else make_lazy(state, (lazy, repeat), shadow)


def _copies(index: Any) -> bool:
    """Whether indexing copies, rather than views."""
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, list) or (isinstance(item, Tensor) and item.dim() > 0) for item in items)


def _check_hooks(lazy: LazyBase, name: str) -> None:
    """RuntimeError for a hook that would wait in vain for a gradient that is computed without these logits."""
    if any(call.loss_computed for call in lazy._state.calls):
        raise RuntimeError(
            f"logits.{name}() after the loss: it was computed without these logits, and its gradient does not pass "
            "through them. Call logits.materialize() before the loss, and use what it returns."
        )


def _writes(name: str) -> bool:
    in_place_operator = name.startswith("__i") and name not in lazy_ops.NOT_IN_PLACE
    return name == "__setitem__" or in_place_operator or (name.endswith("_") and not name.endswith("__"))


def _name(func: Any) -> str:
    """The name of a torch function or method; for the getter of a property, the property's name."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__
    return name


def _realise(value: Any, func: Any, detach: bool = False) -> Any:
    """Replace lazy logits by real ones in arguments, however nested, and say so the first time."""
    if is_lazy(value):
        if value._existing() is None:
            _say_materialized(func, value._state)
        real = value._make_real()
        return real.detach() if detach else real
    if isinstance(value, (tuple, list)):
        items = [_realise(item, func, detach) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _realise(item, func, detach) for key, item in value.items()}
    return value


def _stand_ins(value: Any) -> Any:
    """Replace lazy logits by one element, expanded: enough for operations that only read metadata."""
    if is_lazy(value):
        state = value._state
        return torch.empty((), dtype=state.dtype, device=state.device).expand(state.shape)
    if isinstance(value, tuple):
        return tuple(_stand_ins(item) for item in value)
    if isinstance(value, dict):
        return {key: _stand_ins(item) for key, item in value.items()}
    return value


def _say_materialized(func: Any, state: State) -> None:
    """Count, and warn or raise, as ``patch_model`` was told to."""
    if torch.compiler.is_compiling():
        return  # the compiler has no frames to look at, and would have to break the graph for a warning
    by = caller()
    where = f"{_qualified_name(func)} at {by.line}"
    if by.via is not None:
        where += f" (in {by.via})"
    if state.calls:
        state.calls[0].usage.materialized[where] += 1
        state.calls[0].usage.used |= state.requires_grad
    if state.settings.on_materialize == "ignore":
        return
    hint = ""
    if by.in_evaluation:
        hint = " Trainer(preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)) does without them."
    if state.settings.on_materialize == "raise":
        raise MaterializedLogitsError(
            f"{where} needs the logits themselves, which patch_model(..., on_materialize='raise') forbids.{hint} Call "
            "logits.materialize() to ask for them all the same."
        )
    by.warn(
        f"{where} needs the logits themselves, so they were computed and no memory is saved here.{hint} Call "
        "logits.materialize() to ask for them without this warning.",
        MaterializedLogitsWarning,
    )


def _qualified_name(func: Any) -> str:
    name = _name(func)
    if name != getattr(func, "__name__", name) or hasattr(func, "__objclass__"):
        return f"torch.Tensor.{name}"
    if str(getattr(func, "__qualname__", "")).startswith("Tensor."):
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    return f"{module if isinstance(module, str) and not module.startswith('torch._') else 'torch'}.{name}"


_define_methods()
