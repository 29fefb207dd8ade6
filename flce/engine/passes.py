"""The forward and the backward pass of a loss: run the schedule of a plan on the tensors of a call.

For every tile of some tokens and some classes a schedule

1. computes ``logits = sum of x W^T over the terms``, in memory or in registers;
2. computes row statistics and losses, and the gradient of the logits;
3. adds ``dX += dlogits W`` and ``dW += dlogits^T x`` for each term.

The loops over tiles are in `flce/engine/schedules/`. The operators in `flce/ops/` and the dry run call this module.
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
from flce.core.problem import LinearCrossEntropyProblem
from flce.engine import vectors
from flce.engine.case import Case, Dtypes
from flce.engine.pass_context import PassContext
from flce.engine.rows import Rows, Selection, ShardRows, gather_class_weights
from flce.engine.schedules.schedule import Schedule
from flce.engine.vectors import Arena


@dataclass(frozen=True)
class Plan:
    """A case and its schedule: everything that its passes depend on, except tensors."""

    case: Case
    strategy: str
    """"tokens" or "vocab": the strategy that the planner chose. That of `schedule` may differ: `Blocks.from_size`
    ("vocab") returns `DeferredChunks` ("tokens") if a block has all classes."""
    schedule: Schedule

    @functools.cached_property
    def deferred(self) -> bool:
        """True if gradients are computed in backward instead of forward."""
        return self.schedule.deferred

    @functools.cached_property
    def dtypes(self) -> Dtypes:
        return self.case.dtypes(self.deferred)

    @functools.cached_property
    def in_registers(self) -> bool:
        """True if fused products compute the logits: for statistics, for exponentials, or again for gradients."""
        return self.case.supports_fused_products and self.schedule.uses_fused_products


class Runtime(NamedTuple):
    """Backend and memory of a pass. A dry run has a backend and an arena that count (`planning.dry_run`)."""

    backend: Backend
    arena: Arena
    context_type: Callable[..., PassContext] = PassContext
    select: Callable[[LinearCrossEntropyProblem, SkipIgnored, bool], Selection] = Selection.from_problem


@functools.cache
def runtime_on(device: torch.device, backend: str) -> Runtime:
    """Return the runtime of a backend on a device."""
    return Runtime(load_backend(backend), Arena(device))


class ForwardResult(NamedTuple):
    outputs: RowOutputs  # of all N rows; losses are () or (N,)
    grads: list[Tensor]  # of the loss, times gradient_scale; empty if they were not requested
    gradient_scale: Tensor | None  # () divisor of the upstream gradient; None: 1
    # (N,) gradient of the loss, or of each row's loss, with respect to token weights; None: not requested
    token_weight_grad: Tensor | None
    samples: Tensor | None  # the memory of `Samples` for backward, if gradients are sampled


def forward(
    problem: LinearCrossEntropyProblem, plan: Plan, deferred: bool, runtime: Runtime | None = None
) -> ForwardResult:
    """Compute losses and, unless `deferred`, the needed gradients, even if the schedule defers them."""
    problem = problem if problem.shard is None else gather_class_weights(problem, problem.shard)
    none_ignored = vectors.check_targets(problem)
    runtime, schedule = runtime or runtime_on(problem.device, plan.case.backend), plan.schedule
    with_gradients = problem.needs_gradients and not (deferred or schedule.deferred)
    has_gradient_scale = with_gradients and plan.dtypes.logits_grad == torch.float16
    scales = vectors.LossScales(problem, runtime.backend, with_gradients, has_gradient_scale)
    skip_ignored = not none_ignored and plan.case.skip_ignored
    can_count_on_device = schedule.can_count_on_device and plan.in_registers
    selection = runtime.select(problem, skip_ignored, can_count_on_device)
    accum, num_rows = problem.accum, selection.max_num_rows
    outputs = RowOutputs.allocate(problem.spec, accum, (num_rows,), runtime.arena.new)
    rows = selection, scales, runtime.arena, outputs.normalizer, outputs
    context = build_context(plan, runtime, rows)
    schedule.forward(context)
    if not with_gradients:  # Schedules with gradients have merged already, before each chunk's gradients.
        context.rows.merge_results(slice(0, selection.num_rows))
    grads = context.finish_gradients() if with_gradients else []
    outputs, samples = selection.scatter_outputs(outputs), context.samples_memory
    results, _, token_weight_grad = vectors.reduce(problem, runtime.backend, outputs, scales.for_loss)
    if problem.needs_gradients and schedule.deferred and not deferred:
        del context
        grads = backward(problem, plan, results.normalizer, results.loss.new_ones(()), runtime, samples)
    return ForwardResult(results, grads, scales.gradient_scale, token_weight_grad, samples)


def backward(
    problem: LinearCrossEntropyProblem,
    plan: Plan,
    normalizer: Tensor,
    upstream: Tensor,
    runtime: Runtime | None = None,
    samples: Tensor | None = None,
) -> list[Tensor]:
    """Compute the deferred gradients from recomputed logits, or from `samples` of forward.

    Args:
        normalizer: (slots, N), from `forward`.
        upstream: gradient of the loss; () or, for ``reduction="none"``, (N,).
    """
    problem = problem if problem.shard is None else gather_class_weights(problem, problem.shard)
    runtime, accum = runtime or runtime_on(problem.device, plan.case.backend), problem.accum
    selection = runtime.select(problem, plan.case.skip_ignored, False)
    upstream, has_gradient_scale = upstream.to(accum), plan.dtypes.unscales_sums
    row_upstream = None if upstream.dim() == 0 else selection.take(upstream)
    scales = vectors.LossScales(
        problem, runtime.backend, needs_scales=True, has_gradient_scale=has_gradient_scale, upstream=upstream
    )
    normalizer = selection.take(normalizer, dim=1)
    rows = selection, scales, runtime.arena, normalizer, None, row_upstream
    context = build_context(plan, runtime, rows, gradient_scale=scales.gradient_scale, samples_memory=samples)
    plan.schedule.backward(context)
    return context.finish_gradients()


def build_context(plan: Plan, runtime: Runtime, rows: tuple[Any, ...], **more: Any) -> PassContext:
    """Return the context of a pass. `rows`: the fields of `Rows`. `more`: other fields of `PassContext`."""
    rows_type = Rows if rows[0].problem.shard is None else ShardRows
    return runtime.context_type(
        rows_type(*rows), runtime.backend, runtime.arena, plan.dtypes, plan.in_registers, **more
    )
