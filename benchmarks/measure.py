"""Time and peak memory of one call; and interleaved rounds over contenders (A, B, C, B, A, C, ...).

Workspace is the peak above what was allocated before the call and above the gradients that the call returns.
On CUDA it is the caching allocator's peak, read at every timed call. On a CPU it is that of `flce.profile_memory`, of a
call of its own since recording costs time. What a vendor library allocates by itself on a CPU is not seen.
"""

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
from typing import Any, TypeVar

import torch

from benchmarks.cases import BenchCase, ContenderT, Effort, Step, StepOutcome, with_repeat
from benchmarks.runs import BenchResult, Entry
from flce.core import private
from flce.memory.profile import profile_memory

T = TypeVar("T")
CYCLES_PER_SECOND = 2e9  # of a GPU, or less; what is busy a little longer does no harm


@dataclass(frozen=True)
class Sample:
    """One call: its time, and its workspace where that could be read."""

    milliseconds: float
    workspace_bytes: int | None
    host_milliseconds: float | None = None  # until the call returned
    alone_milliseconds: float | None = None  # of the device by itself
    held_bytes: int | None = None  # allocated before the call, where that can be read
    reserved_bytes: int | None = None  # the most that the allocator had from the device, in use or not


def gradient_bytes(outcome: object) -> int:
    if not isinstance(outcome, StepOutcome):
        return 0
    gradients = (outcome.input_grad, outcome.weight_grad, *outcome.others)
    return sum(g.numel() * g.element_size() for g in gradients if g is not None)


def nothing(*ignored: object) -> None:
    pass


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@dataclass
class BenchMeter:
    """On CUDA events, and the peak of the caching allocator; on a CPU perf_counter and the profiler.

    The device first does unmeasured work for `head_start` seconds, while the host launches the call: the time of the
    host is then not measured. How long that work takes depends on the clock of a GPU, so several GPUs would not start
    the call at once. `before` is launched between the two; where it is a collective, they do.
    """

    device: torch.device
    before: Callable[[], object] = nothing
    head_start: float = 0.0

    def warm_up(self, step: Step) -> tuple[object, Sample]:
        """A call whose time does not count, but its workspace."""
        if self.device.type == "cuda":
            step()  # kernels are built and libraries take their buffers in the first
            return self.on_cuda(step)
        returned: list[object] = []
        peak = profile_memory(lambda: returned.append(step()), device="cpu").peak
        return returned[0], Sample(0.0, peak - gradient_bytes(returned[0]))

    def sample(self, step: Step) -> Sample:
        if self.device.type == "cuda":
            return self.on_cuda(step)[1]
        self.before()
        start = time.perf_counter()
        step()
        return Sample(1e3 * (time.perf_counter() - start), None)

    def on_cuda(self, step: Step) -> tuple[object, Sample]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        held = torch.cuda.memory_allocated(self.device)
        if self.head_start:
            private.cuda_sleep(int(self.head_start * CYCLES_PER_SECOND))
        self.before()
        start.record()
        outcome = step()
        end.record()
        torch.cuda.synchronize(self.device)
        workspace = torch.cuda.max_memory_allocated(self.device) - held - gradient_bytes(outcome)
        reserved = torch.cuda.max_memory_reserved(self.device)
        return outcome, Sample(start.elapsed_time(end), workspace, held_bytes=held, reserved_bytes=reserved)


def release(everything: bool = True) -> None:
    """Gives back what is no longer referred to, to the device as well; with `everything` also what `compete`
    had kept from the collector, which takes a while."""
    if everything:
        gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- contenders take turns ---


@dataclass
class Entrant:
    """A contender that has warmed up on the case at hand."""

    step: Step
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each of its timed calls
    on_sample: Callable[[Sample], None] | None = None  # takes more from a sample than is taken of all
    spent: float = 0.0  # seconds of timed calls


# The meter of a case; and what warms a contender up.
Prepared = tuple[BenchMeter, Callable[[Any, BenchResult], Entrant]]


def compete(
    case: BenchCase,
    contenders: Sequence[ContenderT],
    prepared: Prepared,
    effort: Effort,
    say: Callable[[str], object] = nothing,
) -> Entry:
    """Warms up all that apply and times them in turn, the first of ours twice. Failures become part of the results."""
    meter, enter = prepared
    contenders = [contender for contender in contenders if contender.applies(case, meter.device)]
    contenders = with_repeat(contenders) if case.is_timed else contenders
    results = [BenchResult.of(contender) for contender in contenders]
    entrants: list[tuple[BenchResult, Entrant]] = []
    # What exists now is left out of the collections before first and timed calls, which are then quick; see `release`.
    gc.freeze()
    for contender, result in zip(contenders, results, strict=True):
        if effort.expired():
            result.status, result.reason = SKIPPED
        elif (reason := contender.unavailable(meter.device)) is not None:
            result.status, result.reason = "unavailable", reason
        else:
            say(f"first call of {contender.title}")
            if (entrant := attempt(result, functools.partial(enter, contender, result))) is not None:
                entrants.append((result, entrant))
    if case.is_timed:
        gc.collect()
        gc.freeze()
        say("all in turn")
        interleave(entrants, meter, effort)
        for result in results:
            if result.status == "ok" and not result.samples_ms:
                result.status, result.reason = SKIPPED
    return Entry(case, results)


SKIPPED = "skipped", "the deadline had passed"


def interleave(entrants: list[tuple[BenchResult, Entrant]], meter: BenchMeter, effort: Effort) -> None:
    """Times every entrant once, and again in rounds as far as its seconds, and the deadline, go.

    A GPU under load is slowed down by the heat of what ran just before. From the second round on the order is
    therefore random, so that none always follows the same one; the first is in the given order, for the deadline.
    """
    order = random.Random(0)
    for _ in range(effort.rounds):
        for result, entrant in entrants:
            if effort.expired():
                return
            if not result.samples_ms or not effort.enough(entrant.spent):
                take_sample(result, entrant, meter)
        entrants = [(result, entrant) for result, entrant in entrants if result.status == "ok"]
        order.shuffle(entrants)


def take_sample(result: BenchResult, entrant: Entrant, meter: BenchMeter) -> None:
    def measure() -> Sample:
        with entrant.turn():
            gc.collect()  # garbage goes before a timed call, not during it
            gc.disable()
            try:
                sample = meter.sample(entrant.step)
            finally:
                gc.enable()
        if entrant.on_sample is not None:
            entrant.on_sample(sample)
        return sample

    start = time.perf_counter()
    sample = attempt(result, measure)
    if sample is None:
        return
    entrant.spent += time.perf_counter() - start
    for samples, milliseconds in (
        (result.samples_ms, sample.milliseconds),
        (result.host_samples_ms, sample.host_milliseconds),
        (result.alone_samples_ms, sample.alone_milliseconds),
    ):
        if milliseconds is not None:
            samples.append(milliseconds)
    if sample.workspace_bytes is not None and result.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes, sample.workspace_bytes)


class UnplannedError(Exception):
    """No plan keeps the budget of a contender: that is a finding, and no failure."""


def attempt(result: BenchResult, work: Callable[[], T]) -> T | None:
    """What `work` returns; or None, where an exception of it became part of the result."""
    try:
        return work()
    except Exception as error:
        first = first_line(error)
        if isinstance(error, UnplannedError):
            result.status, result.reason = "unplanned", first
            return None
        if isinstance(error, torch.OutOfMemoryError):
            # What follows of the message are numbers of processes and advice.
            result.status, first = "oom", first.partition(" GPU ")[0]
        else:
            traceback.print_exc(limit=-3)
            result.status = "failed"
        result.reason = f"{type(error).__name__}: {first}"[:300]
    release(everything=False)  # now that the exception is gone, which held on to the frames that it came through
    return None
