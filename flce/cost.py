"""What a plan is estimated to take in time: flops / F + bytes / B + launches * L, summed over its products and passes.

The figures are a device's own (`Device`). What is launched is read off the plan, tile by tile, as `engine` does it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from flce.chunk_plan import ChunkPlan, Sweep, ceil_div


class Device(NamedTuple):
    """What the estimate knows of a device."""

    half_flops: float
    """A second, of products of half precision."""
    wide_flops: float
    """A second, of products in float32 and float64."""
    bandwidth: float
    """Bytes a second, of passes and of sums that products add to."""
    operands: float
    """Bytes a second that a product reads and writes while it multiplies."""
    launch: float
    """Seconds from the end of one kernel to the beginning of the next."""
    multiprocessors: int
    block: tuple[int, int]
    """Rows and columns of the result that a multiprocessor makes at a time."""
    depth: int
    """Of a block, the least that is worth a multiprocessor of its own."""
    host: float
    """Seconds that Python takes to launch what a tile needs, while the device has the tile before."""


# Fitted to benchmarks/results/h200.json and h200-earlier.json.
H200 = Device(710e12, 50e12, 4e12, 2.5e12, 3e-6, 132, (128, 256), 1024, 130e-6)
# Two cores without instructions for half precision: the products of benchmarks/results/cpu.json.
CPU = Device(150e9, 150e9, 19e9, 19e9, 20e-6, 1, (16, 16), 1 << 30, 0.0)

# Small kernels around the products of a chunk that is normalized late.
LATE_LAUNCHES = 14


def device_of(device_type: str) -> Device:
    return CPU if device_type == "cpu" else H200


def seconds(plan: ChunkPlan) -> float:
    """What forward and backward of a plan take."""
    if not plan.num_tokens:
        return 0.0
    total = _statistics(plan) if plan.deferred or not plan.needs.any else 0.0
    return total + sum(_sweep(plan, sweep, number) for number, sweep in enumerate(plan.sweeps))


def _statistics(plan: ChunkPlan) -> float:
    device = device_of(plan.device_type)
    rows, cols = (plan.product_rows, plan.vocab_size) if plan.fused_product else plan.statistics_tile
    total = 0.0
    for r, row_tiles in _cut(plan.num_tokens, rows):
        for c, col_tiles in _cut(plan.vocab_size, cols):
            read = 0 if plan.fused_product else r * c * plan.logits_dtype.itemsize
            total += row_tiles * col_tiles * (_logits(plan, r, c) + read / device.bandwidth + device.launch)
    return total


def _sweep(plan: ChunkPlan, sweep: Sweep, number: int) -> float:
    device, itemsize = device_of(plan.device_type), plan.dtype.itemsize
    late = plan.late_normalization and number == 0
    in_memory = not late and not plan.fused_product
    widths = _widths(plan, sweep)
    row_pieces = _cut(plan.num_tokens, sweep.rows)
    num_rows, num_cols = (sum(count for _, count in pieces) for pieces in (row_pieces, widths))
    inputs = _wanted(plan.hidden_sizes, plan.needs.inputs) if sweep.inputs else []
    weights = _wanted(plan.hidden_sizes, plan.needs.weights) if sweep.weights else []
    total, moved = 0.0, 0
    for r, row_tiles in row_pieces:
        for c, col_tiles in widths:
            kept = c - max(0, sweep.stop - sweep.weight_stop) if num_cols == 1 else c
            one = _logits(plan, r, c) + 2 * device.launch
            one += sum(product(device, r, h, c, itemsize) for h in inputs)
            one += sum(product(device, kept, h, r, itemsize) for h in weights)
            if in_memory:
                one += r * c * (plan.logits_dtype.itemsize + plan.grad_dtype.itemsize) / device.bandwidth
            total += row_tiles * col_tiles * max(one, device.host)
    total += LATE_LAUNCHES * num_rows * device.launch if late else 0.0
    sum_itemsize = plan._accum.itemsize
    classes = min(sweep.weight_stop, sweep.stop) - sweep.start
    # Sums are read and written by every tile but the first, and rounded at last.
    if num_cols > 1:
        moved += plan.num_tokens * sum(inputs) * (2 * num_cols * sum_itemsize + itemsize)
    elif late:
        moved += plan.num_tokens * sum(inputs) * (2 * sum_itemsize + itemsize)
    if num_rows > 1:
        moved += classes * sum(weights) * (2 * num_rows * sum_itemsize + itemsize)
    return total + moved / device.bandwidth


def _wanted(sizes: Sequence[int], needed: Sequence[bool]) -> list[int]:
    return [size for size, need in zip(sizes, needed, strict=True) if need]


def _logits(plan: ChunkPlan, rows: int, cols: int) -> float:
    device = device_of(plan.device_type)
    return sum(product(device, rows, cols, h, plan.dtype.itemsize) for h in plan.hidden_sizes)


def _widths(plan: ChunkPlan, sweep: Sweep) -> list[tuple[int, int]]:
    """Classes of the blocks of a sweep, and how many blocks have so many."""
    if plan.lent_tiles:
        return [(tile.stop - tile.start, 1) for tile in plan.exponential_tiles]
    lent: list[tuple[int, int]] = []
    start = sweep.start
    for block, is_lent in sweep.blocks():
        if not is_lent:
            break
        lent.append((block.stop - block.start, 1))
        start = block.stop
    return lent + _cut(sweep.stop - start, sweep.cols)


def _cut(size: int, step: int) -> list[tuple[int, int]]:
    """The lengths of the pieces of `size`, and how many there are of each."""
    whole, rest = divmod(size, max(1, step))
    return [(length, count) for length, count in ((step, whole), (rest, 1)) if length and count]


@functools.lru_cache(maxsize=4096)
def product(device: Device, m: int, n: int, k: int, itemsize: int) -> float:
    """(m, k) times (k, n), with its launch.

    Blocks of the result are made in waves, one block for each multiprocessor. Where k is long, a block is made by
    several of them, so that the last wave is shorter.
    """
    tall, wide = device.block
    blocks = min(ceil_div(m, tall) * ceil_div(n, wide), ceil_div(m, wide) * ceil_div(n, tall))
    pieces = max(1, k // device.depth)
    waves = ceil_div(blocks * pieces, device.multiprocessors) / pieces
    rate = device.half_flops if itemsize < 4 else device.wide_flops
    compute = 2 * waves * device.multiprocessors * tall * wide * k / rate
    return max(compute, (m * k + k * n + m * n) * itemsize / device.operands) + device.launch
