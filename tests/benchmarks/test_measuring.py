"""Tests of the measurement: memory, times, the order of contenders, what fails, and that contenders are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

import flce
from benchmarks import grpo
from benchmarks.benchmark import save
from benchmarks.cases import Effort, StepOutcome, select_contenders
from benchmarks.contenders import OperatorContender, budget_name, select
from benchmarks.measure import BenchMeter
from benchmarks.models import build
from benchmarks.operator import OPERATOR
from benchmarks.problem import CALLS, OperatorCase, OperatorProblem
from benchmarks.rows import CONTENDERS as OF_ROWS
from benchmarks.rows import TASKS, RowCase, RowProblem, make_call
from benchmarks.small_card import CLOSE, MULTIPLE, longest
from benchmarks.tables import markdown, shortfalls
from flce.core.sizes import MIB
from flce.testing.problem import relative_error
from tests.benchmarks.made_up import run_of

CPU = torch.device("cpu")
CASE = OperatorCase(8, 4, 16, dtype="float32")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_meter_counts_a_known_pattern(kind):
    """The peak of a, then a and b, then b and c, excludes earlier allocations and returned gradients."""

    def zeros(mib):
        return torch.zeros(mib * MIB, dtype=torch.uint8, device=kind)

    held = zeros(32)

    def step():
        a, b = zeros(8), zeros(16)
        del a
        c = zeros(64)
        del b, c
        return StepOutcome(None, input_grad=held.clone())

    meter = BenchMeter(torch.device(kind))
    _, sample = meter.warm_up(step)
    # b and c (80 MiB) are the peak, before the 32 MiB that are returned exist. CUDA's blocks may be larger.
    assert sample.workspace_bytes == pytest.approx((16 + 64 - 32) * MIB, abs=0 if kind == "cpu" else 2 * MIB)
    assert meter.sample(step).milliseconds > 0


@pytest.mark.parametrize("limit", [8, 100, 9_920, 400_000])
@pytest.mark.parametrize("guess", [9_920, 64])
def test_the_longest_sequence_is_found(limit, guess):
    tried: list[int] = []
    trained = longest(lambda tokens: tried.append(tokens) or tokens <= limit, guess)  # type: ignore[func-returns-value]
    assert trained <= limit < trained + max(MULTIPLE, CLOSE * trained) + 1
    assert len(tried) == len(set(tried)) <= (3 if guess == limit else 20)


def test_the_order_of_contenders():
    """Rounds are in the given order first, and in any order then. After the deadline no call begins."""
    calls = []

    def prepare(name):
        return lambda problem: lambda: calls.append(name)

    contenders = [OperatorContender(name, name, "peer", prepare(name)) for name in "abcd"]
    OPERATOR.measure(CASE, CPU, Effort(6, 60.0), contenders)
    turns = ["".join(calls[start : start + 4]) for start in range(4, 28, 4)]  # after the warm-up
    assert turns[0] == "abcd"
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert len(set(turns)) > 1
    calls.clear()
    entry = OPERATOR.measure(CASE, CPU, Effort(5, 1.0, until=0.0), contenders)
    assert [(result.status, result.samples_ms) for result in entry.results] == [("skipped", [])] * 4
    assert not calls


MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 62.62 GiB. GPU 0 has a capacity of ...")


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("error, status, family", [(RuntimeError("x"), "failed", "ours"), (MEMORY, "oom", "stock")])
def test_what_fails_is_recorded_and_the_others_go_on(calls_before, error, status, family, tmp_path):
    """In the warm-up, or in the first timed call. The memory of stock may run out."""
    calls = iter(range(100))

    def step():
        if next(calls) >= calls_before:
            raise error

    contenders = [OperatorContender("it", "it", family, lambda problem: step), *select(["torch-chunked", "stock"])]
    entry = OPERATOR.measure(CASE, CPU, Effort(2, 1.0), contenders)
    assert [(result.status, len(result.samples_ms)) for result in entry.results[1:3]] == [("ok", 2)] * 2
    reason = f"{type(error).__name__}: {str(error).partition(' GPU')[0]}"
    assert (entry.results[0].status, entry.results[0].reason) == (status, reason)
    save(run_of(entry), tmp_path / "run.json")
    run = OPERATOR.load(tmp_path / "run.json")
    assert [result.contender for result in shortfalls(run)] == (["it", "it-again"] if family == "ours" else [])
    assert f": {reason}" in markdown(run, OPERATOR.tables(run, False))


def test_the_plan_is_recorded():
    """The plan has the budget, the mode and the options of the measured call. No plan is no failure."""
    case = OperatorCase(2000, 32, 500, dtype="float32", mode="frozen-head", budget_mib=2)
    budgets: list[dict[str, Any]] = [
        {},
        {"max_workspace_bytes": MIB},
        {"max_workspace_bytes": 2 * MIB, "strategy": "vocab"},
    ]
    sizes = 2000, 32, 500, torch.float32
    plans = [flce.plan(*sizes, device="cpu", weight_grad=False, options=flce.ChunkOptions(**each)) for each in budgets]
    expected = [plan.workspace_bytes for plan in plans]
    entry = OPERATOR.measure(case, CPU, Effort(1, 1.0), select(["ours", budget_name(1), "ours-vocab", "stock"]))
    assert [result.planned_bytes for result in entry.results] == [*expected, None, expected[0]]
    assert len(set(expected)) > 2
    result: Any
    (result, _) = OPERATOR.measure(replace(case, tokens=400_000), CPU, Effort(1, 0.0), select([budget_name(1)])).results
    assert result.status == "unplanned"
    assert "max_workspace_bytes=1048576 is too small" in result.reason


@pytest.mark.parametrize("mode, feature", [*((mode, "") for mode in CALLS), ("frozen-head", "adapter of rank 16")])
def test_the_floor_is_the_products_of_the_call(mode, feature, monkeypatch):
    """The number of products is right, and their results are the logits and the gradients, also of adapters."""
    problem = OperatorProblem(OperatorCase(24, 8, 40, dtype="float32", mode=mode, feature=feature), CPU)
    results: list[Any] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: results.append(multiply(a, b, out=out)))
    select(["floor"])[0].prepare(problem)()
    terms = [(x.detach(), w.detach()) for x, w in ((problem.input, problem.weight), *problem.adapters)]
    expected = [x @ w.T for x, w in terms] * {"reduction-none": 2}.get(mode, 1)
    expected += [problem.logits_gradient @ w for _, w in terms] * (mode != "forward")
    expected += [problem.logits_gradient.T @ x for x, _ in terms] * (mode in ("forward+backward", "reduction-none"))
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: " ".join(task).replace(" ", "-"))
@pytest.mark.parametrize("name", ["ours", "eager", "copy"])
def test_rows(task, name):
    """The result is right on each input, also after a call has overwritten it. The roof reads and writes all."""
    (contender,) = [contender for contender in OF_ROWS if contender.name == name]
    problem = RowProblem(RowCase(6, 50, "float64", *task), CPU)
    call, before = make_call(contender, problem)
    x, losses = problem.spare.clone().requires_grad_(), task[0] == "cross_entropy"
    expected = torch.nn.functional.cross_entropy(x, problem.target) if losses else getattr(torch, task[0])(x, -1)
    if task[1] != "forward":
        (expected,) = torch.autograd.grad(expected, x, None if losses else problem.spare)
    for _ in range(2):
        before()
        torch.testing.assert_close(call(), -problem.x if name == "copy" else expected.detach(), check_dtype=False)
    assert torch.equal(problem.x, problem.spare) != (name == "ours" and task[1] == "in-place forward+backward")


@pytest.mark.parametrize("part", grpo.PARTS)
@pytest.mark.parametrize("name", ["ours", "trl", "stock"])
def test_grpo_steps_are_exact(name, part, monkeypatch):
    """The values, and the gradients of the training step, are exact. TRL's kernel is TRL's only."""
    utils = pytest.importorskip("trl.trainer.utils")
    model: Any = build(grpo.TINY, CPU)
    batch, prompt = grpo.make_completions(grpo.TINY, model, CPU), grpo.TINY.prompt
    logits = model(input_ids=batch.ids, use_cache=False).logits.double()[:, prompt - 1 : -1] / grpo.TEMPERATURE
    logprob = torch.log_softmax(logits, -1).gather(2, batch.chosen[..., None])[..., 0]
    ratio, advantage = torch.exp(logprob - batch.old.double()), batch.advantages.double()[:, None]
    value = -(advantage * torch.where(advantage > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))).mean()
    expected = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    before = dict(vars(model))
    monkeypatch.setattr(type(model), "zero_grad", lambda self, **how: None)  # it would end the step
    if name == "ours":
        monkeypatch.setattr(utils._ChunkedLogProbFunction, "forward", lambda *call: pytest.fail("TRL's kernel"))
    (contender,) = select_contenders(grpo.CONTENDERS, [name])
    step: Any = grpo.GrpoStep(model, batch, part, contender)
    with contender.applied(model):
        step()
    assert vars(model) == before
    assert float(step.loss) == pytest.approx(float((logprob.mean() if part == grpo.OLD else value).detach()), abs=1e-6)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == (len(expected) if part == grpo.TRAINING else 0)
    assert all(relative_error(found, exact) < 1e-5 for found, exact in zip(gradients, expected, strict=False))
