"""For type checkers only, nothing imports it at run time: what the overloads of the public functions share.

What a loss returns depends on `stats` alone: () is a tensor, one name or more a `LinearCrossEntropyOutput`, and of a
tuple of unknown length it is either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce.options import ChunkOptions

SomeStats: TypeAlias = tuple[str, Unpack[tuple[str, ...]]]


class LossArguments(TypedDict, total=False):
    """Of both losses."""

    ignore_index: int | None
    reduction: str
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    temperature: float
    z_loss: float
    token_weight: Tensor | None
    num_items: int | Tensor | None
    shift: int


class LinearLossArguments(LossArguments, total=False):
    """Of `flce.fused_linear_cross_entropy`."""

    linear_bias: Tensor | None
    adapters: Sequence[tuple[Tensor, Tensor]]
    weight: Tensor | None
    options: ChunkOptions | None


class LogitsLossArguments(LossArguments, total=False):
    """Of `flce.cross_entropy`."""

    inplace: bool
    process_group: dist.ProcessGroup | None
    vocab_size: int | None
