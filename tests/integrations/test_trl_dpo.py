"""`integrations/trl_dpo.py` for its 50 steps, and TRL's options."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import compare
import trl_dpo as script


def test_fifty_steps(run_script):
    said = run_script("trl_dpo.py", "--steps=50")
    assert "50 steps" in said
    assert "The loss curves agree" in said


def test_reference_computed_beforehand():
    arguments = {"precompute_ref_log_probs": True}
    assert compare.compare("", lambda patched: script.train(patched, steps=4, **arguments), fused=False) == 0
