"""TRL's `SFTTrainer` with flce: a subclass of three lines, and the callback that patches the model.

    python integrations/trl_sft.py
    python integrations/trl_sft.py --lora

TRL (1.16) does not call the output embedding: it runs the model without it and multiplies by its weight in a kernel of
its own, which makes a loss per token. So a patched model alone changes nothing there (`--trl-kernel` shows that).
`ModelLossSFTTrainer`, in model_loss_sft_trainer.py, lets the model compute the loss, as Transformers' `Trainer` does.

It trains the same small model with TRL's kernel and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compare import Curve, compare, curve_of, excerpts, keeping_losses, need, tiny_tokenizer, trainer_settings
from flce.testing.models import tiny_model


def make_trainer(
    patched: bool, folder: str, *, steps: int, lora: bool = False, trl_kernel: bool = False, **arguments: Any
) -> Any:
    # These take seconds to import: here, so that --help does not wait for them.
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from flce.huggingface import FlceCallback
    from model_loss_sft_trainer import ModelLossSFTTrainer

    disable_progress_bars()
    trainer = ModelLossSFTTrainer if patched and not trl_kernel else SFTTrainer
    return keeping_losses(trainer)(
        model=tiny_model(),
        args=SFTConfig(max_length=64, **{**trainer_settings(folder, steps), **arguments}),
        train_dataset=Dataset.from_dict({"text": excerpts(4 * steps)}),
        eval_dataset=Dataset.from_dict({"text": excerpts(8, seed=1)}),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.0) if lora else None,
        callbacks=[FlceCallback()] if patched else [],
    )


def train(patched: bool, **arguments: Any) -> Curve:
    return curve_of(make_trainer, patched, **arguments)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters.")] = False,
    trl_kernel: Annotated[bool, typer.Option(help="Leave the loss to TRL's own kernel.")] = False,
) -> None:
    """Train with TRL's SFTTrainer, stock and with flce, and compare the losses."""
    need("trl")
    status = compare(
        "SFTTrainer",
        lambda patched: train(patched, steps=steps, lora=lora, trl_kernel=trl_kernel),
        fused=not trl_kernel,
    )
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
