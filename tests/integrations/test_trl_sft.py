"""`integrations/trl_sft.py` for 15 steps, with TRL's kernel and without, and TRL's options."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="it is in the extra `trainers`")
pytest.importorskip("peft", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import compare
import trl_sft as script


def test_the_script(run_script):
    said = run_script("trl_sft.py", "--steps=15")
    assert "15 steps" in said
    assert "The loss curves agree" in said


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora": True},
        {"gradient_accumulation_steps": 2},
        {"packing": True, "packing_strategy": "wrapped"},
        {"gradient_checkpointing": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_same_losses_as_stock(arguments):
    assert compare.compare("", lambda patched: script.train(patched, steps=6, **arguments)) == 0


def test_a_patched_model_leaves_trl_its_kernel():
    assert compare.compare("", lambda patched: script.train(patched, steps=6, trl_kernel=True), fused=False) == 0


@pytest.mark.usefixtures("nothing_materialises")
def test_evaluate(tmp_path):
    losses = []
    for patched in (False, True):
        trainer = script.make_trainer(patched, str(tmp_path), steps=2)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
