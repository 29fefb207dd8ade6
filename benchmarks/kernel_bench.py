"""Measures the pass over a tile of logits, by itself and beside a copy of as many bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.cases import Effort
from benchmarks.contenders import Step
from benchmarks.kernels import KERNEL_CONTENDERS, KernelCase, KernelContender, TileProblem, make_tile
from benchmarks.measure import Meter, make_meter, release
from benchmarks.results import KernelCaseResult, KernelResult
from benchmarks.rounds import Entrant, Report, attempt, interleave, never


def run_kernel_case(
    case: KernelCase, device: torch.device, effort: Effort, report: Report, expired: Callable[[], bool] = never
) -> KernelCaseResult:
    outcome = KernelCaseResult(case)
    report("logits", 0.0)
    release()
    problem = make_tile(case, device)
    meter = make_meter(device, problem.restore)
    contenders = [contender for contender in KERNEL_CONTENDERS if contender.applies(case)]
    turns = len(contenders) * (1 + effort.rounds)
    ready = []
    for index, contender in enumerate(contenders):
        report(f"{contender.name}: warm-up", index / turns)
        result = KernelResult(contender.name, contender.title, contender.family, moved_bytes=contender.bytes(case))
        outcome.results.append(result)
        step = attempt(result, functools.partial(warm_up, contender, problem, meter))
        if step is not None:
            ready.append(Entrant(result, step))
    interleave(ready, meter, effort, report, len(contenders), turns, expired)
    report("done", 1.0)
    return outcome


def warm_up(contender: KernelContender, problem: TileProblem, meter: Meter) -> Step:
    step = contender.prepare(problem)
    meter.warm_up(step)
    return step
