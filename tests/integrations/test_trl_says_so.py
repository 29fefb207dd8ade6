"""TRL's trainers go round the head: a patched model is not fused there, and says so after the first step."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import flce

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import trl
from datasets import Dataset

from compare import excerpts, tiny_tokenizer, trainer_settings
from flce.huggingface import FlceCallback, NotFusedWarning
from flce.testing.models import tiny_model
from trl_dpo import preferences
from trl_sft import make_trainer


def sft(settings: dict[str, Any], common: dict[str, Any]) -> Any:
    data = Dataset.from_dict({"text": excerpts(8)})
    return trl.SFTTrainer(args=trl.SFTConfig(max_length=32, **settings), train_dataset=data, **common)


def dpo(settings: dict[str, Any], common: dict[str, Any]) -> Any:
    return trl.DPOTrainer(
        args=trl.DPOConfig(max_length=32, **settings),
        train_dataset=preferences(8),
        ref_model=tiny_model(),
        **common,
    )


def kto(settings: dict[str, Any], common: dict[str, Any]) -> Any:
    data = preferences(8).rename_column("chosen", "completion").remove_columns("rejected")
    data = data.add_column("label", [i % 2 == 0 for i in range(8)])
    return trl.KTOTrainer(
        args=trl.KTOConfig(max_length=32, **settings), train_dataset=data, ref_model=tiny_model(), **common
    )


def grpo(settings: dict[str, Any], common: dict[str, Any]) -> Any:
    return with_rewards(trl.GRPOTrainer, trl.GRPOConfig, settings, common)


def rloo(settings: dict[str, Any], common: dict[str, Any]) -> Any:
    return with_rewards(trl.RLOOTrainer, trl.RLOOConfig, settings, common)


def with_rewards(trainer: Any, config: Any, settings: dict[str, Any], common: dict[str, Any]) -> Any:
    arguments = config(max_completion_length=4, num_generations=2, beta=0.0, **settings)  # without a reference model
    data = Dataset.from_dict({"prompt": [text[:20] for text in excerpts(8)]})
    return trainer(
        args=arguments, train_dataset=data, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        **common,
    )  # fmt: skip


@pytest.mark.parametrize("make", [sft, dpo, kto, grpo, rloo])
def test_trl_says_so(make: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = trainer_settings(folder, 2)
        trainer = make(settings, {
            "model": tiny_model(), "processing_class": tiny_tokenizer(), "callbacks": [FlceCallback()],
        })  # fmt: skip
        trainer.train()
    said = [str(w.message) for w in caught if w.category is NotFusedWarning]
    assert len(said) == 1
    assert "round the head" in said[0]
    assert "docs/trainers.md" in said[0]
    assert flce.report(trainer.model).fused == 0


@pytest.mark.usefixtures("nothing_materialises")
def test_evaluation_of_sft(tmp_path):
    losses = []
    for patched in (False, True):
        trainer = make_trainer(patched, str(tmp_path), steps=2)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
