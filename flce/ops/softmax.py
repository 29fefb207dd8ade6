"""`flce.softmax` and `flce.log_softmax`: arguments, custom operators and derivatives. A backend runs the kernels.

The operators are ``flce::softmax`` and ``flce::softmax_backward``. For double backward, which need not be fast,
PyTorch's operators compute the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.core.numbers import check_dtype, check_int
from flce.core.problem import accumulation_dtype
from flce.ops.arguments import FLOATING, autocast_result_dtype, check_tensor, refuse_transforms
from flce.torch_ops import register_operator


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``exp(x) / exp(x).sum()`` along `dim`, as `torch.nn.functional.softmax`.

    Computed in float32 (float64 if input or result are float64) and rounded once. `dim` may be any dimension. If it is
    not the last one, or the input is not contiguous, input and result are copied. If all elements of a row are -inf, or
    a row has a NaN or +inf, the row of the result is NaN. Differentiable twice; the result is saved for backward. Two
    runs return the same bits, for any number of rows. PyTorch's kernel computes rows of more than 512 elements that do
    not fill multiples of 16 bytes: the order of its sums may depend on the address.

    Args:
        input: tensor of any shape; float16, bfloat16, float32 or float64. May be empty, or have no dimensions.
        dim: the dimension along which the results sum to 1; negative values count from the end.
        dtype: dtype of the result. None: the dtype of `input`, or float32 under autocast (as in PyTorch: not on a CPU,
            not for float64). If `dtype` is wider than `input`, no value is rounded; if it is narrower, only the result
            is rounded.

    Returns:
        A dense tensor with the shape of `input` and the same order of dimensions in memory.

    Raises:
        TypeError: `input` is not a tensor or has another dtype, `dim` is not an int, or `dtype` is not one of the four
            dtypes.
        IndexError: `dim` is out of range.
        RuntimeError: `input` has a forward-mode tangent.

    Examples:
        >>> attention = flce.softmax(torch.randn(2, 8, 5, 5), dim=-1)
    """
    return _softmax("softmax", input, dim, dtype, log=False)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``x - log(exp(x).sum())`` along `dim`, as `torch.nn.functional.log_softmax`.

    Computed as ``(x - max(x)) - log(sum(exp(x - max(x))))``: an offset that all elements of a row share costs no
    digits. Arguments, copies, derivatives, bits and errors are as for `softmax`.
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
    dims = max(1, input.dim())  # a 0-d tensor counts as one dimension, as in PyTorch
    if not -dims <= dim < dims:
        raise IndexError(f"{name}: dim must be in [{-dims}, {dims - 1}] for shape {tuple(input.shape)}, got {dim}")
    refuse_transforms(name, f"torch.nn.functional.{name}", (input,))
    if dtype is None:
        # As in PyTorch, autocast on a CPU does not change softmax to float32.
        kind = input.device.type
        dtype = input.dtype if kind == "cpu" else autocast_result_dtype(input.dtype, kind)
    x = input if input.dim() else input[None]
    y: Tensor = torch.ops.flce.softmax(x, dim % dims, dtype, log)
    return y if input.dim() else y[0]


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return `x`, or a copy, in which the elements along `dim` are contiguous rows."""
    return x.movedim(dim, -1).contiguous()


def _like(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return `rows` with the shape and the strides of ``torch.empty_like(x)``."""
    y = rows.movedim(-1, dim)
    return y if x.is_contiguous() and y.stride() == x.stride() else torch.empty_like(x, dtype=y.dtype).copy_(y)


def _forward(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return _like(x, get_backend(x.device).softmax(_rows(x, dim), dtype, log), dim)


def _backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    backend = get_backend(y.device)
    return _like(y, backend.softmax_backward(_rows(grad.to(y.dtype), dim), _rows(y, dim), dtype, log), dim)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _, ctx.log = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # for a gradient of the gradient: autograd differentiates PyTorch's operators
        accum = accumulation_dtype(torch.promote_types(y.dtype, ctx.dtype))
        g, wide = grad.to(accum), y.to(accum)
        if ctx.log:
            dx = g - wide.exp() * g.sum(ctx.dim, keepdim=True)
        else:
            dx = wide * (g - (g * wide).sum(ctx.dim, keepdim=True))
        return dx.to(ctx.dtype), None, None, None
    return torch.ops.flce.softmax_backward(grad, y, ctx.dim, ctx.dtype, ctx.log), None, None, None


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
)
