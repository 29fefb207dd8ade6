"""Parameters of DeepSpeed ZeRO-3: whole while a module that owns them runs, else one piece in each process.

DeepSpeed gathers a parameter by giving it other memory, and takes it apart by giving it none. A view would keep the
gathered memory for as long as logits exist. So lazy logits hold a stand-in, which has the parameter's shape and place
in the autograd graph, and NaN for all entries. :func:`resolve_stand_in` puts the parameter in its place, while that is
gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_stand_in_memory = WeakTensorKeyDictionary()
"""The memory of each parameter's stand-ins, so that equal heads are known as equal."""
_parameter_of_stand_in: dict[int, weakref.ref[Tensor]] = {}
"""The parameter of a stand-in, by the storage of that."""


def is_partitioned(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has this parameter, gathered or not."""
    return hasattr(tensor, "ds_id")


def is_gathered(parameter: Any) -> bool:
    """Whether a parameter of ZeRO-3 can be read now."""
    return bool(parameter.ds_status.name == "AVAILABLE")


def make_stand_in(alias: Tensor, parameter: Tensor) -> Tensor:
    """Takes the memory away from ``alias``, a view of a gathered parameter, or what was detached from it."""
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
    """The parameters that some of the tensors stand for."""
    if not _parameter_of_stand_in or torch.compiler.is_compiling():
        return []
    found = [_parameter_of_stand_in.get(tensor.untyped_storage()._cdata, lambda: None)() for tensor in tensors]
    return [parameter for parameter in found if parameter is not None]


def resolve_stand_in(tensor: Tensor) -> Tensor:
    """The values that a stand-in stands for; any other tensor as it is. To be called while they are gathered."""
    found = stand_in_parameters([tensor])
    if not found:
        return tensor
    (parameter,) = found
    if not is_gathered(parameter):
        raise RuntimeError(
            "lazy logits were read while DeepSpeed ZeRO-3 was about to gather their head's weight for a module. Read "
            "them after the model's forward and before the next one"
        )
    if tensor.requires_grad == parameter.requires_grad and not (tensor.requires_grad and tensor.is_leaf):
        return parameter  # autograd saves a leaf itself, and no memory of it
    resolved: Tensor = _WithValues.apply(tensor, parameter.detach())
    return resolved


class _WithValues(torch.autograd.Function):
    """The first argument, with the values of the second."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
