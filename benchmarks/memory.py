"""Memory profiles: the allocated bytes of a function, at each allocation and each free, and a picture of them.

    CUDA_LAUNCH_BLOCKING=1 python -m benchmarks.memory memory-h200.png      # and memory-h200.json

draws the picture of README.md: a training step of a model, stock and patched. The host waits for each kernel, so that
the times are times of the device. On a CPU the model is tiny.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flce.core.devices import find_device
from flce.core.sizes import GIB, MIB, size_text

COLOURS = ("#d08a2e", "#1f5fa8")  # of stock and of flce; colour-blind readers can distinguish them


@dataclass(frozen=True)
class MemoryProfile:
    """Record of `profile_memory`."""

    samples: tuple[tuple[float, int], ...]
    """(seconds since the start, bytes above those allocated at the start), one after each allocation and each free, one
    for the start and one for the end."""

    @property
    def peak(self) -> int:
        return max(allocated for _, allocated in self.samples)


def profile_memory(fn: Callable[[], object], device: str | torch.device | None = None) -> MemoryProfile:
    """Call ``fn`` once and record all memory that PyTorch allocates and frees during the call.

    Bytes are the sizes that tensors request. On a CUDA device the caching allocator records the allocations of all
    threads. Times are times of the host. On a CPU PyTorch's profiler records the allocations of the calling thread, and
    no frees of memory that was allocated before: begin a step without gradients.
    """
    found = find_device(device)
    gc.collect()  # garbage would be freed during the call and lower the curve
    return _profile_cpu(fn) if found.type == "cpu" else _profile_cuda(fn, found)


def _profile_cpu(fn: Callable[[], object]) -> MemoryProfile:
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        start = time.time_ns()
        fn()
        end = time.time_ns()
    assert profiler.kineto_results is not None
    memory = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    records = [(event.start_ns(), event.nbytes()) for event in memory if event.device_type().name == "CPU"]
    return _to_profile(start, end, sorted(records, key=lambda record: record[0]))


def _profile_cuda(fn: Callable[[], object], device: torch.device) -> MemoryProfile:
    history: Any = torch.cuda.memory
    torch.cuda.synchronize(device)
    history._record_memory_history("all", context=None, stacks="python")
    try:
        start = time.time_ns()
        fn()
        torch.cuda.synchronize(device)
        end, trace = time.time_ns(), history._snapshot()["device_traces"][device.index]
    finally:
        history._record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}  # the actions that torch.cuda.memory_allocated counts
    records = [(1000 * e["time_us"], signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs]
    return _to_profile(start, end, records)


def _to_profile(start: int, end: int, records: Iterable[tuple[int, int]]) -> MemoryProfile:
    """Return the profile of records (time in nanoseconds since the epoch, bytes), sorted by time."""
    allocated, samples = 0, [(0.0, 0)]
    for at, size in records:
        allocated += size
        # The conversion of the records' clock to the epoch may be wrong by some microseconds.
        samples.append(((min(max(at, start), end) - start) / 1e9, allocated))
    return MemoryProfile((*samples, ((end - start) / 1e9, allocated)))


def draw_profiles(profiles: Mapping[str, MemoryProfile], file: Path, title: str) -> None:
    """Draw allocated bytes over time side by side, with the same scales, and mark the peaks."""
    from matplotlib.figure import Figure

    # The letters are legible in a picture of 900 pixels, the width of a README.
    figure = Figure(figsize=(4.5 * len(profiles), 3.8), dpi=200, layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, len(profiles), sharex=True, sharey=True, squeeze=False)[0]
    peak = max(profile.peak for profile in profiles.values())
    unit, name_of_unit = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
    for axes, colour, (name, profile) in zip(panels, COLOURS, profiles.items(), strict=False):
        milliseconds = [1e3 * seconds for seconds, _ in profile.samples]
        allocated = [size / unit for _, size in profile.samples]
        axes.fill_between(milliseconds, allocated, step="post", color=colour, alpha=0.3, linewidth=0)
        axes.step(milliseconds, allocated, where="post", color=colour, linewidth=1.4)
        axes.axhline(profile.peak / unit, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
        height = (profile.peak + 0.03 * peak) / unit
        axes.text(0, height, f"peak {size_text(profile.peak)}", fontsize=12, fontweight="bold", color=colour)
        axes.set_title(name, fontsize=12)
        axes.set_xlabel("time, ms", fontsize=11)
        axes.locator_params(axis="x", nbins=6)
    panels[0].set_ylabel(f"allocated since the start, {name_of_unit}", fontsize=11)
    panels[0].set_ylim(top=1.16 * peak / unit)  # room for the label above the peak
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main(picture: Path) -> None:
    from benchmarks.models import SHORT, TINY, TrainingStep, build, make_batch, ours  # which import this module
    from benchmarks.runs import describe_run

    device = find_device(None)
    case = SHORT if device.type == "cuda" else TINY
    model, batch = build(case, device), make_batch(case, device)
    profiles = {}
    for name, applied in (("stock", contextlib.nullcontext), ("flce.patch_model(model)", ours)):
        with applied(model):
            step = TrainingStep(model, None, batch)
            step()
            profiles[name] = profile_memory(step, device)
    head = describe_run(device, "python -m benchmarks.memory", sys.argv[1:])
    draw_profiles(profiles, picture, f"{case.title}, gradient checkpointing, {head['device']['name']}")
    peaks = {name: profile.peak for name, profile in profiles.items()}
    document = {**head, "case": case.to_dict(), "peak_bytes": peaks}
    picture.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
