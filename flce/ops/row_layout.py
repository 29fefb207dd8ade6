"""Rows of logits where a user has them: which strides a kernel can go by without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Strides between rows that a backend can address: one, or an outer and an inner one.
MAX_LEVELS = 2


@dataclass(frozen=True)
class RowOrder:
    """The order in which the rows of (..., V) are taken: that of memory, since a loss has none of its own.

    So a transposed batch is as good as the batch, and only what is left out between rows (``logits[:, :-1]``) makes
    a second level. Vectors of a value per row are brought into the same order: `flatten`, and `unflatten` back.
    """

    shape: tuple[int, ...]  # of the leading dimensions
    order: tuple[int, ...]  # these, the largest stride first
    levels: tuple[int, ...]  # sizes: (N,) or (outer, inner)

    def to_rows(self, x: Tensor) -> Tensor:
        """(..., V) as (N, V) or (outer, inner, V), a view."""
        shape = (*self.levels, x.shape[-1])
        # A tensor without elements: any view will do.
        return x.reshape(shape) if x.numel() == 0 else x.permute(*self.order, -1).view(shape)

    def from_rows(self, rows: Tensor) -> Tensor:
        """The inverse of `to_rows`, for memory without gaps: a view."""
        sizes = [self.shape[d] for d in self.order]
        return rows.view(*sizes, rows.shape[-1]).permute(*self._inverse, -1)

    def flatten(self, x: Tensor) -> Tensor:
        """(k..., ...) to (k..., N), contiguous."""
        num_leading = x.dim() - len(self.order)
        x = x.permute([*range(num_leading), *(num_leading + d for d in self.order)])
        return x.reshape([*x.shape[:num_leading], math.prod(self.levels)]).contiguous()

    def unflatten(self, x: Tensor) -> Tensor:
        """(k..., N) to (k..., ...), contiguous."""
        num_leading = x.dim() - 1
        x = x.view([*x.shape[:-1], *(self.shape[d] for d in self.order)])
        return x.permute([*range(num_leading), *(num_leading + d for d in self._inverse)]).contiguous()

    @property
    def _inverse(self) -> list[int]:
        return sorted(range(len(self.order)), key=lambda d: self.order[d])


def row_order(x: Tensor) -> RowOrder | None:
    """The order of the rows of (..., V); None where a backend cannot use these strides and needs a contiguous copy."""
    shape = tuple(x.shape[:-1])
    strides = x.stride()
    order = tuple(sorted(range(len(shape)), key=lambda d: (bool(shape[d] != 1), -strides[d])))
    if x.numel() == 0:
        return RowOrder(shape, order, (math.prod(shape),))
    levels = _levels(x, order)
    if len(levels) > MAX_LEVELS or (x.shape[-1] != 1 and x.stride(-1) != 1):
        return None
    return RowOrder(shape, order, tuple(size for size, _ in levels) or (1,))


def _levels(x: Tensor, order: Sequence[int]) -> list[tuple[int, int]]:
    """Size and stride of the leading dimensions, those that follow each other without a gap as one."""
    levels: list[tuple[int, int]] = []
    for d in order:
        size, stride = x.shape[d], x.stride(d)
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels


def as_rows(x: Tensor) -> tuple[Tensor, RowOrder]:
    """(..., V) as (N, V) or (outer, inner, V), of a copy where there is no other way."""
    order = row_order(x)
    if order is None:
        x = x.contiguous()
        order = row_order(x)
        assert order is not None
    return order.to_rows(x), order


def may_overlap(x: Tensor) -> bool:
    """Whether two elements of (..., V) may be one in memory, as those of an expanded tensor are."""
    if x.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted((x.stride(d), x.shape[d]) for d in range(x.dim())):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def empty_like_rows(x: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    """New memory without gaps in the order of the rows of `x`: as (..., V), and as the rows of it."""
    rows = torch.empty((*order.levels, x.shape[-1]), dtype=x.dtype, device=x.device)
    return order.from_rows(rows), rows
