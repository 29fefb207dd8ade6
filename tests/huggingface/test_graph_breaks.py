"""Compiled models whose graphs end within their layers: what is above the break runs in Python, below the compiler."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce

VOCAB, HIDDEN = 97, 16


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        try:  # a frame that the compiler cannot go on with after a break: all of it runs in Python
            hidden = self.embedding(ids)
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            torch._dynamo.graph_break()
            return torch.tanh(self.layer(hidden) + positions[:, None])
        finally:
            self.calls += 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = Body(), nn.Linear(HIDDEN, VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base_model(ids))
        return logits


def test_a_break_below_the_head(fused_calls: list[Any]) -> None:
    stock = Model()
    patched = flce.patch_model(copy.deepcopy(stock), on_materialize="raise")
    torch.compiler.reset()
    compiled = torch.compile(patched, backend="eager")
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # the first call watches for products, later ones do not
        wanted, loss = (F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) for model in (stock, compiled))
        torch.testing.assert_close(loss, wanted)
        wanted.backward()
        loss.backward()
    for p, q in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert fused_calls
