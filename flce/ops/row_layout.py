"""Memory layout of rows of logits: the strides that kernels address without a copy. Used by `ops.cross_entropy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A backend can address one stride between rows, or an outer and an inner stride.
MAX_LEVELS = 2


@dataclass(frozen=True)
class RowOrder:
    """Order in which the rows of (..., V) are processed: the order in memory, because a loss does not depend on the
    order.

    Therefore a transposed batch needs no copy, and only gaps between rows (``logits[:, :-1]``) add a second level.
    `flatten` brings vectors with one value per row into the same order; `unflatten` is its inverse.
    """

    shape: tuple[int, ...]  # of the leading dimensions
    order: tuple[int, ...]  # indices of the leading dimensions, the largest stride first
    levels: tuple[int, ...]  # sizes: (N,) or (outer, inner)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return (..., V) as a view of shape (N, V) or (outer, inner, V)."""
        shape = (*self.levels, x.shape[-1])
        # `view` may fail for an empty tensor, whose strides are arbitrary.
        return x.reshape(shape) if x.numel() == 0 else x.permute(*self.order, -1).view(shape)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the inverse of `to_rows` as a view. `rows` must have no gaps in memory."""
        sizes = [self.shape[d] for d in self.order]
        return rows.view(*sizes, rows.shape[-1]).permute(*self._inverse, -1)

    def flatten(self, x: Tensor) -> Tensor:
        """Return (k..., ...) as (k..., N), contiguous."""
        num_leading = x.dim() - len(self.order)
        x = x.permute([*range(num_leading), *(num_leading + d for d in self.order)])
        return x.reshape([*x.shape[:num_leading], math.prod(self.levels)]).contiguous()

    def unflatten(self, x: Tensor) -> Tensor:
        """Return (k..., N) as (k..., ...), contiguous."""
        num_leading = x.dim() - 1
        x = x.view([*x.shape[:-1], *(self.shape[d] for d in self.order)])
        return x.permute([*range(num_leading), *(num_leading + d for d in self._inverse)]).contiguous()

    @property
    def _inverse(self) -> list[int]:
        return sorted(range(len(self.order)), key=lambda d: self.order[d])


def row_order(x: Tensor) -> RowOrder | None:
    """Return the order of the rows of (..., V), or None if a backend needs a contiguous copy."""
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
    """Return sizes and strides of the leading dimensions; dimensions without a gap between them are merged."""
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
    """Return (..., V) as (N, V) or (outer, inner, V), and the order of the rows. Copies only if it must."""
    order = row_order(x)
    if order is None:
        x = x.contiguous()
        order = row_order(x)
        assert order is not None
    return order.to_rows(x), order


def may_overlap(x: Tensor) -> bool:
    """Return True if two elements of (..., V) may share memory, as in an expanded tensor."""
    if x.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted((x.stride(d), x.shape[d]) for d in range(x.dim())):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def empty_like_rows(x: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    """Allocate memory without gaps in the row order of `x`. Return it as (..., V) and as its rows."""
    rows = torch.empty((*order.levels, x.shape[-1]), dtype=x.dtype, device=x.device)
    return order.from_rows(rows), rows
