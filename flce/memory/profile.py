"""`flce.profile_memory`: the allocated memory of a function, recorded at each allocation and each free."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from flce.core import private
from flce.core.devices import find_device
from flce.memory import plot


@dataclass(frozen=True)
class MemoryProfile:
    """Record of :func:`flce.profile_memory`. Profiles can be pickled."""

    device: str
    """The device of the memory: "cpu", "cuda:0"."""
    samples: tuple[tuple[float, int], ...]
    """(seconds since the start, bytes above those allocated at the start), one after each allocation and each free,
    one for the start and one for the end. On a CUDA device bytes are negative if ``fn`` frees memory that was allocated
    before the start."""

    @property
    def peak(self) -> int:
        """The largest number of allocated bytes, above the bytes allocated at the start."""
        return max(allocated for _, allocated in self.samples)

    @property
    def peak_seconds(self) -> float:
        """The time of the first sample with the peak, in seconds since the start."""
        return max(self.samples, key=lambda sample: sample[1])[0]

    @property
    def seconds(self) -> float:
        """The duration of the call in seconds, with the time of recording."""
        return self.samples[-1][0]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw allocated bytes over time, with the peak marked.

        Args:
            path: the file to write. Its suffix sets the format (.png, .svg, .pdf, ...). Missing folders are created.

        Raises:
            ImportError: Matplotlib is not installed. ``pip install matplotlib`` installs it.
            ValueError: Matplotlib does not support the format.
        """
        self.plot_side_by_side({f"Allocated memory, {self.device}": self}, path)

    @staticmethod
    def plot_side_by_side(profiles: Mapping[str, MemoryProfile], path: str | os.PathLike[str], title: str = "") -> None:
        """Draw several profiles, each under its name, with the same scales of time and bytes.

        ``MemoryProfile.plot_side_by_side({"stock": a, "patched": b}, "memory.png")``

        Args:
            profiles: one or more, from left to right.
            path: as in :meth:`plot`.
            title: the title of the picture.

        Raises:
            ImportError, ValueError: as in :meth:`plot`; ValueError also if ``profiles`` is empty.
        """
        plot.draw({name: profile.samples for name, profile in profiles.items()}, path, title)


def profile_memory(fn: Callable[[], object], *, device: str | torch.device | None = None) -> MemoryProfile:
    """Call ``fn`` once and record all memory that PyTorch allocates and frees during the call.

    ::

        def step():
            model(input_ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the first step compiles kernels and allocates the optimizer's state
        profile = flce.profile_memory(step)
        print(profile.peak / 2**30, "GiB")
        profile.plot("memory.png")

    Bytes are the sizes that tensors request. Every record of PyTorch's allocator is a sample, so no peak is missed, and
    a second run has the same bytes.

    On a CUDA device the caching allocator records the allocations of all threads. ``torch.cuda.max_memory_allocated``
    is slightly larger: it counts blocks, which are multiples of 512 bytes and up to 1 MiB larger than the requested
    size. Times are times of the host, which may run ahead of the device. The last sample waits for the device.

    On a CPU PyTorch's profiler records the allocations of the calling thread. It does not record memory that a vendor
    library allocates by itself, nor frees of memory that was allocated before: begin a step without gradients.
    Resident memory has both; benchmarks/notes.md explains why resident memory is not shown.

    Args:
        fn: a function without arguments. Its return value is dropped. An exception of ``fn`` ends the recording and is
            raised again.
        device: a CPU or a CUDA device. None: the current CUDA device if there is one, else the CPU.

    Raises:
        TypeError: ``fn`` cannot be called.
        ValueError: ``device`` is neither a CPU nor a CUDA device of this machine.
        RuntimeError: memory is being recorded already, by ``torch.cuda.memory._record_memory_history`` on a CUDA device
            or by a profiler of PyTorch on a CPU. Or the CUDA allocator is not PyTorch's native allocator.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
    found = find_device(device, ("cuda", "cpu"))
    gc.collect()  # garbage would be freed during the call and lower the curve
    return _profile_cpu(fn) if found.type == "cpu" else _profile_cuda(fn, found.index)


def _profile_cpu(fn: Callable[[], object]) -> MemoryProfile:
    if private.profiler_enabled():
        # If two profilers are nested, the end of the inner profiler ends the outer profiler.
        raise RuntimeError("a profiler of PyTorch is running: call flce.profile_memory outside of it")
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        start = time.time_ns()
        fn()
        end = time.time_ns()
        if not private.profiler_enabled():
            raise RuntimeError("fn has ended the profiler that records memory: use no profiler of PyTorch in it")
    assert profiler.kineto_results is not None
    records = [
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    return _to_profile("cpu", start, end, sorted(records, key=lambda record: record[0]))


def _profile_cuda(fn: Callable[[], object], index: int) -> MemoryProfile:
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RuntimeError(
            f"the CUDA allocator is '{backend}', which records no history: unset PYTORCH_CUDA_ALLOC_CONF, "
            "or set backend:native in it"
        )
    torch.cuda.synchronize(index)
    # The history is private API. The public API writes only a file for a browser.
    if private.cuda_history_enabled():
        raise RuntimeError(
            "CUDA memory is being recorded already: end that first with torch.cuda.memory._record_memory_history(None)"
        )
    private.record_memory_history("all", context=None, stacks="python")
    try:
        start = time.time_ns()
        fn()
        torch.cuda.synchronize(index)
        end = time.time_ns()
        trace = private.memory_snapshot()["device_traces"][index]
    finally:
        private.record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}  # the actions that torch.cuda.memory_allocated counts
    records = [(1000 * e["time_us"], signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs]
    return _to_profile(f"cuda:{index}", start, end, records)


def _to_profile(device: str, start: int, end: int, records: Iterable[tuple[int, int]]) -> MemoryProfile:
    """Return the profile of records (time in nanoseconds since the epoch, bytes), sorted by time."""
    allocated, samples = 0, [(0.0, 0)]
    for at, size in records:
        allocated += size
        # The conversion of the records' clock to the epoch may be wrong by some microseconds.
        samples.append(((min(max(at, start), end) - start) / 1e9, allocated))
    samples.append(((end - start) / 1e9, allocated))
    return MemoryProfile(device, tuple(samples))
