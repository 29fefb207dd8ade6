"""PyTorch features of the custom operators. test_torch_features.py tests the features that all functions share."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import flce
from flce.backends import get_backend
from flce.core.problem import LossSpec
from flce.engine import passes
from flce.ops import linear_cross_entropy
from flce.testing.problem import ALL_GRADS, make_problem, run_fused
from flce.torch_ops import from_json, to_json
from tests.helpers import REDUCTIONS, STATS, STRATEGIES, count_flops, parametrize_pairs, plan_for, python_calls


def fused(x: Tensor, w: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    loss = flce.fused_linear_cross_entropy(x, w, y, **kwargs)
    assert isinstance(loss, Tensor)
    return loss


# ---------------------------------------------------------------------------------------------------------
# torch.library


@pytest.mark.parametrize(
    "record",
    [
        LossSpec("sum", 2**63 - 1, 0.1, 1 / 3, -1e-300, 1e300, 5e-324, ("lse", "entropy")),
        LossSpec("none", -(2**63), stats=("correct",)),
        flce.ChunkOptions(7, 2**70, "vocab", torch.bfloat16, torch.float64, True),
        flce.ChunkOptions(strategy="tokens", logits_dtype=torch.float32, skip_ignored=False),
    ],
    ids=str,
)
def test_settings_survive_the_operator(record: Any) -> None:
    """The settings are one argument, a text, and keep their bits and types."""
    kind: Any = type(record)
    values = from_json(to_json({"number": 3}, record=record), record=kind)
    got = values["record"]
    assert (got, repr(got), hash(got), values["number"]) == (record, repr(record), hash(record), 3)


# ---------------------------------------------------------------------------------------------------------
# The flop counter


@parametrize_pairs(
    reduction=REDUCTIONS,
    strategy=STRATEGIES,
    grads=[ALL_GRADS, "x", "wb", "xaB", "B", ""],
    ranks=[(), (2, 3)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    tokens=[1, 9],
)
def test_flops(
    reduction: str,
    strategy: str,
    grads: str,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    tokens: int,
    torch_backend: str,
) -> None:
    """The count equals the count of PyTorch's products. If backward computes logits again, these products count, too,
    as in PyTorch's formulas for attention."""
    ignored = 0.4 if tokens > 1 else 0.0
    p = make_problem(
        (tokens,), 8, 30, dtype=dtype, bias=True, adapter_ranks=ranks, ignored=ignored, reduction=reduction
    )

    def stock() -> None:
        x, w = (t.detach().requires_grad_(k in grads) for k, t in (("x", p.input), ("w", p.linear_weight)))
        assert p.linear_bias is not None
        z = F.linear(x, w, p.linear_bias.detach().requires_grad_("b" in grads))
        for a, b in p.adapters:
            z = z + F.linear(a.detach().requires_grad_("a" in grads), b.detach().requires_grad_("B" in grads))
        if z.requires_grad:
            z.sum().backward()

    expected = count_flops(stock)
    anything = any(key in grads for key in ("xwb" if not ranks else ALL_GRADS))
    if anything and (reduction == "none" or strategy == "vocab"):
        expected += 2 * p.target.numel() * 30 * (8 + sum(ranks))
    options = flce.ChunkOptions(strategy=strategy)  # type: ignore[arg-type]
    assert count_flops(lambda: run_fused(p, options=options, grads=grads)) == expected
    if strategy == "tokens" or reduction == "none":
        assert plan_for(p, options, grads).flops == expected


def test_flops_of_a_backward_alone(torch_backend: str) -> None:
    x, w, y = leaves()
    product = 2 * 9 * 8 * 30
    assert count_flops(fused(x, w, y).backward) == 0
    assert count_flops(fused(x, w, y, reduction="none").sum().backward) == 3 * product


@pytest.mark.usefixtures("fresh_compiler")
def test_flops_of_a_graph(torch_backend: str) -> None:
    x, w, y = leaves()
    compiled = torch.compile(fused, backend="aot_eager")
    compiled(x, w, y)
    assert count_flops(lambda: compiled(x, w, y).backward()) == 3 * 2 * 9 * 8 * 30


# ---------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_compile_with_numbers_that_are_not_of_python(kind: str, torch_backend: str, device: torch.device) -> None:
    """They end the graph, as for PyTorch's loss, and change no result. Modules have converted them before."""
    number: Any = torch.tensor if kind == "tensor" else pytest.importorskip("numpy").float32
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)
    expected = fused(p.input, p.linear_weight, p.target, label_smoothing=0.125)

    def step(x: Tensor) -> Tensor:
        return fused(x, p.linear_weight, p.target, label_smoothing=number(0.125))

    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(p.input), expected)
    module = flce.FusedLinearCrossEntropyLoss(label_smoothing=number(0.125))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(p.input, p.linear_weight, p.target), expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_with_numbers_that_are_symbols(dynamic: bool | None, torch_backend: str, device: torch.device) -> None:
    """Each number has a separate graph."""
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)

    def step(x: Tensor, number: int) -> Tensor:
        options = flce.ChunkOptions(chunk_rows=number)
        settings: dict[str, Any] = {"ignore_index": number, "softcap": number / 2, "options": options}
        return fused(x, p.linear_weight, p.target, **settings)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for number in (4, 5, 7):
        torch.testing.assert_close(compiled(p.input, number), step(p.input, number))


# ---------------------------------------------------------------------------------------------------------
# Failed allocations, and changes between forward and backward


def leaves(dtype: torch.dtype = torch.float64, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    p = make_problem((9,), 8, 30, dtype=dtype, device=device)
    return p.input.requires_grad_(), p.linear_weight.requires_grad_(), p.target


def test_backward_again_after_it_ran_out_of_memory(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 gradients are cast in backward. The allocation for the second gradient fails."""
    x, w, y = leaves(torch.float16, device)
    fused(x, w, y).backward()
    want = [x.grad, w.grad]
    x.grad = w.grad = None
    loss = fused(x, w, y)
    kind = type(get_backend(device))
    original, calls = kind.scale_cast, itertools.count(1)

    def fails_once(self: Any, *args: Any) -> Any:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("for this test")
        return original(self, *args)

    monkeypatch.setattr(kind, "scale_cast", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    x.grad = w.grad = None
    loss.backward()
    torch.testing.assert_close([x.grad, w.grad], want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_plan_whose_memory_cannot_be_had(reduction: str, torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller plan runs, with one warning. With a budget, or without a smaller plan, the error is raised."""
    p = make_problem((2000,), 16, 2000, dtype=torch.float32)
    most = flce.plan(2000, 16, 2000, torch.float32, device="cpu", reduction=reduction).workspace_bytes // 2
    originals = {name: getattr(passes, name) for name in ("forward", "backward")}

    def limited(name: str) -> Any:
        def run(problem: Any, plan: Any, *args: Any, **more: Any) -> Any:
            if plan.workspace_bytes > most:
                raise torch.OutOfMemoryError("for this test")
            return originals[name](problem, plan, *args, **more)

        return run

    want = run_fused(p.with_(reduction=reduction), grad_output=1.5)
    for name in originals:
        monkeypatch.setattr(passes, name, limited(name))
    with pytest.warns(RuntimeWarning, match="could not allocate .* and continues with .*max_workspace_bytes"):
        got = run_fused(p.with_(reduction=reduction), grad_output=1.5)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close([got.grad_input, got.grad_weight], [want.grad_input, want.grad_weight])
    with pytest.raises(torch.OutOfMemoryError):
        run_fused(p.with_(reduction=reduction), options=flce.ChunkOptions(max_workspace_bytes=4 * most))
    most = 100
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning):
        run_fused(p.with_(reduction=reduction))


def test_a_smaller_plan_makes_gradients_where_the_first_would(
    torch_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan has fixed the set of outputs: the smaller plan may differ from the plan of an equal budget."""
    default = flce.plan(500, 64, 2000, torch.float16, device="cpu")
    quarter = flce.ChunkOptions(max_workspace_bytes=default.workspace_bytes // 4)
    assert flce.plan(500, 64, 2000, torch.float16, device="cpu", options=quarter).deferred
    taken, forward = [], passes.forward

    def fails_once(problem: Any, plan: Any, gradients: bool) -> Any:
        taken.append(plan)
        if len(taken) == 1:
            raise torch.OutOfMemoryError("for this test")
        return forward(problem, plan, gradients)

    monkeypatch.setattr(passes, "forward", fails_once)
    with pytest.warns(RuntimeWarning, match="could not allocate"):
        run_fused(make_problem((500,), 64, 2000, dtype=torch.float16))
    assert [plan.deferred for plan in taken] == [False, False]
    assert taken[1].workspace_bytes < taken[0].workspace_bytes == default.workspace_bytes


@pytest.mark.filterwarnings("ignore:flce could not allocate")
def test_no_memory_for_nothing(torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without workspace has no smaller plan."""
    attempts = itertools.count(1)

    def none_left(*args: Any) -> Any:
        if next(attempts) > 100:
            pytest.fail("it is tried again and again")
        raise torch.OutOfMemoryError("for this test")

    monkeypatch.setattr(passes, "forward", none_left)
    for n in (0, 1, 50):
        with pytest.raises(torch.OutOfMemoryError):
            run_fused(make_problem((n,), 16, 30, dtype=torch.float32))


def test_weight_changed_between_forward_and_backward(backend: str, device: torch.device) -> None:
    """If backward computes the logits again, autograd's version counter must detect the change."""
    for kwargs in ({"reduction": "none"}, {"options": flce.ChunkOptions(strategy="vocab")}):
        x, w, y = leaves(device=device)
        loss = fused(x, w, y, **kwargs).sum()
        with torch.no_grad():
            w.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---------------------------------------------------------------------------------------------------------
# Calls that bypass the dispatcher


def test_a_plain_call_is_no_operator(torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator costs more Python time than a small call. Bits and the name of the autograd node are the same."""
    x, w, y = leaves()
    node = fused(x, w, y).grad_fn
    assert node is not None
    assert "flce_linear_cross_entropy" in type(node).__name__
    for strategy, reduction in itertools.product(STRATEGIES, REDUCTIONS):
        p = make_problem((7,), 8, 30, dtype=torch.float32, bias=True, adapter_ranks=(2,), reduction=reduction)
        rows = 5 if strategy == "tokens" else None
        options, outcomes = flce.ChunkOptions(chunk_rows=rows, strategy=strategy), []  # type: ignore[arg-type]
        for watched in (False, True):
            with monkeypatch.context() as patch:
                if watched:
                    patch.setattr(linear_cross_entropy, "_can_bypass_dispatcher", lambda tensors: False)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    outcomes.append(run_fused(p, options=options, grad_output=1.7, stats=STATS))
                names = [event.name for event in profile.events() or []]
                assert any(name.startswith("flce::") for name in names) == watched
        mine, other = (tree_leaves(vars(outcome)) for outcome in outcomes)
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_python_calls_of_a_call(torch_backend: str) -> None:
    """261 Python calls in forward and backward on 2026-11-29, 938 before: a limit against new calls."""
    x, w, y = leaves()
    assert python_calls(lambda: fused(x, w, y).backward()) <= 270
