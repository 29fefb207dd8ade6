"""A check of `flce.fused_linear_cross_entropy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flce.check import reference, tolerances
from flce.check.machine import interpreted, repeatable
from flce.check.outcome import Measurement, Results, compared, differing
from flce.check.problem import Problem, Tensors, make_tensors
from flce.check.tolerances import Tolerance
from flce.functional import fused_linear_cross_entropy, plan
from flce.options import ChunkOptions
from flce.plans import ChunkPlan

_DEFAULT = ChunkOptions()


@dataclass(frozen=True)
class OperatorCheck:
    """Losses, statistics and gradients of a call, and that a second one has the same bits."""

    title: str
    problem: Problem
    backend: str
    options: ChunkOptions = _DEFAULT
    least_memory: bool = False
    """A budget near the least that works is added to `options`."""
    stats: tuple[str, ...] = ()
    weight_grad: bool = True
    """False: the head is frozen."""
    grad: bool = True
    """False: no gradient at all."""

    @property
    def dtype(self) -> torch.dtype:
        return self.problem.dtype

    def measure(self) -> Measurement:
        options = near_the_least(self.options, self._plan) if self.least_memory else self.options
        tensors = make_tensors(self.problem)
        ours = self._call(tensors, options)
        again = self._call(tensors, options) if repeatable(self.problem.device, self.backend) else None
        stock, truth = reference.stock(self.problem), reference.truth(self.problem)
        figures = compared(ours, stock, truth, self._tolerance())
        return Measurement(figures, differing(ours, again), str(self._plan(options)))

    def _call(self, tensors: Tensors, options: ChunkOptions) -> Results:
        t = tensors.leaves()
        assert t.weight is not None
        t.weight.requires_grad_(self.weight_grad)
        with contextlib.nullcontext() if self.grad else torch.no_grad():
            out: Any = fused_linear_cross_entropy(
                t.input,
                t.weight,
                t.target,
                linear_bias=t.bias,
                adapters=t.adapters,
                stats=self.stats,
                options=options,
                **self.problem.loss.arguments(),
            )
        loss = out.loss if self.stats else out
        if self.grad:
            loss.backward(t.upstream)
        return {"loss": loss.detach(), **{name: getattr(out, name) for name in self.stats}, **t.gradients()}

    def _plan(self, options: ChunkOptions) -> ChunkPlan:
        p = self.problem
        return plan(
            *p.shape,
            p.dtype,
            device=p.device,
            reduction=p.loss.reduction,
            label_smoothing=p.loss.label_smoothing,
            softcap=p.loss.softcap,
            z_loss=p.loss.z_loss,
            stats=self.stats,
            input_grad=self.grad,
            weight_grad=self.grad and self.weight_grad,
            bias_grad=self.grad and p.bias,
            adapter_ranks=p.adapter_ranks,
            options=options,
        )

    def _tolerance(self) -> Tolerance:
        usual = tolerances.RESULTS[self.dtype]
        if interpreted(self.problem.device, self.backend):
            return tolerances.INTERPRETED.get(self.dtype, usual)
        if self.options.logits_dtype == torch.float32:
            return tolerances.EXACT_LOGITS.get(self.dtype, usual)
        return usual


def near_the_least(options: ChunkOptions, plan_of: Callable[[ChunkOptions], ChunkPlan]) -> ChunkOptions:
    """With a budget of less than twice the least that there is a plan for."""
    with contextlib.suppress(ValueError):  # no plan keeps the budget
        while True:
            budget = plan_of(options).workspace_bytes // 2
            smaller = replace(options, max_workspace_bytes=budget)
            plan_of(smaller)
            options = smaller
    return options
