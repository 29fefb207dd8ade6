"""`flce.linear_logprobs` against float64: values, gradients, bits, memory, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flce
from flce.backends.eager import CPU_SLAB_BYTES, TorchBackend
from flce.core.problem import OUTPUTS, LinearCrossEntropyProblem, LinearTerm, LogprobSpec, Needs
from flce.engine import case
from flce.ops import linear_logprobs as ops
from flce.ops.linear_operators import plan_for_problem
from tests.hopper import logits_dtypes_on_a_gpu
from tests.planning.test_plan import matmul_flops, peak_on_cpu


def call_of(
    n: int = 12, hidden: int = 24, vocab: int = 101, k: int = 5, *, dtype: torch.dtype = torch.float32, **more: Any
) -> SimpleNamespace:
    """Return tensors and arguments of a call: ignored tokens; candidates that are equal, the target, or -1."""
    g = torch.Generator().manual_seed(n + vocab)
    device = more.pop("device", "cpu")

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * std).to(device, dtype)

    target = torch.randint(vocab, (n,), generator=g)
    candidates = torch.randint(vocab, (n, k), generator=g)
    candidates[:, 1:2], candidates[:, 2:3] = candidates[:, :1], target[:, None]
    candidates[: n // 2, 3:4] = -1
    target[1::5] = -100
    kwargs: dict[str, Any] = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, "linear_bias": None, **more}
    if kwargs["temperature"] == "each":
        kwargs["temperature"] = (torch.rand(n, generator=g) + 0.5).to(device)
    x, w = normal(n, hidden, std=2).requires_grad_(), normal(vocab, hidden, std=0.4).requires_grad_()
    return SimpleNamespace(x=x, w=w, y=target.to(device), candidates=candidates.to(device), kwargs=kwargs)


def run(call: SimpleNamespace, **more: Any) -> Any:
    arguments = {"candidates": call.candidates, "outputs": OUTPUTS, **call.kwargs, **more}
    return flce.linear_logprobs(call.x, call.w, call.y, **arguments)


def same(a: flce.LinearLogprobsOutput, b: flce.LinearLogprobsOutput) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in vars(a)]
    return all(x is y or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("how", [{}, {"max_workspace_bytes": 80000}, {"strategy": "vocab"}, {"chunk_rows": 5}], ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "product"])
def test_the_ratio_is_one(kind: str, how: dict[str, Any], request: pytest.FixtureRequest, device: torch.device) -> None:
    """Calls with and without gradients return the same bits, for any gradients."""
    if kind == "product":
        request.getfixturevalue("on_hopper")
    else:
        request.getfixturevalue("torch_backend")
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    call = call_of(24, 32, 600, dtype=dtype, device=device)
    options = flce.ChunkOptions(**how)
    everything = run(call, top_k=3, options=options)
    with torch.no_grad():
        assert same(everything, run(call, top_k=3, options=options))
    call.w.requires_grad_(False)
    assert same(everything, run(call, top_k=3, options=options))


def test_bits_of_a_token(device: torch.device, on_hopper: None) -> None:
    """With a fused product, the bits of a token do not depend on outputs or on the other tokens and their order."""
    call = call_of(20, 64, 600, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        # The interpreter multiplies with NumPy, whose sums may depend on the position of a row. These sums are exact.
        call.x, call.w = ((4 * t.detach()).round().div(4).requires_grad_() for t in (call.x, call.w))
    expected = run(call).logprob
    assert torch.equal(run(call, outputs=("logprob",), candidates=None).logprob, expected)
    order = torch.randperm(20, device=device)
    for rows in (order, slice(3, 4), slice(0, 13), torch.arange(60, device=device) % 20):
        part = SimpleNamespace(
            x=call.x[rows], w=call.w, y=call.y[rows], candidates=call.candidates[rows], kwargs=call.kwargs
        )
        assert torch.equal(run(part, outputs=("logprob", "entropy"), top_k=2).logprob, expected[rows])


@pytest.mark.parametrize("kind", ["torch_backend", "triton_backend", "on_hopper"])
def test_ties(kind: str, request: pytest.FixtureRequest, device: torch.device) -> None:
    """The argmax is the first of equal logits, within a block and over several blocks."""
    request.getfixturevalue(kind)
    call = call_of(6, 64, 700, dtype=torch.bfloat16 if kind == "on_hopper" else torch.float32, device=device)
    with torch.no_grad():
        call.w.mul_(2).round_()  # sums of integers do not depend on the order
        call.w[[5, 77, 400, 699]] = 4 * call.w[:1]
        call.x.copy_(call.x.mul_(0.1).round_() + 5 * call.w[:1])
    assert set(run(call).argmax[call.y != -100].tolist()) == {5}


def test_logits_are_never_rounded(torch_backend: str) -> None:
    for half in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="never rounds logits"):
            run(call_of(dtype=half), options=flce.ChunkOptions(logits_dtype=half))


def test_logits_of_minus_infinity(backend: str) -> None:
    """Classes that a bias excludes do not contribute to entropies, and get no gradient."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8)
    bias = torch.zeros(30)
    bias[10:20] = -torch.inf
    kept = torch.cat((torch.arange(10), torch.arange(20, 30)))
    candidates = torch.tensor([3, 12])
    out: Any = flce.linear_logprobs(x, w, outputs=("entropy", "lse"), linear_bias=bias, candidates=candidates)
    logprob = (x @ w[kept].T).log_softmax(-1)
    expected = -(logprob.exp() * logprob).sum(-1) + logprob[:, 3]
    got = out.entropy + out.candidate_logprob[:, 0]
    torch.testing.assert_close(got, expected)
    assert bool((out.candidate_logprob[:, 1] == -torch.inf).all())
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("budget", [None, 6700])
def test_most_probable_classes_among_those_of_minus_infinity(budget: int | None) -> None:
    """If fewer than k logits are finite, ids are valid and different classes; in one block, and in several blocks of
    fewer than k classes."""
    x, w, bias = torch.randn(4, 8), torch.randn(300, 8), torch.full((300,), -torch.inf)
    bias[10:13] = 0
    out: Any = flce.linear_logprobs(
        x,
        w,
        outputs=(),
        linear_bias=bias,
        top_k=100,
        options=flce.ChunkOptions(strategy="vocab", max_workspace_bytes=budget),
    )
    assert torch.equal(out.top_k_ids[:, :3].sort().values, torch.tensor([10, 11, 12]).expand(4, 3))
    assert bool((out.top_k_logprob[:, 3:] == -torch.inf).all())
    for ids in out.top_k_ids.tolist():
        assert len(set(ids)) == 100
        assert min(ids) >= 0


def test_the_module() -> None:
    call = call_of(temperature="each")
    module = flce.LinearLogprobs(outputs=("logprob", "lse"), top_k=2, softcap=4.0)
    got = module(call.x, call.w, call.y, candidates=call.candidates, temperature=call.kwargs["temperature"])
    call.kwargs["softcap"] = 4.0
    assert same(got, run(call, outputs=("logprob", "lse"), top_k=2))
    assert "softcap=4.0" in repr(module)
    with pytest.raises(ValueError, match="unknown output"):
        flce.LinearLogprobs(outputs=("probability",))


@pytest.mark.parametrize("kind", ["compiled", "entropies"])
def test_mask(kind: str, backend: str, device: torch.device) -> None:
    """Masked targets are like ignored targets, in a graph too. Without targets the entropies of masked tokens are 0."""
    x, w = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((2, 9, 16), (40, 16)))
    y, mask = torch.randint(40, (2, 9), device=device), torch.rand(2, 9, device=device) < 0.4
    function: Any = flce.linear_logprobs
    if kind == "compiled":
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        got = compiled(x, w, y, mask=mask, shift=1).logprob
        want = function(x, w, y.where(mask, -100), shift=1).logprob
    else:
        got = function(x, w, outputs=("entropy",), mask=mask).entropy
        want = function(x, w, outputs=("entropy",)).entropy * mask
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(values.sin().sum(), (x, w)) for values in (got, want))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_masked_targets_cost_no_products() -> None:
    x, w = torch.randn(40, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    mask, skip = torch.arange(40) % 4 == 1, flce.ChunkOptions(skip_ignored=True)

    def run(x: Tensor, mask: Tensor | None) -> None:
        out: Any = flce.linear_logprobs(x, w, torch.arange(len(x)) % 30, mask=mask, options=skip)
        out.entropy.sum().backward()

    assert matmul_flops(lambda: run(x, mask)) == matmul_flops(lambda: run(x[mask], None)) > 0


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "output": (ValueError, "unknown output 'probs'", {"outputs": ("probs",)}),
    "repeated": (ValueError, "'lse' twice", {"outputs": ("lse", "lse")}),
    "a string": (TypeError, "outputs must be a tuple", {"outputs": "lse"}),
    "no target": (ValueError, "'logprob', which needs a target", {"target": None, "outputs": ("logprob",)}),
    "shift": (ValueError, "shift=1 needs a target", {"target": None, "outputs": ("lse",), "shift": 1}),
    "probabilities": (TypeError, "int64 or int32", {"target": torch.zeros(4)}),
    "large": (IndexError, r"candidate 30 at \(2, 1\)", {"candidates": torch.tensor([[0, 1], [2, 3], [4, 30], [0, 0]])}),
    "shape": (ValueError, r"shape \(K,\) or \(4, K\)", {"candidates": torch.zeros(3, 2, dtype=torch.int64)}),
    "dtype": (TypeError, "candidates must hold class indices", {"candidates": torch.zeros(4, 2)}),
    "many": (ValueError, "at most 256", {"candidates": torch.zeros(257, dtype=torch.int64)}),
    "mask": (ValueError, r"mask must have the shape of target, \(4,\), got \(3,\)", {"mask": torch.ones(3) > 0}),
    "long mask": (TypeError, "torch.int64: give mask.bool()", {"mask": torch.ones(4, dtype=torch.int64)}),
    "top": (ValueError, "top_k must be at most the 30 classes", {"top_k": 31}),
    "temperatures": (ValueError, r"shape \(4,\)", {"temperature": torch.ones(3)}),
    "its gradient": (ValueError, "no gradient", {"temperature": torch.ones(4, requires_grad=True)}),
    "zero": (ValueError, "> 0 for each token, got 0 at position 1", {"temperature": torch.tensor([1.0, 0, 1, 1])}),
    "number": (ValueError, "temperature must be a finite number > 0", {"temperature": 0.0}),
    "its dtype": (TypeError, "floating dtype", {"temperature": torch.ones(4, dtype=torch.int64)}),
    "head": (ValueError, r"linear_weight must have shape \(V, H\)", {"linear_weight": torch.randn(5, 6, 8)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, wrong = BAD[name]
    arguments = {"input": torch.randn(4, 8), "linear_weight": torch.randn(30, 8), "target": torch.randint(30, (4,))}
    with pytest.raises(error, match=message):
        flce.linear_logprobs(**{**arguments, **wrong})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("budget", [None, 64 << 20])
def test_a_call_in_a_graph_has_the_plan_of_any_other(
    dtype: torch.dtype, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So results in a graph have the same bits as outside."""
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    problem = LinearCrossEntropyProblem(
        (LinearTerm(torch.empty(4096, 512, dtype=dtype), torch.empty(32000, 512, dtype=dtype)),),
        torch.empty(4096, dtype=torch.int64),
        *(None, None, None, None),
        LogprobSpec(),
        Needs.from_flat([True, True, False]),
        options=flce.ChunkOptions(max_workspace_bytes=budget),
    )
    for gradients in (False, True):
        problems = (replace(problem, is_traced=is_traced) for is_traced in (False, True))
        outside, inside = (plan_for_problem(p if gradients else ops._without_gradients(p)) for p in problems)
        assert outside == inside


@pytest.mark.parametrize("sample_below", [None, 2**-20])
def test_bad_values_on_a_gpu(sample_below: float | None, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """If the host does not read the values, bad values give NaN in their row, and no memory is read out of bounds."""
    monkeypatch.setattr("flce.engine.vectors.can_read_values", lambda device: False)
    call = call_of(4, 8, 30)
    call.y[:] = torch.tensor([1, 2, 30, 3])
    call.candidates[0, 0] = 10**9
    call.candidates[3, 1] = -7
    call.kwargs["temperature"] = torch.tensor([1.0, -1.0, 1.0, 1.0])
    call.kwargs["options"] = flce.ChunkOptions(sample_below=sample_below)
    out = run(call)
    assert out.logprob.isnan().tolist() == [False, True, True, False]
    assert out.candidate_logprob[0].isnan().tolist() == [True] + 4 * [False]
    assert out.candidate_logprob[3].isnan().tolist() == [False, True] + 3 * [False]
    # A bad target or temperature affects all results of its row; a bad candidate does not affect other candidates.
    for name in ("logprob", "candidate_logprob"):
        (grad,) = torch.autograd.grad(getattr(out, name).sum(), call.x, retain_graph=True)
        assert grad.isnan().all(-1).tolist() == grad.isnan().any(-1).tolist() == [False, True, True, False], name


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_topk_kl(direction: str, tail: bool) -> None:
    student, teacher = (torch.randn(6, 20, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    ids = teacher.topk(5).indices
    p, q = (t.gather(-1, ids).clone() for t in (student, teacher))
    q[2, 3:] = -torch.inf  # there are only three classes
    for row in range(6):
        k = 3 if row == 2 else 5
        lists = [torch.cat((t[:k].exp(), 1 - t[:k].exp().sum()[None])) for t in (p[row], q[row])]
        a, b = lists[::-1] if direction == "forward" else lists
        expected = (a * (a / b).log())[: None if tail else k].sum()
        got = flce.topk_kl(p[row], q[row], direction, tail)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected)
    assert torch.autograd.gradcheck(lambda s: flce.topk_kl(s, q[:2], direction, tail), p[:2].requires_grad_())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direction must be"):
        flce.topk_kl(p, q, "sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the same shape"):
        flce.topk_kl(p[:2], q)
    for wrong in ((p.long(), q), (p, q.long()), (p > 0, q), (p * 1j, q), (p.to_sparse(), q), (p.tolist(), q)):
        with pytest.raises(TypeError, match=r"(candidate|teacher)_logprob must (be|have)"):
            flce.topk_kl(*wrong)
    with pytest.raises(TypeError, match="tail must be a bool, got str"):
        flce.topk_kl(p, q, tail="no")  # type: ignore[arg-type]


def test_topk_kl_of_other_dtypes_and_excluded_classes() -> None:
    logprob = torch.randn(40, 5).log_softmax(-1)
    stored = torch.randn(40, 5).log_softmax(-1).bfloat16()  # the sum of the probabilities is about 1
    got = flce.topk_kl(logprob, stored)
    assert got.dtype == torch.float32
    assert torch.equal(got, flce.topk_kl(logprob, stored.float()))
    assert bool(got.isfinite().all())

    student = torch.tensor([0.9, 0.0]).log().requires_grad_()
    teacher = torch.tensor([0.5, 0.3]).log()
    reverse = flce.topk_kl(student, teacher, "reverse")
    torch.testing.assert_close(reverse, torch.tensor(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.2)))
    assert bool(torch.autograd.grad(reverse, student)[0].isfinite().all())
    assert flce.topk_kl(student, teacher, "forward") == torch.inf


@pytest.mark.parametrize("needs", ["xw", "x", ""])
def test_no_candidates_have_a_gradient(needs: str, torch_backend: str) -> None:
    """The gradient is 0, as for a gather with an empty index."""
    call = call_of(3)
    for name, leaf in (("x", call.x), ("w", call.w)):
        leaf.requires_grad_(name in needs)
    out: Any = flce.linear_logprobs(call.x, call.w, call.y, candidates=call.candidates[:, :0])
    assert out.candidate_logprob.shape == (3, 0)
    assert out.candidate_logprob.requires_grad == bool(needs)
    if needs:
        out.candidate_logprob.sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in (call.x, call.w))
    assert (call.x.grad is not None, call.w.grad is not None) == ("x" in needs, "w" in needs)


def test_candidates_are_processed_in_slabs() -> None:
    x, weight, ids = torch.zeros(4096, 64), torch.zeros(8, 64), torch.zeros(4096, 32, dtype=torch.int64)
    values, out = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for call in (
        lambda: TorchBackend().row_products(x, weight, ids, out),
        lambda: TorchBackend().sum_equal(ids, values, out),
    ):
        assert peak_on_cpu(call) <= 1.6 * CPU_SLAB_BYTES
