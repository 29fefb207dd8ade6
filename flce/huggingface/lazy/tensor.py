"""The classes of lazy logits: `LazyLogits`, a tensor without storage, in eager mode; `TracedLazyLogits` in graphs."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.huggingface.divided_head import HeadDivision
from flce.huggingface.head_call import gather_weights, run_wrapper_hooks
from flce.huggingface.lazy import tables
from flce.huggingface.lazy.base import (
    CLASS_BY_COMPILING,
    Family,
    LazyBase,
    View,
    make_lazy,
    materialize_and_report,
    running_function,
)
from flce.huggingface.lazy.dispatch import dispatch, materialize_arguments
from flce.huggingface.lazy.state import LazyState
from flce.huggingface.wrappers import hook_from_node
from flce.torch_ops import skip_frame_and_callees


class LazyLogits(LazyBase, torch.Tensor):  # type: ignore[misc]
    """Lazy logits in eager mode: a tensor without storage. A patched output embedding returns it."""

    @staticmethod
    def _wrap(state: LazyState, view: View | None = None, meta_tensor: Tensor | None = None) -> LazyLogits:
        if meta_tensor is None:
            meta_tensor = torch.empty(state.shape, dtype=state.dtype, device="meta")
        lazy: LazyLogits = _LogitsNode.apply(None, state, meta_tensor, *state.tensors)
        lazy._init(state, view, meta_tensor)
        with torch._C.DisableTorchFunctionSubclass():
            node: Any = lazy.grad_fn
        lazy._node = node
        if node is not None:
            node.hooks = lazy._family.hooks
        if view is not None:
            lazy._family.views.append(weakref.ref(lazy))
        return lazy

    def _set_state(self, state: LazyState) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if state.requires_grad:
                _LogitsNode.apply(self, state, None, *state.tensors)
            elif self._node is not None:
                self.detach_()
        self._state, self._node = state, self._current_node()
        if private.is_node_of(self._node, _LogitsNode):
            self._node.hooks = self._family.hooks

    def _get_real(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            node = (self.grad_fn or True) if self.requires_grad else None
        if node is not self._node and not self._adopt_wrapper_copy(node):
            self._handle_function_output(node)
        # As in the base class, which is not called to save host time.
        if self._real is None and self._view is not None and self._view.root._get_real() is not None:
            self._compute_view()
        return self._real

    def _handle_function_output(self, node: Any) -> None:
        """Compute real logits, because an autograd.Function has returned this tensor without ``__torch_function__``."""
        real, self._node, self._family.is_written = self._real, node, True
        if real is None:
            memory = materialize_and_report(self._state, "an autograd.Function", self._compute).detach()
        else:
            memory = real.clone().detach()
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            _TakeNode.apply(self, memory)
        if real is None:
            self._set_real(memory)
        else:  # the Function changed the logits in place, so the family needs the new node
            with torch.enable_grad():
                real.copy_(memory)
            self._update_nodes()

    def _take_over_node(self, is_written: bool) -> None:
        # If autograd no longer allows a view, the next use of the view raises the error.
        with contextlib.suppress(RuntimeError):
            real = LazyBase._get_real(self)
            if real is None or not (is_written or real.requires_grad):
                return
            # Without a write, tensors that a Function has saved are unchanged, so the version must not increase.
            version = contextlib.nullcontext() if is_written else private.preserve_version(self)
            with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), version:
                _TakeNode.apply(real, self) if real.requires_grad else self.detach_()
            self._node = self._current_node()

    def _current_node(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return (self.grad_fn or True) if self.requires_grad else None

    def _adopt_wrapper_copy(self, node: Any) -> bool:
        """Restore the state after a wrapper's autograd function has copied the logits. Its backward becomes a hook."""
        hook = hook_from_node(node)
        if hook is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            copied: Any = node.next_functions[self.output_nr][0]
        while hook_from_node(copied) is not None:  # an earlier copy, whose hook the copied logits have
            copied = copied.next_functions[0][0]
        if not private.is_node_of(copied, _LogitsNode):
            return False
        state = getattr(copied, "state")  # noqa: B009  # an attribute of its ctx
        calls = tuple([call.for_wrapper_copy(hook) for call in self._state.calls])
        self._state, self._node, self._view = replace(state, calls=calls), node, None
        self._leave_origin()
        return True

    def _become_recomputed(self) -> bool:
        """Become the input of a function that a reentrant checkpoint computes again. Return False if this has no node.

        The checkpoint has detached its logits, and will read the gradient of this input. It would be as large as the
        logits. So this input is computed from detached tensors, whose gradients the node of the logits gets.
        """
        node: Any = None if self._view is None else self._view.parent._node
        if not private.is_node_of(node, _LogitsNode) or node.state.is_dtensor:
            return False
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in node.state.tensors]
        self._view, self._family, self._recomputation = None, Family(), (node, leaves)
        with torch.enable_grad():
            self._set_state(node.state.with_tensors(iter(leaves)))
        return True

    def _pass_gradients(self) -> Tensor | None:
        """Pass the gradients to the node. Return zeros without memory, which run the node, or None if it will run."""
        node, leaves = self._recomputation
        node.passed.append([leaf.grad for leaf in leaves])
        if len(node.passed) > 1:
            return None
        node.zeros = torch.zeros((), dtype=node.state.dtype, device=node.state.device).expand(node.state.shape)
        return node.zeros

    def register_hook(self, hook: Any) -> Any:
        """Call ``Tensor.register_hook``. Dynamo fails if a subclass does not define this method."""
        return torch.Tensor.register_hook(self, hook)

    def as_subclass(self, cls: Any) -> Any:
        """Call ``as_subclass`` of the real logits. PyTorch does not call ``__torch_function__`` for this method."""
        return dispatch(torch.Tensor.as_subclass, (self, cls), {})

    @classmethod
    @skip_frame_and_callees
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # logits of an eager model in a compiled function: end the graph
            torch._dynamo.graph_break()
        return dispatch(func, args, kwargs or {})

    @classmethod
    @skip_frame_and_callees
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code that skips __torch_function__ gets here. Autograd has recorded the operation before.
        with private.disable_torch_function():
            args, kwargs = (
                materialize_arguments(args, func, detach=True),
                materialize_arguments(kwargs or {}, func, detach=True),
            )
        return func(*args, **kwargs)


class LazyDTensor(LazyLogits):
    """Lazy logits of a divided head that are a DTensor in stock, sharded over classes or replicated."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class for ``isinstance``: Transformers and training loops test whether logits are a DTensor."""
        from torch.distributed.tensor import DTensor

        return DTensor

    @property
    def _division(self) -> HeadDivision:
        assert self._state.division is not None
        return self._state.division

    @property
    def device_mesh(self) -> Any:
        return self._division.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        from torch.distributed.tensor import Shard

        placement = self._division.placement
        return (placement if placement.is_replicate() else Shard(self.dim() - 1),)

    # Arguments such as `grad_placements` change gradients or dtypes, so PyTorch applies them to the real logits.

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False, **others: Any
    ) -> Any:
        """Return lazy logits with other placements, or a real DTensor if the placements do not divide the classes."""
        from torch.distributed.tensor import Replicate, Shard

        classes = self.dim() - 1
        lazy_placements = {Replicate(): Replicate(), Shard(-1): Shard(-1), Shard(classes): Shard(-1)}
        placement = lazy_placements.get(placements[0]) if placements is not None and len(placements) == 1 else None
        if self._get_real() is None and placement and not others and device_mesh in (None, self.device_mesh):
            return self if self._division.placement == placement else self._with_placement(placement)
        real = materialize_arguments(self, "DTensor.redistribute")
        return real.redistribute(device_mesh, placements, async_op=async_op, **others)

    def to_local(self, **kwargs: Any) -> Any:
        """Return the logits of all classes, lazy if they are replicated; else the real logits of this process."""
        if self._get_real() is None and not kwargs and self.placements[0].is_replicate():
            return self._with_placement(None)
        return materialize_arguments(self, "DTensor.to_local").to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:
        """Return lazy logits of all classes."""
        if self._get_real() is None and not kwargs:
            return self._with_placement(None)
        return materialize_arguments(self, "DTensor.full_tensor").full_tensor(**kwargs)

    def _with_placement(self, placement: Any) -> Any:
        return make_lazy(replace(self._state, division=replace(self._division, placement=placement)))


class _LogitsNode(torch.autograd.Function):
    """The autograd function that creates a :class:`LazyLogits`, for code that skips ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits | None, state: LazyState, meta_tensor: Any, *tensors: Tensor) -> Tensor:
        ctx.state, ctx.hooks, ctx.passed, ctx.zeros = state, None, [], None
        ctx.set_materialize_grads(False)
        if lazy is not None:  # an in-place operation: this becomes the node of the logits
            ctx.mark_dirty(lazy)
            return lazy
        logits: LazyLogits = private.make_wrapper_subclass(
            LazyDTensor if state.division is not None and state.is_dtensor else LazyLogits,
            meta_tensor.shape,
            strides=meta_tensor.stride(),
            storage_offset=meta_tensor.storage_offset(),
            dtype=state.dtype,
            device=state.device,
        )
        private.set_throw_on_mutable_data_ptr(logits)  # an error instead of a null pointer
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad, state, gradients = ctx.needs_input_grad[3:], ctx.state, ctx.passed
        if grad is None:
            return None, None, None, *(None for _ in needs_grad)
        if ctx.hooks:
            raise RuntimeError(
                "a hook was set on logits, or retain_grad() called, after they were passed to an autograd.Function: "
                "its gradient does not reach the hook. Call logits.materialize() before both, and use its result."
            )
        is_passed = ctx.zeros is not None and grad.data_ptr() == ctx.zeros.data_ptr()
        ctx.passed, ctx.zeros = [], None
        grad = run_wrapper_hooks(grad, state.calls)
        if not is_passed:
            with gather_weights(state.calls, state.tensors, can_synchronize=True):
                leaves = [t.detach().requires_grad_(need) for t, need in zip(state.tensors, needs_grad, strict=True)]
                with torch.enable_grad():
                    logits = state.with_tensors(iter(leaves)).logits()
                grads = iter(torch.autograd.grad(logits, [leaf for leaf in leaves if leaf.requires_grad], grad))
            gradients.append([next(grads) if need else None for need in needs_grad])
        present = [[g for g in of_tensor if g is not None] for of_tensor in zip(*gradients, strict=True)]
        return None, None, None, *(sum(g[1:], g[0]) if g else None for g in present)


class _TakeNode(torch.autograd.Function):
    """An autograd function that moves ``behind`` to the place of ``front`` in the graph."""

    @staticmethod
    def forward(ctx: Any, front: Tensor, behind: Tensor) -> Tensor:
        ctx.mark_dirty(behind)
        return behind

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# -------------------------------------------------------------------------------------------------------- torch.compile


class TracedLazyLogits(LazyBase):
    """Lazy logits under ``torch.compile``: a plain object, which the compiler can create and trace."""

    @staticmethod
    def _wrap(state: LazyState, view: Any = None, meta_tensor: Tensor | None = None) -> TracedLazyLogits:
        lazy = TracedLazyLogits()
        lazy._init(state, view, meta_tensor)
        return lazy

    def _get_real(self) -> Tensor | None:
        if not torch.compiler.is_compiling() and self._state.requires_grad and not torch.is_grad_enabled():
            function = running_function(self)
            if function is not None:  # autograd does not see this argument
                raise TypeError(
                    f"{function.__name__}.apply() of logits that a graph with fullgraph=True returned as a plain "
                    "object would lose their gradient. Pass logits.materialize(), or patch the compiled module: "
                    "flce.patch_model(module)"
                )
        return LazyBase._get_real(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._state.ndim

    ndimension = dim

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
        # Python calls this for attributes that the class does not define.
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"lazy logits have no attribute {name!r}")
        member = getattr(torch.Tensor, name)
        if callable(member):
            return lambda *args, **kwargs: dispatch(member, (self, *args), kwargs)
        return getattr(materialize_arguments(self, member), name)


def _define_methods() -> None:
    """Define the lazy operations and the operators as methods. Python looks operators up on the class."""

    def method(name: str, member: Any) -> Callable[..., Any]:
        def call(self: TracedLazyLogits, *args: Any, **kwargs: Any) -> Any:
            return dispatch(member, (self, *args), kwargs)

        call.__name__ = name
        return call

    operators = """
        add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul
        rmatmul neg abs eq ne lt le gt ge getitem setitem float int bool array
    """.split()  # noqa: SIM905
    members = [(name, getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    operations = [name for name, member in members if callable(member) and member in tables.OPERATIONS]
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        setattr(TracedLazyLogits, name, property(lambda lazy, name=name: getattr(lazy._state, name)))  # type: ignore[misc]
    for name in [f"__{op}__" for op in operators] + operations:
        if name not in TracedLazyLogits.__dict__:
            setattr(TracedLazyLogits, name, method(name, getattr(torch.Tensor, name)))
    TracedLazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


_define_methods()
CLASS_BY_COMPILING.update({False: LazyLogits, True: TracedLazyLogits})
