"""Tests of `python -m benchmarks quick`: its output, its file, its picture, and the errors that it finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner
from typer.testing import Result as Done

import flce
from benchmarks import quick
from benchmarks.cases import Effort
from benchmarks.cli import app
from benchmarks.contenders import select
from benchmarks.operator import FLOORS, OPERATOR, OURS
from benchmarks.problem import OperatorCase
from benchmarks.quick import OTHERS, default_shape, float64_is_cheap

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command, with one timed call of each contender on a CPU, and without peers."""
    monkeypatch.setattr(quick, "EFFORT", Effort(1, 0.0))
    for library in ("liger_kernel", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, library, None)

    def invoke(*arguments: str) -> Done:
        given = ["quick", "--out", str(tmp_path / "quick.json"), "--device", "cpu", *arguments]
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, given)

    return invoke


def test_a_table_a_file_and_a_picture(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "quick", "--out", "/home/somebody/quick.json"])
    done = run("--shape", "96,64,500", "--budget", "1MiB", "--budget", "2.5MiB")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    (head,) = [line for line in lines if "x products" in line]
    assert head.replace("|", "").split() == ["median", "ms", "x", "products", "x", "stock", "MiB", "loss", "dX", "dW"]
    rows = [line for line in lines if line.startswith("| ")]
    assert len({len(line) for line in rows}) == 1  # aligned
    assert "- spread: " in done.stdout
    (missing,) = [line for line in lines if "liger-kernel" in line]
    assert missing.startswith("Not measured: Liger, default (liger); ")
    assert missing.endswith("not installed (pip install liger-kernel)")
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "quick.json").read_text())
    assert document["command"] == "python -m benchmarks quick --out quick.json"  # without folders of a machine
    assert document["versions"]["torch"] == torch.__version__
    (entry,) = OPERATOR.load(tmp_path / "quick.json").cases
    for name in ("floor", OURS, "ours-1MiB", "ours-2MiB", "stock", "ours-again"):
        result = entry.by_name(name)
        assert result.status == "ok"
        if name != "floor":
            assert set(result.errors or {}) == {"loss", "input_grad", "weight_grad"}
            assert max((result.errors or {}).values()) < 1e-5
    assert (entry.by_name("ours-1MiB").workspace_bytes or 0) <= 2**20


def test_the_defaults_suit_a_cpu() -> None:
    assert float64_is_cheap(OperatorCase(*default_shape(CPU), dtype="float32"), CPU)
    assert not float64_is_cheap(OperatorCase(8192, 4096, 128256), CPU)
    # Every name is the name of a contender.
    assert len(select([*FLOORS, OURS, *OTHERS])) == len(FLOORS) + 1 + len(OTHERS)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--device", "meta"), "there is no device 'meta' here: give one of"),
        (("--shape", "8,4"), "expected N,H,V as 3 positive numbers, at most 1073741824, got '8,4'"),
        (("--dtype", "int8"), "one of float16, bfloat16, float32, float64, got 'int8'"),
        (("--budget", "0.5MiB"), "expected at least 1MiB, got '0.5MiB'"),
        (("--shape", "1000000000,100000,16"), "operands and gradients take 745,058 GiB, and cpu has"),
    ],
)
def test_wrong_arguments(run: Any, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "quick.json").exists()


def test_a_call_that_fails_is_found_and_the_others_go_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("as [planned]")

    monkeypatch.setattr(flce, "fused_linear_cross_entropy", fail)
    done = run("--shape", "64,32,300")
    assert done.exit_code == 1, done.output
    assert "- flce (ours) failed: RuntimeError: as [planned]" in done.stdout
    assert "| stock (F.linear" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), ("--shape", "1000,768,50257")])
def test_on_cuda(run: Any, shape: tuple[str, ...], tmp_path: Path) -> None:
    """All contenders except peers have figures, and the workspace of flce is the planned one."""
    done = run(*shape, "--budget", "64MiB", "--device", "cuda:0")
    assert done.exit_code == 0, done.output
    (entry,) = OPERATOR.load(tmp_path / "quick.json").cases
    assert entry.case.dtype == "bfloat16"
    assert entry.results[0].contender == ("floor-aligned" if shape else "floor")
    for result in entry.results:
        assert result.status == "ok" or (result.family == "peer" and result.contender != "torch-compile"), result
        if result.family == "ours":
            assert result.workspace_bytes == pytest.approx(result.planned_bytes, rel=0.01, abs=2**20)
            assert result.errors
