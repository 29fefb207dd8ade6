"""A vision-language model: what it sees is learned from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("PIL")
pytest.importorskip("typer", reason="the scripts' command line")

import demo
import flce
import vision_language as script


def gradient_of_the_eyes(patched: bool, batch: dict[str, Any]) -> torch.Tensor:
    model = script.tiny_model().train()
    if patched:
        flce.patch_model(model)
    model(**batch).loss.backward()
    weight: torch.Tensor = model.model.visual.patch_embed.proj.weight
    assert weight.grad is not None
    return weight.grad


def test_gradients_reach_the_pictures():
    ids = [row["input_ids"] for row in demo.examples(4, script.TOKENS)]
    batch = script.collate(list(zip(demo.excerpts(4, script.TOKENS), ids, strict=True)))
    stock, patched = gradient_of_the_eyes(False, batch), gradient_of_the_eyes(True, batch)
    assert stock.norm() > 0
    torch.testing.assert_close(patched, stock, rtol=1e-4, atol=1e-7)
