"""TRL's `DPOTrainer` with flce.

    python integrations/trl_dpo.py

DPO needs the log-probability of every token, by the model and by a reference. `flce.huggingface.trl.install()` has
`flce.linear_logprobs` compute them, in the place of TRL's kernel.

It trains the same small model with TRL's kernel and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from demo import (
    Curve,
    compare,
    curve_of,
    excerpts,
    keeping_losses,
    need,
    tiny_tokenizer,
    trainer_settings,
    trl_installed,
)
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

    disable_progress_bars()
    return keeping_losses(DPOTrainer)(
        model=tiny_model(),
        ref_model=tiny_model(),
        args=DPOConfig(max_length=64, **{**trainer_settings(folder, steps), "learning_rate": 1e-4, **arguments}),
        train_dataset=preferences(4 * steps),
        processing_class=tiny_tokenizer(),
    )


def train(patched: bool, **arguments: Any) -> Curve:
    with trl_installed(patched):  # all that is different
        return curve_of(make_trainer, patched, **arguments)


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with TRL's DPOTrainer, stock and with flce, and compare the losses."""
    need("trl")
    raise typer.Exit(compare("DPOTrainer", lambda patched: train(patched, steps=steps)))


if __name__ == "__main__":
    typer.run(main)
