"""Tests of the benchmarks of divided models and of a divided head."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from benchmarks.cases import AgreedEffort
from benchmarks.split_head import SPLIT_HEAD, SplitCase
from benchmarks.wrapped import SMALL, WRAPPED, divided
from tests.distributed.training import device
from tests.processes import in_processes, skip_with_fewer_gpus


def check_way(way, seconds=500.0):
    """Return the results of each contender. The deadline of the second process has passed."""
    until = time.monotonic() + seconds - 1000.0 * dist.get_rank()
    case = divided(replace(SMALL, contenders=("ours", "stock")), way)
    ours, stock, again = results = WRAPPED.measure(case, device(), AgreedEffort(1, 60.0, until)).results
    if ours.status == "ok":
        assert len(ours.samples_ms) == len(stock.samples_ms) == 1
        assert (ours.forwards, ours.fused) == (again.forwards, again.fused) == (3, 3)
        assert stock.fused is None
        bf16 = torch.cuda.is_available() and way != "tp"
        assert ours.loss == pytest.approx(stock.loss, rel=1e-2 if bf16 else 1e-5)
    return results


@pytest.mark.parametrize("way", ["fsdp2", "tp", "zero3"])
@in_processes(2)
def test_ways_of_two_processes(way):
    if way == "zero3":
        pytest.importorskip("deepspeed")
    if way == "tp":
        skip_with_fewer_gpus(2)
    ours, *_ = check_way(way)
    assert ours.status == "ok", ours.reason
    losses = [None, None]
    dist.all_gather_object(losses, ours.loss)
    assert (losses[0] == losses[1]) == (way == "tp")  # the same tokens


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_processes(2)
def test_a_divided_head(sequence_parallel):
    dtype = "bfloat16" if device().type == "cuda" else "float32"
    case = SplitCase(64, 32, 1000, 2, sequence_parallel, dtype=dtype)
    found = {result.contender: result for result in SPLIT_HEAD.measure(case, device(), AgreedEffort(1, 60.0)).results}
    others = set() if sequence_parallel else {"ours-logits", "liger-logits", "liger", "cce"}
    assert set(found) == {"floor", "floor-one-by-one", "ours", "ours-again"} | others
    losses = {name: result.loss for name, result in found.items() if result.loss is not None}
    assert len(losses) >= (2 if sequence_parallel else 3)
    tolerance = 1e-3 if torch.cuda.device_count() > 1 else 1e-4  # logits in memory are rounded to bfloat16
    assert losses == {name: pytest.approx(losses["ours"], rel=tolerance) for name in losses}
    assert all(result.status == ("ok" if result.samples_ms else "unavailable") for result in found.values())
