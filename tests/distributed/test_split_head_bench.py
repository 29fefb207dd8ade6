"""The benchmark of a divided head: every contender has the same loss, and peers the operands that they need."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed import training
from tests.distributed.pair import World

pytest.importorskip("typer")

PEERS = {"Liger, logits in memory", "Liger, fused", "Cut Cross-Entropy"}


def missing() -> tuple[set[str], dict[str, float], float]:
    """Contenders, their losses, and by how much these may differ: on a GPU logits in memory are rounded to bfloat16."""
    from benchmarks import split_head as bench

    case = bench.Measured(64, 32, 1000, 2, False)
    bench.measure(case, training.device(), dist.group.WORLD, alone=False, rounds=1)
    tolerance = 1e-3 if training.device().type == "cuda" else 1e-4
    return set(case.missing) | set(case.losses), case.losses, tolerance


def test_each_is_measured_or_named(pair: World) -> None:
    for names, losses, tolerance in pair.run(missing):
        assert names == {"flce", "logits in memory", *PEERS}
        assert losses["flce"] == pytest.approx(losses["logits in memory"], rel=tolerance)
