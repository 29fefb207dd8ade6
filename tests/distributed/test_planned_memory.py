"""Comparison of the planned memory of an FSDP2 step with the memory of a step on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers import LlamaConfig

from flce.huggingface.estimate.sharding import Sharding
from flce.huggingface.estimate.training_memory import LIBRARY_BYTES, Training, TrainingMemory, Variant
from flce.planning.device_kinds import resolve_device
from tests.distributed import training
from tests.distributed.pair import World

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
def test_a_step_in_two_processes(pair: World) -> None:
    """Compare with the smallest of three peaks: gloo holds buffers until it has sent them."""
    config = LlamaConfig(**SIZES)
    training_setup = Training(1, torch.float32, optimizer="none", sharding=Sharding("fsdp", 2))
    steps = TrainingMemory(config, training_setup, resolve_device(torch.device("cuda"), "H100", None))
    planned = steps.step(64, Variant(patched=True, checkpointing=True))
    expected = planned.peak_bytes - LIBRARY_BYTES - planned.parts["weights"]
    for peaks in pair.run(training.peaks_of_fsdp2, config, 64):
        assert min(peaks) == pytest.approx(expected, rel=0.05)
