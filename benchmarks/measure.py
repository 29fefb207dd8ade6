"""Time and peak memory of one call; and interleaved rounds over contenders (A, B, C, B, A, C, ...).

Workspace is the peak above the memory that was allocated before the call and above the gradients that the call returns.
On CUDA it is the caching allocator's peak, read at every timed call. On a CPU `memory.profile_memory` records the peak
of a separate call, because recording costs time. Memory that a vendor library allocates on a CPU is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from benchmarks.cases import BenchCase, ContenderT, Effort, Step, StepOutcome, with_repeat
from benchmarks.memory import profile_memory
from benchmarks.runs import BenchResult, Entry

T = TypeVar("T")
CYCLES_PER_SECOND = 2e9  # of a GPU, or less; a slower GPU is busy a little longer, which does no harm


@dataclass(frozen=True)
class Sample:
    """One call: its time, and its workspace if it could be read."""

    milliseconds: float
    workspace_bytes: int | None
    host_milliseconds: float | None = None  # until the call returned
    alone_milliseconds: float | None = None  # of the device by itself
    held_bytes: int | None = None  # allocated before the call, if it can be read
    reserved_bytes: int | None = None  # the most that the allocator had from the device, in use or not


def gradient_bytes(outcome: object) -> int:
    if not isinstance(outcome, StepOutcome):
        return 0
    gradients = (outcome.input_grad, outcome.weight_grad, *outcome.others)
    return sum(g.numel() * g.element_size() for g in gradients if g is not None)


def do_nothing(*ignored: object) -> None:
    pass


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@dataclass
class BenchMeter:
    """On CUDA, events and the peak of the caching allocator; on a CPU, perf_counter and the profiler.

    The device first does unmeasured work for `head_start` seconds while the host launches the call, so the time of the
    host is not measured. The duration of that work depends on the clock of a GPU, so several GPUs would not start the
    call at once. `before` is launched between that work and the call. If `before` is a collective, all GPUs start at
    once.
    """

    device: torch.device
    before: Callable[[], object] = do_nothing
    head_start: float = 0.0

    def warm_up(self, step: Step) -> tuple[object, Sample]:
        """Call the step. Return its outcome, and a sample whose workspace counts and whose time does not."""
        if self.device.type == "cuda":
            step()  # the first call compiles kernels and allocates buffers of libraries
            return self.on_cuda(step)
        returned: list[object] = []
        peak = profile_memory(lambda: returned.append(step()), "cpu").peak
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
            torch.cuda._sleep(int(self.head_start * CYCLES_PER_SECOND))
        self.before()
        start.record()
        outcome = step()
        end.record()
        torch.cuda.synchronize(self.device)
        workspace = torch.cuda.max_memory_allocated(self.device) - held - gradient_bytes(outcome)
        reserved = torch.cuda.max_memory_reserved(self.device)
        return outcome, Sample(start.elapsed_time(end), workspace, held_bytes=held, reserved_bytes=reserved)


# Replays are timed together until they take this long, within these limits. The head start hides their launches.
REPLAYED_MS, LEAST_REPLAYS, MOST_REPLAYS = 10.0, 3, 20


@dataclass
class CallMeter(BenchMeter):
    """Three times of one call from an idle GPU; on a CPU only the first.

    * Called: from before the first Python statement of the call until the idle GPU has finished.
    * Host: of the same call, until it returns. The host does not wait: a launch queue holds some thousand kernels.
    * Alone: the GPU by itself. The call is captured in a CUDA graph, and its replay is timed. A call that waits for the
      device (because it reads a number back, for example) cannot be captured; the result has the reason.
    """

    # The replay of each captured step, and the number of replays that are timed together.
    replays: dict[Step, tuple[Callable[[], object], int]] = field(default_factory=dict)

    def capture(self, step: Step) -> str | None:
        """Capture the step. Return the reason if this fails."""
        if self.device.type != "cuda":
            return None
        current = torch.cuda.current_stream(self.device)
        try:
            check_no_synchronization(step)
            replay = capture_graph(step, self.device)
        except Exception as error:  # caused by the capture: the step has worked before
            torch.cuda.set_stream(current)  # a capture that cannot be ended leaves another stream as the current one
            torch.cuda.synchronize(self.device)
            return f"{type(error).__name__}: {first_line(error)[:200]}"
        count = math.ceil(REPLAYED_MS / self.on_cuda(replay)[1].milliseconds)
        self.replays[step] = replay, min(max(count, LEAST_REPLAYS), MOST_REPLAYS)
        return None

    def sample(self, step: Step) -> Sample:
        if self.device.type != "cuda":
            return super().sample(step)
        step()  # because any capture empties the cache of the allocator
        torch.cuda.synchronize(self.device)
        self.before()
        start = time.perf_counter()
        outcome = step()
        returned = time.perf_counter()
        torch.cuda.synchronize(self.device)
        finished = time.perf_counter()
        del outcome  # not earlier, because freeing it takes time of the host
        alone = None
        if step in self.replays:
            replay, count = self.replays[step]
            alone = self.on_cuda(lambda: [replay() for _ in range(count)])[1].milliseconds / count
        host, called = 1e3 * (returned - start), 1e3 * (finished - start)
        return Sample(called, None, host_milliseconds=host, alone_milliseconds=alone)


def check_no_synchronization(step: Step) -> None:
    """Raise PyTorch's error if the step waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def capture_graph(step: Step, device: torch.device) -> Callable[[], object]:
    """Return the replay of the captured step, whose results stay in the memory of the graph."""
    # Backward passes run on the stream of their forward passes, so everything runs on the stream of the capture.
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def release(everything: bool = True) -> None:
    """Free unreferenced objects and the allocator's cache; with `everything` also objects that `compete` froze."""
    if everything:
        gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class ReadyContender:
    step: Step
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each of its timed calls
    on_sample: Callable[[Sample], None] | None = None  # records more figures of a sample
    spent: float = 0.0  # seconds of timed calls


Prepared = tuple[BenchMeter, Callable[[Any, BenchResult], ReadyContender]]  # of a case: its meter, and the warm-up


def compete(case: BenchCase, contenders: Sequence[ContenderT], prepared: Prepared, effort: Effort) -> Entry:
    """Warm up all contenders that apply and time them in turn, the first of flce twice. Results record failures."""
    meter, get_ready = prepared
    contenders = [contender for contender in contenders if contender.applies(case, meter.device)]
    contenders = with_repeat(contenders) if case.is_timed else contenders
    results = [BenchResult.of(contender) for contender in contenders]
    ready: list[tuple[BenchResult, ReadyContender]] = []
    # Collections before first and timed calls skip the objects that exist now, so they are quick; see `release`.
    gc.freeze()
    for contender, result in zip(contenders, results, strict=True):
        if effort.expired():
            result.status, result.reason = SKIPPED
        elif (reason := contender.unavailable(meter.device)) is not None:
            result.status, result.reason = "unavailable", reason
        else:
            if (warm := attempt(result, functools.partial(get_ready, contender, result))) is not None:
                ready.append((result, warm))
    if case.is_timed:
        gc.collect()
        gc.freeze()
        interleave(ready, meter, effort)
        for result in results:
            if result.status == "ok" and not result.samples_ms:
                result.status, result.reason = SKIPPED
    return Entry(case, results)


SKIPPED = "skipped", "the deadline had passed"


def interleave(ready: list[tuple[BenchResult, ReadyContender]], meter: BenchMeter, effort: Effort) -> None:
    """Time every contender once, then in rounds until its seconds or the deadline have passed.

    Heat of the previous call slows down a GPU. From the second round on the order is therefore random, so that no
    contender always follows the same one. The first round has the given order, because of the deadline.
    """
    order = random.Random(0)
    for _ in range(effort.rounds):
        for result, contender in ready:
            if effort.expired():
                return
            if not result.samples_ms or not effort.enough(contender.spent):
                take_sample(result, contender, meter)
        ready = [(result, contender) for result, contender in ready if result.status == "ok"]
        order.shuffle(ready)


def take_sample(result: BenchResult, contender: ReadyContender, meter: BenchMeter) -> None:
    def measure() -> Sample:
        with contender.turn():
            gc.collect()  # before a timed call, so that no collection runs during it
            gc.disable()
            try:
                sample = meter.sample(contender.step)
            finally:
                gc.enable()
        if contender.on_sample is not None:
            contender.on_sample(sample)
        return sample

    start = time.perf_counter()
    sample = attempt(result, measure)
    if sample is None:
        return
    contender.spent += time.perf_counter() - start
    result.samples_ms.append(sample.milliseconds)
    if sample.host_milliseconds is not None:
        result.host_samples_ms.append(sample.host_milliseconds)
    if sample.alone_milliseconds is not None:
        result.alone_samples_ms.append(sample.alone_milliseconds)
    if sample.workspace_bytes is not None and result.workspace_bytes is not None:
        result.workspace_bytes = max(result.workspace_bytes, sample.workspace_bytes)


class UnplannedError(Exception):
    """No plan fits the budget of a contender. This is a result, not a failure."""


def attempt(result: BenchResult, work: Callable[[], T]) -> T | None:
    """Return the value of `work()`. If it raises, record the exception in the result and return None."""
    try:
        return work()
    except UnplannedError as error:
        result.status, result.reason = "unplanned", first_line(error)
        return None
    except Exception as error:
        first = first_line(error)
        if isinstance(error, torch.OutOfMemoryError):
            # The rest of the message has numbers of processes and advice.
            result.status, first = "oom", first.partition(" GPU ")[0]
        else:
            traceback.print_exc(limit=-3)
            result.status = "failed"
        result.reason = f"{type(error).__name__}: {first}"[:300]
    release(everything=False)  # after the exception is gone, which referred to the frames that raised it
    return None
