"""Launches of the softmax kernels: how a tensor's rows lie in memory, which kernel they go to, and in which blocks."""

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
# the same number of bytes. (Those beyond 120 are of 512 MiB, where the copy that they were measured against had two
# thirds of the speed of a kernel.)
#
# The share of a program's registers that a resident row may take as it is loaded (with its gradient, in
# backward): the rest computes. A longer row goes to the online kernel.
RESIDENT_SHARE = 0.5
# The same of rows whose columns lie apart, which take addresses too. With the share above a thread of 32 warps has 128
# to 324 bytes in memory instead (1024 columns x 64 rows, 4096 x 16; compiled for 9.0 and 7.5).
RESIDENT_SHARE_APART = 0.25
# Values that a thread of a resident row holds, of both tensors in backward: enough loads in flight for the few threads
# that such rows make.
VALUES_PER_THREAD = 32
# Rows shorter than SHORT_TILE columns share a program, whose rows together have that many columns, and SHORT_WARPS, but
# for those that begin anywhere (see EDGES_FROM): with programs of one warp, a multiprocessor runs half of the warps
# that it could. In backward a program has half of these rows if they are very short and of float32. In forward very
# short rows, and those up to twice that length, have twice the warps, and 8 rows of 128 or 256 columns, or those that
# are two vectors for a thread.
#   backward, columns          512              256              256 float32       128 float32
#   as here                    2 warps 118%     4 warps 115%     16 values 86%     4 rows 113%
#   else                       1 warp 91%       1 warp 99%       32 values 78%     8 rows 98%
#   log-softmax, columns       128    129    200    128 float32    200 float32    256 float32
#   as here                    72%    59%    67%    77%            70%            76 to 80% (8 rows 75 to 77)
#   with half of the warps     57%    55%    51%    74%            67%            74%
SHORT_TILE = 1024
SHORT_WARPS, SHORT_BACKWARD_WARPS = 2, 4
VERY_SHORT, VERY_SHORT_TILE_BYTES = 128, 4096
# Rows of 16 bits with more columns than half of this have half the warps, with twice the values, which fit while they
# stay 16 bits wide: more rows are in flight.
#   columns            16384    16384 backward    5003 backward    8192 backward
#   half the warps     96%      102%              99%              103%
#   all of them        91%      96%               81%              104%
NARROW_COLUMNS = 8192
# Rows of 16 bits are online in forward if they are longer than RESIDENT_COLUMNS or, beyond NARROW_COLUMNS, if they fill
# less than MIN_FILLED_SHARE of a resident row. (In backward 32768 columns have 101% in either kernel.)
#   columns      10007    12001    32768    65536
#   online       82%      88%      90%      142%
#   resident     71%      82%      76%      122%
RESIDENT_COLUMNS = 16384
# Columns of a row up to which its edges are not treated apart (`softmax`), but for 16 bits just beyond a power of two.
# In backward one or the other is 3% faster. Edges of online rows go to the first cache line, so that no two rows write
# to parts of one with their vectors. A resident row is slower with edges that long. Microseconds of log-softmax:
#   columns             67              129     201                          257     385
#   rows in warps       4 in 1                  2 in 1 (4 in 2)                      2 in 4
#   not apart           2.05            3.05    3.15 (3.30)                  3.87    4.30
#   apart, at best      2.36            2.70    3.29                         3.41    5.00
#   eager PyTorch       2.64                    3.10                                 4.69
#   the same of float32: 201 columns 3.58 (4.21), 3.79 and 3.63; 385 columns 4.79, 5.42 and 5.07
#   edges that reach the first cache line, for 16 bytes: 50257 online 82% for 80%; 10007 resident, backward, 80% for 90%
EDGES_FROM = 512
# For `fewest_warps` of the online kernels. Columns of 16 bits, unless said otherwise:
#   forward, 65536        16 warps 142%    32 warps 126%, which is best for twice the bytes
#   forward, 32768        8 warps 87%      16 warps 90%
#   backward, 50257       32 warps 95%     16 warps 76%
#   backward, 32768 float32    32 warps 154%    16 warps 108%
ONLINE_WARPS = (16, 32)
ONLINE_BACKWARD_WARPS = (32,)
# In forward half of the warps, down to these, while blocks are filled to less than MIN_FILLED_SHARE: 20001 columns of
# 16 bits
# have 82% where they are 81% of three blocks, 64% where they are 61% of two.
FEWEST_ONLINE_WARPS = 4
# Vectors of a thread and tensor in one block. In backward 2 have 142% where 4 have 158% (65536 columns of 16 bits),
# elsewhere 2% less to 1% more.
ONLINE_PARTS = 4


@dataclass(frozen=True)
class RowLaunch:
    """The kernel that rows go to and the size of its blocks."""

    resident: bool
    warps: int
    rows: int = 1  # of a program; a power of two
    narrow: bool = False  # resident: keep 16-bit values as they are between their uses
    parts: int = 1  # online: a block is parts x lanes x vector elements, lanes being all threads
    vector: int = 1  # online, rows of adjacent columns
    registers: int | None = None  # most of a thread


@dataclass(frozen=True)
class RowLayout:
    """Tensors of one shape as (outer, cols, inner) elements, and their strides."""

    outer: int
    cols: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]  # of each tensor

    @property
    def rows_adjacent(self) -> bool:
        """Whether it is rows, not columns, that lie next to each other in memory. That of the first tensor decides."""
        _, column, inner = self.strides[0]
        return self.inner > 1 and inner < column


def forward(x: Tensor, dim: int, dtype: torch.dtype, log: bool, launch: RowLaunch | None = None) -> Tensor:
    """As `Backend.softmax`. `launch`: instead of the one chosen by size."""
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
    """As `Backend.softmax_backward`. `launch`: instead of the one chosen by size."""
    dx = torch.empty_like(y, dtype=dtype)
    if y.numel():
        (_, y, grad), layout = _lay_out(dim, dx, y, grad)
        launch = launch or row_launch(layout, y.dtype, dtype, True, y.device)
        kernel = softmax_resident_backward_kernel if launch.resident else softmax_online_backward_kernel
        of_dx, of_y, of_grad = layout.strides
        _launch(kernel, (y, grad, dx), (of_y, of_grad, of_dx), layout, launch, log)
    return dx


def row_launch(
    layout: RowLayout, read: torch.dtype, written: torch.dtype, backward: bool, device: torch.device
) -> RowLaunch:
    """The launch for rows of this layout: the same for any number of them, so that a row's result is too."""
    neighbours = layout.inner if layout.rows_adjacent else 1
    # From some number on it makes no difference, and there are fewer launches to remember.
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
    # Vectors, where there are edges beside them. Backward, 129 columns as 128: 83% for 66%; forward, 257 as 256 72% for
    # 67%, but 515 of float32 as 512 87% for 103%.
    if edges and vector_cols <= (SHORT_TILE if backward else 2 * VERY_SHORT):
        padded_cols = triton.next_power_of_2(vector_cols)
    float64 = torch.float64 in (read, written)
    size = 8 if float64 else read.itemsize  # of an element, in registers
    tile, short_warps = SHORT_TILE, SHORT_BACKWARD_WARPS if backward else SHORT_WARPS
    if is_unaligned and not edges:
        tile, short_warps = max(SHORT_TILE // 2, 2 * padded_cols), 1 if padded_cols <= 2 * VERY_SHORT else 4
    elif neighbours == 1 and not backward and padded_cols <= 2 * VERY_SHORT:
        tile, short_warps = min(8 * max(padded_cols, VERY_SHORT), VERY_SHORT_TILE_BYTES // size), 2 * SHORT_WARPS
    elif neighbours == 1 and padded_cols <= VERY_SHORT and size > 2:
        tile = SHORT_TILE // 2
    packed = max(1, tile // padded_cols)
    # Neighbouring rows of a program whose columns lie apart: a cache line of them; the least, a sector of memory.
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
        values = rows * padded_cols * tensors * (2 if float64 else 1)  # of 32 bits, but for those that are narrow
        needed = triton.cdiv(values, 32 * VALUES_PER_THREAD)
        if rows == packed > 1:
            needed = short_warps * (2 if float64 else 1)
        # At most twice the warps that there can be are needed, and only for values of 16 bits.
        narrow = (size == 2 and padded_cols >= NARROW_COLUMNS) or needed > MAX_WARPS
        return RowLaunch(True, triton.cdiv(needed, 2) if narrow else needed, rows, narrow=narrow)

    vector = 1 if preferred_rows > 1 else VECTOR_BYTES // min(read.itemsize, written.itemsize)
    row_bytes = cols * preferred_rows * read.itemsize * tensors
    warps = fewest_warps(ONLINE_BACKWARD_WARPS if backward else ONLINE_WARPS, row_bytes, device)
    # 4 parts of float64 in backward have 72 bytes in memory for want of registers (12.0).
    parts = ONLINE_PARTS // 2 if float64 and backward and spills_more(device) else ONLINE_PARTS
    block = parts * 32 * vector  # of a warp
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
    align = math.gcd(VECTOR_BYTES, layout.cols, *row_strides) if unit else 1  # no element is smaller than a byte
    edges = 0
    if unit and (launch.resident or rows == 1):
        edges = _edges(tensors, strides, layout.cols, align, 0 if launch.resident else 32 * launch.warps)
    if edges:
        align = 1
    flat = rows > 1 and layout.outer > 1 and layout.inner < rows
    programs = triton.cdiv(num_rows, rows) if flat else layout.outer * triton.cdiv(layout.inner, rows)
    wide = any(t.dtype == torch.float64 for t in tensors)
    if launch.resident:
        vectors = max(edges, layout.cols // edges * edges) if edges else layout.cols
        block: dict[str, Any] = {"NARROW": launch.narrow, "COLS": triton.next_power_of_2(vectors)}
        # With fewer slots than threads, the compiler would lay them out like the vectors: one load for each of these.
        block["SLOTS"] = max(2 * edges, 32 * launch.warps // rows if rows > 1 else 1)
    else:
        block = {"PARTS": launch.parts, "LANES": 32 * launch.warps, "VECTOR": launch.vector}
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
    """The number of columns in whole vectors, for elements of `size` bytes."""
    return cols - cols % (VECTOR_BYTES // size)


def _has_edges(cols: int, size: int) -> bool:
    """Whether edges of rows that begin anywhere are treated apart, see `EDGES_FROM`."""
    little_more = size == 2 and cols > VERY_SHORT and 2 * _vector_cols(cols, size) <= triton.next_power_of_2(cols)
    return cols > EDGES_FROM or little_more


def _edges(
    tensors: tuple[Tensor, ...], strides: tuple[tuple[int, int, int], ...], cols: int, align: int, slots: int
) -> int:
    """Elements of the vectors that rows of adjacent columns consist of between their edges; or of cache lines, where
    the edges then have room in `slots`; 0 where there are no edges, or where those of the tensors would differ."""
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
    """The tensors, of one shape, as (outer, cols, inner). `first` is dense; of the others those are copied whose
    dimensions are in another order in memory, or do not make three strides with those of `first`."""
    cols = first.shape[dim]
    if dim == first.dim() - 1 and all(t.is_contiguous() for t in (first, *others)):  # the usual case, at once
        return (first, *others), RowLayout(1, cols, first.numel() // cols, ((0, 1, cols),) * (1 + len(others)))
    tensors = [first, *(t if _same_order(dim, first, t) else _copy_like(first, t) for t in others)]
    layout = _collapse(dim, tensors)
    if layout is None:
        tensors = [first, *(t if t.stride() == first.stride() else _copy_like(first, t) for t in others)]
        layout = _collapse(dim, tensors)
        assert layout is not None  # a dense tensor has no more
    return tuple(tensors), layout


def _copy_like(first: Tensor, t: Tensor) -> Tensor:
    return torch.empty_like(first, dtype=t.dtype).copy_(t)


def _same_order(dim: int, first: Tensor, t: Tensor) -> bool:
    """Whether neighbours in the memory of `first` are neighbours in that of `t`."""
    long = [d for d in range(t.dim()) if t.shape[d] > 1]
    nearest = min(long, key=first.stride, default=dim)
    return all(t.stride(d) == 0 or t.stride(nearest) <= t.stride(d) for d in long)


def _collapse(dim: int, tensors: list[Tensor]) -> RowLayout | None:
    """None where the dimensions beside `dim` do not merge into two."""
    shape = tensors[0].shape
    merged: list[tuple[int, list[int]]] = []  # sizes and strides, the farthest first
    other_dims = [d for d in range(len(shape)) if d != dim and shape[d] > 1]
    for d in sorted(other_dims, key=tensors[0].stride, reverse=True):
        size, strides = shape[d], [t.stride(d) for t in tensors]
        if merged and all(far == size * near for far, near in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > 2:
        return None
    none = (1, [0] * len(tensors))
    (outer, of_outer), (inner, of_inner) = [none, none, *merged][-2:]
    of_columns = [t.stride(dim) if shape[dim] > 1 else 1 for t in tensors]
    return RowLayout(outer, shape[dim], inner, tuple(zip(of_outer, of_columns, of_inner, strict=True)))
