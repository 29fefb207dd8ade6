"""What flce promises of rows on one H200, and whether a run keeps it.

Two kinds of promises, each of one task on one size and dtype, from medians of one interleaved measurement:

* Of the bandwidth of a copy of the same rows, for rows of 2,048 columns or more: 85% where a row fits on chip (it is
  at most `rows.ON_CHIP_BYTES`), 65% where it does not.
* Against everybody else, at any size: not slower by more than 5%. Who could not be measured is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import RowCaseResult, RowResult, RowRun
from benchmarks.rows import RowCase, Task

ON_CHIP_SHARE = 0.85
BEYOND_SHARE = 0.65
LEAST_COLUMNS = 2048
MOST_TIMES = 1.05

ROOF = "copy"
OURS = "ours"


@dataclass(frozen=True)
class RowCheck:
    """Of flce: its share of the bandwidth of a copy, or its time over that of somebody else."""

    case: RowCase
    task: Task
    against: str  # a contender
    title: str  # of it
    value: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.against == ROOF else self.value <= self.limit


def of_task(entry: RowCaseResult, task: Task) -> dict[str, RowResult]:
    return {
        result.contender: result
        for result in entry.results
        if (result.operation, result.direction) == (task.operation.value, task.direction.value)
    }


def copy_share(result: RowResult | None, copy: RowResult | None) -> float | None:
    """Of the bandwidth of a copy."""
    if result is None or copy is None:
        return None
    speed, roof = result.gigabytes_per_second, copy.gigabytes_per_second
    return None if speed is None or roof is None else speed / roof


def wanted_share(case: RowCase) -> float | None:
    if case.columns < LEAST_COLUMNS:
        return None
    return ON_CHIP_SHARE if case.on_chip else BEYOND_SHARE


def check_case(entry: RowCaseResult, task: Task) -> list[RowCheck]:
    results = of_task(entry, task)
    ours, copy = results.get(OURS), results.get(ROOF)
    checks = []
    wanted = wanted_share(entry.case)
    if wanted is not None and results:
        checks.append(RowCheck(entry.case, task, ROOF, "copy", copy_share(ours, copy), wanted))
    for name, other in results.items():
        if name in (OURS, ROOF) or other.median_ms is None:
            continue
        times = None if ours is None or ours.median_ms is None else ours.median_ms / other.median_ms
        checks.append(RowCheck(entry.case, task, name, other.title, times, MOST_TIMES))
    return checks


def check_rows(run: RowRun) -> list[RowCheck]:
    return [check for entry in run.cases for task in entry.case.tasks for check in check_case(entry, task)]
