"""torchtune with flce: the recipe for full fine-tuning on one device, with the loss of torchtune_loss.py.

    python integrations/torchtune_recipe.py
    python integrations/torchtune_recipe.py --tied

Recipes are files that `tune cp` copies and users change. A subclass here is used instead of a changed copy.
The script trains the same small model with torchtune's loss and with flce, and ends with status 1 if the losses differ.
"""

from __future__ import annotations

import functools
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from demo import Curve, compare_runs, examples, has_gpu, need_packages, save_model
from flce.testing import SIZES


@functools.cache
def recipe() -> Any:
    """Return the class of torchtune's recipe, loaded from its file: recipes are not in a package."""
    import torchtune

    file = Path(torchtune.__file__).parents[1] / "recipes/full_finetune_single_device.py"
    return runpy.run_path(str(file))["FullFinetuneRecipeSingleDevice"]


def tokenizer() -> Any:
    """Return the attributes of a tokenizer that the recipe reads. The data set already has tokens."""
    return SimpleNamespace(pad_id=0)


def pieces(tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    return [{"tokens": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in examples(count)]


def configuration(folder: Path, patched: bool, steps: int, tied: bool) -> dict[str, Any]:
    loss = "torchtune_loss.FlceLoss" if patched else "torchtune.modules.loss.CEWithChunkedOutputLoss"
    return {
        "loss": {"_component_": loss},
        "model": {
            "_component_": f"torchtune.models.{'llama3_2.llama3_2' if tied else 'llama3.llama3'}",
            "vocab_size": SIZES["vocab_size"],
            "num_layers": SIZES["num_hidden_layers"],
            "num_heads": SIZES["num_attention_heads"],
            "num_kv_heads": SIZES["num_key_value_heads"],
            "embed_dim": SIZES["hidden_size"],
            "intermediate_dim": SIZES["intermediate_size"],
            "max_seq_len": SIZES["max_position_embeddings"],
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(save_model(folder, "Llama", tie_word_embeddings=tied)),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(folder / "output"),
            "model_type": "LLAMA3_2" if tied else "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "tokenizer": {"_component_": "torchtune_recipe.tokenizer"},
        "dataset": {"_component_": "torchtune_recipe.pieces", "count": 4 * steps},
        "shuffle": False,
        "seed": 1,
        "batch_size": 4,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "optimizer_in_bwd": False,
        "compile": False,
        "device": "cuda" if has_gpu() else "cpu",
        "dtype": "fp32",
        "output_dir": str(folder / "output"),
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
    }


def train(patched: bool, steps: int, tied: bool = False) -> Curve:
    # These imports take seconds. They are here so that --help is fast.
    from omegaconf import OmegaConf

    curve = Curve()

    class Recipe(recipe()):  # type: ignore[misc]
        def setup(self, cfg: Any) -> None:
            super().setup(cfg)
            if patched:
                self._loss_fn.set_model_output(self._model)  # the line to add

        def _loss_step(self, batch: Any) -> Any:
            loss = super()._loss_step(batch)
            curve.add(loss)
            return loss

    with tempfile.TemporaryDirectory() as name:
        cfg = OmegaConf.create(configuration(Path(name), patched, steps, tied))
        run = Recipe(cfg)
        run.setup(cfg)
        run.train()
        run.cleanup()
    return curve


def main(
    steps: Annotated[int, typer.Option(min=1)] = 50,
    tied: Annotated[bool, typer.Option(help="Use the embedding's weight for the head.")] = False,
) -> None:
    """Train with a recipe of torchtune, stock and with flce, and compare the losses."""
    need_packages("torchtune")
    raise typer.Exit(compare_runs("torchtune", lambda patched: train(patched, steps, tied)))


if __name__ == "__main__":
    typer.run(main)
