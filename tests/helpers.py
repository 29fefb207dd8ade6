"""Helpers of the tests: comparison of a call with the oracle, plans and budgets of a problem, tables of cases."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.backends import choose_backend, has_fused_products
from flce.core.devices import device_record
from flce.core.problem import LossSpec, Needs
from flce.engine.case import Case
from flce.planning.search import make_plan
from flce.testing.oracle import OracleResult
from flce.testing.problem import ALL_GRADS, CallResult, Problem, run_fused, run_oracle

STATS = ("lse", "logprob", "entropy", "argmax", "correct")
FLOAT_STATS = ("lse", "logprob", "entropy")
BACKENDS = ("torch", "triton")
STRATEGIES = ("tokens", "vocab")
REDUCTIONS = ("mean", "sum", "none")
# Shares of the largest element, for results that are computed with the arithmetic of the oracle.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def assert_near(actual: Tensor | None, expected: Tensor, tolerance: float, name: str) -> None:
    """Assert errors up to ``tolerance`` times the largest element of ``expected``, and equal NaN and infinities."""
    assert actual is not None, f"{name} is missing"
    a, e = actual.detach().double(), expected.detach().double()
    assert a.shape == e.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(e.shape)}"
    if not e.numel():
        return
    finite = e.isfinite()
    same = torch.equal(a.isnan(), e.isnan()) and torch.equal(a[e.isinf()], e[e.isinf()])
    assert same, f"{name}: NaN or infinities differ: {a} instead of {e}"
    if not finite.any():
        return
    difference = float((a - e)[finite].abs().max())
    allowed = tolerance * (float(e[finite].abs().max()) + 1e-2)
    assert difference <= allowed, f"{name}: the error is {difference:.3e}, allowed are {allowed:.3e}"


def assert_outcome(
    outcome: CallResult,
    expected: OracleResult,
    problem: Problem,
    *,
    tolerance: float,
    grads: str = ALL_GRADS,
    stats: Sequence[str] = (),
) -> None:
    """Compare all requested results and their dtypes, and assert that no other result was computed."""
    dtype = problem.input.dtype
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert outcome.loss.dtype == out_dtype
    assert_near(outcome.loss, expected.loss, tolerance, "loss")
    compared: list[tuple[str, Tensor | None, Tensor | None, Tensor | None]] = [
        ("x", outcome.grad_input, expected.grad_input, problem.input),
        ("w", outcome.grad_weight, expected.grad_weight, problem.linear_weight),
        ("b", outcome.grad_bias, expected.grad_bias, problem.linear_bias),
        ("t", outcome.grad_token_weight, expected.grad_token_weight, problem.token_weight),
    ]
    for grad_pair, expected_pair, pair in zip(
        outcome.grad_adapters, expected.grad_adapters, problem.adapters, strict=True
    ):
        compared += zip("aB", grad_pair, expected_pair, pair, strict=True)
    for key, grad, expected_grad, tensor in compared:
        if tensor is None:
            continue
        if key not in grads:
            assert grad is None, f"gradient {key} was not requested"
            continue
        assert expected_grad is not None
        assert grad is not None
        assert grad.dtype == tensor.dtype
        assert_near(grad, expected_grad, tolerance, f"gradient {key}")
    if not stats:
        return
    for name in STATS:
        value = getattr(outcome.output, name)
        if name not in stats:
            assert value is None, f"{name} was not requested"
            continue
        assert not value.requires_grad, name
        assert value.shape == problem.target.shape, name
        if name in FLOAT_STATS:
            assert value.dtype == out_dtype, name
            assert_near(value, getattr(expected, name), tolerance, name)
    if "argmax" in stats:
        assert outcome.output.argmax.dtype == torch.int64
        assert torch.equal(outcome.output.argmax, expected.argmax)
    if "correct" in stats:
        assert outcome.output.correct.dtype == torch.bool
        assert torch.equal(outcome.output.correct, expected.correct)
    if problem.kwargs.get("z_loss"):
        assert not outcome.output.z_loss.requires_grad
        assert_near(outcome.output.z_loss, expected.z_loss, tolerance, "z_loss")
    else:
        assert outcome.output.z_loss is None


def check(
    problem: Problem,
    *,
    options: flce.ChunkOptions | None = None,
    stats: Sequence[str] = (),
    grads: str = ALL_GRADS,
    grad_output: Tensor | float | None = None,
    tolerance: float | None = None,
) -> Any:
    """Run flce and the oracle and compare the results. Return the `CallResult` of flce."""
    outcome = run_fused(problem, options=options, stats=stats, grads=grads, grad_output=grad_output)
    expected = run_oracle(problem, grad_output=grad_output)
    allowed = TOLERANCE[problem.input.dtype] if tolerance is None else tolerance
    assert_outcome(outcome, expected, problem, tolerance=allowed, grads=grads, stats=stats)
    return outcome


def least_budget(message: str, works: Any) -> int:
    """Return the least budget that an error message names: the least of its numbers for which `works` raises no
    ValueError."""
    numbers = sorted({int(n.replace(",", "").replace("_", "")) for n in re.findall(r"\d[\d,_]*", message)})
    for number in numbers:
        try:
            works(number)
        except ValueError:
            continue
        return number
    raise AssertionError(f"no number in this message is a budget that works: {message}")


def least_budget_unless_accepted(budget: int, works: Callable[[int], Any]) -> int | None:
    """Return None if `works` accepts the budget, otherwise the least budget that the error names, which works."""
    try:
        works(budget)
        return None
    except ValueError as error:
        message = str(error)
    assert "max_workspace_bytes" in message
    assert str(budget) in message
    least = least_budget(message, works)
    assert least > budget
    return least


def count_flops(function: Callable[[], Any]) -> int:
    """Return the FLOPs of all matrix products, as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode  # here, because it imports Triton

    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def python_calls(step: Callable[[], Any], within: str = "") -> int:
    """Count the Python calls of the third run. ``within``: count only functions in this folder."""
    step()
    step()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        code = frame.f_code
        named = code.co_filename.startswith(within) and not code.co_name.startswith("<")
        calls += event == "call" and (named or not within)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def plan_for(
    problem: Problem, options: flce.ChunkOptions, grads: str = ALL_GRADS, stats: Sequence[str] = ()
) -> flce.ChunkPlan:
    """Return the plan of this problem's call. `flce.plan` is different: it assumes that all adapters need gradients."""
    return make_plan(case_of(problem, options, grads, stats))


def case_of(problem: Problem, options: flce.ChunkOptions, grads: str = ALL_GRADS, stats: Sequence[str] = ()) -> Case:
    """Return the case of this problem's call."""
    spec = {field.name: problem.kwargs[field.name] for field in fields(LossSpec) if field.name in problem.kwargs}
    adapters, device = problem.adapters, problem.input.device
    operands = [problem.input, problem.linear_weight, *(t for pair in adapters for t in pair)]
    row_major = all(t.reshape(-1, t.shape[-1]).stride(-1) == 1 for t in operands)
    return Case(
        num_tokens=problem.target.numel(),
        hidden_sizes=(problem.linear_weight.shape[1], *(up.shape[1] for _, up in adapters)),
        vocab_size=problem.linear_weight.shape[0],
        dtype=problem.input.dtype,
        device_type=device.type,
        backend=choose_backend(device).name,
        has_fused_products=row_major and has_fused_products(device),
        device=device_record(device),
        spec=LossSpec(**{**spec, "stats": tuple(stats)}),
        needs=Needs(
            ("x" in grads, *("a" in grads for _ in adapters)),
            ("w" in grads, *("B" in grads for _ in adapters)),
            problem.linear_bias is not None and "b" in grads,
        ),
        options=options,
    )


def allpairs(factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 8) -> list[dict[str, Any]]:
    """Return a small set of rows in which every pair of levels of every two factors occurs (greedy)."""
    rng = random.Random(seed)
    names = list(factors)
    levels = {name: range(len(factors[name])) for name in names}
    missing = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in levels[a] for j in levels[b]}
    rows: list[dict[str, Any]] = []
    while missing:
        best: tuple[int, dict[str, int]] = (-1, {})
        candidates = sorted(missing)
        for _ in range(tries):
            a, i, b, j = rng.choice(candidates)
            row = {a: i, b: j}
            rest = [name for name in names if name not in row]
            rng.shuffle(rest)
            for name in rest:
                row[name] = max(levels[name], key=lambda k: (_covered(missing, row, name, k), rng.random()))
            score = len(_pairs(row, names) & missing)
            if score > best[0]:
                best = (score, row)
        missing -= _pairs(best[1], names)
        rows.append({name: factors[name][best[1][name]] for name in names})
    return rows


def parametrize_pairs(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a `parametrize` mark with a few combinations of the factors, in which every pair occurs: see `allpairs`.

    The factor `backend` parametrizes the fixture `backend`.
    """
    return _parametrize(list(factors), [tuple(row.values()) for row in allpairs(factors)])


def _parametrize(names: list[str], rows: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    ids = ["-".join(getattr(level, "__name__", str(level)).replace("torch.", "") for level in row) for row in rows]
    return pytest.mark.parametrize(names, rows, ids=ids, indirect=[name for name in names if name == "backend"])


def _pairs(row: Mapping[str, int], names: Sequence[str]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def _covered(missing: set[tuple[str, int, str, int]], row: Mapping[str, int], name: str, level: int) -> int:
    return sum(
        (other, value, name, level) in missing or (name, level, other, value) in missing for other, value in row.items()
    )


# A value for each number of `LossSpec` that differs from the default and changes every loss and gradient.
OTHER_VALUES = {"label_smoothing": 0.3, "softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3, "z_loss": 0.1}


def row_id(row: Mapping[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "") or "0" for value in row.values())


def upstream_of(problem: Problem) -> Tensor:
    """Return a random upstream gradient of the problem's loss."""
    shape = problem.target.shape if problem.kwargs.get("reduction") == "none" else ()
    return torch.randn(shape, dtype=torch.float64, device=problem.input.device)


def skip_where_old_transformers_fails(stock: Callable[[], Any]) -> None:
    """Skip the test if `stock`, the tested operation of an unpatched model, fails with Transformers 4."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__.startswith("4."):
        try:
            stock()
        except Exception as error:
            pytest.skip(f"stock: {str(error).splitlines()[0]}")


def skip_without_gradient_edges() -> None:
    """Skip a test of zero-bubble schedules with PyTorch 2.11, which cannot run these schedules with such a loss.

    Its gloo sends nothing within a process, and its `torch.autograd.grad` raises for an edge (`_input_metadata`) at
    the node of the loss, where a zero-bubble schedule begins the gradients of weights.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("PyTorch 2.11 does not run zero-bubble schedules with an autograd.Function")
