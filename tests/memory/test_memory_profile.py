"""Tests of `flce.profile_memory`: known allocations to the byte, the state after a recording, and the picture."""

from __future__ import annotations

import pickle
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import flce
from flce.core import devices, private
from flce.memory.plot import draw

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def allocate(device: str, *sizes: int) -> Callable[[], None]:
    """Return a function that allocates a tensor of each size in bytes and frees the tensor before it."""

    def fn() -> None:
        held = None
        for size in sizes:
            held = (held, torch.empty(size, dtype=torch.uint8, device=device))[-1]

    return fn


def held(profile: flce.MemoryProfile) -> list[int]:
    return [size for _, size in profile.samples]


# ----------------------------------------------------------------------------------------------------------- on a CPU


def test_every_allocation_and_free() -> None:
    profile = flce.profile_memory(allocate("cpu", 3 * MIB, 4 * MIB, 1 * MIB), device="cpu")
    assert held(profile) == [size * MIB for size in (0, 3, 7, 4, 5, 1, 0, 0)]
    assert profile.peak == 7 * MIB
    assert profile.device == "cpu"
    times = [seconds for seconds, _ in profile.samples]
    assert times[0] == 0
    assert times == sorted(times)
    assert profile.peak_seconds == times[2]
    assert profile.seconds == times[-1] > 0


def test_memory_of_before_is_not_counted() -> None:
    # On a CPU PyTorch does not record the free of memory that was allocated before.
    box = [torch.empty(5 * MIB, dtype=torch.uint8)]
    assert held(flce.profile_memory(box.clear, device="cpu")) == [0, 0]


def loss_step(fused: bool, device: str) -> Callable[[], None]:
    hidden = torch.randn(512, 32, device=device, requires_grad=True)
    weight = torch.randn(4096, 32, device=device, requires_grad=True)
    target = torch.randint(4096, (512,), device=device)
    options = flce.ChunkOptions(max_workspace_bytes=MIB)

    def step() -> None:
        if fused:
            loss = flce.fused_linear_cross_entropy(hidden, weight, target, options=options)
        else:
            loss = F.cross_entropy(hidden @ weight.t(), target)
        loss.backward()
        hidden.grad = weight.grad = None

    step()
    return step


def test_a_step_with_and_without_logits(torch_backend: str) -> None:
    """Check the peak of stock (logits, logarithms, gradient), and that a budget bounds the peak of flce."""
    logits, gradients = 4 * 512 * 4096, 4 * 32 * (512 + 4096)
    stock = flce.profile_memory(loss_step(False, "cpu"), device="cpu").peak
    fused = flce.profile_memory(loss_step(True, "cpu"), device="cpu").peak
    assert 2 * logits < stock < 3 * logits + gradients + 64 * KIB
    assert fused <= MIB + gradients + 64 * KIB


def test_an_error_of_the_function_ends_the_recording() -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        flce.profile_memory(fails, device="cpu")
    assert not torch._C._autograd._profiler_enabled()
    assert flce.profile_memory(allocate("cpu", KIB), device="cpu").peak == KIB


def test_inside_a_profiler() -> None:
    with torch.autograd.profiler.profile() as outer:
        with pytest.raises(RuntimeError, match="a profiler of PyTorch is running"):
            flce.profile_memory(allocate("cpu", KIB), device="cpu")
        torch.ones(3)
    assert any(event.name == "aten::ones" for event in outer.function_events)


def test_a_profiler_in_the_function() -> None:
    """Check the error: PyTorch ends the recording or refuses the second profiler."""

    def profiles() -> None:
        with torch.autograd.profiler.profile():
            torch.ones(3)

    with pytest.raises(RuntimeError, match=r"[Pp]rofiler"):
        flce.profile_memory(profiles, device="cpu")
    assert flce.profile_memory(allocate("cpu", KIB), device="cpu").peak == KIB


def test_wrong_arguments() -> None:
    for device in ("meta", "cuda:99", "abacus"):
        with pytest.raises(ValueError, match=f"there is no device '{device}' here: give one of .*cpu"):
            flce.profile_memory(allocate("cpu", KIB), device=device)
    wrong: Any = torch.ones(3)
    with pytest.raises(TypeError, match="fn must be a function without arguments, got Tensor"):
        flce.profile_memory(wrong)


# ------------------------------------------------------------------------------------------ on a simulated CUDA device


class SimulatedDevice:
    """Simulation of the functions of PyTorch that are called for a CUDA device, the second of two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording = False
        self.trace: list[dict[str, Any]] = []
        for module, name, does in (
            (devices, "list_devices", lambda: [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]),
            (torch.accelerator, "current_device_index", lambda: 1),
            (torch.cuda, "synchronize", lambda index: None),
            (torch.cuda, "get_allocator_backend", lambda: "native"),
            (private, "cuda_history_enabled", lambda: self.recording),
            (private, "record_memory_history", self.record),
            (private, "memory_snapshot", lambda: {"device_traces": [[], self.trace]}),
        ):
            monkeypatch.setattr(module, name, does, raising=False)

    def record(self, enabled: str | None, **settings: object) -> None:
        self.recording = enabled is not None

    def does(self, *actions: tuple[str, int]) -> Callable[[], None]:
        def fn() -> None:
            assert self.recording
            now = time.time_ns() // 1000
            self.trace += [{"action": action, "size": size, "time_us": now} for action, size in actions]

        return fn


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return SimulatedDevice(monkeypatch)


def test_records_of_the_cuda_allocator(simulated: SimulatedDevice) -> None:
    """Check that a free counts from its request on, and that segments are not counted."""
    fn = simulated.does(
        ("segment_alloc", 20 * MIB), ("alloc", 3 * MIB), ("alloc", MIB), ("free_requested", 3 * MIB),
        ("free_completed", 3 * MIB), ("free_requested", 9 * MIB), ("snapshot", 0),
    )  # fmt: skip
    profile = flce.profile_memory(fn)
    assert held(profile) == [0, 3 * MIB, 4 * MIB, MIB, -8 * MIB, -8 * MIB]
    assert (profile.peak, profile.device) == (4 * MIB, "cuda:1")
    assert not simulated.recording
    with pytest.raises(ZeroDivisionError):
        flce.profile_memory(lambda: 1 / 0, device="cuda:1")
    assert not simulated.recording


def test_errors_of_recording(simulated: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated.recording = True
    with pytest.raises(RuntimeError, match=r"is being recorded already: .*_record_memory_history\(None\)"):
        flce.profile_memory(simulated.does(("alloc", MIB)), device="cuda")
    assert simulated.recording
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(RuntimeError, match="the CUDA allocator is 'cudaMallocAsync', which records no history"):
        flce.profile_memory(simulated.does(("alloc", MIB)))
    assert not simulated.trace


# ------------------------------------------------------------------------------------------------------- the picture


def profile_of(*samples: tuple[float, int]) -> flce.MemoryProfile:
    return flce.MemoryProfile("cuda:0", samples)


SMALL = profile_of((0.0, 0), (0.010, 823 * MIB), (0.020, -MIB), (0.050, 0))
LARGE = profile_of((0.0, 0), (1.5, int(50.04 * GIB)), (2.0, 0))


def test_a_profile_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(SMALL)) == SMALL


def test_pictures(tmp_path: Path) -> None:
    """Check the text of a picture, the formats, and that missing folders are created."""
    matplotlib = pytest.importorskip("matplotlib")
    file = tmp_path / "deep" / "er" / "memory.svg"
    tiny = profile_of((0.0, 0), (0.010, 96 << 10), (0.020, 0))
    cases = ({"stock": tiny}, "KiB"), ({"stock": SMALL}, "MiB"), ({"stock": LARGE, "patched": SMALL}, "GiB")
    for profiles, unit in cases:
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            flce.MemoryProfile.plot_side_by_side(profiles, file, "A model")
        text = " | ".join(ET.parse(file).getroot().itertext())
        peaks = {tiny: "peak 0.09 MiB", SMALL: "peak 823 MiB", LARGE: "peak 50 GiB"}
        for part in ("A model", f"allocated since the start, {unit}", "time, ms", *profiles):
            assert part in text
        assert all(peaks[profile] in text for profile in profiles.values())
    SMALL.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="xyz"):
        SMALL.plot(tmp_path / "memory.xyz")


def test_the_curves_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check equal scales: with different scales a small peak would look large."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, file: drawn.append(self))
    draw({"a": LARGE.samples, "b": SMALL.samples}, tmp_path / "memory.png", "")
    first, second = drawn[0].axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim()
    assert first.get_ylim()[1] > 50.04  # GiB: the axis contains the peak
    assert first.get_ylim()[0] < 0  # the axis contains negative values


def test_invalid_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="profiles must have at least one profile, got none"):
        flce.MemoryProfile.plot_side_by_side({}, tmp_path / "memory.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        SMALL.plot(tmp_path / "memory.png")


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_counted_as_the_allocator_does(fused: bool) -> None:
    """Compare with the requested bytes, and with rounded blocks. Backward runs in a separate thread."""
    step = loss_step(fused, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # new blocks then have the requested sizes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    profile = flce.profile_memory(step)
    after = torch.cuda.memory_stats()
    requested, blocks = (
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated")
    )
    assert profile.peak == requested
    assert requested <= blocks <= requested + 16 * MIB
    times = [seconds for seconds, _ in profile.samples]
    assert times == sorted(times)
    assert 0 < profile.peak_seconds < profile.seconds


@pytest.mark.gpu
def test_recording_on_a_gpu_is_left_as_it_was() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    try:
        with pytest.raises(RuntimeError, match="is being recorded already"):
            flce.profile_memory(allocate("cuda", KIB))
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert flce.profile_memory(allocate("cuda", KIB)).peak == KIB


@pytest.mark.gpu
def test_memory_of_before_on_a_gpu() -> None:
    """Check the negative curve after a free of memory from before, and that other devices are not counted."""
    profile = flce.profile_memory([torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")].clear)
    assert held(profile) == [0, -5 * MIB, -5 * MIB]
    assert profile.peak == 0
    assert flce.profile_memory(allocate("cpu", MIB), device="cuda").peak == 0
    assert flce.profile_memory(allocate("cuda", MIB), device="cpu").peak < KIB
