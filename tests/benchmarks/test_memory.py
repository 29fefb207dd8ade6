"""Tests of memory profiles: known allocations to the byte, records of a simulated GPU, and the picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import flce
from benchmarks.memory import MemoryProfile, draw_profiles, profile_memory
from flce.core import devices

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def allocate(device: str, *sizes: int) -> Callable[[], None]:
    """Return a function that allocates a tensor of each size in bytes and frees the tensor before it."""

    def fn() -> None:
        held = None
        for size in sizes:
            held = (held, torch.empty(size, dtype=torch.uint8, device=device))[-1]

    return fn


def held(profile: MemoryProfile) -> list[int]:
    return [size for _, size in profile.samples]


def test_every_allocation_and_free() -> None:
    profile = profile_memory(allocate("cpu", 3 * MIB, 4 * MIB, 1 * MIB), "cpu")
    assert held(profile) == [size * MIB for size in (0, 3, 7, 4, 5, 1, 0, 0)]
    assert profile.peak == 7 * MIB
    times = [seconds for seconds, _ in profile.samples]
    assert times[0] == 0
    assert times == sorted(times)
    with pytest.raises(ZeroDivisionError):
        profile_memory(lambda: 1 / 0, "cpu")
    assert profile_memory(allocate("cpu", KIB), "cpu").peak == KIB


def test_records_of_the_cuda_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a free counts from its request on, and that segments are not counted."""
    trace: list[dict[str, Any]] = []
    recording: list[object] = []

    def fn() -> None:
        assert recording == ["all"]
        actions = [("segment_alloc", 20), ("alloc", 3), ("alloc", 1), ("free_requested", 3), ("free_completed", 3)]
        for action, size in [*actions, ("free_requested", 9), ("snapshot", 0)]:
            trace.append({"action": action, "size": size * MIB, "time_us": time.time_ns() // 1000})

    monkeypatch.setattr(devices, "list_devices", lambda: [torch.device("cuda", 0), torch.device("cuda", 1)])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[], trace]})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda on, **_: recording.append(on))
    profile = profile_memory(fn)
    assert held(profile) == [size * MIB for size in (0, 3, 4, 1, -8, -8)]
    assert profile.peak == 4 * MIB
    with pytest.raises(ZeroDivisionError):
        profile_memory(lambda: 1 / 0, "cuda:1")
    assert recording == ["all", None, "all", None]


def test_the_curves_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check equal scales: with different scales a small peak would look large."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, file: drawn.append(self))
    large = MemoryProfile(((0.0, 0), (1.5, int(50.04 * GIB)), (2.0, 0)))
    small = MemoryProfile(((0.0, 0), (0.010, 823 * MIB), (0.020, -MIB), (0.050, 0)))
    draw_profiles({"stock": large, "patched": small}, tmp_path / "memory.png", "A model")
    first, second = drawn[0].axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim()
    assert first.get_ylim()[1] > 50.04  # GiB: the axis contains the peak
    assert [axes.texts[0].get_text() for axes in (first, second)] == ["peak 50 GiB", "peak 823 MiB"]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_counted_as_the_allocator_does(fused: bool) -> None:
    """Compare with the requested bytes, and with rounded blocks. Backward runs in a separate thread."""
    hidden, weight = (torch.randn(size, 32, device="cuda", requires_grad=True) for size in (512, 4096))
    target = torch.randint(4096, (512,), device="cuda")

    def step() -> None:
        if fused:
            loss = flce.fused_linear_cross_entropy(hidden, weight, target)
        else:
            loss = F.cross_entropy(hidden @ weight.t(), target)
        loss.backward()
        hidden.grad = weight.grad = None

    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # new blocks then have the requested sizes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    profile = profile_memory(step)
    after = torch.cuda.memory_stats()
    requested, blocks = (
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated")
    )
    assert profile.peak == requested
    assert requested <= blocks <= requested + 16 * MIB
