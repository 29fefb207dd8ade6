"""Slices that return the tensor itself if they select all of it, which saves some microseconds on the host."""

from __future__ import annotations

from torch import Tensor


def slice_rows(x: Tensor, rows: slice) -> Tensor:
    """Return ``x[rows]``."""
    return x if rows.start == 0 and rows.stop >= x.shape[0] else x[rows]


def slice_columns(x: Tensor, columns: slice) -> Tensor:
    """Return ``x[..., columns]``."""
    return x if columns.start == 0 and columns.stop >= x.shape[-1] else x[..., columns]


def offset_slice(range_: slice, offset: int) -> slice:
    """Return the slice whose start and stop are larger by `offset`."""
    return slice(range_.start + offset, range_.stop + offset)
