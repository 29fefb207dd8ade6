"""For type checkers only, nothing imports it at run time: the arguments of the public functions and modules.

What a loss returns depends on `stats` alone: () is a tensor, one name or more a `LinearCrossEntropyOutput`, and of a
tuple of unknown length it is either.
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
    """How classes, and tokens, are divided over processes."""

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
    """Arguments of `flce.CrossEntropyLoss` behind `weight`."""

    stats: tuple[str, ...]
    inplace: bool
    process_group: dist.ProcessGroup | None
    vocab_size: int | None
