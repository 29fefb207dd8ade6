"""`flce.softmax` and `flce.log_softmax` against PyTorch in float64, in both backends, resident and online."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from tests.extremes import extremes
from tests.helpers import allpairs, assert_near

FUNCTIONS = {"softmax": (flce.softmax, F.softmax), "log_softmax": (flce.log_softmax, F.log_softmax)}
BOTH = pytest.mark.parametrize("name", list(FUNCTIONS))
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Relative to the largest element: a few roundings of the narrowest dtype in the computation.
TOLERANCE = {f16: 2e-3, bf16: 1.5e-2, f32: 2e-6, f64: 1e-13}


def padded(x: Tensor, *sizes: int) -> Tensor:
    """Pad with NaN, which would change each result that reads the padding."""
    return F.pad(x, sizes, value=torch.nan if x.is_floating_point() else 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "first two swapped": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "wide rows": lambda x: padded(x, 3, 5)[..., 3:-5],
    "every second column": lambda x: padded(x[..., None], 0, 1).flatten(-2)[..., ::2],
    "every second of the first": lambda x: x.repeat_interleave(2, 0)[::2],
    "padded all around": lambda x: padded(x, *(1, 2) * x.dim())[(slice(1, -2),) * x.dim()],
    "expanded": lambda x: x[:1].expand_as(x),
    "one column": lambda x: x[..., :1].expand_as(x),
    "windows": lambda x: x.contiguous().as_strided(x.shape, (1,) * x.dim()),
}


def both(
    name: str, x: Tensor, g: Tensor | None = None, dim: int = -1, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Check result and gradient against PyTorch in float64."""
    mine, stock = FUNCTIONS[name]
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    y, expected = mine(leaf, dim, dtype), stock(wide, dim)
    out = dtype or x.dtype
    assert y.dtype == out
    assert y.stride() == torch.empty_like(x).stride()
    g = torch.randn(y.shape, dtype=f64).to(x.device, out) if g is None else g.to(out)
    (dx,) = torch.autograd.grad(y, leaf, g)
    (expected_dx,) = torch.autograd.grad(expected, wide, g.double())
    assert dx.dtype == x.dtype
    assert_near(y, expected, TOLERANCE[out], "result")
    # The gradient is a difference of terms of a rounded result: errors are relative to the terms.
    p, size = F.softmax(wide.detach(), dim), g.double().abs().max()
    terms = p.max() * size if name == "softmax" else size + (p.max() * g.double().sum(dim).abs().max())
    error = float((dx.double() - expected_dx).abs().max())
    allowed = 4 * max(TOLERANCE[x.dtype], TOLERANCE[out]) * float(terms)
    assert error <= allowed, f"gradient: off by {error:.3e}, allowed are {allowed:.3e}"
    return y.detach(), dx


# ---------------------------------------------------------------------------------------------------------
# The kernels, with block sizes that small tensors do not have by default

LAUNCHES: dict[str, dict[str, Any]] = {
    "one row": {"warps": 1},
    "four rows": {"warps": 2, "rows": 4},
    "online": {"warps": 1, "parts": 2, "vector": 2},
    "online, one part": {"warps": 1, "parts": 1},
}


def launched(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> None:
    from flce.backends.triton import softmax

    launch = softmax.RowLaunch(**sizes)
    monkeypatch.setattr(softmax, "row_launch", lambda *args: launch)


COLUMNS_GRID = allpairs(
    {
        "launch": list(LAUNCHES),
        "columns": [1, 2, 3, 8, 15, 17, 129, *range(264, 272)],
        "dtypes": [(bf16, None), (f32, None), (f64, None), (bf16, f32), (f32, f16)],
        "name": list(FUNCTIONS),
    }
)


@pytest.mark.parametrize("case", COLUMNS_GRID, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_columns(
    case: dict[str, Any], triton_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are written, and no element before the first or after the last row."""
    from flce.backends.triton import softmax

    (dtype, out), columns, name, rows = case["dtypes"], case["columns"], case["name"], 11
    out = out or dtype
    launch = softmax.RowLaunch(**LAUNCHES[case["launch"]])
    buffers: list[Tensor] = []

    def surrounded(like: Tensor, dtype: torch.dtype) -> Tensor:
        buffers.append(torch.full((like.numel() + 128,), 7.0, dtype=dtype, device=like.device))
        return buffers[-1][64:-64].view(like.shape)

    monkeypatch.setattr(torch, "empty_like", surrounded)
    x = torch.randn(rows, columns, dtype=f64).mul(3).to(device, dtype)
    g = torch.randn(rows, columns, dtype=f64).to(device, out)
    y = softmax.process_rows(x, None, out, name == "log_softmax", launch)
    dx = softmax.process_rows(y, g, dtype, name == "log_softmax", launch)
    monkeypatch.undo()
    for buffer in buffers:
        assert bool((buffer[:64] == 7).all() and (buffer[-64:] == 7).all())

    wide, tolerance = x.double().requires_grad_(), TOLERANCE[min(dtype, out, key=lambda t: t.itemsize)]
    expected = FUNCTIONS[name][1](wide, 1)
    (expected_dx,) = torch.autograd.grad(expected, wide, g.double())
    for row in range(rows):
        assert_near(y[row], expected[row], tolerance, f"row {row}")
        # The gradient is a difference of terms of a rounded result: errors are relative to the terms.
        terms = float((g[row].abs().max() + g[row].sum().abs()).double())
        error = float((dx[row].double() - expected_dx[row]).abs().max())
        assert error <= 4 * tolerance * max(1.0, terms), f"gradient of row {row}: off by {error:.3e}"


@pytest.mark.parametrize("launch, name", zip(LAUNCHES, itertools.cycle(FUNCTIONS)))
def test_launches_on_what_is_not_finite(
    launch: str, name: str, triton_backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, **LAUNCHES[launch])
    x = extreme_rows(70).to(device)
    held_to_pytorch(name, x)
    held_to_pytorch(name, x.t(), 0)
    held_to_pytorch(name, x.t().contiguous(), 0)
    held_to_pytorch(name, extreme_rows(133).to(x))


# ---------------------------------------------------------------------------------------------------------
# Values and shapes at the edges


def extreme_rows(columns: int) -> Tensor:
    return torch.stack(list(extremes(columns).values()))


def held_to_pytorch(name: str, x: Tensor, dim: int = -1) -> None:
    """Check each element of the result, and of the gradient, against float64."""
    mine, stock = FUNCTIONS[name]
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    g = torch.linspace(-1, 1, x.shape[dim], dtype=x.dtype, device=x.device)
    g = g.expand(x.shape) if dim == -1 else g[:, None].expand(x.shape)
    y, expected = mine(leaf, dim), stock(wide, dim)
    (dx,), (expected_dx,) = torch.autograd.grad(y, leaf, g), torch.autograd.grad(expected, wide, g.double())
    for actual, right in ((y, expected), (dx, expected_dx)):
        tolerance = 4 * TOLERANCE[x.dtype]
        torch.testing.assert_close(actual, right.to(x.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


@BOTH
@pytest.mark.parametrize("columns", [1, 2, 37])
def test_not_finite(columns: int, name: str, backend: str, device: torch.device) -> None:
    for dtype in (f16, bf16, f32, f64):
        held_to_pytorch(name, extreme_rows(37)[:, :columns].to(device, dtype))


@BOTH
@pytest.mark.parametrize("shape, dim", [((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 3), 1), ((2, 0, 4), -1), ((), 0)])
def test_empty_and_no_dimensions(
    shape: tuple[int, ...], dim: int, name: str, backend: str, device: torch.device
) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    mine, stock = FUNCTIONS[name]
    y, expected = mine(x, dim), stock(x, dim)
    assert torch.equal(y, expected)
    assert torch.equal(mine(x, dim, f64), stock(x, dim, dtype=f64))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape
    assert not dx.any()


@BOTH
def test_narrower_results_are_rounded_once(name: str, backend: str, device: torch.device) -> None:
    x = torch.randn(9, 50, device=device, dtype=f32) * 5
    mine, _ = FUNCTIONS[name]
    once, twice = mine(x, -1, bf16), mine(x, -1).to(bf16)
    if backend == "triton" and device.type == "cpu":  # Triton's interpreter truncates instead of rounding
        assert_near(once, twice, 2**-7, "result")
    else:
        assert torch.equal(once, twice)


@BOTH
@pytest.mark.parametrize("read, written", [(bf16, torch.float16), (torch.float16, bf16)], ids=str)
def test_neither_half_precision_is_the_narrower(
    name: str, read: torch.dtype, written: torch.dtype, torch_backend: str
) -> None:
    """float16 has less range, bfloat16 fewer digits: the input is rounded to neither, in forward and backward."""
    mine, reference = FUNCTIONS[name]
    x = torch.tensor([1e5 if read == bf16 else 6e4, 0.0, 3.25, -70.0], dtype=read)
    x = torch.stack((x, torch.randn(4).to(read))).requires_grad_()
    y = mine(x, -1, written)
    expected = reference(x.detach().double(), -1)
    torch.testing.assert_close(y.double(), expected.to(written).double(), rtol=2**-7, atol=1e-6)
    upstream = torch.randn(2, 4).to(written)
    y.backward(upstream)
    exact = x.detach().double().requires_grad_()
    reference(exact, -1).backward(upstream.double())
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-6, atol=2**-8)


@BOTH
def test_rows_do_not_depend_on_each_other(name: str, backend: str, device: torch.device) -> None:
    """The bits do not depend on other rows or on the run. After unaligned rows this holds if all rows begin alike."""
    mine, _ = FUNCTIONS[name]
    for columns, slices in ((64, (slice(5, 9), slice(1))), (65, (slice(9), slice(1), slice(8, 17)))):
        x = torch.randn(37, columns, device=device)
        y = mine(x)
        assert torch.equal(y, mine(x))
        if backend == "triton":
            assert all(torch.equal(y[part], mine(x[part])) for part in slices)


# ---------------------------------------------------------------------------------------------------------
# Derivatives


@BOTH
def test_double_backward_in_lower_precision(name: str, backend: str, device: torch.device) -> None:
    x = torch.randn(4, 9, device=device)
    results = []
    for function in FUNCTIONS[name]:
        for dtype in (bf16, f32):
            leaf = x.detach().to(dtype).requires_grad_()
            (dx,) = torch.autograd.grad(function(leaf, -1, dtype=f32).square().sum(), leaf, create_graph=True)
            (again,) = torch.autograd.grad(dx.square().sum(), leaf)
            assert again.dtype == dtype
            results.append(again)
    assert_near(results[0], results[2], 3e-2, "second gradient of bfloat16")
    assert_near(results[1], results[3], 1e-5, "second gradient")


# ---------------------------------------------------------------------------------------------------------
# Arguments


@BOTH
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([1.0],), TypeError, "input must be a Tensor, got list"),
        ((torch.ones(3, dtype=torch.int64),), TypeError, "float16, bfloat16, float32 or float64, got torch.int64"),
        ((torch.ones(3, dtype=torch.complex64),), TypeError, "complex64"),
        ((torch.ones(3), 0, torch.int32), TypeError, "dtype must be .* got torch.int32"),
        ((torch.ones(3), 0, "float32"), TypeError, "dtype must be .* got 'float32': give torch.float32"),
        ((torch.ones(3), 0.0), TypeError, "dim must be an int, got float"),
        ((torch.ones(3), True), TypeError, "dim must be an int, got bool"),
        ((torch.ones(3), None), TypeError, "dim must be an int, got NoneType"),
        ((torch.ones(3), 1), IndexError, r"softmax: dim must be in \[-1, 0\] .* got 1"),
        ((torch.ones(3, 4), -3), IndexError, r"dim must be in \[-2, 1\] for shape \(3, 4\), got -3"),
        ((torch.ones(()), 1), IndexError, r"dim must be in \[-1, 0\]"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], error: type[Exception], message: str, name: str) -> None:
    with pytest.raises(error, match=message):
        FUNCTIONS[name][0](*arguments)


@BOTH
def test_autocast_widens_only_on_cuda(name: str, backend: str, device: torch.device) -> None:
    mine, stock = FUNCTIONS[name]
    with torch.autocast(device.type, bf16):
        for dtype in (f16, f32, f64):
            x = torch.randn(3, 40, device=device).to(dtype)
            assert mine(x).dtype == stock(x, -1).dtype


# ---------------------------------------------------------------------------------------------------------
# GPU only


CUDA_SIZES = allpairs(
    {
        "columns": [5, 128, 131, 1000, 8191, 10007, 32768, 50257, 65536, 262144],
        "dtype": [f16, bf16, f32, f64],
        "name": list(FUNCTIONS),
        "inner": [3, 200],
    }
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_SIZES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_sizes_on_cuda(case: dict[str, Any], triton_backend: str) -> None:
    columns, dtype = case["columns"], case["dtype"]
    for rows, offset in ((37, 0), (3, 1)):
        both(case["name"], torch.randn(rows, columns + offset, device="cuda").mul(2).to(dtype)[:, offset:])
    both(case["name"], torch.randn(2, columns, case["inner"], device="cuda").mul(2).to(dtype), dim=1)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("shape", [(2**31 // 4096 + 3, 4096), (2, 2**30 + 8)])
def test_more_elements_than_32_bits_count(shape: tuple[int, int], name: str, triton_backend: str) -> None:
    """Rows or columns after element 2^31. At most three tensors of 4 GiB at a time: tests run in parallel."""
    log = name == "log_softmax"

    def last(t: Tensor) -> tuple[Tensor, ...]:
        return t[-1].split(1 << 24)  # compared in pieces

    def check(actual: Tensor, expected: Tensor, what: str) -> None:
        size, error = float(expected.abs().max()), float((actual - expected).abs().max())
        assert error <= 1e-2 * size, f"{what}: off by {error:.3e} of {size:.3e}"

    x = torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda").to(bf16)
    y = torch.ops.flce.softmax(x, 1, bf16, log)
    lse = torch.stack([piece.double().logsumexp(0) for piece in last(x)]).logsumexp(0)
    for piece, of_y in zip(last(x), last(y), strict=True):
        expected = piece.double() - lse
        check(of_y.double(), expected if log else expected.exp(), "result")
    del x
    dx = torch.ops.flce.softmax_backward(y, y, 1, bf16, log)  # the result is its upstream gradient
    total = sum(float((piece.double() if log else piece.double().square()).sum()) for piece in last(y))
    for piece, of_dx in zip(last(y), last(dx), strict=True):
        z = piece.double()
        check(of_dx.double(), z - z.exp() * total if log else z * (z - total), "gradient")
