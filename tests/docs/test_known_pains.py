"""Check that the tests named in docs/known-pains.md exist; and tests of rows that no other file tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.core.device_record import KNOWN_KINDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "known-pains.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")][1:]


@functools.cache
def names_in(path: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.findall(r"\[([^\]]*)\]", row)[0])
def test_rows_name_threads_and_tests(row: str) -> None:
    complaint, thread, answer, tests = (cell.strip() for cell in row.strip().strip("|").split("|"))
    assert complaint
    assert answer
    assert re.match(r"\[\w+ #\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", thread)
    for text, number in re.findall(r"#(\d+)\]\(https://[^)]*/(\d+)\)", row):
        assert text == number
    link = r"\[`(\w+)`\]\(\.\./([\w/.]+)\)"
    assert re.fullmatch(rf"{link}(, {link})*", tests)
    for name, path in re.findall(link, tests):
        assert name in names_in(path), f"{path} has no {name}"


@pytest.mark.parametrize("name", ["causal-qwen3", "image-qwen3_vl"])
def test_token_accuracy_makes_no_logits(name: str) -> None:
    """Compute the accuracy like TRL's ``SFTTrainer`` without Liger, from a model's outputs."""
    pytest.importorskip("transformers")
    from tests.huggingface import architectures

    (architecture,) = [a for a in architectures.architectures() if a.id == name] or pytest.skip(f"no {name} here")

    model = architectures.build(architecture)
    inputs = architectures.batch(architecture)
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(-1)
    inputs["labels"][:, 3::2] = predicted[:, 2:-1:2]  # half of the labels: the untrained model predicts these tokens

    def accuracy(outputs: Any) -> Tensor:
        shift_logits = outputs.logits[..., :-1, :].contiguous()
        shift_labels = inputs["labels"][..., 1:].contiguous()
        predictions = shift_logits.argmax(dim=-1)
        mask = shift_labels != -100
        return ((predictions == shift_labels) & mask).sum() / mask.sum()

    expected = accuracy(model(**inputs))
    outputs = flce.patch_model(model, on_materialize="raise")(**inputs)
    assert torch.equal(accuracy(outputs), expected)
    assert 0.3 < expected < 1.0
    assert not outputs.logits.is_materialized


def test_the_plan_does_not_depend_on_free_memory(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Check that a plan reads no memory statistics, and that a plan for a 24 GB GPU needs no GPU."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a plan reads memory statistics")

    for name in ("mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, fail)
    # Sizes that no other test has planned.
    assert flce.plan(8191, 4096, 128257, torch.bfloat16, device=device).workspace_bytes > 0
    planned = flce.plan(8191, 4096, 128257, torch.bfloat16, device_kind="RTX-4090")
    assert 0 < planned.workspace_bytes <= (KNOWN_KINDS["RTX-4090"].memory or 0) / 24
