"""TRL's `GRPOTrainer` with flce, and a reward that is a rule on the text.

    python integrations/trl_grpo.py

The rule: the share of a completion's characters that are spaces. Each batch of completions is trained on twice, so that
the ratio to the old policy, which is computed without gradients, differs from 1; there is a reference model, too.

It trains the same small model with TRL's kernel and with flce, and ends with status 1 if the losses differ. The second
training takes the completions of the first: log-probabilities differ in their last bits, and a single token that is
sampled otherwise for that would make another training of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demo import (
    Curve,
    compare,
    excerpts,
    keeping_losses,
    need,
    save_model,
    say,
    tiny_tokenizer,
    trainer_settings,
    trl_installed,
)

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "num_iterations": 2,
    "max_completion_length": 16,
    "beta": 0.01,
    "temperature": 0.7,
    "learning_rate": 5e-3,
    "adam_epsilon": 1e-4,  # with Adam's own the last bits of small gradients would grow to other losses
    "logging_steps": 1,
}


def share_of_spaces(completions: list[str], **others: Any) -> list[float]:
    """The reward of each completion."""
    return [text.count(" ") / max(len(text), 1) for text in completions]


def keep_completions(model: Any, kept: list[Tensor], again: bool) -> None:
    """Lets `generate` keep what it returns, or return what was kept."""
    generate, following = model.generate, iter(kept)

    def sample(**inputs: Any) -> Tensor:
        if again:
            return next(following)
        kept.append(generate(**inputs))
        return kept[-1]

    model.generate = sample


def make_trainer(patched: bool, folder: str, *, steps: int, kept: list[Tensor]) -> Any:
    # These take seconds to import: here, so that --help does not wait for them.
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bars()
    # From a folder: TRL loads the reference model from there, too.
    model = AutoModelForCausalLM.from_pretrained(save_model(Path(folder)))
    keep_completions(model, kept, again=patched)
    return keeping_losses(GRPOTrainer)(
        model=model,
        reward_funcs=share_of_spaces,
        args=GRPOConfig(**{**trainer_settings(folder, steps), **SETTINGS}),
        train_dataset=Dataset.from_dict({"prompt": [text[: len(text) // 2] for text in excerpts(2 * steps)]}),
        processing_class=tiny_tokenizer(),
    )


def train(patched: bool, *, steps: int, kept: list[Tensor]) -> Curve:
    # Whether it is installed is all that is different.
    with trl_installed(patched), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(patched, folder, steps=steps, kept=kept)
        trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    say(f"Rewards of the first and the last completions: {rewards[0]:.3f} and {rewards[-1]:.3f}")
    curve: Curve = trainer.curve
    return curve


def main(steps: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """Train with TRL's GRPOTrainer, stock and with flce, and compare the losses."""
    need("trl")
    kept: list[Tensor] = []
    raise typer.Exit(compare("GRPOTrainer", lambda patched: train(patched, steps=steps, kept=kept)))


if __name__ == "__main__":
    typer.run(main)
