"""Tests with the weights of SmolLM2 135M (`make test-real`); `make test` leaves them out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("REAL_MODELS") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "torch")  # Triton's interpreter is too slow to train with
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Callable[[], Any], Any]:
    """Return a function that loads SmolLM2 in float32, each time anew, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    import real_models

    model, tokenizer = real_models.load("smollm2")
    del model
    return lambda: AutoModelForCausalLM.from_pretrained(real_models.model_folder("smollm2")), tokenizer
