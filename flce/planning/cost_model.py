"""What products and passes are estimated to take in time: flops / F + bytes / B + launches * L.

The constants were measured on an H200. On another GPU calls are assumed to reach the same share of the data sheet's
rates, and all that is of the host, of launches and of blocks is assumed to be the same. A CPU has constants of its own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from flce.core.device_record import KNOWN_KINDS, DeviceRecord
from flce.engine.case import ceil_div


class Rates(NamedTuple):
    """What calls reach on a device."""

    half_flops: float
    """Flops a second of products in half precision."""
    wide_flops: float
    """Flops a second of products in float32 and float64."""
    bandwidth: float
    """Bytes a second, of passes and of sums that products add to."""
    operand_bandwidth: float
    """Bytes a second that a product reads and writes while it multiplies."""
    launch_seconds: float
    """Seconds from the end of one kernel to the beginning of the next."""
    block_shape: tuple[int, int]
    """Rows and columns of the result that a multiprocessor makes at a time."""
    min_block_depth: int
    """The least inner dimension of a block that is worth a multiprocessor of its own."""
    host_seconds_per_tile: float
    """Seconds that Python takes to launch what a tile needs, while the device has the tile before."""
    host_seconds_per_block: float
    """The same of a block of logits: a product and a kernel."""


# Fitted to benchmarks/results/h200-earlier.json and the run before it.
_ON_H200 = Rates(710e12, 50e12, 4e12, 2.5e12, 3e-6, (128, 256), 1024, 130e-6, 20e-6)


@functools.cache
def rates(device: DeviceRecord) -> Rates:
    """What calls reach on a device: of its data sheet's rates the share that they reached on an H200.

    Every Hopper is counted as an H200, because plans of all of them were measured so.
    """
    if not device.arch:
        flops = device.half_flops, device.wide_flops
        return Rates(*flops, device.bandwidth, device.bandwidth, 20e-6, (16, 16), 1 << 30, 0.0, 0.0)
    measured, h200 = _ON_H200, KNOWN_KINDS["H200"]
    if device.arch == h200.arch and device.profile is None:
        return measured
    return measured._replace(
        half_flops=measured.half_flops * (device.half_flops / h200.half_flops),
        wide_flops=measured.wide_flops * (device.wide_flops / h200.wide_flops),
        bandwidth=measured.bandwidth * (device.bandwidth / h200.bandwidth),
        operand_bandwidth=measured.operand_bandwidth * (device.bandwidth / h200.bandwidth),
    )


@functools.lru_cache(maxsize=4096)
def product_seconds(device: DeviceRecord, m: int, n: int, k: int, itemsize: int) -> float:
    """Seconds for (m, k) times (k, n), with the launch.

    Blocks of the result are made in waves, one block for each multiprocessor. Where k is long, a block is made by
    several of them, so that the last wave is shorter.
    """
    reached = rates(device)
    tall, wide = reached.block_shape
    blocks = min(ceil_div(m, tall) * ceil_div(n, wide), ceil_div(m, wide) * ceil_div(n, tall))
    parts = max(1, k // reached.min_block_depth)
    waves = ceil_div(blocks * parts, device.multiprocessors) / parts
    rate = reached.half_flops if itemsize < 4 else reached.wide_flops
    compute = 2 * waves * device.multiprocessors * tall * wide * k / rate
    return max(compute, (m * k + k * n + m * n) * itemsize / reached.operand_bandwidth) + reached.launch_seconds
