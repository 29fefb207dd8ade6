"""Kernels and launches that multiply tensors by a scalar on the device, or rows by one scalar each.

`TritonBackend` launches them to scale gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.math import wait_for_previous_kernel
from flce.core.devices import device_record

BLOCK, WARPS = 4096, 8
# Programs for each multiprocessor. On an H200:
#   programs                 2                4               8        2048 in all
#   us, if the factor is 1                    1.6             2.1      3.7
#   time otherwise           4 to 10% more    1 to 2% more    least
PROGRAMS = 4


@triton.jit
def _scale(x_ptr, out_ptr, factor, numel, BLOCK: tl.constexpr):
    # Few programs with a loop instead of one program for each block: with nothing to do the kernel ends sooner.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, numel, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < numel
        x = tl.load(x_ptr + offsets, mask=mask).to(factor.dtype)
        # A gradient of 0, for example if all tokens are ignored, stays 0 if the upstream gradient is infinite.
        x = tl.where(x == 0.0, x, x * factor)
        tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_kernel(
    x_ptr,  # (numel,) contiguous
    out_ptr,  # (numel,) contiguous; x_ptr with IN_PLACE
    second_ptr,  # (second_numel,) contiguous: a second tensor, scaled in place; None: only one
    factor_ptr,  # ()
    numel,
    second_numel,
    IN_PLACE: tl.constexpr,
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    BLOCK: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    factor = tl.load(factor_ptr)
    # The usual upstream gradient is exactly 1: then no memory is read or written, without a check on the host.
    if not IN_PLACE or factor != 1.0:
        _scale(x_ptr, out_ptr, factor, numel, BLOCK)
        if second_ptr is not None:
            _scale(second_ptr, second_ptr, factor, second_numel, BLOCK)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def scale_rows_kernel(
    x_ptr,  # (rows, cols), row stride x_stride
    factor_ptr,  # (rows,), or () with ONE_FACTOR
    target_ptr,  # (rows,) int64; rows with ignore_index are unchanged
    x_stride,
    rows,
    cols,
    ignore_index,
    ONE_FACTOR: tl.constexpr,
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    BLOCK: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    factor = tl.load(factor_ptr)
    if ONE_FACTOR:
        rows = tl.where(factor == 1.0, 0, rows)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        if not ONE_FACTOR:
            factor = tl.load(factor_ptr + row)
        if (factor != 1.0) & (tl.load(target_ptr + row) != ignore_index):
            row_ptr = x_ptr + row * x_stride
            for start in range(0, cols, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                mask = offsets < cols
                x = tl.load(row_ptr + offsets, mask=mask).to(factor_ptr.dtype.element_ty)
                tl.store(row_ptr + offsets, (x * factor).to(x_ptr.dtype.element_ty), mask=mask)


def scale(x: Tensor, out: Tensor, second: Tensor | None, factor: Tensor) -> Iterator[Launch]:
    second_numel = 0 if second is None else second.numel()
    yield build_launch(
        scale_kernel,
        (min(_programs(x), triton.cdiv(max(x.numel(), second_numel), BLOCK)),),
        None,
        {"IN_PLACE": x is out, "BLOCK": BLOCK, **thread_options(x.device, WARPS)},
        x=x,
        out=out,
        second=second,
        factor=factor,
        numel=x.numel(),
        second_numel=second_numel,
    )


def scale_rows(x: Tensor, factor: Tensor, target: Tensor, ignore_index: int) -> Iterator[Launch]:
    rows, cols = x.shape
    yield build_launch(
        scale_rows_kernel,
        (min(_programs(x), rows),),
        None,
        {"ONE_FACTOR": factor.dim() == 0, "BLOCK": BLOCK, **thread_options(x.device, WARPS)},
        x=x,
        factor=factor,
        target=target,
        rows=rows,
        cols=cols,
        ignore_index=ignore_index,
    )


def _programs(x: Tensor) -> int:
    return PROGRAMS * device_record(x.device).multiprocessors
