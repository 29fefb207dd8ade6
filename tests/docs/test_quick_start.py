"""Run the program of README.md's quick start. `make quick-start` also runs its installation."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
QUIET = {"DS_ACCELERATOR": "cpu"}  # otherwise DeepSpeed prints a warning to stdout, if it is installed


def test_the_quick_start_trains_a_model(tmp_path: Path) -> None:
    """Run `finetune.py`, and check that the loss is fused and that the saved model has changed."""
    runpy.run_path(str(ROOT / "scripts" / "quick_start.py"))["main"](tmp_path)
    commands = [line.partition(" #")[0].split() for line in (tmp_path / "quick_start.sh").read_text().splitlines()]
    assert len(commands) <= 2
    assert commands[0][:2] == ["pip", "install"]
    for command in commands[1:]:
        assert command[:2] == ["python", "finetune.py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | QUIET
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, ROOT / "finetune.py", *command[2:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        steps = re.findall(r"^step (\d+) of (\d+): loss \d\.\d{3}$", done.stdout, re.M)
        assert [int(number) for number, _ in steps] == [*range(1, int(steps[0][1]) + 1)]
        assert f"fused: {len(steps)}\nvalues: 0\nmaterialized: 0\nstock: 0\nsaved my-model-tuned\n" in done.stdout
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "my-model-tuned")
    assert len(tokenizer((tmp_path / "my-text.txt").read_text()).input_ids) % 1024 == 1
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).lm_head.weight
        for name in ("my-model", "my-model-tuned")
    )
    assert before.shape == after.shape
    assert after.isfinite().all()
    assert not torch.equal(before, after)
