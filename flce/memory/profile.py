"""Allocated memory over a stretch of a program, allocation by allocation: `profile_memory`."""

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
    """What :func:`flce.profile_memory` has recorded. It can be pickled."""

    device: str
    """The device whose memory it is: "cpu", "cuda:0"."""
    samples: tuple[tuple[float, int], ...]
    """(seconds since the start, bytes above those allocated at the start), one after each allocation and each free, and
    one for the start and for the end. Bytes are negative where memory from before was freed (on a CUDA device)."""

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at once, above those allocated at the start."""
        return max(allocated for _, allocated in self.samples)

    @property
    def peak_seconds(self) -> float:
        """When that was first so, in seconds since the start."""
        return max(self.samples, key=lambda sample: sample[1])[0]

    @property
    def seconds(self) -> float:
        """How long it all took. Recording takes part of it."""
        return self.samples[-1][0]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws allocated bytes over time, with the peak marked.

        Args:
            path: the file to write, in the format that its name ends with (.png, .svg, .pdf, ...). Folders that are
                not there are made.

        Raises:
            ImportError: Matplotlib is not installed. ``pip install matplotlib`` brings it.
            ValueError: Matplotlib knows no such format.
        """
        self.plot_side_by_side({f"Allocated memory, {self.device}": self}, path)

    @staticmethod
    def plot_side_by_side(profiles: Mapping[str, MemoryProfile], path: str | os.PathLike[str], title: str = "") -> None:
        """Draws several profiles, each under its name, with the same scales of time and bytes.

        ``MemoryProfile.plot_side_by_side({"stock": a, "patched": b}, "memory.png")``

        Args:
            profiles: one or more, from left to right.
            path: as in :meth:`plot`.
            title: what the picture is of.

        Raises:
            ImportError, ValueError: as in :meth:`plot`; ValueError also if there is no profile.
        """
        plot.draw({name: profile.samples for name, profile in profiles.items()}, path, title)


def profile_memory(fn: Callable[[], object], *, device: str | torch.device | None = None) -> MemoryProfile:
    """Calls ``fn`` once and records all memory that PyTorch allocates and frees meanwhile.

    ::

        def step():
            model(input_ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # kernels are built and the optimizer's states made in the first
        profile = flce.profile_memory(step)
        print(profile.peak / 2**30, "GiB")
        profile.plot("memory.png")

    Bytes are those that tensors asked for. Every record of PyTorch's allocator is a sample, so no peak is missed, and a
    second run has the same bytes.

    On a CUDA device the records are those of the caching allocator, of all threads. ``torch.cuda.max_memory_allocated``
    is slightly more: it counts blocks, which are multiples of 512 bytes and up to 1 MiB larger than what was asked for.
    Times are the host's, which may run ahead of the device; the end waits for the device.

    On a CPU the records are those of PyTorch's profiler, of the calling thread. They lack what a vendor library takes
    by itself, and frees of memory that was allocated before: a step had better begin without gradients. docs/notes.md
    says why resident memory, which has both, is not what is shown.

    Args:
        fn: takes no arguments. What it returns is dropped. What it raises is raised, and recording has ended then.
        device: whose memory, a CPU or a CUDA device. None: the current CUDA device if there is one, else the CPU.

    Raises:
        TypeError: ``fn`` cannot be called.
        ValueError: ``device`` is neither a CPU nor a CUDA device of this machine.
        RuntimeError: something else is recording: ``torch.cuda.memory._record_memory_history`` on a CUDA device, a
            profiler of PyTorch on a CPU. Or the CUDA allocator is not PyTorch's own.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
    where = find_device(device, ("cuda", "cpu"))
    gc.collect()  # what is garbage by now would be freed at some time, and lower the curve
    return _on_cpu(fn) if where.type == "cpu" else _on_cuda(fn, where.index)


def _on_cpu(fn: Callable[[], object]) -> MemoryProfile:
    if private.profiler_enabled():
        # The inner one of two profilers would end the outer one.
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
    return _profile("cpu", start, end, sorted(records, key=lambda record: record[0]))


def _on_cuda(fn: Callable[[], object], index: int) -> MemoryProfile:
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RuntimeError(
            f"the CUDA allocator is '{backend}', which keeps no records: unset PYTORCH_CUDA_ALLOC_CONF, "
            "or set backend:native in it"
        )
    torch.cuda.synchronize(index)
    # Private, as all that follows: the public way to these records is a file that a browser shows.
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
    signs = {"alloc": 1, "free_requested": -1}  # as memory_allocated() counts them
    records = [(1000 * e["time_us"], signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs]
    return _profile(f"cuda:{index}", start, end, records)


def _profile(device: str, start: int, end: int, records: Iterable[tuple[int, int]]) -> MemoryProfile:
    """Records are (time, bytes) in their order, times in nanoseconds since the epoch."""
    allocated, samples = 0, [(0.0, 0)]
    for at, size in records:
        allocated += size
        # The records' clock is converted to the epoch's, which may put it some microseconds off.
        samples.append(((min(max(at, start), end) - start) / 1e9, allocated))
    samples.append(((end - start) / 1e9, allocated))
    return MemoryProfile(device, tuple(samples))
