"""`ChunkOptions.sample_below`: gradients that are right on average, from a random choice of improbable classes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flce
from benchmarks.real_heads import zipf_head
from flce.backends import contract, load_backend
from flce.backends.contract import Marks, RowInputs, RowOutputs, Samples, StatisticsCall, TileClasses
from flce.core import log
from flce.core.problem import LossSpec
from flce.ops import linear_operators
from flce.testing.oracle import dense_logits, token_results
from flce.testing.problem import Problem, make_problem, relative_error, run_fused, run_oracle, run_stock
from tests.helpers import BACKENDS, check, parametrize_pairs, plan_for
from tests.hopper import plan_as_on_hopper
from tests.interpreted_bfloat16 import fix_interpreter
from tests.processes import in_processes

LEAST, HALF = 2.0**-20, torch.float16


def sampled(sample_below: float = LEAST, **options: Any) -> flce.ChunkOptions:
    return flce.ChunkOptions(sample_below=sample_below, **options)


@pytest.fixture
def in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run fused products in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("simulates a GPU on a machine that has none")
    fix_interpreter(monkeypatch)
    monkeypatch.setattr(linear_operators, "has_fused_products", lambda device: True)


@pytest.mark.parametrize("features", [{}, {"softcap": 5.0, "temperature": 0.7, "logit_scale": -0.8}, {"bias": True}])
@pytest.mark.usefixtures("in_registers")
def test_logits_in_registers(features: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "triton")
    problem = make_problem((12,), 32, 300, dtype=HALF, ignored=0.2, **features)
    check(problem, options=sampled(chunk_rows=8), tolerance=2e-3)


def test_targets_near_the_cap(backend: str, device: torch.device) -> None:
    """Their small derivatives have all digits, although their log-probabilities are rounded more than z."""
    problem = make_problem((9,), 8, 60, dtype=torch.float32, device=device, bias=True, softcap=5.0, temperature=50.0)
    problem.input.mul_(100.0)
    check(problem, options=sampled(), tolerance=5e-6)


def gradients(problem: Problem, options: flce.ChunkOptions) -> list[Any]:
    result = run_fused(problem, options=options)
    return [result.grad_input, result.grad_weight]


def entropy_gradients(problem: Problem, options: flce.ChunkOptions | None) -> list[Tensor]:
    """Return the gradients of entropies plus log-probabilities; without options in stock's operators."""
    x, w = (t.detach().clone().requires_grad_() for t in (problem.input, problem.linear_weight))
    if options is None:
        results = token_results(dense_logits(x, w), problem.target, problem.target[:, None])
        value = results["entropy"] + 0.5 * results["logprob"]
    else:
        out = flce.linear_logprobs(x, w, problem.target, outputs=["logprob", "entropy"], options=options)
        assert out.entropy is not None
        assert out.logprob is not None
        value = out.entropy + 0.5 * out.logprob
    return list(torch.autograd.grad(value.mean(), (x, w)))


@parametrize_pairs(name=BACKENDS, softcap=(None, 5.0), skip_ignored=(False, True), dtype=(torch.float32, HALF))
def test_candidates(
    name: str, softcap: float | None, skip_ignored: bool, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Candidates of a token: twice the same, its target, none, frequent classes and rare ones."""
    monkeypatch.setenv("FLCE_BACKEND", name)
    problem = make_problem((12,), 16, 200, dtype=dtype, device=device, std=1.0, ignored=0.2, bias=True)
    target = problem.target.clamp(min=0)
    candidates = torch.randint(200, (12, 7), device=device)
    candidates[:, 1:5] = torch.stack((candidates[:, 0], target, torch.full_like(target, -1), target.roll(1)), 1)
    upstream = torch.randn(12, 7, device=device)

    def value(results: Any) -> Tensor:
        return (results("candidate_logprob") * upstream).sum() + results("logprob").sum()

    def leaves(dtype: torch.dtype) -> list[Tensor]:
        assert problem.linear_bias is not None
        return [
            t.to(dtype, copy=True).requires_grad_() for t in (problem.input, problem.linear_weight, problem.linear_bias)
        ]

    x, w, bias = ours = leaves(dtype)
    out = flce.linear_logprobs(
        x, w, problem.target, linear_bias=bias, outputs=["logprob"], candidates=candidates, softcap=softcap,
        options=sampled(skip_ignored=skip_ignored),
    )  # fmt: skip
    x, w, bias = right = leaves(torch.float64)
    z = dense_logits(x, w, bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = token_results(z, problem.target, candidates)
    got = torch.autograd.grad(value(lambda name: getattr(out, name).float()), ours)
    for a, b in zip(got, torch.autograd.grad(value(expected.__getitem__), right), strict=True):
        assert relative_error(a, b) < 3e-3


@pytest.mark.parametrize("compute", [gradients, entropy_gradients])
def test_unbiased(compute: Callable[[Problem, Any], list[Tensor]], torch_backend: str) -> None:
    """The error of the mean over equal tokens falls with the square root of their number, for every class."""
    errors = []
    for count in (64, 4096):
        one = make_problem((1,), 8, 200, dtype=torch.float32, std=1.0)
        problem = replace(one, input=one.input.repeat(count, 1), target=one.target.repeat(count))
        dx, dw = compute(problem, sampled(2.0**-4))
        exact = run_oracle(one) if compute is gradients else None
        right = [exact.grad_input, exact.grad_weight] if exact else entropy_gradients(one, None)
        errors.append((relative_error(dx.sum(0), right[0][0]), relative_error(dw, right[1])))
        # Of rows of dW that are not dense none is far off.
        deviation = (dw - right[1]).norm(dim=1) * count**0.5
        assert deviation.max() < 5.0 * 0.25 * one.input.norm()
    for few, many in zip(*errors, strict=True):
        assert many < few / 3
        assert many < 0.03


def test_random_numbers(torch_backend: str) -> None:
    """Equal calls draw equal numbers; other positions, hidden states and weights draw others. No generator is used."""
    problem, options = make_problem((50,), 8, 400, dtype=torch.float32), sampled(2.0**-5)
    state = torch.get_rng_state()
    first = gradients(problem, options)
    assert torch.equal(state, torch.get_rng_state())
    for again, before in zip(gradients(problem, options), first, strict=True):
        assert torch.equal(again, before)
    order = torch.arange(50).flip(0)
    moved = replace(problem, input=problem.input[order], target=problem.target[order])
    assert relative_error(gradients(moved, options)[1], first[1]) > 1e-3
    ignored = replace(problem, target=problem.target.index_fill(0, torch.tensor([3]), -100))
    kept, dropped = (
        run_fused(ignored.with_(reduction="sum"), options=sampled(2.0**-5, skip_ignored=skip)).grad_input
        for skip in (False, True)
    )
    torch.testing.assert_close(kept, dropped, rtol=1e-4, atol=1e-6)


def test_small_gradients_with_label_smoothing(backend: str, device: torch.device) -> None:
    """The share of the smoothing is not lost in float16, whose least number is 6e-8."""
    problem = make_problem((12,), 8, 20, dtype=HALF, label_smoothing=0.3, device=device)
    problem.input[:, 3], problem.linear_weight[:, 3] = 32768.0, 0.0
    got, want = run_fused(problem, options=sampled(), grad_output=1e-8), run_oracle(problem, grad_output=1e-8)
    assert got.grad_weight is not None
    assert want.grad_weight is not None
    assert relative_error(got.grad_weight, want.grad_weight) < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("skip", [False, "auto", True])
def test_ignored_rows_that_hold_no_numbers(skip: Any, bad: float, backend: str, device: torch.device) -> None:
    """The gradient of the weight is NaN where dense ones are: in their column, and with skip_ignored=True nowhere."""
    problem = make_problem((16,), 8, 130, dtype=torch.float64, ignored=0.4, device=device)
    problem.input[problem.target == -100, 2] = bad
    got = run_fused(problem, options=sampled(2.0**-5, skip_ignored=skip))
    assert got.grad_weight is not None
    assert got.grad_weight[:, 2].isnan().all() == (skip is not True)
    assert got.grad_weight[:, 3:].isfinite().all()


def test_backends_draw_the_same_entries(device: torch.device) -> None:
    """The list, from equal seeds and logits."""
    bound, logits = torch.randn(33, device=device), torch.randn(33, 777, device=device)
    target = torch.randint(-2, 777, (33,), device=device)
    target[:8], logits[:, 31] = -1, 9.0  # A GPU must not take bit -1 of a word for bit 31.
    frequent = torch.where(torch.rand(1, 777, device=device) < 0.3, torch.inf, -torch.inf)
    frequent[0, 31], zero = -torch.inf, torch.zeros(1, device=device)
    spec, found = LossSpec(ignore_index=-2, softcap=4.0, logit_scale=2.0), []
    seeds = torch.randint(-(2**31), 2**31, (33,), dtype=torch.int32, device=device)
    threshold = (bound + 3.0).masked_fill(target == -2, torch.inf)
    for name in BACKENDS:
        backend, omitted = load_backend(name), words_of(25, device)
        words = words_of(33 * 25, device).view(33, 25)
        inputs = RowInputs(target, None, None, None, None)
        call = StatisticsCall(inputs, spec, TileClasses(0, 777, 777, 777), RowOutputs(*[None] * 7))  # type: ignore[arg-type]
        one = call._replace(inputs=inputs._replace(target=target[:1]), spec=LossSpec())
        backend.mark_entries(frequent, one, Marks(zero, zero.view(torch.int32), 0, omitted[None]))
        backend.mark_entries(logits, call, Marks(threshold, seeds, 3, words))
        memory = torch.zeros(sum(Samples.sizes(33, 777)), dtype=torch.int32, device=device)
        samples = Samples.from_memory(memory, 33, 777)
        backend.list_entries(words, omitted, samples)
        found.append((omitted, samples.bounds, samples.classes))
        assert 33 < int(samples.bounds[-1]) < 33 * 200
    for of_torch, of_triton in zip(*found, strict=True):
        torch.testing.assert_close(of_triton, of_torch, rtol=1e-6, atol=1e-6)


def words_of(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


@pytest.mark.parametrize("what", ["full list", "NaN"])
def test_dense_gradients(what: str, torch_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the list is full, or a sum is not finite, gradients are those of a deferred schedule."""
    problem = make_problem((30,), 8, 400, dtype=torch.float32)
    if what == "NaN":
        problem.input[4, 2] = torch.nan
    else:
        monkeypatch.setattr(contract, "ENTRIES_PER_TOKEN", 3)
    log.sampled_passes.clear()
    with pytest.warns(RuntimeWarning, match="gradients are not sampled: a token needs more than"):
        got = run_fused(problem, options=sampled(2.0**-10))
    assert log.sampled_passes == {"dense": 1}
    want = run_fused(problem, options=flce.ChunkOptions(strategy="vocab"))
    for name in ("grad_input", "grad_weight"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), equal_nan=True)


def test_autograd(torch_backend: str) -> None:
    """Several backward passes, a checkpoint, and gradients of one argument have equal bits."""
    problem, options = make_problem((30,), 8, 400, dtype=torch.float32), sampled(2.0**-5)
    x, w = problem.input.requires_grad_(), problem.linear_weight.requires_grad_()
    loss = flce.fused_linear_cross_entropy(x, w, problem.target, options=options)
    both = torch.autograd.grad(loss, (x, w), retain_graph=True)
    again = [*torch.autograd.grad(loss, x, retain_graph=True), *torch.autograd.grad(loss, w)]

    def run(x: Tensor, w: Tensor) -> Tensor:
        loss = flce.fused_linear_cross_entropy(x, w, problem.target, options=options)
        assert isinstance(loss, Tensor)
        return loss

    kept = torch.autograd.grad(checkpoint(run, x, w, use_reentrant=False), (x, w))
    compiled = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(x, w), (x, w))
    for other in (again, kept, compiled):
        assert all(torch.equal(a, b) for a, b in zip(both, other, strict=True))


def test_ignored_hidden_states_of_nan(torch_backend: str) -> None:
    """Targets have exact rows of dW, whatever the hidden states of dropped tokens are."""
    problem = make_problem((40,), 16, 600, dtype=torch.float32, ignored=0.3, std=1.0)
    exact, targets = run_oracle(problem), problem.target[problem.target >= 0]
    problem.input[problem.target < 0] = torch.nan
    _, got = gradients(problem, sampled(2.0**-4, skip_ignored=True))
    assert relative_error(got[targets], exact.grad_weight[targets]) < 1e-5


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"options": sampled(strategy="vocab")}, "strategy 'vocab'"),
        ({"options": sampled(), "label_smoothing": 0.1, "softcap": 30.0}, "label smoothing with a softcap"),
        ({"options": sampled(max_workspace_bytes="64MiB")}, "the budget"),
    ],
)
def test_a_plan_names_the_reason(arguments: dict[str, Any], reason: str) -> None:
    shape = 8192, 4096, 262144, torch.bfloat16
    plan = flce.plan(*shape, device_kind="H200", options=sampled(2**-12))
    assert "Sampled: 2 chunks of 4096 tokens, all classes, at most 512 entries a token" in str(plan)
    assert "gradients sampled below 0.000244" in str(plan)
    assert plan.workspace_bytes <= 256 << 20
    assert f"gradients not sampled: {reason}" in str(flce.plan(*shape, device_kind="H200", **arguments))


@pytest.mark.parametrize(
    "value, message", [(0.5, "from 2..-20 to 2..-4"), (0.0, "from"), (float("nan"), "from"), ("1e-3", "a number")]
)
def test_wrong_thresholds(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"sample_below must be .*{message}"):
        flce.ChunkOptions(sample_below=value)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"class_weight": True, "token_weight": True, "z_loss": 0.01},
        {"label_smoothing": 0.2, "class_weight": True, "logit_scale": 0.7, "bias": True},
    ],
)
@in_processes(2)
def test_a_divided_head(features: dict[str, Any]) -> None:
    """Each process samples its classes, from a bound of all classes."""
    problem = make_problem((31,), 8, 300, dtype=torch.float32, ignored=0.2, std=1.0, **features)
    exact, group = run_oracle(problem), dist.group.WORLD
    own = slice(150 * dist.get_rank(), 150 * (dist.get_rank() + 1))
    x, w = problem.input.clone().requires_grad_(), problem.linear_weight[own].clone().requires_grad_()
    bias = None if problem.linear_bias is None else problem.linear_bias[own].clone().requires_grad_()
    loss = flce.fused_linear_cross_entropy(
        x, w, problem.target, linear_bias=bias, process_group=group, vocab_size=300, options=sampled(), **problem.kwargs
    )
    dx, dw = torch.autograd.grad(loss, (x, w))
    torch.testing.assert_close(loss, exact.loss.float())
    assert relative_error(dx, exact.grad_input) < 2e-3
    assert relative_error(dw, exact.grad_weight[own]) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF])
@pytest.mark.parametrize("own_products", [True, False])
def test_on_a_gpu(dtype: torch.dtype, own_products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a peaked head errors are smaller than stock's, and the memory is as planned."""
    for _ in plan_as_on_hopper(monkeypatch, own_products):
        shape, cuda = (4096, 512, 64000), torch.device("cuda")
        x, w, y = zipf_head(shape, 6.0, cuda)
        problem = Problem(x.to(dtype), w.to(dtype), y)
        stock, exact = run_stock(problem), run_oracle(problem.to(cuda))
        options = sampled(2.0**-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = run_fused(problem, options=options)
        again = run_fused(problem, options=options)
        torch.testing.assert_close(ours.loss.double(), exact.loss, rtol=1e-5, atol=1e-6)
        for name in ("grad_input", "grad_weight"):
            got, right = getattr(ours, name), getattr(exact, name)
            assert torch.equal(got, getattr(again, name))
            assert relative_error(got, right) < 0.9 * relative_error(getattr(stock, name), right) + 2e-3
        x, w = problem.input.requires_grad_(), problem.linear_weight.requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        flce.fused_linear_cross_entropy(x, w, y, options=options).backward()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= plan_for(problem, options).workspace_bytes + 2 * (x.numel() + w.numel()) + (4 << 20)
