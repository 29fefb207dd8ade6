"""Gradients whose products have E4M3 operands, in plain PyTorch: an emulation of `triton/e4m3.py` for CPUs.

`TorchBackend` calls it. See `flce/engine/e4m3.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flce.backends.contract import E4M3, E4M3_MAX, ENTRY_SLOTS, LARGE_SHARE, Entries, QuantizedTile

# The largest factor of a share. The largest entries that are not large become 15/16 * E4M3_MAX.
PEAK = E4M3_MAX * LARGE_SHARE * 15 / 16
# Sums of smaller magnitudes count as 0: their inverse may exceed the range of float32.
LEAST_SUM = 1e-32
# Entries that `add_entries` adds at once.
ENTRIES_AT_ONCE = 1024


def temporary_bytes(rows: int, cols: int) -> int:
    """Return an upper bound of the temporary memory of an operation on a (rows, cols) matrix."""
    # Magnitudes, shares, masks, their running sums, and E4M3; or rows of a table in two dtypes.
    return 24 * rows * cols + 8 * ENTRIES_AT_ONCE * cols


def quantize_tile(tile: Tensor, out: QuantizedTile) -> None:
    num_rows, vocab_size = tile.shape
    x, classes = tile.float(), out.entries.numbers
    sums = x.abs().sum(1)
    factor = row_factors(sums)
    rounded = (x * factor[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    limit = (factor * sums / LARGE_SHARE).clamp_(2.0**-10, E4M3_MAX)
    is_large = rounded.float().abs_() >= limit[:, None]
    row, column = is_large.nonzero(as_tuple=True)
    classes.fill_(vocab_size)
    classes[row, is_large.cumsum(1, dtype=torch.int32)[row, column].long()] = column.int()
    rounded.view(torch.uint8).masked_fill_(is_large, 0)
    out.matrix[:, :vocab_size] = rounded
    if out.transposed is not None:
        out.transposed.zero_()[:, :num_rows] = rounded.t()
    out.scales.copy_(factor.reciprocal().masked_fill_(factor == 0.0, 0.0))
    out.entries.values.copy_(tile.gather(1, classes.long().clamp_(max=vocab_size - 1)))


def row_factors(sums: Tensor) -> Tensor:
    """Return the factors that map entries of rows to E4M3. sums: (rows,) sums of their magnitudes.

    They differ by up to an octave: if all shares of all rows were equal, the rounding errors of a class would not
    cancel in the sum over rows.
    """
    octaves = torch.arange(len(sums), device=sums.device) % 64 * (-1 / 64)
    return torch.where(sums < LEAST_SUM, 0.0, PEAK * torch.exp2(octaves) / sums)


def normalize_quantized(
    tile: QuantizedTile, factors: Tensor, target: Tensor, ignore_index: int, vocab_size: int
) -> None:
    factor, at_target = factors
    # A row without a gradient may have a scale of NaN.
    tile.scales.mul_(factor).masked_fill_(factor == 0.0, 0.0)
    tile.entries.values.mul_(factor[:, None])[:, 0] = at_target
    is_class = (target >= 0) & (target < vocab_size) & (target != ignore_index)
    tile.entries.numbers[:, 0] = target.where(is_class, vocab_size)


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
    product = product.float().mul_(col_scales)
    if row_scales is not None:
        product.mul_(row_scales[:, None]).masked_fill_((row_scales == 0.0)[:, None], 0.0)
    if entries.bounds is None:
        row, slot = (entries.numbers < len(table)).nonzero(as_tuple=True)
        numbers, values = entries.numbers[row, slot], entries.values[row, slot]
    else:
        block = slice(int(entries.bounds[0]), int(entries.bounds[-1]))
        numbers, values = entries.numbers[block], entries.values[block]
        row = torch.arange(len(product), device=out.device).repeat_interleave(entries.bounds.diff().long())
    for start in range(0, len(numbers), ENTRIES_AT_ONCE):
        block = slice(start, start + ENTRIES_AT_ONCE)
        product.index_add_(0, row[block], table[numbers[block]].float().mul_(values[block, None]))
    if accumulate:
        product.add_(out)
    if index is None:
        out.copy_(product)
    else:
        out.index_copy_(0, index, product.to(out.dtype))
