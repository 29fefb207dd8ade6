"""TRL's `SFTTrainer` with flce.

    python integrations/trl_sft.py
    python integrations/trl_sft.py --lora

TRL (1.16) does not call the output embedding, which is what `patch_model` changes: it runs the model without it and
multiplies by its weight in a kernel of its own. `flce.huggingface.trl.install()` puts flce in the place of that.

It trains the same small model with TRL's kernel and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import Annotated, Any

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


def make_trainer(patched: bool, folder: str, *, steps: int, lora: bool = False, **arguments: Any) -> Any:
    # These take seconds to import: here, so that --help does not wait for them.
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    return keeping_losses(SFTTrainer)(
        model=tiny_model(),
        args=SFTConfig(max_length=64, **{**trainer_settings(folder, steps), **arguments}),
        train_dataset=Dataset.from_dict({"text": excerpts(4 * steps)}),
        eval_dataset=Dataset.from_dict({"text": excerpts(8, seed=1)}),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.0) if lora else None,
    )


def train(patched: bool, **arguments: Any) -> Curve:
    with trl_installed(patched):  # all that is different
        return curve_of(make_trainer, patched, **arguments)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters.")] = False,
) -> None:
    """Train with TRL's SFTTrainer, stock and with flce, and compare the losses."""
    need("trl")
    raise typer.Exit(compare("SFTTrainer", lambda patched: train(patched, steps=steps, lora=lora)))


if __name__ == "__main__":
    typer.run(main)
