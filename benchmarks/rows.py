"""Losses and softmaxes of rows in memory: bandwidth over the length of a row, for each task by itself.

`row_calls` says how a call is timed; cases, tasks and contenders are in `row_problem`.

flce promises two kinds of things on one H200, each of one task on one size and dtype, from medians of one interleaved
measurement; `verdicts` says when one counts as met:

* Of the bandwidth of a copy of the same rows, for rows of 2,048 columns or more: 85% where a row fits on chip (it is
  at most `row_problem.ON_CHIP_BYTES`), 65% where it does not.
* Against everybody else, at any size: not slower by more than 5%. Who could not be measured is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.benchmark import Benchmark
from benchmarks.cases import Effort, Plan, planned
from benchmarks.measure import make_meter, release
from benchmarks.plots import Panel, Series, draw
from benchmarks.results import Entry, Run
from benchmarks.rounds import Entrant, Expired, compete
from benchmarks.row_calls import make_region
from benchmarks.row_problem import (
    COPY,
    ON_CHIP_BYTES,
    OURS,
    TASKS,
    RowCase,
    RowContender,
    RowResult,
    make_calls,
    make_rows,
    row_contenders,
)
from benchmarks.tables import NONE, Columns, Table, gigabytes, median_note, percent, ratio, spread_note, tabulate
from benchmarks.verdicts import Check, Verdict, middle, tally, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RowEntry = Entry[RowCase, RowResult]
RowRun = Run[RowCase, RowResult]


# --- cases ---

# In the order of what is lost first at a deadline: torch.compile's, powers of two, odd sizes, small ones.
COMPILED_COLUMNS = (4096, 50257, 131072)  # in one piece on chip; odd; neither
POWERS = (2048, 8192, 16384, 32768, 65536, 262144)
ODD = (3001, 10007, 32001, 100003, 151937)
SMALL = (1024, 512, 256, 128, 1000, 129)


def every_task(rows: int, columns: Sequence[int], dtypes: Sequence[str], **more: Any) -> list[RowCase]:
    sizes = [(rows, count, dtype) for count in columns for dtype in dtypes]
    return [RowCase(*size, *task, size[1] in COMPILED_COLUMNS, **more) for size in sizes for task in TASKS]


def tiny() -> Plan[RowCase]:
    """A second on a CPU; for the tests."""
    return planned(every_task(8, (64, 2049), ("float32", "bfloat16"), calls=3), rounds=2, seconds=1.0)


def cpu() -> Plan[RowCase]:
    """A minute or two on a CPU."""
    return planned(every_task(256, (128, 1000, 4096, 32768, 50257), ("float32",)), rounds=5, seconds=1.0)


def h200_rows() -> Plan[RowCase]:
    """Two to three minutes of one large GPU."""
    columns = (*COMPILED_COLUMNS, *POWERS, *ODD, *SMALL)
    return planned(every_task(4096, columns, ("bfloat16", "float32")), rounds=6, seconds=0.12)


PRESETS = {"tiny": tiny, "cpu": cpu, "h200-rows": h200_rows}


# --- kernels, compiled ahead ---

# Every number of columns has kernels of its own, and compiling them one after the other takes longer than measuring.
# Several processes fill the caches on disk of Triton and of torch.compile, where the process that measures finds them.
# Nothing depends on it: what is missing there is compiled later.
MOST_WORKERS = 16


def begin() -> None:
    """One thread in each process: they are many."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)


def build(unit: tuple[RowCase, str]) -> int:
    """Calls everybody once. What fails here fails again where it is measured, and is reported there."""
    case, name = unit
    done = 0
    with contextlib.suppress(Exception):  # such as no memory beside the other processes
        device = torch.device(name)
        problem = make_rows(case, device, calls=1)
        for contender in row_contenders(case):
            if contender.builds and contender.unavailable(device) is None:
                with contextlib.suppress(Exception):
                    make_calls(contender, problem).once()
                    done += 1
    release()
    return done


def build_all(units: Sequence[tuple[RowCase, str]], workers: int, seconds: float) -> int:
    """The number of kernel sets that were built in the given time, in as many processes."""
    ends, done = time.monotonic() + seconds, 0
    # Leaving the block ends the processes, whatever they are at.
    with multiprocessing.get_context("spawn").Pool(workers, begin) as pool:
        results = pool.imap_unordered(build, units)
        with contextlib.suppress(multiprocessing.TimeoutError):
            for _ in units:
                done += results.next(max(ends - time.monotonic(), 0.1))
    return done


# --- what is promised ---

ON_CHIP_SHARE = 0.85
BEYOND_SHARE = 0.65
LEAST_COLUMNS = 2048
MOST_TIMES = 1.05


class Promise(NamedTuple):
    """Of flce: its share of the bandwidth of a copy, or its time over that of somebody else."""

    case: RowCase
    against: str  # a contender
    title: str  # of it


RowCheck = Check[Promise]


def wanted_share(case: RowCase) -> float | None:
    if case.columns < LEAST_COLUMNS:
        return None
    return ON_CHIP_SHARE if case.on_chip else BEYOND_SHARE


def checks_of(entry: RowEntry) -> list[RowCheck]:
    ours = entry.by_name(OURS)
    checks = []
    for other in entry.results:
        at_least = other.contender == COPY
        limit = wanted_share(entry.case) if at_least else MOST_TIMES
        # Without a copy the promise is not measured; without somebody else's figure there is nothing to compare.
        if other.family in ("ours", "repeat") or limit is None or (other.median_ms is None and not at_least):
            continue
        value = None
        if ours is not None and ours.median_ms is not None and other.median_ms is not None:
            value = ours.share_of(other) if at_least else ours.median_ms / other.median_ms
        checks.append(Check(Promise(entry.case, other.contender, other.title), value, limit, at_least))
    return checks


def check_rows(runs: Sequence[RowRun]) -> list[RowCheck]:
    """In the median of the runs."""
    return middle([[check for entry in run.cases for check in checks_of(entry)] for run in runs])


# --- tables ---

LAUNCHED = "*"  # the host took part that could not be kept out


@dataclass(frozen=True)
class Slice:
    """One task in one dtype, over all numbers of columns."""

    task: str
    dtype: str
    entries: list[RowEntry]

    @property
    def title(self) -> str:
        rows = sorted({entry.case.rows for entry in self.entries})
        return f"{self.task}, {self.dtype}, {' or '.join(map(str, rows))} rows"

    @property
    def tried(self) -> dict[str, RowResult]:
        """Of each contender a result that says its title and family."""
        results = [result for entry in self.entries for result in entry.results]
        return {result.contender: result for result in results if result.status != "unavailable"}

    def results(self, contender: str) -> list[tuple[int, RowResult | None]]:
        """By the number of columns."""
        return [(entry.case.columns, entry.by_name(contender)) for entry in self.entries]

    def checks(self, checks: Sequence[RowCheck]) -> list[RowCheck]:
        """Those that are about it."""
        return [check for check in checks if (check.key.case.task, check.key.case.dtype) == (self.task, self.dtype)]


def slices(runs: Sequence[RowRun]) -> list[Slice]:
    """Of several runs the cases of the first."""
    found: dict[tuple[str, str], list[RowEntry]] = {}
    cases = runs[0].cases
    keys = [(" ".join(task), dtype) for task in TASKS for dtype in dict.fromkeys(entry.case.dtype for entry in cases)]
    for entry in sorted(cases, key=lambda entry: entry.case.columns):
        found.setdefault((entry.case.task, entry.case.dtype), []).append(entry)
    return [Slice(*key, found[key]) for key in keys if key in found]


def speed(result: RowResult | None, copy: RowResult | None) -> str:
    """GB/s, and of the copy's; marked where the host took part."""
    if result is None or result.gigabytes_per_second is None:
        return NONE
    share = "" if result.contender == COPY else f", {percent(result.share_of(copy))}"
    return gigabytes(result.gigabytes_per_second) + share + ("" if result.note is None else LAUNCHED)


def speed_table(title: str, found: Slice, notes: list[str]) -> Table:
    """Columns x contenders."""
    titles = {name: result.title for name, result in found.tried.items()}
    rows = [
        [str(entry.case.columns), *(speed(entry.by_name(name), entry.by_name(COPY)) for name in titles)]
        for entry in found.entries
    ]
    return Table(f"GB/s, of copy: {title}", ["columns", *titles.values()], rows, [*notes, spread_note(found.entries)])


def task_notes(found: Slice) -> list[str]:
    """Where figures are missing or measured in another way, and why."""
    notes: list[str] = []
    for name, tried in found.tried.items():
        title, results = tried.title, found.results(name)
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


def counts_table(runs: Sequence[RowRun]) -> Table:
    """How many promises are kept: tasks x who they are about."""
    checks = check_rows(runs)
    against = {check.key.against: check.key.title for check in sorted(checks, key=lambda c: c.key.against != COPY)}
    lines = [(f"{found.task}, {found.dtype}", found.checks(checks)) for found in slices(runs)]
    rows = [
        [line, *(tally([check for check in about if check.key.against == name]) for name in against)]
        for line, about in [*lines, ("all", checks)]
    ]
    notes = [
        "copy: share of its bandwidth, rows of 2048 columns or more; 85% where a row is at most 128 KiB, else 65%",
        "others: flce not slower by more than 5%, any number of columns",
        *median_note(runs),
        spread_note([entry for run in runs for entry in run.cases]),
    ]
    return Table(f"Rows, met: {tally(checks)}", ["", *against.values()], rows, notes)


def target_table(found: Slice, checks: Sequence[RowCheck]) -> Table:
    """What is promised at every size, and whether it is kept."""

    def value(entry: RowEntry, name: str) -> float | None:
        return next((c.value for c in checks if c.key.case == entry.case and c.key.against == name), None)

    def verdict(entry: RowEntry) -> str:
        mine = [check for check in checks if check.key.case == entry.case]
        whole = worst(check.verdict for check in mine)
        names = [check.key.title for check in mine if check.verdict is whole]
        return f"{whole.value}: {', '.join(names)}" if whole in (Verdict.missed, Verdict.nearly) else whole.value

    def share(entry: RowEntry) -> float | None:
        """Where nothing is wanted, that of the first run."""
        if wanted_share(entry.case) is not None:
            return value(entry, COPY)
        ours = entry.by_name(OURS)
        return None if ours is None else ours.share_of(entry.by_name(COPY))

    columns: Columns[RowEntry] = {
        "columns": lambda e: str(e.case.columns),
        "of copy": lambda e: percent(share(e)),
        "wanted": lambda e: percent(wanted_share(e.case)),
    }
    for name, result in found.tried.items():
        if any(check.key.against == name != COPY for check in checks):
            columns[f"time / {result.title}"] = lambda e, name=name: ratio(value(e, name))  # type: ignore[misc]
    columns["verdict"] = verdict
    return tabulate(f"{found.title}, met: {tally(checks)}", found.entries, columns, [spread_note(found.entries)])


# --- the picture ---


def panel(found: Slice) -> Panel:
    """GB/s over the number of columns, a line for each contender, and where a row fits on chip no longer."""
    series = []
    for name, tried in found.tried.items():
        speeds = [(columns, result.gigabytes_per_second) for columns, result in found.results(name) if result]
        points = [(float(columns), speed) for columns, speed in speeds if speed is not None]
        # Who was measured at few sizes says nothing of those between.
        line = "--" if name == COPY else "-" if len(points) == len(found.entries) else ":"
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(tried.title, tried.family, x, y, line))
    edge = ON_CHIP_BYTES / RowCase(1, 1, found.dtype).row_bytes
    return Panel(f"{found.task}, {found.dtype}", [*series, Series("fits on chip, up to", "floor", [edge], [], ":")])


class RowBenchmark(Benchmark[RowCase, RowResult]):
    kind = "rows"
    noun = "rows"
    case_type = RowCase
    result_type = RowResult
    presets = PRESETS
    sizes = "rows,columns"
    defaults = tuple({"operation": operation, "direction": direction} for operation, direction in TASKS)
    effort = Effort(10, 1.0)

    def entries(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """In older files a case is all tasks of one matrix."""
        found: dict[str, dict[str, Any]] = {}
        for entry in document["cases"]:
            for result in entry["results"]:
                case = entry["case"] | {name: result[name] for name in ("operation", "direction") if name in result}
                found.setdefault(str(case), {"case": case, "results": []})["results"].append(result)
        return list(found.values())

    def build_ahead(self, cases: Sequence[RowCase], device: torch.device, seconds: float) -> str | None:
        """Only for a GPU: elsewhere nothing is compiled."""
        # One size after the other, so that the largest, which need much memory, are not built at the same time.
        units = [(case, str(device)) for task in TASKS for case in cases if (case.operation, case.direction) == task]
        units.sort(key=lambda unit: not unit[0].compiled)  # what takes longest first
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
        if device.type != "cuda":
            return None
        return f"{build_all(units, workers, seconds)} sets of kernels compiled ahead, {workers} at a time"

    def measure(self, case: RowCase, device: torch.device, effort: Effort, expired: Expired) -> RowEntry:
        # Not all of it for every task: to collect everything that is loaded takes longer than most of them.
        release(everything=(case.operation, case.direction) == next(iter(TASKS)))
        problem, meter = make_rows(case, device), make_meter(device)

        def make(contender: RowContender) -> RowResult:
            return RowResult.of(contender, moved_bytes=contender.bytes(case), calls=len(problem.x))

        def enter(contender: RowContender, result: RowResult) -> Entrant:
            """Warms up; says how it is timed."""
            region = make_region(make_calls(contender, problem), device)
            result.method, result.note = region.method.value, region.note
            return Entrant(region.step, functools.partial(region.turn, meter))

        return Entry(case, compete(row_contenders(case), make, enter, meter, effort, expired))

    def case_tables(self, entry: RowEntry) -> list[Table]:
        return [speed_table(entry.case.title, Slice(entry.case.task, entry.case.dtype, [entry]), [])]

    def tables(self, run: RowRun, brief: bool) -> list[Table]:
        found = [] if brief else slices([run])
        return [*(speed_table(part.title, part, task_notes(part)) for part in found), counts_table([run])]

    def targets(self, runs: Sequence[RowRun], brief: bool) -> list[Table]:
        """First the counts, then, unless `brief`, all sizes."""
        checks = check_rows(runs)
        details = [target_table(found, found.checks(checks)) for found in ([] if brief else slices(runs))]
        return [counts_table(runs), *details]

    def closing(self, run: RowRun) -> list[Table]:
        return [counts_table([run])] if run.head["device"]["type"] == "cuda" else []

    def figure(self, run: RowRun) -> Figure:
        found = [part for part in slices([run]) if any(r.samples_ms for e in part.entries for r in e.results)]
        if not found:
            raise ValueError("the results hold no figures")
        title = f"Bandwidth of the fewest bytes possible, {run.head['device']['name']}"
        dtypes = len({part.dtype for part in found})
        scales = {"xscale": "log", "ylim": (0, None)}
        return draw([panel(part) for part in found], title, "columns", "GB/s", scales, dtypes)


ROWS = RowBenchmark()
