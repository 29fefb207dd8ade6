"""Matrix products against float64: operands in slabs, sums, and the ends of unaligned extents."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import flce
from flce.core import gemm

M, K, N = 19, 27, 37  # not divisible by `gemm.ALIGNMENT`
HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def operands(a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = ((M, K), a_dtype), ((K, N), b_dtype), ((M, N), out_dtype)
    a, b, out = (torch.randn(size, generator=g, dtype=DOUBLE).to(dtype) for size, dtype in sizes)
    return a, b, out


def assert_product(a: Tensor, b: Tensor, before: Tensor, out: Tensor, accumulate: bool) -> None:
    expected = a.double() @ b.double() + (before.double() if accumulate else 0.0)
    tolerance = 1e-2 if out.dtype == HALF else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtypes", [(HALF, HALF, FLOAT), (HALF, HALF, HALF), (FLOAT, HALF, FLOAT), (FLOAT,) * 3])
def test_operands_that_are_cast_in_slabs(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are cast in slabs of columns, of the inner dimension, and of rows."""
    for bound in ("MIN_CAST_BYTES", "MAX_CAST_BYTES"):
        monkeypatch.setattr(gemm, bound, 5 * 4 * N)
    a, b, out = operands(*dtypes)
    for x, y, z in ((a, b, out), (b.t(), a.t(), out.t().contiguous()), (out, b.t(), a.float())):
        before = z.clone()
        gemm.matmul(x, y, z, accumulate)
        assert_product(x, y, before, z, accumulate)


def test_ends_of_unaligned_extents() -> None:
    """The CUDA path runs on a CPU. One extent is the vocabulary, and its end is a separate product."""
    for accumulate, unaligned in itertools.product((False, True), range(3)):
        m, k, n = (size if number == unaligned else 32 for number, size in enumerate((M, K, N)))
        a = torch.randn(k, m + 32 - m % 32)[:, :m].t() if unaligned == 0 else torch.randn(m, 32 * (1 + k // 32))[:, :k]
        out = torch.randn(m, 64)[:, :n]
        b, before = torch.randn(k, n), out.clone()
        if unaligned == 1:
            b = torch.randn(n, 32 * (1 + k // 32))[:, :k].t() if accumulate else b
        gemm._aligned_matmul(a, b, out, accumulate)
        assert_product(a, b, before, out, accumulate)


def divided(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute a half-precision product in 16 parts that omits an end of the inner dimension, as cuBLAS does."""
    k = a.shape[1]
    if a.dtype.itemsize < 4 and k >= 1024:
        k = min(k, -(-(k // 16) // 64) * 64 * 16)
    out.copy_((out if accumulate else 0) + a[:, :k].to(FLOAT) @ b[:k].to(FLOAT))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [HALF, FLOAT])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_end_of_a_divided_inner_dimension_is_lost(
    out_dtype: torch.dtype, accumulate: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 16 * 64 * 2 + 8
    a, b = torch.zeros(3, k, dtype=HALF), torch.zeros(k, 5, dtype=HALF)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    a[:, -8:], b[-8:], out = 1, 1, torch.ones(3, 5, dtype=out_dtype)
    monkeypatch.setattr(gemm, "_vendor_matmul", divided)
    divided(a, b, lost := out.clone(), accumulate)
    assert lost.max() == accumulate, "what cuBLAS does"
    gemm._aligned_matmul(a, b, out, accumulate)
    assert out.tolist() == [[8 + accumulate] * 5] * 3
    assert gemm.scratch_bytes(a, b, out, accumulate, "cuda") == (4 * 15 if out_dtype == HALF else 0)


def test_a_divided_inner_dimension_takes_little_memory() -> None:
    """A plan of 6 MiB fits for any number of tokens."""
    a, b, out = (torch.empty(shape, dtype=HALF, device="meta") for shape in ((2048, 2000), (2000, 2048), (2048, 2048)))
    assert gemm.scratch_bytes(a, b, out, False, "cuda") == 2 << 20
    options = flce.ChunkOptions(max_workspace_bytes=6 << 20, strategy="vocab")
    assert flce.plan(2000, 768, 50257, HALF, options=options, device_kind="H100").workspace_bytes <= 6 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [173064, 322568, 80648, 16 * 64 + 8, 1023 * 17])
def test_products_of_all_of_a_long_inner_dimension(k: int, dtype: torch.dtype) -> None:
    """Sums of ones are exact. cuBLAS 13.0 omits the last 8 of 173064 terms on an H100."""
    for m, n, out_dtype in itertools.product((1, 38, 512, 4096), (512, 1024, 4096), (FLOAT, dtype)):
        a = torch.zeros(m, k + 64 - k % 64, device="cuda", dtype=dtype)[:, :k]
        b, out = torch.zeros(k, n, device="cuda", dtype=dtype), torch.empty(m, n, device="cuda", dtype=out_dtype)
        a[:, -63:], b[-63:] = 1, 1
        gemm.matmul(a, b, out)
        assert (out == 63).all(), (m, n, out_dtype, out.min(), out.max())


def test_where_pytorch_has_no_float32_results_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are cast in slabs, and the scratch bytes include these slabs."""
    a, b, out = torch.empty(4, 8, dtype=HALF), torch.empty(8, 16, dtype=HALF), torch.empty(4, 16)
    assert gemm.can_output_dtype(FLOAT)
    assert gemm.scratch_bytes(a, b, out, False, "cuda") == 0
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=True))
    assert not gemm.can_output_dtype(FLOAT)
    assert gemm.scratch_bytes(a, b, out, False, "cuda") == 4 * (4 * 8 + 8 * 16)
