"""Logits that are a sum of terms: adapters on the head, against the oracle and against the equivalent merged head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flce
from flce.core.gemm import matmul
from flce.testing.problem import make_problem, run_fused
from tests.helpers import TOLERANCE, assert_near

STRATEGIES = pytest.mark.parametrize("strategy", ["tokens", "vocab"])


@STRATEGIES
def test_gradients_of_some_adapters(strategy: str, backend: str, device: torch.device) -> None:
    """The first adapter is frozen; of the second adapter only one factor is trained."""
    p = make_problem((11,), 8, 30, adapter_ranks=(2, 3), device=device)
    everything = run_fused(p)
    (a1, b1), (a2, b2) = p.adapters
    b2 = b2.clone().requires_grad_()
    loss: Any = flce.fused_linear_cross_entropy(
        p.input,
        p.linear_weight,
        p.target,
        adapters=((a1, b1), (a2, b2)),
        options=flce.ChunkOptions(strategy=strategy),  # type: ignore[arg-type]
    )
    loss.backward()
    expected = everything.grad_adapters[1][1]
    assert expected is not None
    assert_near(b2.grad, expected, TOLERANCE[torch.float64], "gradient")


def test_one_tensor_in_several_terms(backend: str, device: torch.device) -> None:
    """If a tensor is in several terms (an adapter twice, an input of head and adapter), gradients add up."""
    p = make_problem((9,), 8, 30, adapter_ranks=(8,), device=device)
    ((_, other),) = p.adapters
    for adapters, weight in (([other, other], lambda w, o: w + 2 * o), ([other], lambda w, o: w + o)):
        results = []
        for merged in (True, False):
            x, w, o = (t.clone().requires_grad_() for t in (p.input, p.linear_weight, other))
            terms = [] if merged else [(x, o)] * len(adapters)
            loss: Any = flce.fused_linear_cross_entropy(x, weight(w, o) if merged else w, p.target, adapters=terms)
            loss.backward()
            results.append([loss.detach(), x.grad, w.grad, o.grad])
        torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------
# Products that add a term to logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("cols", [96, 101])
@pytest.mark.parametrize("wide", [False, True])
def test_adding_to_half_precision_rounds_no_more_than_stock(
    dtype: torch.dtype, k: int, cols: int, wide: bool, device: torch.device
) -> None:
    """Adding a term to a tile in half precision rounds once, as stock does.

    Rows of the tile have an aligned stride; `wide`: so have the rows of the operand, k columns of a wider tensor. On
    CUDA the vendor's library rounds some products before the addition, as in stock's addition.
    """
    a = torch.randn(40, 64 if wide else k, device=device).to(dtype)[:, :k]
    b = torch.randn(cols, k, device=device).to(dtype)
    out = torch.randn(40, 128, device=device).to(dtype)[:, :cols]
    exact = out.double() + a.double() @ b.double().t()
    rounded = out + (a.double() @ b.double().t()).to(dtype) if out.is_cuda else exact.to(dtype)
    matmul(a, b.t(), out=out, accumulate=True)
    assert (out.double() - exact).norm() <= 1.01 * (rounded.double() - exact).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [3, 8, 12])
@pytest.mark.parametrize("transposed", [False, True])
def test_adding_to_logits_on_cuda_takes_no_copy_of_them(k: int, transposed: bool) -> None:
    n, v = 1024, 50257
    a = torch.randn(n, 64, device="cuda", dtype=torch.bfloat16)[:, :k]
    b = torch.randn(v, k, device="cuda", dtype=torch.bfloat16)
    b = b.t().contiguous().t() if transposed else b
    out = torch.zeros(n, 50304, device="cuda", dtype=torch.bfloat16)[:, :v]
    matmul(a, b.t(), out=out, accumulate=True)  # the vendor's library allocates its workspace once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    matmul(a, b.t(), out=out, accumulate=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < n * v / 4
