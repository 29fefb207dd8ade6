"""A small run of `kernels` and its table."""

from __future__ import annotations

import math
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.kernels import CONTENDERS, KERNELS, KernelCase, Tiles
from benchmarks.reports import markdown
from flce.tools.bench.cases import Effort
from flce.tools.bench.results import BenchResult, Entry, Run

CPU = torch.device("cpu")


def test_bandwidth_is_that_of_the_bytes_that_must_move():
    case = KernelCase(100, 50257, 50257)
    moved = {contender.name: contender.bytes(case) for contender in CONTENDERS}
    logits = 100 * 50257
    assert moved == {"copy": 4 * 100 * 50304, "statistics": 2 * logits, "gradient": 4 * logits, "both": 4 * logits}
    mixed = KernelCase(100, 50257, 50257, "float32", "bfloat16")
    assert CONTENDERS[3].bytes(mixed) == 6 * logits
    copy = BenchResult("copy", "copy", "floor", samples_ms=[1.0], moved_bytes=4_000_000)
    both = BenchResult("both", "both", "ours", samples_ms=[2.0, 4.0, 3.0], moved_bytes=9_000_000)
    assert both.gigabytes_per_second == pytest.approx(3.0)
    head = {"date": "d", "command": "c", "commit": None, "versions": {}, "device": {"type": "cuda", "name": "a GPU"}}
    run = Run("kernels", head, [Entry(case, [copy, both])])
    assert "| 3 | 75% |" in markdown(run, KERNELS.tables(run, False))


def test_the_passes_are_those_of_the_loss():
    """And every call finds the logits again that the one before wrote over."""
    case = KernelCase(20, 70, 70, "float64")
    problem = Tiles(case, CPU)
    logits = problem.source[:, :70].clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, problem.writing.inputs.target)
    (expected,) = torch.autograd.grad(loss, logits)
    for contender in CONTENDERS[1:]:
        for _ in range(2):
            problem.restore()
            contender.step(problem)
        if contender.writes:
            torch.testing.assert_close(problem.grad, expected)
        else:
            assert float(problem.out.loss.mean()) == pytest.approx(float(loss.detach()))


def test_missing_figures_are_a_failure(monkeypatch, tmp_path):
    def fail(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(sys.modules["flce.backends.eager"].TorchBackend, "gradient", fail)
    out = tmp_path / "kernels.json"
    done = CliRunner().invoke(app, ["kernels", "--shape", "8,16", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 1
    assert "No figures for gradient" in " ".join(done.output.split())


@pytest.mark.gpu
def test_kernels_run_on_cuda():
    case = KernelCase(200, 4001, 4001)
    entry = KERNELS.measure(case, torch.device("cuda"), Effort(3, 5.0))
    for result in entry.results:
        assert result.status == "ok", (result.contender, result.reason)
        assert result.gigabytes_per_second is not None
        assert math.isfinite(result.gigabytes_per_second)
