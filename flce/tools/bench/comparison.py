"""The fused linear cross entropy beside others: one case measured, judged, and shown as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flce.core.sizes import GIB, MIB
from flce.testing.tolerances import of_one_call
from flce.tools.bench import tables
from flce.tools.bench.contenders import OperatorContender, in_budget, sums_in_bfloat16
from flce.tools.bench.measure import BenchMeter, Entrant, Prepared, UnplannedError, release
from flce.tools.bench.plots import Panel, Series, compared, draw, points
from flce.tools.bench.problem import OperatorCase, OperatorProblem, Shape, exactness, make_oracle
from flce.tools.bench.results import NO_RESULT, BenchResult, Entry, Run
from flce.tools.bench.tables import Columns, Table
from flce.tools.machine import DTYPES, memory_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "operator"  # of a run

# Seconds for which the device is kept busy while the host launches a timed call. In training it is ahead of the device
# as well: what is measured is the time of the device.
HEAD_START = 3e-3

FLOORS = ("floor-aligned", "floor")  # the first that applies is what times are multiples of
OURS = "ours"
OTHERS = (
    *("stock", "torch-compile", "torch-chunked"),
    *("liger", "liger-float32-8x", "cce", "cce-exact", "trl", "fla", "quack"),
)


def planned_bytes(contender: OperatorContender, case: OperatorCase, device: torch.device) -> int | None:
    try:
        return contender.planned_bytes(case, device)
    except ValueError as error:
        raise UnplannedError(str(error)) from None


def prepare(case: OperatorCase, device: torch.device, meter: BenchMeter | None = None) -> Prepared:
    """The operands of the case, and its right answer if errors are asked for. The meter is one of the device's time."""
    release()  # what other cases left in the cache
    problem = OperatorProblem(case, device)
    oracle = make_oracle(problem) if case.errors else None
    meter = meter or BenchMeter(device, head_start=HEAD_START)

    def enter(contender: OperatorContender, result: BenchResult) -> Entrant:
        result.planned_bytes = planned_bytes(contender, case, device)
        step = contender.prepare(problem)
        outcome, sample = meter.warm_up(step)
        if contender.family != "floor":  # whose buffers are an artefact of how it is measured
            result.workspace_bytes = sample.workspace_bytes
        if oracle is not None:
            result.errors = exactness(outcome, oracle)
        return Entrant(step)

    return meter, enter


# --- what a case takes ---

# The float64 products of the right answer: about three seconds of a CPU, or of a GPU half a second where
# it is made for float64 and a quarter of a minute where it is not.
CHEAP_FLOPS = {"cpu": 2e11, "cuda": 2e13}
CHEAP_SHARE = 0.25  # of the memory


def default_shape(device: torch.device) -> Shape:
    """Half a minute for everybody together: a head of Llama 3 on a GPU, a smaller one on a CPU."""
    if device.type == "cpu":
        return 512, 512, 32000
    return (4096, 4096, 128256) if memory_of(device) >= 32 * GIB else (2048, 2048, 128256)


def operand_bytes(case: OperatorCase) -> int:
    """Hidden states and head, and their gradients."""
    entries = (case.tokens + case.vocab) * case.hidden
    return 2 * entries * DTYPES[case.dtype].itemsize


def exactness_is_cheap(case: OperatorCase, device: torch.device) -> bool:
    entries = (case.tokens + case.vocab) * case.hidden
    flops = 6 * case.tokens * case.hidden * case.vocab
    return flops <= CHEAP_FLOPS[device.type] and 16 * entries <= CHEAP_SHARE * memory_of(device)


# --- what was found ---


def faults(entry: Entry) -> list[str]:
    """What is wrong with ours: no figures, or results that are further from float64 than stock's."""
    found = []
    stock = entry.by_name("stock").errors or {}
    for result in entry.results:
        if result.family not in ("ours", "repeat"):
            continue
        if result.status != "ok":
            found.append(f"{entry.case.title}: {result.title} {tables.FAILURES[result.status]}: {result.reason}")
        for name, error in (result.errors or {}).items():
            limit = may_be_off(entry.case, name, stock.get(name, math.inf))
            if not error <= limit or not math.isfinite(error):
                figures = f"{tables.relative(error)} from float64; stock's {tables.relative(stock.get(name))}"
                found.append(f"{entry.case.title}: the {NAMES[name]} of {result.title} is {figures}")
    return found


NAMES = {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}


def may_be_off(case: OperatorCase, name: str, stock: float) -> float:
    """The most that a result of ours may be from float64, where stock's is so far."""
    tolerance = of_one_call(case.torch_dtype, case.tokens)
    return (tolerance.loss if name == "loss" else tolerance.gradient).allowed(stock)


# --- what is shown ---


WORKSPACE = "MiB: the peak of memory above the inputs and the returned gradients"
EXACTNESS = "loss, dX, dW: relative error against float64 (of tensors: norm of the difference over norm)"
NO_EXACTNESS = "not compared with float64 (--errors does)"


def products_ms(entry: Entry) -> float | None:
    """What the bare products take of the device."""
    floor = next((r for r in entry.results if r.contender in FLOORS), NO_RESULT)
    return floor.alone_ms or floor.median_ms


def error_columns() -> Columns:
    def show(name: str) -> Callable[[BenchResult], str]:
        return lambda result: tables.relative((result.errors or {}).get(name))

    return {title: show(name) for name, title in NAMES.items()}


def comparison_table(entry: Entry) -> Table:
    """Time, workspace and exactness of all who have figures, one line each."""
    floor_ms, stock_ms = products_ms(entry), entry.by_name("stock").median_ms
    columns: Columns = {
        "": lambda r: r.title,
        "ms": lambda r: tables.milliseconds(r.median_ms),
        "x products": lambda r: tables.ratio(r.median_ms, floor_ms),
        "x stock": lambda r: tables.ratio(r.median_ms, stock_ms),
        "MiB": lambda r: tables.mebibytes(r.workspace_bytes),
        **error_columns(),
    }
    table = tables.table_of(entry, [r for r in entry.results if r.samples_ms and r.family != "repeat"], columns)
    return replace(table, notes=[*table.notes, WORKSPACE, EXACTNESS if entry.case.errors else NO_EXACTNESS])


def in_curve(contender: str) -> bool:
    """Whether it is flce in a budget with the numerics of the default: a point of the curve."""
    return in_budget(contender) is not None and not sums_in_bfloat16(contender)


def figure(run: Run) -> Figure:
    """Time against workspace: a curve for flce in all budgets, points for others, lines for the floor."""
    title, scales = f"Time and workspace, {run.head['device']['name']}", {"xscale": "log", "yscale": "log"}
    entries = compared(run.cases)
    multiples = all(map(products_ms, entries))
    panels = [panel(entry, products_ms(entry) or 1.0 if multiples else 1.0) for entry in entries]
    y = "time, of the bare products" if multiples else "median ms"
    return draw(panels, title, "workspace, MiB", y, scales, columns=1, ticks=(WORKSPACE_TICKS, TIME_TICKS))


# Where figures stand at the axes of the picture, and the workspace as which less is drawn.
WORKSPACE_TICKS = (0.1, 1, 4, 16, 64, 256, 1024, 4096, 16384)
TIME_TICKS = tuple(power * step for power in (0.1, 1, 10, 100, 1000) for step in (1, 1.2, 1.5, 2, 3, 5, 7))
LEAST_MIB = 0.1


def panel(entry: Entry, unit_ms: float) -> Panel:
    place = {r.contender: (max(r.workspace_bytes / MIB, LEAST_MIB), r.median_ms / unit_ms) for r in points(entry)}
    curve = sorted(spot for name, spot in place.items() if name == OURS or in_curve(name))
    found = []
    if len(curve) > 1:
        found.append(Series("flce, in budgets", "ours", [x for x, _ in curve], [y for _, y in curve], "-"))
    for result in entry.results:
        name, _, _ = result.title.partition(" (")
        if result.family == "repeat":  # a measure of the spread, on top of the first
            continue
        if result.contender in place and not in_curve(result.contender):
            x, y = place[result.contender]
            found.append(Series(name, result.family, [x], [y]))
        elif result.family == "floor" and result.median_ms is not None:
            line = "--" if result.contender in FLOORS else ":"
            found.append(Series(name, result.family, [], [result.median_ms / unit_ms], line))
    return Panel(replace(entry.case, label="").title, found)
