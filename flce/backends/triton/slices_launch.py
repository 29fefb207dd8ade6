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


def complete_slices(sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor | None) -> None:
    run(_complete_slices, sent, rank, classes, call, factors)


def _complete_slices(sent: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor | None) -> Iterator[Launch]:
    yield launch_of(
        complete_slices_kernel,
        (triton.cdiv(len(call.inputs.target), ROWS),),
        call,
        {"HAS_FACTORS": factors is not None, "ROWS": ROWS},
        sent_ptr=sent,
        factors_ptr=sent if factors is None else factors,
        sent_stride=sent.stride(0),
        factors_stride=0 if factors is None else factors.stride(0),
        processes=len(sent),
        rank=rank,
        classes=classes,
    )
