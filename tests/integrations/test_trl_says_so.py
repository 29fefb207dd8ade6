"""TRL's trainers go round the head: a patched model is not fused there, and says so after the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flce

pytest.importorskip("transformers")
pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
pytest.importorskip("typer", reason="the scripts' command line")

from flce.huggingface import FlceCallback, NotFusedWarning
from tests.integrations import trl_trainers as trainers


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("make", [trainers.sft, trainers.dpo, trainers.kto, trainers.grpo, trainers.rloo])
@pytest.mark.parametrize("fused", [False, True])
def test_trl_says_so(make: Callable[..., Any], fused: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = trainers.train(make, str(tmp_path), 2, fused=fused, common={"callbacks": [FlceCallback()]})
    said = [str(w.message) for w in caught if w.category is NotFusedWarning]
    assert len(said) == (0 if fused else 1)
    assert all("round the head" in text and "flce.huggingface.trl.install()" in text for text in said)
    assert (flce.report(trainer.model).fused > 0) == fused
