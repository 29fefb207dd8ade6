"""Compare the code of docs/how-it-works.md with flce and PyTorch: loss and gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.problem import make_problem

TEXT = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
TOKENS, CLASSES = 37, 71
IGNORE_INDEX = 5


def results(function: Any, *arguments: Any, seed: int = 0) -> list[Tensor]:
    """Return the loss, and the gradients of input, weight and bias for an upstream gradient of 3."""
    p = make_problem((TOKENS,), 16, CLASSES, bias=True, ignored=0.3, seed=seed, ignore_index=IGNORE_INDEX)
    assert p.linear_bias is not None
    leaves = [tensor.requires_grad_() for tensor in (p.input, p.linear_weight, p.linear_bias)]
    loss = function(*leaves, p.target, *arguments)
    return [loss.detach(), *torch.autograd.grad(3.0 * loss, leaves)]


def stock(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b), target, ignore_index=IGNORE_INDEX)


def fused(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Any:
    return flce.fused_linear_cross_entropy(x, w, target, linear_bias=b, ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("chunk, block", [(8, 16), (TOKENS, CLASSES), (1, CLASSES), (TOKENS, 1), (100, 100)])
def test_the_code_equals_the_operator(chunk: int, block: int, torch_backend: str) -> None:
    names: dict[str, Any] = {}
    exec(CODE, names)
    ours = results(names["LinearCrossEntropy"].apply, IGNORE_INDEX, chunk, block)
    for other in (fused, stock):
        for got, expected in zip(ours, results(other), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_the_code_is_short() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 60


def test_named_files_and_schedules_exist() -> None:
    from flce.planning.search import SCHEDULES

    for path in re.findall(r"`((?:flce|tests)/[\w/.]+)`", TEXT):
        assert (Path(__file__).parents[2] / path).exists(), path
    for name in ("Blocks", "Chunks"):
        assert f"`{name}`" in TEXT
        assert name in {schedule.__name__ for schedule in SCHEDULES}
