"""The matrix products, and how their operands and results differ in dtype. Nothing else multiplies matrices."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of a float32 piece of an operand that is cast on the way. Large enough for a product at full speed,
# small beside a chunk of logits.
CAST_BYTES = 8 << 20


def matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out = a @ b``, or ``out += a @ b``. a: (m, k), b: (k, n), out: (m, n), any strides and float dtypes.

    Sums are made in float32 at least. On CUDA half-precision operands go to the tensor cores and are
    rounded, if at all, once, into `out`; elsewhere they are cast to `out`'s dtype piece by piece.
    """
    if a.dtype == b.dtype == out.dtype and (a.device.type != "cpu" or a.dtype.itemsize >= 4):
        if accumulate:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif a.device.type == "cuda" and a.dtype == b.dtype and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif out.dtype.itemsize < 4:
        result = torch.empty_like(out, dtype=torch.float32)
        if accumulate:
            result.copy_(out)
        matmul(a, b, result, accumulate)
        out.copy_(result)
    else:
        _matmul_by_pieces(a, b, out, accumulate)


def _matmul_by_pieces(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """`matmul` with `b`, the operand that may be as large as the head, cast to `out`'s dtype in pieces."""
    a = a.to(out.dtype)
    k, n = b.shape
    if n > k:  # pieces of columns: each makes its own columns of the result
        step = max(1, CAST_BYTES // (k * out.dtype.itemsize))
        for start in range(0, n, step):
            columns = slice(start, start + step)
            matmul(a, b[:, columns].to(out.dtype), out[:, columns], accumulate)
    else:  # pieces of the inner dimension: each adds to the whole result
        step = max(1, CAST_BYTES // (n * out.dtype.itemsize))
        for start in range(0, k, step):
            inner = slice(start, start + step)
            matmul(a[:, inner], b[inner].to(out.dtype), out, accumulate or start > 0)
