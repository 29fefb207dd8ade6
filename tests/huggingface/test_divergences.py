"""Divergences of the lazy logits of two models, without logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.huggingface import lazy_logits
from tests.huggingface.scripts import IDS, Build, V
from tests.huggingface.test_entropies import SINGLE_ROWS, Logits

FORMULAS: dict[str, Callable[[Any, Any], Tensor]] = {
    "batchmean": lambda s, t: F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"),
    "none": lambda s, t: F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1),
    "sum of none": lambda s, t: F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(),
    "reverse": lambda s, t: F.kl_div(t.log_softmax(-1), s.log_softmax(-1), log_target=True, reduction="batchmean"),
    "shifted": lambda s, t: F.kl_div(
        s[:, :-1].float().log_softmax(-1), t[:, :-1].float().log_softmax(-1), log_target=True, reduction="sum"
    ),
    "by hand": lambda s, t: (lambda p, q: (q.exp() * (q - p)).sum(-1))(s.log_softmax(-1), t.log_softmax(-1)),
    "by hand, softmax": lambda s, t: -(t.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1).mean(),
    "probabilities": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "probabilities, none": lambda s, t: F.kl_div(s.log_softmax(-1), t.log_softmax(-1).exp(), reduction="none").sum(-1),
    "cross entropy by hand": lambda s, t: -(t.softmax(-1) * s.log_softmax(-1)).sum(-1),
    "cross entropy": lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(0, 1).softmax(-1)),
    "cross entropy, none": lambda s, t: F.cross_entropy(
        s.flatten(0, 1).log_softmax(-1), (t / 2).softmax(-1).flatten(0, 1), reduction="none"
    ),
    "cross entropy of a token": lambda s, t: torch.nn.CrossEntropyLoss(reduction="sum")(s[0, 0], t[0, 0].softmax(-1)),
    "with itself": lambda s, t: -((s.detach() / 2).softmax(-1) * s.log_softmax(-1)).sum(-1),
    "a bias of the teacher": lambda s, t: F.kl_div(s.log_softmax(-1), (t + BIAS).softmax(-1), reduction="sum"),
    "an adapter of the teacher": lambda s, t: F.kl_div(s.log_softmax(-1), (t + t / 2).softmax(-1)),
}
BIAS: Tensor = torch.linspace(-1.0, 2.0, V)


def run(formula: Callable[[Any, Any], Tensor], student: Any, teacher: Any) -> tuple[Tensor, list[Tensor], list[str]]:
    with torch.no_grad(), lazy_logits(teacher) if flce.is_patched(teacher) else torch.no_grad():
        teacher_logits = teacher(input_ids=IDS, use_cache=False).logits
    logits = student(input_ids=IDS, use_cache=False).logits
    with Logits() as mode:
        values = formula(logits, teacher_logits)
        weights = torch.linspace(0.5, 1.5, values.numel()).view(values.shape)
        gradients = torch.autograd.grad((values * weights).sum(), [*student.parameters()])
    return values.detach(), [*gradients], mode.found


def models(build: Build, **how: Any) -> list[Any]:
    """Return a student with a softcap and a teacher without one."""
    made = [build(name, num_hidden_layers=1) for name in ("Gemma2", "Llama")]
    if how:
        for model in made:
            flce.patch_model(model, **how)
    return [made[0].train(), made[1].eval()]


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula(name: str, build: Build) -> None:
    want, right, there = run(FORMULAS[name], *models(build))
    got, gradients, found = run(FORMULAS[name], *models(build, options=SINGLE_ROWS, on_materialize="raise"))
    assert there
    assert not found
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for gradient, other in zip(gradients, right, strict=True):
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 1e-12


@pytest.mark.parametrize("name", ["batchmean", "none", "probabilities", "cross entropy"])
def test_autocast(name: str, build: Build) -> None:
    """Losses are float32, as in stock, which rounds log-probabilities to bfloat16 before."""
    exact, gradients, _ = run(FORMULAS[name], *models(build))
    with torch.autocast("cpu", torch.bfloat16):
        want, theirs, _ = run(FORMULAS[name], *models(build))
        got, ours, _ = run(FORMULAS[name], *models(build, on_materialize="raise"))
    assert got.dtype == want.dtype == torch.float32
    # The hidden states are bfloat16 in both.
    for value, stock, right in zip((got, *ours), (want, *theirs), (exact, *gradients), strict=True):
        assert (value - right).norm() <= max(0.1 * right.norm(), 1.2 * (stock - right).norm()) + 1e-12


@pytest.mark.parametrize("which", [0, 1])
def test_an_infinite_bias(which: int, build: Build) -> None:
    """Stock's product of the probability 0 with an infinite log-probability is NaN."""
    values = []
    for how in ({}, {"on_materialize": "ignore"}):
        both = models(build, **how)
        both[which].lm_head.bias = torch.nn.Parameter(torch.zeros(V).index_fill(0, torch.tensor([3]), -torch.inf))
        values += [
            run(FORMULAS[name], *both)[0] for name in ("sum of none", "reverse", "probabilities", "cross entropy")
        ]
    torch.testing.assert_close(values[4:], values[:4], equal_nan=True)


@pytest.mark.parametrize("weights_of", ["t", "s"])
def test_weights_of_a_wider_dtype(weights_of: str, build: Build) -> None:
    """The product of bfloat16 differences and float32 probabilities is float32, as in stock."""
    student, teacher = (model.bfloat16() for model in models(build, on_materialize="ignore"))

    def formula(s: Any, t: Any) -> Tensor:
        weights = {"s": s, "t": t}[weights_of].float().softmax(-1)
        values: Tensor = (weights * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
        return values

    assert run(formula, student, teacher)[0].dtype == torch.float32
