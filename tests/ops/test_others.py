"""Samples of PyTorch's tests, and gradcheck."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.problem import make_problem
from tests.search import arguments


def sample_inputs(name: str) -> list[Any]:
    """Return the samples of all variants of an operator, in float64; an empty list if this PyTorch has none."""
    # PyTorch imports this package for tests of its own.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    variants = [op for op in op_db if op.name == name]
    return [s for op in variants for s in op.sample_inputs("cpu", torch.float64, requires_grad=True)]


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "nn.functional.linear_cross_entropy": (flce.fused_linear_cross_entropy, getattr(F, "linear_cross_entropy", None)),
    "nn.functional.cross_entropy": (flce.cross_entropy, F.cross_entropy),
    "softmax": (flce.softmax, F.softmax),
    "log_softmax": (flce.log_softmax, F.log_softmax),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_of_pytorch(name: str, torch_backend: str) -> None:
    ours, stock = FUNCTIONS[name]
    samples = sample_inputs(name)
    if not samples or stock is None:
        pytest.skip(f"PyTorch {torch.__version__} has no samples of {name}")
    for sample in samples:
        kwargs = {key: value for key, value in sample.kwargs.items() if key != "options"}
        tensors = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]
        given = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        # Class probabilities and heads of more dimensions are errors.
        if "cross_entropy" in name and not any(t.dtype == torch.int64 for t in tensors):
            continue
        if "linear" in name and tensors[1].dim() > 2:
            continue
        rest = [a for a in sample.args if not isinstance(a, Tensor)]
        expected = stock(*given, *rest, **kwargs)
        ours_given = list(given)
        if name == "nn.functional.cross_entropy":  # classes are the last dimension of flce's logits
            ours_given = [t.movedim(1, -1) if t.is_floating_point() and t.dim() > 2 else t for t in given]
        got = ours(*ours_given, *rest, **kwargs)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, equal_nan=True)
        leaves = [t for t in given if t.requires_grad]
        if not leaves or not got.requires_grad or not got.numel():
            continue
        upstream = torch.linspace(0.5, 1.5, got.numel(), dtype=got.dtype).view_as(got)
        wanted = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
        found = torch.autograd.grad(got, leaves, upstream, allow_unused=True)
        for grad, want in zip(found, wanted, strict=True):
            if want is not None:
                torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-9, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------
# gradcheck; tests/torch_ops/test_torch_features.py has opcheck, tests/ops/test_softmax.py the softmaxes

TRANSFORM = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}
CALLS: dict[str, dict[str, Any]] = {
    "means": {**TRANSFORM, "label_smoothing": 0.1, "z_loss": 0.1, "bias": True},
    "tokens": {"reduction": "none", "class_weight": True, "token_weight": True, "adapter_ranks": (2,), "ignored": 0.3},
}


@pytest.mark.parametrize("strategy", ["tokens", "vocab"])
@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(name: str, strategy: Any, torch_backend: str) -> None:
    p = make_problem((2, 3), 4, 7, **CALLS[name]).map(lambda t, letter: t.requires_grad_())
    options = flce.ChunkOptions(strategy=strategy)
    head: Any = {"linear_bias": p.linear_bias, "adapters": p.adapters, "options": options}

    def loss(*_: Tensor) -> Any:
        return flce.fused_linear_cross_entropy(p.input, p.linear_weight, p.target, **head, **p.kwargs)

    def outputs(*_: Tensor) -> Any:
        names: Any = {"outputs": ("logprob", "entropy", "lse"), "candidates": p.target[..., None] % 5}
        out = flce.linear_logprobs(p.input, p.linear_weight, p.target, **names, **head)
        return out.logprob, out.entropy, out.lse, out.candidate_logprob

    leaves = arguments.leaves_of(p)
    assert torch.autograd.gradcheck(loss, [*leaves.values()])
    assert torch.autograd.gradcheck(outputs, [leaf for letter, leaf in leaves.items() if letter != "t"])
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: flce.cross_entropy(z, p.target, **p.kwargs), [logits])
