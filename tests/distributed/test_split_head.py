"""Comparisons of a head that is divided over processes with the float64 oracle.

Without a GPU: four processes, and pairs of them. With one GPU: two processes share it. With more: one process for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.distributed.pair import World

from tests.distributed import dtensors, split_head

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates a GPU")


def new_world() -> World:
    gpus = torch.cuda.device_count()
    return World(gpus // 2 * 2, "cpu:gloo,cuda:nccl") if gpus >= 2 else World(2 if gpus else 4)


@pytest.fixture(scope="module")
def processes() -> Iterator[World]:
    world = new_world()
    yield world
    world.close()


def test_padded_and_empty_slices(processes: World) -> None:
    processes.run(split_head.padded_losses, "all")


def test_results_of_tokens(processes: World) -> None:
    processes.run(split_head.token_results, "all")


def test_divergences(processes: World) -> None:
    processes.run(split_head.divergences, "all")


@no_gpu
def test_schedules_of_a_gpu(processes: World) -> None:
    pytest.importorskip("triton")
    for schedules in processes.run(split_head.gpu_schedules):
        assert {"NormalizedChunks", "Unnormalized"} <= set(schedules)


@no_gpu
def test_schedules_that_borrow_memory(processes: World) -> None:
    pytest.importorskip("triton")
    processes.run(split_head.forced_schedules)


@no_gpu
def test_e4m3_products(processes: World) -> None:
    pytest.importorskip("triton")
    processes.run(split_head.e4m3_products)


@pytest.mark.parametrize(
    "function",
    [
        split_head.compiled,
        split_head.sequence_first,
        split_head.wrong_arguments,
        split_head.different_calls,
        dtensors.errors,
        dtensors.losses,
        dtensors.results_of_tokens,
        dtensors.divergences,
        dtensors.different_settings,
        split_head.gathered_weights,
        split_head.one_process,
    ],
    ids=lambda function: function.__name__,
)
def test_of_all(processes: World, function: object) -> None:
    needs_collectives = function is split_head.gathered_weights or function.__module__ == dtensors.__name__
    if needs_collectives and torch.cuda.device_count() == 1:
        pytest.skip("processes that share a GPU have no collectives for its DTensors")
    processes.run(function)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_captured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    world = World(max(1, torch.cuda.device_count() // 2 * 2), "cpu:gloo,cuda:nccl")
    try:
        world.run(split_head.captured)
    finally:
        world.close()


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="NCCL's watchdog ends processes instead of a wait")
@pytest.mark.parametrize("killed", [False, True])
def test_one_process_fails(killed: bool) -> None:
    """Check that the other processes wait no longer than the group's timeout of 2 seconds."""
    world = new_world()
    try:
        results = world.run(split_head.last_fails, killed, survivors=world.size - killed)
    finally:
        world.close()
    assert all(error != "none" and seconds < 10 for error, seconds in results)
    assert killed or "target must hold class indices" in results[-1][0]


@no_gpu
def test_random_programs(processes: World) -> None:
    """`python -m tests.search --only divided` runs more of them."""
    from tests.search import divided

    for seed in range(40):
        rng = random.Random(seed)
        call = {**divided.DEFAULTS, **divided.draw(rng, rng, "cpu")}
        found = set(processes.run(divided.program, call)) - {None, "refused"}
        assert not found, f"{found}: {divided.KIND.line(call)}"
