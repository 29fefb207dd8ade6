"""Losses and softmaxes of rows in memory: bandwidth over the length of a row, for each task by itself.

Bandwidth is of the fewest bytes that no implementation can do without, in entries of the rows x columns matrix;
targets, losses and what is one number a row are left out. `TASKS` has their number.

`row_calls` says how a call is timed. To add a contender, write a function (RowCase) -> RowFunction and a line in
`CONTENDERS`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmarks import tables
from benchmarks.benchmark import Benchmark, Plan, planned
from benchmarks.cases import BenchCase, Contender, needs_cuda, needs_package
from benchmarks.measure import BenchMeter, Entrant, Prepared, nothing, release
from benchmarks.plots import Panel, Series, draw
from benchmarks.row_calls import Calls, make_region
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.core.sizes import MIB
from flce.tools.machine import DTYPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON_CHIP_BYTES = 128 * 1024  # of a row: half of the registers of a multiprocessor (256 KiB), so that two rows fit
CPU_CACHE_BYTES = 8 * MIB  # PyTorch does not tell that of a CPU
CACHES = 4  # the inputs of one timed region are more than this many times the cache
# On a GPU a number of calls is timed as one, so that they take a tenth of a millisecond or more, beside which the
# microseconds between an event and the first of them count little.
REGION_BYTES = 512 * MIB
ENOUGH_CALLS = 256
MOST_CALLS = 1024  # whatever the cache


Operation = Literal["cross_entropy", "softmax", "log_softmax"]
# Without gradients; by itself, the forward pass made before; and with the gradient in the memory of the logits, for
# those that can.
Direction = Literal["forward", "backward", "in-place forward+backward"]

# What there is to do, and the entries read or written for each entry of the input.
TASKS: dict[tuple[Operation, Direction], int] = {
    ("cross_entropy", "forward"): 1,  # the logits are read
    ("cross_entropy", "backward"): 2,  # they are read, and the gradient is written
    ("cross_entropy", "in-place forward+backward"): 2,  # the gradient over them
    ("softmax", "forward"): 2,  # the input is read, the output written
    ("softmax", "backward"): 3,  # the output and its gradient are read, that of the input is written
    ("log_softmax", "forward"): 2,
    ("log_softmax", "backward"): 3,
}
COPY_ENTRIES = 2
LOSSES = [task for task in TASKS if task[0] == "cross_entropy"]


@dataclass(frozen=True)
class RowCase(BenchCase):
    """A matrix of rows, and what is done with it."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    operation: Operation = "cross_entropy"
    direction: Direction = "forward"
    compiled: bool = False  # also by torch.compile, which takes seconds to compile each task
    calls: int | None = None  # in one timed region; None: more than the cache can hold the inputs of

    @property
    def is_measured(self) -> bool:
        return (self.operation, self.direction) in TASKS

    @property
    def group(self) -> str:
        """Which table it is in."""
        return f"{self.operation} {self.direction}, {self.dtype}"

    @property
    def title(self) -> str:
        return f"{self.group}, {self.rows} x {self.columns}"

    def bytes(self, entries: int) -> int:
        return self.rows * self.columns * DTYPES[self.dtype].itemsize * entries

    def calls_for(self, cache_bytes: int, region_bytes: int = 0) -> int:
        """The calls of one timed region, each on an input of its own: beyond the cache, and long enough."""
        beyond = CACHES * cache_bytes // self.bytes(1) + 1
        enough = min(ENOUGH_CALLS, region_bytes // self.bytes(1))
        return self.calls or min(MOST_CALLS, max(beyond, enough))


class RowProblem:
    """The operands of the calls of one timed region, in turn: random logits of standard deviation 4, random targets."""

    def __init__(self, case: RowCase, device: torch.device, calls: int | None = None, seed: int = 0) -> None:
        self.case, generator = case, torch.Generator(device).manual_seed(seed)
        cache, region = CPU_CACHE_BYTES, 0
        if device.type == "cuda":
            cache, region = torch.cuda.get_device_properties(device).L2_cache_size, REGION_BYTES
        size = calls or case.calls_for(cache, region), case.rows, case.columns
        # What `x`, which may be overwritten, is restored from, and the gradients that arrive at softmaxes.
        self.spare = torch.empty(size, dtype=DTYPES[case.dtype], device=device).normal_(0.0, 4.0, generator=generator)
        self.x = self.spare.clone()
        self.target = torch.randint(case.columns, (case.rows,), device=device, generator=generator)

    def restore(self) -> None:
        self.x.copy_(self.spare)


# --- contenders ---

RowFunction = Callable[[Tensor, Tensor], Tensor]  # of the input and the targets, which softmaxes have no use for


@dataclass(frozen=True)
class RowContender(Contender):
    function: Callable[[RowCase], RowFunction]
    overwrites: bool = field(default=False, kw_only=True)  # its in-place forward+backward needs new logits every call
    roof: bool = field(default=False, kw_only=True)  # the same call whatever the task

    def bytes(self, case: RowCase) -> int:
        """The fewest that a call moves."""
        return case.bytes(COPY_ENTRIES if self.roof else TASKS[case.operation, case.direction])


class Produced(torch.autograd.Function):
    """Logits as a layer makes them: not a leaf, whose value may not be overwritten. Costs nothing and saves nothing."""

    @staticmethod
    def forward(ctx: Any, layer: Tensor, logits: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.arrived.append(grad)
        return None, None, None


def make_calls(contender: RowContender, problem: RowProblem) -> Calls:
    """Call i works on input i. What it needs of the forward pass is made before; its result is returned."""
    direction, function, count = problem.case.direction, contender.function(problem.case), len(problem.x)
    overwrites = contender.overwrites and direction == "in-place forward+backward"
    layer = torch.ones((), device=problem.x.device, requires_grad=True)

    def forward(index: int, ready: Any = None) -> Tensor:
        with torch.no_grad():
            return function(problem.x[index], problem.target)

    def ahead(index: int) -> tuple[Tensor, Tensor, Tensor]:
        x = problem.x[index].detach().requires_grad_()
        out = function(x, problem.target)
        # In memory of its own: what arrives is read from there, not from the cache.
        return x, out, torch.ones_like(out) if out.dim() == 0 else problem.spare[index]

    def backward(index: int, ready: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, out, upstream = ready
        (grad,) = torch.autograd.grad(out, x, upstream)
        return grad

    def both(index: int, ready: Any = None) -> Tensor:
        x = problem.x[index].detach()
        if not overwrites:
            (grad,) = torch.autograd.grad(function(x.requires_grad_(), problem.target), x)
            return grad
        arrived: list[Tensor] = []
        function(Produced.apply(layer, x, arrived), problem.target).backward()
        return arrived[0]

    if contender.roof or direction == "forward":
        return Calls(count, forward)
    if direction == "backward":
        return Calls(count, backward, ahead)
    return Calls(count, both, restore=problem.restore if overwrites else nothing)


def copy(case: RowCase) -> RowFunction:
    """A kernel that reads and writes every element, at the speed of a copy.

    What is captured of ``copy_`` is not a kernel but a "memcpy node", which on an H200 is as fast, but for 512 MiB and
    multiples of it: 2.8 TB/s instead of 4.3.
    """
    return lambda x, target: torch.neg(x)


def library(case: RowCase, module: str) -> RowFunction:
    function: Any = getattr(importlib.import_module(module), case.operation)
    if case.operation != "cross_entropy":
        return lambda x, target: function(x, dim=-1)
    options = {"inplace": case.direction == "in-place forward+backward"} if module == "flce" else {}
    return lambda x, target: function(x, target, **options)


ours = functools.partial(library, module="flce")
eager = functools.partial(library, module="torch.nn.functional")


def compiled(case: RowCase) -> RowFunction:
    """For these columns alone, as fast as it can be: with symbolic sizes its kernels are slower."""
    torch.compiler.reset()  # or the limit of recompilations is reached after a few shapes, and eager code runs
    return torch.compile(eager(case), dynamic=False)


def liger(case: RowCase) -> RowFunction:
    if case.operation == "softmax":
        softmax: Any = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        return lambda x, target: softmax.apply(x)
    cross_entropy: Any = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    return lambda x, target: cross_entropy.apply(x, target, None)[0]


def liger_has(case: RowCase, device: torch.device) -> bool:
    """It has no log_softmax. Its cross entropy makes the gradient in forward: there is no backward by itself."""
    if case.operation == "cross_entropy":
        return case.direction != "backward"
    return case.operation == "softmax"


needs_liger = needs_package("liger_kernel.ops.cross_entropy", "liger-kernel")
COPY, OURS, C = "copy", "ours", RowContender
asked_for: dict[str, Any] = {"unavailable": needs_cuda, "applies": lambda case, device: case.compiled}
CONTENDERS = [
    C(COPY, "copy", "floor", copy, roof=True),
    C(OURS, "flce", "ours", ours, overwrites=True),
    C("eager", "eager", "stock", eager),
    C("torch-compile", "torch.compile", "peer", compiled, **asked_for),
    C("liger", "Liger", "peer", liger, unavailable=needs_liger, applies=liger_has, overwrites=True),
]


# --- cases ---

COMPILED_COLUMNS = (4096, 50257, 131072)  # in one piece on chip; odd; neither
COLUMNS = (*COMPILED_COLUMNS, 16384, 65536, 262144, 10007, 1024, 128, 129)  # what a deadline may cut off comes last


def every_task(
    rows: int, columns: Sequence[int], dtypes: Sequence[str], compiled: Sequence[int] = (), calls: int | None = None
) -> list[RowCase]:
    sizes = [(rows, count, dtype) for count in columns for dtype in dtypes]
    return [RowCase(*size, *task, size[1] in compiled, calls) for size in sizes for task in TASKS]


# Tiles of logits as a call of the fused loss makes them: tokens x classes.
TILES = [
    (4096, 128256),
    (8192, 128256),
    (8192, 152064),
    (16384, 151936),
    (8192, 256000),
    (16384, 50257),
]
BOTH = ("bfloat16", "float32")
PRESETS: dict[str, Callable[[], Plan]] = {
    # A second on a CPU, for the tests; a minute or two on a CPU; two to three minutes of one large GPU, and half a one.
    "tiny": lambda: planned(every_task(8, (64, 2049), BOTH[1:], calls=3), rounds=2, seconds=1.0),
    "cpu": lambda: planned(every_task(256, (128, 1000, 4096, 32768, 50257), BOTH[1:]), rounds=5, seconds=1.0),
    "h200-rows": lambda: planned(every_task(4096, COLUMNS, BOTH, COMPILED_COLUMNS), rounds=6, seconds=0.12),
    "h200-logits": lambda: planned([RowCase(*tile, "bfloat16", *task) for tile in TILES for task in LOSSES], 20, 0.2),
}


# --- tables ---

LAUNCHED = "*"  # the host took part that could not be kept out


def grouped(run: Run) -> dict[str, list[Entry]]:
    """One task in one dtype, over all numbers of columns."""
    dtypes = dict.fromkeys(entry.case.dtype for entry in run.cases)
    found: dict[str, list[Entry]] = {f"{' '.join(task)}, {dtype}": [] for task in TASKS for dtype in dtypes}
    for entry in sorted(run.cases, key=lambda entry: entry.case.columns):
        found[entry.case.group].append(entry)
    return {group: entries for group, entries in found.items() if entries}


def tried(entries: Sequence[Entry]) -> dict[str, BenchResult]:
    """A result of each contender, which says its title and family."""
    results = [result for entry in entries for result in entry.results]
    return {result.contender: result for result in results if result.status != "unavailable"}


def speed(entry: Entry, result: BenchResult) -> str:
    """GB/s, and of the copy's; marked where the host took part."""
    share = "" if result.contender == COPY else f", {tables.percent(result.share_of(entry.by_name(COPY)))}"
    marked = share + ("" if result.note is None else LAUNCHED)
    return tables.gigabytes(result.gigabytes_per_second) + (marked if result.samples_ms else "")


def speed_table(title: str, entries: Sequence[Entry]) -> Table:
    """Columns x contenders; where figures are missing or measured in another way, and why."""
    notes: dict[str, list[str]] = {}
    for name, who in tried(entries).items():
        results = {str(entry.case.columns): result for entry in entries if (result := entry.by_name(name)).contender}
        if len(results) < len(entries):
            notes[f"{who.title} ran at {', '.join(results)} columns only"] = []
        for columns, result in results.items():
            if result.note is not None:
                notes.setdefault(f"{LAUNCHED} {who.title} launched, not captured: {result.note}", []).append(columns)
            if result.status != "ok":
                notes.setdefault(f"{who.title} {result.status}: {result.reason}", []).append(columns)
    lines = [f"{reason} ({', '.join(sizes)} columns)" if sizes else reason for reason, sizes in notes.items()]
    table = tables.summary(f"GB/s, of copy: {title}", "columns", entries, speed, line="columns")
    return replace(table, notes=[*lines, *table.notes])


def panel(group: str, entries: Sequence[Entry]) -> Panel:
    """GB/s over the number of columns, a line for each contender, and where a row fits on chip no longer."""
    series = []
    for name, who in tried(entries).items():
        speeds = {float(e.case.columns): gb for e in entries if (gb := e.by_name(name).gigabytes_per_second)}
        # Who was measured at few sizes says nothing of those between.
        line = "--" if name == COPY else "-" if len(speeds) == len(entries) else ":"
        if speeds:
            series.append(Series(who.title, who.family, [*speeds], [*speeds.values()], line))
    edge = ON_CHIP_BYTES / DTYPES[entries[0].case.dtype].itemsize
    return Panel(group, [*series, Series("fits on chip, up to", "floor", [edge], [], ":")])


@functools.lru_cache(maxsize=1)
def begin_matrix(rows: int, columns: int, dtype: str) -> None:
    """Releases everything, once for all tasks in a row on one matrix: it takes longer than most of them."""
    release()


def prepare(case: RowCase, device: torch.device) -> Prepared:
    begin_matrix(case.rows, case.columns, case.dtype)
    release(everything=False)
    problem, meter = RowProblem(case, device), BenchMeter(device)

    def enter(contender: RowContender, result: BenchResult) -> Entrant:
        """Warms up; says how it is timed."""
        result.moved_bytes, result.calls = contender.bytes(case), len(problem.x)
        region = make_region(make_calls(contender, problem), device)
        result.method, result.note = region.method, region.note
        return Entrant(region.step, functools.partial(region.turn, meter))

    return meter, enter


def run_tables(run: Run, brief: bool) -> list[Table]:
    return [
        speed_table(f"{group}, {' or '.join(map(str, sorted({entry.case.rows for entry in entries})))} rows", entries)
        for group, entries in grouped(run).items()
    ]


def figure(run: Run) -> Figure:
    panels = [panel(*group) for group in grouped(run).items() if any(r.samples_ms for e in group[1] for r in e.results)]
    if not panels:
        raise ValueError("the results hold no figures")
    title = f"Bandwidth of the fewest bytes possible, {run.head['device']['name']}"
    dtypes = len({entry.case.dtype for entry in run.cases})
    return draw(panels, title, "columns", "GB/s", {"xscale": "log", "ylim": (0, None)}, dtypes)


ROWS = Benchmark(
    kind="rows",
    about="GB/s of losses and softmaxes over the length of a row, beside a copy, PyTorch and Liger.",
    noun="rows",
    case_type=RowCase,
    sizes="rows,columns",
    presets=PRESETS,
    contenders=lambda case: CONTENDERS,
    prepare=prepare,
    table=lambda entry: speed_table(entry.case.title, [entry]),
    tables=run_tables,
    figure=figure,
    defaults=tuple({"operation": operation, "direction": direction} for operation, direction in TASKS),
)
