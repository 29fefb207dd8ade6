"""A check of `flce.fused_linear_cross_entropy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flce.core.options import ChunkOptions
from flce.functional import plan
from flce.planning.plan import ChunkPlan
from flce.testing import tolerances
from flce.testing.problem import ALL_GRADS, run_fused
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Measurement, Results, compared, differing, named
from flce.tools.check.inputs import Inputs, problem_of, stock, truth
from flce.tools.machine import interpreted, repeatable

_DEFAULT = ChunkOptions()


@dataclass(frozen=True)
class OperatorCheck:
    """Losses, statistics and gradients of a call, and that a second one has the same bits."""

    title: str
    inputs: Inputs
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
        return self.inputs.dtype

    def measure(self) -> Measurement:
        options = near_the_least(self.options, self._plan) if self.least_memory else self.options
        ours = self._call(options)
        again = self._call(options) if repeatable(self.inputs.device, self.backend) else None
        figures = compared(ours, stock(self.inputs), truth(self.inputs), self._tolerance())
        return Measurement(figures, differing(ours, again), str(self._plan(options)))

    def _call(self, options: ChunkOptions) -> Results:
        grads = (ALL_GRADS if self.weight_grad else ALL_GRADS.replace("w", "")) if self.grad else ""
        upstream = self.inputs.grad_output
        return named(
            run_fused(problem_of(self.inputs), options=options, stats=self.stats, grads=grads, grad_output=upstream)
        )

    def _plan(self, options: ChunkOptions) -> ChunkPlan:
        p = self.inputs
        tokens, hidden, vocab = p.shape
        assert hidden is not None
        return plan(
            tokens,
            hidden,
            vocab,
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
        if interpreted(self.inputs.device, self.backend):
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
