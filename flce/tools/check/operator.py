"""A check of `flce.fused_linear_cross_entropy`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flce.core.options import ChunkOptions
from flce.functional import plan
from flce.planning.plan import ChunkPlan
from flce.testing import tolerances
from flce.testing.problem import ALL_GRADS, run_fused
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Results, named
from flce.tools.check.inputs import InputsCheck, problem_of
from flce.tools.machine import interpreted

_DEFAULT = ChunkOptions()
# The arguments of the loss that a plan depends on.
PLANNED = inspect.signature(plan).parameters


@dataclass(frozen=True)
class OperatorCheck(InputsCheck):
    """Losses, statistics and gradients of a call."""

    options: ChunkOptions = _DEFAULT
    least_memory: bool = False
    """A budget near the least that works is added to `options`."""
    stats: tuple[str, ...] = ()
    weight_grad: bool = True
    """False: the head is frozen."""
    grad: bool = True
    """False: no gradient at all."""

    @functools.cached_property
    def chosen_options(self) -> ChunkOptions:
        return near_the_least(self.options, self._plan) if self.least_memory else self.options

    def call(self) -> Results:
        grads = (ALL_GRADS if self.weight_grad else ALL_GRADS.replace("w", "")) if self.grad else ""
        how: dict[str, Any] = {"options": self.chosen_options, "stats": self.stats, "grads": grads}
        return named(run_fused(problem_of(self.inputs), grad_output=self.inputs.grad_output, **how))

    def plan(self) -> str:
        return str(self._plan(self.chosen_options))

    def tolerance(self) -> Tolerance:
        usual = super().tolerance()
        rounded = self.options.logits_dtype is not None and self.options.logits_dtype.itemsize < 4
        exact = not rounded and not interpreted(self.inputs.device, self.backend)
        return tolerances.EXACT_LOGITS.get(self.dtype, usual) if exact else usual

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
            **{name: value for name, value in p.arguments.items() if name in PLANNED},
            stats=self.stats,
            input_grad=self.grad,
            weight_grad=self.grad and self.weight_grad,
            bias_grad=self.grad and p.bias,
            adapter_ranks=p.adapter_ranks,
            options=options,
        )


def near_the_least(options: ChunkOptions, plan_of: Callable[[ChunkOptions], ChunkPlan]) -> ChunkOptions:
    """With a budget of less than twice the least that there is a plan for."""
    with contextlib.suppress(ValueError):  # no plan keeps the budget
        while True:
            budget = plan_of(options).workspace_bytes // 2
            smaller = replace(options, max_workspace_bytes=budget)
            plan_of(smaller)
            options = smaller
    return options
