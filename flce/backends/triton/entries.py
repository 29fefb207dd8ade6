"""Kernels and launches for K classes of each row, selected by ids: their logits, and their gradients in a tile.

`TritonBackend` launches them for candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.triton.launch import Launch, build_launch, thread_options

# For a program of four warps: the maximum number of a row's ids, and the columns of the hidden states per step.
ENTRIES, DEPTH = 32, 128
BLOCK = 1024


@triton.jit(do_not_specialize=["hidden", "vocab_size", "size", "ids_stride", "ids_col_stride", "out_stride"])
def row_products_kernel(
    x_ptr,  # (rows, hidden)
    weight_ptr,  # (vocab_size, hidden)
    ids_ptr,  # (rows, size) int64
    out_ptr,  # (rows, size): the products are added
    x_stride,
    x_col_stride,
    weight_stride,
    weight_col_stride,
    ids_stride,
    ids_col_stride,
    out_stride,
    hidden,
    vocab_size,
    size,
    ACCUM: tl.constexpr,
    ENTRIES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add the logits of ENTRIES ids of one row. The order of a sum depends only on `hidden`."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ids = tl.load(ids_ptr + row * ids_stride + entry * ids_col_stride, mask=entry < size, other=-1)
    present = (ids >= 0) & (ids < vocab_size)
    hidden = tl.where(tl.max(present.to(tl.int32), axis=0) > 0, hidden, 0)
    weight_ptr += tl.where(present, ids, 0)[:, None] * weight_stride
    x_ptr += row * x_stride
    total = tl.zeros((ENTRIES, DEPTH), ACCUM)
    for start in range(0, hidden, DEPTH):
        column = start + tl.arange(0, DEPTH)
        in_bounds = column < hidden
        x = tl.load(x_ptr + column * x_col_stride, mask=in_bounds, other=0.0).to(ACCUM)
        weight = tl.load(
            weight_ptr + column[None, :] * weight_col_stride, mask=present[:, None] & in_bounds[None, :], other=0.0
        )
        total += weight.to(ACCUM) * x[None, :]
    out_ptr += row * out_stride + entry
    before = tl.load(out_ptr, mask=present, other=0.0)
    tl.store(out_ptr, before + tl.sum(total, axis=1), mask=present)


@triton.jit(do_not_specialize=["size", "ids_stride", "ids_col_stride", "values_stride", "values_col_stride"])
def sum_equal_kernel(
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    out_ptr,  # (rows, size) contiguous
    ids_stride,
    ids_col_stride,
    values_stride,
    values_col_stride,
    size,
    ENTRIES: tl.constexpr,
):
    """Sum the values of equal ids of a row, for ENTRIES of its ids."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ids_ptr += row * ids_stride
    values_ptr += row * values_stride
    ids = tl.load(ids_ptr + entry * ids_col_stride, mask=entry < size, other=-1)
    total = tl.zeros((ENTRIES,), out_ptr.dtype.element_ty)
    for start in range(0, size, ENTRIES):
        others = start + tl.arange(0, ENTRIES)
        in_bounds = others < size
        other_ids = tl.load(ids_ptr + others * ids_col_stride, mask=in_bounds, other=-2)
        values = tl.load(values_ptr + others * values_col_stride, mask=in_bounds, other=0.0).to(total.dtype)
        total += tl.sum(tl.where(ids[:, None] == other_ids[None, :], values[None, :], 0.0), axis=1)
    tl.store(out_ptr + row * size + entry, total, mask=entry < size)


@triton.jit(do_not_specialize=["total", "size", "start", "cols", "ids_stride", "ids_col_stride", "values_stride"])
def write_entries_kernel(
    tile_ptr,  # (rows, cols)
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    tile_stride,
    ids_stride,
    ids_col_stride,
    values_stride,
    total,  # rows * size
    size,
    start,  # the class of column 0
    cols,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, entry = number // size, number % size
    exists = number < total
    column = tl.load(ids_ptr + row * ids_stride + entry * ids_col_stride, mask=exists, other=-1) - start
    in_bounds = exists & (column >= 0) & (column < cols)
    value = tl.load(values_ptr + row * values_stride + entry, mask=in_bounds, other=0.0)
    # Equal ids of a row have equal values, so the order of the writes does not matter.
    tl.store(tile_ptr + row * tile_stride + column, value.to(tile_ptr.dtype.element_ty), mask=in_bounds)


def _entries(ids: Tensor) -> int:
    return min(ENTRIES, triton.next_power_of_2(ids.shape[1]))


def row_products(x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Iterator[Launch]:
    entries, accum = _entries(ids), tl.float64 if out.dtype == torch.float64 else tl.float32
    yield build_launch(
        row_products_kernel,
        (len(ids), triton.cdiv(ids.shape[1], entries)),
        None,
        {"ACCUM": accum, "ENTRIES": entries, "DEPTH": DEPTH, **thread_options(x.device, 4)},
        x=x,
        weight=weight,
        ids=ids,
        out=out,
        hidden=x.shape[1],
        vocab_size=len(weight),
        size=ids.shape[1],
    )


def sum_equal(ids: Tensor, values: Tensor, out: Tensor) -> Iterator[Launch]:
    entries, size = _entries(ids), ids.shape[1]
    options = {"ENTRIES": entries, **thread_options(ids.device, 1)}
    grid = len(ids), triton.cdiv(size, entries)
    yield build_launch(sum_equal_kernel, grid, None, options, ids=ids, values=values, out=out, size=size)


def write_entries(tile: Tensor, ids: Tensor, values: Tensor, start: int) -> Iterator[Launch]:
    yield build_launch(
        write_entries_kernel,
        (triton.cdiv(ids.numel(), BLOCK),),
        None,
        {"BLOCK": BLOCK, **thread_options(ids.device, 4)},
        tile=tile,
        ids=ids,
        values=values,
        total=ids.numel(),
        size=ids.shape[1],
        start=start,
        cols=tile.shape[1],
    )
