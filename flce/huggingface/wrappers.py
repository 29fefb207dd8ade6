"""Support of lazy logits for the wrappers of distributed training and for checkpointing; called by ``head_call.py``.

FSDP, DeepSpeed and Lightning Fabric register hooks on a model's outputs, which run when backward begins. DDP applies an
autograd function to the outputs. FSDP and DeepSpeed free a weight after the forward of its layer. flce recognises their
functions by identity, and only if their module has been imported. A *unit* of FSDP is a module whose weights FSDP
gathers and frees together.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from flce.core import private

Hook = Callable[[Tensor], Tensor | None]

# Attributes of a module under ZeRO-3: the autograd functions that DeepSpeed applies to its outputs and to its inputs.
_ZERO_3_FUNCTION_NAMES = ("pre_bwd_fn", "post_bwd_fn")

_stand_in_memory = WeakTensorKeyDictionary()
"""The memory of each parameter's stand-ins. Stand-ins of one parameter share it, so that they compare as equal."""
_parameter_of_stand_in: dict[int, weakref.ref[Tensor]] = {}
"""The parameter of a stand-in, by the address of the stand-in's storage."""


def _imported_attribute(module: str, name: str) -> Any:
    """Return an attribute of a module, or None if the module has not been imported."""
    return getattr(sys.modules.get(module), name, None)


# ---------------------------------------------------------------------------------------------------------- hooks


def is_wrapper_hook(hook: Any) -> bool:
    """Return True if ``hook`` is the tensor hook of a wrapper.

    A wrapper's hook does not read the values of the gradient. It returns the gradient, or a multiple of it. So flce may
    call it with the gradient of a loss instead of the gradient of the logits.
    """
    known = private.fsdp1_hook, private.fabric_hook, private.standalone_fabric_hook  # registered as partial functions
    is_partial = isinstance(hook, functools.partial) and hook.func in known
    return is_partial or _fsdp2_state(hook) is not None or _is_deepspeed_hook(hook)


def calling_module() -> str:
    """Return the name of the module of the innermost frame outside of flce."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("flce."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _fsdp2_state(hook: Any) -> Any:
    """Return the ``FSDPState`` if ``hook`` is a method of it, else None."""
    state = getattr(hook, "__self__", None)
    return state if private.FSDPState is not None and isinstance(state, private.FSDPState) else None


def _is_deepspeed_hook(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    # `private.deepspeed_hook` is the method that defines the hook.
    return code is not None and private.deepspeed_hook is not None and code in private.deepspeed_hook.__code__.co_consts


def hook_identity(hook: Hook) -> int:
    """Return a number that is equal for hooks of which only one may run.

    DeepSpeed registers a hook on each output of a model, and each of these hooks divides the gradient.
    """
    if _is_deepspeed_hook(hook):
        function: Any = hook
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        return id(cells["self"].cell_contents)
    return id(hook)


def hook_from_node(node: Any) -> Hook | None:
    """Return the backward of a node as a hook, if an autograd function of DDP or DeepSpeed created it, else None."""
    if hasattr(node, "ddp_weakref"):
        functions = (private.DDPSink,)
    else:
        attributes = vars(getattr(node, "module", None) or SimpleNamespace())
        functions = tuple(attributes[name] for name in _ZERO_3_FUNCTION_NAMES if name in attributes)
    function = next((f for f in functions if f is not None and private.is_node_of(node, f)), None)
    if function is None:
        return None
    context = SimpleNamespace(**vars(node))  # a copy: the node would keep the graph of the logits alive
    last_backward = -1

    def hook(grad: Tensor) -> None:
        nonlocal last_backward
        previous, last_backward = last_backward, private.current_graph_task_id()
        if last_backward == previous != -1 and hasattr(context, "module"):
            # DeepSpeed expects one gradient for each output in a backward. Here each loss of the output sends one.
            weights = [p for p in context.module.parameters(recurse=False) if is_partitioned(p)]
            if not hasattr(context, "pre_backward_function") or all(map(is_gathered, weights)):
                return
            function.apply(grad)  # the backward of another output has freed the weight: increase DeepSpeed's count
        function.backward(context, grad)

    return hook


# -------------------------------------------------------------------------------------------------------- weights


def is_freed(weight: Tensor) -> bool:
    """Return True if a wrapper has freed the memory of a weight until the next gather."""
    return weight.numel() > 0 and weight.device.type != "meta" and weight.untyped_storage().size() == 0


def fsdp2_unit(layer: nn.Module | None, model: nn.Module | None, hooks: Iterable[Hook]) -> Any:
    """Return the innermost FSDP2 unit that contains ``layer``, or None.

    Args:
        layer: the head.
        model: a module that contains the head.
        hooks: wrappers' hooks on the output of the head. If ``model`` contains no units, the hooks lead to the units
            that contain ``model``.
    """
    unit_class = _imported_attribute("torch.distributed.fsdp", "FSDPModule")
    if unit_class is None or layer is None:
        return None
    inner_modules = (layer, *([] if model is None else model.modules()))
    inner_units = [module for module in inner_modules if isinstance(module, unit_class)]
    states = [_fsdp2_state(hook) for hook in hooks]
    for unit in inner_units:  # the states of one tree of units are linked, including units that contain `model`
        states += getattr(getattr(private.fsdp_state_of(unit), "_state_ctx", None), "all_states", ())
    outer_modules = [module for state in states for module in getattr(state, "_modules", ())]
    units = [m for m in (*inner_units, *outer_modules) if isinstance(m, unit_class) and layer in m.modules()]
    return min(units, key=lambda unit: len(list(unit.modules())), default=None)


def reason_wrapper_not_lazy(model: Any, weight: Tensor) -> str | None:
    """Return the reason why a wrapper's weight cannot be gathered for the loss of ``model``, or None if it can."""
    if is_partitioned(weight) and current_checkpoint() is not None:
        return (
            "the head of a model under DeepSpeed ZeRO-3 runs within torch.utils.checkpoint, whose second pass frees "
            "the weight of the head before the gradient is computed; move head and loss out of the checkpoint"
        )
    # FSDP1 units and DTensors exist only in an initialized process group.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    fsdp1 = _imported_attribute("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp1 is not None and model is not None and isinstance(model.get_output_embeddings(), fsdp1):
        return "the head is a separate FSDP1 unit; leave the head in the root unit, or use FSDP2"
    return None


def checkpoint_pack_hook() -> Any:
    """Return the pack hook of a running ``checkpoint(use_reentrant=False)``, or None."""
    hooks = private.saved_tensors_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    return pack if getattr(pack, "__module__", None) == "torch.utils.checkpoint" else None


@contextlib.contextmanager
def suspend_checkpoint() -> Iterator[None]:
    """Return a context in which autograd saves tensors, and selective checkpointing caches none, as if outside."""
    has_caching_mode = any(type(mode).__module__ == "torch.utils.checkpoint" for mode in private.dispatch_modes())
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        private.disable_current_modes() if has_caching_mode else contextlib.nullcontext(),
    ):
        yield


def current_checkpoint() -> Any:
    """Return an object that identifies the running ``torch.utils.checkpoint``, the same one in both of its passes.

    Return None outside of a checkpoint, and if this version of PyTorch implements checkpoints in an unknown way.
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
    """Return True for ``checkpoint(use_reentrant=True)``, whose first pass disables gradients even in training."""
    return private.is_node_of(checkpoint, CheckpointFunction)


# -------------------------------------------------------------------------------------- parameters of DeepSpeed ZeRO-3

# DeepSpeed gathers a parameter while its module runs, by assigning new memory to it, and later frees this memory. A
# view of the parameter would keep the gathered memory alive as long as the logits. So lazy logits store a stand-in: a
# tensor with the shape of the parameter, the same place in the autograd graph, and NaN in all entries.
# `resolve_stand_in` replaces the stand-in by the parameter while the parameter is gathered.


def is_partitioned(tensor: Tensor) -> bool:
    """Return True if ZeRO-3 partitions this parameter, gathered or not."""
    return hasattr(tensor, "ds_id")


def is_gathered(parameter: Any) -> bool:
    """Return True if a parameter of ZeRO-3 can be read now."""
    return bool(parameter.ds_status.name == "AVAILABLE")


def make_stand_in(alias: Tensor, parameter: Tensor) -> Tensor:
    """Turn ``alias``, a view of a gathered parameter or a detached view, into a stand-in. It frees the memory."""
    memory = _stand_in_memory.get(parameter)
    if memory is None or (memory.shape, memory.dtype, memory.device) != (alias.shape, alias.dtype, alias.device):
        memory = torch.empty_strided(alias.shape, [0] * alias.dim(), dtype=alias.dtype, device=alias.device)
        memory.fill_(torch.nan)
        _stand_in_memory[parameter] = memory
        key = memory.untyped_storage()._cdata
        _parameter_of_stand_in[key] = weakref.ref(parameter, lambda _: _parameter_of_stand_in.pop(key, None))
    alias.data = memory
    return alias


def stand_in_parameters(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters of those tensors that are stand-ins."""
    if not _parameter_of_stand_in or torch.compiler.is_compiling():
        return []
    parameters = [_parameter_of_stand_in.get(tensor.untyped_storage()._cdata, lambda: None)() for tensor in tensors]
    return [parameter for parameter in parameters if parameter is not None]


def resolve_stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor with the values of the parameter if ``tensor`` is a stand-in, else ``tensor``.

    Raises:
        RuntimeError: the parameter is not gathered.
    """
    parameters = stand_in_parameters([tensor])
    if not parameters:
        return tensor
    (parameter,) = parameters
    if not is_gathered(parameter):
        raise RuntimeError(
            "lazy logits were read while DeepSpeed ZeRO-3 was about to gather their head's weight for a module. Read "
            "them after the model's forward and before the next one"
        )
    if tensor.requires_grad == parameter.requires_grad and not (tensor.requires_grad and tensor.is_leaf):
        return parameter  # autograd saves a leaf by reference, and does not keep its gathered memory alive
    resolved: Tensor = _WithValues.apply(tensor, parameter.detach())
    return resolved


class _WithValues(torch.autograd.Function):
    """An autograd function that returns ``values``, with the place of ``tensor`` in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
