"""What a schedule takes, counted: its own code on meta tensors, whose storages are counted while they live."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flce
from flce import engine, rows, stage, sums
from flce.chunk_plan import ChunkPlan
from flce.problem import LinearCrossEntropyProblem, LinearTerm
from flce.schedules import schedule_of, unnormalized
from flce.selection import Selection
from tests.test_plan import plan_on_h200

MIB = 1 << 20


class Counted(TorchDispatchMode):
    """Bytes of the storages that operations have made: how many there are, and were at most."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(t.untyped_storage() for t in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]:
            if storage not in self._seen:
                self._seen.add(storage)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.alive -= size


class NoBackend:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def counted(plan: ChunkPlan, monkeypatch: pytest.MonkeyPatch) -> int:
    """Above the inputs and the gradients that are returned."""
    monkeypatch.setattr(stage, "get_backend", lambda device: NoBackend())
    for module in (stage, sums, unnormalized):
        monkeypatch.setattr(module, "matmul", lambda *args, **kwargs: None)
    n, v = plan.num_tokens, plan.vocab_size

    def new(*shape: int, dtype: torch.dtype = plan.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    terms = tuple(LinearTerm(new(n, h), new(v, h)) for h in plan.hidden_sizes)
    target = new(n, dtype=torch.int64)
    p = LinearCrossEntropyProblem(terms, target, None, None, None, None, plan.spec, plan.needs)
    known = (target, *(t for term in terms for t in (term.input, term.weight)))
    schedule, dtypes, selection = schedule_of(plan), engine._dtypes(plan), Selection(p, None)

    def bytes_of(grads: list[Tensor]) -> int:
        return sum(grad.numel() * grad.element_size() for grad in grads)

    with Counted(*known) as forward:
        out = rows.allocate(p, n)
        at_work = stage.Stage(p, dtypes, selection, None, out.normalizer, out, None, plan.fused_product)
        schedule.forward(at_work)
        returned = bytes_of(at_work.gradients()) if plan.needs.any and not schedule.deferred else 0
    if not schedule.deferred:
        return forward.peak - returned
    normalizer = out.normalizer
    with Counted(*known, normalizer) as backward:
        at_work = stage.Stage(p, dtypes, selection, None, normalizer, None, None, plan.fused_product)
        schedule.backward(at_work)
        returned = bytes_of(at_work.gradients())
    return max(forward.peak, backward.peak) - returned


SHAPES = [(4096, 4096, 128256), (8192, 4096, 128256), (16384, 1024, 151936), (32768, 2304, 256000)]
CASES = [(shape, mib) for shape in SHAPES for mib in (None, 64, 256, 592, 1024)] + [((131072, 4096, 128256), 32)]


@pytest.mark.parametrize("kind", ["training", "frozen", "none"])
@pytest.mark.parametrize("shape, mib", CASES, ids=str)
def test_workspace_of_a_plan(
    shape: tuple[int, int, int], mib: int | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors and partial results of kernels, which are not counted, are less than 2.5% and 2 MiB."""
    plan = plan_on_h200(shape, kind, max_workspace_bytes=None if mib is None else mib * MIB)
    taken = counted(plan, monkeypatch)
    assert taken <= plan.workspace_bytes
    assert taken >= 0.975 * plan.workspace_bytes - 2 * MIB


def test_every_schedule_is_counted() -> None:
    """By the test above."""
    kinds = {
        type(schedule_of(plan_on_h200(shape, kind, max_workspace_bytes=None if mib is None else mib * MIB))).__name__
        for shape, mib in CASES
        for kind in ("training", "frozen", "none")
    }
    assert kinds >= {"Unnormalized", "Borrowed", "Recomputed", "Blocks", "BlocksAroundSum", "Apart"}


def test_a_slice_keeps_its_memory() -> None:
    with Counted() as count:
        whole = torch.empty(10, 100, device="meta")
        part = whole[3:4]
        del whole
        assert count.alive == 4000
        del part
        assert count.alive == 0
    assert count.peak == 4000


def test_a_longer_loop_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks give back what they take."""
    options = flce.ChunkOptions(chunk_rows=2048, strategy="tokens")
    taken = [counted(plan_on_h200((n, 1024, 151936), "frozen", **vars(options)), monkeypatch) for n in (4096, 65536)]
    vectors = (65536 - 4096) * 32
    assert taken[1] - taken[0] <= vectors
