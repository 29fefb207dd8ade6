"""Tests of `make demo`, end to end with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("rich", reason="the table")
pytest.importorskip("matplotlib", reason="the pictures")
pytest.importorskip("tokenizers", reason="the tokenizer")
pytest.importorskip("transformers", reason="the model")

import demo
import flce
from benchmarks.memory import MemoryProfile
from flce.testing import tiny_model
from tests.processes import run_python

ROOT = Path(flce.__file__).parents[1]
SIZES = ("--steps=4", "--seq-len=32", "--batch-size=2", "--vocab-size=600", "--hidden-size=64", "--layers=1")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat, and the dog sat on the log.\n" * 40, encoding="utf-8")
    return file


def test_stock_and_patched_runs_agree_and_are_drawn(text: Path, tmp_path: Path) -> None:
    picture, memory = tmp_path / "pictures" / "demo.png", tmp_path / "memory.svg"
    files: list[Any] = ["--text", text, "--output", picture, "--memory-picture", memory]
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = run_python(ROOT / "integrations" / "demo.py", *files, *SIZES, cwd=tmp_path, env=environment)
    for part in ("The loss curves agree", "final loss", "peak memory", "time per step"):
        assert part in done.stdout
    assert all(f"{name} " in done.stderr for name in demo.NAMES)  # progress
    assert "USDT" not in done.stderr  # output of PyTorch's profiler
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in memory.read_text()


def test_the_fastest_recording_is_shown_with_the_optimizers_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the peak includes the optimizer's state, and that the fastest of three recordings is drawn."""
    seconds = iter([9.0, 2.0, 3.0])

    def profile(step: Any, device: Any) -> MemoryProfile:
        step()
        return MemoryProfile(((0.0, 0), (0.5, 1000), (next(seconds), 0)))

    monkeypatch.setattr("benchmarks.memory.profile_memory", profile)
    run = demo.train(tiny_model, torch.arange(32).reshape(2, 1, 16), 1e-3, patched=False)
    assert run.memory.samples[-1][0] == 2.0
    assert run.peak_bytes >= 1000 + sum(2 * p.nbytes for p in tiny_model().parameters())


@pytest.mark.parametrize("last, status", [(1.00003, 0), (1.1, 1), (float("nan"), 1)])
def test_the_verdict(last: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    def run_of(loss: float, peak: int) -> demo.TrainingRun:
        profile = MemoryProfile(((0.0, 0), (0.1, peak // 2), (0.2, 0)))
        return demo.TrainingRun([3.0, 2.0, loss], [0.2, 0.1, 0.3], profile, peak)

    runs = run_of(1.0, 400 << 20), run_of(last, 100 << 20)
    monkeypatch.setattr(demo, "train", lambda load, batches, rate, patched: runs[patched])
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(demo.main)
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["--text", str(text), *SIZES])
    assert done.exit_code == status, done.output
    rows = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    assert [*["peak", "memory,", "MiB", "400", "100", "25%"]] in rows
    assert [*["time", "per", "step,", "ms", "200", "200", "100%"]] in rows
    tolerance = "1e-02" if torch.cuda.is_available() else "1e-04"
    agree = "agree: 1.0e-05 on average, 3.0e-05 at most"
    verdict = agree if status == 0 else f"differ by more than {tolerance}"
    assert f"The loss curves {verdict}" in done.stdout
    for picture in ("demo.png", "demo-memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
