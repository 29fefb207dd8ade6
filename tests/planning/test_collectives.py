"""The collectives that a plan lists are the collectives of the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import flce
from flce.core.shard import HeadSharding, shard_bounds
from flce.planning.collectives import Collective, sharding_from_arguments
from flce.planning.search import plan_for_shard
from flce.testing.problem import make_problem
from tests.distributed import split_head

PROCESSES = 4
TOKENS, HIDDEN, VOCAB = (3, 16), 64, 1111
# Keywords of the problem, `ChunkOptions`, and more keywords of the plan.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "chunks": ({"reduction": "sum"}, {"chunk_rows": 10}, {}),
    "statistics": ({"label_smoothing": 0.1}, {"chunk_rows": 9}, {"stats": ("entropy", "correct")}),
    "none": ({"reduction": "none"}, {}, {}),
    "blocks": ({}, {"strategy": "vocab"}, {}),
    "adapters": ({"adapter_ranks": (3, 5)}, {"chunk_rows": 20}, {}),
    "frozen inputs": ({}, {"chunk_rows": 20}, {"input_grad": False}),
    "no gradients": ({}, {"chunk_rows": 20}, {"input_grad": False, "weight_grad": False}),
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
    monkeypatch.setattr("flce.ops.vocabulary_parallel.refuse_equal_shards", lambda *args: None)
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


def planned(plan: flce.ChunkPlan) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for collective in plan.collectives:
        operation = collective.operation
        counts.update({(operation, "calls"): collective.calls, (operation, "bytes"): collective.bytes})
    return counts


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_plan_lists_the_collectives_of_a_call(name: str, sequence: bool, sent: Counter[tuple[str, str]]) -> None:
    kwargs, options, more = CASES[name]
    call(kwargs, options, more, sequence)
    loss = {key: value for key, value in kwargs.items() if key in ("reduction", "label_smoothing")}
    plan = flce.plan(
        48, HIDDEN, VOCAB, torch.float32, device="cpu", shards=PROCESSES, sequence_parallel=sequence,
        adapter_ranks=kwargs.get("adapter_ranks", ()), options=flce.ChunkOptions(**options), **loss, **more,
    )  # fmt: skip
    assert planned(plan) == sent
    assert "V=278 of each of 4 processes" in str(plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hopper", [False, True], ids=["", "hopper"])
def test_as_on_a_gpu(hopper: bool, dtype: torch.dtype, sent: Counter[tuple[str, str]]) -> None:
    """Calls with exponentials, and with float16 gradients that are float32 until they are scaled."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a test on CPU tensors: Triton runs on them only under the interpreter")
    if hopper and dtype == torch.float16:
        pytest.skip("the replacement of Hopper's products is for bfloat16")
    with split_head.as_on_a_gpu(hopper) as plans:
        call({}, {"chunk_rows": 16, "skip_ignored": False}, {}, False, dtype=dtype)
    assert planned(plans[0]) == sent
    itemsize = 4 if dtype == torch.float16 else 2
    assert sent["all-reduce", "bytes"] == 48 * HIDDEN * itemsize


def test_figures() -> None:
    """The head of Llama 3 on eight GPUs has these collectives."""
    plan = flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200", shards=8)
    statistics, gradient = plan.collectives
    assert plan.case.vocab_size == 16032
    assert str(statistics) == "1 all-gather of 3 numbers a token (0.8 MiB)"
    assert str(gradient) == "1 all-reduce of gradients of inputs (64.0 MiB)"
    assert (statistics.bytes, gradient.bytes) == (8 * (3 * 8192 + 1) * 4, 8192 * 4096 * 2)
    assert gradient.sent_bytes(8) == 2 * 7 * gradient.bytes // 8
    assert str(gradient) in str(plan)
    assert flce.plan(8192, 4096, 16032, torch.bfloat16, device_kind="H200").collectives == ()
    # With a thousand processes the workspace includes the gathered numbers and the results of merging them.
    many = flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200", shards=1024)
    alone = flce.plan(8192, 4096, many.case.vocab_size, torch.bfloat16, device_kind="H200")
    assert many.workspace_bytes - alone.workspace_bytes > many.collectives[0].bytes // 4
    assert Collective("all-gather", "x", 2, 80).sent_bytes(4) == 60
    fewer = flce.plan(8192, 4096, 128250, torch.bfloat16, device_kind="H200", shards=8)
    assert fewer.case.vocab_size == 16032


def test_processes_with_fewer_classes_send_the_same() -> None:
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
            other = plan_for_shard(plan, fewer)
            schedules.add(type(plan.schedule).__name__)
            assert other.collectives == plan.collectives, (plan, other)
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
    assert sharding_from_arguments(2, True, 64) == HeadSharding(2, True)
