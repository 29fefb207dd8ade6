"""What launches of different kernels have in common: facts of memory and of devices, and flags."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flce.backends import capability
from flce.backends.contract import RowInputs, RowOutputs
from flce.problem import NUMBERS, LossSpec

# Of `call_arguments`, made once: the name of each field, of its parameter and of its flag.
_OUTPUTS = tuple((name, f"{name}_ptr", f"WANT_{name.upper()}") for name in RowOutputs._fields)
# Likewise of each number of the spec, its flag and the value that switches it off.
_NUMBERS = tuple((name, f"HAS_{name.upper()}", getattr(LossSpec, name)) for name in NUMBERS)

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
    """A kernel, and what it is launched with, by the names of its parameters."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, Any]
    """What it is built for, and how it is launched."""

    def run(self) -> Any:
        """Returns the compiled kernel; None from the interpreter."""
        return self.kernel[self.grid](**self.args, **self.options)


class DeviceFacts(NamedTuple):
    multiprocessors: int
    cache: int  # bytes that all of them share (L2)
    registers: int  # of a multiprocessor, 32 bits each


@functools.cache
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
    possible = device.type == "cuda" and capability(device) >= 9
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


class CallArguments(NamedTuple):
    """All that kernels know to do with the logits of a call, by the names of their parameters.

    Whoever adds an option to `LossSpec`, or a result to `RowOutputs`, finds it here: a number ``name`` with a flag
    ``HAS_NAME``, memory ``name_ptr`` with a flag ``WANT_NAME``.
    """

    values: dict[str, Any]
    """Tensors and numbers."""
    flags: dict[str, bool]
    """Of each option, whether it is used."""


def call_arguments(
    rows: RowInputs, spec: LossSpec, unused: Tensor, *, out: RowOutputs | None = None, upstream: Tensor | None = None
) -> CallArguments:
    """`unused` stands for tensors that a flag switches off. They are never read."""
    values: dict[str, Any] = {
        "target_ptr": rows.target,
        "constants_ptr": unused if rows.constants is None else rows.constants,
        "class_weight_ptr": unused if rows.class_weight is None else rows.class_weight,
        "token_weight_ptr": unused if rows.token_weight is None else rows.token_weight,
        "upstream_ptr": unused if upstream is None else upstream,
        "normalizer_stride": 0 if out is None else out.normalizer.stride(0),
        "ignore_index": spec.ignore_index,
        "scale": spec.scale,
        "cap": spec.cap,
    }
    flags = {
        "HAS_BIAS": rows.bias is not None,
        "HAS_CLASS_WEIGHT": rows.class_weight is not None,
        "HAS_TOKEN_WEIGHT": rows.token_weight is not None,
        "HAS_UPSTREAM": upstream is not None,
        "HAS_SCALE": spec.scale != 1.0,
    }
    for name, pointer, flag in _OUTPUTS:
        tensor = None if out is None else getattr(out, name)
        values[pointer] = unused if tensor is None else tensor
        flags[flag] = tensor is not None
    for name, flag, default in _NUMBERS:
        values[name] = number = getattr(spec, name)
        flags[flag] = number != default
    return CallArguments(values, flags)


@functools.cache
def _taken(kernel: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those for which the kernel has a parameter."""
    parameters = set(kernel.arg_names)
    return tuple(name for name in names if name in parameters)


def launch_of(
    kernel: Any, grid: tuple[int, ...], call: CallArguments, options: Mapping[str, Any], **args: Any
) -> Launch:
    """What of `call` the kernel has a parameter for, and what it takes besides."""
    values, flags = ({name: known[name] for name in _taken(kernel, tuple(known))} for known in call)
    return Launch(kernel, grid, {**values, **args}, {**flags, **options})
