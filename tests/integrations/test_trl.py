"""TRL's trainers with `flce.huggingface.trl.install()`: each trains as it does with TRL's own kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import flce
from tests.integrations import trl_trainers as trainers
from tests.integrations.trl_trainers import Run, model_of, train

STEPS = min(20, int(os.environ.get("RECIPE_STEPS", "3")))
DIVERGENCE = {"beta": 0.1, "temperature": 0.7, "num_iterations": 2}

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SFT": (trainers.sft, {"gradient_accumulation_steps": 2}),
    "SFT, DFT": (trainers.sft, {"loss_type": "dft"}),
    "DPO": (trainers.dpo, {"use_weighting": True}),
    "KTO": (trainers.kto, {}),
    "GRPO, divergence": (trainers.grpo, {**DIVERGENCE, "loss_type": "grpo"}),
    "GRPO, entropies": (trainers.grpo, {"loss_type": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5}),
    "GRPO, DAPO": (trainers.grpo, {**DIVERGENCE, "loss_type": "dapo"}),
    "GRPO, CISPO": (trainers.grpo, {"loss_type": "cispo", "epsilon_high": 2.0, "num_iterations": 2}),
    "RLOO": (trainers.rloo, {"beta": 0.1, "temperature": 0.7, "learning_rate": 1e-3}),
}


def saved(folder: Path) -> Any:
    """A model that its trainer can load a second time, as a reference."""
    from transformers import AutoModelForCausalLM

    model_of().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_alike(stock: Run, fused: Run) -> None:
    """Logged metrics to 1e-4, gradients to 1e-5 of their norm, in each step."""
    assert len(stock.logs) == len(fused.logs) > 1
    for said, ours_said in zip(stock.logs, fused.logs, strict=True):
        assert ours_said == pytest.approx(said, rel=1e-4, abs=1e-4)
    for theirs, ours in zip(stock.gradients, fused.gradients, strict=True):
        assert theirs.keys() == ours.keys()
        for name, gradient in theirs.items():
            assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.usefixtures("fresh_accelerator", "nothing_materialises")
@pytest.mark.parametrize("case", CASES)
def test_trains_alike(case: str, tmp_path: Path) -> None:
    make, more = CASES[case]
    runs: list[Run] = []
    for fused in (False, True):
        trainer, run = train(
            make, str(tmp_path), STEPS, fused=fused, model=saved(tmp_path / "model"), replay=runs[0] if runs else None,
            **more,
        )  # fmt: skip
        runs.append(run)
    assert_alike(*runs)
    assert runs[0].completions[:1] == runs[1].completions[:1]  # generation is the model's own
    report = flce.report(trainer.model)
    assert report.fused >= STEPS
    assert not report.materialized
    assert not report.stock
    assert any(torch.count_nonzero(gradient) for gradient in runs[0].gradients[-1].values())
