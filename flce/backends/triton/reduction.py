"""Kernels that multiply losses and gradients by scalars, and their launches.

Loss scales and the sum of the losses are one small kernel instead of a dozen kernels of PyTorch. For small logits the
number of kernels counts: 4096 x 4096 bfloat16 logits are read in 9 microseconds, and a kernel of any size takes about
two. `TritonBackend` calls `loss_scales` and `reduce`, and launches `scale` and `scale_rows` for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends import formulas
from flce.backends.contract import RowOutputs, RowProblem
from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.math import wait_for_previous_kernel
from flce.backends.triton.replay import run
from flce.core.devices import device_record
from flce.core.problem import LossSpec

# 2.5 microseconds for 4096 rows, 5 for 16384; with half or twice the warps 5% more, with a quarter of the block 60%.
BLOCK, WARPS = 4096, 16
# One program reads all rows, a microsecond for a block. From this number of rows on PyTorch's kernels are as fast.
MAX_ROWS = 16 * BLOCK


@triton.jit(do_not_specialize=["rows", "vocab_size", "ignore_index"])
def reduction_kernel(
    target_ptr,  # (rows,) int64
    num_items_ptr,  # ()
    loss_ptr,  # (rows,); None: compute only the scales
    z_loss_ptr,  # (rows,) `contract.RowOutputs.z_loss`
    scales_ptr,  # (3,) see `contract.Backend.loss_scales`; output with COMPUTE_SCALES, otherwise input
    loss_sum_ptr,  # ()
    z_loss_sum_ptr,  # ()
    rows,
    vocab_size,
    ignore_index,
    ACCUM: tl.constexpr,
    COMPUTE_SCALES: tl.constexpr,
    MEAN: tl.constexpr,  # over the rows that are not ignored
    ZERO_IF_EMPTY: tl.constexpr,
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    SETTLED: tl.constexpr,  # the previous kernel does not write targets and num_items: they are read while it runs
    BLOCK: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP and not SETTLED)
    # Bypass the L1 cache, whose contents may be outdated.
    CACHE: tl.constexpr = ".cg" if SETTLED else ""
    offsets = tl.arange(0, BLOCK)
    if COMPUTE_SCALES:
        if MEAN:
            valid = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, rows, BLOCK):
                row = start + offsets
                target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index, cache_modifier=CACHE)
                valid += (target != ignore_index).to(tl.int32)
            items = tl.sum(valid, axis=0).to(tl.float64)
        elif num_items_ptr is not None:
            items = tl.load(num_items_ptr, cache_modifier=CACHE).to(tl.float64)
        else:
            items = tl.full((), 1.0, tl.float64)
        # In float64, because float32 division is not rounded correctly.
        scale = (1.0 / items).to(ACCUM)
        if ZERO_IF_EMPTY:
            scale = tl.where(items == 0.0, 0.0, scale)
        z_loss_scale = scale
    wait_for_previous_kernel(OVERLAP and SETTLED)
    # No write before the wait: the previous kernel may still read this memory.
    if COMPUTE_SCALES:
        tl.store(scales_ptr, scale)
        tl.store(scales_ptr + 1, z_loss_scale)
        tl.store(scales_ptr + 2, vocab_size.to(ACCUM))
    else:
        scale = tl.load(scales_ptr)
        z_loss_scale = tl.load(scales_ptr + 1)

    if loss_ptr is not None:
        losses = tl.zeros((BLOCK,), ACCUM)
        z_losses = tl.zeros((BLOCK,), ACCUM)
        for start in range(0, rows, BLOCK):
            row = start + offsets
            mask = row < rows
            losses += tl.load(loss_ptr + row, mask=mask, other=0.0)
            if z_loss_ptr is not None:
                z_losses += tl.load(z_loss_ptr + row, mask=mask, other=0.0)
        loss = tl.sum(losses, axis=0) * scale
        if ZERO_IF_EMPTY:
            loss = tl.where(scale == 0.0, 0.0, loss)  # also for an infinite loss
        if z_loss_ptr is not None:
            z_loss = tl.sum(z_losses, axis=0) * z_loss_scale
            if ZERO_IF_EMPTY:
                z_loss = tl.where(z_loss_scale == 0.0, 0.0, z_loss)
            tl.store(z_loss_sum_ptr, z_loss)
            loss += z_loss
        tl.store(loss_sum_ptr, loss)


def loss_scales(p: RowProblem) -> Tensor:
    if p.class_weight is not None or p.target.numel() > MAX_ROWS:
        return formulas.loss_scales(p)
    scales = torch.empty(3, dtype=p.accum, device=p.device)
    run(_launch, scales, True, p.target, p.num_items, p.spec, p.vocab_size, None, scales, None, False)
    return scales


def reduce(p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    if out.loss.numel() > MAX_ROWS or (scales is None and p.class_weight is not None):
        return formulas.reduce(p, out, scales)
    used_scales = out.loss.new_empty(3) if scales is None else scales
    loss = out.loss.new_empty(())
    z_loss = None if out.z_loss is None else out.loss.new_empty(())
    # If scales are None, the kernels that computed the losses waited for all kernels before the call, or let no kernel
    # start early. With zero rows no such kernel ran. A contiguous copy of the targets would be written by this call.
    settled = scales is None and out.loss.numel() > 0 and p.target.is_contiguous()
    run(_launch, used_scales, scales is None, p.target, p.num_items, p.spec, p.vocab_size, out, loss, z_loss, settled)
    return loss, z_loss, used_scales


def _launch(
    scales: Tensor,  # first, because `run` launches nothing if its first tensor is empty, and zero rows have a sum
    compute_scales: bool,  # False: `scales` are an input
    target: Tensor,
    num_items: Tensor | None,
    spec: LossSpec,
    vocab_size: int,
    out: RowOutputs | None,  # None: compute only the scales
    loss: Tensor,
    z_loss: Tensor | None,
    settled: bool,
) -> Iterator[Launch]:
    target = target.reshape(-1).contiguous()  # a view of one dimension may have gaps
    losses = (None, None) if out is None else (out.loss, out.z_loss)
    options = {
        "ACCUM": tl.float64 if scales.dtype == torch.float64 else tl.float32,
        "COMPUTE_SCALES": compute_scales,
        "MEAN": spec.reduction == "mean",
        "ZERO_IF_EMPTY": spec.empty_loss == "zero",
        "SETTLED": settled,
        "BLOCK": BLOCK,
        **thread_options(target.device, WARPS),
    }
    yield build_launch(
        reduction_kernel,
        (1,),
        None,
        options,
        target=target,
        num_items=num_items,
        loss=losses[0],
        z_loss=losses[1],
        scales=scales,
        loss_sum=loss,
        z_loss_sum=z_loss,
        rows=target.numel() if out is None else out.loss.numel(),
        vocab_size=vocab_size,
        ignore_index=spec.ignore_index,
    )


# ---------------------------------------------------------------------------------------------------------
# Gradients

SCALE_BLOCK, SCALE_WARPS = 4096, 8
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
        (min(_programs(x), triton.cdiv(max(x.numel(), second_numel), SCALE_BLOCK)),),
        None,
        {"IN_PLACE": x is out, "BLOCK": SCALE_BLOCK, **thread_options(x.device, SCALE_WARPS)},
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
        {"ONE_FACTOR": factor.dim() == 0, "BLOCK": SCALE_BLOCK, **thread_options(x.device, SCALE_WARPS)},
        x=x,
        factor=factor,
        target=target,
        rows=rows,
        cols=cols,
        ignore_index=ignore_index,
    )


def _programs(x: Tensor) -> int:
    return PROGRAMS * device_record(x.device).multiprocessors
