"""Gradients whose products have E4M3 operands, in plain PyTorch: an emulation of `triton/e4m3.py` for CPUs.

`TorchBackend` calls it. See `flce/engine/e4m3.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flce.backends.contract import E4M3, E4M3_MAX, ENTRY_SLOTS, LARGE_SHARE, Entries, TileRows

# The largest factor of a share, see `triton/e4m3.py`.
PEAK = 2.0**15 * 1.7
# The fractional part of the golden ratio times 2^32: its multiples are spread evenly modulo 2^32.
GOLDEN = 2654435769
# Sums of smaller magnitudes count as 0: their inverse may exceed the range of float32.
LEAST_SUM = 1e-32
# Bytes of the rows of a tile, or of a table, that are processed at once.
SLAB_BYTES = 8 << 20


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def slab_rows(rows: int, cols: int) -> int:
    """Return the number of rows of (rows, cols) that are processed at once."""
    return max(1, min(rows, SLAB_BYTES // (4 * max(1, cols))))


def _slabs(rows: int, cols: int) -> Iterator[slice]:
    step = slab_rows(rows, cols)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def temporary_bytes(rows: int, cols: int) -> int:
    """Return an upper bound of the temporary memory of an operation on a (rows, cols) matrix: magnitudes, shares, masks,
    their running sums, and E4M3."""
    return 24 * slab_rows(rows, cols) * cols


def quantize_tile(
    tile: Tensor, rows: TileRows, out: Tensor | None, transposed: Tensor | None, entries: Entries
) -> None:
    vocab_size = tile.shape[1]
    for padded in (out, transposed):
        if padded is not None:
            padded.zero_()
    entries.index.fill_(vocab_size)
    for part in _slabs(*tile.shape):
        x = tile[part].float()
        magnitude = x.abs()
        sums = magnitude.sum(1) if rows.sums is None else rows.sums[part]
        number = torch.arange(part.start, part.stop, device=x.device).add_(rows.first_row)
        fraction = (number * GOLDEN % 2**32 >> 8) * 2.0**-24
        share_factor = torch.where(sums < LEAST_SUM, 0.0, PEAK * torch.exp2(-fraction) / sums)
        is_large = magnitude.mul_(LARGE_SHARE) > sums[:, None]
        place = is_large.cumsum(1, dtype=torch.int32).sub_(1)
        is_large &= place < ENTRY_SLOTS - 1
        row, column = is_large.nonzero(as_tuple=True)
        entries.index[part][row, place[row, column].long()] = column.int()
        shares = to_e4m3((x * share_factor[:, None]).masked_fill_(is_large, 0.0))
        if out is not None:
            out[part, :vocab_size] = shares
        if transposed is not None:
            transposed[:, part] = shares.t()
        scale = share_factor.reciprocal().masked_fill_(share_factor == 0.0, 0.0)
        rows.scales[part] = scale if rows.factors is None else scale * rows.factors[0, part]
    target = rows.target.where((rows.target >= 0) & (rows.target < vocab_size), vocab_size)
    if rows.factors is not None:
        entries.index[:, -1] = target.masked_fill_(rows.target == rows.ignore_index, vocab_size)
    classes = entries.index.sort(dim=1)[0]
    values = tile.gather(1, classes.clamp(max=vocab_size - 1).long()).float().masked_fill_(classes == vocab_size, 0.0)
    if rows.factors is not None:
        values = torch.where(
            (classes == target[:, None]) & (classes < vocab_size), rows.factors[1, :, None], values * rows.factors[0, :, None]
        )
    entries.index.copy_(classes)
    entries.values.copy_(values)


def quantize_transposed(
    x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, scales: Tensor
) -> None:
    num_rows = len(x) if index is None else len(index)

    def scaled_rows(part: slice) -> Tensor:
        rows = (x[part] if index is None else x[index[part]]).float()
        return rows if factor is None else rows.mul_(factor[part, None])

    scales.zero_()
    for part in _slabs(num_rows, x.shape[1]):
        torch.maximum(scales, scaled_rows(part).abs_().amax(0), out=scales)
    scales.div_(E4M3_MAX).masked_fill_(scales == 0.0, 1.0)
    out.zero_()
    for part in _slabs(num_rows, x.shape[1]):
        out[:, part] = to_e4m3(scaled_rows(part).div_(scales)).t()


def sort_entries(entries: Entries, index: Tensor | None, out: Entries) -> None:
    assert out.bounds is not None
    classes, order = entries.index.view(-1).sort(stable=True)
    torch.index_select(entries.values.view(-1), 0, order, out=out.values)
    rows = order // ENTRY_SLOTS
    out.index.copy_(rows if index is None else index[rows])
    numbers = torch.arange(len(out.bounds), dtype=torch.int32, device=classes.device)
    torch.searchsorted(classes, numbers, out_int32=True, out=out.bounds)


def add_entries(
    product: Tensor,
    row_scales: Tensor | None,
    col_scales: Tensor,
    entries: Entries,
    table: Tensor,
    out: Tensor,
    index: Tensor | None,
    accumulate: bool = False,
) -> None:
    product.mul_(col_scales)
    if row_scales is not None:
        product.mul_(row_scales[:, None]).masked_fill_((row_scales == 0.0)[:, None], 0.0)
    if entries.bounds is None:
        row, slot = (entries.index < len(table)).nonzero(as_tuple=True)
        numbers, values = entries.index[row, slot], entries.values[row, slot]
    else:
        first, stop = int(entries.bounds[0]), int(entries.bounds[-1])
        numbers, values = entries.index[first:stop], entries.values[first:stop]
        row = torch.arange(len(product), device=out.device).repeat_interleave(entries.bounds.diff().long())
    for part in _slabs(len(numbers), table.shape[1]):
        product.index_add_(0, row[part], table[numbers[part]].float().mul_(values[part, None]))
    if accumulate:
        product.add_(out)
    if index is None:
        out.copy_(product)
    else:
        out.index_copy_(0, index, product.to(out.dtype))
