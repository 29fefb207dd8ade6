"""`integrations/lightning_module.py` for 15 steps, and Lightning's options."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import compare
import lightning_module as script


def test_the_script(run_script):
    said = run_script("lightning_module.py", "--steps=15")
    assert "15 steps" in said
    assert "The loss curves agree" in said


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_epochs": 1}, 1e-5),
        ({"precision": "bf16-mixed"}, 1e-2),
        pytest.param({"precision": "16-mixed"}, 1e-2, marks=pytest.mark.gpu),
    ],
    ids=["accumulation", "bf16", "fp16"],
)
def test_same_losses_as_stock(arguments, tolerance):
    assert compare.compare("", lambda patched: script.train(patched, 6, **arguments), tolerance=tolerance) == 0
