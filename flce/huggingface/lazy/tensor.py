"""Lazy logits in eager mode: a tensor without storage that stands in the autograd graph."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.huggingface.head_call import pass_gradient, weights_of
from flce.huggingface.lazy.base import CLASSES, LazyBase, View, told
from flce.huggingface.lazy.dispatch import dispatch, realise
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.wrappers import hook_of_function
from flce.torch_ops.frames import never_compiled


class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. Made by a patched output embedding."""

    @staticmethod
    def _wrap(state: LazyState, view: View | None = None, shadow: Tensor | None = None) -> LazyLogits:
        if shadow is None:
            shadow = torch.empty(state.shape, dtype=state.dtype, device="meta")
        lazy: LazyLogits = _InGraph.apply(None, state, shadow, *state.tensors)
        lazy._init(state, view, shadow)
        with torch._C.DisableTorchFunctionSubclass():
            node: Any = lazy.grad_fn
        lazy._node = node
        if node is not None:
            node.hooks = lazy._family.hooks
        if view is not None:
            lazy._family.views.append(weakref.ref(lazy))
        return lazy

    def _become(self, state: LazyState) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if state.requires_grad:
                _InGraph.apply(self, state, None, *state.tensors)
            elif self._node is not None:
                self.detach_()
        self._state, self._node = state, self._place()
        if private.is_node_of(self._node, _InGraph):
            self._node.hooks = self._family.hooks

    def _existing(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            place = (self.grad_fn or True) if self.requires_grad else None
        if place is not self._node and not self._adopt(place):
            self._take_place(place)
        return self._real if self._view is None else LazyBase._existing(self)

    def _catch_up(self, real: Tensor) -> None:
        self._follow()
        if self._node is None and real.requires_grad:
            self._stand_behind(written=True)

    def _take_place(self, place: Any) -> None:
        """An autograd.Function, which does not ask ``__torch_function__``, has returned this tensor."""
        real, self._node = self._real, place
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
            self._follow()

    def _stand_behind(self, written: bool) -> None:
        """Take the place of the real logits in the graph."""
        # A view that autograd no longer allows is an error where it is used.
        with contextlib.suppress(RuntimeError):
            real = LazyBase._existing(self)
            if real is None or not (written or real.requires_grad):
                return
            # What a Function saved is as it was, if nothing was written.
            version = contextlib.nullcontext() if written else private.preserve_version(self)
            with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), version:
                _Behind.apply(real, self) if real.requires_grad else self.detach_()
            self._node = self._place()

    def _place(self) -> Any:
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
        calls = tuple([call.behind(hook) for call in self._state.calls])
        self._state, self._node, self._view = replace(state, calls=calls), place, None
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


CLASSES[False] = LazyLogits


class _InGraph(torch.autograd.Function):
    """A :class:`LazyLogits`'s place in the autograd graph, for code that skips ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits | None, state: LazyState, shadow: Any, *tensors: Tensor) -> Tensor:
        ctx.state, ctx.hooks = state, None
        ctx.set_materialize_grads(False)
        if lazy is not None:  # changed in place: from here on this is where it stands
            ctx.mark_dirty(lazy)
            return lazy
        made: LazyLogits = private.make_wrapper_subclass(
            LazyLogits,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=state.dtype,
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
        if ctx.hooks:
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
