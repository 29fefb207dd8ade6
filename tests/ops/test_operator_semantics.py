"""Corner cases of the semantics: flce returns PyTorch's results."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.backends import formulas
from flce.backends.eager import TorchBackend
from flce.core.problem import NUMERIC_FIELDS, LossSpec, loss_spec
from flce.huggingface.lazy import make_lazy
from flce.huggingface.lazy.state import head_state
from flce.testing.problem import Problem, make_problem, relative_error, run_fused, run_oracle, run_stock
from tests.helpers import BACKENDS, OTHER_VALUES, REDUCTIONS, STATS, STRATEGIES, check, parametrize_pairs


def options_for(strategy: str, **kwargs: Any) -> flce.ChunkOptions:
    if strategy == "tokens":
        kwargs.setdefault("chunk_rows", 5)
    return flce.ChunkOptions(strategy=strategy, **kwargs)  # type: ignore[arg-type]


def fused(*args: Any, **kwargs: Any) -> Any:
    """Call the function, with the type that the test expects as a result."""
    return flce.fused_linear_cross_entropy(*args, **kwargs)


def losses_and_grads(function: Any, *tensors: Tensor | None, upstream: Any = None) -> list[Tensor]:
    """Return the loss of ``function`` on fresh leaves, and the gradient of each leaf."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    loss = function(*leaves)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return [loss.detach(), *(t.grad for t in leaves if t is not None)]


# ---------------------------------------------------------------------------------------------------------
# Ignored rows, and batches without counted rows


@parametrize_pairs(
    reduction=REDUCTIONS,
    strategy=STRATEGIES,
    upstream=[math.inf, math.nan],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    backend=BACKENDS,
)
def test_all_ignored_and_divided_by_their_number(
    reduction: str, strategy: str, upstream: float, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Transformers divides by the number of labels: without labels the loss is NaN, but the gradients are zero."""
    p = make_problem((11,), 8, 70, bias=True, ignored=1.0, reduction=reduction, dtype=dtype, device=device)
    for out in (run_stock(p, upstream), run_fused(p, options=options_for(strategy), grad_output=upstream)):
        for grad in (out.grad_input, out.grad_weight, out.grad_bias):
            assert grad is not None
            assert torch.equal(grad, torch.zeros_like(grad))


@parametrize_pairs(
    skip=["auto", True, False],
    how=[f"{reduction} {strategy}" for reduction in REDUCTIONS for strategy in STRATEGIES],
    dtype=[torch.float64, torch.bfloat16],
    backend=BACKENDS,
)
def test_ignored_rows_that_hold_no_numbers(
    skip: Any, how: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """They change only gradients of weights in their columns, and with skip_ignored=True none."""
    reduction, strategy = how.split()
    p = make_problem((16,), 8, 70, bias=True, adapter_ranks=(3,), ignored=0.4, dtype=dtype, device=device)
    target = p.target.where(p.target != -100, 0)  # an ignore_index that is a class
    ((a, up),), ignored = p.adapters, target == 0

    def gradients(bad: float) -> tuple[Tensor, ...]:
        x, low = p.input.clone(), a.clone()
        x[ignored, 2] = low[ignored, 1] = bad
        options = options_for(strategy, skip_ignored=skip)

        def loss(x: Tensor, w: Tensor, b: Tensor, low: Tensor, up: Tensor) -> Any:
            more: dict[str, Any] = {"linear_bias": b, "adapters": [(low, up)], "reduction": reduction}
            return flce.fused_linear_cross_entropy(x, w, target, ignore_index=0, options=options, **more)

        return tuple(losses_and_grads(loss, x, p.linear_weight, p.linear_bias, low, up))

    want = gradients(0.0)
    for bad in (math.nan, math.inf):
        got = gradients(bad)
        for k, infected in ((2, 2), (5, 1)):  # gradients of the weight and of B
            if skip is not True:
                assert got[k][:, infected].isnan().all()
                got[k][:, infected] = want[k][:, infected]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("function", ["loss", "logprobs", "divergence"])
def test_few_ignored_rows_are_dropped(function: str, torch_backend: str) -> None:
    """With skip_ignored=True a token contributes nothing, however few tokens are ignored."""
    g = torch.Generator().manual_seed(0)
    x, t = (torch.randn(100, 16, generator=g, dtype=torch.bfloat16) for _ in range(2))
    w, tw = (torch.randn(60, 16, generator=g, dtype=torch.bfloat16) for _ in range(2))
    y = torch.arange(100) % 60
    y[[4, 50, 51]] = -100
    options = flce.ChunkOptions(skip_ignored=True)

    def gradients(bad: float) -> tuple[Tensor, ...]:
        leaf, head = x.masked_fill((y < 0)[:, None], bad).requires_grad_(), w.clone().requires_grad_()
        if function == "logprobs":
            loss: Any = flce.linear_logprobs(leaf, head, y, options=options).logprob
        elif function == "divergence":
            teacher = t.masked_fill((y < 0)[:, None], bad)
            loss = flce.linear_divergence(leaf, head, teacher, tw, target=y, options=options).divergence
        else:
            loss = flce.fused_linear_cross_entropy(leaf, head, y, options=options)
        return torch.autograd.grad(loss.sum(), (leaf, head))

    for got, want in zip(gradients(math.nan), gradients(0.0), strict=True):
        assert torch.equal(got, want)


def test_a_tensor_of_no_items(backend: str, device: torch.device) -> None:
    """The loss is a division by 0 on every device, because the value of a GPU's tensor is not read."""
    for ignored, expected in ((1.0, math.nan), (0.2, math.inf)):
        p = make_problem((7,), 8, 20, ignored=ignored, reduction="sum", device=device)
        out = run_fused(p.with_(num_items=torch.tensor(0, device=device)))
        torch.testing.assert_close(out.loss, torch.full_like(out.loss, expected), equal_nan=True)
        assert ignored < 1 or not out.grad_input.any()  # type: ignore[union-attr]


@parametrize_pairs(
    divisor=["class weights", "a number", "a tensor"],
    how=["tokens", "vocab", "compiled", "logits", "in place"],
    backend=BACKENDS,
)
def test_an_empty_loss_of_zero(divisor: str, how: str, backend: str, device: torch.device) -> None:
    """The loss and all gradients are 0 instead of NaN, also if the loss of a row is infinite. tests/search draws other
    calls."""
    has_head = how not in ("logits", "in place")
    p = make_problem((11,), 8 if has_head else None, 70, bias=has_head, token_weight=True, device=device)
    (p.linear_bias if has_head else p.input)[..., p.target[0]] = -math.inf  # type: ignore[index]
    arguments: dict[str, Any] = {"empty_loss": "zero", "reduction": "sum", "z_loss": 0.1, "num_items": 0}
    if divisor == "a tensor":
        arguments["num_items"] = torch.tensor(0, device=device)
    elif divisor == "class weights":  # They divide only the cross entropy.
        arguments = {"empty_loss": "zero", "weight": torch.zeros(70, device=device), "label_smoothing": 0.1}

    def loss(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Any:
        if not has_head:
            return flce.cross_entropy(x * 1, p.target, inplace=how == "in place", token_weight=t, **arguments)
        options = options_for(how if how in STRATEGIES else "auto")
        return fused(x, w, p.target, linear_bias=b, token_weight=t, options=options, **arguments)

    call = torch.compile(loss, fullgraph=True, backend="aot_eager") if how == "compiled" else loss
    got = losses_and_grads(call, p.input, p.linear_weight, p.linear_bias, p.token_weight)
    assert not any(result.isnan().any() or result.any() for result in got if result is not None)


def test_an_empty_loss_of_each_term(backend: str, device: torch.device) -> None:
    """The mean of the z-losses has a divisor of its own. Losses with tokens do not change."""
    p = make_problem((9,), 8, 70, ignored=0.4, class_weight=True, z_loss=0.1, device=device).with_(empty_loss="zero")
    check(p, stats=STATS)
    check(p.with_(weight=torch.zeros_like(p.kwargs["weight"])), stats=STATS)
    check(p.with_(reduction="sum", num_items=0, weight=None), stats=STATS)


# ---------------------------------------------------------------------------------------------------------
# The upstream gradient


def test_upstream_gradient_that_is_expanded_or_strided(backend: str, device: torch.device) -> None:
    p = make_problem((4, 6), 8, 30, reduction="none", device=device)
    for reduce in (lambda t: t.sum(), lambda t: t.t().mean(), lambda t: t[::2, 1::2].sum() * 3):
        x = p.input.clone().requires_grad_()
        reduce(fused(x, p.linear_weight, p.target, reduction="none")).backward()
        z = p.input.clone().requires_grad_()
        each = F.cross_entropy(F.linear(z, p.linear_weight).flatten(0, 1), p.target.flatten(), reduction="none")
        reduce(each.view(4, 6)).backward()
        torch.testing.assert_close(x.grad, z.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hidden", [63, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_without_doubt_have_no_gradient(
    strategy: str, hidden: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    """Large logits over a temperature: a fused multiply-add of the largest logit differs from the rounded maximum."""
    p = make_problem((64,), hidden, 28, dtype=dtype, std=1200.0, temperature=0.7, device=device)
    top = (p.input.double() @ p.linear_weight.double().t()).topk(2)
    certain = top.values[:, 0] - top.values[:, 1] > 200
    assert certain.sum() > 30
    certain_rows = replace(p, input=p.input[certain], target=top.indices[certain, 0])
    got: Any = run_fused(certain_rows, options=options_for(strategy, chunk_rows=None))
    assert got.loss.item() == 0
    assert not got.grad_input.any()
    assert not got.grad_weight.any()


# ---------------------------------------------------------------------------------------------------------
# Arguments


@parametrize_pairs(reduction=REDUCTIONS, head=[True, False], inplace=[True, False], backend=BACKENDS)
def test_gradient_of_weights_that_are_zero_or_nonsense(
    reduction: str, head: bool, inplace: bool, backend: str, device: torch.device
) -> None:
    """The gradient of a weight of 0 is as for other weights; the weight of an ignored token has no effect."""
    p = make_problem((6,), 8 if head else None, 40, reduction=reduction, z_loss=0.1, device=device)
    p.target[2] = -100

    def gradients(*weights: float) -> tuple[Tensor, Tensor]:
        weight = torch.tensor(weights, dtype=torch.float64, device=device, requires_grad=True)
        x = p.input.clone().requires_grad_()
        if head:
            loss = fused(x, p.linear_weight, p.target, token_weight=weight, **p.kwargs)
        else:
            out = flce.cross_entropy(x * 1, p.target, token_weight=weight, inplace=inplace, **p.kwargs)
            assert isinstance(out, Tensor)
            loss = out
        assert loss.isfinite().all()
        x_grad, weight_grad = torch.autograd.grad(loss.sum(), (x, weight))
        return x_grad, weight_grad

    of_ones, of_zeros = gradients(1, 1, 1, 1, 1, 1), gradients(0, 0, float("nan"), 0, 0, 0)
    assert of_ones[1].count_nonzero() == 5
    if reduction != "mean":  # the gradient of a weight is the loss of its token
        z = p.input @ p.linear_weight.t() if head else p.input
        losses = F.cross_entropy(z, p.target, reduction="none") + 0.1 * z.logsumexp(1).square()
        torch.testing.assert_close(of_ones[1], losses.masked_fill(p.target == -100, 0.0))
    assert torch.equal(of_ones[1], of_zeros[1])
    assert of_ones[0].count_nonzero()
    assert not of_zeros[0].count_nonzero()


@parametrize_pairs(dtype=[torch.bfloat16, torch.float32, torch.float64], reduction=REDUCTIONS, backend=BACKENDS)
def test_weights_of_another_dtype(dtype: torch.dtype, reduction: str, backend: str, device: torch.device) -> None:
    p = make_problem((7, 2), 8, 40, dtype=torch.float32, ignored=0.2, reduction=reduction, device=device)
    class_weight, token_weight = (torch.linspace(-1, 1, n, dtype=dtype, device=device) for n in (40, 14))
    p = p.with_(token_weight=token_weight.view(2, 7).t())
    assert not p.kwargs["token_weight"].is_contiguous()
    check(p, grads="xwt", tolerance=1e-2 if dtype == torch.bfloat16 else None)
    check(p.with_(weight=class_weight.abs() + 0.5), grads="xw")


STEPS = ("statistics", "gradient", "loss_and_gradient", "scale_", "scale_rows_", "scale_cast")


@parametrize_pairs(reduction=REDUCTIONS, how=["tokens", "vocab", "logits", "in place"], grads=["xw", ""])
def test_the_gradient_of_weights_takes_no_pass_over_logits(
    reduction: str, how: str, grads: str, torch_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is saved only if it is required."""
    p = make_problem((9,), 8 if how in STRATEGIES else None, 40, token_weight=True)
    taken: list[str] = []

    def counted(name: str, step: Any, *args: Any) -> Any:
        taken.append(name)
        return step(*args)

    for name in STEPS:
        method = functools.partialmethod(functools.partial(counted, name, getattr(TorchBackend, name)))
        monkeypatch.setattr(TorchBackend, name, method)

    def run(weights: str) -> tuple[list[str], int]:
        taken.clear()
        q = p.map(lambda t, letter: t.clone().requires_grad_(letter in grads + weights))
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(id(t), t), lambda t: t):
            if q.has_head:
                options = flce.ChunkOptions(strategy=how, chunk_rows=4)  # type: ignore[arg-type]
                loss: Any = fused(q.input, q.linear_weight, q.target, reduction=reduction, options=options, **q.kwargs)
            else:
                inplace = how == "in place"
                loss = flce.cross_entropy(q.input * 1, q.target, reduction=reduction, inplace=inplace, **q.kwargs)
        bytes_kept = sum(t.numel() * t.element_size() for t in kept.values())
        if loss.requires_grad:
            loss.sum().backward()
        return list(taken), bytes_kept

    without, kept_without = run("")
    weighed, kept = run("t")
    assert sorted(weighed) == sorted(without) != []
    if grads:
        assert kept == kept_without + 9 * 8


# ---------------------------------------------------------------------------------------------------------
# Autocast, gradient modes, determinism


def test_backward_outside_autocast_and_forward_only_inside(backend: str, device: torch.device) -> None:
    p = make_problem((9,), 8, 40, dtype=torch.float32, device=device)
    x = p.input.clone().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
        first = fused(x, p.linear_weight, p.target)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        second = fused(x, p.linear_weight, p.target)
    # On Hopper the logits of the first call are neither written to memory nor rounded to bfloat16.
    torch.testing.assert_close(first, second.detach(), rtol=1e-6 if device.type == "cpu" else 1e-3, atol=0)
    second.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------
# CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["tokens", "vocab"])
def test_offsets_beyond_two_to_the_31(strategy: str) -> None:
    """One chunk has more than 2**31 logits: the last rows must be as correct as the first."""
    n, h, v = 17000, 64, 128256
    assert n * v > 2**31
    g = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(n, h, generator=g, device="cuda").bfloat16()
    w = (torch.randn(v, h, generator=g, device="cuda") / 4).bfloat16()
    p = Problem(x, w, torch.randint(0, v, (n,), generator=g, device="cuda"), None, {"reduction": "sum"})
    if strategy == "tokens":
        options = flce.ChunkOptions(strategy="tokens", chunk_rows=n)
    else:
        options = flce.ChunkOptions(strategy="vocab", max_workspace_bytes=20 << 30)
    made: Any = run_fused(p, stats=("lse", "logprob", "argmax"), options=options)
    for rows in (slice(0, 8), slice(n // 2, n // 2 + 8), slice(n - 8, n)):
        part = run_oracle(replace(p, input=x[rows], target=p.target[rows]))
        assert relative_error(made.output.lse[rows], part.lse) < 1e-3
        assert float((made.output.logprob[rows] - part.logprob).abs().max()) < 0.1
        assert relative_error(made.grad_input[rows], part.grad_input) < 2e-2
    # The gradient of each class is a sum over all rows; the reference is the same operator in small chunks.
    again: Any = run_fused(p, grads="w", options=flce.ChunkOptions(strategy="tokens", chunk_rows=1000))
    assert relative_error(made.grad_weight, again.grad_weight) < 1e-2


@pytest.mark.gpu
def test_weight_beyond_two_to_the_31_elements() -> None:
    n, h, v = 64, 16384, 140000
    assert h * v > 2**31
    x = torch.randn(n, h, device="cuda").bfloat16().requires_grad_()
    w = torch.empty(v, h, device="cuda", dtype=torch.bfloat16).normal_(std=1 / 128).requires_grad_()
    y = torch.randint(v - 1000, v, (n,), device="cuda")
    loss = fused(x, w, y)
    loss.backward()
    with torch.no_grad():
        z = F.linear(x, w).float()
        expected = F.cross_entropy(z, y)
        p = torch.softmax(z, dim=1)
        p[torch.arange(n, device="cuda"), y] -= 1
        dw = (p[:, -1000:] / n).t() @ x.float()
    assert w.grad is not None
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=0)
    assert relative_error(w.grad[-1000:], dw) < 2e-2


NUMPY = ("float64", "float32", "float16")


def scalars_as(kind: str) -> tuple[Any, Any]:
    """Return functions that convert to one kind of integer, and to one kind of real number."""
    if kind == "tensor":
        return torch.tensor, torch.tensor
    numpy = pytest.importorskip("numpy")
    if kind == "0-d array":
        return numpy.array, numpy.array
    return numpy.int64, getattr(numpy, kind)


@pytest.mark.parametrize("kind", [*NUMPY, "0-d array", "tensor"])
def test_numbers_that_are_not_of_python(kind: str, torch_backend: str, device: torch.device) -> None:
    """As in PyTorch's functions, for all arguments of all functions and modules. The numbers fit in float16."""
    integer, real = scalars_as(kind)
    integers: dict[str, Any] = {"ignore_index": 3, "shift": 1}
    reals: dict[str, Any] = {
        "label_smoothing": 0.125,
        "softcap": 4.0,
        "logit_scale": 0.5,
        "temperature": 1.5,
        "z_loss": 0.25,
    }
    expected = {**integers, **reals, "reduction": "sum"}
    given = {name: integer(value) for name, value in integers.items()}
    given |= {**{name: real(value) for name, value in reals.items()}, "reduction": "sum"}
    chunks = flce.ChunkOptions(chunk_rows=4, max_workspace_bytes=1 << 20)
    converted = flce.ChunkOptions(chunk_rows=integer(4), max_workspace_bytes=integer(1 << 20))
    assert converted == chunks
    assert all(type(value) is int for value in (converted.chunk_rows, converted.max_workspace_bytes))
    p = make_problem((2, 5), 8, 30, device=device)
    x, w, y = p.input, p.linear_weight, p.target
    want: Any = fused(x, w, y, num_items=7, options=chunks, **expected)
    for num_items in (integer(7), real(7.0)):
        assert torch.equal(fused(x, w, y, num_items=num_items, options=converted, **given), want)
    module: Any = flce.FusedLinearCrossEntropyLoss(options=converted, **given)
    assert torch.equal(module(x, w, y, num_items=integer(7)), want)
    assert repr(module) == repr(flce.FusedLinearCrossEntropyLoss(options=chunks, **expected))
    z = F.linear(x, w)
    want = flce.cross_entropy(z, y, num_items=7, **expected)
    got: Any = flce.cross_entropy(z, y, num_items=integer(7), **given)
    assert torch.equal(got, want)
    loss: Any = flce.CrossEntropyLoss(**given)
    assert torch.equal(loss(z, y, num_items=integer(7)), want)
    assert repr(loss) == repr(flce.CrossEntropyLoss(**expected))
    for softmax in (flce.softmax, flce.log_softmax):
        assert torch.equal(softmax(z, integer(-2)), softmax(z, -2))
    n, h, v, rank = (integer(size) for size in (10, 8, 30, 2))
    planned = flce.plan(n, h, v, torch.float32, device="cpu", adapter_ranks=[rank], options=converted)
    assert planned == flce.plan(10, 8, 30, torch.float32, device="cpu", adapter_ranks=[2], options=chunks)


def test_ignore_index_of_none_and_of_64_bits(backend: str, device: torch.device) -> None:
    """None is the default, as in `torch.nn.functional.linear_cross_entropy`; int32 targets may have any index."""
    x, w = torch.randn(2, 5, 4, device=device), torch.randn(7, 4, device=device)
    y = torch.randint(7, (2, 5), device=device)
    y[0, 2] = -100
    assert torch.equal(fused(x, w, y, ignore_index=None), fused(x, w, y))
    y[0, 2] = 3
    assert torch.equal(fused(x, w, y.int(), shift=1, ignore_index=2**40), fused(x, w, y, shift=1))


@pytest.fixture
def one_process() -> Iterator[Any]:
    """Return a group of this process alone: calls run the code of a divided head."""
    dist.init_process_group(
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def loss_of_kind(kind: str, device: torch.device, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a few tokens with these arguments, by one of the public functions, and a gradient."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, device=device)
    w = 2 * torch.randn(15, 8, device=device)
    y = torch.randint(0, 15, (6,), device=device)
    leaf = (x @ w.t() if kind == "logits" else x).detach().requires_grad_()
    if kind == "logits":
        loss: Any = flce.cross_entropy(leaf, y, **arguments)
    elif kind == "lazy logits":
        loss = flce.cross_entropy(cast(Any, make_lazy(head_state(leaf, w, None))), y, **arguments)
    elif kind == "linear_logprobs":
        out: Any = flce.linear_logprobs(leaf, w, y, **arguments)
        loss = -out.logprob.mean()
    else:
        if kind == "divided":
            arguments |= {"process_group": dist.group.WORLD, "vocab_size": 15}
        options = flce.ChunkOptions(strategy="vocab" if kind == "vocab" else "auto")
        loss = flce.fused_linear_cross_entropy(leaf, w, y, options=options, **arguments)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


# For each numeric option of the loss, a value that changes the loss. Add new options here.
@pytest.mark.parametrize("name", NUMERIC_FIELDS)
@pytest.mark.parametrize("kind", ["fused", "vocab", "divided", "logits", "lazy logits", "linear_logprobs"])
def test_no_number_of_the_loss_is_ignored(
    name: str, kind: str, backend: str, device: torch.device, one_process: Any
) -> None:
    """Each number changes the loss and the gradient, or raises an error."""
    option = {name: OTHER_VALUES[name]}
    if kind == "linear_logprobs" and name not in inspect.signature(flce.linear_logprobs).parameters:
        with pytest.raises(TypeError, match=name):
            loss_of_kind(kind, device, **option)
        return
    plain, other = loss_of_kind(kind, device), loss_of_kind(kind, device, **option)
    for a, b in zip(plain, other, strict=True):
        assert relative_error(b, a) > 1e-3
    if kind != "fused":
        expected = loss_of_kind("fused", device, **option)
        assert relative_error(other[0], expected[0]) < 1e-5
        if other[1].shape == expected[1].shape:
            assert relative_error(other[1], expected[1]) < 1e-5


def test_kept_arguments_are_those_of_the_call() -> None:
    """Scalar arguments are checked once. The number in a tensor may change; equal values may differ in type."""
    x, w, y = torch.randn(6, 8), torch.randn(15, 8), torch.arange(6)
    smoothing: Any = torch.tensor(0.125)
    for number in (0.125, 0.5, 0.125):
        smoothing.fill_(number)
        expected = flce.fused_linear_cross_entropy(x, w, y, label_smoothing=number)
        assert torch.equal(flce.fused_linear_cross_entropy(x, w, y, label_smoothing=smoothing), expected)
    assert flce.fused_linear_cross_entropy(x, w, y, logit_scale=1).isfinite()
    with pytest.raises(TypeError, match="logit_scale"):
        flce.fused_linear_cross_entropy(x, w, y, logit_scale=True)
    with pytest.raises(TypeError, match="stats"):
        flce.cross_entropy(x, y, stats="lse")  # type: ignore[call-overload]
    assert loss_spec(reduction="sum", ignore_index=3) is loss_spec(reduction="sum", ignore_index=3)
    assert loss_spec(reduction="sum", ignore_index=3) == LossSpec("sum", 3)


def test_formulas_refuse_an_option_that_they_do_not_have(monkeypatch: pytest.MonkeyPatch, torch_backend: str) -> None:
    """An option of the loss that `formulas.finish_row` does not name is an error, not a silently different loss."""
    x, w, y = torch.randn(6, 8), torch.randn(15, 8), torch.arange(6)
    monkeypatch.setattr(formulas, "RESULT_FIELDS", formulas.RESULT_FIELDS - {"z_loss"})
    formulas.refuse_unknown_fields.cache_clear()
    with pytest.raises(NotImplementedError, match="z_loss"):
        flce.fused_linear_cross_entropy(x, w, y, z_loss=0.5)
    with pytest.raises(NotImplementedError, match="z_loss"):
        flce.cross_entropy(x, y, z_loss=0.5)


@pytest.mark.parametrize("call", ["tokens", "vocab", "sampled", "logprobs"])
def test_a_hook_that_returns_saved_tensors_with_other_strides(call: str, backend: str, device: torch.device) -> None:
    """Gradients that backward computes from saved tensors equal those of the oracle."""

    def unpack(t: Tensor) -> Tensor:
        if t.dim() == 1:
            return torch.stack((t, t), 1)[:, 0]
        return t.t().contiguous().t() if t.dim() == 2 else t

    p = make_problem((13,), 8, 50, dtype=torch.float32, device=device, bias=True, class_weight=call != "logprobs")
    q = p.map(lambda t, _: t.clone().requires_grad_())
    how: dict[str, Any] = {"sample_below": 2.0**-20} if call == "sampled" else {"strategy": call}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        if call == "logprobs":
            out: Any = flce.linear_logprobs(q.input, q.linear_weight, q.target, linear_bias=q.linear_bias)
            loss: Any = -out.logprob
        else:
            options = flce.ChunkOptions(**how)
            loss = flce.fused_linear_cross_entropy(
                q.input, q.linear_weight, q.target, linear_bias=q.linear_bias, reduction="none", options=options,
                **q.kwargs,
            )  # fmt: skip
    loss.sum().backward()
    expected = run_oracle(p.with_(reduction="none"))
    pairs: Any = (q.input.grad, expected.grad_input), (q.linear_weight.grad, expected.grad_weight)
    for found, wanted in pairs:
        assert relative_error(found, wanted) < 1e-5
