"""Timing of calls on rows, the same procedure for every contender: flce, the copy and peers.

A row of 128 columns takes a microsecond of a GPU and fifty microseconds of the host. The time of the device is
measured:

* K calls are timed together (`RowCase.calls_for`). Each call has a separate input. All inputs together are more than
  four times the L2 cache, so no call finds its input in the cache. The results of all calls are stored until the last.
* "captured": the K calls are captured in a CUDA graph, and its replay is timed. Of a backward pass alone, the K forward
  passes are another graph in the same memory pool, which is replayed before.
* "launched": the K calls are launched one by one, while the device is busy with other work. This holds on a CPU, and
  for calls that wait for the device, which cannot be captured. PyTorch's synchronization debug mode finds such calls;
  the result has the reason. The waiting is part of their time, as in training.
* If a contender overwrites its logits, they are restored before each timed region.

`CallMeter` measures three times of one call, after an untimed call, because any capture empties the allocator's cache:

* Called: from before the first Python statement of the call until the idle GPU has finished.
* Host: of the same call, until it returns. The host does not wait: a launch queue holds some thousand kernels.
* Alone: the GPU by itself, captured as above. If the call cannot be captured, the result has the reason.

On a CPU only the first time is measured.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cases import Step
from benchmarks.measure import BenchMeter, Sample, do_nothing, first_line

# Seconds for which the device is busy while the host launches a graph, or a thousand calls.
GRAPH_HEAD_START, CALLS_HEAD_START = 2e-3, 5e-2


@dataclass(frozen=True)
class Calls:
    """The calls of one timed region. `timed(i, ready)` gets the value that `ahead(i)` returned before."""

    count: int
    timed: Callable[[int, Any], object]
    ahead: Callable[[int], Any] = do_nothing
    restore: Callable[[], object] = do_nothing  # before every timed region

    def prepare(self) -> list[Any]:
        return [self.ahead(index) for index in range(self.count)]

    def run(self, ready: list[Any]) -> list[object]:
        return [self.timed(index, given) for index, given in enumerate(ready)]

    def once(self) -> None:
        self.timed(0, self.ahead(0))


@dataclass(frozen=True)
class Region:
    """A timed step, and the untimed work before it."""

    step: Step
    method: str  # "captured" or "launched"
    before: Callable[[], object] = do_nothing
    note: str | None = None  # why it is not captured

    @contextlib.contextmanager
    def turn(self, meter: BenchMeter) -> Iterator[None]:
        self.before()
        meter.head_start = GRAPH_HEAD_START if self.method == "captured" else CALLS_HEAD_START
        yield


def make_region(calls: Calls, device: torch.device) -> Region:
    """Return the timed region. Its first call compiles kernels."""
    calls.once()
    if device.type != "cuda":
        return launched_region(calls)
    torch.cuda.synchronize(device)
    current = torch.cuda.current_stream(device)
    try:
        note = find_synchronization(calls)
        return captured_region(calls, device) if note is None else launched_region(calls, note)
    except Exception as error:  # caused by the capture: the call has worked before
        torch.cuda.set_stream(current)  # a capture that cannot be ended leaves another stream as the current one
        torch.cuda.synchronize(device)
        return launched_region(calls, f"{type(error).__name__}: {first_line(error)[:200]}")


def find_synchronization(calls: Calls) -> str | None:
    """Return PyTorch's message about a call that waits for the device; None if it does not wait."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls.once()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return first_line(error)[:200]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def launched_region(calls: Calls, note: str | None = None) -> Region:
    ready: list[Any] = []

    def before() -> None:
        ready.clear()  # first, because it may be large
        calls.restore()
        ready.extend(calls.prepare())

    return Region(lambda: calls.run(ready), "launched", before, note)


def captured_region(calls: Calls, device: torch.device) -> Region:
    # Backward passes run on the stream of their forward passes, so everything runs on the stream of the capture.
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls.once()
    torch.cuda.synchronize(device)
    ready: list[Any] = [None] * calls.count
    first: torch.cuda.CUDAGraph | None = None
    if calls.ahead is not do_nothing:
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool, stream=stream):
            ready = calls.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        results = calls.run(ready)
    del ready, results  # the pool holds their memory as long as the graphs exist

    def before() -> None:
        calls.restore()
        if first is not None:
            first.replay()

    return Region(graph.replay, "captured", before)


# Replays are timed together until they take this long, within these limits. The head start hides their launches.
REPLAYED_MS, LEAST_REPLAYS, MOST_REPLAYS = 10.0, 3, 20


@dataclass
class CallMeter(BenchMeter):
    # The replay of each captured step, and the number of replays that are timed together.
    replays: dict[Step, tuple[Step, int]] = field(default_factory=dict)

    def capture(self, step: Step) -> str | None:
        """Capture the step. Return the reason if this fails."""
        if self.device.type != "cuda":
            return None
        region = make_region(Calls(1, lambda index, ready: step()), self.device)
        if region.method == "captured":
            count = math.ceil(REPLAYED_MS / self.on_cuda(region.step)[1].milliseconds)
            self.replays[step] = region.step, min(max(count, LEAST_REPLAYS), MOST_REPLAYS)
        return region.note

    def sample(self, step: Step) -> Sample:
        if self.device.type != "cuda":
            return super().sample(step)
        step()
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
