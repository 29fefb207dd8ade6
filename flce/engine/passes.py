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

from flce.backends import load_backend
from flce.backends.contract import Backend, RowOutputs
from flce.core.options import SkipIgnored
from flce.core.problem import LinearCrossEntropyProblem, accumulation_dtype
from flce.engine import vectors
from flce.engine.arena import Arena
from flce.engine.case import Case, Dtypes
from flce.engine.pass_context import PassContext
from flce.engine.schedules.schedule import Schedule
from flce.engine.selection import Selection
from flce.engine.shards import FullVocab, build_vocab, gather_class_weights


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
    def has_forward_gradients(self) -> bool:
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
    context_type: Callable[..., PassContext] = PassContext
    select: Callable[[LinearCrossEntropyProblem, SkipIgnored, bool], Selection] = Selection.from_problem


@functools.cache
def runtime_on(device: torch.device, backend: str) -> Runtime:
    """What plans for a backend run with on a device."""
    return Runtime(load_backend(backend), Arena(device))


class ForwardResult(NamedTuple):
    outputs: RowOutputs  # of all N rows, but the losses: () or (N,)
    grads: list[Tensor]  # of the loss, times gradient_scale; empty if the plan defers them
    gradient_scale: Tensor | None  # () what the upstream gradient must be divided by; None: 1
    token_weight_gradient: (
        Tensor | None
    )  # (N,) of the loss, or of each row's, in the weights of tokens; None: not asked for


def forward(
    problem: LinearCrossEntropyProblem, plan: Plan, gradients: bool, runtime: Runtime | None = None
) -> ForwardResult:
    """Losses and, if `gradients`, those of the inputs and weights, also by a schedule that would defer them."""
    problem = gather_class_weights(problem)
    none_ignored = vectors.check_targets(problem)
    runtime, schedule = runtime or runtime_on(problem.device, plan.case.backend), plan.schedule
    with_gradients = gradients and not schedule.deferred
    has_gradient_scale = with_gradients and plan.dtypes.logits_grad == torch.float16
    scales = vectors.LossScales(problem, runtime.backend, with_gradients, has_gradient_scale)
    skip_ignored = not none_ignored and plan.case.skip_ignored
    can_count_on_device = schedule.can_count_on_device and plan.in_registers
    selection = runtime.select(problem, skip_ignored, can_count_on_device)
    rows = vectors.allocate_outputs(problem, selection.row_capacity, runtime.arena)
    context = build_context(
        plan, runtime, build_vocab(problem, selection, scales, runtime.arena, rows.normalizer, rows)
    )
    schedule.forward(context)
    if not with_gradients:
        context.vocab.merge_results(slice(0, selection.num_rows))
    grads = context.finish_gradients() if with_gradients else []
    rows, weight = selection.scatter_outputs(rows), problem.token_weight
    results, _, token_weight_gradient = vectors.reduce(
        problem, runtime.backend, rows, scales.for_loss, problem.target, weight
    )
    if gradients and schedule.deferred:
        del context
        grads = backward(problem, plan, results.normalizer, results.loss.new_ones(()), runtime)
    return ForwardResult(results, grads, scales.gradient_scale, token_weight_gradient)


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
    problem = gather_class_weights(problem)
    runtime, accum = runtime or runtime_on(problem.device, plan.case.backend), accumulation_dtype(problem.dtype)
    selection = runtime.select(problem, plan.case.skip_ignored, False)
    upstream, has_gradient_scale = upstream.to(accum), plan.dtypes.has_gradient_scale
    row_upstream = None if upstream.dim() == 0 else selection.take(upstream)
    scales = vectors.LossScales(
        problem, runtime.backend, with_gradients=True, has_gradient_scale=has_gradient_scale, upstream=upstream
    )
    normalizer = selection.take(normalizer, dim=1)
    classes = build_vocab(problem, selection, scales, runtime.arena, normalizer, None, row_upstream)
    context = build_context(plan, runtime, classes, gradient_scale=scales.gradient_scale)
    plan.schedule.backward(context)
    return context.finish_gradients()


def build_context(plan: Plan, runtime: Runtime, classes: FullVocab, **more: Any) -> PassContext:
    """The context of a problem, or of the classes of it that this process has. `more`: other fields of
    `PassContext`."""
    return runtime.context_type(classes, runtime.backend, runtime.arena, plan.dtypes, plan.in_registers, **more)
