"""Losses and softmaxes of rows in memory: bandwidth over the length of a row, for each task by itself.

Bandwidth counts the fewest bytes that any implementation moves, in entries of the rows x columns matrix (`TASKS`);
targets, losses and other numbers for each row do not count. The cases of the presets have so many rows that their input
is larger than the cache. Of a backward pass alone, the forward pass is not timed. If a contender overwrites its logits,
they are restored before each timed call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.benchmark import Benchmark, Plan, plan_cases
from benchmarks.cases import BenchCase, Contender, needs_cuda, needs_package
from benchmarks.measure import BenchMeter, Prepared, ReadyContender, do_nothing, release
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.tools.machine import DTYPES

HEAD_START = 3e-3  # seconds for which a GPU is busy while the host launches a call

Operation = Literal["cross_entropy", "softmax", "log_softmax"]
# Without gradients; backward alone, after a forward pass that is not timed; and with the gradient in the memory of the
# logits, if the contender can do that.
Direction = Literal["forward", "backward", "in-place forward+backward"]

# Entries that a task reads or writes for each entry of its input.
TASKS: dict[tuple[Operation, Direction], int] = {
    ("cross_entropy", "forward"): 1,  # reads logits
    ("cross_entropy", "backward"): 2,  # reads logits, writes their gradient
    ("cross_entropy", "in-place forward+backward"): 2,  # overwrites logits with their gradient
    ("softmax", "forward"): 2,  # reads the input, writes the output
    ("softmax", "backward"): 3,  # reads the output and its gradient, writes the gradient of the input
    ("log_softmax", "forward"): 2,
    ("log_softmax", "backward"): 3,
}
COPY, COPY_ENTRIES = "copy", 2  # the same call for all tasks


@dataclass(frozen=True)
class RowCase(BenchCase):
    rows: int
    columns: int
    dtype: str = "bfloat16"
    operation: Operation = "cross_entropy"
    direction: Direction = "forward"
    compiled: bool = False  # also by torch.compile, which takes seconds to compile each task

    @property
    def is_measured(self) -> bool:
        return (self.operation, self.direction) in TASKS

    @property
    def group(self) -> str:
        return f"{self.operation} {self.direction}, {self.dtype}"

    @property
    def title(self) -> str:
        return f"{self.group}, {self.rows} x {self.columns}"

    def bytes(self, entries: int) -> int:
        return self.rows * self.columns * DTYPES[self.dtype].itemsize * entries


class RowProblem:
    def __init__(self, case: RowCase, device: torch.device) -> None:
        self.case, generator = case, torch.Generator(device).manual_seed(0)
        size = case.rows, case.columns
        # Original values of `x`, which may be overwritten; also the upstream gradients of softmaxes.
        self.spare = torch.empty(size, dtype=DTYPES[case.dtype], device=device).normal_(0.0, 4.0, generator=generator)
        self.x = self.spare.clone()
        self.target = torch.randint(case.columns, (case.rows,), device=device, generator=generator)

    def restore(self) -> None:
        self.x.copy_(self.spare)


RowFunction = Callable[[Tensor, Tensor], Tensor]  # of the input and the targets; softmaxes ignore the targets


@dataclass(frozen=True)
class RowContender(Contender):
    function: Callable[[RowCase], RowFunction]
    overwrites: bool = field(default=False, kw_only=True)  # its in-place forward+backward needs new logits every call

    def bytes(self, case: RowCase) -> int:
        return case.bytes(COPY_ENTRIES if self.name == COPY else TASKS[case.operation, case.direction])


class LayerOutput(torch.autograd.Function):
    """Logits as the output of a layer. They are not a leaf, whose value may not be overwritten."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def make_call(contender: RowContender, problem: RowProblem) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """Return the timed call, and the work before each timed call."""
    direction, function = problem.case.direction, contender.function(problem.case)
    overwrites = contender.overwrites and direction == "in-place forward+backward"
    ready: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return function(problem.x, problem.target)

    def run_forward() -> None:
        ready.clear()  # first, because it may be large
        x = problem.x.detach().requires_grad_()
        out = function(x, problem.target)
        # The upstream gradient has separate memory, so it is not read from the cache.
        ready.extend([x, out, torch.ones_like(out) if out.dim() == 0 else problem.spare])

    def backward() -> Tensor:
        x, out, upstream = ready
        (grad,) = torch.autograd.grad(out, x, upstream)
        return grad

    def both() -> Tensor:
        x = problem.x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(function(LayerOutput.apply(x) if overwrites else x, problem.target), x)
        return grad

    if contender.name == COPY or direction == "forward":
        return forward, do_nothing
    if direction == "backward":
        return backward, run_forward
    return both, problem.restore if overwrites else do_nothing


def copy(case: RowCase) -> RowFunction:
    """Return a function that reads and writes every element. ``copy_`` is slower for multiples of 512 MiB (H200)."""
    return lambda x, target: torch.neg(x)


def library(case: RowCase, module: str) -> RowFunction:
    function: Any = getattr(importlib.import_module(module), case.operation)
    if case.operation != "cross_entropy":
        return lambda x, target: function(x, dim=-1)
    options = {"inplace": case.direction == "in-place forward+backward"} if module == "flce" else {}
    return lambda x, target: function(x, target, **options)


def compiled(case: RowCase) -> RowFunction:
    """Return a function compiled for these columns only. With symbolic sizes its kernels are slower."""
    torch.compiler.reset()  # otherwise a few shapes reach the limit of recompilations, and eager code runs
    return torch.compile(library(case, "torch.nn.functional"), dynamic=False)


def liger(case: RowCase) -> RowFunction:
    if case.operation == "softmax":
        softmax: Any = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        return lambda x, target: softmax.apply(x)
    cross_entropy: Any = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    return lambda x, target: cross_entropy.apply(x, target, None)[0]


def liger_has(case: RowCase, device: torch.device) -> bool:
    """Return True if Liger has the task. It lacks log_softmax, and its forward pass computes the loss's gradient."""
    if case.operation == "cross_entropy":
        return case.direction != "backward"
    return case.operation == "softmax"


needs_liger = needs_package("liger_kernel.ops.cross_entropy", "liger-kernel")
C, by = RowContender, functools.partial
only_compiled: dict[str, Any] = {"unavailable": needs_cuda, "applies": lambda case, device: case.compiled}
CONTENDERS = [
    C(COPY, "copy", "floor", copy),
    C("ours", "flce", "ours", by(library, module="flce"), overwrites=True),
    C("eager", "eager", "stock", by(library, module="torch.nn.functional")),
    C("torch-compile", "torch.compile", "peer", compiled, **only_compiled),
    C("liger", "Liger", "peer", liger, unavailable=needs_liger, applies=liger_has, overwrites=True),
]


COMPILED_COLUMNS = (4096, 50257, 131072)  # in one piece on chip; odd; neither
COLUMNS = (*COMPILED_COLUMNS, 16384, 65536, 262144, 10007, 1024, 128, 129)  # a deadline cuts off the last


def every_task(
    rows: int, entries: int, columns: Sequence[int], dtypes: Sequence[str], compiled: Sequence[int] = ()
) -> list[RowCase]:
    """Return the cases of all tasks, on at least so many rows and so many entries of a matrix."""
    sizes = [(max(rows, entries // count), count, dtype) for count in columns for dtype in dtypes]
    return [RowCase(*size, *task, size[1] in compiled) for size in sizes for task in TASKS]


BOTH = ("bfloat16", "float32")
PRESETS: dict[str, Callable[[], Plan]] = {
    # A second on a CPU, for the tests; two to three minutes of a large GPU.
    "tiny": lambda: plan_cases(every_task(8, 0, (64, 2049), BOTH[1:]), rounds=2, seconds=1.0),
    "h200-rows": lambda: plan_cases(every_task(4096, 2**27, COLUMNS, BOTH, COMPILED_COLUMNS), 6, 0.12),
}


def group_entries(run: Run) -> dict[str, list[Entry]]:
    dtypes = dict.fromkeys(entry.case.dtype for entry in run.cases)
    found: dict[str, list[Entry]] = {f"{' '.join(task)}, {dtype}": [] for task in TASKS for dtype in dtypes}
    for entry in sorted(run.cases, key=lambda entry: entry.case.columns):
        found[entry.case.group].append(entry)
    return {group: entries for group, entries in found.items() if entries}


def format_speed(entry: Entry, result: BenchResult) -> str:
    share = "" if result.contender == COPY else f", {tables.percent(result.share_of(entry.by_name(COPY)))}"
    return tables.gigabytes(result.gigabytes_per_second) + (share if result.samples_ms else "")


def speed_table(title: str, entries: Sequence[Entry]) -> Table:
    return tables.summary(f"GB/s, of copy: {title}", "columns", entries, format_speed, line="columns")


@functools.lru_cache(maxsize=1)
def release_once(columns: int, dtype: str) -> None:
    """Release everything once for all consecutive tasks of one matrix. This takes longer than most tasks."""
    release()


def prepare(case: RowCase, device: torch.device) -> Prepared:
    release_once(case.columns, case.dtype)
    release(everything=False)
    problem = RowProblem(case, device)

    def get_ready(contender: RowContender, result: BenchResult) -> ReadyContender:
        result.moved_bytes = contender.bytes(case)
        call, before = make_call(contender, problem)

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            before()
            yield

        with turn():
            call()
        return ReadyContender(call, turn)

    return BenchMeter(device, head_start=HEAD_START), get_ready


def run_tables(run: Run, brief: bool) -> list[Table]:
    return [
        speed_table(f"{group}, {' or '.join(map(str, sorted({entry.case.rows for entry in entries})))} rows", entries)
        for group, entries in group_entries(run).items()
    ]


ROWS = Benchmark(
    kind="rows",
    about="GB/s of losses and softmaxes over the length of a row, of flce, a copy, PyTorch and Liger.",
    case_type=RowCase,
    sizes="rows,columns",
    presets=PRESETS,
    contenders=lambda case: CONTENDERS,
    prepare=prepare,
    table=lambda entry: speed_table(entry.case.title, [entry]),
    tables=run_tables,
    defaults=tuple({"operation": operation, "direction": direction} for operation, direction in TASKS),
)
