"""Checks of the functions that are given tensors as they are: `flce.cross_entropy` of logits, and the softmaxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.check import reference, tolerances
from flce.check.machine import has_float64, interpreted, repeatable
from flce.check.outcome import Measurement, Results, compared, differing
from flce.check.problem import Problem, Tensors, make_tensors
from flce.check.tolerances import Tolerance
from flce.functional import cross_entropy
from flce.softmax_op import log_softmax, softmax


def _tolerance(p: Problem, backend: str) -> Tolerance:
    usual = tolerances.RESULTS[p.dtype]
    return tolerances.INTERPRETED.get(p.dtype, usual) if interpreted(p.device, backend) else usual


@dataclass(frozen=True)
class LogitsCheck:
    """Losses, statistics and the gradient of a call, and that a second one has the same bits."""

    title: str
    problem: Problem
    """Its hidden size is 0."""
    backend: str
    inplace: bool = False
    stats: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype

    def measure(self) -> Measurement:
        tensors = make_tensors(self.problem)
        ours = self._call(tensors)
        again = self._call(tensors) if repeatable(self.problem.device, self.backend) else None
        stock, truth = reference.stock(self.problem), reference.truth(self.problem)
        return Measurement(compared(ours, stock, truth, _tolerance(self.problem, self.backend)), differing(ours, again))

    def _call(self, tensors: Tensors) -> Results:
        t = tensors.leaves()
        logits = t.input * 1 if self.inplace else t.input  # not a leaf, which may not be written to
        out: Any = cross_entropy(
            logits, t.target, inplace=self.inplace, stats=self.stats, **self.problem.loss.arguments()
        )
        loss = out.loss if self.stats else out
        loss.backward(t.upstream)
        return {"loss": loss.detach(), **{name: getattr(out, name) for name in self.stats}, **t.gradients()}


@dataclass(frozen=True)
class SoftmaxCheck:
    """Result and gradient of `flce.softmax` or `flce.log_softmax`, and that a second call has the same bits."""

    title: str
    problem: Problem
    """Its hidden size is 0."""
    backend: str
    log: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype

    def measure(self) -> Measurement:
        p = self.problem
        x = make_tensors(p).input
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(p.dtype).to(p.device)
        exact = p.device if has_float64(p.device) else torch.device("cpu")
        of_flce = log_softmax if self.log else softmax
        ours = _softmax(of_flce, x, upstream)
        again = _softmax(of_flce, x, upstream) if repeatable(p.device, self.backend) else None
        of_torch = F.log_softmax if self.log else F.softmax
        stock = _softmax(of_torch, x, upstream)
        truth = _softmax(of_torch, x.to(exact).double(), upstream.to(exact).double())
        return Measurement(compared(ours, stock, truth, _tolerance(p, self.backend)), differing(ours, again))


def _softmax(function: Callable[..., Tensor], x: Tensor, upstream: Tensor) -> Results:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf, -1)
    y.backward(upstream)
    assert leaf.grad is not None
    return {"result": y.detach(), "gradient": leaf.grad}
