"""The collectives of a call with a divided head, and plans of its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import flce
from flce.core.shard import shard_bounds
from flce.planning import dry_run
from flce.testing.problem import make_problem
from tests.distributed import split_head

PROCESSES = 4
TOKENS, HIDDEN, VOCAB = (3, 16), 64, 1111
# Keywords of the problem, `ChunkOptions`, and other keywords of the call; the chunks, the numbers that are gathered for
# each token, and the hidden sizes whose gradients are summed over the processes.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int, tuple[int, ...]]] = {
    "plain": ({}, {}, {}, 1, 3, (HIDDEN,)),
    "chunks": ({"reduction": "sum"}, {"chunk_rows": 10}, {}, 5, 3, (HIDDEN,)),
    "statistics": ({"label_smoothing": 0.1}, {"chunk_rows": 9}, {"stats": ("entropy", "correct")}, 6, 6, (HIDDEN,)),
    "none": ({"reduction": "none"}, {}, {}, 1, 3, (HIDDEN,)),
    "blocks": ({}, {"strategy": "vocab"}, {}, 1, 3, (HIDDEN,)),
    "adapters": ({"adapter_ranks": (3, 5)}, {"chunk_rows": 20}, {}, 3, 3, (HIDDEN, 3, 5)),
    "frozen inputs": ({}, {"chunk_rows": 20}, {"input_grad": False}, 3, 3, ()),
    "no gradients": ({}, {"chunk_rows": 20}, {"input_grad": False, "weight_grad": False}, 1, 3, ()),
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    """Count calls and bytes of the collectives of the first of several processes. The others send the same data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counts: Counter[tuple[str, str]] = Counter()

    def record(operation: str, size: int) -> None:
        counts.update({(operation, "calls"): 1, (operation, "bytes"): size})

    def all_gather(out: Tensor, x: Tensor, group: Any) -> None:
        out.view(PROCESSES, -1).copy_(x.expand(PROCESSES, *x.shape))
        if x.dtype != torch.int64:  # with int64 numbers on a CPU, processes compare their arguments
            record("all-gather", out.nbytes)

    def all_reduce(x: Tensor, group: Any, async_op: bool = False) -> split_head.FinishedWork:
        record("all-reduce", x.nbytes)
        return split_head.FinishedWork()

    def reduce_scatter(out: Tensor, x: Tensor, group: Any) -> None:
        record("reduce-scatter", x.nbytes)

    for name, replacement in {
        "all_gather_into_tensor": all_gather,
        "all_gather_single": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "reduce_scatter_single": reduce_scatter,
        "all_reduce": all_reduce,
    }.items():
        monkeypatch.setattr(dist, name, replacement, raising=False)
    monkeypatch.setattr("flce.engine.vectors.can_read_values", lambda device: False)  # All have the classes of rank 0.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield counts
    dist.destroy_process_group()


def call(
    kwargs: dict[str, Any],
    options: dict[str, Any],
    more: dict[str, Any],
    sequence: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    p = make_problem(TOKENS, HIDDEN, VOCAB, dtype=dtype, **kwargs)
    first = slice(*shard_bounds(VOCAB, PROCESSES, 0))

    def share(x: Tensor) -> Tensor:
        return x.chunk(PROCESSES, -2)[0] if sequence else x

    input_grad, weight_grad = more.get("input_grad", True), more.get("weight_grad", True)
    result: Any = flce.fused_linear_cross_entropy(
        share(p.input).detach().requires_grad_(input_grad),
        p.linear_weight[first].detach().requires_grad_(weight_grad),
        p.target,
        adapters=[(share(a).detach().requires_grad_(), b[first].detach().requires_grad_()) for a, b in p.adapters],
        stats=more.get("stats", ()),
        options=flce.ChunkOptions(**options),
        process_group=dist.group.WORLD,
        vocab_size=VOCAB,
        sequence_parallel=sequence,
        **p.kwargs,
    )
    loss = result.loss if "stats" in more else result
    if loss.requires_grad:
        loss.sum().backward()


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", list(CASES))
def test_collectives_of_a_call(name: str, sequence: bool, sent: Counter[tuple[str, str]]) -> None:
    """A call gathers statistics once for each chunk. It sums the gradients of inputs, of each chunk or of all."""
    kwargs, options, more, chunks, numbers, summed_sizes = CASES[name]
    call(kwargs, options, more, sequence)
    tokens, sizes = 48, (HIDDEN, *kwargs.get("adapter_ranks", ()))
    gathered = [PROCESSES * (numbers * tokens + chunks), *([tokens * size for size in sizes] if sequence else ())]
    assert sent["all-gather", "bytes"] == 4 * sum(gathered)
    assert sent["all-gather", "calls"] == chunks + (len(sizes) if sequence else 0)
    assert sent["reduce-scatter" if sequence else "all-reduce", "bytes"] == 4 * tokens * sum(summed_sizes)
    assert sent["all-reduce" if sequence else "reduce-scatter", "calls"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hopper", [False, True], ids=["", "hopper"])
def test_as_on_a_gpu(hopper: bool, dtype: torch.dtype, sent: Counter[tuple[str, str]]) -> None:
    """Calls with exponentials, and with float16 gradients that are float32 until they are scaled."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a test on CPU tensors: Triton runs on them only under the interpreter")
    if hopper and dtype == torch.float16:
        pytest.skip("the replacement of Hopper's products is for bfloat16")
    with split_head.as_on_a_gpu(hopper):
        call({}, {"chunk_rows": 16, "skip_ignored": False}, {}, False, dtype=dtype)
    assert sent["all-gather", "bytes"] == 4 * PROCESSES * (3 * 48 + sent["all-gather", "calls"])
    itemsize = 4 if dtype == torch.float16 else 2
    assert sent["all-reduce", "bytes"] == 48 * HIDDEN * itemsize


def test_memory() -> None:
    """A plan is for the process with most classes."""
    for vocab in 128256, 128250:
        plan = flce.plan(8192, 4096, vocab, torch.bfloat16, device_kind="H200", shards=8)
        assert plan.case.vocab_size == 16032
        assert "V=16032 of each of 8 processes" in str(plan)
    # With a thousand processes the workspace includes the gathered numbers and the results of merging them.
    many = flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200", shards=1024)
    alone = flce.plan(8192, 4096, many.case.vocab_size, torch.bfloat16, device_kind="H200")
    assert many.workspace_bytes - alone.workspace_bytes > 1024 * (3 * 8192 + 1)


def list_collectives(plan: flce.ChunkPlan) -> list[tuple[Any, ...]]:
    """Return the collectives of all tiles of a plan, with their operands, in a dry run."""
    found: list[tuple[Any, ...]] = []

    class Shard(dry_run.CountingShard):
        def merge_results(self, tokens: slice) -> None:
            found.append(("statistics", tokens.start, tokens.stop))

        def start_dx_sum(self, term: int, dx: Tensor) -> None:
            found.append(("dX", term, dx.shape, dx.dtype))

        def finish_dx_sum(self, term: int, dx: Tensor) -> None:
            if not any(each[:2] == ("dX", term) for each in found):
                self.start_dx_sum(term, dx)

    def all_slices(start: int, stop: int, step: int) -> Iterator[tuple[slice, float]]:
        return ((slice(first, min(first + step, stop)), 1.0) for first in range(start, stop, step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "CountingShard", Shard)
        patch.setattr(dry_run, "_sample_equal_slices", all_slices)
        dry_run.count_costs(plan)
    return found


def test_processes_with_fewer_classes_call_the_same_collectives() -> None:
    """This holds even if their own plan would differ: because they have few logits, or because their smaller gradients
    leave less of a budget."""
    few = 4096, 8192, 2 * 32768 + 2  # logits of 32,768 classes have 512 MiB, logits of 32,769 classes more
    cases: list[tuple[Any, ...]] = [(*few, torch.bfloat16, {"adapter_ranks": (8,)}, {})]
    cases += [(8192, 4096, 128256, torch.bfloat16, {}, {})]
    cases += [(33, 33, 3, torch.float32, {"bias_grad": True}, {"max_workspace_bytes": 16000})]
    cases += [(2048, 512, 2 * 2048, torch.bfloat16, {}, {"max_workspace_bytes": size << 20}) for size in (8, 10, 30)]
    schedules = set()
    for tokens, hidden, vocab, dtype, call, options in cases:
        device: dict[str, Any] = {"device": "cpu"} if dtype == torch.float32 else {"device_kind": "H200"}
        chosen = flce.ChunkOptions(**options)
        plan = flce.plan(tokens, hidden, vocab, dtype, shards=2, options=chosen, **device, **call)
        most = plan.case.vocab_size
        for fewer in {1, 2, most // 2, most - 1}:
            other = flce.ChunkPlan(replace(plan.case, vocab_size=fewer), plan.strategy, plan.schedule)
            schedules.add(type(plan.schedule).__name__)
            assert list_collectives(other) == list_collectives(plan), (plan, other)
    assert schedules >= {"Chunks", "Unnormalized", "Borrowed"}


@pytest.mark.parametrize(
    "shards, sequence, error, message",
    [
        (0, False, ValueError, "shards must be positive, got 0"),
        (2.5, False, TypeError, "shards must be None or an int"),
        (8, 1, TypeError, "sequence_parallel must be a bool, got int"),
        (None, True, ValueError, "sequence_parallel=True needs shards"),
        (5, True, ValueError, "must be a multiple of shards=5.*, got 64"),
    ],
)
def test_wrong_arguments(shards: Any, sequence: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flce.plan(64, 32, 500, torch.float32, device="cpu", shards=shards, sequence_parallel=sequence)
    plan = flce.plan(64, 32, 500, torch.float32, device="cpu", shards=2, sequence_parallel=True)
    assert plan.case.num_processes == 2
