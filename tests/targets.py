"""Compilation of every kernel for GPUs that this machine does not have, with the launch sizes of these GPUs.

`python -m tests.targets [names]` compiles for all or the given GPUs and prints faults. It needs no GPU: the launch code
runs on meta tensors, and a driver that launches no kernel gives Triton the target. Do not set TRITON_INTERPRET, because
the interpreter compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from flce import ChunkOptions
from flce.backends import triton as kernels
from flce.backends.contract import (
    DIVERGENCE_SLOTS,
    EXPONENTIAL_SLOTS,
    EXPONENTIAL_STATS,
    LOSS_GRADIENT_SLOTS,
    NORMALIZER_SLOTS,
    ROW_GRADIENT_SLOTS,
    STATE_SLOTS,
    GradientCall,
    RowInputs,
    RowOutputs,
    StatisticsCall,
    Teacher,
    TileClasses,
)
from flce.backends.triton import softmax
from flce.core.devices import KNOWN_KINDS, DeviceRecord, device_record
from flce.core.gemm import padded_cols
from flce.core.problem import DIVERGENCES, LogprobSpec, LossSpec, Needs, accumulation_dtype
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.passes import Plan, Runtime
from flce.planning import dry_run
from flce.planning.dry_run import CountingArena
from flce.planning.search import SCHEDULES
from tests.tiles import EVERY_FEATURE

# Bytes that a thread may spill to memory.
MAX_SPILLED_BYTES = 64


# A device of each architecture.
KINDS = ("T4", "A100-80GB", "RTX-3090", "RTX-4090", "H200", "B200", "RTX-5090", "MI300X")
TARGETS = {name: KNOWN_KINDS[name] for name in KINDS}
# Kernels that only calls with fused products launch, on Hopper.
PRODUCT_KERNELS = {
    "product_kernel",
    "finish_statistics_kernel",
    "reference_kernel",
    "finish_kernel",
    "weight_gradient_kernel",
}


class CompiledKernel(NamedTuple):
    """The properties of a compiled kernel."""

    name: str
    constants: str
    shared: int  # bytes of shared memory of a program
    spilled: int  # bytes that a thread spills
    early: bool  # launched with launch_pdl

    def faults(self, target: DeviceRecord) -> list[str]:
        found = [f"{self.spilled} bytes of a thread spilled"] if self.spilled > MAX_SPILLED_BYTES else []
        if self.shared > target.shared_memory:
            found.append(f"{self.shared} bytes of shared memory")
        if self.early and target.capability < 90:
            found.append("a programmatic dependent launch")
        return [f"{self.name}: {fault} ({self.constants})" for fault in found]


def gpu_target(device: DeviceRecord) -> GPUTarget:
    """Return Triton's description of the device."""
    number = device.capability
    return GPUTarget("cuda", number, device.warp_size) if number else GPUTarget("hip", device.arch, device.warp_size)


class _CompileOnlyDriver:
    """A Triton driver for a device that is not present: it loads and launches no kernel."""

    def __init__(self, name: str, target: DeviceRecord) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (None, None, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": target.shared_memory},
        )
        self.launcher_cls = lambda src, metadata: lambda *args: None
        self.get_current_device = lambda: name  # the key of Triton's compiled kernels
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: gpu_target(target)


@contextlib.contextmanager
def compiling(name: str) -> Iterator[list[CompiledKernel]]:
    """Compile each kernel that is launched on meta tensors for a device. Yield the growing list of compiled kernels."""
    target, built, log = TARGETS[name], list[CompiledKernel](), io.StringIO()

    def compiled(src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        log.seek(0)
        text = log.read()
        log.truncate(0)
        if target.capability:
            spilled = [int(size) for size in re.findall(r"(\d+) bytes spill", text)]  # of ptxas: stores, loads
        else:
            with open(next(path for file, path in metadata_group.items() if file.endswith(".amdgcn"))) as file:
                spilled = [4 * int(registers) for registers in re.findall(r"vgpr_spill_count: +(\d+)", file.read())]
        used = {src.fn.arg_names[place]: value for (place,), value in src.constants.items() if value}
        shape = [f"{field}={value}" for field, value in used.items()]
        shape += [f"warps={metadata['num_warps']}", *map(str, list(src.signature.values())[:2])]
        early = bool(metadata.get("launch_pdl"))
        built.append(CompiledKernel(src.fn.__name__, ", ".join(shape), metadata["shared"], max(spilled), early))

    modules = [module for module in _modules() if hasattr(module, "device_record")]
    before = device_record
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(log):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log, knobs.compilation.listener = cache, True, compiled
        driver.set_active(cast(Any, _CompileOnlyDriver(name, target)))
        for module in modules:
            module.device_record = lambda device: target
        for cached in (kernels._launch_size, softmax.row_launch):
            cached.cache_clear()
        try:
            yield built
        finally:
            knobs.compilation.listener = None
            for module in modules:
                module.device_record = before


def _modules() -> list[Any]:
    names = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    return [kernels, *map(importlib.import_module, names)]


def every_kernel() -> set[str]:
    functions = [value for module in _modules() for value in vars(module).values()]
    return {f.__name__ for f in functions if isinstance(f, triton.JITFunction) and f.__name__.endswith("_kernel")}


# ---------------------------------------------------------------------------------------------------------
# Launches

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": EVERY_FEATURE,
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.1},
    "weighted smoothing": {"label_smoothing": 0.1, "class_weight": True},
    "softcap": {"softcap": 5.0},
    "weights": {"softcap": 5.0, "bias": True, "class_weight": True, "token_weight": True, "z_loss": 0.1},
    "entropy": {"stats": ("logprob", "entropy", "argmax")},
    "results": {"logprobs": True, "softcap": 5.0, "stats": ("entropy", "argmax", "mean_logit")},
}
ROWS = 8
# In one block and in several, of whole vectors and of single elements.
COLUMNS = (1000, 4096, 50257, 128256)
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
_SLICE_SHAPES = (ROWS, 512), (8000, 512), (ROWS, 8000)  # tokens, classes and exponentials of a divided head
Calls = Iterator[Callable[[], Any]]


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _padded(cols: int, dtype: torch.dtype) -> Tensor:
    return _new(ROWS, padded_cols(cols), dtype=dtype)[:, :cols]


def _outputs(spec: LossSpec, accum: torch.dtype) -> RowOutputs:
    return RowOutputs.allocate(spec, accum, (ROWS,), lambda shape, dtype: _new(*shape, dtype=dtype))


def row_calls(dtype: torch.dtype, cols: int, feature: str) -> Calls:
    """Yield the operations on rows of logits: a user's rows, which begin at any address, and aligned tiles."""
    backend, accum = kernels.TritonBackend(), accumulation_dtype(dtype)
    fields = dict(FEATURES[feature])
    sizes = {"bias": 3 * cols, "class_weight": 3 * cols, "token_weight": ROWS}
    given = {name: _new(size, dtype=accum) if fields.pop(name, False) else None for name, size in sizes.items()}
    spec = (LogprobSpec if fields.pop("logprobs", False) else LossSpec)(**fields)
    inputs = RowInputs(_new(ROWS, dtype=torch.int64), scales=_new(3, dtype=accum), **given)
    out = _outputs(spec, accum)
    first = StatisticsCall(inputs, spec, TileClasses(0, cols, cols, cols), out)
    normalizer = _new(NORMALIZER_SLOTS, ROWS, dtype=accum)
    row_gradient = _new(ROW_GRADIENT_SLOTS if "entropy" in spec.stats else LOSS_GRADIENT_SLOTS, ROWS, dtype=accum)
    second = GradientCall(inputs, spec, first.tile, normalizer, row_gradient)
    ended = second._replace(
        inputs=inputs._replace(upstream=_new(ROWS, dtype=accum)), row_gradient=row_gradient[:LOSS_GRADIENT_SLOTS]
    )
    logits, state = _new(ROWS, cols, dtype=dtype), _new(STATE_SLOTS, ROWS, dtype=accum)
    tile, room = _padded(cols, dtype), padded_cols(cols)
    parts = [TileClasses(start, cols, 3 * cols, room) for start in (0, cols, 2 * cols)]
    yield partial(backend.statistics, logits, first, None)
    yield partial(backend.loss_and_gradient, logits, logits, first)
    yield partial(backend.row_gradient, ended)
    yield partial(backend.gradient, logits, logits, second)
    for part in parts:
        yield partial(backend.statistics, tile, first._replace(tile=part), state)
    factor = _new(ROWS, dtype=accum)
    yield partial(backend.scale_rows_, logits, factor, inputs.target, -100)
    yield partial(backend.scale_, [logits, logits], factor[0])
    yield partial(backend.scale_cast, _new(ROWS, cols, dtype=accum), factor[0], dtype)
    full_tile = TileClasses(0, cols, cols, room)
    for half in (torch.bfloat16, torch.float16) if dtype == torch.float32 else ():
        grad = _padded(cols, half)
        yield partial(backend.loss_and_gradient, tile, grad, first._replace(tile=full_tile))
        yield partial(backend.gradient, tile, grad, second._replace(tile=full_tile))
        if (
            half == torch.bfloat16
            and inputs.bias is None
            and not spec.label_smoothing
            and EXPONENTIAL_STATS.issuperset(spec.stats)
        ):
            factors, exps = _new(2, ROWS), _padded(3 * cols, half)
            exps_state = _new(EXPONENTIAL_SLOTS, ROWS)
            for part in parts:
                part_exps = exps[:, part.start : part.start + cols]
                yield partial(backend.exponentials, tile, part_exps, first._replace(tile=part), exps_state, factors)


def softmax_calls(dtype: torch.dtype, cols: int) -> Calls:
    """Yield softmax calls on rows in memory, in forward and backward."""
    backend, x = kernels.TritonBackend(), _new(64, cols, dtype=dtype)
    for log in (False, True):
        for wide in {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}:
            y = _new(64, cols, dtype=wide)
            yield partial(backend.softmax, x, wide, log)
            yield partial(backend.softmax_backward, y, y, dtype, log)


class _Context(PassContext):
    def count_entries(self) -> Callable[[], int | None]:
        """Return a number: entries on a meta device cannot be counted."""
        return lambda: 1000


def operator_calls(case: Case) -> Calls:
    """Yield calls of the operator with each schedule that the case allows, in a small and a large size."""
    runtime = Runtime(cast(Any, kernels.TritonBackend()), CountingArena(), _Context)
    for kind in SCHEDULES:
        sizes = kind.sizes(case) if kind.deferred or case.spec.reduction != "none" or not case.needs.any else ()
        for size in sorted({sizes[len(sizes) // 3], sizes[-1]}) if sizes else ():
            schedule = kind.from_size(case, size)
            yield partial(dry_run.dry_run_passes, Plan(case, schedule.strategy, schedule), runtime)


def divergence_calls(dtype: torch.dtype) -> Calls:
    """Yield the operations on tiles of a student and a teacher, of the first and of later classes."""
    backend, cols, accum = kernels.TritonBackend(), 8000, accumulation_dtype(dtype)
    tile, grad, rows = _padded(cols, accum), _padded(cols, dtype), _new(DIVERGENCE_SLOTS, ROWS, dtype=accum)
    row_gradient = _new(ROW_GRADIENT_SLOTS, ROWS, dtype=accum)
    for kind, softcap in itertools.product(DIVERGENCES, (None, 5.0)):
        bias = None if softcap is None else _new(3 * cols, dtype=accum)
        spec = LogprobSpec(softcap=softcap, divergence=kind, teacher_softcap=softcap)
        inputs = RowInputs(_new(ROWS, dtype=torch.int64), None, None, bias, None)
        teacher = Teacher((), bias, spec, kind, 0.5, rows)
        tile_classes = TileClasses(cols, cols, 3 * cols, padded_cols(cols))
        statistics = StatisticsCall(inputs, spec, tile_classes, _outputs(spec, accum))
        gradient = GradientCall(inputs, spec, tile_classes, _new(NORMALIZER_SLOTS, ROWS, dtype=accum), row_gradient)
        for call, memory in ((statistics, None), (gradient, grad)):
            yield partial(backend.divergence, tile, tile, call, teacher, memory)


def slice_calls() -> Calls:
    """Yield fused products of a process of a divided head."""
    backend, (x, weight, exps) = kernels.TritonBackend(), (_new(*s, dtype=torch.bfloat16) for s in _SLICE_SHAPES)
    spec, inputs = LossSpec(), RowInputs(_new(ROWS, dtype=torch.int64), None, None, None, None)
    out = _outputs(spec, torch.float32)
    call = StatisticsCall(inputs, spec, TileClasses(0, 8000, 8000, 8000, is_shard=True), out)
    yield partial(backend.fused_exponentials, x, weight, [exps], call, _new(2, ROWS), None, lambda: None)
    yield partial(backend.fused_statistics, x, weight, call)


def cases(dtype: torch.dtype, device: DeviceRecord) -> Iterator[Case]:
    results = ("entropy", "argmax", "mean_logit")
    specs = (
        LossSpec(),
        LossSpec(z_loss=0.1, empty_loss="zero"),
        LossSpec("none"),
        LogprobSpec(stats=results, candidates=5),
    )
    calls = itertools.product(specs, ("xw", "xwb", "x", ""), (False, True), (None, 2.0**-12))
    where = 32000, dtype, "cuda", "triton", device.own_products, device._replace(memory=None)
    for spec, grads, skip, below in calls:
        needs = Needs(("x" in grads,), ("w" in grads,), "b" in grads)
        yield Case(1000, (512,), *where, spec, needs, ChunkOptions(skip_ignored=skip, sample_below=below))
    adapted = Needs((True, True), (True, True), False)
    yield Case(1000, (512, 16), *where, LossSpec(), adapted, ChunkOptions(sample_below=2.0**-12))


def all_calls(target: DeviceRecord) -> Calls:
    for dtype, cols in itertools.product(DTYPES, COLUMNS):
        for feature in FEATURES:
            if dtype != torch.float16 or feature in ("plain", "all"):  # bfloat16 covers the other features
                yield from row_calls(dtype, cols, feature)
        yield from softmax_calls(dtype, cols - cols % 16)
    for dtype in DTYPES:
        yield from divergence_calls(dtype)
        for case in cases(dtype, target):
            yield from operator_calls(case)
    if target.own_products:
        yield from slice_calls()


def sample_calls(target: DeviceRecord) -> Calls:
    """Yield three seconds of calls: with the most registers, and with the kernels that every call launches."""
    yield from itertools.islice(row_calls(torch.bfloat16, 50257, "all"), 2)
    yield from itertools.islice(row_calls(torch.float32, 128256, "plain"), 9, 10)  # over wider logits
    yield from itertools.islice(softmax_calls(torch.bfloat16, 32768), 2)
    if target.own_products:
        yield from itertools.islice(operator_calls(next(cases(torch.bfloat16, target))), 1)
        yield from itertools.islice(slice_calls(), 2)


def faults(name: str, calls: Iterable[Callable[[], Any]], require_all: bool) -> tuple[int, list[str]]:
    """Return the number of compiled kernels and the faults. With `require_all` a kernel that was not compiled is a
    fault."""
    target, found = TARGETS[name], list[str]()
    with compiling(name) as built:
        for call in calls:
            try:
                call()
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error)[:2000]}")
    missing = every_kernel() - {kernel.name for kernel in built} - (set() if target.own_products else PRODUCT_KERNELS)
    found += [f"{kernel} was not compiled" for kernel in sorted(missing) if require_all]
    return len(built), [*found, *(fault for kernel in built for fault in kernel.faults(target))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*TARGETS], help=", ".join(TARGETS))
    parser.add_argument("--sample", action="store_true", help="compile only a sample, in a few seconds")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.names:
        start = time.perf_counter()
        calls = (sample_calls if arguments.sample else all_calls)(TARGETS[name])
        number, found = faults(name, calls, require_all=not arguments.sample)
        print(f"{name}: {number} kernels in {time.perf_counter() - start:.0f} s, {len(found)} faults", flush=True)
        for fault in dict.fromkeys(found):
            print(f"  {fault}", flush=True)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
