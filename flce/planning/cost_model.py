"""The estimated time of products and passes, flops / F + bytes / B + launches * L, for dry runs and the default plan.

The constants were measured on an H200. For another GPU we assume the same share of the data sheet's rates, and the same
constants of the host, of launches and of blocks. A CPU has separate constants.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from flce.core.devices import KNOWN_KINDS, DeviceRecord
from flce.engine.case import ceil_div


class Rates(NamedTuple):
    """Rates that calls reach on a device."""

    half_flops: float
    """Flops per second of products in half precision."""
    wide_flops: float
    """Flops per second of products in float32 and float64."""
    bandwidth: float
    """Bytes per second of passes, and of sums that products accumulate into."""
    operand_bandwidth: float
    """Bytes per second that a product reads and writes while it multiplies."""
    launch_seconds: float
    """Seconds from the end of one kernel to the start of the next."""
    block_shape: tuple[int, int]
    """Rows and columns of the result that a multiprocessor computes at a time."""
    min_block_depth: int
    """The least inner dimension of a block for which a separate multiprocessor is used."""
    host_seconds_per_launch: float
    """Seconds in which Python launches a product or a kernel, while the device processes the tile before."""


# Fitted to benchmarks/results/h200-earlier.json and the run before it.
_ON_H200 = Rates(710e12, 50e12, 4e12, 2.5e12, 3e-6, (128, 256), 1024, 30e-6)


@functools.cache
def rates(device: DeviceRecord) -> Rates:
    """Return the rates that calls reach on a device: the same share of its data sheet's rates as on an H200.

    Every Hopper GPU has the rates of an H200, because plans of all of them were measured with these.
    """
    if not device.arch:
        flops = device.half_flops, device.wide_flops
        return Rates(*flops, device.bandwidth, device.bandwidth, 20e-6, (16, 16), 1 << 30, 0.0)
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
    """Return the seconds for (m, k) times (k, n), with the launch.

    Blocks of the result are computed in waves, one block for each multiprocessor. If k is large, several
    multiprocessors share a block, so that the last wave is shorter.
    """
    device_rates = rates(device)
    tall, wide = device_rates.block_shape
    blocks = min(ceil_div(m, tall) * ceil_div(n, wide), ceil_div(m, wide) * ceil_div(n, tall))
    parts = max(1, k // device_rates.min_block_depth)
    waves = ceil_div(blocks * parts, device.multiprocessors) / parts
    rate = device_rates.half_flops if itemsize < 4 else device_rates.wide_flops
    compute = 2 * waves * device.multiprocessors * tall * wide * k / rate
    return (
        max(compute, (m * k + k * n + m * n) * itemsize / device_rates.operand_bandwidth) + device_rates.launch_seconds
    )
