"""Memory of schedules: dry runs on meta tensors count the memory that a call with real tensors allocates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flce
from flce.backends import contract, eager, sampling
from flce.backends.contract import RowOutputs
from flce.backends.sampling import SEED_BYTES
from flce.core.devices import CPU
from flce.core.problem import LossSpec
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.passes import Plan, Runtime
from flce.engine.schedules.gradients import Chunks, DeferredChunks
from flce.engine.schedules.schedule import NO_SIZES, Schedule, sizes_up_to
from flce.engine.schedules.unnormalized import Recomputed, Unnormalized
from flce.engine.sums import DxSum
from flce.planning import dry_run, search
from flce.planning.dry_run import CountingArena
from flce.planning.search import SCHEDULES
from flce.testing.problem import make_problem
from tests.helpers import allpairs, check
from tests.hopper import case_on_hopper

# ---------------------------------------------------------------------------------------------------------
# Counted and real


class NoBackend:
    """A backend whose kernels do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def reduce(self, p: Any, rows: RowOutputs, scales: None) -> Any:
        return rows.loss, rows.z_loss, None


class FullList(PassContext):
    def count_entries(self) -> Callable[[], int | None]:
        """Return the capacity of the list of sampled entries, as a plan counts it."""
        return lambda: len(self.samples.classes)

    def sort_entries(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the results in the arena."""
        return self.new(classes.shape, classes.dtype), self.new(classes.shape, torch.int64)


def dry_run_passes(c: Case, schedule: Schedule, arena: CountingArena) -> list[Tensor]:
    """Run the code of a schedule with the memory of an arena, without kernels."""
    backend: Any = NoBackend()
    return dry_run.dry_run_passes(Plan(c, schedule.strategy, schedule), Runtime(backend, arena, FullList))


def count(c: Case, schedule: Schedule) -> int:
    return dry_run.count_costs(Plan(c, schedule.strategy, schedule)).workspace_bytes


class RealArena(CountingArena):
    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        return super().new(shape, dtype, zero=True)


class EveryAllocation(TorchDispatchMode):
    """A mode that records the largest storage that an operator allocates outside of the arena."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):  # used by the arena
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                    self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


GRADS = ("x", "w", "xw", "xwb")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def case_of(dtype: torch.dtype, grads: str, reduction: str = "mean", device_type: str = "cuda", **options: Any) -> Case:
    c = case_on_hopper(50, 64, 515, grads=grads, dtype=dtype, spec=LossSpec(reduction), **options)
    return (
        c
        if device_type != "cpu"
        else replace(c, device_type="cpu", backend="torch", has_fused_products=False, device=CPU)
    )


def sizes_of(kind: type[Schedule], c: Case) -> Iterator[int]:
    """Yield a few sizes, which are not so small that loops take long."""
    sizes = kind.sizes(c)
    yield from sorted({sizes[len(sizes) // 12], sizes[len(sizes) // 3], sizes[-1]}) if sizes else ()


@pytest.fixture
def memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off computations, and the count of temporary memory of kernels and casts, which they allocate outside of
    the arena."""
    monkeypatch.setattr("flce.core.gemm.matmul", lambda *args, **kwargs: None)
    for name in ("matmul", "scatter_rows"):
        monkeypatch.setattr(PassContext, name, lambda *args, **kwargs: None)
    monkeypatch.setattr("flce.core.gemm.scratch_bytes", lambda *args: 0)
    monkeypatch.setattr(contract, "fused_product_scratch_bytes", lambda *args: 0)
    monkeypatch.setattr(contract, "SORT_ROW_BYTES", 0)
    monkeypatch.setattr(contract, "SLOT_BYTES", 0)
    monkeypatch.setattr(eager, "temporary_bytes", lambda *args: 0)
    monkeypatch.setattr(sampling, "temporary_bytes", lambda *args: 0)
    for name in ("CHOICE_BYTES", "MARK_BYTES", "LIST_BYTES"):
        monkeypatch.setattr(sampling, name, 0)
    monkeypatch.setattr(eager, "SCALING_BYTES", 0)
    monkeypatch.setattr(contract, "sort_scratch_bytes", lambda *args: 0)


OTHER_DTYPES = allpairs({"dtype": [torch.float64, torch.float32, torch.float16], "grads": GRADS, "skip": (False, True)})


@pytest.mark.parametrize(
    "dtype, grads, skip",
    [*itertools.product([torch.bfloat16], GRADS, (False, True)), *(tuple(row.values()) for row in OTHER_DTYPES)],
)
def test_count_is_what_a_real_arena_has(
    dtype: torch.dtype, grads: str, skip: bool, memory_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for every schedule and some of its sizes. Dry runs shorten loops, real passes do not. bfloat16 has
    all schedules."""
    monkeypatch.setattr("flce.engine.borrowing.BLOCK_MULTIPLE", 64)
    seen = set()
    settings = [*itertools.product(("mean", "none"), ("cuda", "cpu"), (False,)), ("mean", "cuda", True)]
    for reduction, device_type, adds in settings:
        for below in (None, 2.0**-12):
            options = {"skip_ignored": skip, "gradient_accumulation_fusion": adds, "sample_below": below}
            c = case_of(dtype, grads, reduction, device_type, **options)
            for kind in SCHEDULES:
                for size in sizes_of(kind, c):
                    schedule = kind.from_size(c, size)
                    arena = RealArena("cpu")
                    held = dry_run_passes(c, schedule, arena)
                    assert count(c, schedule) == arena.peak_bytes - c.returned_bytes, schedule
                    del held
                    assert arena.live_bytes == 0, schedule
                    seen.add(type(schedule).__name__)
    assert {"Blocks", "DeferredChunks"} <= seen
    if dtype == torch.bfloat16 and "b" not in grads:
        assert "Unnormalized" in seen
        assert ({"Borrowed", "Recomputed"} <= seen) == ("w" in grads and not skip)


def test_every_schedule_is_counted() -> None:
    """The test above covers every schedule except `Statistics`."""
    for kind in SCHEDULES:
        settings = itertools.product(DTYPES, GRADS, ("mean", "none"), (None, 2.0**-12))
        cases = [case_of(dtype, grads, r, sample_below=below) for dtype, grads, r, below in settings]
        assert any(kind.sizes(c) for c in cases) == (kind.__name__ != "Statistics"), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind.__name__ != "Statistics"])
def test_nothing_is_allocated_beside_the_arena(
    kind: type[Schedule], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Casts allocate their own memory.
    monkeypatch.setattr(PassContext, "matmul", lambda self, a, b, out, accumulate=False: None)
    monkeypatch.setattr(PassContext, "add_column_sums", lambda self, x, out: None)
    for reduction in ("mean", "none"):
        for grads in GRADS:
            c = case_of(dtype, grads, reduction, sample_below=2.0**-12 if kind.samples else None)
            for size in sizes_of(kind, c):
                with EveryAllocation() as mode:
                    dry_run_passes(c, kind.from_size(c, size), RealArena("cpu"))
                # Sampled gradients: what `write_largest` and `draw_seeds` count.
                assert mode.largest <= (50 * SEED_BYTES if kind.samples else 400), (size, grads)


@pytest.mark.parametrize(
    "kind, grads, products, sorted_rows",
    [(DeferredChunks, "x", 2, 0), (Unnormalized, "x", 1, 0), (Unnormalized, "w", 1, 50), (Recomputed, "w", 1, 50)],
)
def test_momentary_memory_of_kernels_is_counted(
    kind: type[Schedule], grads: str, products: int, sorted_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count includes the scratch memory of fused products and of sorting targets."""
    c = case_of(torch.bfloat16, grads, "none" if kind is DeferredChunks else "mean", skip_ignored=False)
    schedule = kind.from_size(c, 30)
    for product_bytes, row_bytes in ((1 << 40, 0), (0, 1 << 40)):  # much more than all other memory
        monkeypatch.setattr(contract, "fused_product_scratch_bytes", lambda *args, size=product_bytes: args[-1] * size)
        monkeypatch.setattr(contract, "SORT_ROW_BYTES", row_bytes)
        counted = count(c, schedule)
        assert round(counted / 2**40, 3) == (products if product_bytes else sorted_rows)


# ---------------------------------------------------------------------------------------------------------
# A new schedule


@dataclass(frozen=True)
class InBlocks(Schedule):
    """A schedule for a frozen head: statistics of a chunk block by block, then the gradient of the chunk."""

    rows: int
    cols: int

    @classmethod
    def sizes(cls, c: Case) -> range:
        frozen = any(c.needs.inputs) and not any(c.needs.weights) and not c.needs.bias
        return sizes_up_to(c.vocab_size) if frozen and c.spec.reduction != "none" else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> InBlocks:
        return InBlocks(min(c.chunk_rows, 16), size)

    def forward(self, s: PassContext) -> None:
        tile = s.new_gradient_tile(self.rows, self.cols)
        sums = [DxSum(s, k, self.rows, self.cols) for k in s.dx_terms]
        for chunk in s.chunks(self.rows):
            rows = chunk.stop - chunk.start
            s.compute_statistics(chunk, tile.memory[:rows])
            for block in s.split_range(s.all_classes, self.cols):
                dlogits = s.compute_gradient(chunk, block, tile)
                for total in sums:
                    total.add(dlogits, chunk, block)


def test_schedules_with_the_strategy_vocab_are_deferred() -> None:
    """A traced graph depends on `linear_operators.is_deferred`, which assumes deferred gradients for "vocab"."""
    assert all(kind.deferred for kind in SCHEDULES if kind.strategy == "vocab")


def test_reduction_none_excludes_schedules_that_are_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a schedule has no upstream gradient for each token. It is excluded even if its `sizes` allow the case."""

    class Wrong(Chunks):
        @classmethod
        def sizes(cls, c: Case) -> range:
            return sizes_up_to(c.num_tokens)

    monkeypatch.setattr(search, "SCHEDULES", (Wrong, *SCHEDULES))
    c = case_of(torch.float32, "xw", "none", max_workspace_bytes=1 << 20)
    assert next(kind for kind, _ in search._allowed_schedules(c)) is not Wrong
    assert next(kind for kind, _ in search._allowed_schedules(replace(c, spec=LossSpec()))) is Wrong


@pytest.mark.parametrize("adds", [False, True])
def test_default_plan_of_the_torch_backend_is_deferred(adds: bool, torch_backend: str) -> None:
    """Smaller chunks, because logits are float32, are deferred too."""
    options = flce.ChunkOptions(gradient_accumulation_fusion=adds)
    reduction = "mean" if adds else "none"
    sizes: Any = (100_000, 1024, 151_936, torch.bfloat16)
    plan = flce.plan(*sizes, device="cuda", device_kind="H200", reduction=reduction, options=options)
    assert plan.deferred


def test_a_new_schedule_is_a_class_and_a_line_in_the_list(monkeypatch: pytest.MonkeyPatch, torch_backend: str) -> None:
    monkeypatch.setattr(search, "SCHEDULES", (InBlocks, *SCHEDULES))
    search.plan_for_case.cache_clear()
    problem = make_problem(leading=(61,), hidden=16, vocab=3001, dtype=torch.float32, ignored=0.2)
    for budget, kind in ((30 << 9, InBlocks), (40 << 10, Chunks)):
        options = flce.ChunkOptions(max_workspace_bytes=budget)
        plan = flce.plan(61, 16, 3001, torch.float32, device="cpu", weight_grad=False, options=options)
        assert isinstance(plan.schedule, kind)
        assert plan.workspace_bytes <= budget
        check(problem, options=options, grads="x", grad_output=1.7)
    search.plan_for_case.cache_clear()
