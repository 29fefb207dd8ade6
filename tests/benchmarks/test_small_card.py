"""Tests of the longest sequence that trains, without a GPU: the search, a tiny model, and the prediction."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from benchmarks import small_card
from benchmarks.cases import Effort, select_contenders
from benchmarks.models import CONTENDERS
from benchmarks.small_card import CASES, CLOSE, KIND, MULTIPLE, SMALL_CARD, TINY, longest, predicted, table
from flce.core import devices
from flce.core.device_record import KNOWN_KINDS
from tests.hopper import clear_device_caches, fake_h100


@pytest.mark.parametrize("limit", [8, 100, 9_920, 400_000])
@pytest.mark.parametrize("guess", [9_920, 64])
def test_the_longest_is_found(limit: int, guess: int) -> None:
    tried: list[int] = []

    def trains(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    trained = longest(trains, guess)
    assert trained <= limit < trained + max(MULTIPLE, CLOSE * trained) + 1
    assert len(tried) == len(set(tried))
    assert len(tried) <= (3 if guess == limit else 20)


def test_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the peak of a step is limited instead of the memory of a device."""
    monkeypatch.setattr(small_card, "longest", lambda trains, guess: max(n for n in (guess, 192) if trains(n)))
    monkeypatch.setattr(small_card, "QUICK", 0.0)
    entry = SMALL_CARD.measure(
        TINY[0], torch.device("cpu"), Effort(1, 0.0), select_contenders(CONTENDERS, ["ours", "stock"])
    )
    ours, stock = entry.results
    assert ours.status == stock.status == "ok", (ours.reason, stock.reason)
    assert (ours.tokens, stock.tokens) == (192, 64)
    shown = table(entry).markdown()
    assert shown.startswith("**tiny-llama, float32, no checkpointing, sgd-momentum**")
    assert "| flce | 192 |" in shown


def test_a_larger_gpu_becomes_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device record is the record of a 4090, and PyTorch has the memory of the card."""
    device = torch.device("cuda", 0)
    monkeypatch.setenv("FLCE_PROFILE", "")  # restored after the test
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    fake_h100(monkeypatch, 80 << 30)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    try:
        SMALL_CARD.begin(device)
        record = devices.device_record(device)
    finally:
        clear_device_caches()
    assert record._replace(profile=None) == KNOWN_KINDS[KIND]._replace(name="H100", memory=small_card.MEMORY)
    assert shares == [23 / 80]


def test_what_is_predicted_is_of_the_simulated_card() -> None:
    """The prediction agrees with the results that docs/memory.md quotes."""
    document = json.loads((Path(small_card.__file__).parent / "results" / "small-card-h100.json").read_text())
    (quoted,) = (r["predicted_tokens"] for r in document["cases"][0]["results"] if r["contender"] == "ours")
    assert predicted(CASES[0], patched=True) == pytest.approx(quoted, rel=0.05)
