"""A training loop with Accelerate and flce: `patch_model` before `prepare`, and nothing else changes.

    python integrations/accelerate_loop.py

It trains the same small model stock and patched, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from demo import Curve, compare, examples, has_gpu
from flce.testing.models import tiny_model

if TYPE_CHECKING:
    from accelerate import Accelerator

Precision = Enum("Precision", {"no": "no", "bf16": "bf16", "fp16": "fp16"})


def train_with(accelerator: Accelerator, patched: bool, steps: int) -> Curve:
    # These take seconds to import: here, so that --help does not wait for them.
    import torch
    from torch.utils.data import DataLoader

    import flce

    model = tiny_model().train()
    if patched:
        flce.patch_model(model)  # all that is different
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(examples(4 * steps * accelerator.num_processes), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    curve = Curve()
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            curve.add(loss)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return curve


def train(patched: bool, steps: int, gradient_accumulation: int = 1, mixed_precision: str = "no") -> Curve:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=not has_gpu(), gradient_accumulation_steps=gradient_accumulation, mixed_precision=mixed_precision
    )
    return train_with(accelerator, patched, steps)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    gradient_accumulation: Annotated[int, typer.Option(min=1)] = 1,
    mixed_precision: Annotated[Precision, typer.Option(help="fp16 needs a GPU.")] = Precision.no,
) -> None:
    """Train with Accelerate, stock and patched by flce, and compare the losses."""
    if mixed_precision == Precision.fp16 and not has_gpu():
        raise typer.BadParameter("--mixed-precision fp16 needs a GPU, and there is none: take bf16")
    status = compare(
        "Accelerate",
        lambda patched: train(patched, steps, gradient_accumulation, mixed_precision.value),
        tolerance=1e-5 if mixed_precision == Precision.no else 1e-2,
    )
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
