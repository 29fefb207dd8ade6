"""What the wrappers of distributed training do to a model, as far as lazy logits have to take part in it.

FSDP, DeepSpeed and Lightning Fabric register hooks on a model's outputs, to be told that backward begins; DDP puts an
autograd function behind them; FSDP and DeepSpeed free a weight after its layer's forward. All of them are recognised by
identity, and only where their module has been imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from flce.core import private
from flce.huggingface.partitioned import is_gathered, is_partitioned

Hook = Callable[[Tensor], Tensor | None]

# Behind a module's outputs, and behind its inputs.
_ZERO_3_FUNCTION_NAMES = ("pre_bwd_fn", "post_bwd_fn")


def _imported_attribute(module: str, name: str) -> Any:
    """An attribute of a module, None where nothing has imported it."""
    return getattr(sys.modules.get(module), name, None)


# ---------------------------------------------------------------------------------------------------------- hooks


def is_wrapper_hook(hook: Any) -> bool:
    """Whether a wrapper made this hook of a tensor.

    Such a hook does not look at the gradient's values. It returns the gradient, or a multiple of it, so it may be given
    the gradient of a loss in place of that of the logits.
    """
    known = private.fsdp1_hook, private.fabric_hook, private.standalone_fabric_hook  # their first arguments are given
    is_partial = isinstance(hook, functools.partial) and hook.func in known
    return is_partial or _fsdp2_state(hook) is not None or _is_deepspeed_hook(hook)


def is_called_by_wrapper() -> bool:
    """Whether a wrapper's own code has asked for a ``grad_fn``: it only wants to know whether there is one."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("flce."):
        frame = frame.f_back
    return frame.f_globals.get("__name__") in ("torch.nn.parallel.distributed", "deepspeed.runtime.utils")


def _fsdp2_state(hook: Any) -> Any:
    """The ``FSDPState`` whose method a hook is, else None."""
    owner = getattr(hook, "__self__", None)
    return owner if private.FSDPState is not None and isinstance(owner, private.FSDPState) else None


def _is_deepspeed_hook(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    known = () if private.deepspeed_hook is None else private.deepspeed_hook.__code__.co_consts
    return code is not None and code in known


def hook_identity(hook: Hook) -> int:
    """The same for hooks of which one is enough: DeepSpeed has one for each output, and each divides the gradient."""
    if _is_deepspeed_hook(hook):
        function: Any = hook
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        return id(cells["self"].cell_contents)
    return id(hook)


def hook_from_node(node: Any) -> Hook | None:
    """What the function of DDP, or of DeepSpeed's hooks on a module, that made a node does in backward, as a hook.

    None for another function.
    """
    if hasattr(node, "ddp_weakref"):
        known = (private.DDPSink,)
    else:
        owned = vars(getattr(node, "module", None) or SimpleNamespace())
        known = tuple(owned[name] for name in _ZERO_3_FUNCTION_NAMES if name in owned)
    function = next((f for f in known if f is not None and private.is_node_of(node, f)), None)
    if function is None:
        return None
    context = SimpleNamespace(**vars(node))  # not the node, which holds the logits' place in the graph
    last = -1

    def hook(grad: Tensor) -> None:
        nonlocal last
        before, last = last, private.current_graph_task_id()
        if last == before != -1 and hasattr(context, "module"):
            # DeepSpeed counts: once for each output and backward. Here a gradient comes from each loss of the output.
            own = context.module.parameters(recurse=False)
            if not hasattr(context, "pre_backward_function") or all(is_gathered(p) for p in own if is_partitioned(p)):
                return
            function.apply(grad)  # the backward of another output has freed the weight: count one more
        function.backward(context, grad)

    return hook


# -------------------------------------------------------------------------------------------------------- weights


def is_freed(weight: Tensor) -> bool:
    """Whether a wrapper has taken the memory of a weight away, until it is needed again."""
    return weight.numel() > 0 and weight.device.type != "meta" and weight.untyped_storage().size() == 0


@contextlib.contextmanager
def unsharded(layer: nn.Module | None, owner: nn.Module | None, hooks: Iterable[Hook]) -> Iterator[None]:
    """A context in which the unit of FSDP that has ``layer`` in it is unsharded; one that does nothing without a unit.

    The arguments are those of `fsdp2_unit`.
    """
    hooks = list(hooks)
    unit = fsdp2_unit(layer, owner, hooks)
    if unit is not None:
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()
        return
    unit = None if private.fsdp1_unsharded is None else _fsdp1_unit(layer, owner, hooks)
    with contextlib.nullcontext() if unit is None else private.fsdp1_unsharded(unit):
        yield


def _fsdp1_unit(layer: nn.Module | None, owner: nn.Module | None, hooks: Iterable[Hook]) -> Any:
    """The innermost unit of FSDP1 that has ``layer`` in it; None where there is none."""
    kind = _imported_attribute("torch.distributed.fsdp", "FullyShardedDataParallel")
    if kind is None or layer is None:
        return None
    around = [hook.args[0] for hook in hooks if isinstance(hook, functools.partial) and hook.func is private.fsdp1_hook]
    return _innermost([*([] if owner is None else owner.modules()), *around], kind, layer)


def _innermost(units: Iterable[Any], kind: Any, layer: nn.Module) -> Any:
    containing = [u for u in units if isinstance(u, kind) and any(module is layer for module in u.modules())]
    return min(containing, key=lambda unit: len(list(unit.modules())), default=None)


def fsdp2_unit(layer: nn.Module | None, owner: nn.Module | None, hooks: Iterable[Hook]) -> Any:
    """The innermost unit of FSDP2 that has ``layer`` in it; None where there is none.

    Args:
        layer: whose weight is wanted.
        owner: a module that contains it.
        hooks: wrappers' hooks on its output. Where ``owner`` has no units, those around it are only known by these.
    """
    kind = _imported_attribute("torch.distributed.fsdp", "FSDPModule")
    if kind is None or layer is None:
        return None
    inner_units = [
        module for module in (layer, *([] if owner is None else owner.modules())) if isinstance(module, kind)
    ]
    states = [_fsdp2_state(hook) for hook in hooks]
    for unit in inner_units:  # the units of one tree know each other, also those around `owner`
        states += getattr(getattr(private.fsdp_state_of(unit), "_state_ctx", None), "all_states", ())
    around = {id(module): module for state in states for module in getattr(state, "_modules", ())}.values()
    return _innermost((*inner_units, *around), kind, layer)


def reason_wrapper_not_lazy(owner: Any, weight: Tensor) -> str | None:
    """Why a wrapper's weight cannot be had when the loss is computed; None: it can. ``owner``: the model, if known."""
    if is_partitioned(weight) and current_checkpoint() is not None:
        return (
            "the head of a model under DeepSpeed ZeRO-3 runs within torch.utils.checkpoint, whose second pass takes "
            "its weight away before the gradient comes; leave head and loss outside of it"
        )
    # Units of FSDP1 need processes, and so do DTensors.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    fsdp1 = (
        None
        if private.fsdp1_unsharded is not None
        else _imported_attribute("torch.distributed.fsdp", "FullyShardedDataParallel")
    )
    if fsdp1 is not None and owner is not None and isinstance(owner.get_output_embeddings(), fsdp1):
        return (
            "the head is an FSDP1 unit of its own, which flce cannot unshard with this version of PyTorch; leave it in "
            "the root unit, or use FSDP2"
        )
    dtensor = _imported_attribute("torch.distributed.tensor", "DTensor")
    if dtensor is not None and isinstance(weight, dtensor):
        return (
            "the head's weight is a DTensor when it is called (tensor parallelism); flce.cross_entropy computes the "
            "loss of logits that are split over the vocabulary"
        )
    return None


def checkpoint_pack_hook() -> Any:
    """What decides which tensors autograd saves, if that is ``checkpoint(use_reentrant=False)``, else None."""
    hooks = private.saved_tensors_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    return pack if getattr(pack, "__module__", None) == "torch.utils.checkpoint" else None


@contextlib.contextmanager
def suspend_checkpoint() -> Iterator[None]:
    """Autograd saves tensors as outside of a checkpoint, and that keeps none of these operations' results either."""
    has_caching_mode = any(type(mode).__module__ == "torch.utils.checkpoint" for mode in private.dispatch_modes())
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        private.disable_current_modes() if has_caching_mode else contextlib.nullcontext(),
    ):
        yield


def current_checkpoint() -> Any:
    """What ``torch.utils.checkpoint`` runs this code for: the same object in the first pass and when it recomputes.

    None outside of it, and where its insides are not as known.
    """
    pack = checkpoint_pack_hook()
    if pack is not None:
        cells = inspect.getclosurevars(pack).nonlocals
        return cells["frame"] if "frame" in cells else cells.get("target_frame_ref", lambda: None)()
    passes = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code not in passes:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["ctx"]


def is_reentrant(checkpoint: Any) -> bool:
    """Whether it runs its first pass without gradients, which then says nothing of whether a loss is wanted."""
    return private.is_node_of(checkpoint, CheckpointFunction)
