"""Kernels and launches for gradients whose products have E4M3 operands: see `flce/engine/e4m3.py`.

`TritonBackend` launches them. An entry of a tile is divided by the sum of its row, so that it is a share from 0 to 1,
and stored as share * 2^15 to 2^16. Shares above 1 / LARGE_SHARE are not stored. So E4M3 has all its digits for shares
down to 5e-7, and nothing exceeds E4M3_MAX. The factor is a different one for each row: if all shares of all rows were
equal, the rounding errors of a class would not cancel in the sum over rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.contract import E4M3_MAX, ENTRY_SLOTS, LARGE_SHARE, Entries, TileRows
from flce.backends.e4m3 import GOLDEN, LEAST_SUM, PEAK
from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.replay import run
from flce.core.gemm import padded_cols

# A block of a tile, rows x columns. Milliseconds of 1000 x 128256 on an H100:
#   rows x columns, warps        128 x 64, 4    64 x 128, 4    32 x 256, 4    128 x 128, 8    64 x 256, 8
#   transposed in float16        0.35           0.39           0.44           0.46            0.52
#   transposed in E4M3           0.37           0.41           0.49           0.47            0.54
TILE_ROWS, TILE_COLS, WARPS = 128, 64, 4
# Rows and columns of a block of a matrix that is transposed.
BLOCK = 64
# Programs for the rows of a block of columns, which find the largest magnitude of their rows.
PEAK_PARTS, PEAK_ROWS = 128, 32
# Columns of a program of `add_entries_kernel`, and entries per step.
SUM_COLS, SUM_ENTRIES = 1024, 8
_LARGE_SHARE = tl.constexpr(float(LARGE_SHARE))
_SLOTS = tl.constexpr(ENTRY_SLOTS)
_PEAK = tl.constexpr(PEAK)
_GOLDEN = tl.constexpr(GOLDEN)
_LEAST_SUM = tl.constexpr(LEAST_SUM)


@triton.jit
def _share_factor(sums, row):
    """Return the factor that maps a row to shares * 2^15 to 2^16."""
    fraction = ((row.to(tl.uint32) * _GOLDEN) >> 8).to(tl.float32) * 2.0**-24
    peak = _PEAK * tl.exp2(-fraction)
    is_zero = sums < _LEAST_SUM
    return tl.where(is_zero, 0.0, peak / tl.where(is_zero, 1.0, sums))


@triton.jit(do_not_specialize=["rows", "cols", "first_row"])
def quantize_tile_kernel(
    tile_ptr,  # (rows, cols); columns up to padded_cols can be read
    row_sum_ptr,  # (rows,)
    out_ptr,  # (rows, padded_cols) E4M3
    transposed_ptr,  # (cols, padded_rows) E4M3
    numbers_ptr,  # (rows, SLOTS) int32, contiguous: classes of large entries, in any order
    count_ptr,  # (rows,) int32: the number of large entries; 0 before the launch
    tile_stride,
    out_stride,
    transposed_stride,
    rows,
    cols,
    first_row,
    padded_rows,
    padded_cols,
    HAS_OUT: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # Only masks with multiples of 16 allow vectors.
    accessible = (row < rows)[:, None] & (column < padded_cols)[None, :]
    place = row.to(tl.int64)[:, None] * tile_stride + column[None, :]
    x = tl.load(tile_ptr + place, mask=accessible, other=0.0).to(tl.float32)
    x = tl.where((column < cols)[None, :], x, 0.0)
    sums = tl.load(row_sum_ptr + row, mask=row < rows, other=0.0)
    shares = x * _share_factor(sums, first_row + row)[:, None]
    is_large = tl.abs(x) * _LARGE_SHARE > sums[:, None]
    if tl.max(tl.max(is_large.to(tl.int32), axis=1), axis=0) > 0:
        # One atomic operation for each row. For each entry, the compiler would choose a slower layout.
        number = tl.sum(is_large.to(tl.int32), axis=1)
        first_slot = tl.atomic_add(count_ptr + row, number, mask=number > 0, sem="relaxed")
        slot = first_slot[:, None] + tl.cumsum(is_large.to(tl.int32), axis=1) - 1
        is_large = is_large & (slot < _SLOTS - 1)
        classes = column[None, :] + tl.zeros((ROWS, COLS), tl.int32)
        tl.store(numbers_ptr + row.to(tl.int64)[:, None] * _SLOTS + slot, classes, mask=is_large)
        shares = tl.where(is_large, 0.0, shares)
    rounded = shares.to(tl.float8e4nv)
    if HAS_OUT:
        place = row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(out_ptr + place, rounded, mask=accessible)
    if HAS_TRANSPOSED:
        # Transposed in float16: faster, and Triton 3.6 has transposed blocks of E4M3 wrongly.
        rounded = tl.trans(rounded.to(tl.float16)).to(tl.float8e4nv)
        place = column.to(tl.int64)[:, None] * transposed_stride + row[None, :]
        tl.store(transposed_ptr + place, rounded, mask=(column < cols)[:, None] & (row < padded_rows)[None, :])


@triton.jit(do_not_specialize=["first_row", "vocab_size", "ignore_index", "factors_stride"])
def finish_entries_kernel(
    tile_ptr,  # (rows, vocab_size)
    row_sum_ptr,  # (rows,)
    target_ptr,  # (rows,) int64
    factors_ptr,  # (2, rows), row stride factors_stride
    count_ptr,  # (rows,) int32
    numbers_ptr,  # (rows, SLOTS) int32, contiguous: sorted here
    values_ptr,  # (rows, SLOTS), contiguous, output
    row_scales_ptr,  # (rows,) output
    tile_stride,
    factors_stride,
    first_row,
    vocab_size,
    ignore_index,
    HAS_FACTORS: tl.constexpr,
):
    """Sort the large entries and the target's entry of a row by class, and compute their values."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, _SLOTS)
    classes = tl.load(numbers_ptr + row * _SLOTS + slot, mask=slot < tl.load(count_ptr + row), other=vocab_size)
    factor = 1.0
    if HAS_FACTORS:
        factor = tl.load(factors_ptr + row)
        target = tl.load(target_ptr + row)
        is_class = (target >= 0) & (target < vocab_size) & (target != ignore_index)
        target = tl.where(is_class, target, vocab_size).to(tl.int32)
        classes = tl.where(slot == _SLOTS - 1, target, classes)
    classes = tl.sort(classes)
    exists = classes < vocab_size
    value = factor * tl.load(tile_ptr + row * tile_stride + classes, mask=exists, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        value = tl.where(exists & (classes == target), tl.load(factors_ptr + factors_stride + row), value)
    tl.store(numbers_ptr + row * _SLOTS + slot, classes)
    tl.store(values_ptr + row * _SLOTS + slot, value)
    share_factor = _share_factor(tl.load(row_sum_ptr + row), first_row + tl.program_id(0))
    inverse = 1.0 / tl.where(share_factor == 0.0, 1.0, share_factor)
    tl.store(row_scales_ptr + row, tl.where(share_factor == 0.0, 0.0, factor * inverse))


@triton.jit(do_not_specialize=["rows"])
def column_peaks_kernel(
    x_ptr,  # (n, hidden)
    gather_ptr,  # (rows,) int64: rows of x
    factor_ptr,  # (rows,)
    peaks_ptr,  # (parts, hidden), contiguous, output: largest magnitudes
    x_stride,
    x_col_stride,
    rows,
    hidden,
    HAS_GATHER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    peaks = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(part * ROWS, rows, PARTS * ROWS):
        row = start + tl.arange(0, ROWS)
        place = tl.load(gather_ptr + row, mask=row < rows, other=0) if HAS_GATHER else row.to(tl.int64)
        exists = (row < rows)[:, None] & (column < hidden)[None, :]
        places = place[:, None] * x_stride + column[None, :].to(tl.int64) * x_col_stride
        x = tl.load(x_ptr + places, mask=exists, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            x *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
        peaks = tl.maximum(peaks, tl.abs(x))
    tl.store(peaks_ptr + part * hidden + column, tl.max(peaks, axis=0), mask=column < hidden)


@triton.jit(do_not_specialize=["rows"])
def quantize_transposed_kernel(
    x_ptr,  # (n, hidden)
    gather_ptr,  # (rows,) int64: rows of x
    factor_ptr,  # (rows,)
    col_scales_ptr,  # (hidden,)
    out_ptr,  # (hidden, padded_rows) E4M3
    x_stride,
    x_col_stride,
    out_stride,
    rows,
    hidden,
    padded_rows,
    HAS_GATHER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(gather_ptr + row, mask=row < rows, other=0) if HAS_GATHER else row.to(tl.int64)
    exists = (row < rows)[:, None] & (column < hidden)[None, :]
    places = place[:, None] * x_stride + column[None, :].to(tl.int64) * x_col_stride
    x = tl.load(x_ptr + places, mask=exists, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    x *= 1.0 / tl.load(col_scales_ptr + column, mask=column < hidden, other=1.0)[None, :]
    rounded = tl.trans(x.to(tl.float8e4nv))
    places = column.to(tl.int64)[:, None] * out_stride + row[None, :]
    tl.store(out_ptr + places, rounded, mask=(column < hidden)[:, None] & (row < padded_rows)[None, :])


@triton.jit(do_not_specialize=["table_rows"])
def add_entries_kernel(
    product_ptr,  # (rows, hidden), contiguous
    row_scales_ptr,  # (rows,)
    col_scales_ptr,  # (hidden,)
    bounds_ptr,  # (rows + 1,) int32
    numbers_ptr,  # rows of the table: int64 with bounds, else (rows, SLOTS) int32
    values_ptr,  # one for each index
    table_ptr,  # (table_rows, hidden)
    place_ptr,  # (rows,) int64: rows of `out`
    out_ptr,  # (n, hidden)
    table_stride,
    table_col_stride,
    out_stride,
    hidden,
    table_rows,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    HAS_PLACE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = column < hidden
    scale = tl.load(col_scales_ptr + column, mask=mask, other=0.0)
    product = tl.load(product_ptr + row * hidden + column, mask=mask, other=0.0)
    total = product * scale
    if HAS_ROW_SCALES:
        row_scale = tl.load(row_scales_ptr + row)
        # A row without a gradient may have a product of NaN.
        total = tl.where(row_scale == 0.0, 0.0, total * row_scale)
    if HAS_BOUNDS:
        first = tl.load(bounds_ptr + row)
        stop = tl.load(bounds_ptr + row + 1)
    else:
        numbers_ptr += row * _SLOTS
        values_ptr += row * _SLOTS
        first = 0
        stop = tl.sum((tl.load(numbers_ptr + tl.arange(0, _SLOTS)) < table_rows).to(tl.int32), axis=0)
    for start in range(first, stop, ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        index = tl.load(numbers_ptr + number, mask=number < stop, other=0).to(tl.int64)
        value = tl.load(values_ptr + number, mask=number < stop, other=0.0)
        places = index[:, None] * table_stride + column[None, :].to(tl.int64) * table_col_stride
        rows = tl.load(table_ptr + places, mask=(number < stop)[:, None] & mask[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * value[:, None], axis=0)
    if HAS_PLACE:
        row = tl.load(place_ptr + row)
    out_ptr += row * out_stride + column
    if ACCUMULATE:
        total += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=mask)


def quantize_tile(
    tile: Tensor, rows: TileRows, out: Tensor | None, transposed: Tensor | None, entries: Entries
) -> None:
    if rows.sums is None:
        rows = rows._replace(sums=torch.linalg.vector_norm(tile, 1, dim=1, dtype=torch.float32))
    count = torch.zeros(len(tile), dtype=torch.int32, device=tile.device)
    run(_quantize_tile, tile, rows, out, transposed, entries, count)


def _quantize_tile(
    tile: Tensor, rows: TileRows, out: Tensor | None, transposed: Tensor | None, entries: Entries, count: Tensor
) -> Iterator[Launch]:
    num_rows, cols = tile.shape
    padded_rows = num_rows if transposed is None else transposed.shape[1]
    shared = {
        "tile": tile, "row_sum": rows.sums, "numbers": entries.numbers, "count": count, "first_row": rows.first_row,
    }  # fmt: skip
    yield build_launch(
        quantize_tile_kernel, (triton.cdiv(padded_cols(cols), TILE_COLS), triton.cdiv(padded_rows, TILE_ROWS)), None,
        {"ROWS": TILE_ROWS, "COLS": TILE_COLS, **thread_options(tile.device, WARPS)},
        **shared, out=out, transposed=transposed, rows=num_rows, cols=cols, padded_rows=padded_rows,
        padded_cols=padded_cols(cols),
    )  # fmt: skip
    yield build_launch(
        finish_entries_kernel, (num_rows,), None, thread_options(tile.device, 1),
        **shared, target=rows.target, factors=rows.factors, values=entries.values, row_scales=rows.scales,
        vocab_size=cols, ignore_index=rows.ignore_index,
    )  # fmt: skip


def quantize_transposed(x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, scales: Tensor) -> None:
    peaks = torch.empty(PEAK_PARTS, x.shape[1], dtype=torch.float32, device=x.device)
    run(_column_peaks, x, index, factor, peaks)
    torch.amax(peaks, dim=0, out=scales)
    # 1 for columns of zeros.
    scales.mul_(1.0 / E4M3_MAX).masked_fill_(scales == 0.0, 1.0)
    run(_quantize_transposed, x, index, factor, out, scales)


def _column_peaks(x: Tensor, index: Tensor | None, factor: Tensor | None, peaks: Tensor) -> Iterator[Launch]:
    num_rows, hidden = len(x) if index is None else len(index), x.shape[1]
    yield build_launch(
        column_peaks_kernel, (PEAK_PARTS, triton.cdiv(hidden, BLOCK)), None,
        {"PARTS": PEAK_PARTS, "ROWS": PEAK_ROWS, "COLS": BLOCK, **thread_options(x.device, 4)},
        x=x, gather=index, factor=factor, peaks=peaks, rows=num_rows, hidden=hidden,
    )  # fmt: skip


def _quantize_transposed(
    x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, scales: Tensor
) -> Iterator[Launch]:
    num_rows, (hidden, padded_rows) = len(x) if index is None else len(index), out.shape
    yield build_launch(
        quantize_transposed_kernel, (triton.cdiv(padded_rows, BLOCK), triton.cdiv(hidden, BLOCK)), None,
        {"BLOCK": BLOCK, **thread_options(x.device, 4)},
        x=x, gather=index, factor=factor, col_scales=scales, out=out, rows=num_rows, hidden=hidden,
        padded_rows=padded_rows,
    )  # fmt: skip


def add_entries(
    product: Tensor, row_scales: Tensor | None, col_scales: Tensor, entries: Entries, table: Tensor, out: Tensor,
    index: Tensor | None, accumulate: bool = False,
) -> Iterator[Launch]:  # fmt: skip
    num_rows, hidden = product.shape
    yield build_launch(
        add_entries_kernel, (num_rows, triton.cdiv(hidden, SUM_COLS)), None,
        {"ACCUMULATE": accumulate, "ENTRIES": SUM_ENTRIES, "COLS": SUM_COLS, **thread_options(out.device, 4)},
        product=product, row_scales=row_scales, col_scales=col_scales, **entries._asdict(), table=table,
        place=index, out=out, hidden=hidden, table_rows=len(table),
    )  # fmt: skip
