"""Measures all contenders on a case: warm-up, then interleaved rounds (A, B, C, A, B, C, ...)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cases import Case, Effort
from benchmarks.contenders import Contender, Step
from benchmarks.measure import Meter, make_meter, no_collection, steady_heap
from benchmarks.oracle import Oracle, exactness, make_oracle
from benchmarks.problem import Problem, make_problem
from benchmarks.results import CaseResult, Result

Report = Callable[[str, float], None]  # what is being done now, and the share of the case that is done


@dataclass
class Entrant:
    """A contender that has warmed up on the case at hand."""

    result: Result
    step: Step
    spent: float = 0.0  # seconds of timed calls

    def wants_more(self, effort: Effort) -> bool:
        return not self.result.samples_ms or self.spent < effort.seconds


def run_case(
    case: Case, contenders: list[Contender], device: torch.device, effort: Effort, report: Report
) -> CaseResult:
    """Failures of a contender are part of the result; the others go on without it."""
    contenders = [
        contender
        for contender in contenders
        if contender.applies(case, device) and (case.time or contender.family != "floor")
    ]
    outcome = CaseResult(case)
    report("operands", 0.0)
    problem = make_problem(case, device)
    oracle = None
    if case.errors:
        report("float64 oracle", 0.0)
        oracle = make_oracle(problem)
    meter = make_meter(device)

    turns = len(contenders) * (1 + (effort.rounds if case.time else 0))
    entrants = []
    for index, contender in enumerate(contenders):
        report(f"{contender.name}: warm-up", index / turns)
        result = Result(contender.name, contender.title, contender.family)
        outcome.results.append(result)
        step = enter(contender, problem, oracle, meter, result)
        if step is not None:
            entrants.append(Entrant(result, step))
    del oracle

    done = len(contenders)
    with steady_heap():
        for number in range(effort.rounds if case.time else 0):
            for entrant in entrants:
                if entrant.wants_more(effort):
                    report(f"{entrant.result.contender}: round {number + 1} of {effort.rounds}", done / turns)
                    take_sample(entrant, meter)
                done += 1
            entrants = [entrant for entrant in entrants if entrant.result.status == "ok"]
    report("done", 1.0)
    return outcome


def enter(contender: Contender, problem: Problem, oracle: Oracle | None, meter: Meter, result: Result) -> Step | None:
    """Prepares and warms up; fills in workspace and errors, or why there are none."""
    reason = contender.unavailable(problem.device)
    if reason is not None:
        result.status, result.reason = "unavailable", reason
        return None
    try:
        step = contender.prepare(problem)
        returned, sample = meter.warm_up(step)
        if contender.workspace_counts:
            result.workspace_bytes = sample.workspace_bytes
        if oracle is not None:
            result.errors = exactness(returned, oracle)
    except Exception as error:
        fail(result, error)
        return None
    return step


def take_sample(entrant: Entrant, meter: Meter) -> None:
    start = time.perf_counter()
    try:
        with no_collection():
            sample = meter.sample(entrant.step)
    except Exception as error:
        fail(entrant.result, error)
        return
    entrant.spent += time.perf_counter() - start
    entrant.result.samples_ms.append(sample.milliseconds)
    if sample.cpu_milliseconds is not None:
        entrant.result.cpu_samples_ms.append(sample.cpu_milliseconds)
    if sample.workspace_bytes is not None and entrant.result.workspace_bytes is not None:
        entrant.result.workspace_bytes = max(entrant.result.workspace_bytes, sample.workspace_bytes)


def fail(result: Result, error: Exception) -> None:
    """To be called while the exception is being handled."""
    traceback.print_exc(limit=-3)
    text = str(error).strip().splitlines()
    result.status = "failed"
    result.reason = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
