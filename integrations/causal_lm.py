"""The module that lightning_module.py trains: it patches its model when it is made."""

from __future__ import annotations

import lightning
import torch
from torch import Tensor

import flce
from demo import Curve
from flce.testing.models import tiny_model


class CausalLM(lightning.LightningModule):
    def __init__(self, patched: bool) -> None:
        super().__init__()
        self.model = tiny_model().train()
        if patched:
            flce.patch_model(self.model)  # all that is different
        self.curve = Curve()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.curve.add(loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
