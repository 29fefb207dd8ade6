"""Fixtures of two and of four processes, started by the first test that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pair import World


def new_world(size: int) -> Iterator[World]:
    pytest.importorskip("transformers")
    if not dist.is_available():
        pytest.skip("PyTorch without torch.distributed")
    world = World(size, "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo")
    yield world
    world.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    yield from new_world(2)


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    yield from new_world(4)
