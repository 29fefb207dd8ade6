"""The softmax kernels: softmax or log-softmax of rows with any strides, and their gradients.

There are two kernels for each direction. `softmax_launch` chooses by the size of a row:

* *resident*: a program has one row or a few rows in registers; it reads them once and writes their results once;
* *online*: a program reads its rows block by block, twice, the second time backwards, because the caches then have the
  blocks that were read last. The first pass is the online softmax of the fused operator (`math.softmax_update`), or a
  sum.

With p = softmax(x) over a row and an upstream gradient g:

    y = p               dx_k = y_k (g_k - sum_j g_j y_j)
    y = log p           dx_k = g_k - exp(y_k) sum_j g_j

The result of a row is NaN if all its elements are -inf, or if it has +inf or NaN, as in PyTorch. The kernels have no
check: NaN results from (-inf) - (-inf), because the row's maximum is not replaced by 0.

A tensor has (outer, columns, inner) elements with three strides. The softmax is along the columns. Rows are numbered
along `inner` first, and the rows of one program are neighbours along `inner`: if columns are not adjacent in memory,
vectors are loaded along `inner`. If columns are adjacent, the strides between rows and the number of columns are in
units of ALIGN elements, so that the compiler knows their divisors, and whole vectors lie within a row.

Rows that begin at any address (with an odd number of columns) have *edges*: up to EDGES - 1 elements before the first
boundary of a vector and behind the last one. The kernels process the whole vectors between the edges like an aligned
row, and the edges as a second small tile of single elements. All tensors of a call have the same edges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flce.backends.triton.math import (
    LOG2_E,
    broadcast_lanes,
    lane_sum,
    load_columns,
    row_head,
    softmax_merge,
    softmax_update,
)


@triton.jit
def _row_indices(local, num_rows, inner, FLAT: tl.constexpr, ROWS: tl.constexpr):
    """Return the indices along `outer` and `inner` of the rows `local` < ROWS of this program, and the mask of rows
    that exist.

    FLAT: the rows are consecutive among all rows. Otherwise they have one index along `outer`, and the last program of
    this index may have fewer rows.
    """
    # 64 bits: row numbers and offsets may exceed 2^31. Divisions of 64 bits are slow, so not for each row.
    program = tl.program_id(0)
    if FLAT:
        row = program.to(num_rows.dtype) * ROWS + local
        # Row numbers behind the last row may overflow 32 bits and be negative.
        present = (row >= 0) & (row < num_rows)
        return (row // inner).to(tl.int64), (row % inner).to(tl.int64), present
    else:
        blocks = tl.cdiv(inner, ROWS)
        row = (program % blocks).to(tl.int64) * ROWS + local
        return (program // blocks).to(tl.int64), row, row < inner


@triton.jit
def _row_start(ptr, outer_index, inner_index, outer_stride, inner_stride, ALIGN: tl.constexpr, EDGES: tl.constexpr):
    """Return pointers to the rows, with EDGES to their first whole vectors. Strides are in units of ALIGN elements."""
    start = (outer_index * outer_stride + inner_index * inner_stride) * ALIGN
    if EDGES:
        # Add the head as a product: then the compiler knows that the pointer is aligned like the tensor.
        start = (start + (EDGES - 1)) // EDGES * EDGES
    return ptr + start


@triton.jit
def _split_edges(outer_index, inner_index, outer_stride, inner_stride, cols, slots, EDGES: tl.constexpr):
    """Return the number of elements in whole vectors of the rows, the offsets of the edges from the first vector, and
    the mask of edges that exist."""
    head = row_head(outer_index * outer_stride + inner_index * inner_stride, EDGES)
    rest = cols - head
    # A product: then the compiler knows that no vector is masked in part.
    vector_cols = tl.maximum(rest, 0) // EDGES * EDGES
    edges = slots - head + tl.where(slots < head, 0, vector_cols)
    return vector_cols, edges, edges < rest


@triton.jit
def _column_offsets(columns, stride, UNIT_STRIDE: tl.constexpr):
    if UNIT_STRIDE:
        return columns
    else:
        return columns.to(tl.int64) * stride


@triton.jit
def _reload_after(x, after):
    """Return 16-bit `x` for a second use that the compiler cannot move before the computation of `after`.

    Otherwise the compiler converts a row to float32 once, which needs twice the registers, and may spill the row to
    memory. If `after` is NaN, the return value differs from `x`, but the results of the row are NaN anyway.
    """
    zero = (after != after).to(tl.int16)
    return (x.to(tl.int16, bitcast=True) ^ zero).to(x.dtype, bitcast=True)


# A tile of several rows has two dimensions. A tile of one row has one dimension, and its statistics are scalars: then
# two tiles of different length each keep the layout in which they were loaded.
@triton.jit
def _row_range(ROWS: tl.constexpr):
    if ROWS == 1:
        return 0
    else:
        return tl.arange(0, ROWS)[:, None]


@triton.jit
def _column_range(COLS: tl.constexpr, ROWS: tl.constexpr):
    if ROWS == 1:
        return tl.arange(0, COLS)
    else:
        return tl.arange(0, COLS)[None, :]


@triton.jit
def _row_max(x, ROWS: tl.constexpr):
    if ROWS == 1:
        return tl.max(x, axis=0)
    else:
        return tl.max(x, axis=1, keep_dims=True)


@triton.jit
def _row_sum(x, ROWS: tl.constexpr):
    if ROWS == 1:
        return tl.sum(x, axis=0)
    else:
        return tl.sum(x, axis=1, keep_dims=True)


@triton.jit(do_not_specialize=["num_rows"])
def softmax_resident_kernel(
    x_ptr,  # each (outer, cols, inner)
    y_ptr,
    x_outer, x_column, x_inner,
    y_outer, y_column, y_inner,
    num_rows,  # outer * inner
    inner,
    cols,  # in units of ALIGN
    ACCUM: tl.constexpr,
    LOG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,  # all column strides are 1
    ALIGN: tl.constexpr,
    EDGES: tl.constexpr,  # elements of a vector if rows have edges; otherwise 0
    SLOTS: tl.constexpr,  # size of the tile for the edges of a row
    FLAT: tl.constexpr,
    NARROW: tl.constexpr,  # the row stays in the dtype of x
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # at least cols, or the columns in whole vectors
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    outer_index, inner_index, present = _row_indices(_row_range(ROWS), num_rows, inner, FLAT, ROWS)
    x_ptr = _row_start(x_ptr, outer_index, inner_index, x_outer, x_inner, ALIGN, EDGES)
    y_ptr = _row_start(y_ptr, outer_index, inner_index, y_outer, y_inner, ALIGN, EDGES)
    vector_cols = cols * ALIGN
    if EDGES:
        slots = _column_range(SLOTS, ROWS)
        vector_cols, edges, edge_mask = _split_edges(outer_index, inner_index, x_outer, x_inner, cols, slots, EDGES)
        edge_mask = edge_mask & present
        edge_z = tl.load(x_ptr + edges, mask=edge_mask, other=float("-inf")).to(ACCUM)
    columns = _column_range(COLS, ROWS)
    mask = columns < vector_cols
    if ROWS > 1:
        mask = mask & present
    x = tl.load(x_ptr + _column_offsets(columns, x_column, UNIT_STRIDE), mask=mask, other=float("-inf"))
    z = x.to(ACCUM)
    largest = _row_max(z, ROWS)
    if EDGES:
        largest = tl.maximum(largest, _row_max(edge_z, ROWS))
    if NARROW:
        z = _reload_after(x, largest).to(ACCUM)
    exps = tl.exp2((z - largest) * LOG2_E)
    total = _row_sum(exps, ROWS)
    if EDGES:
        total += _row_sum(tl.exp2((edge_z - largest) * LOG2_E), ROWS)
    if NARROW:
        z = _reload_after(x, total).to(ACCUM)
        if not LOG:
            exps = tl.exp2((z - largest) * LOG2_E)
    if LOG:
        normalizer = tl.log(total)
        # Differences first: exact if all elements of the row share a large offset.
        y = (z - largest) - normalizer
    else:
        normalizer = 1.0 / total
        y = exps * normalizer
    tl.store(y_ptr + _column_offsets(columns, y_column, UNIT_STRIDE), y.to(y_ptr.dtype.element_ty), mask=mask)
    if EDGES:
        edge_y = _normalized(edge_z, largest, normalizer, LOG)
        tl.store(y_ptr + edges, edge_y.to(y_ptr.dtype.element_ty), mask=edge_mask)


@triton.jit
def _normalized(z, largest, normalizer, LOG: tl.constexpr):
    if LOG:
        return (z - largest) - normalizer
    else:
        return tl.exp2((z - largest) * LOG2_E) * normalizer


@triton.jit(do_not_specialize=["num_rows"])
def softmax_resident_backward_kernel(
    y_ptr,  # each (outer, cols, inner)
    grad_ptr,
    dx_ptr,
    y_outer, y_column, y_inner,
    grad_outer, grad_column, grad_inner,
    dx_outer, dx_column, dx_inner,
    num_rows,  # outer * inner
    inner,
    cols,  # in units of ALIGN
    ACCUM: tl.constexpr,
    LOG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    EDGES: tl.constexpr,
    SLOTS: tl.constexpr,
    FLAT: tl.constexpr,
    NARROW: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    outer_index, inner_index, present = _row_indices(_row_range(ROWS), num_rows, inner, FLAT, ROWS)
    y_ptr = _row_start(y_ptr, outer_index, inner_index, y_outer, y_inner, ALIGN, EDGES)
    grad_ptr = _row_start(grad_ptr, outer_index, inner_index, grad_outer, grad_inner, ALIGN, EDGES)
    dx_ptr = _row_start(dx_ptr, outer_index, inner_index, dx_outer, dx_inner, ALIGN, EDGES)
    vector_cols = cols * ALIGN
    if EDGES:
        slots = _column_range(SLOTS, ROWS)
        vector_cols, edges, edge_mask = _split_edges(outer_index, inner_index, y_outer, y_inner, cols, slots, EDGES)
        edge_mask = edge_mask & present
        edge_y = tl.load(y_ptr + edges, mask=edge_mask, other=0.0).to(ACCUM)
        edge_grad = tl.load(grad_ptr + edges, mask=edge_mask, other=0.0).to(ACCUM)
    columns = _column_range(COLS, ROWS)
    mask = columns < vector_cols
    if ROWS > 1:
        mask = mask & present
    y = tl.load(y_ptr + _column_offsets(columns, y_column, UNIT_STRIDE), mask=mask, other=0.0)
    grad = tl.load(grad_ptr + _column_offsets(columns, grad_column, UNIT_STRIDE), mask=mask, other=0.0)
    wide_y, wide_grad = y.to(ACCUM), grad.to(ACCUM)
    total = _row_sum(_term(wide_y, wide_grad, LOG), ROWS)
    if EDGES:
        total += _row_sum(_term(edge_y, edge_grad, LOG), ROWS)
    if NARROW:
        wide_y, wide_grad = _reload_after(y, total).to(ACCUM), _reload_after(grad, total).to(ACCUM)
    dx = _gradient(wide_y, wide_grad, total, LOG)
    tl.store(dx_ptr + _column_offsets(columns, dx_column, UNIT_STRIDE), dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if EDGES:
        edge_dx = _gradient(edge_y, edge_grad, total, LOG)
        tl.store(dx_ptr + edges, edge_dx.to(dx_ptr.dtype.element_ty), mask=edge_mask)


@triton.jit
def _term(y, grad, LOG: tl.constexpr):
    """Return the terms of the sum over a row that the gradient needs."""
    if LOG:
        return grad
    else:
        return grad * y


@triton.jit
def _gradient(y, grad, total, LOG: tl.constexpr):
    if LOG:
        return grad - tl.exp2(y * LOG2_E) * total
    else:
        return y * (grad - total)


@triton.jit
def _tile(ROWS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return the row of the program and the column of the block for each element of a (PARTS, LANES * VECTOR) tile.

    A lane has VECTOR columns of one row. The next lane has the next columns or, with several rows, the same column of
    the next row; then VECTOR is 1.
    """
    tl.static_assert(ROWS == 1 or VECTOR == 1)
    width = tl.arange(0, LANES * VECTOR)[None, :]
    columns = tl.arange(0, PARTS)[:, None] * (LANES * VECTOR // ROWS) + width // ROWS
    return width % ROWS, columns


@triton.jit
def _broadcast_to_tile(value, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Broadcast a value for each row, (ROWS,), or the scalar of the only row to the elements of a tile."""
    if ROWS == 1:
        return value
    else:
        lanes = tl.reshape(tl.broadcast_to(value[None, :], (LANES // ROWS, ROWS)), (LANES,))
        return broadcast_lanes(lanes, LANES, VECTOR)


@triton.jit
def _store(pointers, value, mask):
    # Evict written lines first, before lines that the second pass still has to read.
    if mask is None:
        tl.store(pointers, value, eviction_policy="evict_first")
    else:
        tl.store(pointers, value, mask=mask, eviction_policy="evict_first")


@triton.jit
def _update(largest, total, z, LANES: tl.constexpr, VECTOR: tl.constexpr):
    largest, total, _exps, _reference, _decay = softmax_update(largest, total, z, LANES, VECTOR)
    return largest, total


@triton.jit(do_not_specialize=["num_rows"])
def softmax_online_kernel(
    x_ptr,  # each (outer, cols, inner)
    y_ptr,
    x_outer, x_column, x_inner,
    y_outer, y_column, y_inner,
    num_rows,  # outer * inner
    inner,
    cols,  # in units of ALIGN
    ACCUM: tl.constexpr,
    LOG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    EDGES: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,  # 2^30 columns or more
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCK: tl.constexpr = PARTS * LANES * VECTOR // ROWS
    local, offsets = _tile(ROWS, PARTS, LANES, VECTOR)
    if ROWS == 1:
        outer_index, inner_index, _present = _row_indices(0, num_rows, inner, FLAT, ROWS)
        present = None
    else:
        outer_index, inner_index, present = _row_indices(local, num_rows, inner, FLAT, ROWS)
    x_ptr = _row_start(x_ptr, outer_index, inner_index, x_outer, x_inner, ALIGN, EDGES)
    y_ptr = _row_start(y_ptr, outer_index, inner_index, y_outer, y_inner, ALIGN, EDGES)
    if LONG:
        cols = cols.to(tl.int64)
    largest = tl.full((LANES,), float("-inf"), ACCUM)
    total = tl.full((LANES,), 0.0, ACCUM)
    vector_cols = cols * ALIGN
    if EDGES:
        # Each lane has at most one element of the edges.
        slots = tl.arange(0, LANES)[None, :]
        vector_cols, edges, edge_mask = _split_edges(outer_index, inner_index, x_outer, x_inner, cols, slots, EDGES)
        edge_z = tl.load(x_ptr + edges, mask=edge_mask, other=float("-inf")).to(ACCUM)
        largest, total = _update(largest, total, edge_z, LANES, 1)
    # All blocks but the last are full.
    last = tl.maximum(vector_cols - 1, 0) // BLOCK * BLOCK
    last_columns = last + offsets
    mask = last_columns < vector_cols
    if ROWS > 1:
        mask = mask & present

    # Keep the row in the cache for the second pass: this saves 1 to 3% for rows of 32,000 elements or more, and nothing
    # in backward.
    for start in range(0, last, BLOCK):
        x = load_columns(
            x_ptr + _column_offsets(start + offsets, x_column, UNIT_STRIDE), present, "evict_last", float("-inf")
        )
        largest, total = _update(largest, total, x.to(ACCUM), LANES, VECTOR)
    x = load_columns(x_ptr + _column_offsets(last_columns, x_column, UNIT_STRIDE), mask, "evict_last", float("-inf"))
    largest, total = _update(largest, total, x.to(ACCUM), LANES, VECTOR)
    if ROWS > 1:
        largest = tl.reshape(largest, (LANES // ROWS, ROWS))
        total = tl.reshape(total, (LANES // ROWS, ROWS))
    row_largest, row_total = tl.reduce((largest, total), 0, softmax_merge)
    shift = _broadcast_to_tile(row_largest, ROWS, LANES, VECTOR)
    if LOG:
        normalizer = _broadcast_to_tile(tl.log(row_total), ROWS, LANES, VECTOR)
    else:
        normalizer = _broadcast_to_tile(1.0 / row_total, ROWS, LANES, VECTOR)

    for done in range(0, last, BLOCK):
        columns = last - BLOCK - done + offsets
        x = load_columns(x_ptr + _column_offsets(columns, x_column, UNIT_STRIDE), present, "evict_first", float("-inf"))
        y = _normalized(x.to(ACCUM), shift, normalizer, LOG)
        _store(y_ptr + _column_offsets(columns, y_column, UNIT_STRIDE), y.to(y_ptr.dtype.element_ty), present)
    x = load_columns(x_ptr + _column_offsets(last_columns, x_column, UNIT_STRIDE), mask, "evict_first", float("-inf"))
    y = _normalized(x.to(ACCUM), shift, normalizer, LOG)
    _store(y_ptr + _column_offsets(last_columns, y_column, UNIT_STRIDE), y.to(y_ptr.dtype.element_ty), mask)
    if EDGES:
        edge_y = _normalized(edge_z, shift, normalizer, LOG)
        _store(y_ptr + edges, edge_y.to(y_ptr.dtype.element_ty), edge_mask)


@triton.jit(do_not_specialize=["num_rows"])
def softmax_online_backward_kernel(
    y_ptr,  # each (outer, cols, inner)
    grad_ptr,
    dx_ptr,
    y_outer, y_column, y_inner,
    grad_outer, grad_column, grad_inner,
    dx_outer, dx_column, dx_inner,
    num_rows,  # outer * inner
    inner,
    cols,  # in units of ALIGN
    ACCUM: tl.constexpr,
    LOG: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    EDGES: tl.constexpr,
    FLAT: tl.constexpr,
    LONG: tl.constexpr,  # 2^30 columns or more
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCK: tl.constexpr = PARTS * LANES * VECTOR // ROWS
    local, offsets = _tile(ROWS, PARTS, LANES, VECTOR)
    if ROWS == 1:
        outer_index, inner_index, _present = _row_indices(0, num_rows, inner, FLAT, ROWS)
        present = None
    else:
        outer_index, inner_index, present = _row_indices(local, num_rows, inner, FLAT, ROWS)
    y_ptr = _row_start(y_ptr, outer_index, inner_index, y_outer, y_inner, ALIGN, EDGES)
    grad_ptr = _row_start(grad_ptr, outer_index, inner_index, grad_outer, grad_inner, ALIGN, EDGES)
    dx_ptr = _row_start(dx_ptr, outer_index, inner_index, dx_outer, dx_inner, ALIGN, EDGES)
    if LONG:
        cols = cols.to(tl.int64)
    total = tl.full((LANES,), 0.0, ACCUM)
    vector_cols = cols * ALIGN
    if EDGES:
        # Each lane has at most one element of the edges.
        slots = tl.arange(0, LANES)[None, :]
        vector_cols, edges, edge_mask = _split_edges(outer_index, inner_index, y_outer, y_inner, cols, slots, EDGES)
        edge_y = tl.load(y_ptr + edges, mask=edge_mask, other=0.0).to(ACCUM)
        edge_grad = tl.load(grad_ptr + edges, mask=edge_mask, other=0.0).to(ACCUM)
        total += lane_sum(_term(edge_y, edge_grad, LOG), LANES, 1)
    last = tl.maximum(vector_cols - 1, 0) // BLOCK * BLOCK
    last_columns = last + offsets
    mask = last_columns < vector_cols
    if ROWS > 1:
        mask = mask & present

    for start in range(0, last, BLOCK):
        columns = start + offsets
        term = load_columns(grad_ptr + _column_offsets(columns, grad_column, UNIT_STRIDE), present, "").to(ACCUM)
        if not LOG:
            term *= load_columns(y_ptr + _column_offsets(columns, y_column, UNIT_STRIDE), present, "").to(ACCUM)
        total += lane_sum(term, LANES, VECTOR)
    term = load_columns(grad_ptr + _column_offsets(last_columns, grad_column, UNIT_STRIDE), mask, "").to(ACCUM)
    if not LOG:
        term *= load_columns(y_ptr + _column_offsets(last_columns, y_column, UNIT_STRIDE), mask, "").to(ACCUM)
    total += lane_sum(term, LANES, VECTOR)
    if ROWS > 1:
        total = tl.reshape(total, (LANES // ROWS, ROWS))
    row_total = _broadcast_to_tile(tl.sum(total, axis=0), ROWS, LANES, VECTOR)

    for done in range(0, last, BLOCK):
        columns = last - BLOCK - done + offsets
        grad = load_columns(grad_ptr + _column_offsets(columns, grad_column, UNIT_STRIDE), present, "evict_first")
        y = load_columns(y_ptr + _column_offsets(columns, y_column, UNIT_STRIDE), present, "evict_first")
        dx = _gradient(y.to(ACCUM), grad.to(ACCUM), row_total, LOG)
        _store(dx_ptr + _column_offsets(columns, dx_column, UNIT_STRIDE), dx.to(dx_ptr.dtype.element_ty), present)
    grad = load_columns(grad_ptr + _column_offsets(last_columns, grad_column, UNIT_STRIDE), mask, "evict_first")
    y = load_columns(y_ptr + _column_offsets(last_columns, y_column, UNIT_STRIDE), mask, "evict_first")
    dx = _gradient(y.to(ACCUM), grad.to(ACCUM), row_total, LOG)
    _store(dx_ptr + _column_offsets(last_columns, dx_column, UNIT_STRIDE), dx.to(dx_ptr.dtype.element_ty), mask)
    if EDGES:
        edge_dx = _gradient(edge_y, edge_grad, row_total, LOG)
        _store(dx_ptr + edges, edge_dx.to(dx_ptr.dtype.element_ty), edge_mask)
