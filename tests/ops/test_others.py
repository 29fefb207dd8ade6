"""Tests that other projects publish: their samples, shapes and tolerances, with our code and the float64 oracle."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.oracle import OracleResult
from flce.testing.problem import CallResult, Problem, make_problem, run_fused, run_oracle, run_stock
from tests.ops import test_cross_entropy
from tests.search import arguments

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

# ---------------------------------------------------------------------------------------------------------
# OpInfo samples of PyTorch


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
# Grids of other libraries


class Grid(NamedTuple):
    """A call, and the tolerance of a library: the error of each element is at most ``factor`` times the largest error
    of stock, or the error of stock at this element, plus ``atol + rtol * abs(expected)``."""

    source: str
    shape: tuple[int, int, int]  # tokens, hidden, vocabulary; hidden 0: logits without a head
    dtype: torch.dtype
    arguments: dict[str, Any]
    of_loss: tuple[float, float, float]  # factor, atol, rtol
    of_gradient: tuple[float, float, float]
    by_element: bool = False


def grids() -> list[Grid]:
    found = []
    # linkedin/Liger-Kernel, test/transformers/test_fused_linear_cross_entropy.py
    for (n, h, v), (dtype, atol, rtol), bias in itertools.product(
        [(8, 512, 512), (16384, 4096, 32000), (1692, 8192, 32000)],
        [(bf16, 5e-3, 5e-2), (f32, 1e-5, 5e-4)],
        [True, False],
    ):
        found.append(Grid("Liger", (n, h, v), dtype, {"bias": bias}, (0.0, atol, rtol), (0.0, atol, rtol)))
    # apple/ml-cross-entropy, tests/test_cce_loss_backward.py and test_cce_loss_forward.py
    for softcap, bias, shift, ignored, reduction, shape in itertools.product(
        [None, 20.0], [False, True], [0, 1], [0.0, 0.2], ["none", "mean", "sum"], [(256, 128, 512), (252, 123, 507)]
    ):
        arguments = {"softcap": softcap, "bias": bias, "shift": shift, "ignored": ignored, "reduction": reduction}
        # Gradients are rounded: where the error of stock is 0 by chance, half a unit in the last place is left.
        of_gradient = (1.0, 1e-2, torch.finfo(bf16).eps / 2)
        found.append(Grid("CCE", shape, bf16, arguments, (1.0, 1e-2, 0.0), of_gradient, by_element=True))
    # Dao-AILab/quack, tests/test_linear_cross_entropy.py
    for n, h, v, reduction in itertools.product([8, 16, 24], [768, 1024], [32000, 50264, 128256], ["mean", "sum"]):
        arguments = {"reduction": reduction, "std": 0.1}
        found.append(Grid("QuACK", (n, h, v), bf16, arguments, (3.0, 1e-5, 0.0), (2.0, 1e-4, 0.0)))
    # Dao-AILab/quack, tests/test_cross_entropy.py
    for n, v, dtype in itertools.product([1, 77, 289], [192, 256, 760, 1128, 4096, 128256, 262144], [bf16, f16, f32]):
        arguments = {"reduction": "none", "std": 0.1}
        # Their reference gradient is rounded to the dtype of the logits: half a unit in the last place.
        tolerance = (0.0, 5e-5, 1e-5 + torch.finfo(dtype).eps / 2)
        found.append(Grid("QuACK logits", (n, 0, v), dtype, arguments, (0.0, 5e-5, 1e-5), tolerance))
    # huggingface/trl, tests/distributed/chunked_loss_zero3.py
    for ignored in (0.0, 0.5, 1.0):
        tolerance = (0.0, 1e-5, 1e-4)
        found.append(Grid("TRL", (8, 8, 32768), f32, {"ignored": ignored, "reduction": "sum"}, tolerance, tolerance))
    return found


def results(r: CallResult | OracleResult) -> dict[str, Tensor | None]:
    return {"loss": r.loss, "x": r.grad_input, "w": r.grad_weight, "b": r.grad_bias}


def assert_as_exact_as_theirs(grid: Grid, device: torch.device) -> None:
    n, h, v = grid.shape
    p: Problem = make_problem(
        (4, n // 4) if n % 4 == 0 else (n,), h or None, v, dtype=grid.dtype, device=device, **grid.arguments
    )
    ours = run_fused(p) if h else test_cross_entropy.run(p)
    exact, stock = results(run_oracle(p)), results(run_stock(p))
    for name, got in results(ours).items():
        if got is None:
            continue
        expected = exact[name]
        factor, atol, rtol = grid.of_loss if name == "loss" else grid.of_gradient
        assert expected is not None
        allowed = atol + rtol * expected.abs()
        reference = stock[name]
        if factor and reference is not None:
            error = (reference.double() - expected).abs()
            allowed = allowed + factor * (error if grid.by_element else error.amax())
        error = (got.double() - expected).abs()
        assert (error <= allowed).all(), f"{name}: {float((error - allowed).max()):.2e} above the tolerance"


EVERY = grids()
# On a CPU: the small calls, and every eighth of the calls of CCE.
SMALL = [g for g in EVERY if g.shape[0] * max(g.shape[1], 150) * g.shape[2] <= 20_000_000]
SMALL = [g for k, g in enumerate(SMALL) if g.source != "CCE" or k % 8 == 0]


@pytest.mark.parametrize("source", sorted({g.source for g in SMALL}))
def test_grids_of_other_libraries(source: str, torch_backend: str) -> None:
    for grid in SMALL:
        if grid.source == source:
            assert_as_exact_as_theirs(grid, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("grid", EVERY, ids=lambda g: f"{g.source}-{g.shape}-{g.dtype}-{g.arguments}")
def test_grids_on_a_gpu(grid: Grid) -> None:
    assert_as_exact_as_theirs(grid, torch.device("cuda"))


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
