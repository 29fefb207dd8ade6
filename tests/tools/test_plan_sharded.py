"""``flce plan --gpus K --sharding ...``: what a training step takes on each of K GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
pytest.importorskip("transformers", reason="models")

import typer
from typer.testing import CliRunner

from flce.huggingface.estimate import sharding
from flce.huggingface.estimate.sharding import Sharding
from flce.huggingface.estimate.training_memory import LIBRARIES, Longest, StepMemory, Training, TrainingMemory, Variant
from flce.tools.cli import plan as command
from tests.tools.test_plan_command import config, rehearsed

VARIANTS = [Variant(patched, checkpointing) for patched in (False, True) for checkpointing in (False, True)]
WHOLE = 4000 * 64 * 2  # of the head, and of the embedding, in bfloat16


@pytest.fixture
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's are larger than these models."""
    for name in ("KEPT_WHOLE", "REUSED_SOON", "PREFETCHED", "GRADIENT_BUCKET"):
        monkeypatch.setattr(sharding, name, 0)


def test_without_others_nothing_is_unsharded() -> None:
    assert rehearsed(Training(1)).step(64, Variant(True, False)).parts["unsharded"] == 0


@pytest.mark.usefixtures("no_defaults")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", sharding.KINDS)
def test_shares(kind: str, variant: Variant) -> None:
    """Parts that are the same at any moment, and those of a moment when the head is whole."""
    steps = rehearsed(Training(8, sharding=Sharding(kind, 4)), tie_word_embeddings=False)
    step = steps.step(512, variant)
    weights = sum(p.nbytes for p in steps.model.parameters())
    assert sum(step.parts.values()) == step.peak_bytes
    assert weights / 4 <= step.parts["weights"] < weights / 4 + 512 * 50  # each is rounded to a block; so are buffers
    trained = sum(p.numel() for p in steps.model.parameters())
    of_each = 4 if kind == "fsdp" else 12  # AdamW's state; DeepSpeed's is in float32, as is its copy of the weights
    assert step.parts["optimizer"] == -(-of_each * trained // 4)
    assert step.parts["unsharded"] >= WHOLE or step.parts["loss"] == 0
    assert step.fused == variant.patched
    assert all(p.grad is None for p in steps.model.parameters())


@pytest.mark.usefixtures("no_defaults")
@pytest.mark.parametrize("kind", sharding.KINDS)
def test_many_gpus_leave_what_is_gathered(kind: str) -> None:
    """With ever more GPUs the share goes to zero; activations, the loss and what is gathered stay."""

    def peak(gpus: int) -> StepMemory:
        return rehearsed(Training(1, sharding=Sharding(kind, gpus)), tie_word_embeddings=False).step(64, VARIANTS[2])

    two, many, more = peak(2), peak(1 << 20), peak(1 << 30)
    assert many.peak_bytes - more.peak_bytes < 100
    assert two.peak_bytes - more.peak_bytes > 3 * WHOLE
    assert more.parts["unsharded"] >= WHOLE


def test_defaults_of_deepspeed() -> None:
    """Its bucket of gradients, and weights that are used again soon: all of a small model, but not more."""
    steps = rehearsed(Training(1, sharding=Sharding("zero3", 2)), tie_word_embeddings=False)
    step = steps.step(64, Variant(True, False))
    divided = sum(p.nbytes for p in steps.model.parameters() if p.numel() > sharding.KEPT_WHOLE)
    assert divided == 2 * WHOLE
    assert step.parts["unsharded"] <= divided
    assert step.parts["temporary"] >= LIBRARIES + 2 * sharding.GRADIENT_BUCKET


def run(tmp_path: Path, *options: str) -> Any:
    config("llama").save_pretrained(tmp_path)
    app = typer.Typer()
    app.command()(command.plan)
    with mock.patch.object(TrainingMemory, "longest", return_value=Longest(64, None)):  # takes many steps
        return CliRunner().invoke(app, ["--model", str(tmp_path), "--seq-len", "64", "--gpu-memory", "2GiB", *options])


def test_the_command(tmp_path: Path) -> None:
    told = json.loads(run(tmp_path, "--gpus", "4", "--sharding", "zero3", "--json").stdout)
    assert told["training"]["gpus"] == 4
    assert all(step["parts"]["unsharded"] > 0 for step in told["steps"])
    shown = run(tmp_path, "--gpus", "4", "--sharding", "fsdp").stdout
    assert "on each of 4 GPUs, fsdp" in shown
    assert "unsharded" in shown
    assert "  unsharded" not in run(tmp_path).stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--gpus", "4"], "go together"),
        (["--sharding", "fsdp"], "go together"),
        (["--gpus", "4", "--sharding", "fsdp", "--shards", "2"], "not planned together"),
    ],
)
def test_both_or_none(tmp_path: Path, options: list[str], said: str) -> None:
    done = run(tmp_path, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_choices() -> None:
    assert tuple(kind.value for kind in command.ShardingKind) == sharding.KINDS
