"""Megatron-Core's `GPTModel` with flce's loss of vocabulary-parallel logits; megatron_train.py trains it."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

import flce


class FlceGPTModel(GPTModel):
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The loss per token, (B, S). `labels`: (B, S), `logits`: (S, B, V / tensor-parallel ranks), overwritten."""
        group = self.pg_collection.tp
        how = {"process_group": group, "vocab_size": self.vocab_size}
        return flce.cross_entropy(logits, labels.t(), reduction="none", inplace=True, **how).t()
