"""The operator among PyTorch's machinery: the dispatcher, compilation, autograd's modes, checkpoints, graphs."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import flce
from flce import engine, operators
from flce.backends import get_backend
from flce.custom_op import as_text, from_text
from flce.problem import LossSpec
from flce.testing.problem import ALL_GRADS, make_problem, run_fused
from tests import forced
from tests.forced import force
from tests.helpers import (
    BACKENDS,
    BATCHED,
    REDUCTIONS,
    STATS,
    STRATEGIES,
    batched_gradients,
    combinations,
    counted_flops,
    pairs,
    plan_for,
)


def options_for(strategy: str, **kwargs: Any) -> flce.ChunkOptions:
    if strategy == "tokens":
        kwargs.setdefault("chunk_rows", 5)
    return flce.ChunkOptions(strategy=strategy, **kwargs)  # type: ignore[arg-type]


def fused(x: Tensor, w: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    loss = flce.fused_linear_cross_entropy(x, w, y, **kwargs)
    assert isinstance(loss, Tensor)
    return loss


# ---------------------------------------------------------------------------------------------------------
# torch.library


@dataclass(frozen=True)
class _WithOptions(LossSpec):
    """A loss with two more options, of which nothing else here knows."""

    unheard_of: float = 0.0
    perhaps: float | None = None


@pytest.mark.parametrize(
    "record",
    [
        LossSpec(),
        LossSpec("sum", 2**63 - 1, 0.1, 1 / 3, -1e-300, 1e300, 5e-324, ("lse", "entropy")),
        LossSpec("none", -(2**63), stats=("correct",)),
        _WithOptions(softcap=2.0, unheard_of=0.7, perhaps=0.0),
        flce.ChunkOptions(),
        flce.ChunkOptions(7, 2**70, "vocab", torch.bfloat16, torch.float64, True),
        flce.ChunkOptions(strategy="tokens", logits_dtype=torch.float32, skip_ignored=False),
    ],
    ids=str,
)
def test_settings_survive_the_operator(record: Any) -> None:
    """As one argument, which is text: to the bit, and of the same types."""
    (got,) = from_text(as_text(record), (type(record),))
    assert got == record
    assert repr(got) == repr(record)
    assert hash(got) == hash(record)
    assert from_text(as_text(record, LossSpec("sum")), (type(record), LossSpec)) == (record, LossSpec("sum"))


def copied(value: Any) -> Any:
    """Without the graph, at any depth of lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value


class BackwardRecorder(TorchDispatchMode):
    """What the package's operators are called with below autograd: in backward, that is all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "flce":
            self.calls.setdefault(func, (copied(args), kwargs))
        return func(*args, **kwargs)


class Recorder(TorchFunctionMode):
    """Every call of one of the package's registered operators, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func
        if isinstance(op, torch._ops.OpOverloadPacket):
            op = getattr(op, op.overloads()[0])
        if isinstance(op, torch._ops.OpOverload) and op.namespace == "flce":
            self.calls.append((op, args, dict(kwargs)))
        return func(*args, **kwargs)


def fresh(value: Any) -> Any:
    """Arguments as opcheck wants them: leaves of their own."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(fresh(v) for v in value)
    return value


OPCHECK_CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum with bias": {"reduction": "sum", "bias": True, "num_items": 7},
    "none": {"reduction": "none", "ignored": 0.3},
    "weights": {
        "class_weight": True,
        "token_weight": True,
        "bias": True,
        "label_smoothing": 0.1,
        "z_loss": 0.1,
    },
    "frozen head": {"grads": "x", "stats": ("correct",)},
    "no gradients": {"grads": ""},
    "vocab": {"strategy": "vocab", "bias": True},
    "vocab none": {"strategy": "vocab", "reduction": "none"},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "adapters": {"adapter_ranks": (2, 3), "bias": True},
    "adapters on a frozen head": {"adapter_ranks": (2,), "grads": "xaB"},
    "adapters, none": {"adapter_ranks": (2, 3), "reduction": "none", "grads": "B"},
    "adapters, vocab": {"adapter_ranks": (2,), "strategy": "vocab", "dtype": torch.bfloat16},
}


# An operator is registered once for both backends; with Triton's, whether its kernels keep to the schema.
@pytest.mark.parametrize(
    "backend, name",
    [("torch", name) for name in OPCHECK_CASES]
    + [("triton", name) for name in ("weights", "vocab none", "fp16", "adapters", "adapters, vocab")],
    indirect=["backend"],
)
def test_opcheck(name: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, autograd registration, fake implementation and AOT dispatch of all operators that a call makes."""
    monkeypatch.setattr(operators, "_nobody_watches", lambda tensors: False)
    kwargs = dict(OPCHECK_CASES[name])
    grads, strategy = kwargs.pop("grads", ALL_GRADS), kwargs.pop("strategy", "tokens")
    stats = kwargs.pop("stats", STATS)
    p = make_problem((7,), 8, 30, device=device, **{"dtype": torch.float32, **kwargs})
    with Recorder() as recorder:
        run_fused(p, options=options_for(strategy), grads=grads, stats=stats)
    assert recorder.calls, "no operator of the package was called"
    with BackwardRecorder() as below:
        run_fused(p, options=options_for(strategy), grads=grads, grad_output=0.5)
    in_forward = {op for op, _, _ in recorder.calls}
    recorder.calls += [(op, *call) for op, call in below.calls.items() if op not in in_forward]
    tolerance: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if p.input.dtype.itemsize == 2 else {}
    for op, args, keywords in recorder.calls:
        torch.library.opcheck(
            op,
            tuple(fresh(a) for a in args),
            {k: fresh(v) for k, v in keywords.items()},
            **tolerance,
        )


def test_the_operators_are_registered(torch_backend: str) -> None:
    p = make_problem((5,), 8, 30)
    run_fused(p)
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("flce::")]
    assert names


# ---------------------------------------------------------------------------------------------------------
# Tensors without memory


class OnlyMeta(TorchDispatchMode):
    """Fails where an operator makes a tensor that has memory, or gets one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not isinstance(value, Tensor) or value.is_meta, f"{func}: a tensor on {value.device}"
        return result


@pytest.fixture(params=[{}, {"FLCE_DEBUG": "1"}, {"FLCE_BACKEND": "triton"}], ids=str)
def _any_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


def assert_meta_gradients(loss: Tensor, reduction: str, shape: tuple[int, ...], leaves: Sequence[Tensor]) -> None:
    dtype = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
    assert (loss.device.type, loss.dtype, loss.shape) == ("meta", dtype, shape if reduction == "none" else ())
    with OnlyMeta():
        loss.backward(torch.ones_like(loss))
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad.device, leaf.grad.dtype, leaf.grad.shape) == (leaf.device, leaf.dtype, leaf.shape)


@pytest.mark.usefixtures("_any_environment")
@pairs(
    reduction=REDUCTIONS,
    strategy=["auto", *STRATEGIES],
    budget=[None, 1, 1 << 20],
    ranks=[(), (2, 3)],
    head=["indices", "probabilities", "two dimensions"],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    more=[{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}],
)
def test_meta_tensors(
    reduction: str, strategy: Any, budget: int | None, ranks: Any, head: str, dtype: torch.dtype, more: dict[str, Any]
) -> None:
    """A dry run: what it returns looks right, and nothing is computed. A budget that no plan keeps is kept here."""
    settings: Any = {"dtype": dtype, "device": "meta", "bias": True, "class_weight": True, "token_weight": True}
    inner = (3,) if head == "two dimensions" else ()
    p = make_problem((2, 5), 8, 30, **settings, adapter_ranks=() if inner else ranks, reduction=reduction, **more)
    x, w, b = p.input, p.linear_weight, p.linear_bias
    assert b is not None
    y, kwargs = p.target, dict(p.kwargs)
    stats: tuple[str, ...] = STATS
    if inner:
        w, b = torch.empty(30, 3, 8, dtype=dtype, device="meta"), torch.empty(30, 3, dtype=dtype, device="meta")
        y = torch.empty(2, 5, 3, dtype=torch.int64, device="meta")
        kwargs["token_weight"] = torch.empty(2, 5, 3, device="meta")
    elif head == "probabilities":
        y, stats = torch.empty(2, 5, 30, device="meta"), ("lse", "entropy", "argmax")
    leaves = [t.requires_grad_() for t in (x, w, b, *(t for pair in p.adapters for t in pair))]
    options = flce.ChunkOptions(strategy=strategy, max_workspace_bytes=budget)
    with OnlyMeta():
        out: Any = flce.fused_linear_cross_entropy(
            x, w, y, linear_bias=b, adapters=p.adapters, options=options, stats=stats, **kwargs
        )
    assert all(value.is_meta for value in out if value is not None)
    assert_meta_gradients(out.loss, reduction, (2, 5, *inner), leaves)


@pytest.mark.usefixtures("_any_environment")
@pairs(
    reduction=REDUCTIONS,
    kind=["apart", "in place", "probabilities"],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    more=[{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}],
    shift=[0, 1],
)
def test_meta_logits(reduction: str, kind: str, dtype: torch.dtype, more: dict[str, Any], shift: int) -> None:
    leaf = torch.empty(2, 5, 30, dtype=dtype, device="meta", requires_grad=True)
    indices = torch.empty(2, 5, dtype=torch.int64, device="meta")
    y = torch.empty_like(leaf) if kind == "probabilities" else indices
    stats = ("lse", "entropy", "argmax")
    with OnlyMeta():
        more = {**more, "shift": 0 if kind == "probabilities" else shift, "inplace": kind == "in place"}
        out: Any = flce.cross_entropy(leaf * 2, y.detach(), reduction=reduction, stats=stats, **more)
    assert all(value.is_meta for value in out if value is not None)
    assert_meta_gradients(out.loss, reduction, (2, 5), [leaf])


@pytest.mark.usefixtures("_any_environment")
@pytest.mark.parametrize("function", [flce.softmax, flce.log_softmax])
def test_softmax_of_meta_tensors(function: Any) -> None:
    leaf = torch.empty(2, 5, 30, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for dim, dtype in ((-1, None), (1, torch.float32)):
        with OnlyMeta():
            result = function(leaf, dim, dtype)
            (grad,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        assert (result.device.type, result.dtype, result.shape) == ("meta", dtype or leaf.dtype, leaf.shape)
        assert (grad.device.type, grad.dtype, grad.shape) == ("meta", leaf.dtype, leaf.shape)


def test_a_module_on_the_meta_device() -> None:
    module = flce.LinearCrossEntropyLoss(8, 30, bias=True, device="meta")
    loss = module(torch.empty(5, 8, device="meta"), torch.empty(5, dtype=torch.int64, device="meta"))
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in module.parameters())


# ---------------------------------------------------------------------------------------------------------
# The flop counter


@pairs(
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
    """Those of the products that PyTorch makes for it. Where logits are made again in backward, these as well, as
    PyTorch counts them for attention."""
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

    expected = counted_flops(stock)
    anything = any(key in grads for key in ("xwb" if not ranks else ALL_GRADS))
    if anything and (reduction == "none" or strategy == "vocab"):
        expected += 2 * p.target.numel() * 30 * (8 + sum(ranks))
    options = flce.ChunkOptions(strategy=strategy)  # type: ignore[arg-type]
    assert counted_flops(lambda: run_fused(p, options=options, grads=grads)) == expected
    if strategy == "tokens" or reduction == "none":
        assert plan_for(p, options, grads).flops == expected


def test_flops_of_a_backward_alone(torch_backend: str) -> None:
    x, w, y = leaves()
    product = 2 * 9 * 8 * 30
    assert counted_flops(fused(x, w, y).backward) == 0
    assert counted_flops(fused(x, w, y, reduction="none").sum().backward) == 3 * product


@pytest.mark.usefixtures("_no_compiled_code")
def test_flops_of_a_graph(torch_backend: str) -> None:
    x, w, y = leaves()
    compiled = torch.compile(fused, backend="aot_eager")
    compiled(x, w, y)
    assert counted_flops(lambda: compiled(x, w, y).backward()) == 3 * 2 * 9 * 8 * 30


# ---------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.fixture
def _no_compiled_code() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_and_eager(function: Callable[..., Any], leaves: list[Tensor], backend: Any, **kwargs: Any) -> None:
    """The same loss and the same gradients with and without compilation."""
    results = []
    for f in (function, torch.compile(function, backend=backend, fullgraph=True, **kwargs)):
        fresh_leaves = [t.detach().clone().requires_grad_() for t in leaves]
        loss = f(*fresh_leaves)
        loss.sum().backward()
        results.append([loss.detach(), *(t.grad for t in fresh_leaves)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_no_compiled_code")
@pairs(reduction=REDUCTIONS, strategy=STRATEGIES, backend=BACKENDS)
def test_compile_aot_eager(reduction: str, strategy: str, backend: str, device: torch.device) -> None:
    p = make_problem((2, 6), 8, 30, dtype=torch.float32, bias=True, class_weight=True, ignored=0.2, device=device)

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fused(
            torch.tanh(x),
            w,
            p.target,
            linear_bias=b,
            weight=p.kwargs["weight"],
            reduction=reduction,
            label_smoothing=0.1,
            z_loss=0.01,
            shift=1,
            options=options_for(strategy),
        )

    assert p.linear_bias is not None
    compiled_and_eager(step, [p.input, p.linear_weight, p.linear_bias], "aot_eager")


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize(
    "compiler, reduction, strategy",
    [("aot_eager", "mean", "vocab"), ("aot_eager", "none", "tokens"), ("inductor", "none", "vocab")],
)
def test_compile_with_adapters(
    compiler: str, reduction: str, strategy: str, torch_backend: str, device: torch.device
) -> None:
    """A head that is frozen, two adapters on it whose inputs are made in the same graph."""
    p = make_problem((2, 6), 8, 30, dtype=torch.float32, adapter_ranks=(2, 3), device=device)
    (_, b1), (_, b2) = p.adapters
    a1, a2 = torch.randn(2, 8, device=device), torch.randn(3, 8, device=device)

    def step(x: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        adapters = [(2 * F.linear(x, a1), b1), (F.linear(x, a2), b2)]
        return fused(
            x, p.linear_weight, p.target, adapters=adapters, reduction=reduction, options=options_for(strategy)
        )

    compiled_and_eager(step, [p.input, a1, b1, a2, b2], compiler, dynamic=True)


@pytest.mark.usefixtures("_no_compiled_code")
def test_compile_inductor(torch_backend: str, device: torch.device) -> None:
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return fused(F.silu(x) * 2, w, p.target) * 3

    compiled_and_eager(step, [p.input, p.linear_weight], "inductor")


@pytest.mark.usefixtures("_no_compiled_code")
def test_compile_with_statistics(torch_backend: str, device: torch.device) -> None:
    p = make_problem((10,), 8, 30, dtype=torch.float32, ignored=0.2, device=device)

    def step(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        out: Any = flce.fused_linear_cross_entropy(x, w, p.target, stats=STATS)
        return (out.loss, *(getattr(out, name) for name in STATS))

    eager = step(p.input, p.linear_weight)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(p.input, p.linear_weight)
    torch.testing.assert_close(compiled, eager)


def graphs_of_ours(counter: Any) -> int:
    """The compiled graphs that call the operator (Dynamo may make an empty one before)."""
    return sum(any("flce" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs)


@pytest.mark.usefixtures("_no_compiled_code")
@pairs(dynamic=[True, None], strategy=STRATEGIES, budget=[None, 1 << 20])
def test_one_graph_for_many_lengths(
    dynamic: bool | None, strategy: str, budget: int | None, torch_backend: str, device: torch.device
) -> None:
    """A new length is not a new compilation (without ``dynamic=True`` the second length makes one more)."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    rows = None if budget or strategy == "vocab" else 16
    options = flce.ChunkOptions(strategy=strategy, chunk_rows=rows, max_workspace_bytes=budget)  # type: ignore[arg-type]

    def step(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return fused(x, w, y, options=options)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (7, 12, 16, 17, 40, 33, 100, 64):
        p = make_problem((length,), 8, 30, dtype=torch.float32, device=device, seed=length)
        results = []
        for f in (step, compiled):
            x, w = p.input.clone().requires_grad_(), p.linear_weight.clone().requires_grad_()
            loss = f(x, w, p.target)
            loss.backward()
            results.append([loss.detach(), x.grad, w.grad])
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    # More than one chunk may be a graph of its own (the dtype of a buffer differs), lengths may not.
    assert 1 <= graphs_of_ours(counter) <= (1 if dynamic else 2) + (rows is not None)


@pytest.mark.usefixtures("_no_compiled_code")
def test_default_plan_is_one_graph_for_many_lengths(torch_backend: str, device: torch.device) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True, dynamic=True)
    for length in (7, 12, 40, 33, 100):
        p = make_problem((2, length), 8, 30, dtype=torch.float32, device=device)
        x = p.input.clone().requires_grad_()
        compiled(x, p.linear_weight, p.target, shift=1).backward()
    assert graphs_of_ours(counter) == 1


@pytest.mark.usefixtures("_no_compiled_code")
def test_compiled_module_in_a_training_step(torch_backend: str, device: torch.device) -> None:
    torch.manual_seed(0)
    module = flce.LinearCrossEntropyLoss(8, 30, bias=True, softcap=5.0, device=device)
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)
    expected = module(p.input, p.target)
    expected.backward()
    grads = [q.grad.clone() for q in module.parameters() if q.grad is not None]
    module.zero_grad()
    loss = torch.compile(module, backend="aot_eager", fullgraph=True)(p.input, p.target)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([q.grad for q in module.parameters()], grads)


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("kind", ["numpy", "tensor"])
def test_compile_with_numbers_that_are_not_of_python(kind: str, torch_backend: str, device: torch.device) -> None:
    """They end the graph, for PyTorch's own loss too, and change no result. Those of a module are no longer there."""
    number: Any = torch.tensor if kind == "tensor" else pytest.importorskip("numpy").float32
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)
    expected = fused(p.input, p.linear_weight, p.target, label_smoothing=0.125)

    def step(x: Tensor) -> Tensor:
        return fused(x, p.linear_weight, p.target, label_smoothing=number(0.125))

    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(p.input), expected)
    module = flce.FusedLinearCrossEntropyLoss(label_smoothing=number(0.125))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(p.input, p.linear_weight, p.target), expected)


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_with_numbers_that_are_symbols(dynamic: bool | None, torch_backend: str, device: torch.device) -> None:
    """Each number has a graph of its own."""
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)

    def step(x: Tensor, number: int) -> Tensor:
        options = flce.ChunkOptions(chunk_rows=number)
        settings: dict[str, Any] = {"ignore_index": number, "softcap": number / 2, "options": options}
        return fused(x, p.linear_weight, p.target, **settings)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for number in (4, 5, 7):
        torch.testing.assert_close(compiled(p.input, number), step(p.input, number))


@pytest.mark.usefixtures("_no_compiled_code")
def test_compile_without_gradients(torch_backend: str, device: torch.device) -> None:
    p = make_problem((10,), 8, 30, dtype=torch.float32, device=device)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(p.input, p.linear_weight, p.target), fused(p.input, p.linear_weight, p.target)
        )


# ---------------------------------------------------------------------------------------------------------
# What autograd cannot have: an error, never a wrong number


def leaves(dtype: torch.dtype = torch.float64, device: Any = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    p = make_problem((9,), 8, 30, dtype=dtype, device=device)
    return p.input.requires_grad_(), p.linear_weight.requires_grad_(), p.target


@combinations(reduction=REDUCTIONS, strategy=STRATEGIES, retain=[True, False])
def test_second_backward(reduction: str, strategy: str, retain: bool, backend: str, device: torch.device) -> None:
    """Gradients that were made in forward are handed out once; those that are made in backward are made again."""
    x, w, y = leaves(device=device)
    loss = fused(x, w, y, reduction=reduction, options=options_for(strategy)).sum()
    loss.backward(retain_graph=retain)
    first = [x.grad, w.grad]
    x.grad = w.grad = None
    if retain and (reduction == "none" or strategy == "vocab"):
        (3 * loss).backward()
        for grad, before in zip((x.grad, w.grad), first, strict=True):
            assert before is not None
            torch.testing.assert_close(grad, 3 * before)
        return
    with pytest.raises(RuntimeError, match=r"(?i)second|twice|once|again|freed"):
        loss.backward()
    assert first[0] is not None


def test_backward_again_after_it_ran_out_of_memory(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float16, whose gradients are cast in backward, the second is found to have no memory."""
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
    """A smaller one takes its place, with one warning; the error stays with a budget, and where nothing is smaller."""
    p = make_problem((2000,), 16, 2000, dtype=torch.float32)
    most = flce.plan(2000, 16, 2000, torch.float32, device="cpu", reduction=reduction).workspace_bytes // 2
    passes = {name: getattr(engine, name) for name in ("forward", "backward")}

    def limited(name: str) -> Any:
        def run(problem: Any, plan: Any, *args: Any) -> Any:
            if plan.workspace_bytes > most:
                raise torch.OutOfMemoryError("for this test")
            return passes[name](problem, plan, *args)

        return run

    want = run_fused(p.with_(reduction=reduction), grad_output=1.5)
    for name in passes:
        monkeypatch.setattr(engine, name, limited(name))
    with pytest.warns(RuntimeWarning, match="could not have .* and goes on with .*max_workspace_bytes"):
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
    """Which outputs there are has been decided by then: it may not be the plan of a budget of the same size."""
    default = flce.plan(500, 64, 2000, torch.float16, device="cpu")
    quarter = flce.ChunkOptions(max_workspace_bytes=default.workspace_bytes // 4)
    assert flce.plan(500, 64, 2000, torch.float16, device="cpu", options=quarter).deferred
    taken, forward = [], engine.forward

    def fails_once(problem: Any, plan: Any, gradients: bool) -> Any:
        taken.append(plan)
        if len(taken) == 1:
            raise torch.OutOfMemoryError("for this test")
        return forward(problem, plan, gradients)

    monkeypatch.setattr(engine, "forward", fails_once)
    with pytest.warns(RuntimeWarning, match="could not have"):
        run_fused(make_problem((500,), 64, 2000, dtype=torch.float16))
    assert [plan.deferred for plan in taken] == [False, False]
    assert taken[1].workspace_bytes < taken[0].workspace_bytes == default.workspace_bytes


@pytest.mark.filterwarnings("ignore:flce could not have")
def test_no_memory_for_nothing(torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that takes nothing has none that is smaller."""
    attempts = itertools.count(1)

    def none_left(*args: Any) -> Any:
        if next(attempts) > 100:
            pytest.fail("it is tried again and again")
        raise torch.OutOfMemoryError("for this test")

    monkeypatch.setattr(engine, "forward", none_left)
    for n in (0, 1, 50):
        with pytest.raises(torch.OutOfMemoryError):
            run_fused(make_problem((n,), 16, 30, dtype=torch.float32))


@combinations(
    dtype=[torch.float16, torch.bfloat16, torch.float32], strategy=STRATEGIES, rows=[None, 4], grads=["x", "xw"]
)
def test_dtypes_of_gradients_that_backward_makes(
    dtype: torch.dtype, strategy: str, rows: int | None, grads: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the fake of the operator tells the compiler."""
    made: list[list[torch.dtype]] = []
    original = engine.backward

    def watched(*args: Any) -> Any:
        result = original(*args)
        made.append([grad.dtype for grad in result])
        return result

    monkeypatch.setattr(engine, "backward", watched)
    options = flce.ChunkOptions(strategy=strategy, chunk_rows=rows)  # type: ignore[arg-type]
    run_fused(make_problem((9,), 8, 30, dtype=dtype, reduction="none"), options=options, grads=grads, grad_output=1.5)
    assert made == [[dtype] * len(grads)]


# In a process of its own: what others have left in the allocator's segments is memory, too.
LITTLE_MEMORY = """
    import gc, sys, warnings
    import torch, flce
    from flce.testing.problem import make_problem, relative_error, run_fused

    p = make_problem((8192,), 512, 128256, dtype=torch.bfloat16, device="cuda", reduction=sys.argv[1])
    options = flce.ChunkOptions(strategy="tokens", chunk_rows=8192)  # 2 GiB of logits
    want = run_fused(p, grad_output=1.5)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1200 << 20)) / total)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run_fused(p, options=options, grad_output=1.5)
    assert any("could not have" in str(w.message) for w in caught), caught
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-4, atol=1e-4)
    assert relative_error(got.grad_input, want.grad_input) < 1e-2
    assert relative_error(got.grad_weight, want.grad_weight) < 1e-2
"""


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_plan_whose_memory_cannot_be_had_on_cuda(reduction: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LITTLE_MEMORY), reduction]
    root = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def test_second_backward_through_another_output(backend: str, device: torch.device) -> None:
    """Two losses made from one call's result, each with a backward of its own."""
    x, w, y = leaves(device=device)
    loss = fused(x, w, y)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)second|twice|once|again"):
        (loss * 3).backward()


def test_gradients_are_not_changed_by_a_refused_second_backward(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    loss = fused(x, w, y)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    before = x.grad.clone()
    with pytest.raises(RuntimeError):
        loss.backward(torch.tensor(5.0, dtype=torch.float64, device=device))
    assert torch.equal(x.grad, before)


@combinations(reduction=REDUCTIONS, strategy=STRATEGIES, wanted=["x", "w"])
def test_double_backward(reduction: str, strategy: str, wanted: str, backend: str, device: torch.device) -> None:
    """Also in a sum with something that can be differentiated twice: a gradient penalty must not be dropped."""
    x, w, y = leaves(device=device)
    loss = fused(x, w, y, reduction=reduction, options=options_for(strategy)).sum()

    def penalty() -> None:
        (grad,) = torch.autograd.grad(loss, x if wanted == "x" else w, create_graph=True)
        (grad.square().sum() + (x * w.sum()).sum()).backward()

    with pytest.raises(RuntimeError, match=r"(?i)double|twice|second|create_graph|higher|once"):
        penalty()


NO_FORWARD_MODE = r"flce\.fused_linear_cross_entropy does not support forward-mode.*use torch\.nn\.functional"


def test_forward_mode_with_duals(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    with forward_ad.dual_level():
        for one, other in ((True, False), (False, True)):
            a = forward_ad.make_dual(x.detach(), torch.ones_like(x)) if one else x.detach()
            b = forward_ad.make_dual(w.detach(), torch.ones_like(w)) if other else w.detach()
            with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
                fused(a, b, y)
            with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
                fused(x.detach(), w.detach(), y, adapters=[(a, b)])
        bias = torch.ones(30, dtype=x.dtype, device=device)
        with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
            fused(x, w, y, linear_bias=forward_ad.make_dual(bias, bias))


def test_forward_mode_with_jvp(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
        torch.func.jvp(lambda t: fused(t, w.detach(), y), (x.detach(),), (torch.ones_like(x),))


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("loss", [fused, flce.cross_entropy])
def test_forward_mode_with_jvp_in_a_graph(loss: Any, torch_backend: str, device: torch.device) -> None:
    """Not a derivative of zero."""
    x, w, y = leaves(device=device)
    arguments: Any = (w.detach(), y) if loss is fused else (y,)

    def jvp(x: Tensor) -> Any:
        return torch.func.jvp(lambda t: loss(t, *arguments), (x,), (torch.ones_like(x),))

    with pytest.raises(RuntimeError, match="does not support forward-mode"):
        torch.compile(jvp, backend="aot_eager")(x.detach() if loss is fused else F.linear(x, w).detach())


def test_forward_mode_with_jacfwd(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    with pytest.raises(RuntimeError, match=NO_FORWARD_MODE):
        torch.func.jacfwd(lambda t: fused(t, w.detach(), y))(x.detach())


# ---------------------------------------------------------------------------------------------------------
# What autograd can have


@pairs(reentrant=[True, False], reduction=REDUCTIONS, backend=BACKENDS)
def test_checkpoint(reentrant: bool, reduction: str, backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)

    def block(a: Tensor, b: Tensor) -> Tensor:
        return fused(torch.tanh(a), b, y, reduction=reduction).sum()

    expected = torch.autograd.grad(block(x, w), (x, w))
    loss = checkpoint(block, x, w, use_reentrant=reentrant)
    loss.backward()
    torch.testing.assert_close([x.grad, w.grad], list(expected), rtol=1e-12, atol=1e-14)


def test_checkpoint_with_statistics(torch_backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)

    def block(a: Tensor) -> tuple[Tensor, Tensor]:
        out: Any = flce.fused_linear_cross_entropy(a, w, y, stats=("lse",))
        return out.loss, out.lse

    loss, lse = checkpoint(block, x, use_reentrant=False)
    loss.backward()
    assert not lse.requires_grad
    assert x.grad is not None


@pairs(mode=["no_grad", "inference_mode"], reduction=REDUCTIONS, backend=BACKENDS)
def test_without_gradients(mode: str, reduction: str, backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    expected = fused(x, w, y, reduction=reduction).detach()
    with getattr(torch, mode)():
        loss = fused(x, w, y, reduction=reduction)
        out: Any = flce.fused_linear_cross_entropy(x, w, y, reduction=reduction, stats=STATS)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.clone(), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(out.loss.clone(), expected, rtol=1e-14, atol=0)


def test_inference_tensors_as_inputs_of_training(backend: str, device: torch.device) -> None:
    """Hidden states made under ``inference_mode``, a head that is trained: as far as PyTorch lets one."""
    x, w, y = leaves(device=device)
    with torch.inference_mode():
        hidden = x.detach().clone()
    hidden = hidden.clone()
    loss = fused(hidden, w, y)
    loss.backward()
    assert w.grad is not None


def test_autograd_grad_of_some_inputs(backend: str, device: torch.device) -> None:
    """Both require a gradient, one is asked for."""
    x, w, y = leaves(device=device)
    (both,) = [torch.autograd.grad(fused(x, w, y), (x, w))]
    (only,) = torch.autograd.grad(fused(x, w, y), x)
    assert torch.equal(only, both[0])
    assert x.grad is None
    (only,) = torch.autograd.grad(fused(x, w, y, reduction="none").sum() / 9, w)
    torch.testing.assert_close(only, both[1], rtol=1e-10, atol=1e-12)


@pairs(reduction=REDUCTIONS, strategy=STRATEGIES, kind=BATCHED, dtype=[torch.float64, torch.float16], backend=BACKENDS)
def test_several_upstream_gradients_at_once(
    reduction: str, strategy: str, kind: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Each as if it were the only one, and as PyTorch has it."""
    p = make_problem((9,), 8, 30, dtype=dtype, bias=True, adapter_ranks=(2,), ignored=0.2, device=device)
    assert p.linear_bias is not None
    ((a, b),) = p.adapters
    tensors = [t.requires_grad_() for t in (p.input, p.linear_weight, p.linear_bias, a, b)]

    def loss() -> Tensor:
        x, w, bias, a, b = tensors
        return fused(
            x, w, p.target, linear_bias=bias, adapters=[(a, b)], reduction=reduction, options=options_for(strategy)
        )

    upstream = torch.randn(3, *loss().shape, device=device, dtype=loss().dtype)
    together = batched_gradients(kind, loss(), tensors, upstream)
    for k, grad in enumerate(upstream):
        for got, want in zip(together, torch.autograd.grad(loss(), tensors, grad), strict=True):
            assert torch.equal(got[k], want)
    if dtype == torch.float64:
        x, w, bias, a, b = tensors
        stock = F.cross_entropy(F.linear(x, w, bias) + F.linear(a, b), p.target, reduction=reduction)
        expected = batched_gradients(kind, stock, tensors, upstream)
        torch.testing.assert_close(list(together), list(expected), rtol=1e-10, atol=1e-13)


def test_jacobian_in_one_backward(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    got, want = (
        torch.autograd.functional.jacobian(lambda x, f=f: f(x, w.detach(), y), x, vectorize=True)
        for f in (
            lambda x, w, y: fused(x, w, y, reduction="none"),
            lambda x, w, y: F.cross_entropy(F.linear(x, w), y, reduction="none"),
        )
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_batches_of_upstream_gradients(reduction: str, torch_backend: str) -> None:
    x, w, y = leaves()
    ours, stock = fused(x, w, y, reduction=reduction), F.cross_entropy(F.linear(x, w), y, reduction=reduction)
    upstream = torch.randn(2, 3, *ours.shape, dtype=torch.float64)
    got, want = (
        torch.vmap(lambda batch, loss=loss: batched_gradients("vmap", loss, [x, w], batch))(upstream)
        for loss in (ours, stock)
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_weight_changed_between_forward_and_backward(backend: str, device: torch.device) -> None:
    """Where backward recomputes the logits, autograd's version counter must see the change."""
    for kwargs in ({"reduction": "none"}, {"options": flce.ChunkOptions(strategy="vocab")}):
        x, w, y = leaves(device=device)
        loss = fused(x, w, y, **kwargs).sum()
        with torch.no_grad():
            w.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_see_the_gradient(backend: str, device: torch.device) -> None:
    x, w, y = leaves(device=device)
    seen: list[Tensor] = []
    w.register_hook(lambda g: seen.append(g.clone()))
    fused(x, w, y).backward()
    assert len(seen) == 1
    assert w.grad is not None
    assert torch.equal(seen[0], w.grad)


def test_gradients_share_no_memory(backend: str, device: torch.device) -> None:
    """Nor with the inputs; and changing them in place (clipping) is allowed."""
    x, w, y = leaves(device=device)
    fused(x, w, y).backward()
    assert x.grad is not None
    assert w.grad is not None
    pointers = {t.untyped_storage().data_ptr() for t in (x, w, x.grad, w.grad)}
    assert len(pointers) == 4
    torch.nn.utils.clip_grad_norm_([x, w], 0.1)


def test_two_calls_before_their_backwards(backend: str, device: torch.device) -> None:
    """Buffers of one call must not be those of the next."""
    x, w, y = leaves(device=device)
    first, second = fused(x, w, y), fused(x * 2, w, y.flip(0))
    second.backward()
    first.backward()
    a, b, y2 = leaves(device=device)
    fused(a, b, y2).backward()
    fused(a * 2, b, y2.flip(0)).backward()
    torch.testing.assert_close([x.grad, w.grad], [a.grad, b.grad], rtol=1e-12, atol=1e-14)


def test_from_several_threads(torch_backend: str, device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    problems = [make_problem((9,), 8, 30, seed=seed, device=device) for seed in range(8)]
    expected = [run_fused(p) for p in problems]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(run_fused, problems))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.loss, b.loss)
        assert a.grad_weight is not None
        assert b.grad_weight is not None
        assert torch.equal(a.grad_weight, b.grad_weight)


# ---------------------------------------------------------------------------------------------------------
# CUDA


@pytest.fixture
def _errors_on_synchronisation() -> Any:
    yield
    torch.cuda.set_sync_debug_mode("default")


CUDA_CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "several chunks": {"options": flce.ChunkOptions(chunk_rows=100)},
    "sum/n": {"reduction": "sum", "num_items": 100},
    "none": {"reduction": "none"},
    "vocab": {"options": flce.ChunkOptions(strategy="vocab", max_workspace_bytes=8 << 20)},
    "statistics": {"stats": STATS},
    "shift and weights": {"shift": 1, "z_loss": 1e-3, "label_smoothing": 0.1},
    "adapters": {"adapter_ranks": (3, 16)},
}
cuda_calls = pytest.mark.parametrize("name", list(CUDA_CALLS))


@pytest.fixture(params=["as they are", "unnormalized", "borrowed"])
def normalization(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small heads as they are treated, and as large ones are on Hopper."""
    if request.param != "as they are":
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("exponentials are for Hopper")
        force(monkeypatch, forced.unnormalized if request.param == "unnormalized" else forced.borrowed(1))
    return request.param


def cuda_step(name: str, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    kwargs = dict(CUDA_CALLS[name])
    if kwargs.get("num_items") is not None:
        kwargs["num_items"] = torch.full((), 100, device="cuda")
    ranks = kwargs.pop("adapter_ranks", ())
    kwargs["adapters"] = [(x[..., :rank] * 2, w[..., :rank] * 3) for rank in ranks]
    out = flce.fused_linear_cross_entropy(x, w, y, **kwargs)
    loss = out if isinstance(out, Tensor) else out.loss
    x.grad = w.grad = None
    loss.backward(torch.ones_like(loss))
    return loss.detach()


@pytest.mark.gpu
@pytest.mark.usefixtures("_errors_on_synchronisation", "normalization")
@cuda_calls
def test_nothing_waits_for_the_gpu(name: str) -> None:
    p = make_problem((256,), 64, 5000, dtype=torch.bfloat16, device="cuda", ignored=0.2)
    x, w = p.input.requires_grad_(), p.linear_weight.requires_grad_()
    cuda_step(name, x, w, p.target)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    cuda_step(name, x, w, p.target)


@pytest.mark.gpu
@pytest.mark.usefixtures("normalization")
@cuda_calls
def test_cuda_graph(name: str) -> None:
    """Captured forward and backward give the same bits as eager, also for values copied in later, of any size."""
    p = make_problem((256,), 64, 5000, dtype=torch.bfloat16, device="cuda", ignored=0.2)
    x, w, y = p.input.requires_grad_(), p.linear_weight.requires_grad_(), p.target.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            cuda_step(name, x, w, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    x.grad = w.grad = None
    with torch.cuda.graph(graph):
        loss = cuda_step(name, x, w, y)
    grads = (x.grad, w.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    for seed, std in ((1, 1.0), (2, 100.0)):
        settings: dict[str, Any] = {"seed": seed, "std": std, "ignored": 0.1 * seed}
        other = make_problem((256,), 64, 5000, dtype=torch.bfloat16, device="cuda", **settings)
        with torch.no_grad():
            x.copy_(other.input)
            w.copy_(other.linear_weight)
        y.copy_(other.target)
        graph.replay()
        captured = [loss.clone(), grads[0].clone(), grads[1].clone()]
        a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        eager = [cuda_step(name, a, b, y), a.grad, b.grad]
        for got, expected in zip(captured, eager, strict=True):
            assert expected is not None
            assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("normalization")
def test_compile_inductor_on_cuda() -> None:
    p = make_problem((64,), 32, 1000, dtype=torch.bfloat16, device="cuda")
    torch._dynamo.reset()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return fused(F.silu(x), w, p.target)

    results = []
    for f in (step, torch.compile(step, fullgraph=True, dynamic=True)):
        x, w = p.input.clone().requires_grad_(), p.linear_weight.clone().requires_grad_()
        loss = f(x, w)
        loss.backward()
        results.append([loss.detach(), x.grad, w.grad])
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("normalization")
def test_on_a_side_stream() -> None:
    p = make_problem((256,), 64, 5000, dtype=torch.bfloat16, device="cuda")
    expected = run_fused(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run_fused(p)
    stream.synchronize()
    assert torch.equal(got.loss, expected.loss)
    assert got.grad_weight is not None
    assert expected.grad_weight is not None
    assert torch.equal(got.grad_weight, expected.grad_weight)


@pytest.mark.gpu
def test_on_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    p = make_problem((33,), 16, 300, dtype=torch.float32, device="cuda:1")
    q = make_problem((33,), 16, 300, dtype=torch.float32, device="cuda:0")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(run_fused(p).loss.cpu(), run_fused(q).loss.cpu())


# ---------------------------------------------------------------------------------------------------------
# Calls that nobody watches


def test_a_plain_call_is_no_operator(torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What operators take in Python is longer than a small call. Results are the same to the bit. Those who look for
    the operator in a graph of autograd find it by its name."""
    x, w, y = leaves()
    node = fused(x, w, y).grad_fn
    assert node is not None
    assert "flce_linear_cross_entropy" in type(node).__name__
    for strategy, reduction in itertools.product(STRATEGIES, REDUCTIONS):
        p = make_problem((7,), 8, 30, dtype=torch.float32, bias=True, adapter_ranks=(2,), reduction=reduction)
        options, outcomes = options_for(strategy), []
        for watched in (False, True):
            with monkeypatch.context() as patch:
                if watched:
                    patch.setattr(operators, "_nobody_watches", lambda tensors: False)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    outcomes.append(run_fused(p, options=options, grad_output=1.7, stats=STATS))
                names = [event.name for event in profile.events() or []]
                assert any(name.startswith("flce::") for name in names) == watched
        mine, other = (tree_leaves(vars(outcome)) for outcome in outcomes)
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_python_calls_of_a_call(torch_backend: str) -> None:
    """317 in forward and backward on 2026-11-23, 938 before: so that they do not creep back."""
    x, w, y = leaves()
    fused(x, w, y).backward()
    x.grad = w.grad = None
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        fused(x, w, y).backward()
    finally:
        sys.setprofile(None)
    assert calls <= 365
