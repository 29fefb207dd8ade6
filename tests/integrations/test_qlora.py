"""A model in 4 bits: what is fused of it, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Transformers' Trainer needs it")
pytest.importorskip("bitsandbytes", reason="it is in the extra `trainers`")
pytest.importorskip("peft", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import demo
import flce
import qlora as script
from flce.testing.models import VOCAB_SIZE


@pytest.mark.usefixtures("nothing_materialises")
def test_an_own_loss_is_fused():
    model = flce.patch_model(script.quantized_model(adapt_head=True)).train()
    rows = torch.stack([row["input_ids"] for row in demo.examples(2)]).to(model.device)
    loss = F.cross_entropy(model(input_ids=rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert demo.is_fused(loss)


def test_layers_are_in_4_bits_and_the_head_is_not():
    model = script.quantized_model(adapt_head=False).get_base_model()
    assert type(model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    assert type(model.lm_head).__name__ == "Linear"
    assert not model.lm_head.weight.requires_grad


def test_a_head_in_4_bits_is_refused():
    from bitsandbytes.nn import Linear4bit

    model = script.quantized_model(adapt_head=False).get_base_model()
    head = Linear4bit(64, VOCAB_SIZE, bias=False).to("cuda" if demo.has_gpu() else "cpu")
    model.set_output_embeddings(head)
    with pytest.raises(TypeError, match="quantised head"):
        flce.patch_model(model)
