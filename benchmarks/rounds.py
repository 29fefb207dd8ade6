"""Interleaved rounds over contenders (A, B, C, B, A, C, ...), and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.cases import Effort
from benchmarks.contenders import Step
from benchmarks.measure import Meter, Sample, no_collection, release, steady_heap
from benchmarks.results import Measurement

Report = Callable[[str, float], None]  # what is being done now, and the share of the case that is done

T = TypeVar("T")


@dataclass
class Entrant:
    """A contender that has warmed up on the case at hand."""

    result: Measurement
    step: Step
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each of its timed calls
    keep: Callable[[Sample], None] | None = None  # takes more from a sample than is taken of all
    spent: float = 0.0  # seconds of timed calls

    def wants_more(self, effort: Effort) -> bool:
        return not self.result.samples_ms or self.spent < effort.seconds


def never() -> bool:
    return False


def interleave(
    entrants: list[Entrant],
    meter: Meter,
    effort: Effort,
    report: Report,
    turns_before: int,
    turns: int,
    expired: Callable[[], bool] = never,
) -> None:
    """Times every entrant once, and again in rounds as far as its seconds, and the deadline, go.

    A GPU under load is slowed down by the heat of what ran just before. From the second round on the order is
    therefore random, so that nobody always follows the same one; the first is in the given order, for the deadline.
    """
    done = turns_before
    order = random.Random(0)
    with steady_heap():
        for number in range(effort.rounds):
            for entrant in entrants:
                if expired():
                    return
                if entrant.wants_more(effort):
                    report(f"{entrant.result.contender}: round {number + 1} of {effort.rounds}", done / turns)
                    take_sample(entrant, meter)
                done += 1
            entrants = [entrant for entrant in entrants if entrant.result.status == "ok"]
            order.shuffle(entrants)


def skip(result: Measurement) -> None:
    result.status, result.reason = "skipped", "the deadline had passed"


def skip_unmeasured(results: Iterable[Measurement]) -> None:
    """Says of those that the deadline left without a timed call why they have none."""
    for result in results:
        if result.status == "ok" and not result.samples_ms:
            skip(result)


def take_sample(entrant: Entrant, meter: Meter) -> None:
    result = entrant.result

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


def attempt(result: Measurement, work: Callable[[], T]) -> T | None:
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
