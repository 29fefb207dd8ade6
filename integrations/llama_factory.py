"""LLaMA-Factory with flce: its `run_exp`, which `llamafactory-cli train` calls too, takes callbacks of Transformers.

    python integrations/llama_factory.py
    python integrations/llama_factory.py --lora

It trains the same small model with and without the callback, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from demo import Curve, compare, excerpts, losses_of_accelerate, need, save_model, trainer_settings


def arguments(folder: Path, steps: int, lora: bool) -> dict[str, Any]:
    texts = excerpts(4 * steps)
    rows = [{"instruction": text[:60], "input": "", "output": text[60:]} for text in texts]
    (folder / "text.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"text": {"file_name": "text.json"}}))
    return {
        **trainer_settings(str(folder / "output"), steps),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if lora else "full",
        "model_name_or_path": str(save_model(folder)),
        "dataset": "text",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 64,
    }


def train(patched: bool, steps: int, lora: bool = False) -> Curve:
    # These take seconds to import: here, so that --help does not wait for them.
    from llamafactory.train.tuner import run_exp

    from flce.huggingface import FlceCallback

    callbacks = [FlceCallback()] if patched else []  # all that is different
    with tempfile.TemporaryDirectory() as name, losses_of_accelerate() as curve:
        run_exp(arguments(Path(name), steps, lora), callbacks)
    return curve


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters.")] = False,
) -> None:
    """Train with LLaMA-Factory, stock and with FlceCallback, and compare the losses."""
    need("llamafactory")
    raise typer.Exit(compare("LLaMA-Factory", lambda patched: train(patched, steps, lora)))


if __name__ == "__main__":
    typer.run(main)
