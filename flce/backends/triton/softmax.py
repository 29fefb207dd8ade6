"""Softmax and log-softmax of rows in memory, and their gradients: the kernel and its launch.

`TritonBackend` calls `process_rows`. All tensors are contiguous. The size of a row decides how the kernel processes the
row:

* *resident*: a program has one row or a few rows in registers. It reads the rows once and writes their results once;
* *online*: a program reads its row block by block, twice, the second time backwards, because the caches then have the
  blocks that were read last. The first pass is the online softmax of the fused operator (`math.softmax_update`), or a
  sum.

With p = softmax(x) over a row and an upstream gradient g:

    y = p               dx_k = y_k (g_k - sum_j g_j y_j)
    y = log p           dx_k = g_k - exp(y_k) sum_j g_j

The result of a row is NaN if all its elements are -inf, or if it has +inf or NaN, as in PyTorch. The kernel has no
check: NaN results from (-inf) - (-inf), because the row's maximum is not replaced by 0.

The number of columns is in units of ALIGN elements, so that the compiler knows its divisors, and whole vectors lie
within a row. Longer rows of another length are left to PyTorch: single elements would be slower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.eager import TorchBackend
from flce.backends.triton.launch import (
    MAX_REGISTERS,
    MIN_FILLED_SHARE,
    VECTOR_BYTES,
    WARP,
    Launch,
    build_launch,
    fewest_warps,
    filled_share,
    spills_more,
    thread_options,
)
from flce.backends.triton.math import (
    LOG2_E,
    lane_sum,
    load_columns,
    softmax_merge,
    softmax_update,
    wait_for_previous_kernel,
)
from flce.backends.triton.replay import run
from flce.core.devices import device_record

MAX_WARPS = 32
_TORCH = TorchBackend()  # for rows that are not whole vectors

# The launch table. Figures were measured on an H200 with 4096 rows. Percentages are of the speed of a copy that moves
# the same number of bytes. (Percentages above 120 are for tensors of 512 MiB, for which the copy had two thirds of the
# speed of a kernel.)
#
# The share of a program's registers for a resident row as it is loaded (in backward with its gradient). The other
# registers are for the computation. Longer rows use the online kernel.
RESIDENT_SHARE = 0.5
# Values of a resident row in a thread, in backward of both tensors: with this number the few threads of such rows have
# enough loads in flight.
VALUES_PER_THREAD = 32
# Rows shorter than SHORT_TILE columns share a program with SHORT_WARPS, because with programs of one warp a
# multiprocessor runs half of its possible warps. The rows of a program together have SHORT_TILE columns. Rows of
# single elements differ. In backward a program has half of these rows if they are very short and of float32. In
# forward, rows of up to 2 * VERY_SHORT columns have twice the warps, and a program has 8 rows of 128 or 256 columns, or
# the rows that are two vectors for a thread.
#   backward, columns          512              256              256 float32       128 float32
#   chosen                     2 warps 118%     4 warps 115%     16 values 86%     4 rows 113%
#   alternative                1 warp 91%       1 warp 99%       32 values 78%     8 rows 98%
#   log-softmax, columns       128    129    200    128 float32    200 float32    256 float32
#   chosen                     72%    59%    67%    77%            70%            76 to 80% (8 rows 75 to 77)
#   with half of the warps     57%    55%    51%    74%            67%            74%
SHORT_TILE = 1024
SHORT_WARPS, SHORT_BACKWARD_WARPS = 2, 4
VERY_SHORT, VERY_SHORT_TILE_BYTES = 128, 4096
# In forward, rows of 16-bit values use the online kernel if they are longer than RESIDENT_COLUMNS, or if they are
# longer than half of that and fill less than MIN_FILLED_SHARE of a resident row. (In backward 32768 columns reach
# 101% with either kernel.)
#   columns      10007    12001    32768    65536
#   online       82%      88%      90%      142%
#   resident     71%      82%      76%      122%
RESIDENT_COLUMNS = 16384
# Up to this number of columns single elements are as fast as PyTorch's kernel. Microseconds of log-softmax:
#   columns             67              129     201                          257     385
#   rows in warps       4 in 1                  2 in 1 (4 in 2)                      2 in 4
#   this kernel         2.05            3.05    3.15 (3.30)                  3.87    4.30
#   eager PyTorch       2.64                    3.10                                 4.69
MAX_SINGLE_COLUMNS = 512
# For `fewest_warps` of the online kernels. Columns of 16-bit values, unless another dtype is named:
#   forward, 65536        16 warps 142%    32 warps 126%, which is best for twice the bytes
#   forward, 32768        8 warps 87%      16 warps 90%
#   backward, 50257       32 warps 95%     16 warps 76%
#   backward, 32768 float32    32 warps 154%    16 warps 108%
ONLINE_WARPS = (16, 32)
ONLINE_BACKWARD_WARPS = (32,)
# In forward the number of warps is halved, down to this number, while rows fill less than MIN_FILLED_SHARE of their
# blocks: 20001 columns of 16-bit values reach 82% if they fill 81% of three blocks, 64% if they fill 61% of two.
FEWEST_ONLINE_WARPS = 4
# Vectors of a thread and tensor in one block. In backward 4 reach 158% and 2 reach 142% for 65536 columns of 16-bit
# values; for other sizes 2 are 2% slower to 1% faster.
ONLINE_PARTS = 4


@triton.jit(do_not_specialize=["num_rows"])
def softmax_kernel(
    x_ptr,  # (num_rows, cols); in backward the result y
    grad_ptr,  # likewise, the upstream gradient; None: forward
    out_ptr,  # likewise
    num_rows,
    cols,  # in units of ALIGN
    ACCUM: tl.constexpr,
    LOG: tl.constexpr,
    ALIGN: tl.constexpr,
    LONG: tl.constexpr,  # 2^30 columns or more
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    ROWS: tl.constexpr,  # of a program
    COLS: tl.constexpr,  # resident: at least cols; 0: online
    PARTS: tl.constexpr,  # online: a block has PARTS x LANES x VECTOR columns, each thread is a lane
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    BACKWARD: tl.constexpr = grad_ptr is not None
    # A tile of several rows has two dimensions. A resident tile of one row has one dimension, and its statistics are
    # scalars: then two tiles of different length each keep the layout in which they were loaded.
    FLAT: tl.constexpr = COLS > 0 and ROWS == 1
    AXIS: tl.constexpr = 0 if FLAT else 1
    row = tl.program_id(0).to(tl.int64)  # 64 bits: offsets may exceed 2^31
    if ROWS > 1:
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        present = row < num_rows
    start = row * cols * ALIGN
    if LONG:
        cols = cols.to(tl.int64)
    vector_cols = cols * ALIGN
    x_ptr += start
    if BACKWARD:
        grad_ptr += start
    out_ptr += start

    if COLS > 0:
        columns = tl.arange(0, COLS) if FLAT else tl.arange(0, COLS)[None, :]
        mask = columns < vector_cols
        if ROWS > 1:
            mask = mask & present
        x, grad = _load(x_ptr, grad_ptr, columns, mask, "")
        largest, wide_x = 0.0, x.to(ACCUM)
        if not BACKWARD:
            largest = tl.max(wide_x, AXIS, keep_dims=not FLAT)
        total = tl.sum(_term(wide_x, grad.to(ACCUM), largest, LOG, BACKWARD), AXIS, keep_dims=not FLAT)
        normalizer = _normalizer(total, LOG, BACKWARD)
        out = _result(x.to(ACCUM), grad.to(ACCUM), largest, normalizer, LOG, BACKWARD)
        tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # Keep the row in the cache for the second pass: this saves 1 to 3% for rows of 32,000 elements or more, and
        # nothing in backward. Evict written lines first, before lines that the second pass still has to read.
        FIRST: tl.constexpr = "" if BACKWARD else "evict_last"
        BLOCK: tl.constexpr = PARTS * LANES * VECTOR
        offsets = tl.arange(0, PARTS)[:, None] * (LANES * VECTOR) + tl.arange(0, LANES * VECTOR)[None, :]
        largest = tl.full((LANES,), float("-inf"), ACCUM)
        total = tl.full((LANES,), 0.0, ACCUM)
        # All blocks but the last are full.
        last = tl.maximum(vector_cols - 1, 0) // BLOCK * BLOCK
        last_columns = last + offsets
        mask = last_columns < vector_cols
        for first in range(0, last, BLOCK):
            x, grad = _load(x_ptr, grad_ptr, first + offsets, None, FIRST)
            largest, total = _update(largest, total, x.to(ACCUM), grad.to(ACCUM), LOG, BACKWARD, LANES, VECTOR)
        x, grad = _load(x_ptr, grad_ptr, last_columns, mask, FIRST)
        largest, total = _update(largest, total, x.to(ACCUM), grad.to(ACCUM), LOG, BACKWARD, LANES, VECTOR)
        if BACKWARD:
            row_largest, row_total = 0.0, tl.sum(total, axis=0)
        else:
            row_largest, row_total = tl.reduce((largest, total), 0, softmax_merge)
        normalizer = _normalizer(row_total, LOG, BACKWARD)
        for done in range(0, last, BLOCK):
            columns = last - BLOCK - done + offsets
            x, grad = _load(x_ptr, grad_ptr, columns, None, "evict_first")
            out = _result(x.to(ACCUM), grad.to(ACCUM), row_largest, normalizer, LOG, BACKWARD)
            tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), eviction_policy="evict_first")
        x, grad = _load(x_ptr, grad_ptr, last_columns, mask, "evict_first")
        out = _result(x.to(ACCUM), grad.to(ACCUM), row_largest, normalizer, LOG, BACKWARD)
        tl.store(out_ptr + last_columns, out.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _load(x_ptr, grad_ptr, columns, mask, EVICTION: tl.constexpr):
    if grad_ptr is not None:
        return load_columns(x_ptr + columns, mask, EVICTION), load_columns(grad_ptr + columns, mask, EVICTION)
    else:
        x = load_columns(x_ptr + columns, mask, EVICTION, float("-inf"))
        return x, x


@triton.jit
def _term(x, grad, largest, LOG: tl.constexpr, BACKWARD: tl.constexpr):
    """Return the terms of the sum over a row that the results need."""
    if not BACKWARD:
        return tl.exp2((x - largest) * LOG2_E)
    elif LOG:
        return grad
    else:
        return grad * x


@triton.jit
def _update(
    largest, total, x, grad, LOG: tl.constexpr, BACKWARD: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """Merge a block into the maximum and the sum of each lane."""
    if BACKWARD:
        return largest, total + lane_sum(_term(x, grad, largest, LOG, BACKWARD), LANES, VECTOR)
    else:
        largest, total, _exps, _reference, _decay = softmax_update(largest, total, x, LANES, VECTOR)
        return largest, total


@triton.jit
def _normalizer(total, LOG: tl.constexpr, BACKWARD: tl.constexpr):
    if BACKWARD:
        return total
    elif LOG:
        return tl.log(total)
    else:
        return 1.0 / total


@triton.jit
def _result(x, grad, largest, normalizer, LOG: tl.constexpr, BACKWARD: tl.constexpr):
    if BACKWARD and LOG:
        return grad - tl.exp2(x * LOG2_E) * normalizer
    elif BACKWARD:
        return x * (grad - normalizer)
    elif LOG:
        # Differences first: exact if all elements of the row share a large offset.
        return (x - largest) - normalizer
    else:
        return tl.exp2((x - largest) * LOG2_E) * normalizer


class RowLaunch(NamedTuple):
    """The sizes of a program."""

    warps: int
    rows: int = 1  # resident: a power of two
    parts: int = 0  # online: parts of a block; 0: resident
    vector: int = 1  # online: elements of a vector


def process_rows(
    x: Tensor, grad: Tensor | None, dtype: torch.dtype, log: bool, launch: RowLaunch | None = None
) -> Tensor:
    """Return the result of `Backend.softmax`, or with `grad` of `Backend.softmax_backward`, whose `y` is `x`.

    A `launch` replaces the launch that `row_launch` chooses.
    """
    cols = x.shape[-1]
    if cols > MAX_SINGLE_COLUMNS and cols * min(x.dtype.itemsize, dtype.itemsize) % VECTOR_BYTES:
        return _TORCH.softmax(x, dtype, log) if grad is None else _TORCH.softmax_backward(grad, x, dtype, log)
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        launch = launch or row_launch(cols, x.dtype, dtype, grad is not None, x.device)
        run(_launches, x, grad, out, log, launch)
    return out


@functools.lru_cache(maxsize=1024)
def row_launch(cols: int, read: torch.dtype, written: torch.dtype, backward: bool, device: torch.device) -> RowLaunch:
    """Return the launch for rows of this length. It does not depend on the number of rows, so a row's result does not
    either."""
    tensors = 2 if backward else 1
    padded_cols = triton.next_power_of_2(cols)
    smallest = min(read.itemsize, written.itemsize)
    float64 = torch.float64 in (read, written)
    size = 8 if float64 else read.itemsize  # bytes of an element in registers
    tile, short_warps = SHORT_TILE, SHORT_BACKWARD_WARPS if backward else SHORT_WARPS
    if cols * smallest % VECTOR_BYTES:
        tile, short_warps = max(SHORT_TILE // 2, 2 * padded_cols), 1 if padded_cols <= 2 * VERY_SHORT else 4
    elif not backward and padded_cols <= 2 * VERY_SHORT:
        tile, short_warps = min(8 * max(padded_cols, VERY_SHORT), VERY_SHORT_TILE_BYTES // size), 2 * SHORT_WARPS
    elif padded_cols <= VERY_SHORT and size > 2:
        tile = SHORT_TILE // 2
    rows = max(1, tile // padded_cols)
    max_bytes = RESIDENT_SHARE * min(device_record(device).registers, MAX_WARPS * WARP * MAX_REGISTERS) * 4
    is_underfilled = 2 * padded_cols > RESIDENT_COLUMNS and filled_share(cols, padded_cols) < MIN_FILLED_SHARE
    online = size == 2 and not backward and (padded_cols > RESIDENT_COLUMNS or is_underfilled)
    if rows * padded_cols * size * tensors <= max_bytes and not online:
        values = rows * padded_cols * tensors * (2 if float64 else 1)  # 32 bits each
        needed = short_warps * (2 if float64 else 1) if rows > 1 else triton.cdiv(values, 32 * VALUES_PER_THREAD)
        if needed <= MAX_WARPS:
            return RowLaunch(needed, rows)

    vector = VECTOR_BYTES // (size if float64 else smallest)
    row_bytes = cols * read.itemsize * tensors
    warps = fewest_warps(ONLINE_BACKWARD_WARPS if backward else ONLINE_WARPS, row_bytes, device)
    # 4 parts of float64 spill 72 bytes in backward (12.0).
    parts = ONLINE_PARTS // 2 if float64 and backward and spills_more(device) else ONLINE_PARTS
    block = parts * 32 * vector  # columns of a warp
    while not backward and warps > FEWEST_ONLINE_WARPS and filled_share(cols, warps * block) < MIN_FILLED_SHARE:
        warps //= 2
    return RowLaunch(warps, parts=parts, vector=vector)


def _launches(x: Tensor, grad: Tensor | None, out: Tensor, log: bool, launch: RowLaunch) -> Iterator[Launch]:
    cols = x.shape[-1]
    num_rows = x.numel() // cols
    align = math.gcd(VECTOR_BYTES, cols)  # an element has at least one byte
    dtypes = x.dtype, out.dtype if grad is None else grad.dtype, out.dtype
    options = {
        "ACCUM": tl.float64 if torch.float64 in dtypes else tl.float32,
        "LOG": log,
        "ALIGN": align,
        "LONG": cols >= 1 << 30,
        "ROWS": launch.rows,
        "COLS": 0 if launch.parts else triton.next_power_of_2(cols),
        "PARTS": launch.parts,
        "LANES": WARP * launch.warps,
        "VECTOR": launch.vector,
        **thread_options(x.device, launch.warps, MAX_REGISTERS if launch.parts else None),
    }
    grid = (triton.cdiv(num_rows, launch.rows),)
    yield build_launch(
        softmax_kernel, grid, None, options, x=x, grad=grad, out=out, num_rows=num_rows, cols=cols // align
    )
