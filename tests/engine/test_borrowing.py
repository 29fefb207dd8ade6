"""Borrowed memory of the weight gradient, which is not written yet: for tiles, and for the sum of the input gradient.

Half precision on a CPU has float32 logits, which do not fit there: these tests take that exception away, so that
what a GPU does is tested here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager

import flce
from flce.backends import load
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm
from flce.engine import case, passes, sums
from flce.engine.arena import Arena
from flce.engine.borrowing import BLOCK_MULTIPLE, BorrowedBlocks
from flce.engine.case import Case
from flce.engine.passes import Runtime
from flce.engine.schedules import Schedule
from flce.engine.schedules.blocks import Apart, Blocks, BlocksAroundSum
from flce.engine.schedules.chunks import Chunks, DeferredChunks
from flce.engine.stage import Stage
from flce.planning import search
from flce.planning.plan import ChunkPlan
from flce.testing.problem import ALL_GRADS, make_problem, relative_error, run_fused, run_oracle
from tests.forced import force
from tests.helpers import check, num_blocks, plan_for
from tests.hopper import logits_dtypes_on_a_gpu

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
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    search.plan_of_call.cache_clear()
    yield
    search.plan_of_call.cache_clear()


def with_borrowed(plan: ChunkPlan) -> list[slice]:
    """The blocks whose tiles are borrowed."""
    borrowed = getattr(plan.schedule, "borrowed", None)
    return borrowed.of(0, plan.case.vocab_size) if isinstance(borrowed, BorrowedBlocks) else []


def borrows(plan: ChunkPlan) -> bool:
    """Whether anything is in memory of dW that is not written yet."""
    return bool(with_borrowed(plan)) or isinstance(plan.schedule, BlocksAroundSum)


def blocks_of_128(c: Case) -> Schedule:
    return Blocks.sized(c, 128)


def blocks_around_sum(c: Case) -> BlocksAroundSum:
    assert 128 in BlocksAroundSum.sizes(c)
    return BlocksAroundSum.sized(c, 128)


@pytest.mark.parametrize("extras", EXTRAS)
def test_borrowed_tiles(extras: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**SHAPE, dtype=torch.float32, **EXTRAS[extras])
    plans = force(monkeypatch, blocks_of_128)
    check(problem, options=VOCAB, grad_output=1.7)
    assert len(plans) == 2
    first, *others = plans[-1].schedule.tiles(plans[-1].case)[1]
    assert first > 128
    assert with_borrowed(plans[-1])[0] == slice(0, first)
    assert len(with_borrowed(plans[-1])) <= len(others)  # the last is not borrowed


@pytest.mark.parametrize(
    "backend, extras, dtype",
    [("torch", extras, dtype) for extras in ("plain", "bias", "none") for dtype in (torch.bfloat16, torch.float16)]
    + [("triton", "plain", torch.float16), ("triton", "bias", torch.bfloat16), ("triton", "none", torch.float16)],
    indirect=["backend"],
    ids=str,
)
def test_the_sum_of_the_input_gradient_in_borrowed_memory(
    extras: str, dtype: torch.dtype, backend: str, half_logits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(**SHAPE, dtype=dtype, **EXTRAS[extras])
    upstream = 2.0**12 if dtype == torch.float16 else 1.7
    apart = run_fused(problem, options=VOCAB, grad_output=upstream)
    plans = force(monkeypatch, blocks_around_sum)
    outcome = check(problem, options=VOCAB, grad_output=upstream, tolerance=3e-2)
    assert len(plans) == 2
    # The sum has no memory of its own.
    beside = ChunkPlan(plans[-1].case, "vocab", blocks_of_128(plans[-1].case))
    assert beside.workspace_bytes - plans[-1].workspace_bytes >= 15 * 64 * 4
    # The same products in the same precision, only in other blocks: as far from each other as roundings are.
    for mine, other in ((outcome.grad_input, apart.grad_input), (outcome.grad_weight, apart.grad_weight)):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_dropped_rows_with_borrowed_tiles(backend: str, half_logits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**SHAPE, dtype=torch.bfloat16, ignored=0.5)
    options = replace(VOCAB, skip_ignored=True)
    plans = force(monkeypatch, blocks_of_128)
    check(problem, options=options, tolerance=3e-2)
    assert with_borrowed(plans[-1])
    every = make_problem(**SHAPE, dtype=torch.bfloat16, ignored=1.0, reduction="sum")
    outcome = run_fused(every, options=options)
    assert outcome.grad_weight is not None
    assert not outcome.grad_weight.any()


def test_what_is_borrowed() -> None:
    """Gradients of logits, but logits of another dtype have memory of their own."""
    options = flce.ChunkOptions(strategy="vocab", max_workspace_bytes=256 << 20)
    for how in (options, replace(options, logits_dtype=torch.bfloat16), replace(options, logits_dtype=torch.float32)):
        assert borrows(flce.plan(8192, 4096, 128256, torch.bfloat16, options=how))
    assert not borrows(flce.plan(8192, 4096, 128256, torch.bfloat16, options=options, weight_grad=False))


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
    monkeypatch.setattr(sums, "COMPACTION_ROWS", 8)  # several pieces, as a large vocabulary has
    problem = make_problem((3, 8), 24, vocab, dtype=dtype, **extras)
    options = flce.ChunkOptions(strategy="tokens", chunk_rows=5, skip_ignored=False)
    schedule = plan_for(problem, options).schedule
    assert isinstance(schedule, (Chunks, DeferredChunks))
    assert schedule.rows == 5
    halved: list[Any] = []
    monkeypatch.setattr(sums.HalvedSum, "_round", lambda self, do=sums.HalvedSum._round: halved.append(do(self)))
    outcome = check(problem, options=options, grad_output=1.7, tolerance=3e-2)
    assert len(halved) == 1 + len(problem.adapters)
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
    [((64, 256, 4000), torch.float64), ((200, 2048, 1000), torch.bfloat16), ((104, 3, 4237), torch.float16)],
    ids=str,
)
def test_budgets_around_a_borrowed_sum(
    shape: tuple[int, int, int], dtype: torch.dtype, torch_backend: str, half_logits: None
) -> None:
    """float64 has no wider sum; few classes may all fit into one block; an odd number of odd rows."""
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
        kind = (type(plan.schedule), num_blocks(plan) > 1)
        if kind in tried:
            continue
        tried.add(kind)
        outcome = run_fused(problem, options=options)
        check(problem, options=options, tolerance=1e-9 if dtype == torch.float64 else 3e-2)
        assert outcome.grad_input is not None
        assert outcome.grad_weight is not None
        storages = {t.untyped_storage().data_ptr() for t in (outcome.grad_input, outcome.grad_weight)}
        assert len(storages) == 2
    assert len(tried) > 1


def test_a_borrowed_sum_of_odd_rows(half_logits: None, torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem((3, 8), 63, 1003, dtype=torch.bfloat16)
    plans = force(monkeypatch, blocks_around_sum)
    check(problem, options=VOCAB, tolerance=3e-2)
    assert len(plans) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mib", [None, 0.25, 1.5, 8])
def test_budgets_while_a_graph_is_traced(mib: float | None, dtype: torch.dtype, torch_backend: str) -> None:
    """One graph for all lengths, whichever schedule each takes."""
    w = torch.randn(3001, 64).mul(0.3).to(dtype).requires_grad_()
    options = flce.ChunkOptions(max_workspace_bytes=None if mib is None else int(mib * 2**20))
    traced_at, n = set(), 0

    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        return flce.fused_linear_cross_entropy(x, w, y, options=options)

    def counted(graph: Any, inputs: Any) -> Any:
        traced_at.add(n)  # more than once if the compiler begins anew
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled, deferred = torch.compile(loss, dynamic=True, fullgraph=True, backend=counted), set()
    for n in (3, 50, 70, 400, 2000):
        x, y = torch.randn(n, 64).to(dtype).requires_grad_(), torch.randint(0, 3001, (n,))
        try:
            plan = flce.plan(n, 64, 3001, dtype, device="cpu", options=options)
        except ValueError:
            continue
        deferred.add(plan.deferred)
        grads = []
        for function in (compiled, loss):
            function(x, y).mul(3.0).backward()
            grads.append([leaf.grad for leaf in (x, w)])
            x.grad = w.grad = None
        for mine, other in zip(*grads, strict=True):
            assert relative_error(mine, other) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert len(traced_at) == 1
    if (mib, dtype) in ((0.25, torch.float32), (1.5, torch.bfloat16)):
        assert deferred == {True, False}


class Watched(Stage):
    """Sees where tiles, sums and gradients lie. On tensors without memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.written = 0
        """Bytes of dW, from the first class on."""
        self.borrowed = 0
        """Tiles."""
        self.made = {"inputs": 0, "weights": 0}
        """Entries of tiles that have been multiplied for these gradients."""
        self._borrowed_at: tuple[int, int] | None = None

    def place(self, x: torch.Tensor | None) -> tuple[int, int] | None:
        """The bytes of dW in which a tensor lies."""
        if x is None or not same_storage(x, self.dw_memory()):
            return None
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        first, size = int(x.storage_offset()) * x.element_size(), x.element_size()
        assert first + (last + 1) * size <= self.dw_memory().untyped_storage().nbytes()
        return first, first + (last + 1) * size

    def _sum(self) -> tuple[int, int] | None:
        """Where the gradient of the input is, which is read until there is another."""
        return self.place(self._dx.get(0))

    def gradient(self, xs: Any, part: slice, cols: slice, dlogits: torch.Tensor) -> None:
        assert dlogits.shape == (part.stop - part.start, cols.stop - cols.start)
        self._borrowed_at = self.place(dlogits)
        if self._borrowed_at is not None:
            self.borrowed += 1
            assert self._borrowed_at[0] >= self.written
            assert apart(self._borrowed_at, self._sum())

    def matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
        term = self.terms[0]
        of_weight = same_storage(b, term.input)
        assert of_weight or same_storage(b, term.weight)
        self.made["weights" if of_weight else "inputs"] += a.numel()
        if of_weight:
            self._write(out)
        elif (place := self.place(out)) is not None:
            assert place[0] >= self.written
            assert apart(place, self._borrowed_at)

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._write(out)

    def _write(self, out: torch.Tensor) -> None:
        place = self.place(out)
        if place is not None:
            assert place[0] <= self.written <= place[1]  # no class is left out; of other tokens the same once more
            assert apart(place, self._borrowed_at)
            assert apart(place, self._sum())
            self.written = place[1]


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def apart(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is None or other is None or one[1] <= other[0] or other[1] <= one[0]


def num_tiles(schedule: Any, c: Case) -> int:
    rows, widths = schedule.tiles(c)
    of_inputs = num_tiles(schedule.inputs, c) if isinstance(schedule, Apart) else 0
    return -(-c.num_tokens // rows) * len(widths) + of_inputs


BORROWING = (Blocks, BlocksAroundSum, Apart)


def watched(plan: ChunkPlan) -> Watched:
    """Its backward. Nothing is written over before it has been read, and every class is there once."""
    c = plan.case
    n, (h,), v = c.num_tokens, c.hidden_sizes, c.vocab_size

    def given_(*shape: int, dtype: torch.dtype = c.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    term, target = LinearTerm(given_(n, h), given_(v, h)), given_(n, dtype=torch.int64)
    problem = LinearCrossEntropyProblem((term,), target, None, None, None, None, c.spec, c.needs)
    stages: list[Watched] = []

    def stage(*args: Any, **more: Any) -> Watched:
        stages.append(Watched(*args, **more))
        return stages[0]

    normalizer, upstream = given_(2, n, dtype=torch.float32), given_(dtype=torch.float32)
    runtime = Runtime(load("torch"), Arena("meta"), stage)
    grad_input, grad_weight = passes.backward(problem, plan, normalizer, upstream, runtime)
    (at_work,) = stages
    assert at_work.made == {"inputs": n * v, "weights": n * v}
    assert at_work.written == v * h * c.dtype.itemsize == grad_weight.untyped_storage().nbytes()
    assert grad_input.dtype == grad_weight.dtype == c.dtype
    assert not same_storage(grad_input, grad_weight)
    return at_work


@given(
    n=st.integers(1, 20000),
    h=st.integers(1, 9000),
    v=st.one_of(st.integers(2, 6000), st.integers(2, 150000)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    kib=st.one_of(st.integers(1, 16 << 10), st.integers(1 << 10, 512 << 10)),
    strategy=st.sampled_from(["vocab", "auto"]),
)
def test_borrowed_memory_is_unwritten_and_large_enough(
    n: int, h: int, v: int, dtype: torch.dtype, kib: int, strategy: Any
) -> None:
    try:
        options = flce.ChunkOptions(strategy=strategy, max_workspace_bytes=kib << 10)
        plan = flce.plan(n, h, v, dtype, device="cuda", options=options)
    except ValueError:
        return
    if isinstance(plan.schedule, BORROWING) and num_tiles(plan.schedule, plan.case) <= 2000:  # more are nothing new
        assert (watched(plan).borrowed > 0) == bool(with_borrowed(plan))
        assert all((block.stop - block.start) % BLOCK_MULTIPLE == 0 for block in with_borrowed(plan))


@pytest.mark.parametrize(
    "kind, shape, size",
    [
        (Blocks, (2048, 1024, 32000), 1024),
        (Blocks, (2048, 1024, 32000), 32),
        (BlocksAroundSum, (2048, 1024, 32000), 1024),
        (BlocksAroundSum, (2047, 1023, 31999), 32),
        (Apart, (2048, 1024, 32000), 128),
    ],
)
def test_the_same_of_each_schedule(kind: Any, shape: tuple[int, int, int], size: int) -> None:
    c = flce.plan(*shape, torch.bfloat16, device="cuda").case
    assert size in kind.sizes(c)
    plan = ChunkPlan(c, "vocab", kind.sized(c, size))
    assert type(plan.schedule) is kind
    assert watched(plan).borrowed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows, reduction", [(200, "mean"), (300, "mean"), (300, "none"), (600, "none")])
def test_a_float32_sum_in_a_budget_on_cuda(rows: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the gradient's 74 MiB, less than the 147 MiB that its float32 sum takes."""
    from tests.planning.test_plan import assert_kept, promise_and_peak

    kind = DeferredChunks if reduction == "none" else Chunks
    plans = force(monkeypatch, lambda c: kind.sized(c, rows))
    settings_ = {"dtype": torch.bfloat16, "reduction": reduction}
    _, peak = promise_and_peak(2000, 768, 50257, "cuda", settings_, {"strategy": "tokens"})
    assert 50257 * 768 * 2 < plans[-1].workspace_bytes < 50257 * 768 * 4
    assert_kept(plans[-1].workspace_bytes, peak)
    problem = make_problem((2000,), 768, 50257, dtype=torch.bfloat16, device="cuda", reduction=reduction)
    check(problem, options=flce.ChunkOptions(strategy="tokens"), tolerance=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("grads", ["xw", "xwb"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mib", [6, 12, 40])
def test_borrowing_on_cuda(mib: int, reduction: str, grads: str) -> None:
    from tests.planning.test_plan import assert_kept, promise_and_peak

    settings_ = {"dtype": torch.bfloat16, "grads": grads, "reduction": reduction}
    options = {"max_workspace_bytes": mib << 20, "strategy": "vocab"}
    plan = flce.plan(2000, 768, 50257, torch.bfloat16, options=flce.ChunkOptions(**options))  # type: ignore[arg-type]
    assert isinstance(plan.schedule, BlocksAroundSum) == (mib == 6)
    assert with_borrowed(plan)
    assert_kept(*promise_and_peak(2000, 768, 50257, "cuda", settings_, options))
    problem = make_problem((2000,), 768, 50257, dtype=torch.bfloat16, device="cuda", bias="b" in grads)
    problem.kwargs["reduction"] = reduction
    check(problem, options=flce.ChunkOptions(**options), grads=ALL_GRADS, tolerance=3e-2)  # type: ignore[arg-type]
