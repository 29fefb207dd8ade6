"""TRL's `DPOTrainer` with a patched model: the losses are stock's, by TRL's own kernel.

    python integrations/trl_dpo.py

DPO needs the log-probability of every token. TRL (1.16) does not call the output embedding for them, which is what
flce patches: it runs the model without it, and multiplies by its weight in a kernel of its own that does not hold the
logits either, and that takes as long as flce's. So there is nothing to take over, and a model may be patched or not.

It trains the same small model with and without the callback, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from compare import Curve, compare, curve_of, excerpts, keeping_losses, need, tiny_tokenizer, trainer_settings
from flce.testing.models import tiny_model

if TYPE_CHECKING:
    from datasets import Dataset


def preferences(count: int) -> Dataset:
    """The beginning of a piece of source code, how it goes on (chosen), and how another one does (rejected)."""
    from datasets import Dataset

    texts = excerpts(count)
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    prompts, chosen = zip(*halves, strict=True)
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": chosen[1:] + chosen[:1]})


def make_trainer(patched: bool, folder: str, *, steps: int, **arguments: Any) -> Any:
    # These take seconds to import: here, so that --help does not wait for them.
    from datasets import disable_progress_bars
    from trl import DPOConfig, DPOTrainer

    from flce.huggingface import FlceCallback

    disable_progress_bars()
    return keeping_losses(DPOTrainer)(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=DPOConfig(max_length=64, **{**trainer_settings(folder, steps), "learning_rate": 1e-4, **arguments}),
        train_dataset=preferences(4 * steps),
        processing_class=tiny_tokenizer(),
        callbacks=[FlceCallback()] if patched else [],
    )


def train(patched: bool, **arguments: Any) -> Curve:
    return curve_of(make_trainer, patched, **arguments)


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with TRL's DPOTrainer, stock and patched by flce, and compare the losses."""
    need("trl")
    raise typer.Exit(compare("DPOTrainer", lambda patched: train(patched, steps=steps), fused=False))


if __name__ == "__main__":
    typer.run(main)
