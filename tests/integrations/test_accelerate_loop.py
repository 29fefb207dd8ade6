"""`integrations/accelerate_loop.py` for 15 steps, and Accelerate's options."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("typer", reason="the scripts' command line")

from accelerate.state import AcceleratorState

import accelerate_loop as script
import compare


def test_the_script(run_script):
    said = run_script("accelerate_loop.py", "--steps=15")
    assert "15 steps" in said
    assert "The loss curves agree" in said


@pytest.mark.parametrize(
    "arguments, tolerance",
    [
        ({"gradient_accumulation": 2}, 1e-5),
        ({"mixed_precision": "bf16"}, 1e-2),
        pytest.param({"mixed_precision": "fp16"}, 1e-2, marks=pytest.mark.gpu),
    ],
    ids=["accumulation", "bf16", "fp16"],
)
def test_same_losses_as_stock(arguments, tolerance):
    # Accelerate keeps what a process began with, and other tests may have begun otherwise.
    AcceleratorState._reset_state(reset_partial_state=True)
    assert compare.compare("", lambda patched: script.train(patched, 6, **arguments), tolerance=tolerance) == 0


def test_float16_needs_a_gpu(run_script):
    said = run_script("accelerate_loop.py", "--mixed-precision=fp16", status=2)
    assert "needs a GPU" in said
    assert "Traceback" not in said
