"""Lightning with flce: the module patches its model when it is made, and nothing else changes.

    python integrations/lightning_module.py

It trains the same small model stock and patched, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Annotated, Any

import lightning
import torch
import typer
from torch import Tensor
from torch.utils.data import DataLoader

import flce
from compare import GPU, Curve, compare, examples, tiny_model


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


def make_trainer(folder: str, steps: int, **arguments: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="gpu" if GPU else "cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


def train(patched: bool, steps: int, **arguments: Any) -> Curve:
    module = CausalLM(patched)
    batches = DataLoader(examples(4 * steps), batch_size=4)
    validation = DataLoader(examples(8, seed=1), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, steps, **arguments).fit(module, batches, validation)
    return module.curve


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with Lightning, stock and patched by flce, and compare the losses."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # advice about data loaders and devices
    raise typer.Exit(compare("Lightning", lambda patched: train(patched, steps)))


if __name__ == "__main__":
    typer.run(main)
