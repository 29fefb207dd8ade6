"""Calls that compute a loss, by whatever way labels, hidden states and heads get there."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flce
from flce.huggingface import patch_model, unpatch_model

V = 97
IDS = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
Build = Callable[..., Any]
Calls = list[dict[str, Any]]

pytestmark = pytest.mark.usefixtures("nothing_materialises")


def assert_same(stock: Any, patched: Any, loss_of: Callable[[Any], Tensor], tolerance: float = 1e-5) -> None:
    """The losses and all gradients of a stock model and a patched one."""
    losses = []
    for model in (stock, patched):
        model.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)
    for (name, want), (other, got) in zip(stock.named_parameters(), patched.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(got.grad, want.grad, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


def loss(model: Any) -> Tensor:
    found: Tensor = model(**BATCH).loss
    return found


# ------------------------------------------------------------------------------------------------------- labels


class Wrapper(nn.Module):
    """Gets a batch in one piece."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("by_name", [True, False])
def test_labels_within_a_batch(by_name: bool, kind: Any, build: Build, fused_calls: Calls) -> None:
    stock = Wrapper(build("Llama")).eval()
    patched = patch_model(copy.deepcopy(stock))

    def call(model: Any, **batch: Any) -> Any:
        return model(inputs=kind(batch)) if by_name else model(kind(batch))

    assert_same(stock, patched, lambda model: call(model, **BATCH).loss)
    with torch.no_grad():
        assert torch.equal(call(patched, **BATCH).loss, call(stock, **BATCH).loss)
        assert len(fused_calls) == 2
        assert type(call(patched, input_ids=IDS).logits) is Tensor
        assert type(call(patched, input_ids=IDS, labels=None).logits) is Tensor


@pytest.mark.parametrize("order", ["prepared, patched", "patched, prepared", "patched, prepared, unwrapped"])
def test_mixed_precision_by_accelerate(order: str, build: Build, fused_calls: Calls) -> None:
    """It keeps the class's forward within one on the instance."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    stock, patched = accelerator.prepare(build("Llama").eval()), build("Llama").eval()
    for change in order.split(", "):
        if change == "patched":
            patch_model(patched)
        elif change == "prepared":
            accelerator.prepare(patched)
        else:
            accelerator.unwrap_model(patched, keep_fp32_wrapper=False)
            accelerator.unwrap_model(stock, keep_fp32_wrapper=False)
    assert_same(stock, patched, loss, 2e-2)
    with torch.no_grad():
        torch.testing.assert_close(loss(patched), loss(stock), rtol=1e-3, atol=1e-3)
        assert len(fused_calls) == 2
        assert type(patched(input_ids=IDS).logits) is Tensor
        loss(unpatch_model(patched))
    assert len(fused_calls) == 2
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


# -------------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    """Computes head and loss of the model in a checkpoint, from labels that it is given itself."""

    def __init__(self, model: Any, reentrant: bool, only_head: bool = False) -> None:
        super().__init__()
        self.model, self.reentrant, self.only_head = model, reentrant, only_head

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def head_and_loss(self, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).flatten(0, 1), IDS.flatten())

    def forward(self, labels: Tensor | None = None) -> Tensor:
        hidden = self.model.model(input_ids=IDS).last_hidden_state
        if self.only_head:
            logits: Any = checkpoint(self.model.lm_head, hidden, use_reentrant=self.reentrant)
            return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())
        found: Any = checkpoint(self.head_and_loss, hidden, use_reentrant=self.reentrant)
        return found


def wrapped(build: Build, *args: Any) -> tuple[Any, Any]:
    stock = Checkpointed(build("Llama"), *args)
    return stock, patch_model(copy.deepcopy(stock), on_materialize="raise")


@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("labels", [IDS, None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_head_and_loss_in_a_checkpoint(
    reentrant: bool, labels: Any, training: bool, build: Build, fused_calls: Calls
) -> None:
    stock, patched = wrapped(build, reentrant)
    stock.train(training), patched.train(training)
    for _ in range(2):
        assert_same(stock, patched, lambda model: model(labels=labels))
    # In both passes or in none.
    assert len(fused_calls) == (4 if training or labels is not None else 0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::flce.huggingface.NotFusedWarning")
def test_calls_with_and_without_labels_before_backward(reentrant: bool, build: Build, fused_calls: Calls) -> None:
    """Each is computed again as it was computed first."""
    stock, patched = wrapped(build, reentrant)
    stock.eval(), patched.eval()
    for labels in ((IDS, None), (None, IDS)):
        fused_calls.clear()
        assert_same(stock, patched, lambda model, labels=labels: sum(model(labels=each) for each in labels))  # type: ignore[misc]
        assert len(fused_calls) == 2


def test_only_the_head_in_a_checkpoint(build: Build, fused_calls: Calls) -> None:
    for reentrant in (True, False):
        stock = Checkpointed(build("Llama"), reentrant, True)
        patched = patch_model(copy.deepcopy(stock), on_materialize="ignore")
        assert_same(stock, patched, lambda model: model())


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_own_loss_in_a_checkpoint(reentrant: bool, build: Build, fused_calls: Calls) -> None:
    """The first pass of a reentrant one has no gradients, as inference."""
    stock = build("Llama")
    patched = patch_model(copy.deepcopy(stock), on_materialize="raise")

    def own_loss(model: Any) -> Tensor:
        embedded = model.get_input_embeddings()(IDS)

        def run(embedded: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs_embeds=embedded).logits.flatten(0, 1), IDS.flatten())

        found: Any = checkpoint(run, embedded, use_reentrant=reentrant)
        return found

    for count in (2, 4):
        assert_same(stock, patched, own_loss)
        assert len(fused_calls) == count


def test_inference_in_training_mode_is_no_checkpoint(build: Build) -> None:
    model = patch_model(build("Llama"))
    with torch.no_grad():
        assert type(model(input_ids=IDS).logits) is Tensor
        assert type(checkpoint(lambda: model(input_ids=IDS).logits, use_reentrant=False)) is Tensor
    assert not flce.report(model).forwards
