"""Types of the arguments of public functions and modules, for type checkers. No module imports this one at run time.

The result type of a loss depends on `stats` alone: a tensor for (), a `LinearCrossEntropyOutput` for one or more names,
and either for a tuple of unknown length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce.core.options import ChunkOptions

SomeStats: TypeAlias = tuple[str, Unpack[tuple[str, ...]]]


class LossArguments(TypedDict, total=False):
    """Arguments of both losses that modules fix, except `stats`."""

    ignore_index: int | None
    reduction: str
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    temperature: float
    z_loss: float
    shift: int
    empty_loss: str
    process_group: dist.ProcessGroup | None
    vocab_size: int | None


class LinearLossArguments(LossArguments, total=False):
    """Arguments of `flce.fused_linear_cross_entropy` except `stats`."""

    linear_bias: Tensor | None
    adapters: Sequence[tuple[Tensor, Tensor]]
    weight: Tensor | None
    token_weight: Tensor | None
    num_items: int | Tensor | None
    options: ChunkOptions | None
    sequence_parallel: bool


class LogitsLossArguments(LossArguments, total=False):
    """Arguments of `flce.cross_entropy` except `stats`."""

    token_weight: Tensor | None
    num_items: int | Tensor | None
    inplace: bool


class FixedLinearArguments(LossArguments, total=False):
    """Arguments of `flce.FusedLinearCrossEntropyLoss`."""

    weight: Tensor | None
    stats: tuple[str, ...]
    options: ChunkOptions | None
    sequence_parallel: bool


class FixedLogitsArguments(LossArguments, total=False):
    """Arguments of `flce.CrossEntropyLoss` after `weight`."""

    stats: tuple[str, ...]
    inplace: bool


class FixedLogprobArguments(TypedDict, total=False):
    """Arguments of `flce.LinearLogprobs`."""

    outputs: Sequence[str]
    top_k: int
    softcap: float | None
    logit_scale: float
    ignore_index: int | None
    shift: int
    options: ChunkOptions | None
    process_group: dist.ProcessGroup | None
    vocab_size: int | None
    sequence_parallel: bool
