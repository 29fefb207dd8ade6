"""Patched models with DeepSpeed in two processes, four micro-batches a step, against stock with DeepSpeed."""

from __future__ import annotations

import pytest

from tests.distributed import deepspeed_training, training
from tests.distributed.pair import World

pytest.importorskip("deepspeed")

ACCUMULATION = 4


@pytest.mark.parametrize(
    "stage, loss, direct",
    [
        (0, "labels", False),
        (0, "own loss", False),
        (1, "labels", False),
        (1, "own loss", True),
        (2, "labels", True),
        (2, "own loss", False),
        (2, "own loss", True),
        (2, "z-loss", True),
    ],
)
def test_zero_up_to_2_is_fused(pair: World, stage: int, loss: str, direct: bool) -> None:
    """``direct``: ``loss.backward()``, whose factor 1/4 DeepSpeed applies in hooks of the model's outputs."""
    for report, warned in pair.run(deepspeed_training.compare, stage, loss, ACCUMULATION, direct):
        assert report.fused >= training.STEPS * ACCUMULATION
        assert not report.stock
        assert not report.materialized
        assert not warned


@pytest.mark.parametrize("loss", ["labels", "own loss"])
def test_zero_3_runs_stock_and_says_so(pair: World, loss: str) -> None:
    for report, warned in pair.run(deepspeed_training.compare, 3, loss, ACCUMULATION, loss == "labels"):
        assert report.fused == 0
        assert ["ZeRO-3" in reason for reason in report.stock] == [True]
        assert warned == {"NotFusedWarning"}


def test_two_outputs_of_one_head(pair: World) -> None:
    pair.run(deepspeed_training.two_outputs)
