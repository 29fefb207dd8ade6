"""Peaks that ``flce plan`` tells, against those of real training steps on the GPU that is here."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="models")

import transformers

from flce import patch_model
from flce.huggingface.estimate.training_memory import VARIANTS, Training, TrainingMemory, Variant
from flce.planning.device_kinds import described

pytestmark = pytest.mark.gpu

LENGTH, BATCH = 2048, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 64000,
        "sliding_window": 1024,
    },
    "gpt2": {"n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": LENGTH},
}
PURE = Training(BATCH, torch.bfloat16)
MIXED = Training(BATCH, torch.float32, torch.bfloat16, optimizer="adamw-foreach")


def measured_peak(config: Any, training: Training, variant: Variant) -> int:
    """The peak of the second of two steps: the first makes the optimizer's state."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=training.dtype).train()
    if variant.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant.patched:
        patch_model(model)
    fused = training.optimizer == "adamw"
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    ids = torch.randint(model.config.vocab_size, (training.batch_size, LENGTH), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        mixed = training.autocast is not None
        with torch.autocast("cuda", training.autocast) if mixed else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("training", [PURE, MIXED], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_peaks(kind: str, variant: Variant, training: Training) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    device = described(torch.device("cuda"), None, None)
    said = TrainingMemory(config, training, device).step(LENGTH, variant)
    measured = measured_peak(config, training, variant)
    print(f"{kind}, {variant}: said {said.peak_bytes / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert said.peak_bytes == pytest.approx(measured, rel=0.1)
    assert said.fused == variant.patched
