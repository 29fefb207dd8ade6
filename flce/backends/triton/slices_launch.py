"""The launch of `slices.py`."""

from __future__ import annotations

from collections.abc import Iterator

import triton
from torch import Tensor

from flce.backends.contract import TileCall
from flce.backends.triton.launch import Launch, launch_of
from flce.backends.triton.replay import run
from flce.backends.triton.slices import complete_slices_kernel

ROWS = 64


def complete_slices(sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor, row_gradient: bool) -> None:
    run(_complete_slices, sent, rank, classes, call, factors, row_gradient)


def _complete_slices(
    sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor, row_gradient: bool
) -> Iterator[Launch]:
    yield launch_of(
        complete_slices_kernel,
        (triton.cdiv(factors.shape[1], ROWS),),
        call,
        {"ROW_GRADIENT": row_gradient, "ROWS": ROWS},
        sent_ptr=sent,
        factors_ptr=factors,
        sent_stride=sent.stride(0),
        factors_stride=factors.stride(0),
        processes=len(sent),
        rank=rank,
        classes=classes,
    )
