"""What launches of different kernels have in common: facts of memory and of devices, and flags."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flce.backends.contract import RowInputs
from flce.problem import LossSpec

# A thread loads this many bytes at a time.
VECTOR_BYTES = 16
# A cache line, and a sector of memory: two threads that write to one make it be read first.
LINE_BYTES = 128
SECTOR_BYTES = 32
# Of a thread, so that a multiprocessor with 65,536 of them has 1,024 threads to hide the latency of memory.
MAX_REGISTERS = 64
# Blocks that a row fills to less than this are too large for it: what is not there takes its time all the same.
FILLED = 3 / 4


class Launch(NamedTuple):
    """A kernel, and what it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def build(self) -> None:
        """Everything but the launch. To take a built kernel with a grid loads it; before Triton 3.7 a C compiler then
        builds its launcher, which takes as long as the kernel."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)[self.grid]


def build_key(x: Tensor, weight: Tensor, rows: RowInputs, spec: LossSpec) -> tuple[Hashable, ...]:
    """What decides on the kernels of a call: types, sizes and flags, no values."""
    tensors = (x, rows.bias, rows.class_weight, rows.token_weight)
    dtypes = (None if t is None else t.dtype for t in tensors)
    return (*dtypes, *weight.shape, *features(rows, spec, None).values(), spec.reduction, "logprob" in spec.stats)


# Of `build_once`.
_built: set[Hashable] = set()


def build_once(key: Hashable, launches: Callable[[], Sequence[Launch]], device: torch.device) -> None:
    """All at the same time, since most of it is done outside of Python, if it is the first time for this key.

    It is a matter of time only: what is not built when it is launched, is then.
    """
    if device.type != "cuda" or (device, key) in _built:  # "cpu": the interpreter
        return

    def build(launch: Launch) -> None:
        with torch.cuda.device(device):
            launch.build()

    # Of kernels that are launched several times, one.
    to_build = {(launch.kernel, *launch.options.items()): launch for launch in launches()}.values()
    with ThreadPoolExecutor(len(to_build)) as pool:
        list(pool.map(build, to_build))
    _built.add((device, key))


class DeviceFacts(NamedTuple):
    multiprocessors: int
    cache: int  # bytes that all of them share (L2)
    registers: int  # of a multiprocessor, 32 bits each


def device_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":  # the interpreter
        return DeviceFacts(1, 0, 65536)
    properties = torch.cuda.get_device_properties(device)
    # Every device that Triton supports has 65,536; PyTorch says so since 2.5.
    registers = getattr(properties, "regs_per_multiprocessor", 65536)
    return DeviceFacts(properties.multi_processor_count, properties.L2_cache_size, registers)


def overlap(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that is launched while its predecessor still runs and waits for the end of that itself
    ("programmatic dependent launch"), where the device can, from Hopper on. It saves a microsecond."""
    possible = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": possible, **({"launch_pdl": True} if possible else {})}


def fewest_warps(choice: Sequence[int], row_bytes: int, device: torch.device) -> int:
    """Of a row that is read twice: the fewest with which the rows in flight fit in the L2 cache, in which the second
    pass then finds its row; the most, if none do."""
    facts = device_facts(device)
    threads = facts.registers // MAX_REGISTERS
    fitting = [w for w in choice if facts.multiprocessors * (threads // (32 * w)) * row_bytes <= facts.cache]
    return min(fitting, default=max(choice))


def filled(row: int, block: int) -> float:
    """How much of the blocks that it takes a row fills, both in columns or both in vectors."""
    return row / (triton.cdiv(row, block) * block)


def features(rows: RowInputs, spec: LossSpec, upstream: Tensor | None) -> dict[str, bool]:
    """Of what kernels know to do with logits, what a call asks for."""
    return {
        "HAS_SCALE": spec.scale != 1.0,
        "HAS_BIAS": rows.bias is not None,
        "HAS_SOFTCAP": spec.softcap is not None,
        "HAS_CLASS_WEIGHT": rows.class_weight is not None,
        "HAS_TOKEN_WEIGHT": rows.token_weight is not None,
        "HAS_UPSTREAM": upstream is not None,
        "HAS_Z_LOSS": spec.z_loss != 0.0,
    }
