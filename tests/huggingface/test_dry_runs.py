"""Patched models on the meta device, and counts of FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.huggingface.head_call import HeadCall, StaleLogitsError
from flce.huggingface.usage import Usage
from tests.helpers import count_flops, skip_where_old_transformers_fails
from tests.huggingface.scripts import Build


def own_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("ignore::flce.huggingface.MaterializedLogitsWarning")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_flops_of_a_training_step(name: str, own: bool, build: Build) -> None:
    """The count equals the stock model's, whether or not the loss is fused under the hooks of the counter."""
    model = build(name)
    ids = torch.randint(3, 97, (2, 7))

    def step() -> None:
        (own_loss(model(input_ids=ids).logits, ids) if own else model(input_ids=ids, labels=ids).loss).backward()

    expected = count_flops(step)
    flce.patch_model(model)
    assert count_flops(step) == expected


def test_flops_of_a_loss(build: Build, fused_calls: list[Any]) -> None:
    """The count of the loss includes the logits, because they are computed with the loss."""
    model = build("Llama")
    ids = torch.randint(3, 97, (2, 7))
    logits = model(input_ids=ids).logits
    expected = count_flops(lambda: own_loss(logits, ids).backward())
    flce.patch_model(model)
    lazy = model(input_ids=ids).logits
    assert count_flops(lambda: own_loss(lazy, ids).backward()) == expected + 2 * ids.numel() * 32 * 97
    assert len(fused_calls) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("own", [False, True])
def test_a_step_on_the_meta_device(own: bool, training: bool, build: Build, fused_calls: list[Any]) -> None:
    with torch.device("meta"):
        model = build("Llama").train(training)
        ids = torch.randint(3, 97, (2, 7))
    skip_where_old_transformers_fails(lambda: model(input_ids=ids))
    flce.patch_model(model)
    output = model(input_ids=ids) if own else model(input_ids=ids, labels=ids)
    loss = own_loss(output.logits, ids) if own else output.loss
    assert (loss.device.type, loss.dtype, loss.shape) == ("meta", torch.float32, ())
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.is_meta
        assert parameter.grad.shape == parameter.shape
    assert fused_calls or not training


def test_the_head_of_a_meta_model_is_not_read() -> None:
    """Without values, a change of the head shows only in its shape, dtype and device."""
    weight = torch.nn.Parameter(torch.empty(97, 32, device="meta"))
    call = HeadCall(weight, None, Usage(), None, None)
    call.check_unchanged(can_synchronize=True)
    weight.data = torch.empty(97, 32, device="meta", dtype=torch.bfloat16)
    with pytest.raises(StaleLogitsError, match="bfloat16"):
        call.check_unchanged(can_synchronize=True)
