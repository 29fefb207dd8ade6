"""The peak memory of a stretch of a program, by the measure that its device has."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


class PeakMemory:
    """Bytes taken at the most, above those held when this object was made.

    On a GPU these are the bytes of PyTorch's allocator. PyTorch keeps no such account on the CPU, so there
    it is what the operating system counts: the process's peak resident memory. That takes in whatever the
    process does, so each run of the demo has a process of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            # Linux forgets the peak so far, where it lets us; else a peak from before (loading a checkpoint)
            # hides what does not rise above it, for both runs alike.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self.before = psutil.Process().memory_info().rss

    def peak(self) -> int:
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device) - self.before
        return _peak_resident_bytes() - self.before


def _peak_resident_bytes() -> int:
    if sys.platform == "linux":
        # Not getrusage(): its figure is handed down from the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS
