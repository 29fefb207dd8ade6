"""Patched models whose work is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from tests.helpers import counted_flops

Build = Callable[..., Any]


def own_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_flops_of_a_training_step(name: str, own: bool, build: Build) -> None:
    """Those of the stock model, whether or not the loss is fused under the hooks of the counter."""
    model = build(name)
    ids = torch.randint(3, 97, (2, 7))

    def step() -> None:
        (own_loss(model(input_ids=ids).logits, ids) if own else model(input_ids=ids, labels=ids).loss).backward()

    expected = counted_flops(step)
    flce.patch_model(model)
    assert counted_flops(step) == expected


def test_flops_of_a_loss(build: Build, fused_calls: list[Any]) -> None:
    """The logits of the patched model are counted when they are made, which is with the loss."""
    model = build("Llama")
    ids = torch.randint(3, 97, (2, 7))
    logits = model(input_ids=ids).logits
    expected = counted_flops(lambda: own_loss(logits, ids).backward())
    flce.patch_model(model)
    lazy = model(input_ids=ids).logits
    assert counted_flops(lambda: own_loss(lazy, ids).backward()) == expected + 2 * ids.numel() * 32 * 97
    assert len(fused_calls) == 1
