"""What launches of different kernels have in common: facts of memory and of devices, and flags."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from flce.backends.contract import RowOutputs, TileCall
from flce.core.device_record import DeviceRecord
from flce.core.devices import device_record
from flce.core.problem import NUMERIC_FIELDS, LossSpec

# For `call_arguments`, made once: for each number of the spec its flag, and the value that switches it off.
_NUMBERS = tuple((name, f"HAS_{name.upper()}", getattr(LossSpec, name)) for name in NUMERIC_FIELDS)

# Threads of a warp, in the launch tables and on NVIDIA's devices.
WARP = 32
# A thread loads this many bytes at a time.
VECTOR_BYTES = 16
# A cache line, and a sector of memory: two threads that write to one make it be read first.
LINE_BYTES = 128
SECTOR_BYTES = 32
# For each thread: a multiprocessor with 65,536 registers then has 1,024 threads to hide the latency of memory.
MAX_REGISTERS = 64
# Blocks that a row fills to less than this are too large for it: the rest of a block takes time as well.
MIN_FILLED_SHARE = 3 / 4


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


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that is launched while its predecessor still runs and waits for the end of that itself
    ("programmatic dependent launch"), where the device can, from Hopper on. It saves a microsecond."""
    possible = device_record(device).capability >= 90
    return {"OVERLAP": possible, **({"launch_pdl": True} if possible else {})}


def thread_options(device: torch.device, warps: int, registers: int | None = None) -> dict[str, int]:
    """Options of a kernel whose programs have this many warps of WARP threads: as many threads, in the device's warps.

    Args:
        registers: the most of a thread. AMD's compiler goes by the number of threads instead, and takes no such option.
    """
    record = device_record(device)
    limit = {} if registers is None or is_amd(record) else {"maxnreg": registers}
    return {"num_warps": max(1, warps * WARP // record.warp_size), **limit}


def spills_more(device: torch.device) -> bool:
    """Whether the compiler keeps fewer values in registers than for Hopper: from compute capability 10.0 on."""
    return device_record(device).capability >= 100


def is_amd(device: DeviceRecord) -> bool:
    return device.arch.startswith("gfx")


def fewest_warps(choice: Sequence[int], row_bytes: int, device: torch.device) -> int:
    """The fewest warps, for rows that are read twice, with which the rows in flight fit in the L2 cache, so that the
    second pass finds its row there. If none do, the most."""
    record = device_record(device)
    threads = record.registers // MAX_REGISTERS
    fitting = [w for w in choice if record.multiprocessors * (threads // (32 * w)) * row_bytes <= record.cache]
    return min(fitting, default=max(choice))


def filled_share(row: int, block: int) -> float:
    """The share of its blocks that a row fills, both in columns or both in vectors."""
    return row / (triton.cdiv(row, block) * block)


class CallArguments(NamedTuple):
    """All that kernels know to do with the logits of a call, by the names of their parameters.

    Options of `LossSpec` and results of `RowOutputs` are found here without further code: a number ``name`` has a flag
    ``HAS_NAME``, memory ``name_ptr`` a flag ``WANT_NAME``.
    """

    values: dict[str, Any]
    """Tensors and numbers."""
    flags: dict[str, bool]
    """For each option, whether it is used."""


def call_arguments(call: TileCall) -> CallArguments:
    inputs, spec, tile, out, normalizer, upstream, row_gradient = call
    bias = inputs.tile_bias(tile)
    if out is not None:
        normalizer = out.normalizer
    tensors = {
        "bias": bias,
        "class_weight": inputs.class_weight,
        "token_weight": inputs.token_weight,
        "row_factor": inputs.row_factor,
        "row_gradient": row_gradient,
        "scales": inputs.scales,
        "upstream": upstream,
        "normalizer": normalizer,
    }
    unused = inputs.target  # stands for tensors that a flag switches off; never read
    values: dict[str, Any] = {
        "target_ptr": inputs.target,
        "row_gradient_stride": 0 if row_gradient is None else row_gradient.stride(0),
        "upstream_stride": 0 if upstream is None or upstream.dim() == 0 else 1,
        "normalizer_stride": 0 if normalizer is None else normalizer.stride(0),
        "rows": len(inputs.target),
        "cols": tile.cols,
        "accessible_cols": tile.accessible_cols,
        "column_start": tile.start,
        "vocab_size": tile.vocab_size,
        "ignore_index": spec.ignore_index,
        "scale": spec.scale,
        "cap": spec.cap,
    }
    flags = {
        "HAS_SCALE": spec.scale != 1.0 or inputs.row_factor is not None,
        "HAS_ENTROPY_GRADIENT": call.has_entropy_gradient,
    }
    for name in RowOutputs._fields:
        tensors.setdefault(name, None if out is None else getattr(out, name))
    for name, tensor in tensors.items():
        values[f"{name}_ptr"] = unused if tensor is None else tensor
        flags[f"HAS_{name.upper()}"] = flags[f"WANT_{name.upper()}"] = tensor is not None
    for name, flag, default in _NUMBERS:
        values[name] = number = getattr(spec, name)
        flags[flag] = number != default
    return CallArguments(values, flags)


@functools.cache
def _matching_parameters(kernel: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names for which the kernel has a parameter."""
    parameters = set(kernel.arg_names)
    return tuple(name for name in names if name in parameters)


def build_launch(kernel: Any, grid: tuple[int, ...], call: TileCall, options: Mapping[str, Any], **args: Any) -> Launch:
    """A launch with what of the call the kernel has a parameter for, and with other arguments."""
    values, flags = (
        {name: known[name] for name in _matching_parameters(kernel, tuple(known))} for known in call_arguments(call)
    )
    return Launch(kernel, grid, {**values, **args}, {**flags, **options})
