"""What ``flce plan`` tells of a step of FSDP2, beside what such a step takes on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig

from flce.huggingface.estimate.sharding import Sharding
from flce.huggingface.estimate.training_memory import LIBRARY_BYTES, Training, TrainingMemory, Variant
from flce.planning.device_kinds import resolve_device
from tests.distributed import training
from tests.distributed.pair import World

# Weights and gradients are most of such a step.
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
    """The least of three peaks: gloo keeps buffers for as long as it is late."""
    config = LlamaConfig(**SIZES)
    how = Training(1, torch.float32, optimizer="none", sharding=Sharding("fsdp", 2))
    steps = TrainingMemory(config, how, resolve_device(torch.device("cuda"), "H100", None))
    planned = steps.step(64, Variant(patched=True, checkpointing=True))
    beside = planned.peak_bytes - LIBRARY_BYTES - planned.parts["weights"]
    for peaks in pair.run(training.peaks_of_fsdp2, config, 64):
        assert min(peaks) == pytest.approx(beside, rel=0.05)
