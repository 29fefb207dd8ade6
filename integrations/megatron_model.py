"""Megatron-Core's `GPTModel` with flce's loss of vocabulary-parallel logits. megatron_train.py trains this model."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

import flce


class FlceGPTModel(GPTModel):
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each label (B, S), and overwrite the logits (S, B, V / tensor-parallel ranks)."""
        shard = {"process_group": self.pg_collection.tp, "vocab_size": self.vocab_size}
        return flce.cross_entropy(logits, labels.t(), reduction="none", inplace=True, **shard).t()
