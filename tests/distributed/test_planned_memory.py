"""Comparison of the planned memory of an FSDP2 step with the memory of a step on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers import AutoModelForCausalLM, LlamaConfig

import flce
from benchmarks.memory import profile_memory
from flce.huggingface.estimate.language_model import Lora, add_adapters
from flce.huggingface.estimate.training_memory import LIBRARY_BYTES, Sharding, Training, TrainingMemory, Variant
from flce.planning.plan import resolve_device
from tests.distributed.training import fsdp2, with_labels
from tests.processes import in_processes

# With these sizes most of the memory is weights and gradients.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 12000,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the memory of a CPU")
@pytest.mark.parametrize("lora", [None, Lora(8, "all-linear")], ids=["", "adapters"])
@in_processes(2)
def test_a_step_in_two_processes(lora: Lora | None) -> None:
    """Compare with the smallest of six peaks: gloo holds buffers until it has sent them."""
    config: Any = LlamaConfig(**SIZES)
    training_setup = Training(1, torch.float32, optimizer="none", sharding=Sharding("fsdp", 2), lora=lora)
    steps = TrainingMemory(config, training_setup, resolve_device(torch.device("cuda"), "H100", None))
    planned = steps.step(64, Variant(patched=True, checkpointing=True))
    model = AutoModelForCausalLM.from_config(config).train()
    if lora is not None:
        add_adapters(model, lora)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    wrapped = fsdp2(flce.patch_model(model))
    ids = torch.randint(3, 100, (1, 64))
    peaks = []
    for _ in range(6):
        peaks.append(profile_memory(lambda: with_labels(wrapped, ids).backward(), device="cpu").peak)
        model.zero_grad()
    expected = planned.peak_bytes - LIBRARY_BYTES - planned.parts["weights"]
    assert min(peaks) == pytest.approx(expected, rel=0.05)
