"""A head that is divided over processes, against the float64 oracle: 4 processes, and 2 of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed import split_head
from tests.distributed.pair import World

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a GPU where there is none")


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


@pytest.mark.parametrize("group", ["all", "pair"])
def test_losses(four: World, group: str) -> None:
    four.run(split_head.losses, group)


@pytest.mark.parametrize("group", ["all", "pair"])
def test_results_of_tokens(four: World, group: str) -> None:
    four.run(split_head.token_results, group)


@no_gpu
def test_schedules_of_a_gpu(four: World) -> None:
    pytest.importorskip("triton")
    for taken in four.run(split_head.gpu_schedules):
        assert {"NormalizedChunks", "Unnormalized"} <= set(taken)


@no_gpu
def test_schedules_that_lend_memory(four: World) -> None:
    pytest.importorskip("triton")
    four.run(split_head.forced_schedules)


@pytest.mark.parametrize(
    "function",
    [
        split_head.compiled,
        split_head.repeatable,
        split_head.sequence_first,
        split_head.wrong_arguments,
        split_head.dtensors,
        split_head.as_without_processes,
    ],
    ids=lambda function: function.__name__,
)
def test_of_four(four: World, function: object) -> None:
    four.run(function)  # type: ignore[arg-type]


def test_one_process_raises() -> None:
    """The others wait no longer than the group's timeout."""
    world = World(4)
    try:
        said = world.run(split_head.one_raises)
    finally:
        world.close()
    assert "process_group needs class-index targets" in said[2] or "TypeError" in said[2] or "ValueError" in said[2]
    assert all(text != "none" for text in said)
