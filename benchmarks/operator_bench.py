"""Measures all contenders on a case: warm-up, then interleaved rounds (A, B, C, B, A, C, ...)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.cases import Case, Effort
from benchmarks.contenders import Contender, Step
from benchmarks.measure import Meter, make_meter, nothing, release
from benchmarks.oracle import Oracle, exactness, make_oracle
from benchmarks.problem import Problem, make_problem
from benchmarks.results import CaseResult, Result
from benchmarks.rounds import Entrant, Report, attempt, interleave, never, skip, skip_unmeasured

# The device is kept busy this long, about three milliseconds, while the host launches a timed call. In training it is
# ahead of the device as well: what is measured is the time of the device.
HEAD_START_CYCLES = 6_000_000


def run_case(
    case: Case,
    contenders: list[Contender],
    device: torch.device,
    effort: Effort,
    report: Report,
    expired: Callable[[], bool] = never,
) -> CaseResult:
    """Failures of a contender are part of the result; the others go on without it."""
    contenders = [
        contender
        for contender in contenders
        if contender.applies(case, device) and (case.time or contender.family != "floor")
    ]
    outcome = CaseResult(case)
    report("operands", 0.0)
    release()  # what other cases left in the cache
    problem = make_problem(case, device)
    oracle = None
    if case.errors:
        report("float64 oracle", 0.0)
        oracle = make_oracle(problem)
    head_start = functools.partial(torch.cuda._sleep, HEAD_START_CYCLES)
    meter = make_meter(device, head_start if device.type == "cuda" else nothing)

    turns = len(contenders) * (1 + (effort.rounds if case.time else 0))
    entrants = []
    for index, contender in enumerate(contenders):
        report(f"{contender.name}: warm-up", index / turns)
        result = Result(contender.name, contender.title, contender.family)
        outcome.results.append(result)
        if expired():
            skip(result)
            continue
        step = enter(contender, problem, oracle, meter, result)
        if step is not None:
            entrants.append(Entrant(result, step))
    del oracle

    if case.time:
        interleave(entrants, meter, effort, report, len(contenders), turns, expired)
        skip_unmeasured(outcome.results)
    report("done", 1.0)
    return outcome


def enter(contender: Contender, problem: Problem, oracle: Oracle | None, meter: Meter, result: Result) -> Step | None:
    """Prepares and warms up; fills in workspace and errors, or why there are none."""
    reason = contender.unavailable(problem.device)
    if reason is not None:
        result.status, result.reason = "unavailable", reason
        return None

    def warm_up() -> Step:
        step = contender.prepare(problem)
        returned, sample = meter.warm_up(step)
        if contender.workspace_counts:
            result.workspace_bytes = sample.workspace_bytes
        if oracle is not None:
            result.errors = exactness(returned, oracle)
        return step

    return attempt(result, warm_up)
