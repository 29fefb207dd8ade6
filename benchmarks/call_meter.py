"""Three times of a call, of every contender in the same way.

* Called: from before its first Python statement to when the GPU has finished; the GPU is idle before.
* Host: of the same call, until it returns. Nothing is waited for: a launch queue holds some thousand kernels.
* Alone: what the GPU needs by itself. One call is captured in a CUDA graph, and its replays are timed. Who waits for
  the device cannot be captured and has no such figure; the reason is in the result.

An untimed call comes before, since any capture empties the cache of the allocator. On a CPU there is only
the first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from benchmarks.cases import Step
from benchmarks.measure import BenchMeter, Sample, first_line
from benchmarks.row_calls import Calls, make_region

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
