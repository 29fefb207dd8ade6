"""Three times of one call from an idle GPU.

* Called: from before the first Python statement of the call until the idle GPU has finished.
* Host: of the same call, until it returns. The host does not wait: a launch queue holds some thousand kernels.
* Alone: the GPU by itself. The call is captured in a CUDA graph, and its replay is timed. A call that waits for the
  device (because it reads a number back, for example) cannot be captured; the result has the reason.

An untimed call precedes, because any capture empties the cache of the allocator. On a CPU only the first time is
measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.cases import Step
from benchmarks.measure import BenchMeter, Sample, first_line

# Replays are timed together until they take this long, within these limits. The head start hides their launches.
REPLAYED_MS, LEAST_REPLAYS, MOST_REPLAYS = 10.0, 3, 20


@dataclass
class CallMeter(BenchMeter):
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
