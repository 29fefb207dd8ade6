"""Loss scales and the sum of the losses, in one small kernel instead of a dozen kernels of PyTorch.

`TritonBackend` calls `loss_scales` and `reduce`. For small logits the number of kernels counts: 4096 x 4096 bfloat16
logits are read in 9 microseconds, and a kernel of any size takes about two.
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
