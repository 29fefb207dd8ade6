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
from flce.testing.problem import CallResult
from flce.tools.check.figures import Results, named
from flce.tools.check.inputs import InputsCheck, problem_of
from flce.tools.machine import exact_device


@dataclass(frozen=True)
class LogitsCheck(InputsCheck):
    """Losses, statistics and the gradient of a call on inputs that are logits."""

    inplace: bool = False
    stats: tuple[str, ...] = ()

    def call(self) -> Results:
        p = problem_of(self.inputs)
        leaf = p.input.clone().requires_grad_()
        logits = leaf * 1 if self.inplace else leaf  # not a leaf, which may not be written to
        out: Any = cross_entropy(logits, p.target, inplace=self.inplace, stats=self.stats, **p.kwargs)
        loss = out.loss if self.stats else out
        loss.backward(torch.as_tensor(self.inputs.grad_output).to(loss))
        return named(CallResult(loss.detach(), leaf.grad, None, None, output=out))


@dataclass(frozen=True)
class SoftmaxCheck(InputsCheck):
    """Result and gradient of `flce.softmax` or `flce.log_softmax`."""

    log: bool

    def call(self) -> Results:
        return _softmax(log_softmax if self.log else softmax, *self._tensors())

    def references(self) -> tuple[Results, Results]:
        of_torch, tensors = F.log_softmax if self.log else F.softmax, self._tensors()
        exact = [t.to(exact_device(t.device)).double() for t in tensors]
        return _softmax(of_torch, *tensors), _softmax(of_torch, *exact)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        """The input and the upstream gradient."""
        x = problem_of(self.inputs).input
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x, upstream.to(x.dtype).to(x.device)


def _softmax(function: Callable[..., Tensor], x: Tensor, upstream: Tensor) -> Results:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf, -1)
    y.backward(upstream)
    assert leaf.grad is not None
    return {"result": y.detach(), "gradient": leaf.grad}
