"""60 steps of training with flce and with stock PyTorch. `scripts/train_alike.py` runs 1,000 steps on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from scripts import train_alike


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: products of half precision on a CPU are slow if several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# A text that does not change: with another text the distances are others.
SMALL: dict[str, Any] = {"vocab": 512, "hidden": 32, "batch": (4, 32), "files": "LICENSE"}
STEPS, ORDERS = 60, 3


@functools.cache
def stock(dtype: str) -> list[list[float]]:
    return [train_alike.train(STEPS, dtype, "cpu", order=order, **SMALL) for order in range(ORDERS)]


@pytest.mark.parametrize("dtype, name", [("float32", "flce, vocab"), ("bfloat16", "flce"), ("float16", "flce")])
def test_trains_alike(dtype: str, name: str, torch_backend: str) -> None:
    curve = train_alike.train(STEPS, dtype, "cpu", options=train_alike.RUNS[name], **SMALL)
    assert curve[-1] < 0.85 * curve[0]
    assert train_alike.worst_share(curve, stock(dtype), stock("float32")) <= train_alike.FACTOR
    wrong = [1.03 * loss for loss in curve]
    assert train_alike.worst_share(wrong, stock(dtype), stock("float32")) > 2.0 * train_alike.FACTOR
