"""Multiplication by scalars that live on the device: one, or one per row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x_ptr,  # (numel,) contiguous
    out_ptr,  # (numel,) contiguous; x_ptr itself when IN_PLACE
    factor_ptr,  # ()
    numel,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    # The usual upstream gradient is exactly 1: then nothing is read or written, and nobody asked the host.
    if not IN_PLACE or factor != 1.0:
        # Few programs with a loop, rather than a program per block: leaving at once is then really at once.
        first = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(first, numel, step):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < numel
            x = tl.load(x_ptr + offsets, mask=mask).to(factor_ptr.dtype.element_ty)
            tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner_rows"])
def scale_rows_kernel(
    x_ptr,  # (rows, cols), row stride stride; with TWO_LEVEL (outer, inner_rows, cols)
    factor_ptr,  # (rows,)
    stride,
    outer_stride,
    inner_rows,
    cols,
    TWO_LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    if factor != 1.0:
        if TWO_LEVEL:
            outer = row // inner_rows
            x_ptr += outer * outer_stride + (row - outer * inner_rows) * stride
        else:
            x_ptr += row * stride
        for start in range(0, cols, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < cols
            x = tl.load(x_ptr + offsets, mask=mask).to(factor_ptr.dtype.element_ty)
            tl.store(x_ptr + offsets, (x * factor).to(x_ptr.dtype.element_ty), mask=mask)
