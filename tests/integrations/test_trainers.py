"""Run the Python blocks of docs/trainers.md and compare their training losses with stock."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("typer", reason="the tokenizer of the scripts")

import transformers

import demo
import flce
from flce.huggingface import callback
from flce.testing import tiny_model

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
BLOCKS = {
    part.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", part, re.M | re.S) for part in PAGE.split("\n## ")
}
TRAINING = ("Transformers", "Accelerate", "Lightning")


def losses(code: str, folder: Path) -> tuple[list[float], Any]:
    """Run a training with the lines of a block. Return the losses and the model."""
    model, seen = tiny_model().train(), []
    model.register_forward_hook(lambda module, args, outputs: seen.append(outputs.loss.item()))
    data = demo.examples(16)
    if "trl.install()" in code:
        data = importlib.import_module("datasets").Dataset.from_dict({"text": demo.excerpts(16)})
    names = {
        "model": model,
        "tokenizer": demo.tiny_tokenizer(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "data": data,
        "batches": DataLoader(data, batch_size=4),
        "args": transformers.TrainingArguments(**demo.trainer_settings(str(folder), 4)),
    }
    exec(compile(code, "docs/trainers.md", "exec"), names)
    return seen, model


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("name", TRAINING)
def test_trains_as_stock(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = BLOCKS[name]
    for package in re.findall(r"^(?:import|from) (accelerate|lightning)", code, re.M):
        pytest.importorskip(package, reason="it is in the extra `trainers`")
    monkeypatch.chdir(tmp_path)
    got, model = losses(code, tmp_path)
    assert flce.report(model).fused == len(got) == 4
    for module in (flce, callback):
        monkeypatch.setattr(module, "patch_model", lambda model, **_: model)
    expected, stock = losses(code, tmp_path)
    assert not flce.is_patched(stock)
    assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if blocks and name not in TRAINING])
def test_other_lines_run(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for code in BLOCKS[name]:
        if "trl.install()" in code:
            pytest.importorskip("trl", reason="it is in the extra `trainers`")
            request.addfinalizer(lambda: flce.huggingface.trl.uninstall())
        _, model = losses(code, tmp_path)
        if "trl.install()" in code:
            assert flce.report(model).fused == 4
