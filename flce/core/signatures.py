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
from flce.core.problem import SpecArguments

SomeStats: TypeAlias = tuple[str, Unpack[tuple[str, ...]]]


class LossArguments(SpecArguments, total=False):
    """Arguments of both losses."""

    token_weight: Tensor | None
    num_items: int | Tensor | None


class SplitArguments(TypedDict, total=False):
    """Arguments that divide classes, and tokens, over processes."""

    process_group: dist.ProcessGroup | None
    vocab_size: int | None
    sequence_parallel: bool


class LinearLossArguments(LossArguments, SplitArguments, total=False):
    """Arguments of `flce.fused_linear_cross_entropy`."""

    linear_bias: Tensor | None
    adapters: Sequence[tuple[Tensor, Tensor]]
    weight: Tensor | None
    options: ChunkOptions | None


class LogitsLossArguments(LossArguments, total=False):
    """Arguments of `flce.cross_entropy`."""

    inplace: bool
    process_group: dist.ProcessGroup | None
    vocab_size: int | None


class FixedLinearArguments(SpecArguments, SplitArguments, total=False):
    """Arguments of `flce.FusedLinearCrossEntropyLoss`."""

    weight: Tensor | None
    stats: tuple[str, ...]
    options: ChunkOptions | None


class FixedLogitsArguments(SpecArguments, total=False):
    """Arguments of `flce.CrossEntropyLoss` after `weight`."""

    stats: tuple[str, ...]
    inplace: bool
    process_group: dist.ProcessGroup | None
    vocab_size: int | None
