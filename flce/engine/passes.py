"""One call: the schedule of its plan, run on its tensors.

For every tile of some tokens and some classes a schedule

1. makes ``logits = sum of x W^T over the terms``, in memory or in registers only;
2. turns them into row statistics and losses, and into their own gradient;
3. adds ``dX (+)= dlogits W`` and ``dW (+)= dlogits^T x`` for each term.

`flce/engine/schedules/` has the loops: which tiles there are, where they lie, and what is made of them when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.backends import load
from flce.backends.contract import Backend, RowOutputs
from flce.core.options import SkipIgnored
from flce.core.problem import LinearCrossEntropyProblem, accumulation_dtype
from flce.engine import vectors
from flce.engine.arena import Arena
from flce.engine.case import Case, Dtypes
from flce.engine.schedules.schedule import Schedule
from flce.engine.selection import Selection
from flce.engine.shards import AllClasses, classes_of, with_all_class_weights
from flce.engine.stage import Stage


@dataclass(frozen=True)
class Plan:
    """A call and the schedule that it takes: all that its passes depend on beside tensors."""

    case: Case
    strategy: str
    """"tokens" or "vocab"."""
    schedule: Schedule

    @property
    def deferred(self) -> bool:
        """Whether gradients are made in backward rather than in forward."""
        return self.schedule.deferred

    @functools.cached_property
    def makes_gradients(self) -> bool:
        """Whether forward makes gradients."""
        return self.case.needs.any and not self.deferred

    @functools.cached_property
    def dtypes(self) -> Dtypes:
        return self.case.dtypes(self.deferred)

    @functools.cached_property
    def in_registers(self) -> bool:
        """Whether logits stay in registers where they are wanted for statistics or a second time."""
        return self.case.in_registers and self.schedule.in_registers


class Runtime(NamedTuple):
    """What passes run with: memory and kernels of a device, or those that count (`planning.dry_run`)."""

    backend: Backend
    arena: Arena
    stage: Callable[..., Stage] = Stage
    select: Callable[[LinearCrossEntropyProblem, SkipIgnored, bool], Selection] = Selection.of


@functools.cache
def runtime_on(device: torch.device, backend: str) -> Runtime:
    """What plans for a backend run with on a device."""
    return Runtime(load(backend), Arena(device))


class ForwardResult(NamedTuple):
    rows: RowOutputs  # of all N rows, but the losses: () or (N,)
    grads: list[Tensor]  # of the loss, times grad_unit; empty if the plan defers them
    grad_unit: Tensor | None  # () what the upstream gradient must be divided by; None: 1
    weight_grad: Tensor | None  # (N,) of the loss, or of each row's, in the weights of tokens; None: not asked for


def forward(
    problem: LinearCrossEntropyProblem, plan: Plan, gradients: bool, runtime: Runtime | None = None
) -> ForwardResult:
    """Losses and, if `gradients`, those of the inputs and weights, also by a schedule that would defer them."""
    problem = with_all_class_weights(problem)
    all_count = vectors.check_targets(problem)
    runtime, schedule = runtime or runtime_on(problem.device, plan.case.backend), plan.schedule
    with_gradients = gradients and not schedule.deferred
    in_units = with_gradients and plan.dtypes.logits_grad == torch.float16
    scales = vectors.LossScales(problem, runtime.backend, with_gradients, in_units)
    skip_ignored = not all_count and plan.case.skip_ignored
    counts_on_device = schedule.counts_on_device and plan.in_registers
    selection = runtime.select(problem, skip_ignored, counts_on_device)
    rows = vectors.allocate(problem, selection.most_rows, runtime.arena)
    stage = stage_of(plan, runtime, classes_of(problem, selection, scales, runtime.arena, rows.normalizer, rows))
    schedule.forward(stage)
    if not with_gradients:
        stage.split.complete(slice(0, selection.num_rows))
    grads = stage.gradients() if with_gradients else []
    rows, weight = selection.scatter(rows), problem.token_weight
    results, _, weight_grad = vectors.reduce(problem, runtime.backend, rows, scales.of_loss, problem.target, weight)
    if gradients and schedule.deferred:
        del stage
        grads = backward(problem, plan, results.normalizer, results.loss.new_ones(()), runtime)
    return ForwardResult(results, grads, scales.unit, weight_grad)


def backward(
    problem: LinearCrossEntropyProblem,
    plan: Plan,
    normalizer: Tensor,
    upstream: Tensor,
    runtime: Runtime | None = None,
) -> list[Tensor]:
    """The gradients, from recomputed logits.

    Args:
        normalizer: (slots, N), as `forward` left it.
        upstream: gradient of the loss; () or, for ``reduction="none"``, (N,).
    """
    problem = with_all_class_weights(problem)
    runtime, accum = runtime or runtime_on(problem.device, plan.case.backend), accumulation_dtype(problem.dtype)
    selection = runtime.select(problem, plan.case.skip_ignored, False)
    upstream, in_units = upstream.to(accum), plan.dtypes.in_units
    of_each = None if upstream.dim() == 0 else selection.take(upstream)
    scales = vectors.LossScales(problem, runtime.backend, with_gradients=True, in_units=in_units, upstream=upstream)
    normalizer = selection.take(normalizer, dim=1)
    classes = classes_of(problem, selection, scales, runtime.arena, normalizer, None, of_each)
    stage = stage_of(plan, runtime, classes, unit=scales.unit)
    plan.schedule.backward(stage)
    return stage.gradients()


def stage_of(plan: Plan, runtime: Runtime, classes: AllClasses, **more: Any) -> Stage:
    """The stage of a problem, or of the classes of it that this process has. `more`: other fields of `Stage`."""
    return runtime.stage(classes, runtime.backend, runtime.arena, plan.dtypes, plan.in_registers, **more)
