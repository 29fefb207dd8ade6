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

import contextlib
import copy
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flce import private
from flce.callers import caller
from flce.frames import is_differentiated_forward, is_transformed, never_compiled
from flce.huggingface import lazy_ops
from flce.huggingface.head_call import HeadCall, add_hook, pass_gradient, watch_gradient, weights_of
from flce.huggingface.lazy_ops import Operation
from flce.huggingface.lazy_state import LazyState, StackState, State
from flce.huggingface.staleness import versions_of
from flce.huggingface.usage import ASKED_FOR, MaterializedLogitsWarning, name_of, say_materialized
from flce.huggingface.wrappers import asks_for_wrapper, ddp_hook, is_wrapper_hook, outside_of_checkpoint

# -------------------------------------------------------------------------------------------------- classes


class _Source:
    """What lazy logits come from.

    Args:
        lazy: other lazy logits.
        repeat: makes these logits' real ones of real ones of `lazy`.
        is_view: they share their memory; else a copy, of what `lazy` is now.
    """

    def __init__(self, lazy: LazyBase, repeat: Callable[[Tensor], Tensor], is_view: bool) -> None:
        self.lazy, self.repeat, self.is_view, self._state = lazy, repeat, is_view, lazy._state
        self._given: Tensor | None = None

    def is_followed(self) -> bool:
        """Whether these logits are made of those of `lazy` as soon as they exist."""
        return self.is_view or self.lazy._is_awaited()

    def is_unchanged(self) -> bool:
        lazy = self.lazy
        return lazy._state is self._state and (lazy._real is None or lazy._made_as == versions_of(lazy._real))

    def give(self) -> Tensor | None:
        """The real logits, if they can be made of `lazy`'s."""
        memory = self.lazy._real
        if self._given is None and memory is not None and (self.is_view or self.is_unchanged()):
            self._given = self.repeat(memory)
        return self._given

    def _existing(self) -> Tensor | None:
        self.lazy._existing()
        return self.give()


class _Family:
    """The views of one memory, and the copies of what is in it.

    Args:
        width: of a row of the memory.

    Attributes:
        waiting: those that are not real yet, and have to be before the memory is written to. A view without gradients
            is known by its source: `torch.utils.swap_tensors(x, logits.detach())` takes no tensor with weak references.
        views: those that are real, and the part of the memory that each lies in.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.waiting: list[weakref.ref[LazyLogits | _Source]] = []
        self.views: list[tuple[weakref.ref[LazyLogits], _Box]] = []

    def add_view(self, view: LazyLogits, real: Tensor) -> None:
        self.views.append((weakref.ref(view), _box(real, self._width)))

    def make_real(self) -> None:
        """Make those that wait real, if the memory exists."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        self.views = [view for view in self.views if view[0]() is not None]
        for ref in waiting:
            one = ref()
            with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows, for whoever uses it
                if one is not None and one._existing() is None and _may_come(one):
                    self.waiting.append(ref)

    def overlapping(self, real: Tensor) -> list[LazyLogits]:
        """The views that may have elements of ``real``."""
        first, end, left, right = _box(real, self._width)
        near = [ref() for ref, (f, e, lo, hi) in self.views if f < end and first < e and lo < right and left < hi]
        return [lazy for lazy in near if isinstance(lazy, LazyLogits)]  # PyTorch may have swapped it for another tensor


def _may_come(one: LazyLogits | _Source) -> bool:
    """Whether this can still be made of what it comes from."""
    source = one if isinstance(one, _Source) else one._source
    return source is not None and (source.is_view or source.is_unchanged())


_Box = tuple[int, int, int, int]


def _box(real: Tensor, width: int) -> _Box:
    """The elements of its memory that a tensor lies between, and the columns, if a row has ``width`` elements."""
    start, width = int(real.storage_offset()), max(width, 1)
    if not real.numel():
        return start, start, 0, 0
    steps = [(int((size - 1) * stride), stride) for size, stride in zip(real.shape, real.stride(), strict=True)]
    left = start % width
    right = left + 1 + sum(length for length, stride in steps if stride % width)
    return start, start + 1 + sum(length for length, _ in steps), *((left, right) if right <= width else (0, width))


class LazyBase:
    """What both kinds of lazy logits share: the state, and the real logits once they exist.

    Views and copies refer to what they come from, their source. There is one memory for a root and all its views:
    whatever makes one of them real makes the root real, and repeats the views on it. So a write to one shows in all, as
    in stock. A copy is a root of its own, but where somebody waits for gradients at its source: then it is made from
    that, unless that was written to since.
    """

    _state: State
    _real: Tensor | None
    _source: _Source | None
    # Of a small view: its values, in memory of their own, for operations that do nothing but read.
    _values: Tensor | None
    _viewed: bool  # has views
    _asked: bool  # for its place in the autograd graph, where gradients of copies have to pass then
    _family: _Family  # shared by a root and all its views
    # Of the shape and strides that stock's logits would have, without data: tells views from copies.
    _shadow: Tensor | None
    _made_as: Any  # the version of the real logits when their memory was made

    def _init(self, state: State, source: _Source | None, shadow: Tensor | None = None) -> None:
        self._state, self._source, self._shadow = state, source, shadow
        self._real, self._values, self._viewed, self._asked = None, None, False, False
        root = self._viewed_source()
        self._family = _Family(state.shape[-1]) if root is None else root._family
        if root is not None:
            root._viewed = True

    def _viewed_source(self) -> LazyBase | None:
        """What this is a view of; None: it has memory of its own."""
        return self._source.lazy if self._source is not None and self._source.is_view else None

    def _root(self) -> LazyBase:
        """What this is a view of, or a view of a view; itself, if it has memory of its own."""
        root: LazyBase = self
        while (viewed := root._viewed_source()) is not None:
            root = viewed
        return root

    def _become(self, state: State) -> None:
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

    def _is_awaited(self) -> bool:
        """Whether somebody waits for gradients here, or at what this comes from."""
        lazy: LazyBase = self
        while not lazy._asked and lazy._source is not None:
            lazy = lazy._source.lazy
        return lazy._asked

    def _existing(self) -> Tensor | None:
        behind: list[LazyBase] = []
        lazy: LazyBase = self
        while lazy._real is None and lazy._source is not None and lazy._source.is_followed():
            behind.append(lazy)
            lazy = lazy._source.lazy
        lazy._look_around()
        for lazy in reversed(behind):
            source = lazy._source
            real = None if source is None else source.give()
            if source is not None and real is not None:
                lazy._set_real(real)
                if source.is_view:
                    lazy._made_as = source.lazy._made_as
            lazy._look_around()
        return self._real

    def _look_around(self) -> None:
        """Notice what was done to this object by code that asks no object."""

    def _set_real(self, real: Tensor) -> None:
        self._real, self._values, self._made_as = real, None, versions_of(real)

    def _make_real(self) -> Tensor:
        if self._existing() is None:
            root = self._root()
            root._set_real(root._compute())
            if root._source is not None:  # a copy, not made from what it is a copy of
                _note_passing(root._state.calls, root._state)
        real = self._existing()
        assert real is not None
        return real

    def _compute(self) -> Tensor:
        state = self._state
        # In the mode of the head, not of who reads them first. What has no gradient is no less fit to be written to.
        inference = not torch.compiler.is_compiling() and state.tensors[0].is_inference()
        outside = any(call.is_outside for call in state.calls)  # a recomputation will find these logits, as stock's
        with _mode(True, inference), outside_of_checkpoint() if outside else contextlib.nullcontext():
            real = watch_gradient(state.logits(), state.calls)
            return real if self._shadow is None or self._viewed_source() is not None else _laid_out(real, self._shadow)

    def _read(self) -> Tensor:
        """The values of a small view."""
        if self._values is None:
            self._values = self._compute()
        return self._values

    def _is_small(self) -> bool:
        """Whether this is a view of so few logits that reading is no reason to compute all."""
        root = self._root()
        # Nobody sees what a graph does not use: there all views are made by themselves.
        return root is not self and (self._shadow is None or 4 * self._shadow.numel() <= math.prod(root._state.shape))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state, values = self._state, self._values if self._existing() is None else self._real
        if values is not None:
            return repr(values)
        return f"LazyLogits(shape={tuple(state.shape)}, dtype={state.dtype}, device='{state.device}')"


def _contiguous_shadow(state: State) -> Tensor:
    return torch.empty(state.shape, dtype=state.dtype, device="meta")


def _laid_out(real: Tensor, shadow: Tensor) -> Tensor:
    """With the strides that stock's logits would have; those made from hidden states have their classes last."""
    sizes = zip(real.shape, real.stride(), shadow.stride(), strict=True)
    if all(size == 1 or mine == stocks for size, mine, stocks in sizes):
        return real
    return torch.empty_strided(shadow.shape, shadow.stride(), dtype=real.dtype, device=real.device).copy_(real)


def is_lazy(value: Any) -> bool:
    """Whether ``value`` is lazy logits of either kind."""
    return isinstance(value, LazyBase)


class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. Made by a patched output embedding."""

    _node: Any  # of the autograd graph, which this tensor stands at
    _version_seen: Any  # of the real logits, when that was found out; None: never

    @staticmethod
    def _wrap(state: State, source: Any = None, shadow: Tensor | None = None) -> LazyLogits:
        shadow = _contiguous_shadow(state) if shadow is None else shadow
        lazy: LazyLogits = _InGraph.apply(None, state, shadow, *state.tensors)
        lazy._init(state, source, shadow)
        lazy._node, lazy._version_seen = lazy._place(), None
        if source is not None and lazy._node is not None:
            source.lazy._family.waiting.append(weakref.ref(lazy))
        elif source is not None and source.is_view:
            source.lazy._family.waiting.append(weakref.ref(source))
        return lazy

    def _become(self, state: State) -> None:
        if state.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _InGraph.apply(self, state, None, *state.tensors)
        self._state, self._node, self._source = state, self._place(), None

    def _set_real(self, real: Tensor) -> None:
        LazyBase._set_real(self, real)
        if self._viewed_source() is not None:
            self._family.add_view(self, real)

    def _look_around(self) -> None:
        real, place = self._real, self._place()
        if place is self._node or self._adopt(place):
            return
        # An autograd.Function, which does not ask __torch_function__, has returned this tensor.
        if real is None:
            _say_materialized(self._state, "an autograd.Function")
        memory = (self._compute() if real is None else real.clone()).detach()
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            _Behind.apply(self, memory)
        if real is None:
            self._set_real(memory)
        else:  # it was changed in place: those who have the memory see where it comes from now
            with torch.enable_grad():
                real.copy_(memory)
            self._version_seen = versions_of(real)
        self._node = place

    def _relatives(self) -> list[tuple[LazyLogits, Tensor]]:
        """What shares some of this tensor's memory, itself among them, with their real logits."""
        self._family.make_real()
        found = []
        assert self._real is not None
        for lazy in [self._root(), *self._family.overlapping(self._real)]:
            with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows, for whoever uses it
                if isinstance(lazy, LazyLogits) and (real := lazy._existing()) is not None:
                    found.append((lazy, real))
        return found

    def _moved(self) -> bool:
        """Whether the real logits were written to since this tensor last stood where they do."""
        assert self._real is not None
        seen = self._made_as if self._version_seen is None else self._version_seen
        return bool(versions_of(self._real) != seen)

    def _follow(self, func: Any) -> None:
        """After ``func``, for C++ code: this tensor and its views stand where the real ones do, if that has changed."""
        for lazy, real in self._relatives():
            if func in lazy_ops.GRAPH or lazy._moved() or (lazy._node is not None) != real.requires_grad:
                # What a Function saved is as it was, if nothing was written.
                unmoved = not lazy._moved() and real.requires_grad
                lazy._version_seen = versions_of(real)
                # A view that was made without gradients has no place any more: an error for whoever uses it.
                version = private.preserve_version(lazy) if unmoved else contextlib.nullcontext()
                with (
                    torch._C.DisableTorchFunctionSubclass(),
                    torch.enable_grad(),
                    contextlib.suppress(RuntimeError),
                    version,
                ):
                    _Behind.apply(real, lazy) if real.requires_grad else lazy.detach_()
                lazy._node = lazy._place()

    def _place(self) -> Any:
        """Where this tensor stands in the autograd graph: a node, None for nowhere, True for a leaf."""
        with torch._C.DisableTorchFunctionSubclass():
            return (self.grad_fn or True) if self.requires_grad else None

    def _adopt(self, place: Any) -> bool:
        """Take the state of what DDP has copied without gradients; its part of backward becomes a hook."""
        hook = ddp_hook(place)
        if hook is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            copied: Any = place.next_functions[self.output_nr][0]
        if not private.is_node_of(copied, _InGraph):
            return False
        self._state, self._node = getattr(copied, "state"), place  # noqa: B009  # an attribute of its ctx
        self._source = None
        if self._state.calls:
            add_hook(hook, self._state.calls)
        return True

    def register_hook(self, hook: Any) -> Any:
        """As of any tensor. Dynamo fails where it finds PyTorch's own method on a subclass."""
        return torch.Tensor.register_hook(self, hook)

    def as_subclass(self, cls: Any) -> Any:
        """What it is of the real logits: PyTorch does not ask ``__torch_function__`` here."""
        return _dispatch(torch.Tensor.as_subclass, (self, cls), {})

    @classmethod
    @never_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # an eager model's logits in a compiled function: this runs outside of it
            torch._dynamo.graph_break()
        return _dispatch(func, args, kwargs or {})

    @classmethod
    @never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code that does not ask __torch_function__. Gradients are recorded above this level.
        with private.disable_torch_function():
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
        made: LazyLogits = private.make_wrapper_subclass(
            LazyLogits,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=state.device,
        )
        private.set_throw_on_mutable_data_ptr(made)  # rather than a null pointer
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
            with torch.enable_grad():
                logits = state.with_tensors(leaves).logits()
            grads = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], grad))
        return None, None, None, *(next(grads) if need else None for need in wanted)


class _Behind(torch.autograd.Function):
    """Gives the second tensor the place in the graph that the first one has."""

    @staticmethod
    def forward(ctx: Any, front: Tensor, behind: Tensor) -> Tensor:
        ctx.mark_dirty(behind)
        return behind

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _forward_functions() -> dict[Any, type]:
    """The class of each ``autograd.Function`` of this process, by the code of its ``forward``."""
    found: dict[Any, type] = {}
    classes: list[Any] = [torch.autograd.Function]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        found[getattr(inspect.unwrap(kind.forward), "__code__", None)] = kind
    return found


def _is_among(value: Any, values: Iterable[Any]) -> bool:
    """Whether this very object is there, or in a tuple that is."""
    return any(v is value or (isinstance(v, tuple) and any(item is value for item in v)) for v in values)


class TracedLazyLogits(LazyBase):
    """Lazy logits under ``torch.compile``: a plain object, which the compiler can make and follow."""

    @staticmethod
    def _wrap(state: State, source: Any = None, shadow: Tensor | None = None) -> TracedLazyLogits:
        lazy = TracedLazyLogits()
        lazy._init(state, source, shadow)
        return lazy

    def _become(self, state: State) -> None:
        self._state, self._source = state, None

    def _look_around(self) -> None:
        if not torch.compiler.is_compiling() and self._state.requires_grad and not torch.is_grad_enabled():
            self._check_caller()

    def _check_caller(self) -> None:
        """TypeError within an ``autograd.Function`` that was given this object: autograd does not see it."""
        functions = _forward_functions()
        frame: Any = sys._getframe(1)
        while frame is not None:
            function = functions.get(frame.f_code)
            if function is not None and _is_among(self, frame.f_locals.values()):
                raise TypeError(
                    f"{function.__name__}.apply() of logits that a graph with fullgraph=True returned as "
                    "a plain object would lose their gradient. Give it logits.materialize(), or patch the module that "
                    "is compiled: flce.patch_model(module)"
                )
            frame = frame.f_back

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

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
            return lambda *args, **kwargs: _dispatch(member, (self, *args), kwargs)
        return getattr(_realise(self, member), name)


def _define_methods() -> None:
    """Give the plain class the lazy operations, and the operators, which Python looks up on classes."""

    def method(name: str, member: Any) -> Callable[..., Any]:
        def call(self: TracedLazyLogits, *args: Any, **kwargs: Any) -> Any:
            return _dispatch(member, (self, *args), kwargs)

        call.__name__ = name
        return call

    operators = """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul
        rmatmul neg abs eq ne lt le gt ge getitem setitem float int bool array
    """.split()  # noqa: SIM905
    members = [(name, getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    lazy = [name for name, member in members if callable(member) and member in lazy_ops.OPERATIONS]
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):  # what the state tells
        setattr(TracedLazyLogits, name, property(lambda lazy, name=name: getattr(lazy._state, name)))  # type: ignore[misc]
    for name in [f"__{op}__" for op in operators] + lazy:
        if name not in TracedLazyLogits.__dict__:
            setattr(TracedLazyLogits, name, method(name, getattr(torch.Tensor, name)))
    TracedLazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def make_lazy(state: State, source: Any = None, shadow: Tensor | None = None) -> LazyLogits | TracedLazyLogits:
    """Wrap a state in the class that fits: plain under the compiler, a tensor otherwise."""
    if not torch.is_grad_enabled():
        state = state.detach()
    if torch.compiler.is_compiling():
        return TracedLazyLogits._wrap(state, source)  # no shadow: graphs have no writes that would show
    return LazyLogits._wrap(state, source, shadow)


@contextlib.contextmanager
def _mode(grad: bool, inference: bool) -> Iterator[None]:
    other = not torch.compiler.is_compiling() and inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if other else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


# ------------------------------------------------------------------------------------------------- dispatch


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation with lazy logits among its arguments."""
    if not args and is_lazy(kwargs.get("input")):
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    if is_transformed() and not torch.compiler.is_compiling():
        with private.clear_interpreter_stack():  # real logits are no part of the transform
            args, kwargs = _realise(args, func), _realise(kwargs, func)
        return func(*args, **kwargs)
    operation = None if is_differentiated_forward() else lazy_ops.OPERATIONS.get(func)
    if operation is not None and operation.kind == "join":
        result = _join(operation, *args, **kwargs)
    elif args and is_lazy(args[0]):
        result = _of_lazy(args[0], func, operation, args[1:], kwargs)
    elif func in lazy_ops.COMMUTES and len(args) == 2 and not kwargs:
        result = _of_lazy(args[1], func, operation, args[:1], kwargs)
    else:
        result = NotImplemented
    return _of_real(func, args, kwargs) if result is NotImplemented else result


def _of_lazy(lazy: Any, func: Any, operation: Operation | None, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of lazy logits; NotImplemented where it takes the real ones."""
    if func is torch.Tensor.register_hook and lazy._state.calls and is_wrapper_hook(args[-1]):
        return add_hook(args[-1], lazy._state.calls)
    if func in lazy_ops.GRAPH and not torch.compiler.is_compiling():
        if asks_for_wrapper():
            with torch._C.DisableTorchFunctionSubclass():
                return func(lazy, *args, **kwargs)
        _check_graph(lazy, func)
        lazy._asked = True
    real = lazy._existing()
    if func in lazy_ops.METADATA and isinstance(lazy, LazyLogits):
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy if real is None else real, *args, **kwargs)
    if real is not None:
        if isinstance(lazy, LazyLogits) and lazy._moved():
            lazy._follow(func)
        return NotImplemented
    if func is torch.Tensor.__repr__:
        return LazyBase.__repr__(lazy)
    if func is torch.Tensor.__iter__:
        return iter(torch.unbind(lazy))
    run = None if operation is None else operation.of_logits
    if isinstance(lazy._state, StackState):
        run = None if operation is None else operation.of_stack
    if operation is None or run is None:
        return NotImplemented
    state, states, named = lazy._state, _states(args), _states(kwargs)
    if operation.kind == "in place":
        # Not where other logits share the memory, which would have to change as well, nor where the change is to be
        # hidden from gradients.
        if lazy._viewed_source() is not None or lazy._viewed or (state.requires_grad and not torch.is_grad_enabled()):
            return NotImplemented
        result = _attempt(run, state, *states, **named)
        result = result if result is NotImplemented else lazy_ops.to_dtype(result, state.dtype)
        if result is NotImplemented or result.shape != state.shape:
            return NotImplemented
        lazy._become(result)
        return None if func is torch.Tensor.__setitem__ else lazy
    return _wrapped(lazy, func, operation, _attempt(run, state, *states, **named), states, named)


def _join(operation: Operation, several: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(several, Sequence):
        return NotImplemented
    return _of_several(_attempt(operation.of_logits, _states(several), *args, **kwargs))


def _of_several(state: Any, shadow: Tensor | None = None) -> Any:
    """Lazy logits that come from several others."""
    if state is NotImplemented:
        return state
    lazy = make_lazy(state.copied() if isinstance(state, LazyState) else state, None, shadow)
    _note_passing(state.calls, lazy)
    return lazy


def _note_passing(calls: Sequence[HeadCall], value: Any) -> None:
    """Note that gradients will pass by the logits, if ``value`` has some."""
    for call in calls:
        call.passed_by |= value.requires_grad


def _of_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation of real logits, in which lazy ones are replaced by them."""
    if func in lazy_ops.LIKE:
        return func(*_stand_ins(args), **{"memory_format": torch.contiguous_format, **kwargs})
    if func in lazy_ops.NEW:
        return func(*_stand_ins(args[:1]), *args[1:], **kwargs)
    if func in lazy_ops.AS and not is_lazy(args[0]):
        return func(args[0], *_stand_ins(args[1:]), **_stand_ins(kwargs))
    reads = func in lazy_ops.READING and "out" not in kwargs
    real, named = _realise(args, func, small=reads), _realise(kwargs, func, small=reads)
    written = [] if reads else [value for value in (*args, *kwargs.values()) if isinstance(value, LazyLogits)]
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
        if any(part is NotImplemented for part in result):
            return NotImplemented

        last: list[Any] = [None, ()]

        def piece(i: int) -> Callable[[Tensor], Tensor]:
            def of(real: Tensor) -> Tensor:
                if last[0] is not real:  # all pieces are cut at once
                    last[:] = real, func(real, *args, **kwargs)
                return last[1][i]

            return of

        return tuple(_view(lazy, part, piece(i)) for i, part in enumerate(result))
    if not isinstance(result, (LazyState, StackState)):
        for value in (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple) else ():
            if isinstance(value, Tensor):
                _note_passing(lazy._state.calls, value)
                watch_gradient(value, lazy._state.calls)
        return result
    if (
        operation.kind == "view"
        and result is not lazy._state
        and not (func is torch.Tensor.__getitem__ and _copies(args[0]))
    ):
        view = _view(lazy, result, lambda real: func(real, *args, **kwargs))
        if isinstance(result, StackState) and isinstance(lazy._state, LazyState):
            view._read()  # one class, no longer than the tokens: of use as it is, for as long as it is wanted
        return view
    contiguous = lazy._viewed_source() is None if lazy._shadow is None else lazy._shadow.is_contiguous()
    if result is lazy._state and (func is not torch.Tensor.contiguous or contiguous):
        return lazy  # as stock: nothing to do
    if isinstance(result, LazyState) and isinstance(lazy._state, LazyState) and result.ops == lazy._state.ops:
        result = result.copied()
    shadow = None
    if operation.kind == "elementwise" and lazy._shadow is not None and not lazy._shadow.is_contiguous():
        shadow = torch.empty_like(lazy._shadow, dtype=result.dtype)  # keeps the strides
    if any(isinstance(value, (LazyState, StackState)) for value in (*args, *kwargs.values())):
        return _of_several(result, shadow)
    return make_lazy(result, _source(lazy, lambda real: func(real, *args, **kwargs), is_view=False), shadow)


def _source(lazy: LazyBase, repeat: Callable[[Tensor], Tensor], is_view: bool) -> _Source:
    """With ``repeat`` in today's grad mode."""
    if torch.compiler.is_compiling():
        return _Source(lazy, repeat, is_view)
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def repeated(real: Tensor) -> Tensor:
        with _mode(*mode):
            return repeat(real)

    return _Source(lazy, repeated, is_view)


def _view(lazy: LazyBase, state: State, repeat: Callable[[Tensor], Tensor]) -> Any:
    """A view, or the copy that it is where the strides allow no view."""
    if lazy._shadow is None:
        return make_lazy(state, _source(lazy, repeat, is_view=True))
    with private.disable_torch_function():
        shadow = repeat(lazy._shadow)
    is_view = shadow.untyped_storage()._cdata == lazy._shadow.untyped_storage()._cdata
    if not is_view and isinstance(state, LazyState):
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


def _realise(value: Any, func: Any, detach: bool = False, small: bool = False) -> Any:
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
        if unknown and not (apart and lazy._values is not None):
            _say_materialized(lazy._state, func)
        if apart or detach:
            _note_passing(lazy._state.calls, lazy._state)
        return lazy._read() if apart else lazy._make_real().detach() if detach else lazy._make_real()

    return _replaced(value, real)


def _stand_ins(value: Any) -> Any:
    """Replace lazy logits by one element, expanded: enough for operations that only read metadata."""

    def one(lazy: Any) -> Tensor:
        like = _states(lazy)
        return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)

    return _replaced(value, one)


def _say_materialized(state: State, func: Any) -> None:
    """Count, and warn or raise, as ``patch_model`` was told to. ``func``: what needs the logits."""
    if not torch.compiler.is_compiling():  # it has no frames to look at, and a warning would break the graph
        usage = state.calls[0].usage if state.calls else None
        say_materialized(func, state.settings.on_materialize, usage, state.requires_grad)


_define_methods()
