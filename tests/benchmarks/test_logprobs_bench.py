"""`benchmarks logprobs`: what is called, what is promised of it, and what the peers compute."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import flce
from benchmarks import logprobs
from benchmarks.logprobs import CONTENDERS, LOGPROBS, PRESETS, RULES, SETTINGS, TARGETS, TINY, target_tables
from benchmarks.targets import MET, MISSED, NEARLY, UNMEASURED, Rule, check_targets, duels
from flce.core.sizes import MIB
from flce.testing.problem import relative_error
from flce.tools.bench.cases import Effort, known
from flce.tools.bench.problem import OperatorCase, OperatorProblem
from flce.tools.bench.results import Entry, Run
from tests.benchmarks.test_targets import HEAD, measured

CPU = torch.device("cpu")


def run_of(*entries: Entry) -> Run:
    return Run("logprobs", HEAD, list(entries))


def step_of(name: str, problem: OperatorProblem) -> Any:
    (contender,) = known(CONTENDERS, [name])
    return contender.prepare(problem)


# --- what is called ---


@pytest.mark.parametrize("name, count", [("floor", 4), ("floor-forward", 1)])
def test_the_floors_are_products(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, results, multiply = step_of(name, OperatorProblem(TINY, CPU)), [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: results.append(multiply(a, b, out=out)))
    step()
    tokens, hidden, vocab = TINY.shape
    shapes = [(tokens, vocab), (tokens, vocab), (tokens, hidden), (vocab, hidden)]
    assert [tuple(t.shape) for t in results] == shapes[:count]


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
    """With gradients of the input and the weight, unless it says otherwise."""
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
    """The larger of those of forward and of backward, of flce alone."""
    names = ("floor", "ours", "ours-all", "ours-forward")
    entry = LOGPROBS.measure(TINY, CPU, Effort(1, 1.0), known(CONTENDERS, names))
    sizes = {result.contender: result.planned_bytes or 0 for result in entry.results}
    assert sizes["floor"] == 0
    assert sizes["ours-all"] > sizes["ours"] == sizes["ours-again"] >= sizes["ours-forward"] > 0


# --- peers ---


def test_trls_gradients_are_ours() -> None:
    pytest.importorskip("trl.kernels.chunked_logprob")
    problem = OperatorProblem(TINY, CPU)
    for expected, got in zip(*(step_of(name, problem)().others for name in ("ours", "trl")), strict=True):
        assert relative_error(got, expected) < 1e-6


def test_ligers_loss_is_of_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has Liger's arguments: where the policy is the old one its gradient is that of logprob."""

    class Loss:
        def __init__(self, beta: float, use_ref_model: bool) -> None:
            assert (beta, use_ref_model) == (0.0, False)

        def __call__(
            self, x: Tensor, w: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, *, old_per_token_logps: Tensor
        ) -> tuple[Tensor, tuple[()]]:
            assert x.shape == (3, 32, 64)
            assert mask.shape == ids.shape == (3, 32)
            logprob = (x @ w.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            torch.testing.assert_close(logprob.detach(), old_per_token_logps)
            return -((logprob - old_per_token_logps).exp() * advantages[:, None]).sum(), ()

    module = type(sys)("liger_kernel.chunked_loss")
    module.LigerFusedLinearGRPOLoss = Loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", type(sys)("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", module)
    problem = OperatorProblem(TINY, CPU)
    x, w = (t.detach().clone().requires_grad_() for t in (problem.input, problem.weight))
    logprob: Any = flce.linear_logprobs(x, w, problem.target, outputs=("logprob",)).logprob
    (-logprob * torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(32)).sum().backward()
    for got, leaf in zip(step_of("liger", problem)().others, (x, w), strict=True):
        torch.testing.assert_close(got, leaf.grad)


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


# --- what is promised ---


def test_the_preset_measures_all_targets() -> None:
    cases = [case for case, _ in PRESETS["h200"]()]
    names = [contender.name for contender in LOGPROBS.contenders(cases[0])]
    run = run_of(*[Entry(case, [measured(name, 1.0, 1.0) for name in names]) for case in cases])
    assert UNMEASURED not in {finding.verdict for finding in check_targets([run], TARGETS)}
    assert {*SETTINGS, *(rule.peer for rule in RULES)} <= set(names)


def test_workspace_within_two_percent() -> None:
    """Unlike that of other targets."""
    target = next(target for target in TARGETS if target.call == "64 MiB budget")
    for mib, expected in ((64, MET), (65.2, NEARLY), (65.4, MISSED)):
        (finding,) = check_targets([run_of(Entry(target.case, [measured("ours-64MiB", 1.0, mib)]))], [target])
        assert finding.verdict == expected


def test_a_peer_meets_calls_that_do_as_much() -> None:
    """In its own workspace, or in 512 MiB."""
    case = OperatorCase(*TARGETS[0].shape, mode=logprobs.MODE)
    results = [
        measured("ours-logprob", 9.0, 100),
        measured("ours", 10.0, 600),
        measured("ours-256MiB", 12.0, 256),
        measured("trl", 10.5, 2388, "peer"),
        measured("verl", 11.0, 300, "peer"),
    ]
    run = run_of(Entry(case, results), Entry(replace(case, mode="forward+backward"), results))
    found = {duel.key[1].peer: (duel.cells["flce"], duel.verdict) for duel in duels([run], RULES, logprobs.MODE)}
    assert found == {"trl": ("ours", MET), "verl": ("ours-256MiB", MISSED)}
    (duel,) = duels([run], [Rule("verl", 1.0, least_mib=512)], logprobs.MODE)
    assert duel.cells["flce"] == "ours-logprob"
    assert "Faster than peers, met: 1 of 2" in [table.title for table in target_tables([run], brief=False)]
