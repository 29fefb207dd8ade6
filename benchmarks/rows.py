"""Losses and softmaxes of rows in memory: bandwidth over the length of a row, for each task by itself.

`row_calls` says how a call is timed. A case is a line of a preset, a contender one of `row_contenders.CONTENDERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.benchmark import Benchmark
from benchmarks.cases import Effort, Plan, planned
from benchmarks.measure import Meter, make_meter, release, steady_heap
from benchmarks.plots import Panel, draw
from benchmarks.rounds import Entrant, Watch, compete
from benchmarks.row_calls import HeadStart, make_region
from benchmarks.row_contenders import COPY, OURS, RowContender, make_calls, row_contenders
from benchmarks.row_problem import ON_CHIP_BYTES, TASKS, RowCase, RowProblem, RowResult, Task, make_rows
from benchmarks.row_targets import RowCheck, RowEntry, RowRun, check_rows, of_task, wanted_share
from benchmarks.tables import NONE, Table, gigabytes, percent, ratio, spread_note, tabulate
from benchmarks.verdicts import Verdict, tally, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# --- cases ---

# In the order of what is lost first at a deadline: torch.compile's, powers of two, odd sizes, small ones.
COMPILED_COLUMNS = (4096, 50257, 131072)  # in one piece on chip; odd; neither
POWERS = (2048, 8192, 16384, 32768, 65536, 262144)
ODD = (3001, 10007, 32001, 100003, 151937)
SMALL = (1024, 512, 256, 128, 1000, 129)


def tiny() -> Plan[RowCase]:
    """A second on a CPU; for the tests."""
    cases = [RowCase(8, columns, dtype, calls=3) for columns in (64, 2049) for dtype in ("float32", "bfloat16")]
    return planned(cases, rounds=2, seconds=1.0)


def cpu() -> Plan[RowCase]:
    """A minute or two on a CPU."""
    cases = [RowCase(256, columns, "float32") for columns in (128, 1000, 4096, 32768, 50257)]
    return planned(cases, rounds=5, seconds=1.0)


def h200_rows() -> Plan[RowCase]:
    """Two to three minutes of one large GPU."""
    cases = [
        RowCase(4096, columns, dtype, compiled=columns in COMPILED_COLUMNS)
        for columns in (*COMPILED_COLUMNS, *POWERS, *ODD, *SMALL)
        for dtype in ("bfloat16", "float32")
    ]
    return planned(cases, rounds=6, seconds=0.12)


PRESETS = {"tiny": tiny, "cpu": cpu, "h200-rows": h200_rows}


# --- measuring ---


def measure_rows(case: RowCase, device: torch.device, effort: Effort, watch: Watch) -> RowEntry:
    entry = RowEntry(case)
    # One for all tasks: a collection of everything that is loaded takes longer than most of them.
    with steady_heap():
        release()
        problem = make_rows(case, device)
        head_start = HeadStart(device)
        meter = make_meter(device, head_start)
        for index, task in enumerate(case.tasks):

            def tell(doing: str, share: float, index: int = index, task: Task = task) -> None:
                watch.tell(f"{task.title}: {doing}", (index + share) / len(case.tasks))

            entry.results += measure_task(problem, task, meter, head_start, effort, Watch(tell, watch.expired))
            release()  # graphs, with the memory that belongs to them
    return entry


def measure_task(
    problem: RowProblem, task: Task, meter: Meter, head_start: HeadStart, effort: Effort, watch: Watch
) -> list[RowResult]:
    def make(contender: RowContender) -> RowResult:
        moved, (operation, direction) = contender.bytes(problem.case, task), (task.operation, task.direction)
        return RowResult.of(
            contender, operation=operation.value, direction=direction.value, moved_bytes=moved, calls=problem.calls
        )

    def enter(contender: RowContender, result: RowResult) -> Entrant:
        """Warms up; says how it is timed."""
        region = make_region(make_calls(contender, problem, task), problem.x.device)
        result.method, result.note = region.method.value, region.note
        return Entrant(region.step, functools.partial(region.turn, head_start))

    contenders = row_contenders(problem.case, task)
    return compete(contenders, make, enter, problem.x.device, meter, effort, watch)


# --- tables ---

LAUNCHED = "*"  # the host took part that could not be kept out


@dataclass(frozen=True)
class Slice:
    """One task in one dtype, over all numbers of columns."""

    task: Task
    dtype: str
    entries: list[RowEntry]

    @property
    def title(self) -> str:
        rows = sorted({entry.case.rows for entry in self.entries})
        return f"{self.task.title}, {self.dtype}, {' or '.join(map(str, rows))} rows"

    @property
    def titles(self) -> dict[str, str]:
        """Of the contenders that were tried, by name."""
        results = [result for entry in self.entries for result in of_task(entry, self.task).values()]
        return {result.contender: result.title for result in results if result.status != "unavailable"}

    def results(self, contender: str) -> list[tuple[int, RowResult | None]]:
        """By the number of columns."""
        return [(entry.case.columns, of_task(entry, self.task).get(contender)) for entry in self.entries]


def slices(runs: Sequence[RowRun]) -> list[Slice]:
    """Of several runs the cases of the first."""
    found = []
    cases = runs[0].cases
    for task in TASKS:
        for dtype in dict.fromkeys(entry.case.dtype for entry in cases):
            entries = [entry for entry in cases if entry.case.dtype == dtype and task in entry.case.tasks]
            if entries:
                found.append(Slice(task, dtype, sorted(entries, key=lambda entry: entry.case.columns)))
    return found


def speed(result: RowResult | None, copy: RowResult | None) -> str:
    """GB/s, and of the copy's; marked where the host took part."""
    if result is None or result.gigabytes_per_second is None:
        return NONE
    text = gigabytes(result.gigabytes_per_second)
    if result.contender != COPY:
        text += f", {percent(result.share_of(copy))}"
    return text + ("" if result.note is None else LAUNCHED)


def task_table(found: Slice) -> Table:
    """Columns x contenders."""
    lines = [(str(entry.case.columns), of_task(entry, found.task)) for entry in found.entries]
    notes = [*task_notes(found), spread_note(found.entries, found.task.title)]
    return speed_table(found.title, "columns", lines, notes)


def speed_table(title: str, first: str, lines: list[tuple[str, dict[str, RowResult]]], notes: list[str]) -> Table:
    tried = [result for _, results in lines for result in results.values() if result.status != "unavailable"]
    titles = {result.contender: result.title for result in tried}
    rows = [[line, *(speed(results.get(name), results.get(COPY)) for name in titles)] for line, results in lines]
    return Table(f"GB/s, of copy: {title}", [first, *titles.values()], rows, notes)


def task_notes(found: Slice) -> list[str]:
    """Where figures are missing or measured in another way, and why."""
    notes: list[str] = []
    for name, title in found.titles.items():
        results = found.results(name)
        sizes = [columns for columns, result in results if result is not None]
        if len(sizes) < len(results):
            notes.append(f"{title} ran at {', '.join(map(str, sizes))} columns only")
        reasons: dict[str, list[int]] = {}
        for columns, result in results:
            if result is not None and result.note is not None:
                reason = f"{LAUNCHED} {title} {result.method}, not captured: {result.note}"
                reasons.setdefault(reason, []).append(columns)
            if result is not None and result.status != "ok":
                reasons.setdefault(f"{title} {result.status}: {result.reason}", []).append(columns)
        for reason, sizes in reasons.items():
            where = "" if len(sizes) == len(results) else f" ({', '.join(map(str, sizes))} columns)"
            notes.append(reason + where)
    return notes


def verdict_table(runs: Sequence[RowRun]) -> Table:
    """How many promises are kept: tasks x who they are about."""
    checks = check_rows(runs)
    against = {check.against: check.title for check in sorted(checks, key=lambda check: check.against != COPY)}

    def cells(chosen: Sequence[RowCheck]) -> list[str]:
        return [tally(check.verdict for check in chosen if check.against == name) for name in against]

    rows = [
        [f"{found.task.title}, {found.dtype}", *cells([c for c in checks if belongs(c, found)])]
        for found in slices(runs)
    ]
    rows.append(["all", *cells(checks)])
    notes = [
        "copy: share of its bandwidth, rows of 2048 columns or more; 85% where a row is at most 128 KiB, else 65%",
        "others: flce not slower by more than 5%, any number of columns",
        *([f"the median of {len(runs)} runs"] if len(runs) > 1 else []),
        spread_note([entry for run in runs for entry in run.cases]),
    ]
    title = f"Rows, met: {tally(check.verdict for check in checks)}"
    return Table(title, ["", *against.values()], rows, notes)


def belongs(check: RowCheck, found: Slice) -> bool:
    return (check.task, check.case.dtype) == (found.task, found.dtype)


def target_table(found: Slice, checks: Sequence[RowCheck]) -> Table:
    """What is promised at every size, and whether it is kept."""

    def value(entry: RowEntry, name: str) -> float | None:
        return next((c.value for c in checks if c.case == entry.case and c.against == name), None)

    def verdict(entry: RowEntry) -> str:
        mine = [check for check in checks if check.case == entry.case]
        whole = worst(check.verdict for check in mine)
        names = [check.title for check in mine if check.verdict is whole]
        return f"{whole.value}: {', '.join(names)}" if whole in (Verdict.missed, Verdict.nearly) else whole.value

    def share(entry: RowEntry) -> float | None:
        """Where nothing is wanted, that of the first run."""
        if wanted_share(entry.case) is not None:
            return value(entry, COPY)
        results = of_task(entry, found.task)
        return results[OURS].share_of(results.get(COPY)) if OURS in results else None

    def times(name: str, entry: RowEntry) -> str:
        return ratio(value(entry, name))

    columns: dict[str, Callable[[RowEntry], str]] = {
        "columns": lambda e: str(e.case.columns),
        "of copy": lambda e: percent(share(e)),
        "wanted": lambda e: percent(wanted_share(e.case)),
    }
    for name, title in found.titles.items():
        if any(check.against == name != COPY for check in checks):
            columns[f"time / {title}"] = functools.partial(times, name)
    columns["verdict"] = verdict
    notes = [spread_note(found.entries, found.task.title)]
    return tabulate(f"{found.title}, met: {tally(check.verdict for check in checks)}", found.entries, columns, notes)


# --- the picture ---

LOOKS = {  # colour, marker
    OURS: ("#c0392b", "o"),
    "ours-again": ("#e67e22", "."),
    "eager": ("#2c3e50", "s"),
    "torch-compile": ("#8e44ad", "D"),
    "liger": ("#2980b9", "^"),
    COPY: ("#7f8c8d", ""),
}


def panel(found: Slice, axis: Axes) -> None:
    """GB/s over the number of columns, a line for each contender."""
    for name, title in found.titles.items():
        speeds = [(columns, result.gigabytes_per_second) for columns, result in found.results(name) if result]
        points = [(columns, speed) for columns, speed in speeds if speed is not None]
        colour, marker = LOOKS.get(name, ("#27ae60", "v"))
        # Who was measured at few sizes says nothing of those between.
        line = "--" if name == COPY else "-" if len(points) == len(found.entries) else ":"
        x, y = [x for x, _ in points], [y for _, y in points]
        axis.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.2, linestyle=line, label=title)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.axvline(ON_CHIP_BYTES / RowCase(1, 1, found.dtype).row_bytes, color="#bdc3c7", linewidth=0.8)
    axis.set_title(f"{found.task.title}, {found.dtype}", fontsize=9)
    axis.set_xlabel("columns")
    axis.set_ylabel("GB/s")


class RowBenchmark(Benchmark[RowCase, RowResult]):
    kind = "rows"
    noun = "rows"
    case_type = RowCase
    result_type = RowResult
    presets = PRESETS

    def measure(self, case: RowCase, device: torch.device, effort: Effort, watch: Watch) -> RowEntry:
        return measure_rows(case, device, effort, watch)

    def table(self, entry: RowEntry) -> Table:
        """Tasks x contenders, of one matrix."""
        lines = [(task.title, of_task(entry, task)) for task in entry.case.tasks]
        return speed_table(entry.case.title, "", lines, [spread_note([entry])])

    def tables(self, run: RowRun, brief: bool) -> list[Table]:
        return ([] if brief else [task_table(found) for found in slices([run])]) + [verdict_table([run])]

    def targets(self, runs: Sequence[RowRun], brief: bool) -> list[Table]:
        """First the counts, then, unless `brief`, all sizes."""
        checks = check_rows(runs)
        details = [target_table(found, [c for c in checks if belongs(c, found)]) for found in slices(runs)]
        return [verdict_table(runs), *([] if brief else details)]

    def closing(self, run: RowRun) -> list[Table]:
        return [verdict_table([run])] if run.head["device"]["type"] == "cuda" else []

    def figure(self, run: RowRun) -> Figure:
        found = [part for part in slices([run]) if any(r.samples_ms for e in part.entries for r in e.results)]
        if not found:
            raise ValueError("the results hold no figures")
        place = {(part.task, part.dtype): functools.partial(panel, part) for part in found}
        dtypes = list(dict.fromkeys(part.dtype for part in found))
        tasks = list(dict.fromkeys(part.task for part in found))
        panels: list[list[Panel | None]] = [[place.get((task, dtype)) for dtype in dtypes] for task in tasks]
        title = f"Bandwidth of the fewest bytes possible, {run.head['device']['name']}"
        return draw(panels, title, (6.0, 2.8), share=True)


ROWS = RowBenchmark()
