"""Launches of the softmax kernels: layout of a tensor's rows, choice of the kernel and of its blocks.

`TritonBackend.softmax` and `softmax_backward` call `forward` and `backward`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.triton.launch import (
    LINE_BYTES,
    MAX_REGISTERS,
    MIN_FILLED_SHARE,
    SECTOR_BYTES,
    VECTOR_BYTES,
    WARP,
    fewest_warps,
    filled_share,
    overlap_options,
    spills_more,
    thread_options,
)
from flce.backends.triton.softmax import (
    softmax_online_backward_kernel,
    softmax_online_kernel,
    softmax_resident_backward_kernel,
    softmax_resident_kernel,
)
from flce.core.devices import device_record

MAX_WARPS = 32

# The launch table. Figures were measured on an H200 with 4096 rows. Percentages are of the speed of a copy that moves
# the same number of bytes. (Percentages above 120 are for tensors of 512 MiB, for which the copy had two thirds of the
# speed of a kernel.)
#
# The share of a program's registers for a resident row as it is loaded (in backward with its gradient). The other
# registers are for the computation. Longer rows use the online kernel.
RESIDENT_SHARE = 0.5
# The same share for rows whose columns are not adjacent, which also need registers for addresses. With RESIDENT_SHARE a
# thread of 32 warps spills 128 to 324 bytes (1024 columns x 64 rows, 4096 x 16; compiled for 9.0 and 7.5).
RESIDENT_SHARE_APART = 0.25
# Values of a resident row in a thread, in backward of both tensors: with this number the few threads of such rows have
# enough loads in flight.
VALUES_PER_THREAD = 32
# Rows shorter than SHORT_TILE columns share a program with SHORT_WARPS, because with programs of one warp a
# multiprocessor runs half of its possible warps. The rows of a program together have SHORT_TILE columns. Unaligned rows
# differ (see EDGES_FROM). In backward a program has half of these rows if they are very short and of float32. In
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
# Rows of 16-bit values with more than half of this number of columns have half the warps and twice the values, which
# fit because they stay 16 bits wide. Then more rows are in flight.
#   columns            16384    16384 backward    5003 backward    8192 backward
#   half the warps     96%      102%              99%              103%
#   all of them        91%      96%               81%              104%
NARROW_COLUMNS = 8192
# In forward, rows of 16-bit values use the online kernel if they are longer than RESIDENT_COLUMNS, or if they are
# longer than NARROW_COLUMNS and fill less than MIN_FILLED_SHARE of a resident row. (In backward 32768 columns reach
# 101% with either kernel.)
#   columns      10007    12001    32768    65536
#   online       82%      88%      90%      142%
#   resident     71%      82%      76%      122%
RESIDENT_COLUMNS = 16384
# Up to this number of columns edges are not separate from the vectors (`softmax`), except for 16-bit values just above
# a power of two. In backward the difference is 3% in either direction. The edges of online rows end at the first cache
# line, so that the vectors of two rows never write to the same line. A resident row is slower with such long edges.
# Microseconds of log-softmax:
#   columns             67              129     201                          257     385
#   rows in warps       4 in 1                  2 in 1 (4 in 2)                      2 in 4
#   not separate        2.05            3.05    3.15 (3.30)                  3.87    4.30
#   separate, at best   2.36            2.70    3.29                         3.41    5.00
#   eager PyTorch       2.64                    3.10                                 4.69
#   float32: 201 columns 3.58 (4.21), 3.79 and 3.63; 385 columns 4.79, 5.42 and 5.07
#   edges up to the first cache line, and up to 16 bytes: 50257 online 82%, 80%; 10007 resident, backward, 80%, 90%
EDGES_FROM = 512
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


@dataclass(frozen=True)
class RowLaunch:
    """The kernel for rows and the size of its blocks."""

    resident: bool
    warps: int
    rows: int = 1  # of a program; a power of two
    narrow: bool = False  # resident: 16-bit values stay 16 bits wide between their uses
    parts: int = 1  # online: a block has parts x lanes x vector elements, each thread is a lane
    vector: int = 1  # online, rows of adjacent columns
    registers: int | None = None  # maximum of a thread


@dataclass(frozen=True)
class RowLayout:
    """Tensors of one shape as (outer, cols, inner) elements, and their strides."""

    outer: int
    cols: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]  # of each tensor

    @property
    def rows_adjacent(self) -> bool:
        """True if rows, not columns, are adjacent in memory. The first tensor decides."""
        _, column, inner = self.strides[0]
        return self.inner > 1 and inner < column


def forward(x: Tensor, dim: int, dtype: torch.dtype, log: bool, launch: RowLaunch | None = None) -> Tensor:
    """Return the result of `Backend.softmax`. A `launch` replaces the launch chosen by size."""
    y = torch.empty_like(x, dtype=dtype)
    if x.numel():
        (_, x), layout = _lay_out(dim, y, x)
        launch = launch or row_launch(layout, x.dtype, dtype, False, x.device)
        kernel = softmax_resident_kernel if launch.resident else softmax_online_kernel
        _launch(kernel, (x, y), layout.strides[::-1], layout, launch, log)
    return y


def backward(
    grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, launch: RowLaunch | None = None
) -> Tensor:
    """Return the result of `Backend.softmax_backward`. A `launch` replaces the launch chosen by size."""
    dx = torch.empty_like(y, dtype=dtype)
    if y.numel():
        (_, y, grad), layout = _lay_out(dim, dx, y, grad)
        launch = launch or row_launch(layout, y.dtype, dtype, True, y.device)
        kernel = softmax_resident_backward_kernel if launch.resident else softmax_online_backward_kernel
        dx_strides, y_strides, grad_strides = layout.strides
        _launch(kernel, (y, grad, dx), (y_strides, grad_strides, dx_strides), layout, launch, log)
    return dx


def row_launch(
    layout: RowLayout, read: torch.dtype, written: torch.dtype, backward: bool, device: torch.device
) -> RowLaunch:
    """Return the launch for rows of this layout. It does not depend on the number of rows, so a row's result does not
    either."""
    neighbours = layout.inner if layout.rows_adjacent else 1
    # More neighbours than bytes in a cache line change nothing: the limit keeps the number of cached launches small.
    return _choose(layout.cols, min(neighbours, LINE_BYTES), read, written, backward, device)


@functools.lru_cache(maxsize=1024)
def _choose(
    cols: int, neighbours: int, read: torch.dtype, written: torch.dtype, backward: bool, device: torch.device
) -> RowLaunch:
    tensors = 2 if backward else 1
    padded_cols = triton.next_power_of_2(cols)
    smallest = min(read.itemsize, written.itemsize)
    vector_cols = _vector_cols(cols, smallest)
    is_unaligned = neighbours == 1 and vector_cols < cols
    edges = is_unaligned and _has_edges(cols, smallest)
    # With separate edges, only the columns in vectors count. Backward, 129 columns as 128: 83% instead of 66%; forward,
    # 257 as 256: 72% instead of 67%, but 515 of float32 as 512: 87% instead of 103%.
    if edges and vector_cols <= (SHORT_TILE if backward else 2 * VERY_SHORT):
        padded_cols = triton.next_power_of_2(vector_cols)
    float64 = torch.float64 in (read, written)
    size = 8 if float64 else read.itemsize  # bytes of an element in registers
    tile, short_warps = SHORT_TILE, SHORT_BACKWARD_WARPS if backward else SHORT_WARPS
    if is_unaligned and not edges:
        tile, short_warps = max(SHORT_TILE // 2, 2 * padded_cols), 1 if padded_cols <= 2 * VERY_SHORT else 4
    elif neighbours == 1 and not backward and padded_cols <= 2 * VERY_SHORT:
        tile, short_warps = min(8 * max(padded_cols, VERY_SHORT), VERY_SHORT_TILE_BYTES // size), 2 * SHORT_WARPS
    elif neighbours == 1 and padded_cols <= VERY_SHORT and size > 2:
        tile = SHORT_TILE // 2
    packed = max(1, tile // padded_cols)
    # If columns are not adjacent, a program has neighbouring rows: a cache line of them, at least a sector of memory.
    preferred_rows, min_rows = (
        min(triton.next_power_of_2(neighbours), unit // read.itemsize) for unit in (LINE_BYTES, SECTOR_BYTES)
    )
    share = RESIDENT_SHARE if neighbours == 1 else RESIDENT_SHARE_APART
    max_bytes = share * min(device_record(device).registers, MAX_WARPS * WARP * MAX_REGISTERS) * 4
    rows = max(packed, preferred_rows)
    while rows > max(packed, min_rows) and rows * padded_cols * size * tensors > max_bytes:
        rows //= 2
    is_underfilled = (
        padded_cols > NARROW_COLUMNS and neighbours == 1 and filled_share(cols, padded_cols) < MIN_FILLED_SHARE
    )
    online = size == 2 and not backward and (padded_cols > RESIDENT_COLUMNS or is_underfilled)
    if rows * padded_cols * size * tensors <= max_bytes and not online:
        values = rows * padded_cols * tensors * (2 if float64 else 1)  # 32 bits each, except with `narrow`
        needed = triton.cdiv(values, 32 * VALUES_PER_THREAD)
        if rows == packed > 1:
            needed = short_warps * (2 if float64 else 1)
        # At most 2 * MAX_WARPS are needed, and more than MAX_WARPS only for 16-bit values.
        narrow = (size == 2 and padded_cols >= NARROW_COLUMNS) or needed > MAX_WARPS
        return RowLaunch(True, triton.cdiv(needed, 2) if narrow else needed, rows, narrow=narrow)

    vector = 1 if preferred_rows > 1 else VECTOR_BYTES // (size if float64 else min(read.itemsize, written.itemsize))
    row_bytes = cols * preferred_rows * read.itemsize * tensors
    warps = fewest_warps(ONLINE_BACKWARD_WARPS if backward else ONLINE_WARPS, row_bytes, device)
    # 4 parts of float64 spill 72 bytes in backward (12.0).
    parts = ONLINE_PARTS // 2 if float64 and backward and spills_more(device) else ONLINE_PARTS
    block = parts * 32 * vector  # columns of a warp
    while (
        not backward
        and preferred_rows == 1
        and warps > FEWEST_ONLINE_WARPS
        and filled_share(cols, warps * block) < MIN_FILLED_SHARE
    ):
        warps //= 2
    return RowLaunch(False, warps, preferred_rows, parts=parts, vector=vector, registers=MAX_REGISTERS)


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    strides: tuple[tuple[int, int, int], ...],  # of `tensors`
    layout: RowLayout,
    launch: RowLaunch,
    log: bool,
) -> None:
    rows, num_rows = launch.rows, layout.outer * layout.inner
    unit = all(column == 1 for _, column, _ in strides)
    row_strides = [stride for outer, _, inner in strides for stride in (outer, inner)]
    align = math.gcd(VECTOR_BYTES, layout.cols, *row_strides) if unit else 1  # an element has at least one byte
    edges = 0
    if unit and (launch.resident or rows == 1):
        edges = _edges(tensors, strides, layout.cols, align, 0 if launch.resident else 32 * launch.warps)
    if edges:
        align = 1
    flat = rows > 1 and layout.inner < rows
    programs = triton.cdiv(num_rows, rows) if flat else layout.outer * triton.cdiv(layout.inner, rows)
    wide = any(t.dtype == torch.float64 for t in tensors)
    if launch.resident:
        vectors = max(edges, layout.cols // edges * edges) if edges else layout.cols
        block: dict[str, Any] = {"NARROW": launch.narrow, "COLS": triton.next_power_of_2(vectors)}
        # With fewer slots than threads, the compiler would use the layout of the vectors: one load for each vector.
        block["SLOTS"] = max(2 * edges, 32 * launch.warps // rows if rows > 1 else 1)
    else:
        # If columns are not adjacent, a block goes through shared memory between layouts of tensors: 256 KiB of float64
        # with vectors of 8 (Triton 3.6).
        block = {"PARTS": launch.parts, "LANES": 32 * launch.warps, "VECTOR": launch.vector if unit else 1}
        block["LONG"] = layout.cols >= 1 << 30
    kernel[(programs,)](
        *tensors,
        *(argument for outer, column, inner in strides for argument in (outer // align, column, inner // align)),
        num_rows,
        layout.inner,
        layout.cols // align,
        ACCUM=tl.float64 if wide else tl.float32,
        LOG=log,
        UNIT_STRIDE=unit,
        ALIGN=align,
        EDGES=edges,
        FLAT=flat,
        ROWS=rows,
        **thread_options(tensors[0].device, launch.warps, launch.registers),
        **overlap_options(tensors[0].device),
        **block,
    )


def _vector_cols(cols: int, size: int) -> int:
    """Return the number of columns in whole vectors, for elements of `size` bytes."""
    return cols - cols % (VECTOR_BYTES // size)


def _has_edges(cols: int, size: int) -> bool:
    """Return True if the edges of unaligned rows are separate from their vectors, see `EDGES_FROM`."""
    above_power_of_2 = size == 2 and cols > VERY_SHORT and 2 * _vector_cols(cols, size) <= triton.next_power_of_2(cols)
    return cols > EDGES_FROM or above_power_of_2


def _edges(
    tensors: tuple[Tensor, ...], strides: tuple[tuple[int, int, int], ...], cols: int, align: int, slots: int
) -> int:
    """Return the alignment, in elements, of the whole vectors of rows of adjacent columns: a cache line if the edges
    then fit in `slots`, otherwise a vector. Return 0 if rows have no edges, or if the edges of the tensors differ."""
    smallest = min(t.element_size() for t in tensors)
    if align % (VECTOR_BYTES // smallest) == 0 or not _has_edges(cols, smallest):
        return 0
    outer, _, inner = strides[0]
    for size in (LINE_BYTES, VECTOR_BYTES):
        unit = size // smallest
        same = all((o - outer) % unit == 0 == (i - inner) % unit for o, _, i in strides)
        fits = size == VECTOR_BYTES or 2 * unit <= min(slots, cols)
        if same and fits and not any(t.data_ptr() % size for t in tensors):
            return unit
    return 0


def _lay_out(dim: int, first: Tensor, *others: Tensor) -> tuple[tuple[Tensor, ...], RowLayout]:
    """Return the tensors, of one shape, and their layout as (outer, cols, inner). `first` is dense. Another tensor is
    copied if its dimensions have a different order in memory, or if its strides do not merge into three."""
    cols = first.shape[dim]
    if dim == first.dim() - 1 and all(t.is_contiguous() for t in (first, *others)):  # the usual case, without a search
        return (first, *others), RowLayout(first.numel() // cols, cols, 1, ((cols, 1, 0),) * (1 + len(others)))
    tensors = [first, *(t if _same_order(dim, first, t) else _copy_like(first, t) for t in others)]
    layout = _collapse(dim, tensors)
    if layout is None:
        tensors = [first, *(t if t.stride() == first.stride() else _copy_like(first, t) for t in others)]
        layout = _collapse(dim, tensors)
        assert layout is not None  # dense tensors have at most three strides
    return tuple(tensors), layout


def _copy_like(first: Tensor, t: Tensor) -> Tensor:
    return torch.empty_like(first, dtype=t.dtype).copy_(t)


def _same_order(dim: int, first: Tensor, t: Tensor) -> bool:
    """Return True if neighbours in the memory of `first` are neighbours in the memory of `t`."""
    long = [d for d in range(t.dim()) if t.shape[d] > 1]
    nearest = min(long, key=first.stride, default=dim)
    return all(t.stride(d) == 0 or t.stride(nearest) <= t.stride(d) for d in long)


def _collapse(dim: int, tensors: list[Tensor]) -> RowLayout | None:
    """Return the layout, or None if the dimensions other than `dim` do not merge into two."""
    shape = tensors[0].shape
    merged: list[tuple[int, list[int]]] = []  # sizes and strides, the largest stride first
    other_dims = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    for d in sorted(other_dims, key=tensors[0].stride, reverse=True):
        size, strides = shape[d], [t.stride(d) for t in tensors]
        if merged and all(far == size * near for far, near in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > 2:
        return None
    missing = (1, [0] * len(tensors))
    col_strides = [t.stride(dim) if shape[dim] > 1 else 1 for t in tensors]
    if len(merged) == 1 and merged[0][1][0] > col_strides[0]:
        # Only neighbouring rows need `inner`: Triton compiles other kernels if it is 1 or divisible by 16.
        merged.append(missing)
    (outer, outer_strides), (inner, inner_strides) = [missing, missing, *merged][-2:]
    return RowLayout(outer, shape[dim], inner, tuple(zip(outer_strides, col_strides, inner_strides, strict=True)))
