"""Kernels and launches for K classes of each row, selected by ids: their logits, and their gradients in a tile.

`TritonBackend` launches them for candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.triton.launch import Launch, thread_options

# For a program of four warps: the maximum number of a row's ids, and the columns of the hidden states per step.
ENTRIES, DEPTH = 32, 128
BLOCK = 1024


@triton.jit(do_not_specialize=["hidden", "vocab_size", "size", "ids_stride", "ids_step", "out_stride"])
def row_products_kernel(
    x_ptr,  # (rows, hidden)
    weight_ptr,  # (vocab_size, hidden)
    ids_ptr,  # (rows, size) int64
    out_ptr,  # (rows, size): the products are added
    x_stride,
    x_step,
    weight_stride,
    weight_step,
    ids_stride,
    ids_step,
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
    ids = tl.load(ids_ptr + row * ids_stride + entry * ids_step, mask=entry < size, other=-1)
    present = (ids >= 0) & (ids < vocab_size)
    weight_ptr += tl.where(present, ids, 0)[:, None] * weight_stride
    x_ptr += row * x_stride
    total = tl.zeros((ENTRIES, DEPTH), ACCUM)
    for start in range(0, hidden, DEPTH):
        column = start + tl.arange(0, DEPTH)
        in_bounds = column < hidden
        x = tl.load(x_ptr + column * x_step, mask=in_bounds, other=0.0).to(ACCUM)
        weight = tl.load(
            weight_ptr + column[None, :] * weight_step, mask=present[:, None] & in_bounds[None, :], other=0.0
        )
        total += weight.to(ACCUM) * x[None, :]
    out_ptr += row * out_stride + entry
    before = tl.load(out_ptr, mask=present, other=0.0)
    tl.store(out_ptr, before + tl.sum(total, axis=1), mask=present)


@triton.jit(do_not_specialize=["size", "ids_stride", "ids_step", "values_stride", "values_step"])
def sum_equal_kernel(
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    out_ptr,  # (rows, size) contiguous
    ids_stride,
    ids_step,
    values_stride,
    values_step,
    size,
    ENTRIES: tl.constexpr,
):
    """Sum the values of equal ids of a row, for ENTRIES of its ids."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ids_ptr += row * ids_stride
    values_ptr += row * values_stride
    ids = tl.load(ids_ptr + entry * ids_step, mask=entry < size, other=-1)
    total = tl.zeros((ENTRIES,), out_ptr.dtype.element_ty)
    for start in range(0, size, ENTRIES):
        others = start + tl.arange(0, ENTRIES)
        in_bounds = others < size
        other_ids = tl.load(ids_ptr + others * ids_step, mask=in_bounds, other=-2)
        values = tl.load(values_ptr + others * values_step, mask=in_bounds, other=0.0).to(total.dtype)
        total += tl.sum(tl.where(ids[:, None] == other_ids[None, :], values[None, :], 0.0), axis=1)
    tl.store(out_ptr + row * size + entry, total, mask=entry < size)


@triton.jit(do_not_specialize=["total", "size", "start", "cols", "ids_stride", "ids_step", "values_stride"])
def write_entries_kernel(
    tile_ptr,  # (rows, cols)
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    tile_stride,
    ids_stride,
    ids_step,
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
    column = tl.load(ids_ptr + row * ids_stride + entry * ids_step, mask=exists, other=-1) - start
    in_bounds = exists & (column >= 0) & (column < cols)
    value = tl.load(values_ptr + row * values_stride + entry, mask=in_bounds, other=0.0)
    # Equal ids of a row have equal values, so the order of the writes does not matter.
    tl.store(tile_ptr + row * tile_stride + column, value.to(tile_ptr.dtype.element_ty), mask=in_bounds)


def _entries(ids: Tensor) -> int:
    return min(ENTRIES, triton.next_power_of_2(ids.shape[1]))


def row_products(x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Iterator[Launch]:
    entries = _entries(ids)
    args = {
        "x_ptr": x,
        "weight_ptr": weight,
        "ids_ptr": ids,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "x_step": x.stride(1),
        "weight_stride": weight.stride(0),
        "weight_step": weight.stride(1),
        "ids_stride": ids.stride(0),
        "ids_step": ids.stride(1),
        "out_stride": out.stride(0),
        "hidden": x.shape[1],
        "vocab_size": len(weight),
        "size": ids.shape[1],
    }
    accum = tl.float64 if out.dtype == torch.float64 else tl.float32
    options = {"ACCUM": accum, "ENTRIES": entries, "DEPTH": DEPTH, **thread_options(x.device, 4)}
    yield Launch(row_products_kernel, (len(ids), triton.cdiv(ids.shape[1], entries)), args, options)


def sum_equal(ids: Tensor, values: Tensor, out: Tensor) -> Iterator[Launch]:
    entries = _entries(ids)
    args = {
        "ids_ptr": ids,
        "values_ptr": values,
        "out_ptr": out,
        "ids_stride": ids.stride(0),
        "ids_step": ids.stride(1),
        "values_stride": values.stride(0),
        "values_step": values.stride(1),
        "size": ids.shape[1],
    }
    options = {"ENTRIES": entries, **thread_options(ids.device, 1)}
    yield Launch(sum_equal_kernel, (len(ids), triton.cdiv(ids.shape[1], entries)), args, options)


def write_entries(tile: Tensor, ids: Tensor, values: Tensor, start: int) -> Iterator[Launch]:
    args = {
        "tile_ptr": tile,
        "ids_ptr": ids,
        "values_ptr": values,
        "tile_stride": tile.stride(0),
        "ids_stride": ids.stride(0),
        "ids_step": ids.stride(1),
        "values_stride": values.stride(0),
        "total": ids.numel(),
        "size": ids.shape[1],
        "start": start,
        "cols": tile.shape[1],
    }
    options = {"BLOCK": BLOCK, **thread_options(ids.device, 4)}
    yield Launch(write_entries_kernel, (triton.cdiv(ids.numel(), BLOCK),), args, options)
