"""Exactness in the dtypes of training: against float64, and compared with the stock path.

Stock is ``F.linear`` in the dtype of the tensors followed by ``F.cross_entropy`` on float32 logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flce
from flce.engine.borrowing import BlockLayout
from flce.engine.schedules import Schedule
from flce.engine.schedules.blocks import ChunksOfBlocks, SeparatePasses
from flce.engine.schedules.statistics import Statistics
from flce.testing.problem import (
    EXACT_LOGITS,
    INTERPRETED,
    RESULTS,
    Problem,
    Tolerance,
    make_problem,
    relative_error,
    run_fused,
    run_oracle,
    run_stock,
)
from tests.forced import blocks_of_16, force
from tests.helpers import BACKENDS, REDUCTIONS, STRATEGIES, num_blocks, parametrize_pairs

HALF = (torch.bfloat16, torch.float16)
low_precision = pytest.mark.parametrize("dtype", HALF, ids=["bf16", "fp16"])


def case(backend: str, dtype: torch.dtype, device: torch.device, **kwargs: Any) -> Problem:
    """Return a case, smaller under the interpreter. Logits have standard deviation 4, as in a trained model."""
    small = backend == "triton" and device.type == "cpu"
    n, h, v = (48, 48, 384) if small else (256, 128, 1024)
    return make_problem((n,), h, v, dtype=dtype, device=device, std=4.0, **kwargs)


def options_for(strategy: str, **kwargs: Any) -> flce.ChunkOptions:
    if strategy == "tokens":
        kwargs.setdefault("chunk_rows", 40)
    return flce.ChunkOptions(strategy=strategy, **kwargs)  # type: ignore[arg-type]


def errors(problem: Problem, outcome: Any, grad_output: Any = None) -> dict[str, float]:
    """Return relative errors against float64 on the same (rounded) inputs."""
    expected = run_oracle(problem, grad_output=grad_output)
    names = ["loss", "grad_input", "grad_weight"] + ["grad_bias"] * (problem.linear_bias is not None)
    result = {name: relative_error(getattr(outcome, name), getattr(expected, name)) for name in names}
    for k, (got, want) in enumerate(zip(outcome.grad_adapters, expected.grad_adapters, strict=True)):
        for which, a, b in zip("aB", got, want, strict=True):
            result[f"grad_{which}_{k}"] = relative_error(a, b)
    return result


def tolerance_of(problem: Problem) -> Tolerance:
    interpreted = os.environ["FLCE_BACKEND"] == "triton" and problem.input.device.type == "cpu"
    usual = RESULTS[problem.input.dtype]
    return INTERPRETED.get(problem.input.dtype, usual) if interpreted else usual


def assert_no_further_than_stock(problem: Problem, outcome: Any, grad_output: Any = None) -> None:
    stock = errors(problem, run_stock(problem, grad_output=grad_output), grad_output)
    for name, error in errors(problem, outcome, grad_output).items():
        bound = tolerance_of(problem).loss if name == "loss" else tolerance_of(problem).gradient
        assert error <= bound.allowed(stock[name]), f"{name}: {error:.2e}, stock {stock[name]:.2e}"


OPTIONS: list[dict[str, Any]] = [
    {"bias": True, "ignored": 0.2},
    {"softcap": 6.0},
    {"logit_scale": 0.25},
    {"temperature": 2.0},
    {"label_smoothing": 0.1},
    {"class_weight": True},
    {"adapter_ranks": (3, 16)},
    {"adapter_ranks": (8,), "bias": True, "ignored": 0.2},
    {"softcap": 6.0, "logit_scale": 2.0, "temperature": 0.7, "label_smoothing": 0.1},
]


@parametrize_pairs(dtype=HALF, strategy=STRATEGIES, reduction=REDUCTIONS, kwargs=OPTIONS, backend=BACKENDS)
def test_no_further_from_the_truth_than_stock(
    dtype: torch.dtype, strategy: str, reduction: str, kwargs: dict[str, Any], backend: str, device: torch.device
) -> None:
    """Stock rounds the logits of each term before the addition; flce rounds only the sum, after each term."""
    p = case(backend, dtype, device, reduction=reduction, **kwargs)
    upstream = None
    if reduction == "none":
        upstream = torch.rand(p.target.shape, dtype=torch.float64, device=device).float()
    assert_no_further_than_stock(p, run_fused(p, options=options_for(strategy), grad_output=upstream), upstream)


def gradients_apart(rows: int) -> SeparatePasses:
    statistics = Statistics(rows, 16)
    return SeparatePasses(statistics, ChunksOfBlocks(statistics, rows, 16), BlockLayout(rows, 16))


@low_precision
@pytest.mark.parametrize("rows", [None, 40])
@pytest.mark.parametrize("schedule", [blocks_of_16, gradients_apart])
def test_many_blocks_are_as_exact_as_one(
    schedule: Callable[[int], Schedule],
    dtype: torch.dtype,
    rows: int | None,
    torch_backend: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums over 32 blocks of classes, and over chunks of the tokens within each block."""
    p = make_problem((96,), 32, 512, dtype=dtype, device=device, std=2.0, bias=True)
    options = flce.ChunkOptions(strategy="vocab", chunk_rows=rows)
    one = errors(p, run_fused(p, options=options))
    plans = force(monkeypatch, lambda c: schedule(rows or 96))
    for name, error in errors(p, run_fused(p, options=options)).items():
        assert error <= 1.1 * one[name] + 1e-4, (name, error, one[name])
    assert [num_blocks(plan) for plan in plans] == [32, 32]


@pytest.mark.gpu
def test_the_case_of_the_design_on_cuda() -> None:
    """N 32768, H 1024, V 32000, logits of standard deviation 4, on a GPU: the table of exactness."""
    g = torch.Generator(device="cuda").manual_seed(0)
    n, h, v = 32768, 1024, 32000
    x = torch.randn(n, h, generator=g, device="cuda").bfloat16()
    w = (torch.randn(v, h, generator=g, device="cuda") * 4 / h**0.5).bfloat16()
    y = torch.randint(0, v, (n,), generator=g, device="cuda")
    p = Problem(x, w, y)
    found = errors(p, run_fused(p, options=flce.ChunkOptions(logits_dtype=x.dtype)))
    assert found["loss"] <= 6e-5 * 1.05
    assert found["grad_input"] <= 7.8e-3 * 1.05
    assert found["grad_weight"] <= 7.9e-3 * 1.05
    found = errors(p, run_fused(p))
    assert found["loss"] <= EXACT_LOGITS[x.dtype].loss.slack
    assert max(found["grad_input"], found["grad_weight"]) <= 2.5e-3
