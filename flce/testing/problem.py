"""One call as data (`Problem`), its results by flce, by PyTorch's operators and by the oracle, and their tolerances."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.testing.oracle import OracleResult, dense_logits, oracle, shifted_target

IGNORED = -100
# Standard deviation of the logits; about that of a trained model.
LOGITS_STD = 4.0
# Letters of gradients: x input, w weight, b bias, a and B the tensors of all adapters. "t" is the gradient of
# `token_weight`.
ALL_GRADS = "xwbaB"


@dataclass(frozen=True)
class Problem:
    """The tensors and the keyword arguments of one call, without ``options`` and ``stats``."""

    input: Tensor
    linear_weight: Tensor
    """Has shape (0,) if there is no head. `input` then has the logits."""
    target: Tensor
    linear_bias: Tensor | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def has_head(self) -> bool:
        return self.linear_weight.dim() == 2

    def with_(self, **kwargs: Any) -> Problem:
        return replace(self, kwargs={**self.kwargs, **kwargs})

    def map(self, function: Callable[[Tensor, str], Tensor]) -> Problem:
        """Return the problem with each tensor that may have a gradient replaced by `function(tensor, letter)`."""
        return replace(
            self,
            input=function(self.input, "x"),
            linear_weight=function(self.linear_weight, "w"),
            linear_bias=None if self.linear_bias is None else function(self.linear_bias, "b"),
            adapters=tuple((function(a, "a"), function(up, "B")) for a, up in self.adapters),
            kwargs={
                n: function(v, "t") if n == "token_weight" and v is not None else v for n, v in self.kwargs.items()
            },
        )

    @property
    def token_weight(self) -> Tensor | None:
        weight: Tensor | None = self.kwargs.get("token_weight")
        return weight

    def to(self, device: torch.device) -> Problem:
        return replace(self.map(lambda t, _: t.to(device)), target=self.target.to(device))


@dataclass(frozen=True)
class CallResult:
    """Loss and gradients of a call. `output` is the value that the call returned, with its statistics."""

    loss: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_adapters: list[tuple[Tensor | None, Tensor | None]] = field(default_factory=list)
    output: Any = None
    grad_token_weight: Tensor | None = None


def make_problem(
    leading: Sequence[int] = (37,),
    hidden: int | None = 16,
    vocab: int = 71,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    bias: bool = False,
    class_weight: bool = False,
    token_weight: bool = False,
    adapter_ranks: Sequence[int] = (),
    ignored: float = 0.0,
    target_dtype: torch.dtype = torch.int64,
    std: float = 2.0,
    seed: int = 0,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Problem:
    """Create a random problem. Its logits have about the standard deviation ``std``. ``hidden=None``: without a head.

    The numbers are the same on every device if ``generator`` is None or a generator of the CPU.
    """
    g = torch.Generator().manual_seed(seed) if generator is None else generator
    settings: dict[str, Any] = {"generator": g, "dtype": torch.float64, "device": g.device}
    rand, randn = functools.partial(torch.rand, **settings), functools.partial(torch.randn, **settings)
    shape = tuple(leading)
    if hidden is None:
        x, w = randn((*shape, vocab)).mul_(std).to(device, dtype), torch.empty(0, dtype=dtype, device=device)
    else:
        x = randn((*shape, hidden)).to(device, dtype)
        w = randn((vocab, hidden)).mul_(std / max(hidden, 1) ** 0.5).to(device, dtype)
    y = torch.randint(0, vocab, shape, generator=g, device=g.device)
    if ignored:
        drop = torch.rand(shape, generator=g, device=g.device) < ignored
        y = y.masked_fill(drop, kwargs.get("ignore_index", IGNORED))
    b = randn((vocab,)).to(device, dtype) if bias else None
    if class_weight:
        kwargs["weight"] = (rand((vocab,)) + 0.25).to(device, dtype)
    if token_weight:
        kwargs["token_weight"] = rand(shape).to(device, dtype) * 2
    adapters = []
    for rank in adapter_ranks:
        a = randn((*shape, rank)).to(device, dtype)
        adapters.append((a, (randn((vocab, rank)) * (std / 2 / rank**0.5)).to(device, dtype)))
    return Problem(x, w, y.to(device, target_dtype), b, kwargs, tuple(adapters))


def run_fused(
    problem: Problem,
    *,
    options: flce.ChunkOptions | None = None,
    stats: Sequence[str] = (),
    grads: str = ALL_GRADS,
    grad_output: Tensor | float | None = None,
    place: Callable[[Tensor, str], Tensor] | None = None,
    inplace: bool = False,
) -> CallResult:
    """Run one forward pass of flce and, if ``grads`` is not empty, one backward pass. ``place``: as in `Problem.map`, a
    function of the arguments that returns DTensors; gradients are those of its arguments. ``inplace``: without a head,
    the gradient overwrites the logits."""
    p = problem.map(lambda t, letter: _leaf(t, letter in grads))
    call = p if place is None else p.map(place)
    output: Any
    if problem.has_head:
        output = flce.fused_linear_cross_entropy(
            call.input,
            call.linear_weight,
            call.target,
            linear_bias=call.linear_bias,
            adapters=call.adapters,
            options=options,
            stats=tuple(stats),
            **call.kwargs,
        )
    else:
        logits = call.input * 1 if inplace else call.input  # a leaf may not be overwritten
        output = flce.cross_entropy(logits, call.target, inplace=inplace, stats=tuple(stats), **call.kwargs)
    loss = output.loss if stats else output
    assert isinstance(loss, Tensor)
    assert loss.requires_grad == any(t.requires_grad for t in _tensors(p))
    return _after_backward(p, loss, output, grad_output)


def run_stock(problem: Problem, grad_output: Tensor | float | None = None) -> CallResult:
    """Run ``F.linear`` in the dtype of the problem, then ``F.cross_entropy`` on logits of float32, or of float64."""
    p = problem.map(lambda t, _: _leaf(t, True))
    z = F.linear(p.input, p.linear_weight, p.linear_bias) if p.has_head else p.input
    for a, up in p.adapters:
        z = z + F.linear(a, up)
    loss, output = stock_loss(z, p.target, **p.kwargs)
    return _after_backward(p, loss, output, grad_output)


def stock_loss(
    z: Tensor,
    target: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    shift: int = 0,
    ignore_index: int = IGNORED,
    weight: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    token_weight: Tensor | None = None,
) -> tuple[Tensor, SimpleNamespace]:
    """Return the loss of given logits by PyTorch's operators, and the statistics of each token."""
    z = dense_logits(
        z if z.dtype == torch.float64 else z.float(),
        None,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
    ).flatten(0, -2)
    moved, valid = shifted_target(target.long(), ignore_index, shift)
    y = moved.masked_fill(~valid, IGNORED).flatten()
    weight = None if weight is None else weight.to(z.dtype)
    if token_weight is None:
        loss = F.cross_entropy(z, y, weight=weight, reduction=reduction, label_smoothing=label_smoothing)
        loss = loss.view(target.shape) if reduction == "none" else loss
    else:
        losses = F.cross_entropy(z, y, weight=weight, reduction="none", label_smoothing=label_smoothing)
        loss = losses.view(target.shape) * token_weight
        ones = z.new_ones(z.shape[-1]) if weight is None else weight
        if reduction != "none":
            loss = loss.sum() / ((ones[y.clamp_min(0)] * valid.flatten()).sum() if reduction == "mean" else 1)
    if z_loss:
        terms = z_loss * (z.logsumexp(-1).view(target.shape) * valid).square()
        terms = terms if token_weight is None else terms * token_weight
        loss = loss + (terms if reduction == "none" else terms.sum() / (valid.sum() if reduction == "mean" else 1))
    with torch.no_grad():
        log_p = F.log_softmax(z, -1)
        statistics = {
            "lse": z.logsumexp(-1),
            "logprob": log_p.gather(-1, y.clamp_min(0)[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
    return loss, SimpleNamespace(**{name: value.view(target.shape) * valid for name, value in statistics.items()})


def run_oracle(problem: Problem, grad_output: Tensor | float | None = None) -> OracleResult:
    return oracle(
        problem.input,
        problem.linear_weight if problem.has_head else None,
        problem.target,
        linear_bias=problem.linear_bias,
        adapters=problem.adapters,
        grad_output=grad_output,
        **problem.kwargs,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor.

    Raises:
        ValueError: the two tensors have different shapes.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"a result has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    exact = expected.detach().double()
    difference, norm = float((actual.detach().to(exact.device).double() - exact).norm()), float(exact.norm())
    return difference / norm if norm else difference


def _leaf(t: Tensor, requires_grad: bool) -> Tensor:
    if t.data_ptr() % 16:  # a copy would be aligned, and the test needs this address
        return t.detach().requires_grad_(requires_grad)
    return t.detach().clone(memory_format=torch.preserve_format).requires_grad_(requires_grad)


def _tensors(p: Problem) -> list[Tensor]:
    """Return the tensors that may have a gradient."""
    every = (p.input, p.linear_weight, p.linear_bias, *(t for pair in p.adapters for t in pair), p.token_weight)
    return [t for t in every if t is not None]


def _after_backward(p: Problem, loss: Tensor, output: Any, grad_output: Tensor | float | None) -> CallResult:
    if loss.requires_grad:
        upstream = torch.ones_like(loss) if grad_output is None else torch.as_tensor(grad_output)
        loss.backward(upstream.to(loss.device, loss.dtype).expand_as(loss))
    bias = None if p.linear_bias is None else p.linear_bias.grad
    adapters = [(a.grad, up.grad) for a, up in p.adapters]
    token_weight_grad = None if p.token_weight is None else p.token_weight.grad
    return CallResult(loss.detach(), p.input.grad, p.linear_weight.grad, bias, adapters, output, token_weight_grad)


# ---------------------------------------------------------------------------------------------------------
# Allowed errors of results
#
# An error is the norm of the difference from the float64 result, divided by the norm of the float64 result. A result is
# off if its error is more than ``factor`` times stock's error plus a slack. Stock is the same formula with PyTorch's
# operators, in the dtype of the tensors.


class Tolerance(NamedTuple):
    factor: float
    loss: float
    """The slack of losses, and of statistics of each token."""
    gradient: float
    """The slack of gradients, and of the results of `flce.softmax`."""


# Errors may not be larger than stock's errors. The slack of half precision covers another order of summation in a
# logit, which a vendor's matrix product may choose. The slack of float32 and float64 covers a few roundings.
RESULTS = {
    torch.float64: Tolerance(1.05, 1e-12, 1e-12),
    torch.float32: Tolerance(1.05, 3e-6, 3e-6),
    torch.bfloat16: Tolerance(1.05, 1e-4, 1e-4),
    torch.float16: Tolerance(1.05, 1e-4, 1e-4),
}
# Logits are not rounded to half precision. Only the gradient of the logits (once or twice) and the result are. If there
# are few tokens, all roundings may have the same direction: the error is then half a unit in the last place.
EXACT_LOGITS = {
    torch.bfloat16: Tolerance(0.0, 5e-6, 5.5e-3),
    torch.float16: Tolerance(0.0, 5e-6, 7e-4),
}
# A model also rounds before and after the head. These roundings change if the gradients change.
MODELS = {torch.float32: Tolerance(1.05, 1e-5, 1e-5), torch.bfloat16: Tolerance(1.05, 5e-3, 5e-3)}
