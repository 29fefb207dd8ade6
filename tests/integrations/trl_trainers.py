"""TRL's trainers of a tiny model, and records of their runs: metrics, gradients, completions."""

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
from flce.testing import tiny_model
from trl_train import preferences

disable_progress_bars()


@functools.cache
def _texts() -> list[str]:
    return excerpts(80)


@dataclass
class Run:
    """Record of a training: logged metrics and gradients of each step, and the completions."""

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
        self.run.logs.append({k: v for k, v in logs.items() if isinstance(v, float) and not _is_duration(k)})


def _is_duration(name: str) -> bool:
    return any(part in name for part in ("time", "runtime", "per_second"))


@functools.cache
def with_replay(trainer: Any) -> Any:
    """Return a subclass of a trainer that records completions, or uses the completions of another run."""

    class ReplayTrainer(trainer):
        run: Run
        replayed: Iterator[Any] | None

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(len(self.run.completions))
            completions = super()._generate_single_turn(*args, **kwargs)
            self.run.completions.append(completions)
            return completions if self.replayed is None else next(self.replayed)

    return ReplayTrainer


def create_model(**sizes: Any) -> Any:
    return tiny_model(**{"initializer_range": 0.2, **sizes})


def trainer_arguments(folder: str, steps: int, **more: Any) -> dict[str, Any]:
    defaults = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "logging_steps": 1, "seed": 0}
    return {**trainer_settings(folder, steps), **defaults, "lr_scheduler_type": "constant", **more}


def sft(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return trl.SFTTrainer(
        args=trl.SFTConfig(max_length=32, **trainer_arguments(folder, steps, **more)),
        train_dataset=Dataset.from_dict({"text": _texts()[: 4 * steps]}),
        eval_dataset=Dataset.from_dict({"text": _texts()[-4:]}),
        **common,
    )


def dpo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return trl.DPOTrainer(
        args=trl.DPOConfig(max_length=32, **trainer_arguments(folder, steps, **more)),
        train_dataset=preferences(4 * steps),
        **{"ref_model": None if "peft_config" in common else create_model(seed=1), **common},
    )


def kto(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    data = preferences(4 * steps).rename_column("chosen", "completion").remove_columns("rejected")
    data = data.add_column("label", [i % 2 == 0 for i in range(len(data))])
    return trl.KTOTrainer(
        args=trl.KTOConfig(max_length=32, **trainer_arguments(folder, steps, **more)),
        train_dataset=data,
        **{"ref_model": None if "peft_config" in common else create_model(seed=1), **common},
    )


def _create_online_trainer(
    trainer: Any, config: Any, folder: str, steps: int, common: dict[str, Any], **more: Any
) -> Any:
    defaults = {"max_completion_length": 8, "num_generations": 2, "beta": 0.0, "learning_rate": 2e-3, **more}
    return with_replay(trainer)(
        args=config(**trainer_arguments(folder, steps, **defaults)),
        train_dataset=Dataset.from_dict({"prompt": [text[:20] for text in _texts()[: 4 * steps]]}),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        **common,
    )


def grpo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return _create_online_trainer(trl.GRPOTrainer, trl.GRPOConfig, folder, steps, common, **more)


def rloo(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    return _create_online_trainer(trl.RLOOTrainer, trl.RLOOConfig, folder, steps, common, **more)


def distillation(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    defaults = {"max_completion_length": 8, "learning_rate": 2e-3, **more}
    return with_replay(trl.DistillationTrainer)(
        args=trl.DistillationConfig(**trainer_arguments(folder, steps, **defaults)),
        train_dataset=Dataset.from_dict({"prompt": [text[:20] for text in _texts()[: 4 * steps]]}),
        teacher_model=create_model(seed=1),
        **common,
    )


def gkd(folder: str, steps: int, common: dict[str, Any], **more: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    messages = [
        [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:60]}]
        for text in _texts()[: 4 * steps]
    ]
    common["processing_class"].chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return GKDTrainer(
        args=GKDConfig(**trainer_arguments(folder, steps, **{"lmbda": 0.0, "max_length": 32, **more})),
        train_dataset=Dataset.from_dict({"messages": messages}),
        teacher_model=create_model(seed=1),
        **common,
    )


def train(
    create: Callable[..., Any],
    folder: str,
    steps: int,
    *,
    fused: bool,
    model: Any = None,
    replay: Run | None = None,
    common: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, Run]:
    """Train a model with TRL's kernel or with flce, and with the completions of the run `replay` if it is given."""
    run = Run()
    with trl_installed(fused):
        trainer = create(
            folder,
            steps,
            {
                "model": create_model() if model is None else model,
                "processing_class": tiny_tokenizer(),
                "callbacks": [Recorder(run)],
                **(common or {}),
            },
            **more,
        )
        trainer.run, trainer.replayed = run, None if replay is None else iter(replay.completions)
        trainer.train()
    return trainer, run
