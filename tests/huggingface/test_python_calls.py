"""Host time of small calls, measured as the number of Python calls, which is equal in each run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from flce.huggingface import LazyLogits
from tests.helpers import python_calls

TOKENS, HIDDEN, VOCAB = 16, 32, 97


class Head(nn.Module):
    """A model that consists of its output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def operators_calls(labels: torch.Tensor) -> int:
    """Count the calls of the fused loss without a model, forward and backward."""
    hidden = torch.randn(*labels.shape, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    return python_calls(lambda: flce.fused_linear_cross_entropy(hidden, weight, labels).backward())


def test_head_and_own_loss() -> None:
    """Without the operator's calls, 274 on 2026-11-29, and 350 with a cast and a shift."""
    model = flce.patch_model(Head())
    hidden, labels = torch.randn(1, TOKENS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (1, TOKENS))

    def step() -> None:
        logits = model(hidden)
        assert type(logits) is LazyLogits
        F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)).backward()

    def shifting_step() -> None:
        logits, shifted = model(hidden).float()[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        F.cross_entropy(logits.view(-1, VOCAB), shifted.view(-1)).backward()

    assert python_calls(step) - operators_calls(labels[0]) <= 285
    assert python_calls(shifting_step) - operators_calls(labels[0, 1:]) <= 362
    assert flce.report(model).fused == 6


@pytest.mark.parametrize(
    "operation",
    [lambda z: z.double(), lambda z: z * 2.0, lambda z: z.view(-1, VOCAB), lambda z: z[:, :-1], lambda z: z.shape],
    ids=["double", "times", "view", "slice", "shape"],
)
def test_a_small_lazy_operation(operation: Callable[[Any], Any]) -> None:
    """A lazy operation calls at most 15 functions of flce; 43 on 2026-11-26."""
    model = flce.patch_model(Head())
    logits = model(torch.randn(1, TOKENS, HIDDEN, requires_grad=True))
    assert python_calls(lambda: operation(logits), within=str(Path(flce.__file__).parent)) <= 15


def test_labelled_step(build: Callable[..., Any]) -> None:
    """Calls in addition to those of stock and of the operator: 277 on 2026-11-29, 549 before."""
    ids = torch.randint(VOCAB, (1, TOKENS))

    def calls(model: Any) -> int:
        return python_calls(lambda: model(input_ids=ids, labels=ids).loss.backward())

    stock, patched = build("Llama", num_hidden_layers=1), flce.patch_model(build("Llama", num_hidden_layers=1))
    shifted = F.pad(ids[0, 1:], (0, 1), value=-100)  # as Transformers shifts labels
    assert calls(patched) - calls(stock) - operators_calls(shifted) <= 288
    assert flce.report(patched).fused == 3
