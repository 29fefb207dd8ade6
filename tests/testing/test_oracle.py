"""Comparisons of the float64 oracle with PyTorch's operators and with values computed by hand."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flce.testing import oracle as module
from flce.testing.oracle import oracle
from flce.testing.problem import make_problem, relative_error, run_oracle
from tests.helpers import REDUCTIONS

# Two tokens that count, of two classes: logits (0, log 3) and (log 3, 0), and probabilities (1/4, 3/4) and (3/4, 1/4).
LOGITS = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0], [5.0, 7.0]], dtype=torch.float64)
TARGET = torch.tensor([1, 1, -100])
LOSSES = math.log(4 / 3), math.log(4)


def test_the_oracle_shares_no_code_with_flce() -> None:
    """Check that the oracle imports nothing of flce and calls no loss of PyTorch."""
    text = Path(module.__file__).read_text()
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    assert names == {"__future__", "collections.abc", "dataclasses", "torch"}
    assert "cross_entropy" not in text.partition('"""\n\nfrom')[2]
    assert not any("flce" in name for name in vars(module) if name != "__file__" and not name.startswith("__"))


@pytest.mark.parametrize(
    "arguments, loss, gradient",
    [
        ({"reduction": "sum"}, sum(LOSSES), [[0.25, -0.25], [0.75, -0.75], [0, 0]]),
        ({}, sum(LOSSES) / 2, [[0.125, -0.125], [0.375, -0.375], [0, 0]]),
        ({"reduction": "none", "grad_output": 2.0}, [*LOSSES, 0], [[0.5, -0.5], [1.5, -1.5], [0, 0]]),
        ({"reduction": "sum", "num_items": 4}, sum(LOSSES) / 4, [[1 / 16, -1 / 16], [3 / 16, -3 / 16], [0, 0]]),
        # A logarithm of a sum of exponentials of log 4, squared; its gradient is 2 z lse p.
        (
            {"reduction": "sum", "z_loss": 0.5},
            sum(LOSSES) + math.log(4) ** 2,
            [
                [0.25 + math.log(4) / 4, -0.25 + 3 * math.log(4) / 4],
                [0.75 + 3 * math.log(4) / 4, -0.75 + math.log(4) / 4],
                [0, 0],
            ],
        ),
        ({"reduction": "sum", "label_smoothing": 1.0}, sum(LOSSES), [[-0.25, 0.25], [0.25, -0.25], [0, 0]]),
        (
            {"weight": torch.tensor([9.0, 3.0]), "token_weight": torch.tensor([1.0, 2.0, 5.0])},
            (LOSSES[0] + 2 * LOSSES[1]) / 2,
            [[0.125, -0.125], [0.75, -0.75], [0, 0]],
        ),
        # Each position predicts the next label: the last nothing, the second an ignored one.
        ({"reduction": "sum", "shift": 1}, LOSSES[0], [[0.25, -0.25], [0, 0], [0, 0]]),
        ({"reduction": "sum", "num_items": 0, "empty_loss": "zero"}, 0.0, [[0, 0], [0, 0], [0, 0]]),
        ({"reduction": "sum", "logit_scale": -1.0}, sum(LOSSES), [[-0.75, 0.75], [-0.25, 0.25], [0, 0]]),
        (
            {"reduction": "sum", "temperature": 2 * math.log(3) / math.log(9)},
            sum(LOSSES),
            [[0.25, -0.25], [0.75, -0.75], [0, 0]],
        ),
    ],
    ids=lambda value: "-".join(value) or "mean" if isinstance(value, dict) else "",
)
def test_by_hand(arguments, loss, gradient) -> None:
    found = oracle(LOGITS, None, TARGET, **arguments)
    torch.testing.assert_close(found.loss, torch.as_tensor(loss, dtype=torch.float64))
    torch.testing.assert_close(found.grad_input, torch.tensor(gradient, dtype=torch.float64))
    # As a head whose columns are the classes, with the logits as weights of unit vectors.
    head = oracle(torch.eye(3, dtype=torch.float64), LOGITS.t(), TARGET, **arguments)
    torch.testing.assert_close(head.loss, found.loss)
    torch.testing.assert_close(head.grad_weight, found.grad_input.t())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_several_parts(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem((3, 7), 8, 19, bias=True, adapter_ranks=(2,), ignored=0.3, reduction=reduction, z_loss=0.1)
    at_once = run_oracle(p, 0.5)
    monkeypatch.setattr(module, "MAX_LOGITS", 4 * 19)
    parts = run_oracle(p, 0.5)
    for name in ("loss", "z_loss", "lse", "argmax", "grad_input", "grad_weight", "grad_bias", "grad_adapters"):
        torch.testing.assert_close(getattr(parts, name), getattr(at_once, name))


def test_the_error_of_another_shape() -> None:
    assert relative_error(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])) == pytest.approx(0.02, rel=1e-4)
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    with pytest.raises(ValueError, match="a result has shape"):
        relative_error(torch.ones(3), torch.ones(3, 1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("class_weight", [False, True])
def test_oracle_agrees_with_torch(reduction: str, smoothing: float, class_weight: bool) -> None:
    """Compare options that PyTorch has, to the last digits."""
    p = make_problem((21,), 8, 33, bias=True, class_weight=class_weight, ignored=0.3, reduction=reduction)
    p = p.with_(label_smoothing=smoothing)
    upstream = torch.randn(21 if reduction == "none" else (), dtype=torch.float64)
    ours = run_oracle(p, grad_output=upstream)
    leaves = [t.detach().clone().requires_grad_() for t in (p.input, p.linear_weight, p.linear_bias)]  # type: ignore[union-attr]
    loss = F.cross_entropy(F.linear(*leaves), p.target, **p.kwargs)
    grads = torch.autograd.grad(loss, leaves, upstream)
    torch.testing.assert_close(ours.loss, loss.detach(), rtol=1e-13, atol=1e-14)
    for mine, theirs in zip((ours.grad_input, ours.grad_weight, ours.grad_bias), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_oracle_statistics() -> None:
    """Compare the statistics with ``torch.distributions`` and direct formulas."""
    p = make_problem((4, 6), 8, 19, bias=True, softcap=3.0, temperature=1.3, ignored=0.2)
    out = run_oracle(p)
    x, w, b = p.input, p.linear_weight, p.linear_bias
    assert b is not None
    z = 3.0 * torch.tanh((x @ w.t() + b) / 3.0) / 1.3
    categorical = torch.distributions.Categorical(logits=z)
    valid = p.target != -100
    torch.testing.assert_close(out.entropy, categorical.entropy() * valid)
    torch.testing.assert_close(out.logprob, categorical.log_prob(p.target.clamp(min=0)) * valid)
    torch.testing.assert_close(out.lse, z.exp().sum(-1).log() * valid)
    assert torch.equal(out.argmax, z.argmax(-1).masked_fill(~valid, -1))
    assert torch.equal(out.correct, z.argmax(-1) == p.target)
