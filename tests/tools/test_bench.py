"""``flce bench``: small runs on a CPU, their JSON and picture, wrong usage, and what is found to be wrong."""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from typer.testing import CliRunner
from typer.testing import Result as Done

import flce
from benchmarks.operator import OPERATOR
from flce.tools.bench import comparison
from flce.tools.bench.comparison import FLOORS, OTHERS, OURS, default_shape, exactness_is_cheap, faults
from flce.tools.bench.contenders import select
from flce.tools.bench.problem import OperatorCase
from flce.tools.bench.results import BenchResult, Entry
from flce.tools.cli.bench import bench

CPU = torch.device("cpu")
SMALL = ("--device", "cpu", "--seconds", "0")
PACKAGE = Path(flce.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def _as_on_a_cpu():
    """What users get there, not the interpreter; one thread, since more cost such small problems time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("FLCE_BACKEND", "torch")
        for library in ("liger_kernel", "cut_cross_entropy"):
            patch.setitem(sys.modules, library, None)  # as if it were not installed
        patch.setattr(sys, "argv", ["flce", "bench", "--plot", "/home/somebody/bench.png"])
        yield
    torch.set_num_threads(threads)
    gc.freeze()  # a measurement gives back to the collector what was kept from it


def run(*arguments: str) -> Done:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])


# --- what it measures ---


@pytest.fixture(scope="module")
def measured() -> Done:
    modes = ("--mode", "forward+backward", "--mode", "frozen-head")
    shapes = ("--shape", "96,64,500", "--shape", "40x16x130")
    return run(*SMALL, *shapes, *modes, "--budget", "1MiB", "--json")


def test_json_is_all_of_stdout(measured: Done, tmp_path: Path) -> None:
    """And the project's own tables read it."""
    assert measured.exit_code == 0, measured.output
    document = json.loads(measured.stdout)
    assert document["found_wrong"] == []
    assert document["kind"] == "operator"
    assert document["command"] == "flce bench --plot bench.png"  # no folder of anybody's machine
    assert {"python", "torch", "flce"} <= set(document["versions"])
    cases = [entry["case"] for entry in document["cases"]]
    assert [(c["tokens"], c["hidden"], c["vocab"]) for c in cases] == [(96, 64, 500)] * 2 + [(40, 16, 130)] * 2
    assert [c["mode"] for c in cases] == ["forward+backward", "frozen-head"] * 2
    assert {c["dtype"] for c in cases} == {"float32"}
    file = tmp_path / "run.json"
    file.write_text(measured.stdout)
    assert "| flce, 1 MiB budget |" in OPERATOR.tables(OPERATOR.load(file), False)[-1].markdown()


def test_everybody_has_figures_or_a_reason(measured: Done) -> None:
    for entry in json.loads(measured.stdout)["cases"]:
        results = {result["contender"]: result for result in entry["results"]}
        assert {"floor", "ours", "ours-1MiB", "stock", "ours-again"} <= set(results)
        for name in ("floor", "ours", "ours-1MiB", "stock", "ours-again"):
            assert results[name]["status"] == "ok"
            assert results[name]["median_ms"] > 0
        for name in ("ours", "ours-1MiB", "stock"):
            gradients = {"input_grad"} if entry["case"]["mode"] == "frozen-head" else {"input_grad", "weight_grad"}
            assert set(results[name]["errors"]) == {"loss"} | gradients
            assert max(results[name]["errors"].values()) < 1e-5
            assert results[name]["workspace_bytes"] > 0
        assert results["liger"]["reason"] == "not installed (pip install liger-kernel)"
        assert results["ours-1MiB"]["workspace_bytes"] <= 2**20


def test_a_table_for_people_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "bench.png"
    done = run(*SMALL, "--shape", "64,32,300", "--budget", "2MiB", "--plot", str(out))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    (head,) = [index for index, line in enumerate(lines) if "MiB" in line and "dW" in line]
    assert lines[head].split() == ["ms", "products", "stock", "MiB", "loss", "dX", "dW"]
    assert any(line.split()[:1] == ["flce"] and len(line.split()) == 8 for line in lines)
    assert "flce, 2 MiB budget" in done.stdout
    assert "spread: " in done.stdout
    (missing,) = [line for line in lines if "liger-kernel" in line]
    assert missing.startswith("Not measured: Liger, default (liger); ")
    assert missing.endswith("not installed (pip install liger-kernel)")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "wrote" in done.stderr
    assert "wrote" not in done.stdout


def test_only_some_contenders_without_errors() -> None:
    done = run(*SMALL, "--shape", "64,32,300", "--contender", "stock", "--no-errors", "--dtype", "float64", "--json")
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(done.stdout)["cases"]
    assert [result["contender"] for result in entry["results"]] == ["floor", "stock"]
    assert all("errors" not in result for result in entry["results"])
    assert entry["case"]["dtype"] == "float64"
    shown = run(*SMALL, "--shape", "64,32,300", "--contender", "stock", "--no-errors")
    assert "* not compared with float64 (--errors does)" in shown.stdout


def test_the_defaults_suit_a_cpu() -> None:
    case = OperatorCase(*default_shape(CPU), dtype="float32")
    assert exactness_is_cheap(case, CPU)
    assert not exactness_is_cheap(OperatorCase(8192, 4096, 128256), CPU)
    # Every name stands for a contender.
    assert len(select([*FLOORS, OURS, *OTHERS])) == len(FLOORS) + 1 + len(OTHERS)


# --- what is wrong ---


def test_no_room_for_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    monkeypatch.setattr(comparison, "prepare", prepare)
    done = run(*SMALL, "--shape", "8,4,16")
    assert done.exit_code == 2
    assert "cpu has no room for the operands and, with --errors, for float64: give smaller sizes" in done.stderr


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run(*SMALL, "--shape", "8,4,16", "--plot", "bench.png")
    assert done.exit_code == 2
    assert "pip install matplotlib" in done.stderr


@pytest.mark.parametrize("off, message", [(1.01, "dX of flce is 1.0e-02 from float64"), (math.nan, "not finite")])
def test_a_loss_that_is_off_is_found(off: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = flce.fused_linear_cross_entropy
    monkeypatch.setattr(flce, "fused_linear_cross_entropy", lambda *a, **options: off * right(*a, **options))
    done = run(*SMALL, "--shape", "64,32,300", "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)["found_wrong"]
    assert len(found) == 6  # loss, dX and dW, of the default and of the same again
    assert any(message in line for line in found), found
    shown = run(*SMALL, "--shape", "64,32,300", "--errors")
    assert shown.exit_code == 1
    assert "WRONG: 64 x 32 x 300, float32, forward+backward: the loss of flce is " in shown.stdout


def test_a_call_that_fails_is_found_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("as [planned]")

    monkeypatch.setattr(flce, "fused_linear_cross_entropy", fail)
    done = run(*SMALL, "--shape", "64,32,300")
    assert done.exit_code == 1, done.output
    assert "WRONG: 64 x 32 x 300, float32, forward+backward: flce failed: RuntimeError: as [planned]" in done.stdout
    assert any(line.startswith("stock") for line in map(str.strip, done.stdout.splitlines()))


def entry_of(case: OperatorCase, **errors: float) -> Entry:
    names = {"loss": 1e-6, "input_grad": 6.7e-3, "weight_grad": 6.7e-3}
    ours = BenchResult("ours", "flce", "ours", samples_ms=[1.0], errors=names | errors)
    return Entry(case, [ours, BenchResult("stock", "stock", "stock", samples_ms=[2.0], errors=dict(names))])


@pytest.mark.parametrize(
    "errors, wrong",
    [
        ({}, 0),
        ({"input_grad": 8.3e-3}, 0),
        ({"input_grad": 8.5e-3}, 1),
        ({"weight_grad": math.inf}, 1),
        ({"weight_grad": math.nan}, 1),
        ({"loss": 2e-5}, 0),  # one number: stock's was close to the truth by chance
        ({"loss": 1e-4}, 1),
    ],
)
def test_further_than_stock_is_wrong(errors: dict[str, float], wrong: int) -> None:
    assert len(faults(entry_of(OperatorCase(4096, 4096, 128256), **errors))) == wrong


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["4096,1024,32768", "1000,768,50257"])
def test_on_cuda(shape: str, tmp_path: Path) -> None:
    """Every contender that is installed has figures, and ours takes what is planned."""
    done = run("--shape", shape, "--budget", "64MiB", "--seconds", "0.1", "--errors", "--json", "--device", "cuda:0")
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(done.stdout)["cases"]
    assert entry["case"]["dtype"] == "bfloat16"
    floor, *_ = entry["results"]
    assert floor["contender"] == ("floor" if shape.endswith("32768") else "floor-aligned")
    for result in entry["results"]:
        if result["family"] == "peer" and result["contender"] != "torch-compile":
            continue
        assert result["status"] == "ok", result
        if result["family"] == "ours":
            assert result["workspace_bytes"] == pytest.approx(result["planned_bytes"], rel=0.01, abs=2**20)


@pytest.mark.gpu
def test_the_default_on_cuda() -> None:
    """Everything that is installed on the default shape, compared with float64."""
    done = run("--json")
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(done.stdout)["cases"]
    assert all("errors" in result for result in entry["results"] if result["contender"] in ("ours", "stock"))
