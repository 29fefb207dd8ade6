"""How calls on rows are timed: the same procedure for every contender, ours and the copy included.

A row of 128 columns takes a microsecond of a GPU and fifty of the host. What is timed is the device:

* K calls are timed as one. Each has an input of its own, visited in turn, and their inputs together are more than four
  times the L2 cache, so that a call finds nothing there that an earlier one read. The results of all K are held until
  the last is made, so each call writes memory of its own as well. On a GPU K is also so large that the timed region
  takes a tenth of a millisecond or more; for inputs of a gigabyte that is 1. `RowCase.calls_for` says how many.
* The K calls are captured in a CUDA graph, and its replay is timed: the host takes no part ("captured").
* A contender whose call waits for the device (a number is read back, say) cannot be captured. Its K calls are launched
  one by one, while the device is busy with something else for as long as launching takes ("launched"). Where it waits,
  the device waits for the host too, which is in its time as it is in training. PyTorch's synchronization debug mode
  tells who waits; the reason is in the result.
* A backward pass by itself: K forward passes are made before, new ones for each timed region, and K backward passes are
  timed. Captured, they are two graphs in one memory pool, the first replayed before the second is timed.
* Who writes over its logits gets them anew before each timed region; that copy is not timed.
* On a CPU calls are launched.

`CallMeter` measures three times of one call, of every contender in the same way.

* Called: from before its first Python statement to when the GPU has finished; the GPU is idle before.
* Host: of the same call, until it returns. Nothing is waited for: a launch queue holds some thousand kernels.
* Alone: what the GPU needs by itself. One call is captured as above. Who waits for the device has no such figure; the
  reason is in the result.

An untimed call comes before, since any capture empties the cache of the allocator. On a CPU there is only the first.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.cases import Step
from benchmarks.measure import BenchMeter, Sample, first_line, nothing

LEAST_HEAD_START, MOST_HEAD_START = 2e-4, 5e-2  # seconds


@dataclass(frozen=True)
class Calls:
    """The calls of one timed region. `timed(i, ready)` gets what `ahead(i)` returned, which is made before."""

    count: int
    timed: Callable[[int, Any], object]
    ahead: Callable[[int], Any] = nothing
    restore: Callable[[], object] = nothing  # before every timed region

    def prepare(self) -> list[Any]:
        return [self.ahead(index) for index in range(self.count)]

    def run(self, ready: list[Any]) -> list[object]:
        return [self.timed(index, given) for index, given in enumerate(ready)]

    def once(self) -> None:
        self.timed(0, self.ahead(0))


@dataclass(frozen=True)
class Region:
    """What is timed, and what has to be done before."""

    step: Step
    method: str  # "captured" or "launched"
    before: Callable[[], object] = nothing
    note: str | None = None  # why it is not captured
    head_start: float = LEAST_HEAD_START

    @contextlib.contextmanager
    def turn(self, meter: BenchMeter) -> Iterator[None]:
        self.before()
        meter.head_start = self.head_start
        yield


def make_region(calls: Calls, device: torch.device) -> Region:
    """Also warms up: kernels are compiled here."""
    calls.once()
    if device.type != "cuda":
        return launched_region(calls)
    torch.cuda.synchronize(device)
    note = find_synchronization(calls)
    if note is not None:
        return launched_region(calls, note)
    current = torch.cuda.current_stream(device)
    try:
        region = captured_region(calls, device)
    except Exception as error:
        torch.cuda.set_stream(current)  # a capture that cannot be ended leaves its own behind
        torch.cuda.synchronize(device)
        region = launched_region(calls, f"{type(error).__name__}: {first_line(error)[:200]}")
    # The device is given work for twice the time that the host takes.
    region.before()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    region.step()
    spent = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return replace(region, head_start=min(max(2 * spent, LEAST_HEAD_START), MOST_HEAD_START))


def find_synchronization(calls: Calls) -> str | None:
    """What PyTorch says of a call that waits for the device; None of one that does not."""
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
    # Backward passes run on the stream of their forward passes: all is done on the one that captures.
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls.once()
    torch.cuda.synchronize(device)
    ready: list[Any] = [None] * calls.count
    first: torch.cuda.CUDAGraph | None = None
    if calls.ahead is not nothing:
        first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool, stream=stream):
            ready = calls.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        results = calls.run(ready)
    # The pool keeps their memory for as long as the graphs are there.
    del ready, results

    def before() -> None:
        calls.restore()
        if first is not None:
            first.replay()

    return Region(graph.replay, "captured", before)


# --- three times of a call ---

# Replays are timed as one that take so long, between these many. The head start hides that they are launched.
REPLAYED_MS, LEAST_REPLAYS, MOST_REPLAYS = 10.0, 3, 20


@dataclass
class CallMeter(BenchMeter):
    # The replay of each step that was captured, and how many are timed as one.
    replays: dict[Step, tuple[Step, int]] = field(default_factory=dict)

    def capture(self, step: Step) -> str | None:
        """Says why not, where it could not be done."""
        if self.device.type != "cuda":
            return None
        try:
            region = make_region(Calls(1, lambda index, ready: step()), self.device)
        except Exception as error:  # of being captured: it has worked before
            return f"{type(error).__name__}: {first_line(error)[:200]}"
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
        del outcome  # until here: to free it takes the host time
        alone = None
        if step in self.replays:
            replay, count = self.replays[step]
            alone = self.on_cuda(lambda: [replay() for _ in range(count)])[1].milliseconds / count
        host, called = 1e3 * (returned - start), 1e3 * (finished - start)
        return Sample(called, None, host_milliseconds=host, alone_milliseconds=alone)
