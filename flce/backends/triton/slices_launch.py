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


def complete_slices(sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor) -> None:
    run(_complete_slices, sent, rank, classes, call, factors)


def _complete_slices(sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor) -> Iterator[Launch]:
    yield launch_of(
        complete_slices_kernel,
        (triton.cdiv(factors.shape[1], ROWS),),
        call,
        {"ROWS": ROWS},
        sent_ptr=sent,
        factors_ptr=factors,
        sent_stride=sent.stride(0),
        factors_stride=factors.stride(0),
        processes=len(sent),
        rank=rank,
        classes=classes,
    )
