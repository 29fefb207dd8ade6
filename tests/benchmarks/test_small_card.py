"""The longest sequence that trains, without a GPU: the search for it, a tiny model, and what is predicted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from benchmarks import small_card
from benchmarks.small_card import CASES, CLOSE, KIND, MULTIPLE, longest, main, predicted, table
from flce.core import devices
from flce.core.device_record import KNOWN
from tests.hopper import forget_devices, instead_of_a_gpu


@pytest.mark.parametrize("limit", [8, 100, 1000, 9_920, 87_360, 400_000])
@pytest.mark.parametrize("guess", [9_920, 64])
def test_the_longest_is_found(limit: int, guess: int) -> None:
    tried: list[int] = []

    def trains(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    trained, failed = longest(trains, guess, math.inf)
    assert failed is not None
    assert trained <= limit < failed
    assert failed - trained <= max(MULTIPLE, CLOSE * trained)
    assert len(tried) == len(set(tried))
    assert len(tried) <= (3 if guess == limit else 20)


def test_nothing_is_tried_when_the_time_is_over() -> None:
    assert longest(lambda tokens: True, 64, -math.inf) == (0, None)


def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the peak of a step is bounded in the place of the memory of a device."""
    pytest.importorskip("peft")
    monkeypatch.setattr(small_card, "CLOSE", 1.0)
    monkeypatch.setattr(small_card, "QUICK", 0.0)
    monkeypatch.setattr(small_card, "TINY", small_card.TINY[1:])
    out = tmp_path / "results" / "small.json"
    main(out, seconds=120.0)
    document: dict[str, Any] = json.loads(out.read_text())
    assert document["card"] == {"kind": "cpu", "memory": small_card.TINY_MEMORY}
    (case,) = document["cases"]
    found = {result["contender"]: result for result in case["results"]}
    ours, stock = found["ours"], found["stock"]
    assert ours["status"] == stock["status"] == "ok"
    assert ours["trained"] > 1.5 * stock["trained"] > 0
    assert case["case"]["lora_rank"] == 16
    shown = capsys.readouterr().out
    assert shown == table(document).markdown() + "\n"
    assert "| float32, LoRA of rank 16, sgd-momentum | flce |" in shown


def test_a_larger_gpu_becomes_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and launches are those of a 4090, and PyTorch has as much memory."""
    device = torch.device("cuda", 0)
    monkeypatch.setenv("FLCE_PROFILE", "")
    instead_of_a_gpu(monkeypatch, 80 << 30)
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    small_card.simulate(device, str(tmp_path))
    record = devices.device_record(device)
    assert record._replace(profile=None) == KNOWN[KIND]._replace(name="H100", memory=small_card.MEMORY)
    assert shares == [23 / 80]
    forget_devices()


def test_what_is_predicted_is_of_the_simulated_card() -> None:
    """Full training, and LoRA with checkpointing, each twice as long as stock or longer."""
    pytest.importorskip("peft")
    full, lora, _ = CASES
    assert KIND == "RTX-4090"
    assert 9_000 < predicted(full, patched=True) < 11_000
    assert 5_000 < predicted(full, patched=False) < 6_500
    assert predicted(lora, patched=True) > 6 * predicted(lora, patched=False)
