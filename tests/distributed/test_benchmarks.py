"""Tests of the benchmarks of divided models and of a divided head."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

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
from tests.processes import World, in_processes, skip_with_fewer_gpus


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


def test_one_process(tmp_path: Path):
    """Run the benchmark in a new process, because it leaves a simulated process group."""
    with contextlib.closing(World(1)) as world:
        (names,) = world.run(run_benchmark, str(tmp_path / "run.json"))
    document = json.loads((tmp_path / "run.json").read_text())
    assert [case["case"]["processes"] for case in document["cases"]] == [2, 2, 4, 4, 8, 8]
    assert names == ["floor", "ours-inside", "ours-outside", "ours-inside-again"]


def run_benchmark(out: str) -> list[str]:
    from typer.testing import CliRunner

    from benchmarks.cli import app

    dist.destroy_process_group()
    done = CliRunner().invoke(app, ["split-head", "--preset", "tiny", "--device", "cpu", "--rounds", "1", "--out", out])
    assert done.exit_code == 0, done.output
    dist.destroy_process_group()
    (*_, entry) = SPLIT_HEAD.load(Path(out)).cases
    return [result.contender for result in entry.results]
