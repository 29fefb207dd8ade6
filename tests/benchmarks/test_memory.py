"""Tests of memory profiles: known allocations to the byte, records of a simulated GPU, and the picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import flce
from benchmarks.memory import MemoryProfile, profile_memory

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
