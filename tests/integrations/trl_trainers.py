"""TRL's trainers of a tiny model, and what a run of one leaves behind: losses, metrics, gradients, completions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from transformers import TrainerCallback

from demo import excerpts, tiny_tokenizer, trainer_settings, trl_installed
from flce.testing.models import tiny_model
from trl_train import preferences

disable_progress_bars()


@functools.cache
def _texts() -> list[str]:
    return excerpts(80)


@dataclass
class Run:
    """What a training leaves behind: of each step the logged metrics and the gradients; the completions."""

    logs: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)


class Recorder(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        self.run.gradients.append(grads)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        self.run.logs.append({k: v for k, v in logs.items() if isinstance(v, float) and not _is_a_time(k)})


def _is_a_time(name: str) -> bool:
    return any(part in name for part in ("time", "runtime", "per_second"))


@functools.cache
def replaying(trainer: Any) -> Any:
    """A subclass of a trainer whose model writes completions in one run, which another run is given again."""

    class Replaying(trainer):
        run: Run
        given: Iterator[Any] | None

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(len(self.run.completions))
            written = super()._generate_single_turn(*args, **kwargs)
            self.run.completions.append(written)
            return written if self.given is None else next(self.given)

    return Replaying


def model_of(**sizes: Any) -> Any:
    return tiny_model(**{"initializer_range": 0.2, **sizes})


def settings_of(folder: str, steps: int, **more: Any) -> dict[str, Any]:
    given = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "logging_steps": 1, "seed": 0}
    return {**trainer_settings(folder, steps), **given, "lr_scheduler_type": "constant", **more}


def sft(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return trl.SFTTrainer(
        args=trl.SFTConfig(max_length=32, **settings_of(folder, steps, **more)),
        train_dataset=Dataset.from_dict({"text": _texts()[: 4 * steps]}),
        eval_dataset=Dataset.from_dict({"text": _texts()[-4:]}),
        **common,
    )


def dpo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return trl.DPOTrainer(
        args=trl.DPOConfig(max_length=32, **settings_of(folder, steps, **more)),
        train_dataset=preferences(4 * steps),
        **{"ref_model": None if "peft_config" in common else model_of(seed=1), **common},
    )


def kto(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    data = preferences(4 * steps).rename_column("chosen", "completion").remove_columns("rejected")
    data = data.add_column("label", [i % 2 == 0 for i in range(len(data))])
    return trl.KTOTrainer(
        args=trl.KTOConfig(max_length=32, **settings_of(folder, steps, **more)),
        train_dataset=data,
        **{"ref_model": None if "peft_config" in common else model_of(seed=1), **common},
    )


def _rewarded(trainer: Any, config: Any, folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    given = {"max_completion_length": 8, "num_generations": 2, "beta": 0.0, "learning_rate": 2e-3, **more}
    return replaying(trainer)(
        args=config(**settings_of(folder, steps, **given)),
        train_dataset=Dataset.from_dict({"prompt": [text[:20] for text in _texts()[: 4 * steps]]}),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        **common,
    )


def grpo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return _rewarded(trl.GRPOTrainer, trl.GRPOConfig, folder, steps, common, **more)


def rloo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return _rewarded(trl.RLOOTrainer, trl.RLOOConfig, folder, steps, common, **more)


def train(
    make: Callable[..., Any],
    folder: str,
    steps: int,
    *,
    fused: bool,
    model: Any = None,
    replay: Run | None = None,
    common: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, Run]:
    """Train a model with TRL's kernel, or with flce; with the completions of another run if there is one."""
    run = Run()
    with trl_installed(fused):
        trainer = make(
            folder,
            steps,
            {
                "model": model_of() if model is None else model,
                "processing_class": tiny_tokenizer(),
                "callbacks": [Recorder(run)],
                **(common or {}),
            },
            **more,
        )
        trainer.run, trainer.given = run, None if replay is None else iter(replay.completions)
        trainer.train()
    return trainer, run
