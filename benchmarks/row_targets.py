"""What flce promises of rows on one H200, and whether runs keep it.

Two kinds of promises, each of one task on one size and dtype, from medians of one interleaved measurement:

* Of the bandwidth of a copy of the same rows, for rows of 2,048 columns or more: 85% where a row fits on chip (it is
  at most `row_problem.ON_CHIP_BYTES`), 65% where it does not.
* Against everybody else, at any size: not slower by more than 5%. Who could not be measured is not compared.

`verdicts` says when a target counts as met.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from benchmarks.results import Entry, Run
from benchmarks.row_contenders import COPY, OURS
from benchmarks.row_problem import RowCase, RowResult, Task
from benchmarks.verdicts import Check, middle

RowEntry = Entry[RowCase, RowResult]
RowRun = Run[RowCase, RowResult]

ON_CHIP_SHARE = 0.85
BEYOND_SHARE = 0.65
LEAST_COLUMNS = 2048
MOST_TIMES = 1.05


@dataclass(frozen=True, kw_only=True)
class RowCheck(Check):
    """Of flce: its share of the bandwidth of a copy, or its time over that of somebody else."""

    case: RowCase
    task: Task
    against: str  # a contender
    title: str = ""  # of it

    @property
    def key(self) -> Hashable:
        return self.case, self.task, self.against


def of_task(entry: RowEntry, task: Task) -> dict[str, RowResult]:
    return {result.contender: result for result in entry.results if result.task == task.title}


def wanted_share(case: RowCase) -> float | None:
    if case.columns < LEAST_COLUMNS:
        return None
    return ON_CHIP_SHARE if case.on_chip else BEYOND_SHARE


def check_task(entry: RowEntry, task: Task) -> list[RowCheck]:
    results = of_task(entry, task)
    ours = results.get(OURS)
    checks = []
    for name, other in results.items():
        at_least = name == COPY
        limit = wanted_share(entry.case) if at_least else MOST_TIMES
        # Without a copy the promise is not measured; without somebody else's figure there is nothing to compare.
        if other.family in ("ours", "repeat") or limit is None or (other.median_ms is None and not at_least):
            continue
        value = None
        if ours is not None and ours.median_ms is not None and other.median_ms is not None:
            value = ours.share_of(other) if at_least else ours.median_ms / other.median_ms
        check = RowCheck(value=value, limit=limit, at_least=at_least, case=entry.case, task=task, against=name)
        checks.append(replace(check, title=other.title))
    return checks


def check_rows(runs: Sequence[RowRun]) -> list[RowCheck]:
    """In the median of the runs."""
    entries = [[(entry, task) for entry in run.cases for task in entry.case.tasks] for run in runs]
    return middle([[check for entry, task in pairs for check in check_task(entry, task)] for pairs in entries])
