"""`make demo`, end to end and tiny: the command that a reader tries first must work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_stock_and_patched_runs_agree_and_are_drawn(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the log.\n" * 40, encoding="utf-8")
    picture = tmp_path / "curves" / "demo.png"

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # as a user has it
    sizes = [
        "--steps=4",
        "--seq-len=32",
        "--batch-size=2",
        "--vocab-size=600",
        "--hidden-size=64",
        "--layers=1",
    ]
    done = subprocess.run(
        [sys.executable, "integrations/finetune.py", "--text", text, "--output", picture, *sizes],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "The loss curves agree" in done.stdout
    for row in ("final loss", "max |difference|", "peak memory", "time per step"):
        assert row in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn(run_script, tmp_path):
    """Is refused before the training."""
    said = run_script("finetune.py", "--steps=4", "--output", str(tmp_path / "d.xyz"), status=2)
    assert "no picture can be drawn as .xyz" in said
    assert "Traceback" not in said
