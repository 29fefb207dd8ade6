"""Tests of the benchmark of a divided head: contenders, their losses, and unavailable contenders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import training
from tests.distributed.pair import World

pytest.importorskip("typer")


def measure(sequence_parallel: bool) -> list[dict[str, Any]]:
    from benchmarks.cases import AgreedEffort
    from benchmarks.split_head import SPLIT_HEAD, SplitCase

    dtype = "bfloat16" if training.device().type == "cuda" else "float32"
    case = SplitCase(64, 32, 1000, 2, sequence_parallel, dtype=dtype)
    return [result.to_dict() for result in SPLIT_HEAD.measure(case, training.device(), AgreedEffort(1, 60.0)).results]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_contender_is_measured_or_unavailable(pair: World, sequence_parallel: bool) -> None:
    for results in pair.run(measure, sequence_parallel):
        found = {result["contender"]: result for result in results}
        floors, ours = {"floor", "floor-one-by-one"}, {"ours", "ours-again"}
        others = set() if sequence_parallel else {"ours-logits", "liger-logits", "liger", "cce"}
        assert set(found) == floors | ours | others
        losses = {name: result["loss"] for name, result in found.items() if "loss" in result}
        assert len(losses) >= (2 if sequence_parallel else 3)
        tolerance = 1e-3 if torch.cuda.device_count() > 1 else 1e-4  # logits in memory are rounded to bfloat16
        assert losses == {name: pytest.approx(losses["ours"], rel=tolerance) for name in losses}
        assert all(result["status"] == ("ok" if result["samples_ms"] else "unavailable") for result in results)


def test_one_process(tmp_path: Path) -> None:
    """Run the benchmark in a new process, because it leaves a simulated process group."""
    world = World(1, "gloo")
    try:
        (names,) = world.run(run_benchmark, str(tmp_path / "run.json"))
    finally:
        world.close()
    document = json.loads((tmp_path / "run.json").read_text())
    assert [case["case"]["processes"] for case in document["cases"]] == [2, 2, 4, 4, 8, 8]
    assert names == ["floor", "ours-inside", "ours-outside", "ours-inside-again"]


def run_benchmark(out: str) -> list[str]:
    import torch.distributed as dist
    from typer.testing import CliRunner

    from benchmarks.cli import BENCHMARKS, app

    dist.destroy_process_group()
    done = CliRunner().invoke(app, ["split-head", "--preset", "tiny", "--device", "cpu", "--rounds", "1", "--out", out])
    assert done.exit_code == 0, done.output
    dist.destroy_process_group()
    (*_, entry) = BENCHMARKS["split-head"].load(Path(out)).cases
    return [result.contender for result in entry.results]
