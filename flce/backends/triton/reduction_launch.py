"""Host side of `reduction_kernel`: what it takes, and what is left to PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from flce.backends import reduction
from flce.backends.contract import RowOutputs, RowProblem
from flce.backends.triton.launch import Launch, overlap, threads
from flce.backends.triton.reduction import reduction_kernel
from flce.backends.triton.replay import run
from flce.core.problem import LossSpec, accumulation_dtype

# 2.5 microseconds for 4096 rows, 5 for 16384; with half or twice the warps 5% more, with a quarter of the block 60%.
BLOCK, WARPS = 4096, 16
# One program goes through all of them, a microsecond for a block. PyTorch's dozen of kernels take as long for these.
MAX_ROWS = 16 * BLOCK


def loss_scales(p: RowProblem) -> Tensor:
    if p.class_weight is not None or p.target.numel() > MAX_ROWS:
        return reduction.loss_scales(p)
    made = torch.empty(3, dtype=accumulation_dtype(p.dtype), device=p.device)
    run(_launch, made, True, p.target, p.num_items, p.spec, p.vocab_size, None, made, None, False)
    return made


def reduce(p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    if out.loss.numel() > MAX_ROWS or (scales is None and p.class_weight is not None):
        return reduction.reduce(p, out, scales)
    used = out.loss.new_empty(3) if scales is None else scales
    loss = out.loss.new_empty(())
    second = None if out.losses[1] is None else out.loss.new_empty(())
    # Losses without scales come from kernels that have waited for all that was there before the call, or let no kernel
    # begin early. No rows have no such kernel; and a copy of the targets would be younger than the call.
    settled = scales is None and out.loss.numel() > 0 and p.target.is_contiguous()
    run(_launch, used, scales is None, p.target, p.num_items, p.spec, p.vocab_size, out, loss, second, settled)
    return loss, second, used


def _launch(
    scales: Tensor,  # first, because of no rows there is a sum, too
    make_scales: bool,  # or else they are there
    target: Tensor,
    num_items: Tensor | None,
    spec: LossSpec,
    vocab_size: int,
    out: RowOutputs | None,  # None: no losses
    loss: Tensor,
    second: Tensor | None,
    settled: bool,
) -> Iterator[Launch]:
    """The arguments are those of `reduction_kernel`."""

    def pointer(t: Tensor | None) -> Tensor:
        return scales if t is None else t  # what a flag switches off is never read

    target = target.reshape(-1).contiguous()  # a view of one dimension may have gaps
    losses = (None, None) if out is None else out.losses
    args = {
        "target_ptr": target,
        "num_items_ptr": pointer(num_items),
        "loss_ptr": pointer(losses[0]),
        "second_ptr": pointer(losses[1]),
        "scales_ptr": scales,
        "loss_sum_ptr": loss,
        "second_sum_ptr": pointer(second),
        "rows": target.numel() if out is None else out.loss.numel(),
        "vocab_size": vocab_size,
        "ignore_index": spec.ignore_index,
    }
    options = {
        "ACCUM": tl.float64 if scales.dtype == torch.float64 else tl.float32,
        "MAKE_SCALES": make_scales,
        "MEAN": spec.reduction == "mean",
        "HAS_NUM_ITEMS": num_items is not None,
        "HAS_LOSS": out is not None,
        "HAS_SECOND": second is not None,
        "SETTLED": settled,
        "BLOCK": BLOCK,
        **threads(target.device, WARPS),
        **overlap(target.device),
    }
    yield Launch(reduction_kernel, (1,), args, options)
