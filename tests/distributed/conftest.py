"""Fixture of two processes, started by the first test that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pair import World


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    pytest.importorskip("transformers")
    if not dist.is_available():
        pytest.skip("PyTorch without torch.distributed")
    world = World(2, "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= 2 else "gloo")
    yield world
    world.close()
