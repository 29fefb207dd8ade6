"""Matrix products for all dtypes of operands and results, except a backend's fused products, and slices of their
operands. Schedules call `matmul`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Tensor cores read rows of 16 bytes. A product is slower if its contiguous extent is not divisible by 16 bytes, even if
# all strides are:
#
# | logits on an H200   | ms  |
# |---------------------|-----|
# | 4096 x 768 x 50257  | 3.4 |
# | 4096 x 768 x 50256  | 0.5 |
ALIGNMENT = 8
# If a result has few blocks, cuBLAS divides the inner dimension among programs. It omits the end of the inner dimension
# if the share of a program, rounded down, is a multiple of 64: for 38 x 173064 x 512 it omits the last 8 terms, with 16
# shares of 10816 (cuBLAS 13.0, H100, half precision). Inner dimensions that are multiples of 64 are not affected.
# MAX_DIVIDED_ENTRIES is the number of entries of the largest such result.
INNER_MULTIPLE = 64
MIN_DIVIDED_INNER = 1024
MAX_DIVIDED_ENTRIES = 1 << 22
# Bytes of a float32 slab of such a result. Plans for the smallest budgets include this memory.
DIVIDED_SLAB_BYTES = 2 << 20
# Row stride of a buffer for logits, in elements: matrix products on unaligned rows run several times slower.
COLUMN_MULTIPLE = 64
# An operand may be cast to float32 in slabs. The bytes of a slab are a quarter of the bytes of the larger of the
# other two matrices, within these bounds. A slab is large enough for full speed on 2 and on 16 cores, and small
# compared with a chunk of logits.
#
# | forward and backward of 4096 x 2048 x 32000 in bfloat16, 16 cores | times the float32 products |
# |--------------------------------------------------------------------|----------------------------|
# | chunks of  64 MiB, slabs of  8 MiB                                 | 1.30 to 1.50               |
# | chunks of 128 MiB, slabs of 32 MiB                                 | 1.15 to 1.29               |
MIN_CAST_BYTES, MAX_CAST_BYTES = 8 << 20, 32 << 20


def _cast_bytes(m: int, k: int, n: int) -> int:
    """Return the bytes of a float32 slab of the second operand of an m x k x n product."""
    return min(MAX_CAST_BYTES, max(MIN_CAST_BYTES, m * max(k, n)))


def padded_cols(cols: int) -> int:
    """Return the row stride of a buffer for `cols` logits, in elements."""
    return -(-cols // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def slice_rows(x: Tensor, rows: slice) -> Tensor:
    """Return ``x[rows]``; `x` itself if these are all rows, which saves some microseconds on the host."""
    return x if rows.start == 0 and rows.stop >= x.shape[0] else x[rows]


def slice_columns(x: Tensor, columns: slice) -> Tensor:
    """Return ``x[..., columns]``; `x` itself if these are all columns."""
    return x if columns.start == 0 and columns.stop >= x.shape[-1] else x[..., columns]


def offset_slice(range_: slice, offset: int) -> slice:
    """Return the slice whose start and stop are larger by `offset`."""
    return slice(range_.start + offset, range_.stop + offset)


def matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Compute ``out = a @ b``, or ``out += a @ b``. a: (m, k), b: (k, n), out: (m, n), any strides and float dtypes.

    Sums are float32 or wider. On CUDA, tensor cores multiply half-precision operands, and the result is rounded at most
    once, into `out`. On other devices the operands are cast to float32 in slabs.
    """
    half = a.dtype.itemsize < 4 or b.dtype.itemsize < 4
    if not half and a.dtype == b.dtype == out.dtype:
        _vendor_matmul(a, b, out, accumulate)
    elif a.is_cuda and a.dtype == b.dtype and (out.dtype == a.dtype or can_output_dtype(out.dtype)):
        _aligned_matmul(a, b, out, accumulate)
    elif out.dtype.itemsize < 4:
        _matmul_in_float32(a, b, out, accumulate)
    else:
        _matmul_by_slabs(a, b, out, accumulate)


def can_output_dtype(dtype: torch.dtype) -> bool:
    """Return True if CUDA products of half-precision operands can have results of this dtype, which must be float32.

    PyTorch refuses float32 results if it accumulates in float16.
    """
    return dtype == torch.float32 and not torch.backends.cuda.matmul.allow_fp16_accumulation


def _vendor_matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    # A float32 result of half-precision operands needs the argument `out_dtype`, which only CUDA supports.
    dtype: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, a, b, out=out, **dtype)
    else:
        torch.mm(a, b, out=out, **dtype)


def _aligned_matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute a product of half-precision operands, with a separate product for the unaligned end of the vocabulary.

    One of m, n and k is the vocabulary. Strides are aligned: W has rows of H elements, logits have padded rows. The end
    is shorter than ALIGNMENT classes; its product costs almost no time. If k is a hidden size or the rank of an
    adapter, the operands are not split, because a split needs a float32 copy of logits. If the inner dimension may be
    divided (`_can_lose_inner_end`), its end is always a separate product.
    """
    (m, k), n = a.shape, b.shape[1]
    if m % ALIGNMENT == n % ALIGNMENT == k % INNER_MULTIPLE == 0:
        _vendor_matmul(a, b, out, accumulate)
        return
    m_end, n_end = (size // ALIGNMENT * ALIGNMENT for size in (m, n))
    k_end = _aligned_inner_size(a, b, out.dtype, accumulate)
    if k > k_end:
        if out.dtype.itemsize < 4:
            _matmul_in_float32(a, b, out, accumulate)  # a sum of two products must not be rounded in between
            return
        _vendor_matmul(a[:, :k_end], b[:k_end], out, accumulate)
        _vendor_matmul(a[:, k_end:], b[k_end:], out, True)
    elif n > n_end > 0 and out.stride(0) % ALIGNMENT == 0:
        _vendor_matmul(a, b[:, :n_end], out[:, :n_end], accumulate)
        _vendor_matmul(a, b[:, n_end:], out[:, n_end:], accumulate)
    elif m > m_end > 0 and a.stride(0) == 1 and a.stride(1) % ALIGNMENT == 0:
        _vendor_matmul(a[:m_end], b, out[:m_end], accumulate)
        _vendor_matmul(a[m_end:], b, out[m_end:], accumulate)
    else:
        _vendor_matmul(a, b, out, accumulate)


def _can_lose_inner_end(m: int, n: int, k: int) -> bool:
    """Return True if the vendor's product may divide the inner dimension and omit its end."""
    return k % INNER_MULTIPLE != 0 and k >= MIN_DIVIDED_INNER and m * n <= MAX_DIVIDED_ENTRIES


def _aligned_inner_size(a: Tensor, b: Tensor, out_dtype: torch.dtype, accumulate: bool) -> int:
    """Return the size of the inner dimension of the main product. The rest is a separate product."""
    (m, k), n = a.shape, b.shape[1]
    if _can_lose_inner_end(m, n, k):
        return k // INNER_MULTIPLE * INNER_MULTIPLE
    aligned_rows = a.stride(1) == b.stride(1) == 1 and a.stride(0) % ALIGNMENT == 0
    if k < ALIGNMENT or not aligned_rows or (out_dtype.itemsize < 4 and accumulate):
        return k
    return k // ALIGNMENT * ALIGNMENT


def _matmul_in_float32(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute `matmul` with float32 sums, rounded to `out` at the end; in slabs, except for large results on CUDA."""
    (m, k), n = a.shape, b.shape[1]
    rows, multiply = _float32_slab_rows(m, k, n, out.is_cuda), matmul if out.is_cuda else _matmul_by_slabs
    for start in range(0, m, rows):
        slab = out[start : start + rows]
        result = slab.float() if accumulate else torch.empty_like(slab, dtype=torch.float32)
        multiply(a[start : start + rows], b, result, accumulate)
        slab.copy_(result)
        del result  # free the memory before the next slab is allocated


def _float32_slab_rows(m: int, k: int, n: int, is_cuda: bool) -> int:
    """Return the number of rows of a float32 slab of a result."""
    if is_cuda and not _can_lose_inner_end(m, n, k):
        return max(1, m)
    most = (DIVIDED_SLAB_BYTES if is_cuda else MIN_CAST_BYTES) // (4 * max(1, n))
    return max(1, min(m, most // COLUMN_MULTIPLE * COLUMN_MULTIPLE or most))


def _matmul_by_slabs(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """Compute `matmul` with `b`, which may be as large as the head, cast to the dtype of `out` in slabs."""
    a = a.to(out.dtype)
    k, n = b.shape
    if k * n * out.dtype.itemsize <= MIN_CAST_BYTES:
        torch.addmm(out, a, b.to(out.dtype), beta=int(accumulate), out=out)
        return
    most = _cast_bytes(len(a), k, n)
    if n > k:  # slabs of columns: each computes some columns of the result
        step = max(1, most // (k * out.dtype.itemsize))
        for start in range(0, n, step):
            columns = slice(start, start + step)
            _vendor_matmul(a, b[:, columns].to(out.dtype), out[:, columns], accumulate)
    else:  # slabs of the inner dimension: each adds to all of the result
        step = max(1, most // (n * out.dtype.itemsize))
        for start in range(0, k, step):
            inner = slice(start, start + step)
            _vendor_matmul(a[:, inner], b[inner].to(out.dtype), out, accumulate or start > 0)


def scratch_bytes(a: Tensor, b: Tensor, out: Tensor, accumulate: bool, device_type: str) -> int:
    """Return the bytes of temporary memory that `matmul` allocates on such a device."""
    (m, k), n = a.shape, b.shape[1]
    if a.element_size() >= 4 and a.dtype == b.dtype == out.dtype:
        return 0
    if device_type == "cuda" and (out.dtype == a.dtype or can_output_dtype(out.dtype)):
        in_float32 = out.element_size() < 4 and _aligned_inner_size(a, b, out.dtype, accumulate) < k
        return 4 * n * _float32_slab_rows(m, k, n, True) if in_float32 else 0
    rounded = 0
    if out.element_size() < 4:  # `_matmul_in_float32`
        m = _float32_slab_rows(m, k, n, False)
        rounded = 4 * m * n
    cast = 4 * m * k if a.element_size() < 4 else 0
    if b.element_size() < 4:
        cast += 4 * min(k * n, max(min(k, n), _cast_bytes(m, k, n) // 4))
    return rounded + cast
