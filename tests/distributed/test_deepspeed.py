"""Comparisons of patched and stock models with DeepSpeed in two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import deepspeed_training, training
from tests.distributed.pair import World

pytest.importorskip("deepspeed")

ACCUMULATION = 2


@pytest.mark.parametrize(
    "stage, loss, direct",
    [
        (0, "own loss", False),
        (1, "labels", False),
        (1, "own loss", True),
        (2, "own loss", False),
        (2, "z-loss", True),
    ],
)
def test_zero_up_to_2_is_fused(pair: World, stage: int, loss: str, direct: bool) -> None:
    """Compare ZeRO 0 to 2. ``direct``: ``loss.backward()``, scaled in hooks of the model's outputs."""
    for report, warned in pair.run(deepspeed_training.compare, {"stage": stage}, loss, ACCUMULATION, direct):
        assert report.fused >= training.STEPS * ACCUMULATION
        assert not report.stock
        assert not report.materialized
        assert not warned


GATHERED, FREED = deepspeed_training.ZERO_3, deepspeed_training.FREED_AT_ONCE
OFFLOADED = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}


@pytest.mark.parametrize(
    "zero, loss, config",
    [
        (GATHERED, "labels", {"accumulation": 2, "direct": True, "gradient_clipping": 0.1, "checkpointing": True}),
        (FREED, "own loss", {"tied": True}),
        (FREED, "two forwards", {}),
        (FREED, "real logits", {}),
        (FREED, "smoothed", {"adapters": "head"}),
        (FREED, "frozen meanwhile", {"adapters": "modules_to_save"}),
        (FREED | OFFLOADED, "labels", {"adapters": "backbone"}),
        (FREED | OFFLOADED, "own loss", {}),
        (GATHERED, "own loss", {"bf16": {"enabled": True}, "tolerance": 2e-2}),
    ],
)
def test_zero_3_is_fused(pair: World, zero: Any, loss: str, config: Any) -> None:
    if "adapters" in config:
        pytest.importorskip("peft")
    for report, warned in pair.run(deepspeed_training.compare, zero, loss, **config):
        assert report.fused >= training.STEPS * config.get("accumulation", 1)
        assert not report.stock
        assert bool(report.materialized) == bool(warned) == (loss == "real logits")


@pytest.mark.parametrize(
    "function",
    [
        deepspeed_training.late_reads,
        deepspeed_training.evaluated,
        pytest.param(
            deepspeed_training.targets_refused,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="stock's assertion on a GPU ends its process"),
        ),
        deepspeed_training.ranks_apart,
    ],
)
def test_zero_3(pair: World, function: Any) -> None:
    pair.run(function, FREED)


@pytest.mark.parametrize("zero, frozen", [(GATHERED, False), (FREED, True)])
def test_zero_3_gathers_the_head_once(pair: World, zero: Any, frozen: bool) -> None:
    """Check the gathers. DeepSpeed stores the gathered head until backward from the second step on."""
    for stock, patched in pair.run(deepspeed_training.gathered_heads, zero, frozen):
        more = [ours - stocks for ours, stocks in zip(patched, stock, strict=True)]
        assert more == ([1, 0, 0] if zero is GATHERED else [1, 1, 1])


def test_a_head_of_trl(pair: World) -> None:
    pytest.importorskip("trl", minversion="1.16")
    pair.run(deepspeed_training.trl_head)


def test_zero_3_with_a_checkpoint_around_the_head_runs_stock(pair: World) -> None:
    for reasons in pair.run(deepspeed_training.checkpointed_head):
        assert ["ZeRO-3 runs within torch.utils.checkpoint" in reason for reason in reasons] == [True]


def test_two_outputs_of_one_head(pair: World) -> None:
    pair.run(deepspeed_training.two_outputs)
