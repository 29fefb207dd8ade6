"""``flce.cross_entropy`` of logits that are divided over processes, against the float64 oracle; and its components."""

from __future__ import annotations

import functools
import itertools
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flce
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, StatisticsCall, TileClasses
from flce.backends.formulas import (
    RowStatistics,
    Targets,
    merge_shards,
    results_from_state,
    softmax_minus_target,
    write_empty_state,
    write_results,
)
from flce.core.problem import OUTPUTS, CrossEntropyProblem, LogprobSpec
from flce.core.shard import shard_bounds
from flce.engine.vectors import Arena
from flce.testing.problem import CallResult, run_oracle
from tests import quick_interpreter
from tests.distributed import split_head
from tests.extremes import every_extreme, has_softmax
from tests.helpers import BACKENDS, STATS, assert_outcome
from tests.logits import make
from tests.processes import in_processes
from tests.tiles import Rows

if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

CASES = {
    name: {key: value for key, value in case.items() if key not in ("bias", "adapter_ranks")}
    for name, case in split_head.CASES.items()
    if name != "softcap"
}
INPLACE = (False, True)


# ---------------------------------------------------------------------------------------------------------
# Merged states of shards, without processes


@pytest.mark.parametrize("edges", [(0, 37), (0, 1, 2, 36, 37, 37)], ids=str)
def test_merged_states(edges: tuple[int, ...], backend: str, device: torch.device) -> None:
    """Usual rows and extreme rows. If a row has no softmax, only its loss is compared."""
    spec = LogprobSpec("none", label_smoothing=0.1, z_loss=0.1, stats=OUTPUTS)
    logits, target = (t.to(device) for t in every_extreme(37))
    rows = len(target)
    p = replace(make((rows,), class_weight=True, token_weight=True, device=device), input=logits, target=target)
    z, weight = p.input, p.kwargs["weight"]
    problem = CrossEntropyProblem(z, p.target, weight, p.kwargs["token_weight"], None, spec, None)
    inputs = RowInputs(p.target, p.kwargs["token_weight"], weight, None, get_backend(device).loss_scales(problem))
    whole, merged = (RowOutputs.allocate(spec, z.dtype, (rows,), Arena(device).new) for _ in range(2))
    kernels = get_backend(z.device)
    kernels.statistics(
        z, StatisticsCall(inputs, spec, TileClasses(0, 37, 37, accessible_cols=37, keep_logits=True), whole), None
    )
    shards = []
    for start, stop in itertools.pairwise(edges):
        state = torch.full((STATE_SLOTS, rows), 3.0, dtype=torch.float64, device=device)
        if start == stop:
            write_empty_state(state)
        else:
            own, cols = Rows(z, inputs, spec).shard(start, stop), stop - start
            tile = TileClasses(0, cols, cols, accessible_cols=cols, is_shard=True, keep_logits=True)
            own.statistics(kernels, own.logits, tile, state, merged)
        made = results_from_state(state, spec, stop - start, weight[start:stop].sum())
        assert made.argmax is not None
        shards.append(made._replace(argmax=made.argmax + start))  # a class of the shard
    stacked = RowStatistics._make(None if ts[0] is None else torch.stack(ts) for ts in zip(*shards, strict=True))
    widths = torch.tensor([[stop - start] for start, stop in itertools.pairwise(edges)], device=device)
    sums = torch.stack([weight[start:stop].sum() for start, stop in itertools.pairwise(edges)])[:, None]
    owner = torch.searchsorted(torch.tensor(edges, device=device), p.target.clamp(0, 36), right=True) - 1
    call = StatisticsCall(inputs, spec, TileClasses(0, 37, 37, accessible_cols=37), merged)
    write_results(merge_shards(stacked, widths, sums, owner), call, Targets.from_call(call))
    defined = has_softmax(z)
    for name in ("loss", "z_loss", "normalizer", "logprob", "entropy", "argmax", "mean_logit"):
        mine, other = (t if name == "loss" else t[..., defined] for t in (getattr(merged, name), getattr(whole, name)))
        torch.testing.assert_close(mine, other, equal_nan=True, rtol=1e-10, atol=1e-9)
    assert merged.argmax is not None
    assert torch.equal(merged.argmax >= 0, p.target != spec.ignore_index)  # of rows with NaN, too


def test_number_of_labels_without_processes() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, 5]])
    assert flce.global_num_items(labels).item() == 4
    assert flce.global_num_items(labels, shift=1).item() == 2
    assert flce.global_num_items([labels, labels[:1]], ignore_index=2).item() == 7
    assert flce.global_num_items(labels.int(), ignore_index=2**32 + 2).item() == labels.numel()
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("labels", {}, TypeError, "labels must be a Tensor, got str"),
        ([], {}, ValueError, "labels must have at least one tensor"),
        (labels, {"shift": -1}, ValueError, "shift must be >= 0"),
        (labels.float(), {}, TypeError, "labels must be int64 or int32, got torch.float32"),
        (labels, {"ignore_index": None}, TypeError, "ignore_index must be an int, got NoneType"),
        (labels, {"group": "dp"}, TypeError, "process_group must be a torch.distributed.ProcessGroup"),
    ]
    for given, settings, kind, message in wrong:
        with pytest.raises(kind, match=message):
            flce.global_num_items(given, **settings)


# ---------------------------------------------------------------------------------------------------------
# Three processes, and two of them


@functools.cache
def first_two() -> Any:
    return dist.new_group([0, 1])


def one_case(
    kwargs: dict[str, Any], vocab: int, group: Any, inplace: bool, dtype: torch.dtype, give_size: bool
) -> None:
    p = make((3, 4), vocab, dtype, **kwargs)
    rank, size = group.rank(), group.size()
    start, stop = shard_bounds(vocab, size, rank)
    upstream = torch.linspace(0.5, 2.0, 12, dtype=torch.float64).view(3, 4)
    upstream = upstream if kwargs.get("reduction") == "none" else upstream.mean()
    memory = p.input[..., start:stop].contiguous().requires_grad_()
    p = p.map(lambda t, letter: t.clone().requires_grad_() if letter == "t" else t)
    out: Any = flce.cross_entropy(
        memory * 1,
        p.target,
        stats=STATS,
        inplace=inplace,
        process_group=group,
        vocab_size=vocab if give_size else None,
        **p.kwargs,
    )
    out.loss.backward(upstream.to(out.loss.dtype))
    expected = run_oracle(p, grad_output=upstream)
    assert memory.grad is not None
    tolerance = {torch.float64: 1e-10, torch.bfloat16: 1e-2}[dtype]
    if dtype == torch.float64:
        # The columns of the other processes, which this test cannot see, are correct by assumption.
        whole = expected.grad_input.clone()
        whole[..., start:stop] = memory.grad
        of_weights = None if p.token_weight is None else p.token_weight.grad
        outcome = CallResult(out.loss.detach(), whole, None, None, output=out, grad_token_weight=of_weights)
        assert_outcome(outcome, expected, p, tolerance=tolerance, grads="xt", stats=STATS)
    torch.testing.assert_close(memory.grad.double(), expected.grad_input[..., start:stop], rtol=tolerance, atol=1e-3)


@in_processes(3)
def test_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    p = make((3, 4), 37, label_smoothing=0.1, class_weight=True)
    expected = run_oracle(p)
    for inplace in INPLACE:
        for target in (p.target, distribute_tensor(p.target, mesh, [Replicate()])):
            x = distribute_tensor(p.input, mesh, [Shard(2)]).requires_grad_()
            logits = x * 1
            loss: Any = flce.cross_entropy(logits, target, inplace=inplace, **p.kwargs)
            assert type(loss) is Tensor
            loss.backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(loss.detach(), expected.loss)
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad_input)
    with pytest.raises(RuntimeError, match="leaf"):
        flce.cross_entropy(x, p.target, inplace=True)
    logits = x * 1
    squares = logits.square().sum()
    loss = flce.cross_entropy(logits, p.target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    whole = distribute_tensor(p.input, mesh, [Replicate()])
    loss = flce.cross_entropy(whole, p.target, **p.kwargs)
    torch.testing.assert_close(loss, expected.loss)
    with pytest.raises(ValueError, match="placements"):
        flce.cross_entropy(distribute_tensor(p.input, mesh, [Shard(0)]), p.target)
    with pytest.raises(ValueError, match="process_group"):
        flce.cross_entropy(x, p.target, process_group=dist.group.WORLD)


@in_processes(3)
def test_bad_input() -> None:
    world, pair, rank = dist.group.WORLD, first_two(), dist.get_rank()
    p = make((3,), 7)
    with pytest.raises(ValueError, match=rf"rank {rank} of 3 must have logits of {1 if rank == 2 else 3} classes"):
        flce.cross_entropy(p.input[:, :2], p.target, process_group=world, vocab_size=7)
    if rank == 2:
        with pytest.raises(ValueError, match="process_group must contain this process"):
            flce.cross_entropy(p.input, p.target, process_group=pair)
    start, stop = shard_bounds(7, 3, rank)
    target = torch.tensor([0, 7, 3])
    with pytest.raises(IndexError, match=r"7 at position 1.*target < 7"):
        flce.cross_entropy(p.input[:, start:stop], target, process_group=world, vocab_size=7)
    even = make((3,), 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flce.engine.vectors.can_read_values", lambda device: False)  # as on a GPU
        own = even.input[:, 2 * rank : 2 * rank + 2]
        loss = flce.cross_entropy(own, torch.tensor([0, 6, 3]), process_group=world, vocab_size=6, reduction="none")
        assert torch.as_tensor(loss).isnan().tolist() == [False, True, False]
    # 3, 3 and 1 classes without vocab_size: an error in all processes, for any range of targets.
    for target in (torch.tensor([0, 1, 2]), torch.tensor([0, 6, 3])):
        with pytest.raises(ValueError, match=r"logits of \[3, 3, 1\] classes"):
            flce.cross_entropy(p.input[:, start:stop], target, process_group=world)
    for inplace in INPLACE:
        with pytest.raises(ValueError, match="ranks 0 and 1 of the group were given equal shards of logits"):
            flce.cross_entropy(p.input.clone().requires_grad_() * 1, p.target, inplace=inplace, process_group=world)
    constant = p.input[:, :1].expand(3, 4)  # as with a head of zeros
    loss = flce.cross_entropy(constant, p.target, process_group=world, reduction="sum")
    torch.testing.assert_close(loss, torch.tensor(3 * math.log(12), dtype=torch.float64))
    x = p.input[:0, start:stop].clone().requires_grad_()
    loss = flce.cross_entropy(x, p.target[:0], process_group=world, vocab_size=7, reduction="sum")
    assert isinstance(loss, Tensor)
    loss.backward()
    assert float(loss) == 0
    assert x.grad is not None


@pytest.mark.parametrize("inplace", INPLACE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
@in_processes(3)
def test_three_processes(name: str, backend: str, inplace: bool) -> None:
    """Compare one of CASES with the oracle, in three processes and in two of them."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("a test on CPU tensors: Triton runs on them only under the interpreter")
        quick_interpreter.speed_up_interpreter()
    os.environ["FLCE_BACKEND"] = backend
    world, pair = dist.group.WORLD, first_two()
    # 37: 13, 13, 11 classes; 4: 2, 2 and none.
    for vocab, group in ((37, world), (37, pair), (4, world))[: 3 if backend == "torch" else 1]:
        if dist.get_rank() < 2 or group is world:
            one_case(CASES[name], vocab, group, inplace, torch.float64, give_size=True)
    if name == "plain":
        one_case({}, 36, world, inplace, torch.bfloat16, give_size=False)


@pytest.mark.parametrize("logprob", [-1e-9, -0.5, -2.0, -40.0])
@pytest.mark.parametrize("softmax, target", [(1.5, 1.5), (1.5, 1.25), (1e-4, 0.0)])
def test_the_gradient_at_the_target_does_not_cancel(logprob: float, softmax: float, target: float) -> None:
    found = softmax_minus_target(*torch.tensor([softmax, target, logprob]))
    torch.testing.assert_close(found, torch.tensor(softmax * math.exp(logprob) - target), rtol=1e-6, atol=0.0)
