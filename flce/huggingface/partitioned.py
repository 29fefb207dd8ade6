"""Stand-ins for parameters that DeepSpeed ZeRO-3 partitions, for lazy logits that outlive the gathered weight.

DeepSpeed gathers a parameter while its module runs, by assigning new memory to it, and later frees this memory. A view
of the parameter would keep the gathered memory alive as long as the logits. So lazy logits store a stand-in: a tensor
with the shape of the parameter, the same place in the autograd graph, and NaN in all entries.
:func:`resolve_stand_in` replaces the stand-in by the parameter while the parameter is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_stand_in_memory = WeakTensorKeyDictionary()
"""The memory of each parameter's stand-ins. Stand-ins of one parameter share it, so that they compare as equal."""
_parameter_of_stand_in: dict[int, weakref.ref[Tensor]] = {}
"""The parameter of a stand-in, by the address of the stand-in's storage."""


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
