"""Lightning with flce: the module patches its model when it is made, and nothing else changes.

    python integrations/lightning_module.py

The module is `CausalLM`, in causal_lm.py. The script trains the same small model stock and patched, and ends with
status 1 if the losses differ.
"""

from __future__ import annotations

import logging
import tempfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demo import Curve, compare, examples, has_gpu

if TYPE_CHECKING:
    import lightning


def make_trainer(folder: str, steps: int, **arguments: Any) -> lightning.Trainer:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # advice about data loaders and devices
    return lightning.Trainer(
        accelerator="gpu" if has_gpu() else "cpu",
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
    # These take seconds to import: here, so that --help does not wait for them.
    from torch.utils.data import DataLoader

    from causal_lm import CausalLM

    module = CausalLM(patched)
    batches = DataLoader(examples(4 * steps), batch_size=4)
    validation = DataLoader(examples(8, seed=1), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, steps, **arguments).fit(module, batches, validation)
    return module.curve


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with Lightning, stock and patched by flce, and compare the losses."""
    raise typer.Exit(compare("Lightning", lambda patched: train(patched, steps)))


if __name__ == "__main__":
    typer.run(main)
