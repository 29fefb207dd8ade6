"""Kernels and launches for gradients whose products have E4M3 operands: see `flce/engine/e4m3.py`.

An entry of a tile is multiplied by a factor of its row and rounded to E4M3, by the product that computes exponentials
(`product.py`) or by `quantize_kernel`. If the sum of the magnitudes of the row is S, the factor is about 2^16 / S:
entries down to S / 2^20 have all digits. `find_large_kernel` then sets large entries to 0 and stores their classes.

The product does not know S. Its factor is for four times the sum that a sample of classes predicts. If this is too
large, small entries lose digits: at most log2(4V / 1024) = 10 (V = 262144), and only if a class of the sample has most
of S. If it is too small, more entries are large. If a row has more large entries than slots, `find_large_kernel` sets
the factor for S, and the product is computed again (as `exponentials.py` describes). If exponentials of a row are out
of range, because a logit is 88 above the sample, S is unknown: the second factor is for V, the largest possible S, and
small entries may lose log2(V) digits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.contract import (
    E4M3_LIMIT_ROWS,
    E4M3_MAX,
    ENTRY_SLOTS,
    LARGE_SHARE,
    Entries,
    QuantizedTile,
    StatisticsCall,
)
from flce.backends.e4m3 import LEAST_SUM, row_factors
from flce.backends.triton.entries import row_products
from flce.backends.triton.launch import FLAG_STRIDE, Launch, build_launch, thread_options
from flce.backends.triton.math import LOG2_E, e4m3_factor
from flce.backends.triton.replay import run

# Rows and columns of a block of `quantize_kernel`.
ROWS, COLS = 128, 64
# The largest magnitudes of E4M3_LIMIT_ROWS rows, times this factor, are the limits of the columns of a matrix that is
# transposed. A column with a larger magnitude is rounded again.
LIMIT_FACTOR, LEAST_LIMIT = 8.0, 1e-30
# Columns, or half as many, and entries per step of `add_entries_kernel`; sums per step of `find_large_kernel`.
SUM_COLS, SUM_ENTRIES, PARTIALS = 2048, 8, 512
_LARGE_SHARE, _SLOTS = tl.constexpr(float(LARGE_SHARE)), tl.constexpr(ENTRY_SLOTS)
_E4M3_MAX, _FLAG_STRIDE, _LEAST_SUM = tl.constexpr(E4M3_MAX), tl.constexpr(FLAG_STRIDE), tl.constexpr(LEAST_SUM)


@triton.jit(
    do_not_specialize=["rows", "vocab_size"],
    do_not_specialize_on_alignment=["partial_ptr"],  # with a softcap the second of two matrices of any number of rows
)
def find_large_kernel(
    matrix_ptr,  # (rows, vocab_size) E4M3, row stride matrix_stride
    transposed_ptr,  # (vocab_size, rows) E4M3, row stride transposed_stride
    row_factor_ptr,  # (rows,) factors of the entries; overwritten for rows that need the second product
    partial_ptr,  # (blocks, rows) sums of COLS magnitudes, negative if exponentials are out of range (`product_kernel`)
    numbers_ptr,  # (rows, SLOTS) int32, contiguous, output: `Entries.numbers`
    scales_ptr,  # (rows,) output
    work_ptr,  # (2,) int32, as in `finish_kernel`
    matrix_stride,
    transposed_stride,
    rows,
    vocab_size,
    HAS_TRANSPOSED: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    work = tl.load(work_ptr)
    if work > 0:
        factor = tl.load(row_factor_ptr + row)
        blocks = tl.cdiv(vocab_size, COLS)
        totals = tl.zeros((PARTIALS,), tl.float32)
        least = tl.zeros((PARTIALS,), tl.float32)
        for start in range(0, blocks, PARTIALS):
            block = start + tl.arange(0, PARTIALS)
            partial = tl.load(partial_ptr + block.to(tl.int64) * rows + row, mask=block < blocks, other=0.0)
            totals += partial
            least = tl.minimum(least, partial)
        sums = tl.sum(totals, axis=0)
        limit = tl.maximum(tl.minimum(factor * sums * (1.0 / _LARGE_SHARE), _E4M3_MAX), 2.0**-10)
        number = 1
        for start in range(0, blocks, PARTIALS):
            block = start + tl.arange(0, PARTIALS)
            partial = tl.load(partial_ptr + block.to(tl.int64) * rows + row, mask=block < blocks, other=0.0)
            # Rounding may have made an entry larger by 1/16.
            is_near = partial * factor * 1.07 >= limit
            near_block = tl.min(tl.where(is_near, block, blocks), axis=0)
            while near_block < blocks:
                column = near_block * COLS + tl.arange(0, COLS)
                exists = column < vocab_size
                x = tl.load(matrix_ptr + row * matrix_stride + column, mask=exists).to(tl.float32)
                is_large = exists & (tl.abs(x) >= limit)
                slot = number + tl.cumsum(is_large.to(tl.int32), axis=0) - 1
                number += tl.sum(is_large.to(tl.int32), axis=0)
                tl.store(numbers_ptr + row * _SLOTS + slot, column, mask=is_large & (slot < _SLOTS))
                zero = tl.zeros((COLS,), tl.float32).to(tl.float8e4nv)
                tl.store(matrix_ptr + row * matrix_stride + column, zero, mask=is_large)
                if HAS_TRANSPOSED:
                    tl.store(transposed_ptr + column.to(tl.int64) * transposed_stride + row, zero, mask=is_large)
                near_block = tl.min(tl.where(is_near & (block > near_block), block, blocks), axis=0)
        slot = tl.arange(0, _SLOTS)
        unused = tl.zeros((_SLOTS,), tl.int32) + vocab_size
        tl.store(numbers_ptr + row * _SLOTS + slot, unused, mask=(slot == 0) | (slot >= number))
        tl.store(scales_ptr + row, tl.where(factor == 0.0, 0.0, 1.0 / tl.where(factor == 0.0, 1.0, factor)))
        is_beyond = tl.min(least, axis=0) < 0.0
        # If all logits of the sample are -inf, the factor is 0.
        is_wrong = is_beyond | (number > _SLOTS) | ((factor == 0.0) & (sums >= _LEAST_SUM))
        # After the second product the largest exponential of a row whose exponentials were out of range is 1.
        correct_factor = e4m3_factor(tl.where(is_beyond, 1.0 * vocab_size, sums), tl.program_id(0))
        tl.store(row_factor_ptr + row, correct_factor, mask=is_wrong)
        tl.store(work_ptr + _FLAG_STRIDE, work, mask=is_wrong)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr,  # (n, cols)
    gather_ptr,  # (rows,) int64: rows of x
    factor_ptr,  # (rows,)
    limit_ptr,  # (cols,) magnitudes that become 448
    peak_ptr,  # (cols,) int32: the bits of the largest magnitude of each column that exceeds its limit, else 0
    partial_ptr,  # (blocks, rows) output: sums of the magnitudes of each block of x
    matrix_ptr,  # (rows, cols) E4M3 output
    transposed_ptr,  # (cols, padded_rows) E4M3 output
    x_stride,
    x_col_stride,
    matrix_stride,
    transposed_stride,
    rows,
    cols,
    padded_rows,
    HAS_GATHER: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    HAS_MATRIX: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    IS_RETRY: tl.constexpr,  # compute only columns that exceed their limit
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    limit = tl.load(limit_ptr + column, mask=column < cols, other=1.0)
    is_computed = 1
    if IS_RETRY:
        peak = tl.load(peak_ptr + column, mask=column < cols, other=0).to(tl.float32, bitcast=True)
        is_computed = tl.max((peak > limit).to(tl.int32), axis=0)
        limit = tl.maximum(limit, peak)
    if is_computed > 0:
        place = tl.load(gather_ptr + row, mask=row < rows, other=0) if HAS_GATHER else row.to(tl.int64)
        exists = (row < rows)[:, None] & (column < cols)[None, :]
        places = place[:, None] * x_stride + column[None, :].to(tl.int64) * x_col_stride
        x = tl.load(x_ptr + places, mask=exists, other=0.0).to(tl.float32)
        if HAS_PARTIAL:
            sums_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * rows + row
            tl.store(sums_ptr, tl.sum(tl.abs(x), axis=1), mask=row < rows)
        if HAS_FACTOR:
            x *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
        if not IS_RETRY:
            largest = tl.max(tl.abs(x), axis=0)
            bits = largest.to(tl.int32, bitcast=True)
            tl.atomic_max(peak_ptr + column, bits, mask=(largest > limit) & (column < cols), sem="relaxed")
        x = tl.minimum(x * (1.0 / limit * _E4M3_MAX)[None, :], _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        rounded = tl.maximum(x, -_E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        if HAS_MATRIX:
            tl.store(matrix_ptr + row.to(tl.int64)[:, None] * matrix_stride + column[None, :], rounded, mask=exists)
        if HAS_TRANSPOSED:
            # Not with `tl.trans`: Triton 3.6 then stores wrong bytes if the kernel also stores `matrix`.
            places = column.to(tl.int64)[None, :] * transposed_stride + row[:, None]
            mask = (column < cols)[None, :] & (row < padded_rows)[:, None]
            tl.store(transposed_ptr + places, rounded, mask=mask)


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
    total = tl.load(product_ptr + row * hidden + column, mask=mask, other=0.0).to(tl.float32) * scale
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
        slot = tl.arange(0, _SLOTS)
        stop = tl.max(tl.where(tl.load(numbers_ptr + slot) < table_rows, slot + 1, 0), axis=0)
    for start in range(first, stop, ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        index = tl.load(numbers_ptr + number, mask=number < stop, other=0).to(tl.int64)
        exists = (number < stop) & (index < table_rows)
        value = tl.load(values_ptr + number, mask=exists, other=0.0)
        places = index[:, None] * table_stride + column[None, :].to(tl.int64) * table_col_stride
        rows = tl.load(table_ptr + places, mask=exists[:, None] & mask[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32) * value[:, None], axis=0)
    if HAS_PLACE:
        row = tl.load(place_ptr + row)
    out_ptr += row * out_stride + column
    if ACCUMULATE:
        total += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=mask)


def quantize_tile(tile: Tensor, out: QuantizedTile) -> None:
    sums = torch.linalg.vector_norm(tile, 1, dim=1, dtype=torch.float32)
    limit = torch.full_like(tile[0], E4M3_MAX, dtype=torch.float32)
    peak, work = torch.zeros_like(limit, dtype=torch.int32), torch.ones(8, dtype=torch.int32, device=tile.device)
    partial = sums.new_empty(triton.cdiv(tile.shape[1], COLS), len(tile))
    run(_quantize_tile, tile, out, row_factors(sums), limit, peak, partial, work)
    out.entries.values.copy_(tile.gather(1, out.entries.numbers.long().clamp_(max=tile.shape[1] - 1)))


def _quantize_tile(
    tile: Tensor, out: QuantizedTile, factor: Tensor, limit: Tensor, peak: Tensor, partial: Tensor, work: Tensor
) -> Iterator[Launch]:
    yield _quantize(tile, out.transposed, limit, peak, factor=factor, matrix=out.matrix, partial=partial)
    yield find_large(out, tile.shape[1], factor, partial, COLS, work)


def _quantize(
    x: Tensor, transposed: Tensor | None, limit: Tensor, peak: Tensor, *, index: Tensor | None = None,
    factor: Tensor | None = None, matrix: Tensor | None = None, partial: Tensor | None = None, is_retry: bool = False,
) -> Launch:  # fmt: skip
    rows, cols = len(x) if index is None else len(index), x.shape[1]
    padded_rows = rows if transposed is None else transposed.shape[1]
    return build_launch(
        quantize_kernel, (triton.cdiv(padded_rows, ROWS), triton.cdiv(cols, COLS)), None,
        {"IS_RETRY": is_retry, "ROWS": ROWS, "COLS": COLS, **thread_options(x.device, 4)},
        x=x, gather=index, factor=factor, limit=limit, peak=peak, partial=partial, matrix=matrix, transposed=transposed,
        rows=rows, cols=cols, padded_rows=padded_rows,
    )  # fmt: skip


def find_large(
    out: QuantizedTile, vocab_size: int, row_factor: Tensor, partial: Tensor, cols: int, work: Tensor
) -> Launch:
    """Return a launch of `find_large_kernel`. cols: columns of a partial sum."""
    return build_launch(
        find_large_kernel, (len(out.matrix),), None,
        {"PARTIALS": PARTIALS, "COLS": cols, **thread_options(out.matrix.device, 1)},
        matrix=out.matrix, transposed=out.transposed, numbers=out.entries.numbers, scales=out.scales,
        row_factor=row_factor, partial=partial, work=work, rows=len(out.matrix), vocab_size=vocab_size,
    )  # fmt: skip


def compute_exponentials(x: Tensor, weight: Tensor, reference: Tensor, call: StatisticsCall, entries: Entries) -> None:
    """Compute the exponentials of large entries as the product does."""
    bias, spec, z = call.inputs.bias, call.spec, entries.values
    if bias is None:
        z.zero_()
    else:  # The indices are int32, so they need less memory than those of the products.
        torch.index_select(bias, 0, entries.numbers.view(-1).clamp(max=len(weight) - 1), out=z.view(-1))
    run(row_products, x, weight, entries.numbers.long(), z)
    if spec.scale != 1.0:
        z.mul_(spec.scale)
    if spec.softcap is not None:
        z = z.tanh_()
        jacobian = (1.0 - z * z).mul_(spec.scale * spec.cap)
        z.mul_(spec.cap)
    z.mul_(LOG2_E.value).sub_(reference[:, None]).exp2_()
    if spec.softcap is not None:
        z.mul_(jacobian)


def quantize_transposed(x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, scales: Tensor) -> None:
    step = triton.cdiv(len(x) if index is None else len(index), E4M3_LIMIT_ROWS)
    sample = x[::step] if index is None else x[index[::step]]
    sample = sample if factor is None else sample * factor[::step, None]
    torch.linalg.vector_norm(sample, torch.inf, dim=0, dtype=torch.float32, out=scales)
    limit = scales.mul_(LIMIT_FACTOR).clamp_(min=LEAST_LIMIT)
    peak = torch.zeros_like(limit, dtype=torch.int32)
    run(_quantize_transposed, x, index, factor, out, limit, peak)
    torch.maximum(limit, peak.view(torch.float32), out=scales).mul_(1.0 / E4M3_MAX)


def _quantize_transposed(
    x: Tensor, index: Tensor | None, factor: Tensor | None, out: Tensor, limit: Tensor, peak: Tensor
) -> Iterator[Launch]:
    for is_retry in (False, True):
        yield _quantize(x, out, limit, peak, index=index, factor=factor, is_retry=is_retry)


def add_entries(
    product: Tensor, row_scales: Tensor | None, col_scales: Tensor, entries: Entries, table: Tensor, out: Tensor,
    index: Tensor | None, accumulate: bool = False,
) -> Iterator[Launch]:  # fmt: skip
    num_rows, hidden = product.shape
    cols = SUM_COLS if hidden > SUM_COLS // 2 else SUM_COLS // 2
    yield build_launch(
        add_entries_kernel, (num_rows, triton.cdiv(hidden, cols)), None,
        {"ACCUMULATE": accumulate, "ENTRIES": SUM_ENTRIES, "COLS": cols, **thread_options(out.device, cols // 256)},
        product=product, row_scales=row_scales, col_scales=col_scales, **entries._asdict(), table=table,
        place=index, out=out, hidden=hidden, table_rows=len(table),
    )  # fmt: skip
