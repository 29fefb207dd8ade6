"""Warm-up and interleaved rounds over contenders (A, B, C, B, A, C, ...), and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.cases import ContenderT, Effort, Step, with_repeat
from benchmarks.measure import Meter, Sample, release
from benchmarks.results import Result

T = TypeVar("T")


@dataclass
class Entrant:
    """A contender that has warmed up on the case at hand."""

    step: Step
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each of its timed calls
    keep: Callable[[Sample], None] | None = None  # takes more from a sample than is taken of all
    spent: float = 0.0  # seconds of timed calls


def compete(
    contenders: Sequence[ContenderT],
    enter: Callable[[ContenderT, Result], Entrant],
    meter: Meter,
    effort: Effort,
    timed: bool = True,
) -> list[Result]:
    """Warms all up and times them in turn, the first of ours twice. Failures become part of the results."""
    contenders = with_repeat(contenders) if timed else contenders
    results = [Result.of(contender) for contender in contenders]
    entrants: list[tuple[Result, Entrant]] = []
    for contender, result in zip(contenders, results, strict=True):
        if effort.expired():
            result.status, result.reason = SKIPPED
        elif (reason := contender.unavailable(meter.device)) is not None:
            result.status, result.reason = "unavailable", reason
        elif (entrant := attempt(result, functools.partial(enter, contender, result))) is not None:
            entrants.append((result, entrant))
    if timed:
        # What exists now is left out of the collections before timed calls, which are then quick; see `release`.
        gc.collect()
        gc.freeze()
        interleave(entrants, meter, effort)
        for result in results:
            if result.status == "ok" and not result.samples_ms:
                result.status, result.reason = SKIPPED
    return results


SKIPPED = "skipped", "the deadline had passed"


def interleave(entrants: list[tuple[Result, Entrant]], meter: Meter, effort: Effort) -> None:
    """Times every entrant once, and again in rounds as far as its seconds, and the deadline, go.

    A GPU under load is slowed down by the heat of what ran just before. From the second round on the order is
    therefore random, so that nobody always follows the same one; the first is in the given order, for the deadline.
    """
    order = random.Random(0)
    for _ in range(effort.rounds):
        for result, entrant in entrants:
            if effort.expired():
                return
            if not result.samples_ms or entrant.spent < effort.seconds:
                take_sample(result, entrant, meter)
        entrants = [(result, entrant) for result, entrant in entrants if result.status == "ok"]
        order.shuffle(entrants)


def take_sample(result: Result, entrant: Entrant, meter: Meter) -> None:
    def measure() -> Sample:
        with entrant.turn():
            gc.collect()  # garbage goes before a timed call, not during it
            gc.disable()
            try:
                sample = meter.sample(entrant.step)
            finally:
                gc.enable()
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
        first = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError):
            # What follows of the message are numbers of processes and advice.
            result.status, first = "oom", first.partition(" GPU ")[0]
        else:
            traceback.print_exc(limit=-3)
            result.status = "failed"
        result.reason = f"{type(error).__name__}: {first}"[:300]
    release(everything=False)  # now that the exception is gone, which held on to the frames that it came through
    return None
