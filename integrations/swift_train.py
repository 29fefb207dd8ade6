"""ms-swift with flce: two options name the plugin of swift_plugin.py and the callback that it registers.

    python integrations/swift_train.py
    python integrations/swift_train.py --lora

The script trains the same small model with and without the callback, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from demo import Curve, compare_runs, excerpts, has_gpu, need_packages, record_losses, save_model

PLUGIN = Path(__file__).with_name("swift_plugin.py")


def arguments(folder: Path, patched: bool, steps: int, lora: bool) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "Go on."}]
    rows = [{"messages": [*prompt, {"role": "assistant", "content": text}]} for text in excerpts(4 * steps)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_flce = {"external_plugins": [str(PLUGIN)], "callbacks": ["flce"]}  # the only difference
    return {
        **(with_flce if patched else {}),
        "model": str(save_model(folder)),
        "model_type": "qwen3",
        "check_model": False,  # else ms-swift looks for a newer version in its hub
        "template": "dummy",
        "tuner_type": "lora" if lora else "full",
        "torch_dtype": "float32",
        "dataset": [str(folder / "text.jsonl")],
        "split_dataset_ratio": 0.0,
        "max_length": 64,
        "truncation_strategy": "right",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": not has_gpu(),
        "save_strategy": "no",
        "report_to": ["none"],
        "output_dir": str(folder / "output"),
    }


def train(patched: bool, steps: int, lora: bool = False) -> Curve:
    # These imports take seconds. They are here so that --help is fast.
    from swift import SftArguments, sft_main

    with tempfile.TemporaryDirectory() as name, record_losses() as curve:
        sft_main(SftArguments(**arguments(Path(name), patched, steps, lora)))
    return curve


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    lora: Annotated[bool, typer.Option(help="Train LoRA adapters.")] = False,
) -> None:
    """Train with ms-swift, stock and with FlceCallback, and compare the losses."""
    need_packages("ms-swift")
    raise typer.Exit(compare_runs("ms-swift", lambda patched: train(patched, steps, lora)))


if __name__ == "__main__":
    typer.run(main)
