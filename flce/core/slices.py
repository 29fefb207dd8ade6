"""Slices that return the tensor itself if they select all of it, which saves some microseconds on the host."""

from __future__ import annotations

from torch import Tensor


def slice_rows(x: Tensor, part: slice) -> Tensor:
    """Return ``x[part]``."""
    return x if part.start == 0 and part.stop >= x.shape[0] else x[part]


def slice_columns(x: Tensor, part: slice) -> Tensor:
    """Return ``x[..., part]``."""
    return x if part.start == 0 and part.stop >= x.shape[-1] else x[..., part]


def offset_slice(part: slice, offset: int) -> slice:
    """Return the slice whose start and stop are larger by `offset`."""
    return slice(part.start + offset, part.stop + offset)
