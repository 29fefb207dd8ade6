"""Launches of the kernels for a few classes of each row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.triton.entries import row_products_kernel, sum_equal_kernel, write_entries_kernel
from flce.backends.triton.launch import Launch, threads
from flce.backends.triton.replay import run

# Of a program of four warps: ids of a row, at most, and columns of the hidden states at a time.
ENTRIES, DEPTH = 32, 128
BLOCK = 1024


def row_products(x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> None:
    run(_row_products, x, weight, ids, out)


def sum_equal(ids: Tensor, values: Tensor, out: Tensor) -> None:
    run(_sum_equal, ids, values, out)


def write_entries(tile: Tensor, ids: Tensor, values: Tensor, start: int) -> None:
    run(_write_entries, tile, ids, values, start)


def _entries(ids: Tensor) -> int:
    return min(ENTRIES, triton.next_power_of_2(ids.shape[1]))


def _row_products(x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Iterator[Launch]:
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
    options = {"ACCUM": accum, "ENTRIES": entries, "DEPTH": DEPTH, **threads(x.device, 4)}
    yield Launch(row_products_kernel, (len(ids), triton.cdiv(ids.shape[1], entries)), args, options)


def _sum_equal(ids: Tensor, values: Tensor, out: Tensor) -> Iterator[Launch]:
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
    options = {"ENTRIES": entries, **threads(ids.device, 1)}
    yield Launch(sum_equal_kernel, (len(ids), triton.cdiv(ids.shape[1], entries)), args, options)


def _write_entries(tile: Tensor, ids: Tensor, values: Tensor, start: int) -> Iterator[Launch]:
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
    options = {"BLOCK": BLOCK, **threads(ids.device, 4)}
    yield Launch(write_entries_kernel, (triton.cdiv(ids.numel(), BLOCK),), args, options)
