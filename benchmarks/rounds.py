"""Warm-up and interleaved rounds over contenders (A, B, C, B, A, C, ...), and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.cases import Effort
from benchmarks.contenders import ContenderT, Step, with_repeat
from benchmarks.measure import Meter, Sample, no_collection, nothing, release, steady_heap
from benchmarks.results import Result, ResultT

T = TypeVar("T")


@dataclass(frozen=True)
class Watch:
    """What a measurement tells its caller, and asks of it."""

    tell: Callable[[str, float], None] = nothing  # what is being done now, and the share of the case that is done
    expired: Callable[[], bool] = lambda: False  # whether the deadline has passed


@dataclass
class Entrant:
    """A contender that has warmed up on the case at hand."""

    step: Step
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each of its timed calls
    keep: Callable[[Sample], None] | None = None  # takes more from a sample than is taken of all
    spent: float = 0.0  # seconds of timed calls


def compete(
    contenders: Sequence[ContenderT],
    make: Callable[[ContenderT], ResultT],
    enter: Callable[[ContenderT, ResultT], Entrant],
    device: torch.device,
    meter: Meter,
    effort: Effort,
    watch: Watch,
    timed: bool = True,
) -> list[ResultT]:
    """Warms all up and times them in turn, the first of ours twice. Failures become part of the results."""
    contenders = with_repeat(contenders) if timed else contenders
    results = [make(contender) for contender in contenders]
    turns = len(contenders) * (1 + (effort.rounds if timed else 0))
    entrants: list[tuple[Result, Entrant]] = []
    for index, (contender, result) in enumerate(zip(contenders, results, strict=True)):
        watch.tell(f"{contender.name}: warm-up", index / turns)
        if watch.expired():
            skip(result)
            continue
        reason = contender.unavailable(device)
        if reason is not None:
            result.status, result.reason = "unavailable", reason
            continue
        entrant = attempt(result, functools.partial(enter, contender, result))
        if entrant is not None:
            entrants.append((result, entrant))
    if timed:
        interleave(entrants, meter, effort, watch, len(contenders), turns)
        for result in results:
            if result.status == "ok" and not result.samples_ms:
                skip(result)
    watch.tell("done", 1.0)
    return results


def interleave(
    entrants: list[tuple[Result, Entrant]], meter: Meter, effort: Effort, watch: Watch, done: int, turns: int
) -> None:
    """Times every entrant once, and again in rounds as far as its seconds, and the deadline, go.

    A GPU under load is slowed down by the heat of what ran just before. From the second round on the order is
    therefore random, so that nobody always follows the same one; the first is in the given order, for the deadline.
    """
    order = random.Random(0)
    with steady_heap():
        for number in range(effort.rounds):
            for result, entrant in entrants:
                if watch.expired():
                    return
                if not result.samples_ms or entrant.spent < effort.seconds:
                    watch.tell(f"{result.contender}: round {number + 1} of {effort.rounds}", done / turns)
                    take_sample(result, entrant, meter)
                done += 1
            entrants = [(result, entrant) for result, entrant in entrants if result.status == "ok"]
            order.shuffle(entrants)


def skip(result: Result) -> None:
    result.status, result.reason = "skipped", "the deadline had passed"


def take_sample(result: Result, entrant: Entrant, meter: Meter) -> None:
    def measure() -> Sample:
        with entrant.turn(), no_collection():
            sample = meter.sample(entrant.step)
        if entrant.keep is not None:
            entrant.keep(sample)
        return sample

    start = time.perf_counter()
    sample = attempt(result, measure)
    if sample is None:
        return
    entrant.spent += time.perf_counter() - start
    result.samples_ms.append(sample.milliseconds)
    if sample.cpu_milliseconds is not None:
        result.cpu_samples_ms.append(sample.cpu_milliseconds)
    if sample.workspace_bytes is not None and result.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes, sample.workspace_bytes)


def attempt(result: Result, work: Callable[[], T]) -> T | None:
    """What `work` returns; or None, where an exception of it became part of the result."""
    try:
        return work()
    except Exception as error:
        text = str(error).strip().splitlines()
        first = text[0] if text else ""
        if isinstance(error, torch.OutOfMemoryError):
            # What follows of the message are numbers of processes and advice.
            result.status, first = "oom", first.partition(" GPU ")[0]
        else:
            traceback.print_exc(limit=-3)
            result.status = "failed"
        result.reason = f"{type(error).__name__}: {first}"[:300]
    release()  # now that the exception is gone, which held on to the frames that it came through
    return None
