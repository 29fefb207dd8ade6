"""`HeadCall`: the record of one call of a head, which all lazy logits from this call share.

Lazy logits are computed after the call. By then the weight may have changed, or a wrapper may have freed it, and the
gradient of the loss does not pass through the logits. A :class:`HeadCall` stores the hooks of wrappers that wait for
this gradient, gathers the weight again, and checks that the weight is unchanged. ``patch.py`` creates the records;
``lazy/`` uses them.

Three things show a change of a tensor. In-place operations increase the version of a tensor. Fused optimizers do not,
so `OptimizerSteps` counts the steps of each optimizer. A sample of values finds writes through ``.data`` or NumPy and
writes in inference mode.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle, unserializable_hook

from flce.huggingface.usage import Usage
from flce.huggingface.wrappers import (
    Hook,
    checkpoint_pack_hook,
    fsdp2_unit,
    hook_identity,
    is_freed,
    is_gathered,
    is_partitioned,
    stand_in_parameters,
)
from flce.ops.arguments import autocast_dtype
from flce.torch_ops import is_in_forward_ad, is_transformed

# A sample has at most 64 entries along each dimension, and at most 64 x 64 entries.
_SAMPLE = 64


class StaleLogitsError(RuntimeError):
    """A tensor that lazy logits are computed from has changed since the model ran."""


class TensorSnapshot:
    """A tensor as it was when the head was called.

    Args:
        tensor: the tensor.
        name: for messages, "the output embedding was".
        parameter: the DTensor that `tensor` is the local tensor of. PyTorch increases only the version of the DTensor,
            and optimizers have the DTensor.
    """

    def __init__(self, tensor: Tensor, name: str, parameter: Tensor | None = None) -> None:
        self.tensor = tensor
        self.parameter = tensor if parameter is None else parameter
        self._name = name
        self._record = self._read()
        self._sample_index = _sample_slices(tensor.shape)
        # A meta tensor has no values.
        self._sample = (
            None if tensor.is_meta else tensor.detach()[self._sample_index].clone(memory_format=torch.contiguous_format)
        )

    def _read(self) -> tuple[Any, Any, int | None]:
        """Return the version, as `version_of` does; shape, dtype and device; and the address."""
        tensor, parameter = self.tensor, self.parameter
        version = None if torch.compiler.is_compiling() or parameter.is_inference() else parameter._version
        address = None if tensor.is_meta else tensor.detach().data_ptr()
        return version, (tensor.shape, tensor.dtype, tensor.device), address

    def check_unchanged(self, can_synchronize: bool) -> None:
        """Raise `StaleLogitsError` if the tensor has changed.

        ``can_synchronize``: compare values on a GPU, for which the host waits, even if nothing indicates a change.
        """
        tensor, (version, layout, address), record = self.tensor, self._record, self._read()
        if record[0] != version:
            raise self.stale_error("in place")
        if record[1] != layout:
            raise self.stale_error(f"to {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}")
        compare = can_synchronize or tensor.is_cpu or record[2] != address
        if self._sample is None or not compare or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        sample = tensor.detach()[self._sample_index]
        # NaN != NaN, so equal samples with NaN are found by their bytes.
        if not (torch.equal(sample, self._sample) or torch.equal(_as_bytes(sample), _as_bytes(self._sample))):
            raise self.stale_error(
                "through .data or NumPy, in inference mode, by an exchange of weights, or by merging an adapter"
            )

    def for_copy(self) -> TensorSnapshot | None:
        """Return None for a copy of the tensor, which later changes do not reach, or this snapshot if the tensor has
        changed already: the copy contains the change."""
        try:
            self.check_unchanged(can_synchronize=False)
        except StaleLogitsError:
            return self
        return None

    def stale_error(self, cause: str) -> StaleLogitsError:
        return StaleLogitsError(
            f"these lazy logits can no longer be computed: {self._name} changed {cause} since the model ran. Read them "
            "before that, or call outputs.logits.materialize() before it, for example in a forward hook of the model."
        )


def version_of(tensor: Tensor) -> int | None:
    """Return the version of a tensor, or None in a graph and for a tensor of inference mode, which has none."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


@functools.lru_cache
def _sample_slices(shape: torch.Size) -> tuple[slice, ...]:
    """Return the index of a sample: entries at equal distances. The last dimension is sampled most densely."""
    remaining = _SAMPLE * _SAMPLE
    steps: dict[int, int] = {}
    for dim in [len(shape) - 1, *range(len(shape) - 1)]:
        steps[dim] = max(1, -(-shape[dim] // min(_SAMPLE, remaining)))
        remaining = max(1, remaining // max(1, -(-shape[dim] // steps[dim])))
    return tuple([slice(None, None, steps[dim]) for dim in range(len(shape))])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class OptimizerSteps:
    """Counts of optimizer steps in this process. Fused optimizers change weights without increasing their version."""

    def __init__(self) -> None:
        self.count = 0
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Start counting, if it has not been started in this process."""
        if not self._handles:
            self._handles.append(register_optimizer_step_post_hook(self._on_step))

    def optimizers_since(self, count: int) -> list[Optimizer]:
        return [optimizer for optimizer, last in self._last.items() if last > count]

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.count += 1
        self._last[optimizer] = self.count


optimizer_steps = OptimizerSteps()


def reason_not_lazy(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason why this call cannot return lazy logits, so that stock code has to run, or None if it can."""
    kind = type(weight)
    ordinary = kind in (Tensor, nn.Parameter) or (
        kind.__torch_function__ is nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    )
    if type(hidden) is not Tensor or not ordinary:  # fake and quantised tensors
        return f"hidden states are a {type(hidden).__name__}, the head's weight is a {kind.__name__}"
    if not hidden.is_floating_point() or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        return f"the head {tuple(weight.shape)} does not fit hidden states {tuple(hidden.shape)} of {hidden.dtype}"
    if hidden.device != weight.device:
        return f"hidden states are on {hidden.device}, the head's weight is on {weight.device}"
    same_dtype = hidden.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    if not same_dtype and autocast_dtype(hidden.device.type) is None:
        return f"hidden states are {hidden.dtype}, the head is {weight.dtype}, and autocast is off"
    if is_in_forward_ad():
        return "the model is differentiated in forward mode"
    # A transform of torch.func cannot process lazy logits.
    return "the model runs in a transform of torch.func" if is_transformed() else None


class HeadCall:
    """One call of the head ``layer`` (None if no layer computes the logits) in a forward of ``model``."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        usage: Usage,
        layer: nn.Module | None,
        model: nn.Module | None,
        parameters: Sequence[Tensor | None] = (None, None),
    ) -> None:
        """``parameters``: if the head is divided, the DTensors of which ``weight`` and ``bias`` are local tensors."""
        self.usage = usage
        if torch.is_grad_enabled():
            usage.forwards_of_head = usage.forwards
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self._wrapper_copy: tuple[Hook, HeadCall] | None = None
        """Set for logits that an autograd function of a wrapper has copied: the backward of this function as a hook,
        and the call of the logits before the copy."""
        self.has_bypassing_gradient = False
        """True if a gradient will not pass through the logits, so that hooks of users would miss it."""
        self.has_backward_begun = False
        self._layer = None if layer is None else weakref.ref(layer)
        self._model = None if model is None else weakref.ref(model)
        self._snapshots = [
            TensorSnapshot(tensor, "the output embedding was", parameter)
            for tensor, parameter in zip((weight, bias), parameters, strict=True)
            if tensor is not None
        ]
        self.partitioned_parameters = [t for t in (weight, bias) if t is not None and is_partitioned(t)]
        """Parameters that DeepSpeed ZeRO-3 partitions."""
        self._step = optimizer_steps.count
        pack = checkpoint_pack_hook()
        self._checkpoint = None if pack is None else weakref.ref(pack)

    def for_wrapper_copy(self, hook: Hook) -> HeadCall:
        """Return a call for a copy of the logits by a wrapper's function. Gradients of the copy run ``hook``."""
        call = copy.copy(self)
        call.hooks, call._wrapper_copy = OrderedDict(), (hook, self)
        return call

    def all_hooks(self) -> Iterator[Hook]:
        """Yield the hooks in the order in which they get a gradient."""
        yield from self.hooks.values()
        if self._wrapper_copy is not None:
            hook, call = self._wrapper_copy
            yield hook
            yield from call.all_hooks()

    def on_backward_begin(self) -> None:
        """Note that a gradient has arrived."""
        self.has_backward_begun = True
        if self._wrapper_copy is not None:
            self._wrapper_copy[1].on_backward_begin()

    @property
    def is_outside_checkpoint(self) -> bool:
        """True if the running code is within a checkpoint and the call was outside of it."""
        pack = checkpoint_pack_hook()
        return pack is not None and (self._checkpoint is None or self._checkpoint() is not pack)

    # -- the weight

    def is_freed(self) -> bool:
        """Return True if FSDP has freed the weight or the bias."""
        return any(is_freed(snapshot.tensor) for snapshot in self._snapshots)

    def may_be_changed_by(self, optimizer: Optimizer) -> bool:
        """Return True if a step of ``optimizer`` may change the weight or the bias."""
        layer = None if self._layer is None else self._layer()
        own = () if layer is None else tuple(layer.parameters(recurse=False))
        is_registered = all(any(_base_or_self(w.parameter) is parameter for parameter in own) for w in self._snapshots)
        trained = [_base_or_self(w.parameter) for w in self._snapshots if w.parameter.requires_grad]
        # An unsharded parameter is itself in the groups of the optimizer that changes it. Shards are other tensors.
        if is_registered and not self.partitioned_parameters and self.fsdp2_unit() is None:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            trained = [parameter for parameter in trained if id(parameter) in held]
        return bool(trained)

    def check_unchanged(self, can_synchronize: bool) -> None:
        """Raise `StaleLogitsError` if the weight or the bias has changed since the call, see `TensorSnapshot`."""
        if any(self.may_be_changed_by(optimizer) for optimizer in optimizer_steps.optimizers_since(self._step)):
            raise self._snapshots[0].stale_error("by an optimizer step")
        stepped = optimizer_steps.count > self._step  # perhaps an optimizer that no longer exists
        for snapshot in self._snapshots:
            snapshot.check_unchanged(can_synchronize or self.has_backward_begun or stepped)

    def fsdp2_unit(self) -> Any:
        """Return the innermost FSDP2 unit that contains the layer, or None."""
        layer, model = [None if ref is None else ref() for ref in (self._layer, self._model)]
        return fsdp2_unit(layer, model, self.all_hooks())


def _base_or_self(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


# --------------------------------------------------------------------------------------------------- several calls


@contextlib.contextmanager
def gather_weights(calls: Sequence[HeadCall], tensors: Sequence[Tensor], can_synchronize: bool) -> Iterator[None]:
    """Gather weights of ``calls`` that FSDP or ZeRO-3 has freed, and parameters of stand-ins among ``tensors``. Free
    them at the end. Raise `StaleLogitsError` if a weight cannot be gathered or has changed."""
    parameters = (*stand_in_parameters(tensors), *(p for call in calls for p in call.partitioned_parameters))
    missing = {id(p): p for p in parameters if not is_gathered(p)}
    with contextlib.ExitStack() as stack:
        if missing:
            stack.enter_context(sys.modules["deepspeed"].zero.GatheredParameters(list(missing.values())))
        for call in calls:
            if call.is_freed():
                unit = call.fsdp2_unit()
                if unit is None:
                    raise StaleLogitsError(
                        "these lazy logits can no longer be computed: the wrapper that shards the head has freed its "
                        "weight. Compute the loss, or call outputs.logits.materialize(), within the model's forward or "
                        "right after it."
                    )
                unit.unshard()
                stack.callback(unit.reshard)
            call.check_unchanged(can_synchronize)
        yield


def add_wrapper_hook(hook: Hook, calls: Sequence[HeadCall]) -> RemovableHandle:
    """Register a wrapper's hook for each gradient of logits of these calls (of a head and its adapters)."""
    hooks = calls[0].hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def register_wrapper_hooks(value: Tensor, calls: Sequence[HeadCall]) -> Tensor:
    """Run the wrappers' hooks when a gradient arrives at ``value``, which was computed from lazy logits."""
    if calls and value.requires_grad:
        # An in-place write to a view gives the view a new node in the graph, without its hooks. Hooks of the base stay.
        # The base of a DTensor's local tensor is outside of the graph.
        base = _base_or_self(value)
        (base if base.requires_grad else value).register_hook(
            unserializable_hook(lambda grad: run_wrapper_hooks(grad, calls))
        )
    return value


def run_wrapper_hooks(grad: Tensor, calls: Sequence[HeadCall]) -> Tensor:
    """Return the gradient after the wrappers' hooks. Of several hooks with the same `hook_identity`, one runs."""
    for call in calls:
        call.on_backward_begin()
    for hook in {hook_identity(hook): hook for call in calls for hook in call.all_hooks()}.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad
