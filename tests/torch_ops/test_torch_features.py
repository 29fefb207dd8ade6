"""The public functions and modules with PyTorch's features: autograd modes, checkpoints, compilation, graphs.

`ROWS` has a row for each way to call a public function. Each test covers one feature of PyTorch, over all rows.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import flce
from flce.core.problem import OUTPUTS
from flce.engine import case
from flce.ops import linear_cross_entropy
from flce.planning import plan, search
from flce.testing.oracle import token_results
from flce.testing.problem import ALL_GRADS, make_problem, stock_loss
from tests import forced
from tests.forced import force
from tests.helpers import REDUCTIONS, STATS, STRATEGIES
from tests.hopper import logits_dtypes_on_a_gpu

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCALARS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "shift": 1}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed slice": lambda x: x[:, 1:].transpose(0, 1),
    "second sequence": lambda x: x[1:],
    "class by class": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


class Sample(NamedTuple):
    """Tensors of one call, and the functions that use them."""

    leaves: tuple[Tensor, ...]  # some of a frozen head require no gradient
    data: tuple[Tensor, ...]  # targets
    function: Callable[..., tuple[Tensor, ...]]  # (data, *leaves) to the result and statistics
    stock: Callable[..., Tensor]  # leaves to the same result by PyTorch's operators

    @property
    def params(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if leaf.requires_grad]

    def call(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.data, *leaves)

    def result(self) -> Tensor:
        return self.call(*self.leaves)[0]

    def step(self, call: Callable[..., Any] | None = None) -> list[Tensor]:
        """Return all results, and the gradients of the first result for different upstream gradients of tokens."""
        results = (call or self.call)(*self.leaves)
        upstream = torch.linspace(0.5, 2.0, results[0].numel(), device=results[0].device)
        upstream = upstream.to(results[0].dtype).reshape(results[0].shape)
        for leaf in self.leaves:
            leaf.grad = None
        results[0].backward(upstream)
        return [*(r.detach() for r in results), *(leaf.grad for leaf in self.params if leaf.grad is not None)]


@dataclass(frozen=True)
class Row:
    """One way to call a public function."""

    name: str  # name of the function in messages
    make: Callable[..., Sample]  # dtype, device, numbers of tokens and classes to a sample
    once: bool = False  # the gradient overwrites the logits: one backward only
    twice: bool = False  # the gradients can be differentiated

    def sample(self, dtype: torch.dtype = f64, device: Any = "cpu", tokens: int = 3, vocab: int = 30) -> Sample:
        return self.make(dtype, device, tokens, vocab)


def results_of(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(t for t in output if t is not None)


def linear(
    reduction: str = "mean",
    form: str = "function",
    grads: str = ALL_GRADS,
    ranks: tuple[int, ...] = (2,),
    weigh: bool = False,
    **options: Any,
) -> Row:
    def make(dtype: torch.dtype, device: Any, tokens: int, vocab: int) -> Sample:
        p = make_problem(
            (2, tokens), 8, vocab, dtype=dtype, device=device, bias=True, class_weight=True, adapter_ranks=ranks,
            ignored=0.2, reduction=reduction, token_weight=weigh, **SCALARS,
        )  # fmt: skip
        weights = [p.kwargs.pop("token_weight")] if weigh else []
        chunking, stats = flce.ChunkOptions(**options), STATS if reduction == "none" else ()
        fixed: dict[str, Any] = {**p.kwargs, "stats": stats, "options": chunking}
        count = torch.tensor(7, device=device) if reduction == "sum" else None
        stateless = flce.FusedLinearCrossEntropyLoss(**fixed)
        owner = flce.LinearCrossEntropyLoss(8, vocab, True, device="meta", **fixed)

        def call(data: tuple[Tensor, ...], x: Tensor, w: Tensor, b: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            (y,), adapters = data, others[: 2 * len(ranks)]
            more: dict[str, Any] = {"adapters": list(zip(adapters[::2], adapters[1::2], strict=True))}
            more["num_items"] = count
            if weigh:
                more["token_weight"] = others[-1]
            if form == "stateless module":
                return results_of(stateless(x, w, y, b, **more))
            if form == "module":
                head = {"linear.weight": w, "linear.bias": b}
                return results_of(torch.func.functional_call(owner, head, (x, y), more))
            return results_of(flce.fused_linear_cross_entropy(x, w, y, linear_bias=b, **more, **fixed))

        def stock(x: Tensor, w: Tensor, b: Tensor, *others: Tensor) -> Tensor:
            z, adapters = F.linear(x, w, b), others[: 2 * len(ranks)]
            for a, up in zip(adapters[::2], adapters[1::2], strict=True):
                z = z + F.linear(a, up)
            more: dict[str, Any] = {"token_weight": others[-1]} if weigh else {}
            return stock_loss(z, p.target, **p.kwargs, **more)[0] / (1 if count is None else count)

        assert p.linear_bias is not None
        keys = "xwb" + "aB" * len(ranks) + "t" * weigh
        tensors = (p.input, p.linear_weight, p.linear_bias, *itertools.chain(*p.adapters), *weights)
        leaves = tuple(t.requires_grad_(key in grads) for key, t in zip(keys, tensors, strict=True))
        return Sample(leaves, (p.target,), call, stock)

    return Row("fused_linear_cross_entropy", make)


def logits(reduction: str = "mean", inplace: bool = False, view: str = "whole", weigh: bool = False) -> Row:
    def make(dtype: torch.dtype, device: Any, tokens: int, vocab: int) -> Sample:
        p = make_problem(
            (2, tokens), None, vocab, dtype=dtype, device=device, class_weight=True, ignored=0.2, reduction=reduction,
            token_weight=weigh, **SCALARS,
        )  # fmt: skip
        weights = [p.kwargs.pop("token_weight").requires_grad_()] if weigh else []
        target, kwargs = p.target[..., None], dict(p.kwargs)
        fixed: dict[str, Any] = {**kwargs, "stats": STATS if reduction == "none" else (), "inplace": inplace}
        count = torch.tensor(7, device=device) if reduction == "sum" else None

        def weighted(weights: tuple[Tensor, ...]) -> dict[str, Any]:
            return {"token_weight": VIEWS[view](weights[0][..., None])[..., 0]} if weights else {}

        def call(data: tuple[Tensor, ...], x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            z, y = VIEWS[view](2 * x), VIEWS[view](data[0])[..., 0]
            return results_of(flce.cross_entropy(z, y, num_items=count, **weighted(weights), **fixed))

        def stock(x: Tensor, *weights: Tensor) -> Tensor:
            loss, _ = stock_loss(VIEWS[view](2 * x), VIEWS[view](target)[..., 0], **kwargs, **weighted(weights))
            return loss / (1 if count is None else count)

        return Sample((p.input.requires_grad_(), *weights), (target,), call, stock)

    return Row("cross_entropy", make, once=inplace)


def logprobs() -> Row:
    def make(dtype: torch.dtype, device: Any, tokens: int, vocab: int) -> Sample:
        p = make_problem((2, tokens), 8, vocab, dtype=dtype, device=device, bias=True, adapter_ranks=(2,), ignored=0.2)
        candidates = (p.target[..., None] + torch.tensor([0, 0, 5], device=device)) % vocab
        temperature = torch.linspace(0.5, 2.0, tokens, device=device).repeat(2, 1)

        def together(logprob: Tensor, entropy: Tensor, lse: Tensor, candidate_logprob: Tensor) -> Tensor:
            return logprob + 0.3 * entropy - 0.1 * lse + candidate_logprob.sum(-1)

        def call(data: Any, x: Tensor, w: Tensor, b: Tensor, a: Tensor, up: Tensor) -> tuple[Tensor, ...]:
            y, candidates, temperature = data
            out: Any = flce.linear_logprobs(
                x, w, y, candidates=candidates, top_k=2, outputs=OUTPUTS, linear_bias=b, adapters=[(a, up)],
                temperature=temperature,
            )  # fmt: skip
            result = together(out.logprob, out.entropy, out.lse, out.candidate_logprob)
            return result, out.argmax, out.correct, out.mean_logit, out.top_k_logprob, out.top_k_ids

        def stock(x: Tensor, w: Tensor, b: Tensor, a: Tensor, up: Tensor) -> Tensor:
            z = (F.linear(x, w, b) + F.linear(a, up)).to(f64 if dtype == f64 else f32) / temperature[..., None]
            results = token_results(z.view(-1, vocab), p.target.view(-1), candidates.view(-1, 3))
            return together(**results).view(2, tokens)

        assert p.linear_bias is not None
        leaves = (p.input, p.linear_weight, p.linear_bias, *p.adapters[0])
        return Sample(tuple(t.requires_grad_() for t in leaves), (p.target, candidates, temperature), call, stock)

    return Row("linear_logprobs", make)


def divergence() -> Row:
    def make(dtype: torch.dtype, device: Any, tokens: int, vocab: int) -> Sample:
        p = make_problem((2, tokens), 8, vocab, dtype=dtype, device=device, bias=True, ignored=0.2)
        q = make_problem((2, tokens), 6, vocab, dtype=dtype, device=device, seed=3)

        def call(data: Any, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            y, teacher, teacher_weight = data
            out: Any = flce.linear_divergence(x, w, teacher, teacher_weight, kind="jsd", target=y, student_bias=b)
            return (out.divergence,)

        def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            wide = f64 if dtype == f64 else f32
            s = F.linear(x, w, b).to(wide).log_softmax(-1)
            t = F.linear(q.input, q.linear_weight).to(wide).log_softmax(-1)
            m = torch.logaddexp(s, t) - math.log(2.0)
            values = (F.kl_div(m, t, reduction="none", log_target=True) + (s.exp() * (s - m))).sum(-1) / 2
            return values * (p.target != -100)

        assert p.linear_bias is not None
        leaves = (p.input, p.linear_weight, p.linear_bias)
        return Sample(tuple(t.requires_grad_() for t in leaves), (p.target, q.input, q.linear_weight), call, stock)

    return Row("linear_divergence", make)


def softmax(name: str, dim: int = -1, out: torch.dtype | None = None, view: str = "whole") -> Row:
    mine, stock = getattr(flce, name), getattr(F, name)

    def make(dtype: torch.dtype, device: Any, tokens: int, vocab: int) -> Sample:
        x = make_problem((2, tokens), None, vocab, dtype=dtype, device=device).input.requires_grad_()
        return Sample(
            (x,),
            (),
            lambda data, x: (mine(VIEWS[view](2 * x), dim, out),),
            lambda x: stock(VIEWS[view](2 * x), dim, dtype=out),
        )

    return Row(name, make, twice=True)


ROWS: dict[str, Row] = {
    **{
        f"linear {reduction} {strategy}": linear(
            reduction, strategy=strategy, chunk_rows=4 if strategy == "tokens" else None
        )
        for reduction in REDUCTIONS
        for strategy in STRATEGIES
    },
    "linear frozen": linear("none", grads="xaB", ranks=(2, 3)),
    "linear weighted mean": linear(grads=ALL_GRADS + "t", weigh=True, strategy="tokens", chunk_rows=4),
    "linear weighted sum": linear("sum", form="stateless module", grads="xwbt", ranks=(), weigh=True, strategy="vocab"),
    "linear weighted none": linear("none", grads="xwbt", ranks=(), weigh=True),
    "linear weights alone": linear(grads="t", ranks=(), weigh=True, form="module"),
    "module": linear(form="module", ranks=()),
    "stateless module": linear("sum", form="stateless module"),
    "logits mean": logits(),
    "logits sum": logits("sum", view="transposed slice"),
    "logits none": logits("none", view="transposed slice"),
    "logits mean in place": logits(inplace=True),
    "logits sum in place": logits("sum", inplace=True),
    "logits none in place": logits("none", inplace=True, view="second sequence"),
    "logits weighted mean": logits(weigh=True),
    "logits weighted none": logits("none", weigh=True, view="transposed slice"),
    "logits weighted mean in place": logits(weigh=True, inplace=True),
    "logits weighted none in place": logits("none", weigh=True, inplace=True, view="second sequence"),
    "logprobs": logprobs(),
    "divergence": divergence(),
    "softmax": softmax("softmax"),
    "log_softmax": softmax("log_softmax", 1, view="transposed slice"),
}
# For Triton's interpreter, which is slow: every kernel of a backward.
INTERPRETED = (
    "linear mean tokens", "linear none vocab", "logits none", "logits mean in place", "logits none in place",
    "linear weighted mean", "logits weighted mean in place",
    "logprobs", "softmax", "log_softmax",
)  # fmt: skip


def over(rows: dict[str, Row], interpreted: Sequence[str] = ()) -> pytest.MarkDecorator:
    """`parametrize` by the rows with PyTorch's backend, and by the named rows with Triton's."""
    cases = [("torch", name) for name in rows] + [("triton", name) for name in interpreted]
    values = [pytest.param(backend, rows[name], id=f"{name}-{backend}") for backend, name in cases]
    return pytest.mark.parametrize("backend, row", values, indirect=["backend"])


every_row = over(ROWS, INTERPRETED)


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(list(got), list(want), rtol=rtol, atol=atol)


# ---------------------------------------------------------------------------------------------------------
# Autograd


@every_row
@pytest.mark.parametrize("retain", [True, False])
def test_second_backward(row: Row, retain: bool, backend: str, device: torch.device) -> None:
    """With ``retain_graph=True`` a second backward is correct, for another upstream gradient and for one tensor at a
    time, unless the gradient overwrites the logits.

    Without ``retain_graph=True`` PyTorch raises its error. Returned gradients stay unchanged.
    """
    sample = row.sample(device=device)
    loss = sample.result().square().sum()
    first = torch.autograd.grad(loss, sample.params, retain_graph=retain)
    before = [grad.clone() for grad in first]
    if retain and not row.once:
        parts = [torch.autograd.grad(2 * loss, leaf, retain_graph=True)[0] for leaf in sample.params]
        assert_same(parts, [2 * grad for grad in before], 1e-12, 1e-14)
        assert_same(torch.autograd.grad(3 * loss, sample.params), [3 * grad for grad in before], 1e-12, 1e-14)
    else:
        message = rf"through the same .*{row.name}.* a second time" if retain else "a second time"
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(3 * loss, sample.params)
    assert_same(first, before)


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu"])
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("name", ["linear mean tokens", "linear mean vocab", "linear weighted mean"])
def test_retained_gradients(name: str, dtype: torch.dtype, around: str, torch_backend: str) -> None:
    """Gradients of the inputs, then of all other leaves, have the bits of a call with a single backward."""
    sample = ROWS[name].sample(dtype)
    wants = [torch.autograd.grad(factor * sample.result(), sample.params) for factor in (0.5, 3.0)]
    if around == "checkpoint":
        loss = checkpoint(lambda *leaves: sample.call(*leaves)[0], *sample.leaves, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            loss = sample.result()
    (of_input,) = torch.autograd.grad(0.5 * loss, sample.params[0], retain_graph=True)
    others = torch.autograd.grad(3.0 * loss, sample.params[1:])
    assert_same([of_input, *others], [wants[0][0], *wants[1][1:]])


@every_row
def test_double_backward(row: Row, backend: str, device: torch.device) -> None:
    """Double backward raises an error or is correct. In a sum with a loss that can be differentiated twice, a gradient
    penalty must not be dropped."""
    sample = row.sample(device=device)

    def penalty(call: Callable[..., Tensor], leaf: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(call(*sample.leaves).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum() + leaf.square().sum(), leaf)[0]

    for leaf in sample.params:
        if row.twice:
            assert_same([penalty(lambda *x: sample.call(*x)[0], leaf)], [penalty(sample.stock, leaf)], 1e-9, 1e-11)
        else:
            with pytest.raises(RuntimeError, match=rf"{row.name} cannot be differentiated twice \(create_graph=True\)"):
                penalty(lambda *x: sample.call(*x)[0], leaf)


def dual_numbers(function: Callable[[Tensor], Any], x: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def jacfwd(function: Callable[[Tensor], Any], x: Tensor) -> None:
    torch.func.jacfwd(function)(x)


@over(ROWS)
@pytest.mark.parametrize("way", [dual_numbers, jacfwd])
def test_forward_mode(way: Any, row: Row, backend: str) -> None:
    """The derivative is never a silent zero, for a tangent of any tensor."""
    sample = row.sample()
    values = [leaf.detach() for leaf in sample.leaves]
    of_head = {"fused_linear_cross_entropy": "cross_entropy", "linear_logprobs": "log_softmax"}
    of_head["linear_divergence"] = "log_softmax"
    stock = f"linear and torch.nn.functional.{of_head[row.name]}" if row.name in of_head else row.name
    for k, value in enumerate(values):
        message = rf"flce\.{row.name} does not support forward-mode.*use torch\.nn\.functional\.{stock}"
        with pytest.raises(RuntimeError, match=message):
            way(lambda x, k=k: sample.call(*values[:k], x, *values[k + 1 :])[0], value)


@pytest.mark.parametrize("reentrant", [True, False])
@every_row
def test_checkpoint(reentrant: bool, row: Row, backend: str, device: torch.device) -> None:
    sample = row.sample(device=device)

    def block(*leaves: Tensor) -> tuple[Tensor, ...]:
        return sample.call(*(torch.tanh(leaf) for leaf in leaves))

    results = sample.call(*sample.leaves)
    assert [result.requires_grad for result in results] == [True] + [False] * (len(results) - 1)
    got = sample.step(lambda *leaves: checkpoint(block, *leaves, use_reentrant=reentrant))
    assert_same(got, sample.step(block), 1e-12, 1e-14)


@every_row
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, row: Row, backend: str, device: torch.device) -> None:
    sample = row.sample(device=device)
    with mode():
        results = sample.call(*sample.leaves)
    assert not any(result.requires_grad for result in results)
    assert_same([r.clone() for r in results], [r.detach() for r in sample.call(*sample.leaves)], 1e-14, 1e-14)


@pytest.mark.parametrize("kind", ["is_grads_batched", "vmap"])
@every_row
def test_several_upstream_gradients_at_once(kind: str, row: Row, backend: str, device: torch.device) -> None:
    """PyTorch has a fallback for logits that are not overwritten. Otherwise it raises an error."""

    def gradients(loss: Tensor) -> Any:
        if kind == "vmap":
            return torch.vmap(lambda grad: torch.autograd.grad(loss, sample.params, grad))(upstream)
        return torch.autograd.grad(loss, sample.params, upstream, is_grads_batched=True)

    sample = row.sample(device=device)
    upstream = torch.randn(2, *sample.result().shape, device=device, dtype=f64)
    # The gradient of token weights alone is a product of PyTorch's.
    is_head = row.name.startswith(("linear", "fused")) and row is not ROWS["linear weights alone"]
    if is_head or row.once:
        with pytest.raises(RuntimeError, match=r"^(Batching rule not implemented|vmap: |Cannot access data pointer)"):
            gradients(sample.result())
    else:
        assert_same(gradients(sample.result()), gradients(sample.stock(*sample.leaves)), 1e-9, 1e-11)


@every_row
def test_gradients_are_memory_of_their_own(row: Row, backend: str, device: torch.device) -> None:
    """Another call before the first backward has no effect on it, and clipping may change the gradients in place."""
    sample = row.sample(device=device)
    want = torch.autograd.grad(sample.result().sum(), sample.params)
    first = sample.result().sum()
    second = sample.call(*(3 * leaf for leaf in sample.leaves))[0].sum()
    torch.autograd.grad(second, sample.params)
    hooked = [torch.empty(0)] * len(sample.params)
    for k, leaf in enumerate(sample.params):
        leaf.register_hook(lambda grad, k=k: operator.setitem(hooked, k, grad.clone()))
    first.backward()
    grads = [leaf.grad for leaf in sample.params if leaf.grad is not None]
    assert_same(hooked, grads)
    assert_same(grads, want, 1e-12, 1e-14)
    assert len({t.untyped_storage().data_ptr() for t in (*sample.leaves, *grads)}) == len(sample.leaves) + len(grads)
    torch.nn.utils.clip_grad_norm_(sample.params, 0.1)


@over({name: ROWS[name] for name in INTERPRETED})
def test_from_several_threads(row: Row, backend: str) -> None:
    samples = [row.sample(tokens=tokens) for tokens in range(3, 11)]
    with ThreadPoolExecutor(4) as pool:
        for got, sample in zip(pool.map(Sample.step, samples), samples, strict=True):
            assert_same(got, sample.step())


# ---------------------------------------------------------------------------------------------------------
# torch.library


class Calls(TorchDispatchMode):
    """Mode that records calls of the package's operators, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flce":
            self.of[func] = (args, kwargs or {})
        return func(*args, **(kwargs or {}))


OPCHECKED: dict[str, Row] = {
    **{name: row for name, row in ROWS.items() if "in place" not in name},
    "linear no gradients": linear(grads=""),
    "linear only of x": linear(grads="x", ranks=()),
    "linear adapters vocab": linear("none", strategy="vocab", grads="aB"),
    "logits class by class": logits("none", view="class by class"),
    "softmax, wider": softmax("softmax", 1, f32, "class by class"),
}


def check_operators(row: Row, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check schema, autograd registration, fake implementation and AOT dispatch of all operators of a call."""
    monkeypatch.setattr(linear_cross_entropy, "_can_bypass_dispatcher", lambda tensors: False)
    sample = row.sample(dtype, device)
    with Calls() as forward:
        result = sample.result()
    with Calls() as backward:
        if sample.params:
            torch.autograd.grad(result, sample.params, torch.full_like(result, 0.5))
    assert forward.of
    # The gradient of token weights alone is a product of PyTorch's.
    assert bool(backward.of) == bool(sample.params and row is not ROWS["linear weights alone"])
    tolerance: dict[str, Any] = {} if dtype == f32 else {"rtol": 1e-2, "atol": 1e-2}
    for op, call in {**backward.of, **forward.of}.items():

        def leaf(t: Tensor, op: Any = op) -> Tensor:
            """Return a leaf with the same strides: a clone keeps strides only without gaps."""
            return t.detach().requires_grad_(t.requires_grad and op in forward.of)

        args, kwargs = tree_map_only(Tensor, leaf, call)
        torch.library.opcheck(op, args, kwargs, **tolerance)


# An operator is registered once for both backends. With Triton this checks that kernels follow the schema.
@over(OPCHECKED, [*(name for name in INTERPRETED if name in OPCHECKED), "logits class by class"])
def test_opcheck(row: Row, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_operators(row, f32, device, monkeypatch)


@over({name: ROWS[name] for name in ("linear mean tokens", "linear none vocab", "logits none")}, ["linear mean tokens"])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_opcheck_of_half_precision(
    dtype: torch.dtype, row: Row, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the dtypes of a GPU, also on a CPU: backward must not change scaled float16 gradients."""
    monkeypatch.setattr(case, "logits_dtypes", logits_dtypes_on_a_gpu)
    # Cached plans of other tests have CPU dtypes, and plans of this test must not stay cached.
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_cached_plan", plan.ChunkPlan)
        search.plan_for_case.cache_clear()
        check_operators(row, dtype, device, monkeypatch)
    search.plan_for_case.cache_clear()


# ---------------------------------------------------------------------------------------------------------
# torch.compile


# Every operator, form and view, without rows that differ only in the reduction.
COMPILED = (
    "linear mean tokens", "linear none vocab", "linear frozen", "module", "stateless module",
    "logits mean in place", "logits sum", "logits none", "logprobs", "softmax", "log_softmax",
)  # fmt: skip


def calls_of_ours(graph: torch.fx.GraphModule) -> int:
    return sum("flce" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.usefixtures("fresh_compiler")
@over({name: ROWS[name] for name in COMPILED}, ["linear mean tokens", "logits none"])
def test_compile(row: Row, backend: str, device: torch.device) -> None:
    """One graph, with one flce node, for many lengths."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    check_compiled(row, counter, device, dynamic=True)
    assert [calls_of_ours(graph) for graph in counter.graphs if calls_of_ours(graph)] == [1]
    # All symbols are sizes of tensors, not options.
    inputs = [n.meta["example_value"] for graph in counter.graphs for n in graph.graph.find_nodes(op="placeholder")]
    sizes = set().union(*(symbols(size) for x in inputs if isinstance(x, Tensor) for size in x.shape))
    assert set().union(*map(symbols, inputs)) <= sizes


def symbols(value: Any) -> set[Any]:
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def check_compiled(row: Row, compiler: Any, device: torch.device, **kwargs: Any) -> None:
    function = row.sample(f32, device).function

    def step(data: tuple[Tensor, ...], *leaves: Tensor) -> tuple[Tensor, ...]:
        return function(data, *(torch.tanh(leaf) for leaf in leaves))

    compiled = torch.compile(step, backend=compiler, fullgraph=True, **kwargs)
    for tokens in (4, 7, 9):
        sample = row.sample(f32, device, tokens)
        got, want = (sample.step(functools.partial(f, sample.data)) for f in (compiled, step))
        assert_same(got, want, 1e-5, 1e-6)


CHUNKED: dict[str, Row] = {
    "linear": linear(),
    "linear sixteen rows": linear(strategy="tokens", chunk_rows=16),
    "linear vocab budget": linear(strategy="vocab", max_workspace_bytes=1 << 20),
    "logits": logits(),
    "softmax": softmax("softmax"),
}


@pytest.mark.usefixtures("fresh_compiler")
@over(CHUNKED)
def test_graphs_for_many_lengths(row: Row, backend: str, device: torch.device) -> None:
    """Without ``dynamic=True`` the second length compiles one more graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    check_compiled(row, counter, device)
    # More than one chunk may have a separate graph (the dtype of a buffer differs), lengths may not.
    assert 1 <= sum(map(bool, map(calls_of_ours, counter.graphs))) <= 2 + (row is CHUNKED["linear sixteen rows"])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["linear frozen", "logits none in place", "log_softmax"])
def test_compile_inductor(name: str, torch_backend: str, device: torch.device) -> None:
    check_compiled(ROWS[name], "inductor", device, dynamic=True)


# ---------------------------------------------------------------------------------------------------------
# Tensors without memory


class OnlyMeta(TorchDispatchMode):
    """Mode that fails if an operator returns or gets a tensor with memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not isinstance(value, Tensor) or value.is_meta, f"{func}: a tensor on {value.device}"
        return result


WITHOUT_MEMORY: dict[str, Row] = {
    **ROWS,
    "linear budget that no plan keeps": linear(max_workspace_bytes=1),
    "linear tokens, such a budget": linear("none", strategy="tokens", max_workspace_bytes=1),
    "linear vocab, such a budget": linear("sum", strategy="vocab", max_workspace_bytes=1),
    "softmax, wider": softmax("softmax", 1, f32),
}


@pytest.mark.parametrize("environment", [{}, {"FLCE_DEBUG": "1"}, {"FLCE_BACKEND": "triton"}], ids=str)
@pytest.mark.parametrize("row", list(WITHOUT_MEMORY.values()), ids=list(WITHOUT_MEMORY))
def test_meta_tensors(row: Row, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run, results have the shapes and dtypes of a call, and no value is computed."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for dtype in (f32, f64, bf16, f16):
        sample = row.sample(dtype, "meta")
        with OnlyMeta():
            got = sample.step()
        want = [sample.stock(*sample.leaves), *sample.params]
        for mine, like in zip([got[0], *got[-len(sample.params) :]], want, strict=True):
            assert (mine.device, mine.dtype, mine.shape) == (like.device, like.dtype, like.shape)


# ---------------------------------------------------------------------------------------------------------
# CUDA


ON_CUDA: dict[str, Row] = {
    **ROWS,
    "linear several chunks": linear(chunk_rows=100),
    "linear several blocks": linear("none", strategy="vocab", max_workspace_bytes=8 << 20),
    "linear without adapters": linear(ranks=()),
}
NORMALIZATIONS: dict[str, Any] = {
    "as they are": None,
    "unnormalized": forced.unnormalized,
    "borrowed": forced.borrowed(1),
}
# Small heads with their default schedule, and with the schedule of large heads on Hopper.
on_cuda = pytest.mark.parametrize(
    "name, normalization",
    [(name, kind) for kind in NORMALIZATIONS for name in ON_CUDA if kind == "as they are" or "linear" in name],
)


def on_gpu(name: str, normalization: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> Sample:
    """Return a call of a size at which several programs of every kernel run."""
    if NORMALIZATIONS[normalization] is not None:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("exponentials are for Hopper")
        force(monkeypatch, NORMALIZATIONS[normalization])
    return ON_CUDA[name].sample(bf16, device, tokens=128, vocab=5000)


@pytest.mark.gpu
@on_cuda
def test_nothing_waits_for_the_gpu(name: str, normalization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = on_gpu(name, normalization, monkeypatch)
    sample.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_cuda
def test_cuda_graph(name: str, normalization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a side stream, and captured there, forward and backward return the bits of eager mode, also for values of any
    size that are copied in later."""
    sample = on_gpu(name, normalization, monkeypatch)
    expected = sample.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = [sample.step() for _ in range(2)][-1]
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(beside, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample.step()
    for size in (1.0, 50.0):
        with torch.no_grad():
            for leaf in sample.leaves:
                leaf.copy_(size * torch.randn_like(leaf))
            for data in sample.data:
                data.copy_(data.roll(1, dims=1))
        graph.replay()
        assert_same([t.clone() for t in captured], sample.step())
