"""Tiles, and the sum of the input gradient, in borrowed memory of the weight gradient.

On a CPU half-precision calls have float32 logits, which are too large to borrow memory. These tests use the dtypes of a
GPU instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager

import flce
from flce.engine import borrowing, case, sums
from flce.engine.borrowing import BlockLayout
from flce.engine.schedules.gradients import Blocks, BlocksAroundSum, Chunks, DeferredChunks, SeparatePasses
from flce.planning.plan import ChunkPlan
from flce.testing.problem import ALL_GRADS, make_problem, relative_error, run_fused
from tests.forced import force
from tests.helpers import case_of, check, plan_for
from tests.hopper import logits_dtypes_on_a_gpu

SHAPE: dict[str, Any] = {"leading": (3, 5), "hidden": 64, "vocab": 1003}
VOCAB = flce.ChunkOptions(strategy="vocab", skip_ignored=False)
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True, "z_loss": 0.01, "label_smoothing": 0.1},
    "none": {"reduction": "none", "token_weight": True, "ignored": 0.3},
    "adapters": {"adapter_ranks": (4, 8), "softcap": 5.0},
}


def with_borrowed(plan: ChunkPlan) -> list[slice]:
    """Return the blocks whose tiles are borrowed."""
    layout = getattr(plan.schedule, "layout", None)
    return layout.borrowed_blocks(0, plan.case.vocab_size) if isinstance(layout, BlockLayout) else []


HALVES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.bfloat16, {}),
    "adapters": (torch.bfloat16, EXTRAS["adapters"]),
    "none": (torch.bfloat16, EXTRAS["none"]),
    "float16": (torch.float16, EXTRAS["none"]),
}


# The engine, not the backend, decides about memory: few cases with Triton are enough.
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
    monkeypatch.setattr(sums, "FIRST_ROUNDED_CLASSES", 8)  # several pieces, as a large vocabulary has
    problem = make_problem((3, 8), 24, vocab, dtype=dtype, **extras)
    options = flce.ChunkOptions(strategy="tokens", chunk_rows=5, skip_ignored=False)
    schedule = plan_for(problem, options).schedule
    assert isinstance(schedule, (Chunks, DeferredChunks))
    assert schedule.rows == 5
    outcome = check(problem, options=options, grad_output=1.7, tolerance=3e-2)
    # One chunk rounds the same sums, computed in another order.
    one_chunk = run_fused(problem, options=flce.ChunkOptions(strategy="tokens", skip_ignored=False), grad_output=1.7)
    for mine, other in zip(
        (outcome.grad_weight, *(up for _, up in outcome.grad_adapters)),
        (one_chunk.grad_weight, *(up for _, up in one_chunk.grad_adapters)),
        strict=True,
    ):
        assert mine is not None
        assert other is not None
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


@pytest.mark.parametrize("mib, dtype", [(None, torch.float16), (0.25, torch.float32), (1.5, torch.bfloat16)], ids=str)
def test_budgets_while_a_graph_is_traced(mib: float | None, dtype: torch.dtype, torch_backend: str) -> None:
    """One graph serves all lengths, although their schedules differ."""
    w = torch.randn(3001, 64).mul(0.3).to(dtype).requires_grad_()
    options = flce.ChunkOptions(max_workspace_bytes=None if mib is None else int(mib * 2**20))
    traced_at, n = set(), 0

    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        return flce.fused_linear_cross_entropy(x, w, y, options=options)

    def compile_and_record(graph: Any, inputs: Any) -> Any:
        traced_at.add(n)  # a second value if the compiler traces again
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled, deferred = torch.compile(loss, dynamic=True, fullgraph=True, backend=compile_and_record), set()
    for n in (3, 50, 400, 1000):
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
    if mib in (0.25, 1.5):
        assert deferred == {True, False}


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "kind, dtypes", [(Blocks, [torch.float64, *HALF]), (BlocksAroundSum, HALF), (SeparatePasses, HALF)]
)
@given(
    n=st.integers(1, 90), h=st.integers(20, 150), more=st.integers(1, 500), half=st.booleans(), share=st.floats(0, 1)
)
def test_borrowed_memory_of_any_size(
    kind: Any, dtypes: Any, n: int, h: int, more: int, half: int, share: float
) -> None:
    """Borrowed memory is read before it is overwritten, and each class is computed once."""
    dtype = dtypes[half]
    problem = make_problem((n,), h, 4 * n + more, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLCE_BACKEND", "torch")
        patch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
        patch.setattr(borrowing, "BLOCK_MULTIPLE", 64)  # several blocks of small problems
        sizes = kind.sizes(case_of(problem, VOCAB))[10:50]
        if sizes:
            force(patch, lambda c: kind.from_size(c, sizes[int(share * (len(sizes) - 1))]))
            result = check(problem, options=VOCAB, tolerance=None if dtype == torch.float64 else 3e-2)
            assert result.grad_input is not None
            assert result.grad_weight is not None
            assert result.grad_input.untyped_storage().data_ptr() != result.grad_weight.untyped_storage().data_ptr()


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
