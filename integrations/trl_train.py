"""TRL's `SFTTrainer` and `DPOTrainer` with flce.

    python integrations/trl_train.py
    python integrations/trl_train.py --by dpo

TRL (1.16) does not call the output embedding, which `patch_model` changes: a kernel of TRL multiplies by its weight.
`flce.huggingface.trl.install()` replaces this kernel by flce.

The script trains the same small model with TRL's kernel and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demo import (
    Curve,
    compare_runs,
    excerpts,
    need_packages,
    record_curve,
    tiny_tokenizer,
    trainer_settings,
    trl_installed,
)
from flce.testing import tiny_model

if TYPE_CHECKING:
    from datasets import Dataset

By = Enum("By", {"sft": "sft", "dpo": "dpo"})


def preferences(count: int) -> Dataset:
    """Return prompts (beginnings of source code), chosen texts (their continuations) and rejected texts (others)."""
    from datasets import Dataset

    texts = excerpts(count)
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    prompts, chosen = zip(*halves, strict=True)
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": chosen[1:] + chosen[:1]})


def create_trainer(patched: bool, folder: str, *, steps: int, by: str = "sft", lora: bool = False, **more: Any) -> Any:
    # These imports take seconds. They are here so that --help is fast.
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    disable_progress_bars()
    settings: dict[str, Any] = {**trainer_settings(folder, steps), "max_length": 64}
    common = {"model": tiny_model(), "processing_class": tiny_tokenizer()}
    if by == "dpo":
        args = DPOConfig(**{**settings, "learning_rate": 1e-4, **more})
        data = preferences(4 * steps)
        return DPOTrainer(ref_model=tiny_model(), args=args, train_dataset=data, **common)
    return SFTTrainer(
        args=SFTConfig(**{**settings, **more}),
        train_dataset=Dataset.from_dict({"text": excerpts(4 * steps)}),
        peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.0) if lora else None,
        **common,
    )


def train(patched: bool, **arguments: Any) -> Curve:
    with trl_installed(patched):  # the only difference
        return record_curve(create_trainer, patched, **arguments)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    by: By = By.sft,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters, with SFTTrainer.")] = False,
) -> None:
    """Train with a trainer of TRL, stock and with flce, and compare the losses."""
    need_packages("trl", "peft")
    name = f"{by.value.upper()}Trainer"
    raise typer.Exit(compare_runs(name, lambda patched: train(patched, steps=steps, by=by.value, lora=lora)))


if __name__ == "__main__":
    typer.run(main)
