"""Axolotl with flce: one line of the configuration names the plugin of axolotl_plugin.py.

    python integrations/axolotl_train.py
    python integrations/axolotl_train.py --lora

The script trains the same small model with and without the plugin, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from demo import (
    Curve,
    compare_runs,
    excerpts,
    has_gpu,
    need_packages,
    record_losses,
    save_model,
    tiny_tokenizer,
)


def configuration(folder: Path, patched: bool, steps: int, lora: bool) -> dict[str, Any]:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in excerpts(4 * steps)))
    adapter: dict[str, Any] = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    if not has_gpu():  # Axolotl switches its kernels on by default
        adapter |= {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")}
    return {
        "plugins": ["axolotl_plugin.FlcePlugin"] if patched else [],  # the only difference
        "base_model": str(save_model(folder)),
        "special_tokens": {"pad_token": tiny_tokenizer().pad_token},
        "datasets": [{"path": str(folder / "text.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": 64,
        "seed": 1,  # Axolotl shuffles with the seed. Its default is random
        "max_steps": steps,
        "num_epochs": 1,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 1e-3,
        "bf16": False,
        "attn_implementation": "eager",
        "use_cpu": not has_gpu(),
        "save_strategy": "no",
        "output_dir": str(folder / "output"),
        **(adapter if lora else {}),
    }


def train(patched: bool, steps: int, lora: bool = False) -> Curve:
    os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")  # else Axolotl reports runs, and waits without a network
    # These imports take seconds. They are here so that --help is fast.
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    with tempfile.TemporaryDirectory() as name, record_losses() as curve:
        file = Path(name, "flce.yaml")
        file.write_text(json.dumps(configuration(Path(name), patched, steps, lora)))  # JSON is YAML
        do_train(load_cfg(str(file)), TrainerCliArgs())
    return curve


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters.")] = False,
) -> None:
    """Train with Axolotl, stock and with the plugin, and compare the losses."""
    need_packages("axolotl")
    raise typer.Exit(compare_runs("Axolotl", lambda patched: train(patched, steps, lora)))


if __name__ == "__main__":
    typer.run(main)
