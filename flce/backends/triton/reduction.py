"""What is made of all rows at once: one small kernel, where PyTorch would take a dozen.

Next to a pass over small logits each of those takes its time: 4096 x 4096 bfloat16 are read in 9 microseconds, and a
kernel of any size takes about two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["rows", "vocab_size", "ignore_index"])
def reduction_kernel(
    target_ptr,  # (rows,) int64
    num_items_ptr,  # ()
    loss_ptr,  # (rows,)
    second_ptr,  # (rows,) the other of `contract.RowOutputs.losses`
    scales_ptr,  # (3,) see `contract.Backend.loss_scales`; written, or read
    loss_sum_ptr,  # ()
    second_sum_ptr,  # ()
    rows,
    vocab_size,
    ignore_index,
    ACCUM: tl.constexpr,
    MAKE_SCALES: tl.constexpr,
    MEAN: tl.constexpr,  # over the rows that are not ignored
    HAS_NUM_ITEMS: tl.constexpr,
    HAS_LOSS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    OVERLAP: tl.constexpr,  # launched while the kernel before may still run, as the one that comes next may be
    SETTLED: tl.constexpr,  # targets and num_items are older than the kernel before: they may be read while it runs
    BLOCK: tl.constexpr,
):
    if OVERLAP and not SETTLED:
        gdc_wait()
        gdc_launch_dependents()
    # Past the L1 cache, which may be older still.
    CACHE: tl.constexpr = ".cg" if SETTLED else ""
    offsets = tl.arange(0, BLOCK)
    if MAKE_SCALES:
        if MEAN:
            valid = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, rows, BLOCK):
                row = start + offsets
                target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index, cache_modifier=CACHE)
                valid += (target != ignore_index).to(tl.int32)
            items = tl.sum(valid, axis=0).to(tl.float64)
        elif HAS_NUM_ITEMS:
            items = tl.load(num_items_ptr, cache_modifier=CACHE).to(tl.float64)
        else:
            items = tl.full((), 1.0, tl.float64)
        # In float64, because a division of float32 is not rounded correctly.
        scale = (1.0 / items).to(ACCUM)
        second_scale = scale
    if OVERLAP and SETTLED:
        gdc_wait()
        gdc_launch_dependents()
    # Nothing is written before: what has this memory now may still be read.
    if MAKE_SCALES:
        tl.store(scales_ptr, scale)
        tl.store(scales_ptr + 1, second_scale)
        tl.store(scales_ptr + 2, vocab_size.to(ACCUM))
    else:
        scale = tl.load(scales_ptr)
        second_scale = tl.load(scales_ptr + 1)

    if HAS_LOSS:
        losses = tl.zeros((BLOCK,), ACCUM)
        seconds = tl.zeros((BLOCK,), ACCUM)
        for start in range(0, rows, BLOCK):
            row = start + offsets
            mask = row < rows
            losses += tl.load(loss_ptr + row, mask=mask, other=0.0)
            if HAS_SECOND:
                seconds += tl.load(second_ptr + row, mask=mask, other=0.0)
        loss = tl.sum(losses, axis=0) * scale
        if HAS_SECOND:
            second = tl.sum(seconds, axis=0) * second_scale
            tl.store(second_sum_ptr, second)
            loss += second
        tl.store(loss_sum_ptr, loss)
