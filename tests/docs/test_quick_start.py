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
load_file = pytest.importorskip("safetensors.torch").load_file

ROOT = Path(__file__).parents[2]
QUIET = {"DS_ACCELERATOR": "cpu"}  # otherwise DeepSpeed prints a warning to stdout, if it is installed


def fine_tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `finetune.py` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | QUIET
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "finetune.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def test_the_quick_start_trains_a_model(tmp_path: Path) -> None:
    """Run `finetune.py`, and check that the loss is fused and that the saved model has changed."""
    runpy.run_path(str(ROOT / "scripts" / "quick_start.py"))["main"](tmp_path)
    commands = [line.partition(" #")[0].split() for line in (tmp_path / "quick_start.sh").read_text().splitlines()]
    assert len(commands) <= 2
    assert commands[0][:2] == ["pip", "install"]
    for command in commands[1:]:
        assert command[:2] == ["python", "finetune.py"]
        done = fine_tune(tmp_path, *command[2:])
        assert done.returncode == 0, done.stderr
        assert "deprecated" not in done.stderr
        steps = re.findall(r"^step (\d+) of (\d+): loss \d\.\d{3}, \d:\d\d:\d\d left$", done.stdout, re.M)
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


@pytest.mark.parametrize("options", [[], ["--load-in-4bit"]], ids=str)
def test_fine_tuning_of_adapters(options: list[str], tmp_path: Path) -> None:
    """Check that only the adapters are trained and saved, and that the loss is fused."""
    for package in ("peft", *["accelerate", "bitsandbytes"] * len(options)):
        pytest.importorskip(package)
    runpy.run_path(str(ROOT / "scripts" / "quick_start.py"))["main"](tmp_path)
    arguments = "my-model", "my-text.txt", "adapters", "--lora", "4", "--lora-targets", "all-linear"
    done = fine_tune(tmp_path, *arguments, "--seq-len", "4096", *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"fused: (\d+)\nvalues: 0\nmaterialized: 0\nstock: 0\nsaved adapters\n", done.stdout), done.stdout
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in saved)
    assert all(tensor.any() for tensor in saved.values())  # PEFT initializes B as zero


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.txt"], "nowhere.txt does not exist: give a text file"),
        ([__file__], "cannot be loaded: "),
        ([__file__, "--load-in-4bit"], "--load-in-4bit and --lora-targets need --lora: give a rank, such as 16"),
    ],
)
def test_errors_of_fine_tuning(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune.py", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match=re.escape(message)):
        runpy.run_path(str(ROOT / "finetune.py"), run_name="__main__")
