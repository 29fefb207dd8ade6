"""Tests of the benchmark of models that are divided over processes, in two processes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import training
from tests.distributed.pair import World, skip_with_fewer_gpus

pytest.importorskip("typer")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")


def measure(name: str, seconds: float) -> list[dict[str, Any]]:
    """Return the results of each contender. The deadline of the second process has passed."""
    from benchmarks.cases import AgreedEffort
    from benchmarks.wrapped import SMALL, WRAPPED, divided

    until = time.monotonic() + seconds - 1000.0 * dist.get_rank()
    case = divided(replace(SMALL, contenders=("ours", "stock")), name)
    entry = WRAPPED.measure(case, training.device(), AgreedEffort(1, 60.0, until))
    return [result.to_dict() for result in entry.results]


@pytest.mark.parametrize("way", ["fsdp2", "tp", "zero3"])
def test_every_contender_is_measured(pair: World, way: str) -> None:
    if way == "zero3":
        pytest.importorskip("deepspeed")
    if way == "tp":
        skip_with_fewer_gpus(2)
    results = pair.run(measure, way, 500.0)
    assert (results[0][0]["loss"] == results[1][0]["loss"]) == (way == "tp")  # the same tokens
    for ours, stock, again in results:
        assert len(ours["samples_ms"]) == len(stock["samples_ms"]) == 1
        assert (ours["forwards"], ours["fused"]) == (again["forwards"], again["fused"]) == (3, 3)
        assert "fused" not in stock
        bf16 = torch.cuda.is_available() and way != "tp"
        assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("way", ["fsdp2-tp", "hsdp"])
def test_ways_of_four_processes(four: World, way: str) -> None:
    for ours, stock, _ in four.run(measure, way, 500.0):
        assert (ours["forwards"], ours["fused"]) == (3, 3)
        assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-2 if torch.cuda.is_available() else 1e-5)


def test_ways_that_need_more_processes_are_unavailable(pair: World) -> None:
    for way, title in (("fsdp2-tp", "FSDP2 x TP by PyTorch"), ("hsdp", "HSDP by PyTorch")):
        for result in (result for results in pair.run(measure, way, 500.0) for result in results):
            assert result["status"] == "unavailable"
            assert result["reason"] == f"{title}: needs a multiple of 4 processes, got 2"


def test_the_first_process_decides_when_time_is_over(pair: World) -> None:
    for results in pair.run(measure, "fsdp2", -1.0):
        assert [result["status"] for result in results] == ["skipped"] * 3
