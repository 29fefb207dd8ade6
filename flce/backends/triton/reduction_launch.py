"""Host side of `reduction_kernel`: what it takes, and what is left to PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from flce.backends import reduction
from flce.backends.contract import RowOutputs, RowProblem
from flce.backends.triton.launch import Launch, overlap
from flce.backends.triton.reduction import reduction_kernel
from flce.backends.triton.replay import run
from flce.problem import LossSpec, accumulation_dtype

# 2.5 microseconds for 4096 rows, 5 for 16384; with half or twice the warps 5% more, with a quarter of the block 60%.
BLOCK, WARPS = 4096, 16
# One program goes through all of them, a microsecond for a block. PyTorch's dozen of kernels take as long for these.
MAX_ROWS = 16 * BLOCK


def make_constants(p: RowProblem) -> Tensor:
    if p.class_weight is not None or p.target.numel() > MAX_ROWS:
        return reduction.make_constants(p)
    made = _new_constants(p)
    run(_launch, p.target, p.num_items, p.spec, p.vocab_size, None, made, True, made, None, False)
    return made


def reduce(p: RowProblem, rows: RowOutputs, constants: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    if rows.loss.numel() > MAX_ROWS or (constants is None and p.class_weight is not None):
        return reduction.reduce(p, rows, constants)
    used = rows.loss.new_empty(3) if constants is None else constants
    loss = rows.loss.new_empty(())
    second = None if rows.losses[1] is None else rows.loss.new_empty(())
    # Losses without constants come from kernels that have waited for all that was there before the call, or let nobody
    # begin early. No rows have no such kernel; and a copy of the targets would be younger than the call.
    settled = constants is None and rows.loss.numel() > 0 and p.target.is_contiguous()
    run(_launch, p.target, p.num_items, p.spec, p.vocab_size, rows, used, constants is None, loss, second, settled)
    return loss, second, used


def _new_constants(p: RowProblem) -> Tensor:
    return torch.empty(3, dtype=accumulation_dtype(p.dtype), device=p.device)


def _launch(
    target: Tensor,
    num_items: Tensor | None,
    spec: LossSpec,
    vocab_size: int,
    rows: RowOutputs | None,  # None: no losses
    constants: Tensor,
    make_constants: bool,  # or else they are there
    loss: Tensor,
    second: Tensor | None,
    settled: bool,
) -> Iterator[Launch]:
    """The arguments are those of `reduction_kernel`."""

    def pointer(t: Tensor | None) -> Tensor:
        return constants if t is None else t  # what a flag switches off is never read

    target = target.reshape(-1).contiguous()  # a view of one dimension may have gaps
    losses = (None, None) if rows is None else rows.losses
    args = {
        "target_ptr": target,
        "num_items_ptr": pointer(num_items),
        "loss_ptr": pointer(losses[0]),
        "second_ptr": pointer(losses[1]),
        "constants_ptr": constants,
        "loss_sum_ptr": loss,
        "second_sum_ptr": pointer(second),
        "rows": target.numel() if rows is None else rows.loss.numel(),
        "vocab_size": vocab_size,
        "ignore_index": spec.ignore_index,
    }
    options = {
        "ACCUM": tl.float64 if constants.dtype == torch.float64 else tl.float32,
        "MAKE_CONSTANTS": make_constants,
        "MEAN": spec.reduction == "mean",
        "HAS_NUM_ITEMS": num_items is not None,
        "HAS_LOSS": rows is not None,
        "HAS_SECOND": second is not None,
        "SETTLED": settled,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
        **overlap(target.device),
    }
    yield Launch(reduction_kernel, (1,), args, options)
