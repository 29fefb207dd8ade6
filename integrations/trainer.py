"""Transformers' `Trainer` with flce: a callback patches the model, and nothing else changes.

    python integrations/trainer.py
    python integrations/trainer.py --gradient-accumulation 4 --label-smoothing 0.1 --checkpointing

It trains the same small model with and without the callback, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from demo import Curve, compare, curve_of, examples, keeping_losses, trainer_settings
from flce.testing.models import tiny_model


def make_trainer(
    patched: bool,
    folder: str,
    *,
    steps: int,
    model: Any = None,
    trainer: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A trainer of the tiny model; `arguments` are more `TrainingArguments`, `trainer` more arguments of `Trainer`."""
    # These take seconds to import: here, so that --help does not wait for them.
    from transformers import Trainer, TrainingArguments

    from flce.huggingface import FlceCallback

    return keeping_losses(Trainer)(
        model=tiny_model() if model is None else model,
        args=TrainingArguments(**{**trainer_settings(folder, steps), **arguments}),
        train_dataset=examples(4 * 50),
        eval_dataset=examples(8, seed=1),
        callbacks=[FlceCallback()] if patched else [],  # all that is different
        **(trainer or {}),
    )


def train(patched: bool, **arguments: Any) -> Curve:
    return curve_of(make_trainer, patched, **arguments)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    gradient_accumulation: Annotated[int, typer.Option(min=1)] = 1,
    label_smoothing: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    checkpointing: bool = False,
    bf16: bool = False,
    fp16: Annotated[bool, typer.Option(help="On a CPU, Trainer leaves it out.")] = False,
) -> None:
    """Train with Transformers' Trainer, stock and with FlceCallback, and compare the losses."""
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": gradient_accumulation,
        "label_smoothing_factor": label_smoothing,
        "gradient_checkpointing": checkpointing,
        "bf16": bf16,
        "fp16": fp16,
    }
    tolerance = 1e-2 if bf16 or fp16 else 1e-5
    status = compare("Trainer", lambda patched: train(patched, steps=steps, **arguments), tolerance=tolerance)
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
