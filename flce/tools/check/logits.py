"""Checks of the functions that are given tensors as they are: `flce.cross_entropy` of logits, and the softmaxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.functional import cross_entropy
from flce.ops.softmax import log_softmax, softmax
from flce.testing import tolerances
from flce.testing.problem import CallResult
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Measurement, Results, compared, differing, named
from flce.tools.check.inputs import Inputs, problem_of, stock, truth
from flce.tools.machine import has_float64, interpreted, repeatable


def _tolerance(p: Inputs, backend: str) -> Tolerance:
    usual = tolerances.RESULTS[p.dtype]
    return tolerances.INTERPRETED.get(p.dtype, usual) if interpreted(p.device, backend) else usual


@dataclass(frozen=True)
class LogitsCheck:
    """Losses, statistics and the gradient of a call, and that a second one has the same bits."""

    title: str
    inputs: Inputs
    """They are logits."""
    backend: str
    inplace: bool = False
    stats: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    def measure(self) -> Measurement:
        ours = self._call()
        again = self._call() if repeatable(self.inputs.device, self.backend) else None
        figures = compared(ours, stock(self.inputs), truth(self.inputs), _tolerance(self.inputs, self.backend))
        return Measurement(figures, differing(ours, again))

    def _call(self) -> Results:
        p = problem_of(self.inputs)
        leaf = p.input.clone().requires_grad_()
        logits = leaf * 1 if self.inplace else leaf  # not a leaf, which may not be written to
        out: Any = cross_entropy(logits, p.target, inplace=self.inplace, stats=self.stats, **p.kwargs)
        loss = out.loss if self.stats else out
        loss.backward(torch.as_tensor(self.inputs.grad_output).to(loss))
        return named(CallResult(loss.detach(), leaf.grad, None, None, output=out))


@dataclass(frozen=True)
class SoftmaxCheck:
    """Result and gradient of `flce.softmax` or `flce.log_softmax`, and that a second call has the same bits."""

    title: str
    inputs: Inputs
    """They are logits."""
    backend: str
    log: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    def measure(self) -> Measurement:
        p = self.inputs
        x = problem_of(p).input
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(p.dtype).to(p.device)
        exact = p.device if has_float64(p.device) else torch.device("cpu")
        of_flce = log_softmax if self.log else softmax
        ours = _softmax(of_flce, x, upstream)
        again = _softmax(of_flce, x, upstream) if repeatable(p.device, self.backend) else None
        of_torch = F.log_softmax if self.log else F.softmax
        beside = _softmax(of_torch, x, upstream)
        right = _softmax(of_torch, x.to(exact).double(), upstream.to(exact).double())
        return Measurement(compared(ours, beside, right, _tolerance(p, self.backend)), differing(ours, again))


def _softmax(function: Callable[..., Tensor], x: Tensor, upstream: Tensor) -> Results:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf, -1)
    y.backward(upstream)
    assert leaf.grad is not None
    return {"result": y.detach(), "gradient": leaf.grad}
