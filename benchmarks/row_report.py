"""Tables of what was measured on rows: bandwidths, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.grid import VERDICTS, Grid, gigabytes, percent
from benchmarks.results import RowCaseResult, RowResult, RowRun
from benchmarks.row_targets import OURS, ROOF, RowCheck, check_case, check_rows, copy_share, of_task, wanted_share
from benchmarks.rows import TASKS, Task

LAUNCHED = "*"


@dataclass(frozen=True)
class TaskRun:
    """One task in one dtype, over all numbers of columns."""

    task: Task
    dtype: str
    entries: list[RowCaseResult]

    @property
    def title(self) -> str:
        rows = sorted({entry.case.rows for entry in self.entries})
        return f"{self.task.title}, {self.dtype}, {' or '.join(map(str, rows))} rows"

    @property
    def titles(self) -> dict[str, str]:
        """Of the contenders that were tried, by name."""
        return {
            result.contender: result.title
            for entry in self.entries
            for result in of_task(entry, self.task).values()
            if result.status != "unavailable"
        }

    @property
    def checks(self) -> list[RowCheck]:
        return [check for entry in self.entries for check in check_case(entry, self.task)]


def task_runs(run: RowRun) -> list[TaskRun]:
    found = []
    for task in TASKS:
        for dtype in dict.fromkeys(entry.case.dtype for entry in run.cases):
            entries = [entry for entry in run.cases if entry.case.dtype == dtype and task in entry.case.tasks]
            if entries:
                found.append(TaskRun(task, dtype, sorted(entries, key=lambda entry: entry.case.columns)))
    return found


def speed(result: RowResult | None, copy: RowResult | None) -> str:
    """GB/s, and of the copy's; a mark where the host took part that could not be kept out."""
    if result is None or result.gigabytes_per_second is None:
        return "-"
    text = gigabytes(result.gigabytes_per_second)
    if result.contender != ROOF:
        text += f", {percent(result.gigabytes_per_second, None if copy is None else copy.gigabytes_per_second)}"
    return text + ("" if result.note is None else LAUNCHED)


def task_grid(found: TaskRun) -> Grid:
    """Columns x contenders."""
    titles = found.titles
    rows = []
    for entry in found.entries:
        results = of_task(entry, found.task)
        cells = [speed(results.get(name), results.get(ROOF)) for name in titles]
        rows.append([str(entry.case.columns), *cells])
    return Grid(f"GB/s, of copy: {found.title}", ["columns", *titles.values()], rows, task_notes(found))


def task_notes(found: TaskRun) -> list[str]:
    """Where figures are missing or measured in another way, and why."""
    tried = len(found.entries)
    notes: list[str] = []
    for name, title in found.titles.items():
        results = [(entry.case.columns, of_task(entry, found.task).get(name)) for entry in found.entries]
        sizes = [columns for columns, result in results if result is not None]
        if len(sizes) < tried:
            notes.append(f"{title} ran at {numbers(sizes)} columns only")
        reasons: dict[str, list[int]] = {}
        for columns, result in results:
            if result is not None and result.note is not None:
                reasons.setdefault(f"{LAUNCHED} {title} {result.method}, not captured: {result.note}", []).append(
                    columns
                )
            if result is not None and result.status != "ok":
                reasons.setdefault(f"{title} {result.status}: {result.reason}", []).append(columns)
        notes += [
            reason if len(sizes) == tried else f"{reason} ({numbers(sizes)} columns)"
            for reason, sizes in reasons.items()
        ]
    return notes


def numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def task_grids(run: RowRun) -> list[Grid]:
    return [task_grid(found) for found in task_runs(run)]


def case_grid(entry: RowCaseResult) -> Grid:
    """Tasks x contenders, of one matrix: for the terminal, while the others are measured."""
    tasks = {task: of_task(entry, task) for task in entry.case.tasks}
    titles = {
        result.contender: result.title
        for results in tasks.values()
        for result in results.values()
        if result.status != "unavailable"
    }
    rows = [
        [task.title, *(speed(results.get(name), results.get(ROOF)) for name in titles)]
        for task, results in tasks.items()
    ]
    return Grid(f"GB/s, of copy: {entry.case.title}", ["", *titles.values()], rows, [])


def count(checks: Sequence[RowCheck]) -> str:
    return f"{sum(check.met is True for check in checks)} of {len(checks)}" if checks else "-"


def verdict_grid(run: RowRun) -> Grid:
    """How many promises are kept: tasks x who they are about."""
    checks = check_rows(run)
    against = {check.against: check.title for check in sorted(checks, key=lambda check: check.against != ROOF)}
    rows = []
    for found in task_runs(run):
        cells = [count([check for check in found.checks if check.against == name]) for name in against]
        rows.append([f"{found.task.title}, {found.dtype}", *cells])
    rows.append(["all", *(count([check for check in checks if check.against == name]) for name in against)])
    notes = [
        "copy: share of its bandwidth, rows of 2048 columns or more; 85% where a row is at most 128 KiB, else 65%",
        "others: flce not slower by more than 5%, any number of columns",
    ]
    return Grid(f"Rows: {count(checks)} met", ["", *against.values()], rows, notes)


def target_grid(found: TaskRun) -> Grid:
    """What is promised at every size, and whether it is kept."""
    checks = found.checks
    peers = {name: title for name, title in found.titles.items() if name not in (OURS, ROOF)}
    rows = []
    for entry in found.entries:
        results, verdicts = of_task(entry, found.task), check_case(entry, found.task)
        times = {check.against: check.value for check in verdicts}
        share, wanted = copy_share(results.get(OURS), results.get(ROOF)), wanted_share(entry.case)
        rows.append(
            [
                str(entry.case.columns),
                percent(share, 1.0),
                "-" if wanted is None else percent(wanted, 1.0),
                *("-" if times.get(name) is None else f"{times[name]:.2f}" for name in peers),
                verdict(verdicts),
            ]
        )
    columns = ["columns", "of copy", "wanted", *(f"time / {title}" for title in peers.values()), "verdict"]
    return Grid(f"{found.title}: {count(checks)} met", columns, rows, [])


def verdict(checks: Sequence[RowCheck]) -> str:
    missed = [check.title for check in checks if check.met is False]
    if missed:
        return f"{VERDICTS[False]}: {', '.join(missed)}"
    return VERDICTS[None if not checks or any(check.met is None for check in checks) else True]


def target_grids(run: RowRun, brief: bool = False) -> list[Grid]:
    """First the counts, then, unless `brief`, all sizes."""
    return [verdict_grid(run), *([] if brief else [target_grid(found) for found in task_runs(run)])]
