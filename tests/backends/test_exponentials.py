"""Gradients computed from unnormalized exponentials, without logits in memory.

They are for Hopper and bfloat16. `interpreted_bfloat16` corrects the interpreter's bfloat16 products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import flce
from flce.backends import get_backend
from flce.backends.contract import TargetTerms
from flce.core.problem import LossSpec
from flce.engine.borrowing import BlockLayout
from flce.engine.case import Case
from flce.engine.schedules.unnormalized import BORROWED_TILE_COUNTS, Borrowed, Recomputed, Unnormalized
from flce.planning.plan import ChunkPlan
from flce.planning.search import make_plan
from flce.testing.problem import Problem, make_problem, relative_error, run_fused, run_oracle
from tests import forced
from tests.forced import force
from tests.helpers import check, least_budget_unless_accepted, parametrize_pairs, plan_for
from tests.hopper import case_on_hopper, misaligned

ULP = 2.0**-8
KINDS = (Unnormalized, Borrowed)  # `Recomputed` is a subclass of `Unnormalized`


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> Iterator[list[ChunkPlan]]:
    """Force unnormalized exponentials, also for small vocabularies and chunks, and yield the plans of all calls.

    A test with other schedules removes their plans from the list.
    """
    all_plans = force(monkeypatch, forced.unnormalized)
    yield all_plans
    assert all(isinstance(plan.schedule, KINDS) for plan in all_plans)


def problem_of(device: torch.device, **settings: Any) -> Problem:
    settings = {"leading": (2, 35), "hidden": 72, "vocab": 517, **settings}
    return make_problem(**settings, dtype=torch.bfloat16, device=device)


def plan_of(problem: Problem, options: flce.ChunkOptions, grads: str = "xw") -> ChunkPlan:
    plan = plan_for(problem, options, grads)
    assert isinstance(plan.schedule, KINDS)
    return plan


def gradient_error(name: str, problem: Problem, mine: Any, expected: Any = None) -> float:
    """Return the error of the gradient of "input" or "weight", relative to the oracle or to other results."""
    expected = run_oracle(problem) if expected is None else expected
    return relative_error(getattr(mine, f"grad_{name}"), getattr(expected, f"grad_{name}"))


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "softcap": 4.0, "class_weight": True, "token_weight": True, "ignored": 0.2, "z_loss": 0.02},
    "num_items": {"reduction": "sum", "num_items": 77, "vocab": 320},
}


@pytest.mark.parametrize("ignore_index", [-100, 2**32 + 5])  # the second is the target modulo 2^32
def test_factors_of_targets_keep_their_digits(ignore_index: int, device: torch.device) -> None:
    """In the product for the weight's gradient, terms of one class may cancel."""
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    x[1] = -1
    factor = torch.tensor([1 / 3, 1 / 3 + 2.0**-11], device=device)
    exps, grad = x.new_zeros(2, 256), x.new_empty(256, 64)
    terms = TargetTerms(x, None, torch.tensor([5, 5], device=device), factor, ignore_index)
    residual = torch.full_like(x, torch.nan)
    get_backend(device).weight_gradient(grad, [exps], torch.zeros_like(x), residual, terms)
    expected = torch.zeros(256, 64, dtype=torch.float64, device=device)
    expected[5] = -(2.0**-11)
    assert relative_error(grad, expected) < 2 * ULP


@pytest.mark.gpu
def test_certain_targets_of_weighted_tokens() -> None:
    """Without a z-loss, softmax and target have one factor: their difference is 0 even if the compiler fuses products
    with sums, which the interpreter does not."""
    x = 8 * torch.eye(64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0)).mul(0.1).bfloat16().cuda()
    weight[:64] = 8 * torch.eye(64)  # the logit of token i and class i is 64, other logits are less than 4
    loss = flce.fused_linear_cross_entropy(
        x,
        weight.requires_grad_(),
        torch.arange(64, device="cuda"),
        weight=torch.linspace(0.5, 2.0, 2048, device="cuda"),
        token_weight=torch.linspace(0.3, 1.7, 64, device="cuda"),
    )
    for grad in torch.autograd.grad(loss, (x, weight)):
        assert grad.abs().max() < 1e-20


def test_sums_in_bfloat16(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in bfloat16 are optional, less exact, and correct within their rounding."""
    problem = problem_of(device)
    options = flce.ChunkOptions(chunk_rows=64, accum_dtype=torch.bfloat16)
    original = Case.dtypes  # on a CPU it returns float32 sums
    monkeypatch.setattr(Case, "dtypes", lambda c, deferred: replace(original(c, deferred), sums=torch.bfloat16))
    assert plan_of(problem, options).dtypes.sums == torch.bfloat16
    check(problem, options=options, grads="xw", tolerance=8 * ULP)


@pytest.mark.parametrize("std", [0.02, 1.0, 4.0, 16.0, 200.0])
@pytest.mark.parametrize("where", ["anywhere", "beyond the sample", "target"])
def test_any_range(std: float, where: str, device: torch.device) -> None:
    """Logits far above the sample of the reference: the product is computed again with another reference."""
    problem = problem_of(device, leading=(24,), std=std)
    if where == "beyond the sample":  # the sample has every third class
        problem.linear_weight[4::9] *= 10
    elif where == "target":
        problem.linear_weight[problem.target[:10]] *= 10
    check(problem, grads="xw", tolerance=3 * ULP)


@pytest.mark.parametrize("size", [3e3, 1.6e4, 1e5, 1e6])
def test_logits_that_bfloat16_rounds_by_more_than_there_is_room(size: float, device: torch.device) -> None:
    """The logits without the bias have a large common part, for example in a row that is far from the others."""
    problem = problem_of(device, leading=(12,), std=2.0)
    problem.input[:, 0] = 1.0
    problem.linear_weight[:, 0] = size
    outcome: Any = run_fused(problem, grads="xw")
    expected: Any = run_oracle(problem)
    # float32 represents a logit of 1e6 with an error of 0.06.
    assert relative_error(outcome.loss, expected.loss) < 1e-6 * size
    assert relative_error(outcome.grad_input[:, 1:], expected.grad_input[:, 1:]) < 3 * ULP + 1e-6 * size


@pytest.mark.parametrize("rows", [None, 150])
def test_terms_that_cancel(rows: int | None, device: torch.device) -> None:
    """The model has learned the frequencies of targets, and its hidden states have a common part: the two terms of the
    weight gradient of a frequent class, each a sum over many tokens, are nearly equal."""
    problem = problem_of(device, leading=(400,), hidden=64, vocab=40)
    common = torch.randn(64, device=device).to(torch.bfloat16)
    problem.input.copy_(problem.input + 3 * common)
    frequency = torch.arange(1, 41, device=device).float().reciprocal().log()
    problem.linear_weight.copy_(frequency[:, None] * common.float() / (3 * common.float().square().sum()))
    z = problem.input.double() @ problem.linear_weight.double().T
    problem.target.copy_(torch.multinomial(z.softmax(1).float(), 1)[:, 0])
    options = flce.ChunkOptions(chunk_rows=rows)
    plan_of(problem, options)
    assert gradient_error("weight", problem, run_fused(problem, options=options, grads="xw")) < 2 * ULP


def test_a_bias_that_takes_a_product_away(device: torch.device) -> None:
    """Without the bias, the logits of the sample would give a reference that is far too large."""
    problem = problem_of(device, leading=(20,), bias=True)
    assert problem.linear_bias is not None
    problem.input[:, 0] = 1.0
    problem.linear_weight[::3, 0] = 256.0
    problem.linear_bias[::3] = -256.0
    check(problem, grads="xw", tolerance=3 * ULP)


@pytest.mark.parametrize(
    "shape, skip",
    [((450, 64, 400), True), ((100, 400, 160), True), ((100, 400, 160), False), ((2, 64, 300), False)],
    ids=str,
)
def test_a_common_part_of_all_classes(shape: tuple[int, int, int], skip: bool, device: torch.device) -> None:
    """A common part of the weights cancels in the gradient of the inputs, which is much smaller. With few classes there
    is little memory."""
    tokens, hidden, vocab = shape
    problem = problem_of(device, leading=(tokens,), hidden=hidden, vocab=vocab, std=0.1, ignored=0.2 if skip else 0.0)
    common = torch.randn(hidden, device=device)
    problem.linear_weight.copy_(problem.linear_weight.float() + 3 * common / hidden**0.5)
    options = flce.ChunkOptions(skip_ignored=skip)
    plan_of(problem, options)
    assert gradient_error("input", problem, run_fused(problem, options=options, grads="xw")) < 1.5 * ULP


def borrow(monkeypatch: pytest.MonkeyPatch, problem: Problem, count: int, **options: Any) -> flce.ChunkOptions:
    """Force `Borrowed` with `count` borrowed tiles and return the options for calls."""
    force(monkeypatch, forced.borrowed(count))
    chunking = flce.ChunkOptions(skip_ignored=False, **options)
    schedule = plan_of(problem, chunking).schedule
    assert isinstance(schedule, Borrowed)
    assert schedule.num_borrowed == count
    return chunking


@pytest.mark.parametrize(
    "tokens, count, extras",
    [
        *((tokens, count, "plain") for tokens, count in zip((40, 130, 70), BORROWED_TILE_COUNTS, strict=True)),
        (130, 1, "all"),
        (70, 3, "all"),
        (40, 1, "one gradient"),
        (70, 3, "float32"),
    ],
)
def test_tiles_in_the_memory_of_the_weight_gradient(
    tokens: int, count: int, extras: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N is larger and smaller than H; all tiles have targets."""
    settings = {**EXTRAS.get(extras, {}), "leading": (tokens,), "hidden": 64, "vocab": 6149}
    problem = problem_of(device, **settings)
    grads = "w" if extras == "one gradient" else "xw"
    options = borrow(monkeypatch, problem, count, logits_dtype=torch.float32 if extras == "float32" else None)
    check(problem, options=options, grads=grads, stats=("lse", "logprob"), grad_output=1.7, tolerance=3 * ULP)


@pytest.mark.parametrize("count", [1, 3])
def test_borrowed_tiles_change_nothing(count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of the sums for the gradient of the inputs changes."""
    problem = problem_of(device, leading=(70,), hidden=64, vocab=2117, std=16.0)
    problem.linear_weight[4::9] *= 10  # beyond the sample: some products are computed again
    usual: Any = run_fused(problem, grads="xw")
    mine: Any = run_fused(problem, options=borrow(monkeypatch, problem, count), grads="xw")
    assert torch.equal(mine.loss, usual.loss)
    assert torch.equal(mine.grad_weight, usual.grad_weight)
    assert gradient_error("input", problem, mine, usual) < 0.1 * ULP


@parametrize_pairs(
    way=["usual", "borrowed", "recomputed"], logits_dtype=[None, torch.float32], tokens=[1, 70], skip=[False, True]
)
def test_operands_without_descriptors(
    way: str,
    logits_dtype: torch.dtype | None,
    tokens: int,
    skip: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each operand has an address that descriptors cannot describe."""
    sizes = {"leading": (tokens,), "hidden": 64, "vocab": 300 if way == "usual" else 2117}
    problem = problem_of(device, **sizes, ignored=0.0 if tokens == 1 else 0.2)
    options = flce.ChunkOptions(logits_dtype=logits_dtype, skip_ignored=skip and way == "usual")
    if way == "borrowed":
        options = borrow(monkeypatch, problem, 3, logits_dtype=logits_dtype)
    elif way == "recomputed":
        force(monkeypatch, lambda c: Recomputed(32, BlockLayout(75, 768)))
    weight, x = (misaligned(monkeypatch, t) for t in (problem.linear_weight, problem.input))
    for operands in (replace(problem, linear_weight=weight), replace(problem, input=x)):
        check(operands, options=options, grads="xw", tolerance=3 * ULP)


def plan_on_hopper(tokens: int, hidden: int, mib: int | None = None, **arguments: Any) -> ChunkPlan:
    budget = None if mib is None else mib << 20
    plan = make_plan(case_on_hopper(tokens, hidden, 128256, max_workspace_bytes=budget, **arguments))
    assert budget is None or plan.workspace_bytes <= budget
    return plan


def num_borrowed(plan: ChunkPlan) -> int:
    """Return the number of tiles of exponentials in the memory of the weight gradient."""
    return plan.schedule.num_borrowed if isinstance(plan.schedule, Borrowed) else 0


def test_number_of_borrowed_tiles() -> None:
    """With a budget a plan has the fewest tiles that fit in the budget."""
    usual = plan_on_hopper(4096, 4096)
    assert num_borrowed(usual) == 1
    assert usual.workspace_bytes < 580 << 20  # the exponentials have 1002 MiB
    assert [num_borrowed(plan_on_hopper(4096, 4096, mib)) for mib in (2000, 600, 400, 230)] == [1, 1, 3, 7]
    assert plan_on_hopper(4096, 4096, 150).strategy == "vocab"
    assert num_borrowed(plan_on_hopper(16384, 1024)) == 0  # little to borrow
    for spec in (LossSpec("none"), LossSpec(label_smoothing=0.1)):
        assert num_borrowed(plan_on_hopper(4096, 4096, spec=spec)) == 0
    assert [num_borrowed(plan_on_hopper(4096, 4096, grads=grads)) for grads in ("x", "w", "xw", "xwb")] == [0, 1, 1, 0]
    assert num_borrowed(plan_on_hopper(131072, 4096)) == 0  # several chunks
    assert [num_borrowed(plan_on_hopper(4096, 4096, mib, chunk_rows=4096)) for mib in (None, 900, 400)] == [1, 1, 3]


@given(
    tokens=st.integers(1, 60000),
    hidden=st.integers(1, 2000).map(lambda n: 8 * n),
    vocab=st.integers(1, 300_000),
    grads=st.sampled_from(["xw", "w", "x"]),
    strategy=st.sampled_from(["auto", "tokens"]),
    share=st.floats(0.01, 1.5),
)
@example(48583, 1736, 87617, "w", "auto", 188226730 / 17027165422)  # chunks that are just long enough for Unnormalized
@example(5655, 15192, 19888, "xw", "auto", 51678475 / 449866560)  # less workspace with more rows
@example(8192, 4096, 128256, "xw", "tokens", 50 / 2004)
def test_budgets_on_hopper(tokens: int, hidden: int, vocab: int, grads: str, strategy: Any, share: float) -> None:
    """A plan fits in its budget, or the error names the least budget. If `vocab` fits, "auto" does."""

    def plan(budget: int, strategy: Any) -> ChunkPlan:
        options = {"strategy": strategy, "max_workspace_bytes": budget, "skip_ignored": False}
        plan = make_plan(case_on_hopper(tokens, hidden, vocab, grads=grads, **options))
        assert plan.workspace_bytes <= budget
        return plan

    budget = 1 + int(share * 2 * tokens * vocab)
    least = least_budget_unless_accepted(budget, functools.partial(plan, strategy=strategy))
    if least is None:
        return
    if vocab >= 4 * hidden:  # otherwise larger chunks, which have room for a float32 dX, may need less workspace
        with pytest.raises(ValueError, match="the least is"):
            plan(least - 1, strategy)
    if strategy == "auto":
        with pytest.raises(ValueError, match="the least is"):
            plan(budget, "vocab")


# 1051 classes are recomputed, in blocks of `cols` classes.
@pytest.mark.parametrize(
    "cols, extras", [(1280, "plain"), (768, "all"), (768, "num_items"), (1280, "one gradient"), (256, "one gradient")]
)
def test_classes_that_are_recomputed(
    cols: int, extras: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, plans: list[ChunkPlan]
) -> None:
    """Targets are among the recomputed and among the other classes; logits are beyond the sample."""
    settings = {**EXTRAS.get(extras, {}), "leading": (75,), "hidden": 64, "vocab": 2099}
    problem = problem_of(device, **settings)
    problem.linear_weight[4::9] *= 10
    grads = "w" if extras == "one gradient" else "xw"
    force(monkeypatch, lambda c: Recomputed(32, BlockLayout(75, cols)))
    options = flce.ChunkOptions(skip_ignored=False)
    check(problem, options=options, grads=grads, stats=("lse", "logprob"), grad_output=1.7, tolerance=3 * ULP)
    assert [type(plan.schedule) for plan in plans] == [Recomputed]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, grads, skip, schedule",
    [
        *(
            ((8192, 1024, 33024), grads, skip, lambda c, rows=rows: Unnormalized(rows))
            for grads in ("xw", "x", "w")
            for skip in (False, True)
            for rows in (2048, 8192)
        ),
        ((4096, 768, 50257), "xw", False, lambda c: Unnormalized(2048)),
        *(
            ((4096, 4096, 50257), grads, False, forced.borrowed(n))
            for grads in ("xw", "w")
            for n in BORROWED_TILE_COUNTS
        ),
        ((8192, 4096, 33024), "xw", False, forced.borrowed(1)),
        *(
            ((16384, 1024, 151936), "xw", False, lambda c, rows=rows: Recomputed.from_size(c, rows))
            for rows in (640, 1280)
        ),
        ((8192, 2048, 128256), "w", False, lambda c: Recomputed.from_size(c, 640)),
    ],
)
def test_promise(
    shape: tuple[int, int, int],
    grads: str,
    skip: bool,
    schedule: Any,
    monkeypatch: pytest.MonkeyPatch,
    plans: list[ChunkPlan],
) -> None:
    from tests.planning.test_plan import assert_kept, promise_and_peak

    force(monkeypatch, schedule)
    # Few ignored rows, because the plan must suffice for none: if many rows are dropped, dX needs no separate memory.
    settings = {"dtype": torch.bfloat16, "grads": grads, "ignored": 0.01 if skip else 0.0}
    _, peak = promise_and_peak(*shape, "cuda", settings, {"skip_ignored": skip})
    assert_kept(plans[-1].workspace_bytes, peak)
