"""What products and passes are estimated to take in time: flops / F + bytes / B + launches * L."""

from __future__ import annotations

import functools
from typing import NamedTuple

from flce.engine.case import ceil_div


class Device(NamedTuple):
    """What the estimate knows of a device."""

    half_flops: float
    """Flops a second of products in half precision."""
    wide_flops: float
    """Flops a second of products in float32 and float64."""
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
    """The least inner dimension of a block that is worth a multiprocessor of its own."""
    host: float
    """Seconds that Python takes to launch what a tile needs, while the device has the tile before."""
    host_block: float
    """The same of a block of logits: a product and a kernel."""


# Fitted to benchmarks/results/h200-earlier.json and the run before it.
H200 = Device(710e12, 50e12, 4e12, 2.5e12, 3e-6, 132, (128, 256), 1024, 130e-6, 20e-6)
# Two cores without instructions for half precision: the products of benchmarks/results/cpu.json.
CPU = Device(150e9, 150e9, 19e9, 19e9, 20e-6, 1, (16, 16), 1 << 30, 0.0, 0.0)


def device_of(device_type: str) -> Device:
    return CPU if device_type == "cpu" else H200


@functools.lru_cache(maxsize=4096)
def product(device: Device, m: int, n: int, k: int, itemsize: int) -> float:
    """Seconds for (m, k) times (k, n), with the launch.

    Blocks of the result are made in waves, one block for each multiprocessor. Where k is long, a block is made by
    several of them, so that the last wave is shorter.
    """
    tall, wide = device.block
    blocks = min(ceil_div(m, tall) * ceil_div(n, wide), ceil_div(m, wide) * ceil_div(n, tall))
    parts = max(1, k // device.depth)
    waves = ceil_div(blocks * parts, device.multiprocessors) / parts
    rate = device.half_flops if itemsize < 4 else device.wide_flops
    compute = 2 * waves * device.multiprocessors * tall * wide * k / rate
    return max(compute, (m * k + k * n + m * n) * itemsize / device.operands) + device.launch
