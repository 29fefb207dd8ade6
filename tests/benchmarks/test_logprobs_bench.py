"""Tests of the benchmark of log-probabilities: its preset measures all figures of its targets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from benchmarks import cases, contenders, logprobs
from benchmarks.cases import Effort, select_contenders
from benchmarks.logprobs import CONTENDERS, LOGPROBS, RULES, TARGETS, TINY
from benchmarks.problem import OperatorProblem
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.targets import MET, MISSED, check_targets, duels
from flce.core.sizes import MIB
from flce.testing.problem import relative_error
from tests.benchmarks.made_up import HEAD

CPU = torch.device("cpu")
OVER_THE_FLOOR = {"floor-forward": 0.25, "ours-forward": 0.25, "ours-skipping": 0.5}
OVER_THE_FLOOR |= dict.fromkeys(("trl", "liger", "liger-hopper"), 1.1)


def made_up(slower: float, mib: float) -> Run:
    """Return a run in which flce takes `slower` times its products, and verl's kernel takes as long as its products."""

    def result(name: str, family: str) -> BenchResult:
        times = 10 * OVER_THE_FLOOR.get(name, 1.0) * (slower if family == "ours" else 1.0)
        own = min(mib, int(name[5:-3])) if name.endswith("MiB") else mib
        return BenchResult(name, name, family, samples_ms=[times], workspace_bytes=round(own * MIB))

    results = [[result(c.name, c.family) for c in CONTENDERS] for _ in LOGPROBS.presets["h200"]()]
    cases = [case for case, _ in LOGPROBS.presets["h200"]()]
    return Run("logprobs", HEAD, [Entry(case, found) for case, found in zip(cases, results, strict=True)])


@pytest.mark.parametrize("slower, mib, expected", [(1.0, 512, MET), (1.3, 512, MISSED), (1.0, 600, MISSED)])
def test_every_target_has_a_verdict(slower, mib, expected):
    """Time and workspace decide. A target without a time limit, within its budget, is always met."""
    findings = check_targets([made_up(slower, mib)], TARGETS)
    assert {finding.verdict for finding in findings} <= {MET, MISSED}
    by_call = {finding.cells[""]: finding.verdict for finding in findings}
    assert by_call["logprob, entropy"] == by_call["no gradient"] == expected
    assert by_call["64 MiB budget"] == MET


def test_every_peer_is_compared():
    """Only settings with entropy are compared."""
    found = [finding.verdict for finding in duels([made_up(1.05, 300)], RULES, TINY.mode)]
    assert sorted(found) == sorted([MET, MET, MET, MISSED] * len(LOGPROBS.presets["h200"]()))


def step_of(name: str, problem: OperatorProblem) -> Any:
    (contender,) = select_contenders(CONTENDERS, [name])
    return contender.prepare(problem)


CALLS: dict[str, dict[str, Any]] = {
    "ours": {"outputs": ("logprob", "entropy")},
    "ours-logprob": {"outputs": ("logprob",)},
    "ours-all": {"outputs": ("logprob", "entropy", "correct"), "candidates": (96, 32), "temperature": (96,)},
    "ours-forward": {"outputs": ("logprob", "entropy"), "gradients": False},
    "ours-skipping": {"outputs": ("logprob", "entropy"), "ignored": 48, "skip_ignored": True},
    "ours-64MiB": {"outputs": ("logprob", "entropy"), "budget": 64 * MIB},
}


@pytest.mark.parametrize("name", CALLS)
def test_our_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have gradients of the input and the weight, unless `CALLS` excludes them."""
    seen, compute = [], flce.linear_logprobs

    def looking(x: Tensor, w: Tensor, y: Tensor, **arguments: Any) -> Any:
        options = arguments["options"]
        shapes = {key: tuple(arguments[key].shape) for key in ("candidates", "temperature") if key in arguments}
        seen.append(
            {"outputs": arguments["outputs"], "gradients": torch.is_grad_enabled(), "ignored": int((y < 0).sum())}
            | {"skip_ignored": options.skip_ignored, "budget": options.max_workspace_bytes}
            | shapes
        )
        return compute(x, w, y, **arguments)

    monkeypatch.setattr(flce, "linear_logprobs", looking)
    outcome = step_of(name, OperatorProblem(TINY, CPU))()
    default = {"gradients": True, "ignored": 0, "skip_ignored": "auto", "budget": None}
    assert seen == [default | CALLS[name]]
    assert all((gradient is not None) == seen[0]["gradients"] for gradient in outcome.others)


def test_the_plans_are_noted() -> None:
    """The workspace of forward and backward is recorded, for flce only. The gradients' memory is free in forward."""
    names = ("floor", "ours", "ours-all", "ours-forward")
    entry = LOGPROBS.measure(TINY, CPU, Effort(1, 1.0), select_contenders(CONTENDERS, names))
    sizes = {result.contender: result.planned_bytes or 0 for result in entry.results}
    assert sizes["floor"] == 0
    assert sizes["ours-all"] > sizes["ours"] == sizes["ours-again"] > 0
    assert sizes["ours-forward"] > 0


def test_trls_gradients_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl.kernels.chunked_logprob")
    monkeypatch.setattr(cases, "needs_cuda", lambda device: None)
    assert contenders.needs_trl(CPU) is None
    problem = OperatorProblem(TINY, CPU)
    for expected, got in zip(*(step_of(name, problem)().others for name in ("ours", "trl")), strict=True):
        assert relative_error(got, expected) < 1e-6


def test_verls_kernel_is_loaded_without_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = tmp_path / "verl" / "utils" / "kernel"
    kernel.mkdir(parents=True)
    for folder in (kernel.parents[1], kernel.parent):
        (folder / "__init__.py").write_text("import ray_is_not_there\n")
    for name in ("__init__", "kernels"):
        (kernel / f"{name}.py").write_text("")
    (kernel / "linear_cross_entropy.py").write_text(
        "def linear_cross_entropy(x, w, y, temperature, reduction, group):\n"
        "    assert (temperature, reduction, group) == (1.0, 'none', None)\n"
        "    z = (x @ w.T).log_softmax(-1)\n"
        "    return z.gather(1, y[:, None])[:, 0], -(z.exp() * z).sum(-1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert logprobs.needs_verl(CPU) == "needs a CUDA device"  # after it was imported
        problem = OperatorProblem(TINY, CPU)
        for expected, got in zip(*(step_of(name, problem)().others for name in ("ours", "verl")), strict=True):
            assert relative_error(got, expected) < 1e-5
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
