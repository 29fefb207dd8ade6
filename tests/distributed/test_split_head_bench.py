"""The benchmark of a divided head: every contender has the same loss, and peers the operands that they need."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import training
from tests.distributed.pair import World

pytest.importorskip("typer")

PEERS = {"Liger, logits in memory", "Liger, fused", "Cut Cross-Entropy"}


class _Sum(torch.autograd.Function):
    """What all processes have, summed; the gradient of each is the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _SumOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad := grad.clone())
        return grad


def stand_in(logits: Tensor, target: Tensor) -> Tensor:
    """(tokens,) losses by autograd, of slices of equal size."""
    start = dist.get_rank() * logits.shape[-1]
    here = F.one_hot((target - start).clamp(0, logits.shape[-1] - 1), logits.shape[-1]) * (
        (target >= start) & (target < start + logits.shape[-1])
    ).unsqueeze(-1)
    sums = _Sum.apply(torch.stack((logits.exp().sum(-1), (logits * here).sum(-1))))
    return sums[0].log() - sums[1]


def library() -> Any:
    """Stands for the modules of peers, with their signatures."""

    def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return stand_in(F.linear(_SumOfGradient.apply(x), weight), target)

    return SimpleNamespace(
        LigerVocabParallelCrossEntropy=lambda: lambda logits, target, tp_group: stand_in(logits, target),
        liger_fused_linear_scaled_cross_entropy_tp=lambda x, weight, target, tp_group: fused(x, weight, target),
        VocabParallelOptions=lambda start, stop, group: (start, stop),
        linear_cross_entropy=lambda x, w, y, vocab_parallel_options: fused(x, w, y).mean(),
    )


def outcomes() -> dict[str, Any]:
    from benchmarks import split_head as bench

    with pytest.MonkeyPatch.context() as patch:
        for module in (bench.LIGER_LOGITS, bench.LIGER_FUSED, bench.CCE_FUSED):
            patch.setitem(sys.modules, module, library())
        patch.setattr(bench, "PEERS", [replace(peer, unavailable=lambda device: None) for peer in bench.PEERS])
        case = bench.Measured(64, 32, 1000, 2, False)
        made = bench.Operands(case, training.device(), dist.group.WORLD)
        steps = bench.contenders(made, alone=False)
        called: dict[str, Any] = {name: step() for name, step in steps.items() if "products" not in name}
        return {name: [t.float().cpu() for t in values] for name, values in called.items()}


def test_contenders_compute_the_same(pair: World) -> None:
    for made in pair.run(outcomes):
        assert set(made) == {"flce", "logits in memory", *PEERS}
        for values in made.values():
            for mine, expected in zip(values, made["flce"], strict=True):
                torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-3 if mine.dim() else 1e-5)


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
