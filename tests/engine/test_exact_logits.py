"""Without `logits_dtype` no schedule rounds logits below float32. The tests use the dtypes of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.engine import case
from flce.engine.borrowing import dx_sum_start
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.schedules.gradients import (
    Blocks,
    BlocksAroundSum,
    Chunks,
    ChunksOfBlocks,
    DeferredChunks,
    SeparatePasses,
)
from flce.engine.schedules.schedule import Schedule, Statistics
from flce.engine.schedules.unnormalized import Borrowed, Recomputed, Unnormalized
from flce.planning import search
from flce.planning.search import SCHEDULES
from flce.testing.problem import ALL_GRADS, Problem, make_problem, relative_error, run_fused, run_oracle
from tests.forced import force
from tests.helpers import BACKENDS, case_of, parametrize_pairs, upstream_of
from tests.hopper import logits_dtypes_on_a_gpu
from tests.interpreted_bfloat16 import fix_interpreter

# Kernels run on CPU tensors only under the interpreter. On a GPU other tests use these dtypes.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates a GPU on a machine that has none")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Limits of errors against float64, relative to the norms of gradients. With few tokens the largest rounding errors may
# add up.
LIMIT = {BF16: 5e-3, F16: 6e-4}
SHAPE: dict[str, Any] = {"leading": (2, 5), "hidden": 32, "vocab": 333}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"class_weight": True, "token_weight": True, "z_loss": 0.01, "ignored": 0.3},
    "softcap": {"softcap": 5.0, "temperature": 0.7, "logit_scale": 0.8},
    "smoothing": {"label_smoothing": 0.2, "class_weight": True, "logit_scale": 0.5},
    "softcap and smoothing": {"softcap": 5.0, "label_smoothing": 0.2},
    "bias": {"bias": True, "ignored": 0.3},
    "adapters": {"adapter_ranks": (4, 8)},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
}
KEEP_IGNORED = flce.ChunkOptions(skip_ignored=False)
FROM_CASE: dict[type[Schedule], Any] = {
    kind: lambda c, kind=kind: kind.from_size(c, 6)
    for kind in (Chunks, DeferredChunks, Unnormalized, Recomputed, ChunksOfBlocks, SeparatePasses)
} | {kind: lambda c, kind=kind: kind.from_size(c, 128) for kind in (Blocks, BlocksAroundSum)}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the dtypes of a GPU, blocks of several classes and tokens, and bfloat16 rounded to nearest."""
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    monkeypatch.setattr(case, "BLOCK_BYTES", 4 * 4 * 128)
    monkeypatch.setattr(case, "SINGLE_PRODUCT_BYTES", 0)
    monkeypatch.setattr(case, "OVERLAPPING_BYTES", 0)
    monkeypatch.setattr("flce.engine.pass_context.BLOCK_ROWS", 4)
    fix_interpreter(monkeypatch)
    search.plan_for_case.cache_clear()
    yield
    search.plan_for_case.cache_clear()


def record_tiles(monkeypatch: pytest.MonkeyPatch, describe: Callable[[Tensor, slice, Tensor], Any]) -> list[Any]:
    """Return a list that receives ``describe(input rows, classes, tile)`` of each tile of logits that is written."""
    records: list[Any] = []

    def write_logits(
        self: PassContext, xs: Sequence[Tensor], classes: slice, out: Tensor, do: Any = PassContext.write_logits
    ) -> None:
        records.append(describe(xs[0], classes, out))
        do(self, xs, classes, out)

    monkeypatch.setattr(PassContext, "write_logits", write_logits)
    return records


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Return the list of dtypes of the tiles that logits are written to."""
    return record_tiles(monkeypatch, lambda x, classes, out: out.dtype)


@parametrize_pairs(
    shape=[(9, 2048, 273), (14, 1023, 167), (14, 511, 10), (300, 15, 8353)],
    reduction=["mean", "none"],
    dtype=[BF16, F16],
    backend=BACKENDS,
)
def test_small_calls_compute_logits_twice_by_the_same_products(
    shape: tuple[int, int, int], reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Products of other shapes sum in another order. For logits of 5,000 this changes a probability by a thousandth."""
    monkeypatch.undo()
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    fix_interpreter(monkeypatch)
    shapes = record_tiles(monkeypatch, lambda x, part, out: (x.shape, part.start, part.stop, out.shape, out.stride()))
    tokens, hidden, vocab = shape
    problem = make_problem((tokens,), hidden, vocab, dtype=dtype, reduction=reduction)
    run_fused(problem, options=replace(KEEP_IGNORED, strategy="vocab"), grad_output=upstream_of(problem))
    assert len(shapes) == 2
    assert len(set(shapes)) == 1


def forced(monkeypatch: pytest.MonkeyPatch, kind: type[Schedule]) -> list[Any]:
    """Force a schedule for all calls, which must allow it."""

    def choose(c: Case) -> Schedule:
        assert kind.sizes(c)
        return FROM_CASE[kind](c)

    return force(monkeypatch, choose)


def possible(problem: Problem, options: flce.ChunkOptions = KEEP_IGNORED) -> list[tuple[type[Schedule], str]]:
    """Return the schedules that a call allows, with the gradients to request from each."""
    pairs = [(kind, "x" if kind is ChunksOfBlocks else ALL_GRADS) for kind in FROM_CASE]
    return [(kind, grads) for kind, grads in pairs if kind.sizes(case_of(problem, options, grads))]


def errors(problem: Problem, grads: str, scale: float = 1.0, **kwargs: Any) -> dict[str, float]:
    upstream = upstream_of(problem) * scale
    mine = run_fused(problem, grads=grads, grad_output=upstream, **kwargs)
    exact = run_oracle(problem, upstream)
    compared: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "loss": (mine.loss, exact.loss),
        "dx": (mine.grad_input, exact.grad_input),
    }
    compared |= {"dw": (mine.grad_weight, exact.grad_weight), "db": (mine.grad_bias, exact.grad_bias)}
    compared["dt"] = mine.grad_token_weight, exact.grad_token_weight
    for k, (a, b) in enumerate(zip(mine.grad_adapters, exact.grad_adapters, strict=False)):
        compared |= {f"a{k}": (a[0], b[0]), f"b{k}": (a[1], b[1])}
    return {name: relative_error(a, b) for name, (a, b) in compared.items() if a is not None and b is not None}


def test_every_schedule_is_here(triton_backend: str) -> None:
    assert {kind for kind in SCHEDULES if not kind.samples} == set(FROM_CASE) | {Statistics, Borrowed}
    problems = [make_problem(**SHAPE, dtype=dtype, **kwargs) for dtype in (BF16, F16) for kwargs in OPTIONS.values()]
    assert {kind for problem in problems for kind, _ in possible(problem)} == set(FROM_CASE)


# float16 uses the same code, so half of the options are enough; tests/search draws more calls with Triton's backend.
@pytest.mark.parametrize(
    "backend, dtype, options",
    [
        *(("torch", BF16, name) for name in OPTIONS),
        *(("torch", F16, name) for name in list(OPTIONS)[::2]),
        *(("triton", BF16, name) for name in ("weights", "smoothing", "none")),
        ("triton", F16, "softcap and smoothing"),
    ],
    indirect=["backend"],
)
def test_errors(
    dtype: torch.dtype, options: str, written: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Errors are within the documented limits in every schedule that the call allows. No logits are rounded."""
    problem, chunking = make_problem(**SHAPE, dtype=dtype, **OPTIONS[options]), KEEP_IGNORED
    # Gradients of bfloat16 calls overwrite the logits of tiles of up to 10 x 128 classes.
    monkeypatch.setattr(case, "OVERLAPPING_BYTES", 4 * 10 * 128 if dtype == BF16 else 0)
    if options == "weights":
        chunking = replace(chunking, skip_ignored=True)
    too_large = {}
    for kind, grads in possible(problem, chunking):
        plans = forced(monkeypatch, kind)
        found = errors(problem, grads, options=chunking)
        assert {type(plan.schedule) for plan in plans} <= {kind, DeferredChunks}
        too_large[kind.__name__] = {
            name: e for name, e in found.items() if not e <= (5e-6 if name == "loss" else LIMIT[dtype])
        }
        plans.clear()
    assert len(too_large) >= 3
    assert set(written) == {F32}
    assert {kind: errors for kind, errors in too_large.items() if errors} == {}


@pytest.mark.parametrize("kind", [Blocks, BlocksAroundSum], ids=lambda kind: kind.__name__)
def test_gradients_overwrite_the_logits_of_a_small_tile(
    kind: type[Schedule], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The logits of a small tile are one product, also if the tile is borrowed from dW."""
    monkeypatch.setattr("flce.engine.borrowing.BLOCK_MULTIPLE", 64)
    monkeypatch.setattr(case, "OVERLAPPING_BYTES", 4 * 10 * 128)
    problem = make_problem((10,), 32, 700, dtype=BF16)
    tiles = record_tiles(monkeypatch, lambda x, part, out: (len(x), part.start, part.stop))
    plans = forced(monkeypatch, kind)
    found = errors(problem, "xw", options=KEEP_IGNORED)
    assert {name: e for name, e in found.items() if not e <= (5e-6 if name == "loss" else LIMIT[BF16])} == {}
    schedule: Any = plans[0].schedule
    stop = 700 if kind is Blocks else dx_sum_start(10, 700, torch.float32, BF16)
    borrowed = [(10, block.start, block.stop) for block in schedule.layout.borrowed_blocks(0, stop)]
    assert borrowed
    assert set(borrowed) <= set(tiles)


@pytest.mark.parametrize(
    "backend, options",
    [("torch", name) for name in ("weights", "softcap", "smoothing", "adapters", "none")] + [("triton", "weights")],
    indirect=["backend"],
)
def test_float16_without_a_loss_scale(options: str, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Gradients of logits underflow in float16, gradients of inputs and weights do not: the first two columns of inputs
    and weights are large and change no logit."""

    def add_large_columns(t: Tensor, letter: str) -> Tensor:
        if letter in "bt":
            return t
        changed, large = t.clone(), 0 if letter in "wB" else 1
        changed[..., large], changed[..., 1 - large] = (torch.rand(t.shape[:-1]) - 0.5) * 2.0**16, 0.0
        return changed

    problem = make_problem(**SHAPE, dtype=F16, **OPTIONS[options]).map(add_large_columns)
    chunking, too_large = replace(KEEP_IGNORED, skip_ignored=options == "weights"), {}
    for products in (False, True) if backend == "triton" else (False,):
        for module in ("flce.ops.linear_operators", "tests.helpers"):
            monkeypatch.setattr(f"{module}.has_fused_products", lambda device, products=products: products)
        for kind, grads in possible(problem, chunking):
            forced(monkeypatch, kind)
            found = errors(problem, grads, scale=2.0**-18, options=chunking)
            too_large[kind.__name__, products] = {name: e for name, e in found.items() if not e <= 2 * LIMIT[F16]}
    assert len(too_large) >= 3
    assert {kind: errors for kind, errors in too_large.items() if errors} == {}


@pytest.mark.parametrize("kind", [Chunks, DeferredChunks], ids=lambda kind: kind.__name__)
def test_logits_are_rounded_if_computed_once(
    kind: type[Schedule], written: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    problem = make_problem(**SHAPE, dtype=BF16, reduction="none" if kind is DeferredChunks else "mean")
    forced(monkeypatch, kind)
    errors(problem, ALL_GRADS, options=flce.ChunkOptions(logits_dtype=BF16))
    assert set(written) == {BF16 if kind is Chunks else F32}


def test_rows_whose_largest_logits_come_late(monkeypatch: pytest.MonkeyPatch, triton_backend: str) -> None:
    """Exponentials of the first classes are scaled down, more than once, when later blocks have larger logits."""
    problem = make_problem(**SHAPE, dtype=BF16)
    rising = torch.arange(333)[:, None].div(70, rounding_mode="floor").mul(30.0)
    x = problem.input.clone()
    x[..., 0] = torch.tensor([0.0, 0.3, 1.0, 3.0, -3.0])
    weight = torch.cat((rising.to(BF16), problem.linear_weight[:, 1:]), dim=1)
    problem = replace(problem, input=x, linear_weight=weight)
    forced(monkeypatch, Unnormalized)
    found = errors(problem, "xw")
    assert {name: error for name, error in found.items() if not error <= LIMIT[BF16]} == {}


@pytest.mark.parametrize("kind", [Unnormalized, Chunks], ids=lambda kind: kind.__name__)
def test_masked_classes(kind: type[Schedule], monkeypatch: pytest.MonkeyPatch, triton_backend: str) -> None:
    """All logits of the first block and of the last block are -inf."""
    problem = make_problem(**SHAPE, dtype=BF16)
    weight, x = problem.linear_weight.clone(), problem.input.clone()
    x[..., 0] = 1.0
    weight[:, 0] = 0.0
    weight[:140, 0] = weight[300:, 0] = -torch.inf
    problem = replace(problem, input=x, linear_weight=weight, target=problem.target.clamp(140, 299))
    forced(monkeypatch, kind)
    mine = run_fused(problem, grads="w")
    exact = run_oracle(problem)
    assert mine.grad_weight is not None
    assert exact.grad_weight is not None
    assert relative_error(mine.loss, exact.loss) < 5e-6
    assert relative_error(mine.grad_weight[:, 1:], exact.grad_weight[:, 1:]) < LIMIT[BF16]
