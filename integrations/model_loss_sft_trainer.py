"""TRL's `SFTTrainer` with the loss that the model computes, which flce fuses; trl_sft.py trains with it."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from trl import SFTTrainer


class ModelLossSFTTrainer(SFTTrainer):
    """The model's own loss: fused where the model is patched, with three matrix products where TRL's needs four.

    TRL's metrics of entropy and token accuracy, which come out of its kernel, are not logged.
    """

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)
