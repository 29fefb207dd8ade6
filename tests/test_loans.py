"""Memory of the weight gradient that is not yet written: tiles in it, and the sum of the input gradient.

Half precision on a CPU has float32 logits, which do not fit there: these tests take that exception away, so that
what a GPU does is tested here too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flce
from flce import operators, planning, sums
from flce.borrowing import BLOCK_MULTIPLE
from flce.chunk_plan import ChunkPlan
from tests.helpers import (
    ALL_GRADS,
    Problem,
    check,
    make_problem,
    plan_for,
    relative_error,
    run_fused,
    run_oracle,
)
from tests.test_plan import assert_kept, promise_and_peak

SHAPE: dict[str, Any] = {"leading": (3, 5), "hidden": 64, "vocab": 1003}
VOCAB = flce.ChunkOptions(strategy="vocab", skip_ignored=False)
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True, "z_loss": 0.01, "label_smoothing": 0.1},
    "none": {"reduction": "none", "token_weight": True, "ignored": 0.3},
    "adapters": {"adapter_ranks": (4, 8), "softcap": 5.0},
}


@pytest.fixture
def half_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def same(dtype: torch.dtype, device_type: str, options: flce.ChunkOptions) -> tuple[torch.dtype, torch.dtype]:
        return dtype, dtype

    monkeypatch.setattr(planning, "_logits_dtypes", same)
    planning.make_plan.cache_clear()
    yield
    planning.make_plan.cache_clear()


def force(monkeypatch: pytest.MonkeyPatch, problem: Problem, **changes: Any) -> ChunkPlan:
    """Plans that a budget makes of large problems only; returns that of this problem."""
    original = operators._plan

    def changed(p: Any, options: flce.ChunkOptions) -> ChunkPlan:
        return replace(original(p, options), **changes)

    monkeypatch.setattr(operators, "_plan", changed)
    return replace(plan_for(problem, VOCAB), **changes)


@pytest.mark.parametrize("extras", EXTRAS)
def test_tiles_in_lent_memory(extras: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**SHAPE, dtype=torch.float32, **EXTRAS[extras])
    plan = force(monkeypatch, problem, block_cols=128)
    blocks = [(block.stop - block.start, lent) for sweep in plan.sweeps for block, lent in sweep.blocks()]
    assert blocks[0][1]
    assert not blocks[-1][1]
    assert blocks[0][0] > plan.block_cols
    check(problem, options=VOCAB, grad_output=1.7)


@pytest.mark.parametrize(
    "backend, extras, dtype",
    [("torch", extras, dtype) for extras in ("plain", "bias", "none") for dtype in (torch.bfloat16, torch.float16)]
    + [("triton", "plain", torch.float16), ("triton", "bias", torch.bfloat16), ("triton", "none", torch.float16)],
    indirect=["backend"],
    ids=str,
)
def test_the_sum_of_the_input_gradient_in_lent_memory(
    extras: str, dtype: torch.dtype, backend: str, half_logits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(**SHAPE, dtype=dtype, **EXTRAS[extras])
    upstream = 2.0**12 if dtype == torch.float16 else 1.7
    apart = run_fused(problem, options=VOCAB, grad_output=upstream)
    plan = force(monkeypatch, problem, block_cols=128, lent_input_sum=True)
    assert planning._can_lend_input_sum(plan)
    start = plan.input_sum_start
    assert [(s.inputs, s.weights, s.start, s.stop) for s in plan.sweeps] == [
        (True, True, 0, start),
        (True, False, start, 1003),
        (False, True, start, 1003),
    ]
    outcome = check(problem, options=VOCAB, grad_output=upstream, tolerance=3e-2)
    # The same products in the same precision, only in other blocks: as far from each other as roundings are.
    for mine, other in ((outcome.grad_input, apart.grad_input), (outcome.grad_weight, apart.grad_weight)):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_dropped_rows_with_tiles_in_lent_memory(
    backend: str, half_logits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(**SHAPE, dtype=torch.bfloat16, ignored=0.5)
    options = replace(VOCAB, skip_ignored=True)
    plan = force(monkeypatch, problem, block_cols=128)
    assert any(lent for _, lent in plan.sweeps[0].blocks())
    check(problem, options=options, tolerance=3e-2)
    every = make_problem(**SHAPE, dtype=torch.bfloat16, ignored=1.0, reduction="sum")
    outcome = run_fused(every, options=options)
    assert outcome.grad_weight is not None
    assert not outcome.grad_weight.any()


def test_no_loans_where_the_memory_has_another_dtype() -> None:
    options = flce.ChunkOptions(strategy="vocab", max_workspace_bytes=1 << 30, logits_dtype=torch.float32)
    for plan in (
        flce.plan(8192, 4096, 128256, torch.bfloat16, options=options),
        flce.plan(8192, 4096, 128256, torch.bfloat16, options=replace(options, logits_dtype=None), weight_grad=False),
    ):
        assert not any(lent for sweep in plan.sweeps for _, lent in sweep.blocks())
        assert not plan.lent_input_sum


HALVES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.bfloat16, {}),
    "adapters": (torch.bfloat16, EXTRAS["adapters"]),
    "none": (torch.bfloat16, EXTRAS["none"]),
    "float16": (torch.float16, EXTRAS["none"]),
}


# Whose memory is whose is decided above the backends.
@pytest.mark.parametrize(
    "backend, vocab, kind",
    [("torch", vocab, kind) for vocab in (5, 16, 17, 515, 1041) for kind in HALVES]
    + [("triton", vocab, kind) for vocab, kind in zip((5, 17, 515, 16, 515), [*HALVES, "adapters"], strict=True)],
    indirect=["backend"],
)
def test_a_float32_sum_half_in_its_gradients_memory(
    vocab: int, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, extras = HALVES[kind]
    monkeypatch.setattr(sums, "COMPACTION_ROWS", 8)  # several pieces, as of a large vocabulary
    problem = make_problem((3, 8), 24, vocab, dtype=dtype, **extras)
    options = flce.ChunkOptions(strategy="tokens", chunk_rows=5, skip_ignored=False)
    (sweep,) = plan_for(problem, options).sweeps
    assert sweep.weight_halves
    outcome = check(problem, options=options, grad_output=1.7, tolerance=3e-2)
    # One chunk rounds the same sums, made in another order.
    whole = run_fused(problem, options=flce.ChunkOptions(strategy="tokens", skip_ignored=False), grad_output=1.7)
    for mine, other in zip(
        (outcome.grad_weight, *(up for _, up in outcome.grad_adapters)),
        (whole.grad_weight, *(up for _, up in whole.grad_adapters)),
        strict=True,
    ):
        assert mine is not None
        assert other is not None
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def test_a_sum_of_bfloat16_would_be_worse(torch_backend: str) -> None:
    """Many chunks: were they summed in bfloat16, the error would be several times that of the rounding at the end."""
    problem = make_problem((512,), 16, 64, dtype=torch.bfloat16)
    options = flce.ChunkOptions(strategy="tokens", chunk_rows=4)
    mine, expected = run_fused(problem, options=options), run_oracle(problem)
    assert mine.grad_weight is not None
    assert expected.grad_weight is not None
    assert relative_error(mine.grad_weight, expected.grad_weight) < 2.5e-3


@pytest.mark.parametrize(
    "shape, dtype",
    [((64, 256, 4000), torch.float64), ((400, 4096, 2000), torch.bfloat16), ((104, 3, 4237), torch.float16)],
    ids=str,
)
def test_budgets_around_a_lent_sum(
    shape: tuple[int, int, int], dtype: torch.dtype, torch_backend: str, half_logits: None
) -> None:
    """Of float64 there is no wider sum; few classes may all fit into one block; an odd number of odd rows."""
    n, h, v = shape
    problem = make_problem((n,), h, v, dtype=dtype)
    least = flce.plan(n, h, v, dtype, device="cpu", options=VOCAB).workspace_bytes // 64
    tried = set()
    for step in range(1, 80):
        options = replace(VOCAB, max_workspace_bytes=least * step)
        try:
            plan = plan_for(problem, options)
        except ValueError:
            continue
        kind = (plan.lent_input_sum, plan.input_tile is not None, plan.num_blocks > 1)
        if kind in tried:
            continue
        tried.add(kind)
        outcome = run_fused(problem, options=options)
        check(problem, options=options, tolerance=1e-9 if dtype == torch.float64 else 3e-2)
        assert outcome.grad_input is not None
        assert outcome.grad_weight is not None
        storages = {t.untyped_storage().data_ptr() for t in (outcome.grad_input, outcome.grad_weight)}
        assert len(storages) == 2
    assert tried


def test_a_lent_sum_of_odd_rows(half_logits: None, torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((3, 8), 63, 1003, dtype=torch.bfloat16)
    force(monkeypatch, problem, block_cols=128, lent_input_sum=True)
    check(problem, options=VOCAB, tolerance=3e-2)


@pytest.mark.parametrize("mib", [0.3, 0.4, 1, 8])
def test_budgets_while_a_graph_is_traced(mib: float, torch_backend: str) -> None:
    """With sizes that are symbols."""
    w = torch.randn(3001, 64, requires_grad=True)
    options = flce.ChunkOptions(max_workspace_bytes=int(mib * 2**20))

    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        return flce.fused_linear_cross_entropy(x, w, y, options=options)

    compiled = torch.compile(loss, dynamic=True, fullgraph=True, backend="aot_eager")
    for n in (50, 70):
        x, y = torch.randn(n, 64), torch.randint(0, 3001, (n,))
        torch.testing.assert_close(compiled(x, y), loss(x, y))


@given(
    n=st.integers(1, 20000),
    h=st.integers(1, 9000),
    v=st.one_of(st.integers(2, 6000), st.integers(2, 150000)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    kib=st.one_of(st.integers(1, 16 << 10), st.integers(1 << 10, 512 << 10)),
    strategy=st.sampled_from(["vocab", "auto"]),
)
def test_lent_memory_is_unwritten_and_large_enough(
    n: int, h: int, v: int, dtype: torch.dtype, kib: int, strategy: Any
) -> None:
    try:
        options = flce.ChunkOptions(strategy=strategy, max_workspace_bytes=kib << 10)
        plan = flce.plan(n, h, v, dtype, device="cuda", options=options)
    except ValueError:
        return
    if not plan.deferred:
        return
    covered = []
    for sweep in plan.sweeps:
        start = sweep.start
        for number, (block, lent) in enumerate(sweep.blocks()):
            assert block.start == start < block.stop <= sweep.stop
            start = block.stop
            width = block.stop - block.start
            if lent:
                assert sweep.weights
                assert sweep.rows >= n
                assert n * width <= (sweep.stop - block.stop) * h
                assert width % BLOCK_MULTIPLE == 0
            else:
                assert width <= sweep.cols
            assert width <= sweep.widest
            if number > 2000:  # slow, and nothing new
                start = sweep.stop
                break
        assert start == sweep.stop
        covered.append((sweep.start, sweep.stop, sweep.inputs, sweep.weights))
    for wanted in (2, 3):  # inputs, weights: of every class once
        ranges = sorted(c[:2] for c in covered if c[wanted])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == v
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    if plan.lent_input_sum:
        assert n * h * 4 <= (v - plan.input_sum_start) * h * dtype.itemsize
        # Rounding it makes a copy, before its memory is written over.
        assert plan.sweeps[0].input_dtype == plan.sweeps[1].input_dtype != dtype


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mib", [120, 160])
def test_a_float32_sum_in_a_budget_on_cuda(mib: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the gradient's 74 MiB, less than the 147 MiB that its float32 sum takes."""
    monkeypatch.setattr(planning, "LENT_TILES", ())  # all tokens in one chunk would fit
    planning.make_plan.cache_clear()
    settings_ = {"dtype": torch.bfloat16, "reduction": reduction}
    options = {"max_workspace_bytes": mib << 20, "strategy": "tokens"}
    plan = flce.plan(2000, 768, 50257, torch.bfloat16, reduction=reduction, options=flce.ChunkOptions(**options))  # type: ignore[arg-type]
    assert plan.num_chunks > 1
    assert plan.sweeps[0].weight_halves
    assert_kept(*promise_and_peak(2000, 768, 50257, "cuda", settings_, options))
    problem = make_problem((2000,), 768, 50257, dtype=torch.bfloat16, device="cuda", reduction=reduction)
    check(problem, options=flce.ChunkOptions(**options), tolerance=3e-2)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("grads", ["xw", "xwb"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mib", [6, 12, 40])
def test_loans_on_cuda(mib: int, reduction: str, grads: str) -> None:
    settings_ = {"dtype": torch.bfloat16, "grads": grads, "reduction": reduction}
    options = {"max_workspace_bytes": mib << 20, "strategy": "vocab"}
    plan = flce.plan(2000, 768, 50257, torch.bfloat16, options=flce.ChunkOptions(**options))  # type: ignore[arg-type]
    assert plan.lent_input_sum == (mib == 6)
    assert_kept(*promise_and_peak(2000, 768, 50257, "cuda", settings_, options))
    problem = make_problem((2000,), 768, 50257, dtype=torch.bfloat16, device="cuda", bias="b" in grads)
    problem.kwargs["reduction"] = reduction
    check(problem, options=flce.ChunkOptions(**options), grads=ALL_GRADS, tolerance=3e-2)  # type: ignore[arg-type]
