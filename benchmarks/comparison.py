"""The fused linear cross entropy beside others: how a case is measured, its columns of a table, its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from benchmarks import tables
from benchmarks.contenders import OperatorContender, in_budget, sums_in_bfloat16
from benchmarks.measure import BenchMeter, Entrant, Prepared, UnplannedError, release
from benchmarks.plots import Panel, Series, compared, draw, points
from benchmarks.problem import OperatorCase, OperatorProblem, exactness, make_oracle
from benchmarks.runs import NO_RESULT, BenchResult, Entry, Run
from benchmarks.tables import Columns
from flce.core.sizes import MIB

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


# --- what is shown ---


NAMES = {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}


def products_ms(entry: Entry) -> float | None:
    """What the bare products take of the device."""
    floor = next((r for r in entry.results if r.contender in FLOORS), NO_RESULT)
    return floor.alone_ms or floor.median_ms


def error_columns() -> Columns:
    def show(name: str) -> Callable[[BenchResult], str]:
        return lambda result: tables.relative((result.errors or {}).get(name))

    return {title: show(name) for name, title in NAMES.items()}


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
    return draw(panels, title, "workspace, MiB", y, scales, columns=1)


LEAST_MIB = 0.1  # the workspace as which less is drawn


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
