"""`Launch`, and the options and arguments that launches of different kernels share.

The launch functions of this package build their launches from it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flce.backends.contract import GradientCall, RowOutputs, StatisticsCall, TileCall
from flce.core.devices import DeviceRecord, device_record
from flce.core.problem import NUMERIC_FIELDS, LossSpec

# Threads of a warp, in the launch tables and on NVIDIA's devices.
WARP = 32
# Bytes of one load instruction of a thread.
VECTOR_BYTES = 16
# A cache line, and a sector of memory. If two threads write to one sector, the device reads it before it writes.
LINE_BYTES = 128
SECTOR_BYTES = 32
# Registers of a thread: a multiprocessor with 65,536 registers then has 1,024 threads to hide the latency of memory.
MAX_REGISTERS = 64
# If a row fills less than this share of its blocks, smaller blocks are faster: the rest of a block costs time as well.
MIN_FILLED_SHARE = 3 / 4
# Distance of flags, 32 bits each: kernels are built for addresses that are multiples of 16 bytes.
FLAG_STRIDE = 4

# Fields of `LossSpec` that are parameters of no kernel: they decide the scales of the loss and the requested results.
_HOST_OPTIONS = ("reduction", "stats", "empty_loss")
# Parameters that stand for several fields.
_PARAMETERS = {"logit_scale": "scale", "temperature": "scale"}


class Launch(NamedTuple):
    """A kernel with its grid and its arguments, by the names of the parameters."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, Any]
    """Compile-time parameters and launch options."""

    def run(self) -> Any:
        """Launch the kernel. Return the compiled kernel, or None from the interpreter."""
        return self.kernel[self.grid](**self.args, **self.options)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the options of a kernel that starts before the previous kernel ends and waits for this end itself.

    This is CUDA's programmatic dependent launch, which devices support from Hopper on. It saves a microsecond.
    """
    is_supported = device_record(device).capability >= 90
    return {"OVERLAP": is_supported, **({"launch_pdl": True} if is_supported else {})}


def thread_options(device: torch.device, warps: int, registers: int | None = None) -> dict[str, int]:
    """Return the options for programs of `warps` * WARP threads, in warps of the device's size.

    Args:
        registers: maximum for each thread. AMD's compiler has no such option: it decides by the number of threads.
    """
    record = device_record(device)
    limit = {} if registers is None or is_amd(record) else {"maxnreg": registers}
    return {"num_warps": max(1, warps * WARP // record.warp_size), **limit}


def spills_more(device: torch.device) -> bool:
    """Return True if the compiler keeps fewer values in registers than for Hopper: from compute capability 10.0 on."""
    return device_record(device).capability >= 100


def is_amd(device: DeviceRecord) -> bool:
    return device.arch.startswith("gfx")


def fewest_warps(choice: Sequence[int], row_bytes: int, device: torch.device) -> int:
    """Return the smallest number of warps with which the rows in flight fit in the L2 cache, or else the largest.

    Then the second pass over a row finds the row in the cache.
    """
    record = device_record(device)
    threads = record.registers // MAX_REGISTERS
    fitting = [w for w in choice if record.multiprocessors * (threads // (32 * w)) * row_bytes <= record.cache]
    return min(fitting, default=max(choice))


def filled_share(row: int, block: int) -> float:
    """Return the share of its blocks that a row fills. Both sizes are in columns, or both in vectors."""
    return row / (triton.cdiv(row, block) * block)


def build_launch(
    kernel: Any,
    grid: tuple[int, ...],
    call: TileCall | None,
    options: dict[str, Any],
    leaves_out: Collection[str] = (),
    **args: Any,
) -> Launch:
    """Return a launch with the arguments of the call that are parameters of the kernel, and with `args`.

    A tensor ``name`` has up to three parameters: ``name_ptr``, which is None if the tensor is None, ``name_stride``
    between rows, and ``name_col_stride`` between columns. A number ``name`` of `LossSpec` has the flag ``HAS_NAME``.
    New options of `LossSpec` and results of `RowOutputs` are included by name. A kernel with the parameter ``OVERLAP``
    has the `overlap_options` of the device.

    Args:
        args: tensors or None by ``name``; other arguments by the names of parameters. They replace arguments of `call`.
        options: launch options and compile-time parameters that do not follow from `call`.
        leaves_out: fields of `LossSpec` that the kernel does not need.

    Raises:
        TypeError: the kernel has no parameter for one of `args`.
        NotImplementedError: the kernel has no parameter for an option or a result that the call requests.
    """
    tensors, values = ({}, {}) if call is None else _call_arguments(call)
    tensors |= {name: value for name, value in args.items() if value is None or isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        strides = () if tensor is None else tensor.stride()
        values[f"{name}_ptr"] = tensor
        values[f"{name}_stride"] = strides[-2:][0] if strides else 0
        values[f"{name}_col_stride"] = strides[-1] if strides else 0
    values |= args
    _refuse_ignored_arguments(kernel, tuple(args), ((), ()) if call is None else _requested(call), tuple(leaves_out))
    if "OVERLAP" in kernel.arg_names:
        device = next(tensor.device for tensor in tensors.values() if tensor is not None)
        options = {**overlap_options(device), **options}
    return Launch(kernel, grid, {name: values[name] for name in kernel.arg_names if name in values}, options)


def _requested(call: TileCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields of `LossSpec` that are not at their defaults, and the requested results."""
    options = [f.name for f in fields(LossSpec) if getattr(call.spec, f.name) != f.default]
    out = call.out._asdict() if isinstance(call, StatisticsCall) else {}
    results = [name for name, x in out.items() if x is not None]
    return tuple(name for name in options if name not in _HOST_OPTIONS), tuple(results)


@functools.cache
def _refuse_ignored_arguments(
    kernel: Any, args: tuple[str, ...], requested: tuple[tuple[str, ...], ...], leaves_out: tuple[str, ...]
) -> None:
    """Raise an error for an argument, an option or a result that the kernel would ignore, see `build_launch`."""
    parameters, name = set(kernel.arg_names), kernel.__name__
    unknown = [x for x in args if not parameters & {x, f"{x}_ptr"}]
    if unknown:
        raise TypeError(f"{name} has no parameter for {', '.join(unknown)}")
    options, results = ([x for x in names if x not in leaves_out] for names in requested)
    ignored = [x for x in options if not parameters & {_PARAMETERS.get(x, x), f"HAS_{x.upper()}"}]
    if "loss_ptr" in parameters:
        ignored += [x for x in results if f"{x}_ptr" not in parameters]
    if ignored:
        raise NotImplementedError(f"{name} has no parameter for {', '.join(ignored)} yet")


def _call_arguments(call: TileCall) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return the tensors of the call; its numbers and their flags."""
    inputs, spec, tile, *_ = call
    if isinstance(call, GradientCall):
        results = {name: getattr(call, name, None) for name in (*RowOutputs._fields, "row_gradient")}
    else:
        results = {**call.out._asdict(), "row_gradient": None}
    tensors: dict[str, Tensor | None] = {
        "target": inputs.target,
        "bias": inputs.tile_bias(tile),
        "class_weight": inputs.class_weight,
        "token_weight": inputs.token_weight,
        "inverse_temperature": inputs.inverse_temperature,
        "scales": inputs.scales,
        "upstream": inputs.upstream,
        **results,
    }
    numbers = {
        "rows": len(inputs.target),
        "cols": tile.cols,
        "accessible_cols": tile.accessible_cols,
        "column_start": tile.start,
        "vocab_size": tile.vocab_size,
        "ignore_index": spec.ignore_index,
        "scale": spec.scale,
        "cap": spec.cap,
        **{name: getattr(spec, name) for name in NUMERIC_FIELDS},
    }
    flags = {f"HAS_{name.upper()}": numbers[name] != getattr(LossSpec, name) for name in NUMERIC_FIELDS}
    flags["HAS_SCALE"] = spec.scale != 1.0 or inputs.inverse_temperature is not None
    flags["HAS_ENTROPY_GRADIENT"] = isinstance(call, GradientCall) and call.has_entropy_gradient
    return tensors, numbers | flags
