"""The fused linear cross entropy: time, workspace, and exactness of forward and backward.

A case is a line of a preset, a contender one of `operator_contenders.CONTENDERS`, a promise one of `targets.TARGETS`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from benchmarks.benchmark import Benchmark
from benchmarks.cases import MIB, Effort, Plan, planned
from benchmarks.dominance import SHAPES, dominance_table, duels, figures, peer_case
from benchmarks.measure import make_meter, nothing, release
from benchmarks.operator_contenders import OperatorContender, budget_name, in_budget, select, sums_in_bfloat16
from benchmarks.operator_problem import Mode, OperatorCase, exactness, make_oracle, make_problem
from benchmarks.plots import COLOURS, draw_entries, points
from benchmarks.results import Entry, Result, Run
from benchmarks.rounds import Entrant, Watch, compete
from benchmarks.tables import (
    Columns,
    Table,
    failure_notes,
    mebibytes,
    milliseconds,
    ratio,
    relative,
    summary,
    table_of,
    tabulate,
)
from benchmarks.targets import check_targets, target_cases, target_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The device is kept busy this long, about three milliseconds, while the host launches a timed call. In training it is
# ahead of the device as well: what is measured is the time of the device.
HEAD_START_CYCLES = 6_000_000


@dataclass
class OperatorResult(Result):
    errors: dict[str, float] | None = None  # relative, against float64


OperatorEntry = Entry[OperatorCase, OperatorResult]
OperatorRun = Run[OperatorCase, OperatorResult]


# --- cases ---

TINY = (96, 64, 500)
EXACTNESS = OperatorCase(32768, 1024, 32000, time=False, errors=True)


def tiny() -> Plan[OperatorCase]:
    """Seconds on a CPU; for the tests."""
    modes = [("float32", mode) for mode in Mode] + [("bfloat16", mode) for mode in (Mode.forward_backward, Mode.none)]
    whole = [OperatorCase(*TINY, dtype=dtype, mode=mode, budget_mib=1, errors=True) for dtype, mode in modes]
    names = ("ours-full", "ours-keeping", "ours-skipping")
    skipping = OperatorCase(*TINY, ignored=0.5, contenders=names, errors=True)
    curve = ("ours", budget_name(1), budget_name(1, bfloat16_sums=True))
    return planned([*whole, skipping, peer_case(TINY, curve)], rounds=3, seconds=1.0)


def cpu() -> Plan[OperatorCase]:
    """The shape that flce promises not to lose on a CPU."""
    shape = (2048, 512, 32000)
    cases = [OperatorCase(*shape, dtype=dtype, budget_mib=32, errors=True) for dtype in ("float32", "bfloat16")]
    return planned(cases, rounds=9, seconds=15.0)


def exact() -> Plan[OperatorCase]:
    """The distance from a float64 oracle, with float16 as under a GradScaler; no times."""
    return planned([EXACTNESS, replace(EXACTNESS, dtype="float16", upstream=2.0**16)], rounds=1, seconds=0.0)


def promised() -> Plan[OperatorCase]:
    """Everything that flce promises of its speed on one H200: a matter of one percent."""
    return planned(target_cases(), rounds=24, seconds=0.8)


def peers() -> Plan[OperatorCase]:
    """Our settings and the peers, on one large GPU: a matter of ten percent."""
    return planned([peer_case(shape) for shape in SHAPES], rounds=9, seconds=0.45)


PRESETS = {
    "tiny": tiny,
    "cpu": cpu,
    "targets": lambda: promised() + exact(),
    "peers": lambda: exact() + peers(),
    "h200": lambda: promised() + exact() + peers(),
}


CURVE = ("ours", "ours-vocab")  # one operator with the same numerics at different workspaces, beside the budgets


def in_curve(contender: str) -> bool:
    """Whether it is flce in a budget with the numerics of the default: a dot on the curve, not a look of its own."""
    return in_budget(contender) is not None and not sums_in_bfloat16(contender)


class OperatorBenchmark(Benchmark[OperatorCase, OperatorResult]):
    kind = "operator"
    noun = "the operator"
    summary = "Median ms, workspace MiB", "tokens x hidden x vocabulary"
    case_type = OperatorCase
    result_type = OperatorResult
    presets = PRESETS

    def measure(self, case: OperatorCase, device: torch.device, effort: Effort, watch: Watch) -> OperatorEntry:
        return measure_operator(case, select(case.contenders), device, effort, watch)

    def table(self, entry: OperatorEntry) -> Table:
        """Time and workspace of every contender."""
        nobody = OperatorResult("", "", "")
        floor = entry.by_name("floor") or entry.by_name("floor-aligned") or nobody
        stock = entry.by_name("stock") or nobody
        columns: Columns[OperatorResult] = {
            "": lambda r: r.title,
            "median ms": lambda r: milliseconds(r.median_ms),
            "least ms": lambda r: milliseconds(min(r.samples_ms)),
            "calls": lambda r: str(len(r.samples_ms)),
            "x floor": lambda r: ratio(r.median_ms, floor.median_ms),
            "x stock": lambda r: ratio(r.median_ms, stock.median_ms),
            "CPU ms": lambda r: milliseconds(r.median_cpu_ms),
            "CPU x stock": lambda r: ratio(r.median_cpu_ms, stock.median_cpu_ms),
            "MiB": lambda r: mebibytes(r.workspace_bytes),
            "MiB x stock": lambda r: ratio(r.workspace_bytes, stock.workspace_bytes),
        }
        return table_of(entry, [result for result in entry.results if result.samples_ms], columns)

    def error_table(self, entry: OperatorEntry) -> Table:
        """Distance of every contender from the float64 oracle."""
        columns: Columns[OperatorResult] = {"": lambda r: r.title}
        for name, title in {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}.items():
            columns[title] = functools.partial(lambda name, r: relative((r.errors or {}).get(name)), name)
        compared = [result for result in entry.results if result.errors is not None]
        notes = [] if entry.case.time else failure_notes(entry)  # they stand under the table of times
        return tabulate(f"{entry.case.title}: relative error against float64", compared, columns, notes)

    def cell(self, entry: OperatorEntry, result: OperatorResult) -> str:
        return figures(result)

    def case_tables(self, entry: OperatorEntry) -> list[Table]:
        times = [self.table(entry)] if entry.case.time else []
        return times + ([self.error_table(entry)] if entry.case.errors else [])

    def tables(self, run: OperatorRun, brief: bool) -> list[Table]:
        found = self.closing(run)
        timed = [entry for entry in run.cases if entry.case.time]
        for label in dict.fromkeys(entry.case.label for entry in timed):
            entries = [entry for entry in timed if entry.case.label == label]
            if brief or len(entries) > 1:
                title, first = self.summary
                found.append(summary(", ".join(filter(None, (title, label))), first, entries, self.cell))
        found += [] if brief else [self.table(entry) for entry in timed]
        return found + [self.error_table(entry) for entry in run.cases if entry.case.errors]

    def targets(self, runs: Sequence[OperatorRun], brief: bool) -> list[Table]:
        return [target_table(runs)]

    def dominance(self, runs: Sequence[OperatorRun]) -> list[Table]:
        return [dominance_table(runs)]

    def closing(self, run: OperatorRun) -> list[Table]:
        """Targets and peers, those that the run has figures of."""
        found = [target_table([run])] if any(check.measured for check in check_targets([run])) else []
        return found + ([dominance_table([run])] if duels([run]) else [])

    def figure(self, run: OperatorRun) -> Figure:
        return draw_entries(run.cases, panel, f"Time and workspace, {run.head['device']['name']}", in_curve)


def measure_operator(
    case: OperatorCase, contenders: Sequence[OperatorContender], device: torch.device, effort: Effort, watch: Watch
) -> OperatorEntry:
    chosen = [c for c in contenders if c.applies(case, device) and (case.time or c.family != "floor")]
    release()  # what other cases left in the cache
    problem = make_problem(case, device)
    watch.tell("float64 oracle", 0.0)
    oracle = make_oracle(problem) if case.errors else None
    head_start = functools.partial(torch.cuda._sleep, HEAD_START_CYCLES)
    meter = make_meter(device, head_start if device.type == "cuda" else nothing)

    def enter(contender: OperatorContender, result: OperatorResult) -> Entrant:
        step = contender.prepare(problem)
        outcome, sample = meter.warm_up(step)
        if contender.family != "floor":  # whose buffers are an artefact of how it is measured
            result.workspace_bytes = sample.workspace_bytes
        if oracle is not None:
            result.errors = exactness(outcome, oracle)
        return Entrant(step)

    return Entry(case, compete(chosen, OperatorResult.of, enter, device, meter, effort, watch, timed=case.time))


def panel(entry: OperatorEntry, styles: dict[str, str], axis: Axes) -> None:
    """Time against workspace: a curve for flce in all budgets, points for others, lines for the floor."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    place = {result.contender: (result.workspace_bytes / MIB, result.median_ms) for result in points(entry)}
    curve = sorted(spot for name, spot in place.items() if name in CURVE or in_curve(name))
    axis.plot(*zip(*curve, strict=True), color=COLOURS["ours"], linewidth=1, alpha=0.6)
    for result in entry.results:
        style, colour = styles.get(result.contender, ""), COLOURS[result.family]
        if result.contender in place:
            title = "flce, in budgets" if in_curve(result.contender) else result.title
            axis.scatter(*place[result.contender], color=colour, marker=style, s=42, zorder=3, label=title)
        elif result.family == "floor" and result.median_ms is not None:
            axis.axhline(result.median_ms, color=colour, linestyle=style, linewidth=1.2, label=result.title)
    times = [result.median_ms for result in entry.results if result.median_ms is not None]
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(0, 3 * max(1.0, *(x for x, _ in place.values())))
    axis.set_yscale("log")
    axis.set_ylim(0.8 * min(times), 1.3 * max(times))
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.minorticks_off()
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("workspace, MiB")
    axis.set_ylabel("median time, ms")


OPERATOR = OperatorBenchmark()
