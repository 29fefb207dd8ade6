"""Lazy logits in eager mode: a tensor without storage that stands in the autograd graph."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.huggingface.head_call import pass_gradient, weights_of
from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import LazyBase, contiguous_shadow, made_when, told
from flce.huggingface.lazy.dispatch import dispatch, realise
from flce.huggingface.lazy.state import LazyState, behind
from flce.huggingface.staleness import versions_of
from flce.huggingface.wrappers import hook_of_function
from flce.torch_ops.frames import never_compiled


@made_when(compiling=False)
class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. Made by a patched output embedding."""

    _node: Any  # of the autograd graph, which this tensor stands at
    _version_seen: Any  # of the real logits, when that was found out; None: never

    @staticmethod
    def _wrap(state: LazyState, source: Any = None, shadow: Tensor | None = None) -> LazyLogits:
        shadow = contiguous_shadow(state) if shadow is None else shadow
        lazy: LazyLogits = _InGraph.apply(None, state, shadow, *state.tensors)
        lazy._init(state, source, shadow)
        lazy._node, lazy._version_seen = lazy._place(), None
        lazy._tell_node()
        if source is not None and lazy._node is not None:
            source.lazy._family.waiting.append(weakref.ref(lazy))
        elif source is not None and source.is_view:
            source.lazy._family.waiting.append(weakref.ref(source))
        return lazy

    def _become(self, state: LazyState) -> None:
        if state.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                _InGraph.apply(self, state, None, *state.tensors)
        self._state, self._node, self._source = state, self._place(), None
        self._tell_node()

    def _tell_node(self) -> None:
        """Let this place in the graph know of hooks that are set later: gradients that come to it do not pass there."""
        if private.is_node_of(self._node, _InGraph):
            self._node.hooked = self._hooked

    def _set_real(self, real: Tensor) -> None:
        LazyBase._set_real(self, real)
        # A view without gradients follows when it is used: `torch.utils.swap_tensors` refuses weak references to it.
        if self._viewed_source() is not None and self._node is not None:
            self._family.add_view(self, real)

    def _look_around(self) -> None:
        real, place = self._real, self._place()
        if place is self._node or self._adopt(place):
            return
        # An autograd.Function, which does not ask __torch_function__, has returned this tensor.
        if real is None:
            memory = told(self._state, "an autograd.Function", self._compute).detach()
        else:
            memory = real.clone().detach()
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
            with contextlib.suppress(RuntimeError):  # a view that autograd no longer allows: an error where it is used
                if isinstance(lazy, LazyLogits) and (real := lazy._existing()) is not None:
                    found.append((lazy, real))
        return found

    def _moved(self) -> bool:
        """Whether the real logits were written to since this tensor last stood where they do."""
        assert self._real is not None
        seen = self._made_as if self._version_seen is None else self._version_seen
        return bool(versions_of(self._real) != seen)

    def _follow(self, func: Any) -> None:
        """After a write to the real logits: gives this object and its views the real ones' grad_fn."""
        for lazy, real in self._relatives():
            if func in tables.GRAPH or lazy._moved() or (lazy._node is not None) != real.requires_grad:
                # What a Function saved is as it was, if nothing was written.
                unmoved = not lazy._moved() and real.requires_grad
                lazy._version_seen = versions_of(real)
                # A view that was made without gradients has no grad_fn any more: an error where it is used.
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
        """Take the state of what a wrapper has copied without gradients; its part of backward becomes a hook."""
        hook = hook_of_function(place)
        if hook is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            copied: Any = place.next_functions[self.output_nr][0]
        while hook_of_function(copied) is not None:  # the copied logits have taken over that one's part
            copied = copied.next_functions[0][0]
        if not private.is_node_of(copied, _InGraph):
            return False
        state = getattr(copied, "state")  # noqa: B009  # an attribute of its ctx
        self._state, self._node, self._source = behind(state, self._state, hook), place, None
        return True

    def register_hook(self, hook: Any) -> Any:
        """As of any tensor. Dynamo fails where it finds PyTorch's own method on a subclass."""
        return torch.Tensor.register_hook(self, hook)

    def as_subclass(self, cls: Any) -> Any:
        """What it is of the real logits: PyTorch does not ask ``__torch_function__`` here."""
        return dispatch(torch.Tensor.as_subclass, (self, cls), {})

    @classmethod
    @never_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # an eager model's logits in a compiled function: this runs outside of it
            torch._dynamo.graph_break()
        return dispatch(func, args, kwargs or {})

    @classmethod
    @never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code that does not ask __torch_function__. Gradients are recorded above this level.
        with private.disable_torch_function():
            args, kwargs = realise(args, func, detach=True), realise(kwargs or {}, func, detach=True)
        return func(*args, **kwargs)


class _InGraph(torch.autograd.Function):
    """A :class:`LazyLogits`'s place in the autograd graph, for code that skips ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits | None, state: LazyState, shadow: Any, *tensors: Tensor) -> Tensor:
        ctx.state, ctx.hooked = state, None
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
        if ctx.hooked is not None and ctx.hooked.anywhere():
            raise RuntimeError(
                "a hook was set on logits, or retain_grad() called, after an autograd.Function had been given them: "
                "its gradient does not pass there. Call logits.materialize() before both, and use what it returns."
            )
        grad = pass_gradient(grad, state.calls)
        with weights_of(state.calls):
            leaves = [t.detach().requires_grad_(need) for t, need in zip(state.tensors, wanted, strict=True)]
            with torch.enable_grad():
                logits = state.with_tensors(iter(leaves)).logits()
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
