"""`flce demo`, end to end and tiny: the command that a reader tries first must work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
pytest.importorskip("matplotlib", reason="the pictures")
pytest.importorskip("tokenizers", reason="the tokenizer")
pytest.importorskip("transformers", reason="the model")

import typer
from typer.testing import CliRunner

import flce
from flce.tools.cli import demo
from flce.tools.demo.corpus import token_batches
from flce.tools.demo.report import TrainingRun
from flce.tools.demo.training import ModelError, Settings, train, train_in_turn

ROOT = Path(flce.__file__).parents[1]
# The command by itself.
PROGRAM = "import typer; from flce.tools.cli.demo import demo; app = typer.Typer(); app.command()(demo); app()"
SIZES = ("--steps=4", "--seq-len=32", "--batch-size=2", "--vocab-size=600", "--hidden-size=64", "--layers=1")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat, and the dog sat on the log.\n" * 40, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is trained once, not in the home of the user who tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(ROOT / ".cache"))


def test_stock_and_patched_runs_agree_and_are_drawn(text: Path, tmp_path: Path) -> None:
    picture, memory = tmp_path / "pictures" / "demo.png", tmp_path / "pictures" / "memory.svg"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)  # as a user has it
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--text", text, "--output", picture, "--memory-picture", memory, *SIZES],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The loss curves agree" in done.stdout
    for row in ("final loss", "max |difference|", "peak memory", "time per step"):
        assert row in done.stdout
    assert "4/4" in done.stderr  # progress
    assert "4/4" not in done.stdout
    assert "USDT" not in done.stderr  # of PyTorch's profiler
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in memory.read_text()


def test_the_peak_of_a_run_has_the_optimizers_states() -> None:
    """Recording begins after they were made."""
    settings = Settings(
        None, vocab_size=300, hidden_size=64, layers=1, seq_len=16, seed=0, learning_rate=1e-3, device="cpu"
    )
    *_, run = train(settings, np.arange(32).reshape(2, 1, 16), patched=False)
    assert isinstance(run, TrainingRun)
    assert run.peak_bytes >= run.memory.peak + 2 * 4 * 300 * 64  # two of the embedding alone


def test_both_are_recorded_in_turn_and_the_fastest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that something else has slowed down, as the first one by itself, is none that is drawn."""
    seconds, order = iter([9.0, 7.0, 2.0, 1.0, 3.0, 8.0]), []

    def profile(step: Any, device: Any) -> flce.MemoryProfile:
        order.append(step())
        return flce.MemoryProfile("cpu", ((0.0, 0), (0.5, 1000), (next(seconds), 0)))

    monkeypatch.setattr(flce, "profile_memory", profile)
    settings = Settings(
        None, vocab_size=300, hidden_size=64, layers=1, seq_len=16, seed=0, learning_rate=1e-3, device="cpu"
    )
    batches = np.arange(32).reshape(2, 1, 16)
    runs = train_in_turn(settings, batches, ["stock", "patched"], lambda *_: None)
    assert (runs["stock"].memory.seconds, runs["patched"].memory.seconds) == (2.0, 1.0)
    for stock, patched in zip(order[::2], order[1::2], strict=True):
        assert stock == pytest.approx(patched, abs=1e-4)


@pytest.mark.parametrize("unknown, eos", [(1, None), (None, 0)])
def test_a_tokenizer_that_knows_no_words(unknown: int | None, eos: int | None) -> None:
    """Transformers makes one where a folder has none: of unknown words, or of nothing but the end of a text."""

    class Tokenizer:
        unk_token_id, eos_token_id = unknown, eos

        def encode(self, text: str, **_: Any) -> list[int]:
            return [unknown for _ in text.split()] if unknown else []

    tokenizer: Any = Tokenizer()
    with pytest.raises(ValueError, match=r"the tokenizer knows 0 of \d tokens of the text"):
        token_batches(["the cat sat"], tokenizer, steps=1, batch_size=1, seq_len=8, seed=0)


def test_a_tokenizer_of_another_model() -> None:
    settings = Settings(
        None, vocab_size=300, hidden_size=64, layers=1, seq_len=16, seed=0, learning_rate=1e-3, device="cpu"
    )
    with pytest.raises(ModelError, match="the tokenizer gives token 300, and the model knows 300"):
        next(train(settings, np.full((1, 1, 16), 300), patched=False))


# ------------------------------------------------------------------------------------------- without the training


def run_of(*losses: float, peak: int) -> TrainingRun:
    profile = flce.MemoryProfile("cpu", ((0.0, 0), (0.1, peak // 2), (0.2, 0)))
    return TrainingRun("A model", list(losses), [0.2, 0.1, 0.3], peak, profile)


def answer(monkeypatch: pytest.MonkeyPatch, folder: Path, text: Path, patched: TrainingRun, *options: str) -> Any:
    stock = run_of(3.0, 2.0, 1.0, peak=400)
    monkeypatch.setattr(demo, "train_both", lambda *_, **__: {"stock": stock, "patched": patched})
    monkeypatch.chdir(folder)
    app = typer.Typer()
    app.command()(demo.demo)
    return CliRunner().invoke(app, ["--text", str(text), *SIZES, *options])


def test_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    """It is all that stdout has."""
    done = answer(monkeypatch, tmp_path, text, run_of(3.0, 2.0, 1.00003, peak=100), "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["agree"] is True
    assert facts["mean_difference"] == pytest.approx(1e-5)
    assert facts["max_difference"] == pytest.approx(3e-5)
    assert facts["stock"] == {"losses": [3, 2, 1], "step_seconds": 0.2, "peak_bytes": 400, "step_peak_bytes": 200}
    assert facts["patched"]["step_peak_bytes"] == 50
    assert facts["pictures"] == ["demo.png", "demo-memory.png"]
    for picture in facts["pictures"]:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("last", [1.1, float("nan")])
def test_curves_that_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, last: float) -> None:
    patched = run_of(3.0, 2.0, last, peak=100)
    said = answer(monkeypatch, tmp_path, text, patched)
    assert said.exit_code == 1
    assert "The loss curves differ" in said.stdout
    done = answer(monkeypatch, tmp_path, text, patched, "--json")
    assert done.exit_code == 1

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    facts = json.loads(done.stdout, parse_constant=no_constant)
    assert facts["agree"] is False
    assert facts["patched"]["losses"][2] == (1.1 if last == 1.1 else None)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    for name in ("transformers", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    done = answer(monkeypatch, tmp_path, text, run_of(1.0, peak=1))
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "flce demo needs tokenizers and transformers: pip install tokenizers transformers" in said
