"""Tests of the three times of a call: of a made-up device with a clock, in tables and targets, and on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import measure
from benchmarks.benchmark import save
from benchmarks.cases import Effort
from benchmarks.cli import app
from benchmarks.contenders import OperatorContender, autograd_step, select, stock_loss
from benchmarks.measure import CallMeter, Sample
from benchmarks.operator import OPERATOR
from benchmarks.problem import OperatorCase, OperatorProblem
from benchmarks.runs import BenchResult, Entry, Run
from tests.benchmarks.made_up import HEAD

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = OperatorCase(8, 4, 16, calls=True)


class Device:
    """A host and a device, whose work begins half a millisecond after a call; in milliseconds."""

    def __init__(self, host: float, device: float) -> None:
        self.host, self.device = host, device
        self.now = self.free = 0.0

    def step(self) -> None:
        self.free = max(self.free, self.now + 0.5) + self.device
        self.now += self.host

    def replay(self) -> None:
        self.free = max(self.free, self.now) + self.device

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.free)

    def on_cuda(self, step: Any) -> tuple[object, Sample]:
        self.synchronize(CUDA)
        start = self.now
        outcome = step()
        self.synchronize(CUDA)
        return outcome, Sample(self.now - start, None)


def meter_of(device: Device, monkeypatch: pytest.MonkeyPatch, capture_graph: Any) -> CallMeter:
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: device.now / 1e3))
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(measure, "check_no_synchronization", lambda step: None)
    monkeypatch.setattr(measure, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    meter = CallMeter(CUDA)
    monkeypatch.setattr(meter, "on_cuda", device.on_cuda)
    return meter


@pytest.mark.parametrize("host, device, replays", [(2.0, 5.0, 3), (2.0, 0.1, 20), (7.0, 1.5, 7)])
def test_the_times_of_a_call(host, device, replays, monkeypatch):
    made = Device(host, device)
    counted = []

    def replay():
        counted.append(1)
        made.replay()

    meter = meter_of(made, monkeypatch, lambda step, where: replay)
    step = made.step
    assert meter.capture(step) is None
    counted.clear()
    for _ in range(2):
        sample = meter.sample(step)
        assert sample.host_milliseconds == pytest.approx(host)
        assert sample.milliseconds == pytest.approx(max(host, 0.5 + device))
        assert sample.alone_milliseconds == pytest.approx(device)
    assert len(counted) == 2 * replays


def test_who_cannot_be_captured_says_why_and_is_timed_as_called(monkeypatch):
    made = Device(2.0, 5.0)

    def fail(step, where):
        raise RuntimeError("as planned\nand more")

    meter = meter_of(made, monkeypatch, fail)
    assert meter.capture(made.step) == "RuntimeError: as planned"
    sample = meter.sample(made.step)
    assert sample.host_milliseconds == pytest.approx(2.0)
    assert sample.milliseconds == pytest.approx(5.5)
    assert sample.alone_milliseconds is None


@pytest.mark.parametrize("which", ["input", "weight"])
def test_a_step_that_fails_leaves_no_gradient(which):
    """Otherwise the next gradient would be added to it."""
    problem = OperatorProblem(OperatorCase(8, 4, 16, dtype="float32"), CPU)

    def fail(gradient):
        raise RuntimeError("as planned")

    step = autograd_step(problem, stock_loss)
    handle = getattr(problem, which).register_hook(fail)
    with pytest.raises(RuntimeError, match="as planned"):
        step()
    assert (problem.input.grad, problem.weight.grad) == (None, None)
    handle.remove()
    step()


def test_the_times_are_kept_and_shown(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(CallMeter, "capture", lambda meter, step: None)
    monkeypatch.setattr(CallMeter, "sample", lambda meter, step: Sample(5.0, None, 0.75, 4.0))
    entry = OPERATOR.measure(CASE, CPU, Effort(2, 1.0), select(["ours"]))
    floor = measured("floor", 3.9, 4.0, 0.1, "floor")
    stuck = BenchResult("liger", "Liger", "peer", samples_ms=[8.0], host_samples_ms=[7.5], note="it waits")
    file = tmp_path / "run.json"
    save(Run("operator", HEAD, [Entry(CASE, [floor, *entry.results, stuck])]), file)
    ours = OPERATOR.load(file).cases[0].by_name("ours")
    assert (ours.samples_ms, ours.alone_samples_ms, ours.host_samples_ms) == ([5.0] * 2, [4.0] * 2, [0.75] * 2)
    brief = CliRunner().invoke(app, ["table", str(file), "--brief"]).output
    assert f"| {CASE.title} | 4 | 1.25, 1.00, 0.75 | 1.25, 1.00, 0.75 | 2.00, -, 7.5 |" in brief
    assert "as called" in CASE.title
    assert "- Liger (liger) cannot be captured: it waits" in brief
    whole = CliRunner().invoke(app, ["table", str(file)]).output
    assert "| flce | 5 | 2 | 1.25 | 4 | 1.00 | 0.75 |" in whole


def measured(contender: str, called: float, alone: float, host: float, family: str = "ours") -> BenchResult:
    result = BenchResult(contender, contender, family, samples_ms=[called])
    result.alone_samples_ms, result.host_samples_ms = [alone], [host]
    return result


@pytest.mark.gpu
def test_the_times_of_a_call_on_cuda():
    """The host finishes before the device; a step that waits for the device has only the time as called."""

    def waiting(x, w, y, reduction):
        loss = stock_loss(x, w, y, reduction)
        loss.item()
        return loss

    def prepare(problem):
        return autograd_step(problem, waiting)

    contenders = [*select(["floor", "ours", "torch-compile", "stock"]), OperatorContender("wait", "", "peer", prepare)]
    case = OperatorCase(4096, 1024, 32000, calls=True)
    entry = OPERATOR.measure(case, CUDA, Effort(5, 20.0), contenders)
    for result in entry.results:
        assert result.status == "ok", (result.contender, result.reason)
        assert result.median_ms is not None
        assert result.host_ms is not None
        assert result.host_ms <= result.median_ms
        if result.contender == "wait":
            assert result.alone_ms is None
            assert "synchronizing" in (result.note or "")
        else:
            assert result.note is None, (result.contender, result.note)
            assert result.alone_ms is not None
            assert 0.5 < result.median_ms / result.alone_ms < 10, result.contender
    by_name = {result.contender: result.alone_ms or 0.0 for result in entry.results}
    assert by_name["floor"] < by_name["ours"] < 1.1 * by_name["stock"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ours", "torch-compile", "stock"])
def test_a_replay_makes_the_gradients(name):
    """The gradients belong to the values of the operands at the replay, not at the capture."""
    problem = OperatorProblem(OperatorCase(256, 64, 1000), CUDA)
    (contender,) = select([name])
    solve = contender.prepare(problem)
    kept: list[Any] = []

    def step():
        outcome = solve()
        if torch.cuda.is_current_stream_capturing():
            kept.append(outcome)
        return outcome

    meter = CallMeter(CUDA, head_start=1e-3)
    step()  # as in the benchmark: a compiler may wait for the device, a captured step may not
    assert meter.capture(step) is None
    with torch.no_grad():
        problem.input.neg_()
    (replayed,) = kept
    meter.replays[step][0]()
    torch.cuda.synchronize()
    again: Any = solve()
    for got, expected in zip(replayed, again, strict=True):
        torch.testing.assert_close(got, expected)
