"""One call of the output embedding: what all lazy logits that come from it share.

Lazy logits are computed late, from a weight that may have changed or been taken away since, and their gradients do not
pass by the logits. A :class:`HeadCall` knows who waits for those gradients, how to get the weight back, and whether it
still is what the model ran with.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from flce.core import private
from flce.huggingface.partitioned import is_gathered, is_partitioned, stand_in_parameters
from flce.huggingface.staleness import StaleLogitsError, TensorSnapshot, optimizer_steps
from flce.huggingface.usage import Usage, calls_with_logits
from flce.huggingface.wrappers import Hook, checkpoint_pack_hook, fsdp2_unit, hook_identity, is_freed, unsharded
from flce.ops.arguments import autocast_dtype
from flce.torch_ops.frames import is_exported, is_in_forward_ad, is_transformed


def reason_not_lazy(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the fused loss cannot stand for this call: stock code runs, and reports errors. None: it can."""
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
    # A transform could not replay our objects.
    return "the model runs in a transform of torch.func" if is_transformed() else None


def is_exporting_or_tracing() -> bool:
    """Whether a program is being made of the model, which is to run without flce: by torch.export or torch.jit."""
    return is_exported() if torch.compiler.is_compiling() else private.get_tracing_state() is not None


class HeadCall:
    """One call of one linear layer.

    Args:
        weight: ``(V, H)`` of the layer.
        bias: ``(V,)`` or None.
        usage: where to count what becomes of the logits.
        layer: None where the product is made by no layer.
        owner: the model whose forward is running.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, usage: Usage, layer: nn.Module | None, owner: nn.Module | None
    ) -> None:
        self.usage = usage
        self.forward = usage.forwards
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self._wrapper_copy: tuple[Hook, HeadCall] | None = None
        """For logits that a wrapper's autograd function has copied: what that does in backward, and the call before."""
        self.has_bypassing_gradient = False
        """Whether a gradient will pass by the logits, which hooks of users would not see."""
        self.has_backward_begun = False
        self.has_returned_values = False
        """Whether some of the logits, or values of them, were computed without the others."""
        self._layer = None if layer is None else weakref.ref(layer)
        self._owner = None if owner is None else weakref.ref(owner)
        self._snapshots = [
            TensorSnapshot(tensor, "the output embedding was") for tensor in (weight, bias) if tensor is not None
        ]
        self.partitioned_parameters = [t for t in (weight, bias) if t is not None and is_partitioned(t)]
        """The parameters that DeepSpeed ZeRO-3 has."""
        self._step = optimizer_steps.count
        pack = checkpoint_pack_hook()
        self._checkpoint = None if pack is None else weakref.ref(pack)
        calls_with_logits.add(self)

    def for_wrapper_copy(self, hook: Hook) -> HeadCall:
        """The call for a copy of its logits, which a wrapper's function made. Gradients of the copy run ``hook``."""
        call = copy.copy(self)
        call.hooks, call._wrapper_copy = OrderedDict(), (hook, self)
        return call

    def all_hooks(self) -> Iterator[Hook]:
        """In the order in which a gradient meets them."""
        yield from self.hooks.values()
        if self._wrapper_copy is not None:
            hook, call = self._wrapper_copy
            yield hook
            yield from call.all_hooks()

    def on_backward_begin(self) -> None:
        """A gradient has come."""
        self.has_backward_begun = True
        if self._wrapper_copy is not None:
            self._wrapper_copy[1].on_backward_begin()

    @property
    def is_outside_checkpoint(self) -> bool:
        """Whether this code runs within a checkpoint that the call was not made in."""
        pack = checkpoint_pack_hook()
        return pack is not None and (self._checkpoint is None or self._checkpoint() is not pack)

    # -- the weight

    def is_freed(self) -> bool:
        """Whether FSDP has freed the weight."""
        return any(is_freed(snapshot.tensor) for snapshot in self._snapshots)

    def may_be_changed_by(self, optimizer: Optimizer) -> bool:
        """Whether a step of ``optimizer`` changes the weight. Where that cannot be told: yes."""
        layer, *_ = place = self.place()
        own = () if layer is None else tuple(layer.parameters(recurse=False))
        registered = all(any(_base_or_self(w.tensor) is parameter for parameter in own) for w in self._snapshots)
        trained = [_base_or_self(w.tensor) for w in self._snapshots if w.tensor.requires_grad]
        # Then an optimizer that changes these parameters holds them, rather than shards of them.
        if registered and not self.partitioned_parameters and fsdp2_unit(*place) is None:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            trained = [parameter for parameter in trained if id(parameter) in held]
        return bool(trained)

    def check_unchanged(self, can_synchronize: bool) -> None:
        """Raises RuntimeError where the weight is no longer what the model ran with.

        Args:
            can_synchronize: compare values, for which a GPU is waited for, also where nothing points to a change.
        """
        if any(self.may_be_changed_by(optimizer) for optimizer in optimizer_steps.optimizers_since(self._step)):
            raise self._snapshots[0].stale_error("by an optimizer step")
        stepped = optimizer_steps.count > self._step  # perhaps by an optimizer that no longer exists
        for snapshot in self._snapshots:
            snapshot.check_unchanged(can_synchronize or self.has_backward_begun or stepped)

    def place(self) -> tuple[nn.Module | None, nn.Module | None, Iterator[Hook]]:
        """The layer and the owner as far as they still exist, and the hooks; for `unsharded`."""
        layer = None if self._layer is None else self._layer()
        owner = None if self._owner is None else self._owner()
        return layer, owner, self.all_hooks()


def _base_or_self(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


# --------------------------------------------------------------------------------------------------- several calls


@contextlib.contextmanager
def gather_weights(
    calls: Sequence[HeadCall], check: Callable[[HeadCall], None] | None = None, tensors: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Gathers the weights that FSDP or ZeRO-3 has freed, and frees them at the end. Costs an all-gather for each unit.

    Args:
        calls: whose weights are wanted.
        check: called with each, once the weights are there.
        tensors: which may stand for parameters of ZeRO-3, that are wanted too.
    """
    parameters = (*stand_in_parameters(tensors), *(p for call in calls for p in call.partitioned_parameters))
    wanted = {id(p): p for p in parameters if not is_gathered(p)}
    with contextlib.ExitStack() as stack:
        if wanted:
            # DeepSpeed gathers them in every process.
            stack.enter_context(sys.modules["deepspeed"].zero.GatheredParameters(list(wanted.values())))
        for call in calls:
            if call.is_freed():
                stack.enter_context(unsharded(*call.place()))
                if check is not None and call.is_freed():
                    raise StaleLogitsError(
                        "these lazy logits can no longer be computed: the wrapper that shards the head has freed its "
                        "weight. Compute the loss, or call outputs.logits.materialize(), within the model's forward or "
                        "right after it."
                    )
            if check is not None:
                check(call)
        yield


def add_wrapper_hook(hook: Hook, calls: Sequence[HeadCall]) -> RemovableHandle:
    """Have a wrapper's hook run for every gradient that leaves logits of these calls (of a head and its adapters)."""
    hooks = calls[0].hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def register_wrapper_hooks(value: Tensor, calls: Sequence[HeadCall]) -> Tensor:
    """Run the wrappers' hooks when a gradient arrives at ``value``, which was made from lazy logits."""
    if calls and value.requires_grad:
        # A write to a view moves it in the graph, and leaves its hooks behind.
        _base_or_self(value).register_hook(unserializable_hook(lambda grad: run_wrapper_hooks(grad, calls)))
    return value


def run_wrapper_hooks(grad: Tensor, calls: Sequence[HeadCall]) -> Tensor:
    """The gradient as the wrappers' hooks leave it. Of several hooks with one `hook_identity` one runs."""
    for call in calls:
        call.on_backward_begin()
    for hook in {hook_identity(hook): hook for call in calls for hook in call.all_hooks()}.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad
