"""One call: the schedule of its plan, run on its tensors.

For every tile of some tokens and some classes a schedule

1. makes ``logits = sum of x W^T over the terms``, in memory or in registers only;
2. turns them into row statistics and losses, and into their own gradient;
3. adds ``dX (+)= dlogits W`` and ``dW (+)= dlogits^T x`` for each term.

`flce/schedules/` has the loops: which tiles there are, where they lie, and what is made of them when.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flce import vectors
from flce.arena import Arena
from flce.backends import load
from flce.backends.contract import RowOutputs
from flce.plans import ChunkPlan
from flce.problem import LinearCrossEntropyProblem, accumulation_dtype
from flce.selection import Selection
from flce.stage import Stage


class ForwardResult(NamedTuple):
    rows: RowOutputs  # of all N rows, but the losses: () or (N,)
    grads: list[Tensor]  # of the loss, times grad_unit; empty if the plan defers them
    grad_unit: Tensor | None  # () what the upstream gradient must be divided by; None: 1


def forward(problem: LinearCrossEntropyProblem, plan: ChunkPlan, gradients: bool) -> ForwardResult:
    """Losses and, if `gradients`, those of the inputs and weights, also by a schedule that would defer them."""
    all_count = vectors.check_targets(problem)
    schedule, backend, arena = plan.schedule, load(plan.case.backend), Arena(problem.device)
    with_gradients = gradients and not schedule.deferred
    in_units = with_gradients and plan.dtypes.logits_grad == torch.float16
    constants = vectors.LossScales(problem, backend, with_gradients, in_units)
    skip_ignored = plan.case.skip_ignored and not all_count
    selection = Selection.of(problem, skip_ignored, schedule.counts_on_device)
    rows = vectors.allocate(problem, selection.most_rows, arena)
    stage = Stage(
        problem, backend, plan.dtypes, arena, selection, constants, rows.normalizer, rows, None, plan.products
    )
    schedule.forward(stage)
    grads = stage.gradients() if with_gradients else []
    results, _ = vectors.reduce(problem, backend, selection.scatter(rows), constants.of_loss)
    if gradients and schedule.deferred:
        del stage
        grads = backward(problem, plan, results.normalizer, results.loss.new_ones(()))
    return ForwardResult(results, grads, constants.unit)


def backward(problem: LinearCrossEntropyProblem, plan: ChunkPlan, normalizer: Tensor, upstream: Tensor) -> list[Tensor]:
    """The gradients, from recomputed logits.

    Args:
        normalizer: (slots, N), as `forward` left it.
        upstream: gradient of the loss; () or, for ``reduction="none"``, (N,).
    """
    backend, accum = load(plan.case.backend), accumulation_dtype(problem.dtype)
    arena, selection = Arena(problem.device), Selection.of(problem, plan.case.skip_ignored, False)
    of_all = upstream.to(accum) if upstream.dim() == 0 else None
    of_each = None if upstream.dim() == 0 else selection.take(upstream.to(accum))
    constants = vectors.LossScales(problem, backend, with_gradients=True, upstream=of_all)
    normalizer = selection.take(normalizer, dim=1)
    stage = Stage(problem, backend, plan.dtypes, arena, selection, constants, normalizer, None, of_each, plan.products)
    plan.schedule.backward(stage)
    return stage.gradients()
