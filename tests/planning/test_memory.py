"""What a schedule takes: the count of its own code on meta tensors, and real memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flce
from flce.backends import contract, eager
from flce.backends.contract import RowOutputs
from flce.core.device_record import CPU
from flce.core.problem import LossSpec
from flce.engine import schedules
from flce.engine.arena import CountingArena
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.passes import Plan, Runtime
from flce.engine.schedules import SCHEDULES, Schedule
from flce.engine.schedules.chunks import Chunks, DeferredChunks
from flce.engine.schedules.schedule import NO_SIZES, sizes_up_to
from flce.engine.schedules.unnormalized import Recomputed, Unnormalized
from flce.engine.sums import InputSum
from flce.planning import dry_run, search
from flce.testing.problem import make_problem
from tests.helpers import check
from tests.hopper import case_on_hopper
from tests.planning.test_plan import plan_on_h200

MIB = 1 << 20


# ---------------------------------------------------------------------------------------------------------
# Counted and real


class NoBackend:
    """Kernels, which allocate nothing that is not their own."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def reduce(self, p: Any, rows: RowOutputs, scales: None) -> Any:
        return (*rows.losses, None)


def dry_run_passes(c: Case, schedule: Schedule, arena: CountingArena) -> list[Tensor]:
    """Its real code on the memory of an arena, without kernels."""
    backend: Any = NoBackend()
    return dry_run.dry_run_passes(Plan(c, schedule.strategy, schedule), Runtime(backend, arena))


def count(c: Case, schedule: Schedule) -> int:
    return dry_run.count_costs(Plan(c, schedule.strategy, schedule)).workspace_bytes


class RealArena(CountingArena):
    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        return super().new(shape, dtype, zero=True)


class EveryAllocation(TorchDispatchMode):
    """The largest storage that an operator makes, but those of the arena."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):  # the arena's
            for made in tree_leaves(result):
                if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                    self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


GRADS = ("x", "w", "xw", "xwb")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def case_of(dtype: torch.dtype, grads: str, reduction: str = "mean", device_type: str = "cuda", **options: Any) -> Case:
    c = case_on_hopper(50, 64, 1003, grads=grads, dtype=dtype, spec=LossSpec(reduction), **options)
    return c if device_type != "cpu" else replace(c, device_type="cpu", backend="torch", has_product=False, device=CPU)


def sizes_of(kind: type[Schedule], c: Case) -> Iterator[int]:
    """A few, not so small that loops take long."""
    sizes = kind.sizes(c)
    yield from sorted({sizes[len(sizes) // 12], sizes[len(sizes) // 3], sizes[-1]}) if sizes else ()


@pytest.fixture
def memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed, and nothing is counted that kernels and casts take for a moment: real ones take it
    elsewhere."""
    monkeypatch.setattr("flce.core.gemm.matmul", lambda *args, **kwargs: None)
    for name in ("matmul", "scatter_rows"):
        monkeypatch.setattr(PassContext, name, lambda *args, **kwargs: None)
    monkeypatch.setattr("flce.core.gemm.scratch_bytes", lambda *args: 0)
    monkeypatch.setattr(contract, "product_scratch_bytes", lambda *args: 0)
    monkeypatch.setattr(contract, "SORT_ROW_BYTES", 0)
    monkeypatch.setattr(eager, "temporary_bytes", lambda *args: 0)
    monkeypatch.setattr(eager, "SCALING_BYTES", 0)


@pytest.mark.parametrize("skip", [False, True], ids=["all", "skipping"])
@pytest.mark.parametrize("grads", GRADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_count_is_what_a_real_arena_has(
    dtype: torch.dtype, grads: str, skip: bool, memory_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every schedule and some of its sizes. Loops are shortened when counting, here they are whole."""
    monkeypatch.setattr("flce.engine.borrowing.BLOCK_MULTIPLE", 64)
    seen = set()
    for reduction in ("mean", "none"):
        for device_type in ("cuda", "cpu"):
            c = case_of(dtype, grads, reduction, device_type, skip_ignored=skip)
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
    """By the test above."""
    for kind in SCHEDULES:
        cases = [case_of(dtype, grads, r) for dtype in DTYPES for grads in GRADS for r in ("mean", "none")]
        assert any(kind.sizes(c) for c in cases) == (kind.__name__ != "Statistics"), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind.__name__ != "Statistics"])
def test_nothing_is_allocated_beside_the_arena(
    kind: type[Schedule], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Casts are their own.
    monkeypatch.setattr(PassContext, "matmul", lambda self, a, b, out, accumulate=False: None)
    monkeypatch.setattr(PassContext, "add_column_sums", lambda self, x, out: None)
    for reduction in ("mean", "none"):
        for grads in GRADS:
            c = case_of(dtype, grads, reduction)
            for size in sizes_of(kind, c):
                with EveryAllocation() as mode:
                    dry_run_passes(c, kind.from_size(c, size), RealArena("cpu"))
                assert mode.largest <= 8 * 50, (size, grads)


@pytest.mark.parametrize(
    "kind, grads, products, sorted_rows",
    [(DeferredChunks, "x", 2, 0), (Unnormalized, "x", 1, 0), (Unnormalized, "w", 1, 50), (Recomputed, "w", 1, 50)],
)
def test_what_kernels_take_for_a_moment_is_counted(
    kind: type[Schedule], grads: str, products: int, sorted_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products that keep logits in registers, and where the targets are sorted."""
    c = case_of(torch.bfloat16, grads, "none" if kind is DeferredChunks else "mean", skip_ignored=False)
    schedule = kind.from_size(c, 30)
    for of_products, of_row in ((1 << 40, 0), (0, 1 << 40)):  # so much more than all else
        monkeypatch.setattr(contract, "product_scratch_bytes", lambda *args, size=of_products: args[-1] * size)
        monkeypatch.setattr(contract, "SORT_ROW_BYTES", of_row)
        counted = count(c, schedule)
        assert round(counted / 2**40, 3) == (products if of_products else sorted_rows)


def test_gathered_rows_of_exponentials_are_held_once(memory_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scaled where they are. Rows that are not gathered are scaled in a place of that size."""
    monkeypatch.setattr("flce.engine.sums.COMPACTION_ROWS", 8)  # or else the last rounding would take the most

    def taken(skip: bool) -> int:
        c = replace(case_of(torch.bfloat16, "w", skip_ignored=skip), hidden_sizes=(1024,))
        return count(c, Unnormalized(20))

    assert taken(True) - taken(False) <= 50 * 64  # vectors; 20 rows are 40 KiB


def test_flops_of_shortened_loops() -> None:
    """They are those of the whole loops."""
    for kind in ("training", "frozen", "none"):
        for mib in (None, 64, 128, 512):
            made = plan_on_h200((8192, 4096, 128256), kind, max_workspace_bytes=None if mib is None else mib * MIB)
            products = made.flops / (2 * 8192 * 4096 * 128256)
            least = {"training": 3, "frozen": 2, "none": 4}[kind]
            assert products >= least * (1 - 1e-9)
            assert abs(products * 4 - round(products * 4)) < 1e-9 or "BlocksAroundSum" in str(made)


# ---------------------------------------------------------------------------------------------------------
# A new schedule


@dataclass(frozen=True)
class InBlocks(Schedule):
    """For a frozen head: statistics of a chunk block by block, and its gradient right after them."""

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
        sums = [InputSum(s, k, self.rows, self.cols) for k in s.dx_terms]
        for part in s.chunks(self.rows):
            size = part.stop - part.start
            s.compute_statistics(s.term_inputs(part), part, tile[:size])
            for cols in s.blocks(self.cols):
                dlogits = tile[:size, : cols.stop - cols.start]
                s.compute_gradient(s.term_inputs(part), part, cols, dlogits)
                for total in sums:
                    total.add(dlogits, part, cols)


def test_a_schedule_with_the_strategy_vocab_is_deferred() -> None:
    """`LinearCall.has_forward_gradients`, which a traced graph depends on, says so of every one."""
    with pytest.raises(TypeError, match="Hasty must be deferred"):

        class Hasty(Schedule):
            strategy = "vocab"


def test_no_schedule_that_knows_no_upstream_gradient_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its `sizes` say."""

    class Wrong(Chunks):
        @classmethod
        def sizes(cls, c: Case) -> range:
            return sizes_up_to(c.num_tokens)

    monkeypatch.setattr(search, "SCHEDULES", (Wrong, *SCHEDULES))
    c = case_of(torch.float32, "xw", "none", max_workspace_bytes=1 << 20)
    assert next(kind for kind, _ in search._allowed_schedules(c)) is not Wrong
    assert next(kind for kind, _ in search._allowed_schedules(replace(c, spec=LossSpec()))) is Wrong


def test_a_new_schedule_is_a_class_and_a_line_in_the_list(monkeypatch: pytest.MonkeyPatch, torch_backend: str) -> None:
    monkeypatch.setattr(search, "SCHEDULES", (InBlocks, *SCHEDULES))
    search.plan_for_case.cache_clear()
    problem = make_problem(leading=(61,), hidden=16, vocab=3001, dtype=torch.float32, ignored=0.2)
    for budget, kind in ((14 << 10, InBlocks), (40 << 10, Chunks)):
        options = flce.ChunkOptions(max_workspace_bytes=budget)
        made = flce.plan(61, 16, 3001, torch.float32, device="cpu", weight_grad=False, options=options)
        assert isinstance(made.schedule, kind)
        assert made.workspace_bytes <= budget
        check(problem, options=options, grads="x", grad_output=1.7)
    search.plan_for_case.cache_clear()
    assert schedules.SCHEDULES is SCHEDULES
