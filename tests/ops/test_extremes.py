"""Extreme logits on every path to a loss, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.engine.schedules.unnormalized import Unnormalized
from flce.testing.problem import IGNORED, Problem, make_problem, relative_error, run_fused, run_oracle, run_stock
from tests import forced, interpreted_bfloat16
from tests.extremes import every_extreme, extremes, has_softmax, targets
from tests.forced import blocks_of_16, force
from tests.helpers import STATS, TOLERANCE, assert_near, assert_outcome, plan_for
from tests.hopper import plan_as_on_hopper
from tests.ops import test_cross_entropy

CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Route:
    """One path through the operator."""

    name: str
    dtype: torch.dtype
    tolerance: float
    settings: tuple[dict[str, Any], ...]
    options: flce.ChunkOptions
    vocab: int = 50
    grads: str = "xwb"
    stats: tuple[str, ...] = STATS


# Chunks and blocks of classes; loss and gradient are computed together or one after the other.
EVERY = ({"reduction": "mean", "label_smoothing": 0.1}, {"reduction": "none"})
CHUNKS, BLOCKS = flce.ChunkOptions(strategy="tokens", chunk_rows=5), flce.ChunkOptions(strategy="vocab")
PRODUCTS: dict[str, Any] = {"vocab": 300, "stats": ("lse", "logprob")}
ROUTES = [
    *(
        Route(f"{backend}, {options.strategy}", dtype, TOLERANCE[dtype], settings, options)
        for backend, options, dtype, settings in (
            ("torch", CHUNKS, torch.float32, EVERY),
            ("torch", BLOCKS, torch.float64, EVERY),
            ("triton", CHUNKS, torch.float64, EVERY),
            ("triton", BLOCKS, torch.float32, EVERY[:1]),  # computes loss and gradient one after the other in any case
        )
    ),
    # Triton's interpreter multiplies float16 correctly; a patch corrects bfloat16.
    Route(
        "registers",
        torch.bfloat16 if CUDA else torch.float16,
        3 * 2.0 ** -(8 if CUDA else 10),
        ({"reduction": "mean"}, {"reduction": "none"}),
        flce.ChunkOptions(strategy="vocab", skip_ignored=False),
        **PRODUCTS,
    ),
    Route(
        "exponentials",
        torch.bfloat16,
        3 * 2.0**-8,
        ({"reduction": "mean"},),
        flce.ChunkOptions(),
        grads="xw",
        **PRODUCTS,
    ),
]


@pytest.fixture(params=ROUTES, ids=lambda route: f"{route.name}, {route.dtype}".replace("torch.", ""))
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Route]:
    """Send every call of the test over one path."""
    made: Route = request.param
    if not made.name.startswith("torch"):
        pytest.importorskip("triton")
    monkeypatch.setenv("FLCE_BACKEND", "torch" if made.name.startswith("torch") else "triton")
    if made.name.endswith("vocab"):
        force(monkeypatch, lambda c: blocks_of_16(c.num_tokens))
    if made.name not in ("registers", "exponentials"):
        yield made
        return
    if made.name == "exponentials" and not CUDA:
        interpreted_bfloat16.fix_interpreter(monkeypatch)
    for _ in plan_as_on_hopper(monkeypatch):
        if made.name == "exponentials":
            force(monkeypatch, forced.unnormalized)
        yield made


def problem_of(route: Route, device: torch.device, row: Tensor) -> Problem:
    """Return problems whose logits equal the row: once from the bias alone, and once from bias and product."""
    each = targets(route.vocab)
    p = make_problem((2 * len(each),), 64, route.vocab, dtype=route.dtype, device=device)
    p.input.round_()[len(each) :] = 0.0
    p.linear_weight.mul_(4).round_().div_(8)
    p.target.copy_(each.repeat(2))
    return replace(p, linear_bias=row.to(device, route.dtype))


def in_float64(p: Problem) -> Problem:
    bias = None if p.linear_bias is None else p.linear_bias.double()
    return replace(p, input=p.input.double(), linear_weight=p.linear_weight.double(), linear_bias=bias)


def run(route: Route, p: Problem) -> Any:
    plan = plan_for(p, route.options, route.grads, route.stats)
    assert isinstance(plan.schedule, Unnormalized) == (route.name == "exponentials")
    assert plan.in_registers == (route.name in ("registers", "exponentials"))
    return run_fused(p, options=route.options, grads=route.grads, stats=route.stats)


# Kernel tests run all rows, tile by tile.
NAMES = [n for n in extremes(50) if not n.endswith((" inf", " nan")) or n.startswith(("the middle", "a stretch"))]
NAMES = [n for n in NAMES if "edges" not in n and not n.startswith(("the first", "the last"))]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits(name: str, route: Route, device: torch.device) -> None:
    plain = problem_of(route, device, extremes(route.vocab)[name])
    assert plain.linear_bias is not None
    for settings in route.settings:
        p = plain.with_(**settings)
        outcome = run(route, p)
        if has_softmax(plain.linear_bias):
            expected = run_oracle(p)
            tolerance = route.tolerance
            assert_outcome(outcome, expected, p, tolerance=tolerance, grads=route.grads, stats=route.stats)
            if route.name != "exponentials":  # large exponents of base 2 are rounded
                assert_near(outcome.loss, expected.loss, 1e-5, "loss")
            continue
        # The gradient of an ignored row is 0 for any values; PyTorch's gradient is NaN.
        stock, counts = run_stock(in_float64(p)), p.target != IGNORED
        assert stock.grad_input is not None
        assert_near(outcome.loss, stock.loss, route.tolerance, "loss")
        assert_near(outcome.output.logprob, stock.output.logprob.where(counts, 0.0), route.tolerance, "logprob")
        assert_near(outcome.output.lse, stock.output.lse.where(counts, 0.0), route.tolerance, "lse")
        assert_near(outcome.grad_input, stock.grad_input.where(counts[:, None], 0.0), route.tolerance, "gradient x")


def test_infinite_logits_under_a_softcap_are_finite(route: Route, device: torch.device) -> None:
    for name in ("the middle inf", "every other -inf"):
        p = problem_of(route, device, extremes(route.vocab)[name]).with_(softcap=5.0)
        outcome = run(route, p)
        assert_outcome(outcome, run_oracle(p), p, tolerance=route.tolerance, grads=route.grads, stats=route.stats)


def test_confident_rows(route: Route, device: torch.device) -> None:
    """Forward and backward have the same logits, to the bit. If p is 1, the gradient is 0; if p is nearly 1, the small
    gradient keeps its digits."""
    p = make_problem((40,), 64, route.vocab, dtype=route.dtype, device=device)
    rows = torch.arange(40, device=device)
    p.linear_weight.zero_()[rows, rows] = 2.0
    p.target.copy_(rows)
    for size in (259.0, 7.0):
        p.input.zero_()[rows, rows] = size
        outcome, expected = run(route, p), run_oracle(p)
        if size == 7.0:
            # lse is 14: a rounding of it is 1% of the loss.
            assert relative_error(outcome.loss, expected.loss) < (3e-3 if route.name == "exponentials" else 3e-2)
            # The spacing of float16 numbers is 6e-8 here.
            limit = 3e-2 if route.dtype == torch.float16 else 3 * 2.0**-8
            assert relative_error(outcome.grad_input, expected.grad_input) < limit
        else:
            assert float(outcome.loss) < 1e-30
            assert float(outcome.grad_input.abs().max()) < 1e-30


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_inputs_that_are_not_numbers(value: float, route: Route, device: torch.device) -> None:
    """NaN and infinity affect only their row, with PyTorch's results. In an ignored row they have no effect."""
    plain = problem_of(route, device, extremes(route.vocab)["equal"])
    plain.linear_weight.abs_()
    plain.input[1], plain.input[3] = value, math.nan
    others = torch.arange(8, device=device) != 1
    for settings in route.settings:
        p = plain.with_(**settings)
        outcome = run(route, p)
        expected = run_oracle(replace(p, input=p.input.nan_to_num(0.0, 0.0, 0.0)))
        assert torch.equal(outcome.loss.isnan().expand(8), ~others | (settings["reduction"] == "mean"))
        assert torch.equal(outcome.grad_input.isnan().all(1), ~others)
        assert_near(outcome.grad_input[others], expected.grad_input[others], route.tolerance, "gradient x")
        assert_near(outcome.output.logprob[others], expected.logprob[others], route.tolerance, "logprob")
        assert not outcome.grad_input[3].any()


@pytest.mark.parametrize("wrong", [0, -1, -(2**40), 2**32 + 3])
def test_a_target_that_is_no_class(
    wrong: int, route: Route, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host does not read targets, as on CUDA, the row of a bad target is NaN, no memory is read out of bounds,
    and other rows are correct."""
    monkeypatch.setattr("flce.engine.vectors.can_read_values", lambda device: False)
    plain = problem_of(route, device, extremes(route.vocab)["sure of the middle"])
    plain.target[1] = wrong or route.vocab
    others = torch.arange(8, device=device) != 1
    for settings in route.settings:
        p = plain.with_(**settings)
        outcome, expected = run(route, p), run_oracle(replace(p, target=p.target.where(others, 5)))
        assert torch.equal(outcome.loss.isnan().expand(8), ~others | (settings["reduction"] == "mean"))
        assert torch.equal(outcome.grad_input.isnan().all(1), ~others)
        assert_near(outcome.grad_input[others], expected.grad_input[others], route.tolerance, "gradient x")
        assert outcome.grad_weight.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy_of_extreme_logits(inplace: bool, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """All extreme rows in one call."""
    logits, y = (t.to(device) for t in every_extreme(50))
    p = Problem(logits.to(dtype), torch.empty(0, dtype=dtype), y, None, {"reduction": "none", "label_smoothing": 0.1})
    outcome = test_cross_entropy.run(p, inplace=inplace, stats=STATS)
    wide = replace(p, input=p.input.double())
    expected, stock = run_oracle(wide), run_stock(wide)
    defined, counts = has_softmax(logits), y != IGNORED
    assert stock.grad_input is not None
    grad = stock.grad_input.where(counts[:, None], 0.0).where(~defined[:, None], expected.grad_input)
    same: Any = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(outcome.loss, expected.loss.where(defined, stock.loss), **same)
    torch.testing.assert_close(outcome.grad_input, grad, **same)
    for name in STATS:
        mine, right = getattr(outcome.output, name)[defined], getattr(expected, name)[defined]
        torch.testing.assert_close(mine, right, **same)
