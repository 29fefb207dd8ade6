"""Gradients whose products have E4M3 operands, in plain PyTorch: an emulation of `triton/e4m3.py` for CPUs.

`TorchBackend` calls it. See `flce/engine/e4m3.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flce.backends.contract import E4M3, E4M3_MAX, ENTRY_SLOTS, LARGE_SHARE, Entries, TileRows

# The largest factor of a share, see `triton/e4m3.py`.
PEAK = 2.0**15 * 1.7
# The fractional part of the golden ratio times 2^32: its multiples are spread evenly modulo 2^32.
GOLDEN = 2654435769
# Sums of smaller magnitudes count as 0: their inverse may exceed the range of float32.
LEAST_SUM = 1e-32
# Entries that `add_entries` adds at once.
ENTRIES_AT_ONCE = 1024


def temporary_bytes(rows: int, cols: int) -> int:
    """Return an upper bound of the temporary memory of an operation on a (rows, cols) matrix."""
    # Magnitudes, shares, masks, their running sums, and E4M3; or rows of a table in two dtypes.
    return 24 * rows * cols + 8 * ENTRIES_AT_ONCE * cols


def quantize_tile(
    tile: Tensor, rows: TileRows, out: Tensor | None, transposed: Tensor | None, entries: Entries
) -> None:
    num_rows, vocab_size = tile.shape
    x, classes = tile.float(), entries.numbers
    magnitude = x.abs()
    sums = magnitude.sum(1) if rows.sums is None else rows.sums
    number = torch.arange(num_rows, device=x.device).add_(rows.first_row)
    fraction = (number * GOLDEN % 2**32 >> 8) * 2.0**-24
    share_factor = torch.where(sums < LEAST_SUM, 0.0, PEAK * torch.exp2(-fraction) / sums)
    is_large = magnitude.mul_(LARGE_SHARE) > sums[:, None]
    place = is_large.cumsum(1, dtype=torch.int32).sub_(1)
    is_large &= place < ENTRY_SLOTS - 1
    row, column = is_large.nonzero(as_tuple=True)
    classes.fill_(vocab_size)
    classes[row, place[row, column].long()] = column.int()
    shares = (x * share_factor[:, None]).masked_fill_(is_large, 0.0).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    for padded, values in ((out, shares), (transposed, shares.t())):
        if padded is not None:
            padded.zero_()[:, : values.shape[1]] = values
    rows.scales.copy_(share_factor.reciprocal().masked_fill_(share_factor == 0.0, 0.0))
    if rows.factors is not None:
        rows.scales.mul_(rows.factors[0])
        is_class = (rows.target >= 0) & (rows.target < vocab_size) & (rows.target != rows.ignore_index)
        classes[:, -1] = rows.target.where(is_class, vocab_size)
    classes.copy_(classes.sort(dim=1)[0])
    values = tile.gather(1, classes.clamp(max=vocab_size - 1).long()).float()
    if rows.factors is not None:
        factor, at_target = rows.factors[:, :, None]
        values = torch.where(classes == rows.target[:, None], at_target, values * factor)
    entries.values.copy_(values.masked_fill_(classes == vocab_size, 0.0))


def quantize_transposed(x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, scales: Tensor) -> None:
    rows = (x if index is None else x[index]).float()
    rows = rows if factor is None else rows * factor[:, None]
    scales.copy_(rows.abs().amax(0).div_(E4M3_MAX)).masked_fill_(scales == 0.0, 1.0)
    out.zero_()[:, : len(rows)] = (rows / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).t()


def sort_entries(entries: Entries, index: Tensor | None, out: Entries) -> None:
    assert out.bounds is not None
    classes, order = entries.numbers.view(-1).sort(stable=True)
    torch.index_select(entries.values.view(-1), 0, order, out=out.values)
    rows = order // ENTRY_SLOTS
    out.numbers.copy_(rows if index is None else index[rows])
    numbers = torch.arange(len(out.bounds), dtype=torch.int32, device=classes.device)
    torch.searchsorted(classes, numbers, out_int32=True, out=out.bounds)


def add_entries(
    product: Tensor, row_scales: Tensor | None, col_scales: Tensor, entries: Entries, table: Tensor, out: Tensor,
    index: Tensor | None, accumulate: bool = False,
) -> None:  # fmt: skip
    product.mul_(col_scales)
    if row_scales is not None:
        product.mul_(row_scales[:, None]).masked_fill_((row_scales == 0.0)[:, None], 0.0)
    if entries.bounds is None:
        row, slot = (entries.numbers < len(table)).nonzero(as_tuple=True)
        numbers, values = entries.numbers[row, slot], entries.values[row, slot]
    else:
        part = slice(int(entries.bounds[0]), int(entries.bounds[-1]))
        numbers, values = entries.numbers[part], entries.values[part]
        row = torch.arange(len(product), device=out.device).repeat_interleave(entries.bounds.diff().long())
    for start in range(0, len(numbers), ENTRIES_AT_ONCE):
        part = slice(start, start + ENTRIES_AT_ONCE)
        product.index_add_(0, row[part], table[numbers[part]].float().mul_(values[part, None]))
    if accumulate:
        product.add_(out)
    if index is None:
        out.copy_(product)
    else:
        out.index_copy_(0, index, product.to(out.dtype))
