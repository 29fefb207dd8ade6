"""`integrations/trl_dpo.py` for 15 steps, and TRL's options."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

import compare
import trl_dpo as script


def test_the_script(run_script):
    said = run_script("trl_dpo.py", "--steps=15")
    assert "15 steps" in said
    assert "The loss curves agree" in said


def test_reference_computed_beforehand():
    arguments = {"precompute_ref_log_probs": True}
    assert compare.compare("", lambda patched: script.train(patched, steps=4, **arguments), fused=False) == 0
