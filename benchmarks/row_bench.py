"""Measures the contenders on rows: for each task warm-up, then interleaved rounds. `row_calls` says how."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.cases import Effort
from benchmarks.measure import Meter, make_meter, release, steady_heap
from benchmarks.results import RowCaseResult, RowResult
from benchmarks.rounds import Entrant, Report, attempt, interleave, never, skip, skip_unmeasured
from benchmarks.row_calls import HeadStart, Region, make_region
from benchmarks.row_contenders import RowContender, make_calls, row_contenders
from benchmarks.rows import RowCase, RowProblem, Task, make_rows


def run_row_case(
    case: RowCase, device: torch.device, effort: Effort, report: Report, expired: Callable[[], bool] = never
) -> RowCaseResult:
    outcome = RowCaseResult(case)
    report("operands", 0.0)
    # One for all tasks: a collection of everything that is loaded takes longer than most of them.
    with steady_heap():
        release()
        problem = make_rows(case, device)
        head_start = HeadStart(device)
        meter = make_meter(device, head_start)
        for index, task in enumerate(case.tasks):

            def show(doing: str, share: float, index: int = index, task: Task = task) -> None:
                report(f"{task.title}: {doing}", (index + share) / len(case.tasks))

            outcome.results += run_task(problem, task, meter, head_start, effort, show, expired)
            release()  # graphs, with the memory that belongs to them
    report("done", 1.0)
    return outcome


def run_task(
    problem: RowProblem,
    task: Task,
    meter: Meter,
    head_start: HeadStart,
    effort: Effort,
    report: Report,
    expired: Callable[[], bool],
) -> list[RowResult]:
    contenders = row_contenders(problem.case, task)
    turns = len(contenders) * (1 + effort.rounds)
    results, entrants = [], []
    for index, contender in enumerate(contenders):
        report(f"{contender.name}: warm-up", index / turns)
        result = RowResult(
            contender.name,
            contender.title,
            contender.family,
            operation=task.operation.value,
            direction=task.direction.value,
            moved_bytes=contender.bytes(problem.case, task),
            calls=problem.calls,
        )
        results.append(result)
        if expired():
            skip(result)
            continue
        region = enter(contender, problem, task, result)
        if region is not None:
            entrants.append(Entrant(result, region.step, functools.partial(region.turn, head_start)))
    interleave(entrants, meter, effort, report, len(contenders), turns, expired)
    skip_unmeasured(results)
    return results


def enter(contender: RowContender, problem: RowProblem, task: Task, result: RowResult) -> Region | None:
    """Prepares and warms up; says how it is timed, or why it is not."""
    device = problem.x.device
    reason = contender.unavailable(device)
    if reason is not None:
        result.status, result.reason = "unavailable", reason
        return None

    def prepare() -> Region:
        return make_region(make_calls(contender, problem, task), device)

    region = attempt(result, prepare)
    if region is not None:
        result.method, result.note = region.method.value, region.note
    return region
