"""`softmax` and `log_softmax`: arguments, custom operators and derivatives. The work is a backend's.

``flce::softmax`` and ``flce::softmax_backward``. The gradient of the latter, for double backward, is made of PyTorch's
operators: it need not be fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.core.numbers import check_dtype, check_int
from flce.core.problem import accumulation_dtype
from flce.ops.arguments import FLOATING, autocast_result_dtype, check_tensor, refuse_transforms
from flce.torch_ops.registration import register_operator
from flce.torch_ops.vmap import register_vmap_loop


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x) / exp(x).sum()`` along `dim`, as `torch.nn.functional.softmax`.

    Computed in float32 (float64 if input or result are) and rounded once. Rows lie along `dim`, which may be any:
    nothing is copied where the dimensions before and those behind it lie in memory at one stride each, as they do in
    a dense tensor in any order of its dimensions, in slices of one and in expanded ones; otherwise `input` is. A row
    that is all -inf, or has a NaN or +inf in it, is NaN. Differentiable, also twice; the result is what is kept for
    it. The same bits from run to run, and for any number of rows; the order of a sum may depend on where a row begins
    in memory, modulo 16 bytes, if rows do not all begin alike (an odd number of columns, for example).

    Args:
        input: tensor of any shape; float16, bfloat16, float32 or float64. May be empty, or have no dimensions.
        dim: the dimension along which the results sum to 1; negative ones count from the end.
        dtype: of the result; None: that of `input`, or float32 where autocast is on (as PyTorch: not on a CPU, not for
            float64). Wider than `input`, nothing is rounded on the way; narrower, only the result is.

    Returns:
        A tensor of the shape of `input`, dense, its dimensions in the same order in memory.

    Raises:
        TypeError: `input` is no tensor or has another dtype, `dim` is not an int, or `dtype` none of the four.
        IndexError: `dim` is out of range.
        RuntimeError: `input` carries a forward-mode tangent.

    Examples:
        >>> attention = flce.softmax(torch.randn(2, 8, 5, 5), dim=-1)
    """
    return _softmax("softmax", input, dim, dtype, log=False)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """``x - log(exp(x).sum())`` along `dim`, as `torch.nn.functional.log_softmax`.

    Computed as ``(x - max(x)) - log(sum(exp(x - max(x))))``: an offset that a row shares costs no digits. Everything
    else is as for `softmax`.

    Args:
        input: tensor of any shape; float16, bfloat16, float32 or float64.
        dim: the dimension of the sum.
        dtype: of the result.

    Returns:
        A tensor of the shape of `input`, dense, its dimensions in the same order in memory.

    Raises:
        TypeError: `input` is no tensor or has another dtype, `dim` is not an int, or `dtype` none of the four.
        IndexError: `dim` is out of range.
        RuntimeError: `input` carries a forward-mode tangent.
    """
    return _softmax("log_softmax", input, dim, dtype, log=True)


def _softmax(name: str, input: Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> Tensor:
    check_tensor("input", input)
    if input.dtype not in FLOATING:
        raise TypeError(f"input must be float16, bfloat16, float32 or float64, got {input.dtype}")
    dim = check_int("dim", dim)
    if dtype is not None:
        check_dtype("dtype", dtype, "None or a torch.dtype")
        if dtype not in FLOATING:
            raise TypeError(f"dtype must be None, torch.float16, bfloat16, float32 or float64, got {dtype}")
    dims = max(1, input.dim())  # of no dimensions: as if there were one
    if not -dims <= dim < dims:
        raise IndexError(f"{name}: dim must be in [{-dims}, {dims - 1}] for shape {tuple(input.shape)}, got {dim}")
    refuse_transforms(name, f"torch.nn.functional.{name}", (input,))
    if dtype is None:
        # As PyTorch has it, autocast on a CPU does not make softmax float32.
        kind = input.device.type
        dtype = input.dtype if kind == "cpu" else autocast_result_dtype(input.dtype, kind)
    x = input if input.dim() else input[None]
    y: Tensor = torch.ops.flce.softmax(x, dim % dims, dtype, log)
    return y if input.dim() else y[0]


def _forward(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return get_backend(x.device).softmax(x, dim, dtype, log)


def _backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return get_backend(y.device).softmax_backward(grad, y, dim, dtype, log)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _, ctx.log = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return torch.ops.flce.softmax_backward(grad, y, ctx.dim, ctx.dtype, ctx.log), None, None, None


def _setup_second_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, y, ctx.dim, _, ctx.log = inputs
    ctx.save_for_backward(grad, y)


def _differentiate_twice(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of sum_k v_k dx_k, in the upstream gradient g and in y."""
    saved = ctx.saved_tensors
    accum = accumulation_dtype(saved[1].dtype if v.dtype != torch.float64 else v.dtype)
    g, y, v = (t.to(accum) for t in (*saved, v))

    def total(t: Tensor) -> Tensor:
        return t.sum(ctx.dim, keepdim=True)

    if ctx.log:
        p = y.exp()
        of_grad = v - total(v * p)
        of_y = -v * p * total(g)
    else:
        of_grad = y * (v - total(v * y))
        of_y = v * (g - total(g * y)) - g * total(v * y)
    return of_grad.to(saved[0].dtype), of_y.to(saved[1].dtype), None, None, None


register_operator(
    "softmax",
    "(Tensor x, int dim, ScalarType dtype, bool log) -> Tensor",
    _forward,
    lambda x, dim, dtype, log: torch.empty_like(x, dtype=dtype),
    backward=_differentiate,
    setup_context=_setup_context,
)
register_operator(
    "softmax_backward",
    "(Tensor grad, Tensor y, int dim, ScalarType dtype, bool log) -> Tensor",
    _backward,
    lambda grad, y, dim, dtype, log: torch.empty_like(y, dtype=dtype),
    backward=_differentiate_twice,
    setup_context=_setup_second_context,
)
register_vmap_loop("softmax_backward")
