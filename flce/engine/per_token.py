"""Results of each token in the place of a loss: log-probabilities, entropies and others, and their gradients.

Forward makes statistics of the logits and nothing else, by a plan that does not know which gradients will be asked for:
a call has the same bits with them and without. Backward makes the logits again. With l the log-probabilities of a row,
p = exp(l), H its entropy, and upstream gradients of its results, the gradient in its logits z is

    p * (g_lse - g_logprob - sum of g_candidates - g_entropy * (l + H)), and at the target and at candidates what is
    upstream of them.

(The derivative of H = -sum(p * l) in z is -p * (l + H).)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import (
    ENTROPY,
    LEAST_LOGPROB,
    LOG_SUM,
    LOSS_GRADIENT_SLOTS,
    OFFSET,
    ROW_GRADIENT_SLOTS,
    SOFTMAX,
    TARGET,
    RowOutputs,
    log_sum_exp,
)
from flce.backends.state import is_class
from flce.core.problem import LinearCrossEntropyProblem, LogprobSpec, accumulation_dtype
from flce.engine import vectors
from flce.engine.passes import Plan, Runtime, runtime_on, stage_of
from flce.engine.selection import Selection
from flce.engine.shards import classes_of
from flce.engine.stage import Entries, Stage
from flce.engine.top import Top


class Result(NamedTuple):
    """What forward returns, of all N rows. None for what was not asked for."""

    rows: RowOutputs
    candidate_logprob: Tensor | None  # (N, K)
    top_logprob: Tensor | None  # (N, k)
    top_ids: Tensor | None  # (N, k)


class Upstream(NamedTuple):
    """Gradients of results, 0 for ignored rows. None for what has none."""

    logprob: Tensor | None  # (N,)
    entropy: Tensor | None  # (N,)
    lse: Tensor | None  # (N,)
    candidate_logprob: Tensor | None  # (N, K)


class Kept(NamedTuple):
    """What backward needs to know of forward."""

    normalizer: Tensor  # (slots, N)
    entropy: Tensor | None  # (N,) where it has a gradient
    candidate_logprob: Tensor | None  # (N, K) likewise


def spec_of(problem: LinearCrossEntropyProblem) -> LogprobSpec:
    assert isinstance(problem.spec, LogprobSpec)
    return problem.spec


def forward(
    problem: LinearCrossEntropyProblem, plan: Plan, candidates: Tensor | None, runtime: Runtime | None = None
) -> Result:
    """The results of all tokens. candidates: (N, K) int64."""
    spec, accum = spec_of(problem), accumulation_dtype(problem.dtype)
    all_count = vectors.check_targets(problem)
    vectors.check_candidates(candidates, problem.vocab_size)
    problem = replace(problem, row_factor=vectors.check_row_factor(problem.row_factor))
    runtime = runtime or runtime_on(problem.device, plan.case.backend)
    selection = runtime.select(problem, not all_count and plan.case.skip_ignored, False)
    rows = vectors.allocate(problem, selection.most_rows, runtime.arena)
    top = Top.of(selection.most_rows, spec.top_k, accum, spec.scale, runtime.arena) if spec.top_k else None
    scales = vectors.LossScales(problem, runtime.backend, with_gradients=False)
    classes = classes_of(problem, selection, scales, runtime.arena, rows.normalizer, rows)
    stage = stage_of(plan, runtime, classes, top=top)
    plan.schedule.forward(stage)
    stage.split.complete(slice(0, selection.num_rows))

    counts = (selection.target != spec.ignore_index)[:, None]
    candidate_logprob = top_logprob = top_ids = None
    if candidates is not None:
        ids = selection.take(candidates)
        values = _logprob(_chosen_logits(stage, ids), rows.normalizer)
        values = values.masked_fill_(~is_class(ids, problem.vocab_size), torch.nan)
        candidate_logprob = selection.put(values.masked_fill_(~counts | (ids == NO_CANDIDATE), 0.0))
    if top is not None:
        top = stage.split.complete_top(top)
        values = _logprob(spec.transform(top.logits, selection.row_factor), rows.normalizer)
        top_logprob = selection.put(values.masked_fill_(~counts, 0.0))
        top_ids = selection.put(top.ids.masked_fill_(~counts, NO_CANDIDATE))
    return Result(selection.scatter(rows), candidate_logprob, top_logprob, top_ids)


# The id of no class.
NO_CANDIDATE = -1


def _chosen_logits(stage: Stage, ids: Tensor) -> Tensor:
    """z of some classes of each selected row, (rows, K), of whatever process has them; 0 where an id is none."""
    problem, local = stage.problem, stage.split.local_ids(ids)
    logits = stage.arena.new(ids.shape, stage.normalizer.dtype, zero=True)
    for term in stage.terms:
        stage.backend.row_products(stage.selection.take(term.input), term.weight, local, logits)
    if problem.linear_bias is not None:
        logits += problem.linear_bias[local.clamp(0, stage.vocab_size - 1)]
    z = problem.spec.transform(logits, stage.selection.row_factor)
    return stage.split.summed(z.masked_fill_(local == NO_CANDIDATE, 0.0))


def _logprob(z: Tensor, normalizer: Tensor) -> Tensor:
    """Log-probabilities of z, (rows, K)."""
    # The offset first: exact where all logits share a large one.
    return z.sub_(normalizer[OFFSET][:, None]).sub_(normalizer[LOG_SUM][:, None])


def backward(
    problem: LinearCrossEntropyProblem,
    plan: Plan,
    candidates: Tensor | None,
    kept: Kept,
    upstream: Upstream,
    runtime: Runtime | None = None,
) -> list[Tensor]:
    """The gradients, from logits that are made again."""
    runtime = runtime or runtime_on(problem.device, plan.case.backend)
    selection = runtime.select(problem, plan.case.skip_ignored, False)
    kept = Kept(*(None if t is None else selection.take(t, dim) for t, dim in zip(kept, (1, 0, 0), strict=True)))  # type: ignore[arg-type]
    upstream = Upstream(*(None if t is None else selection.take(t) for t in upstream))
    entries, of_candidates = None, upstream.candidate_logprob
    if of_candidates is not None:
        assert candidates is not None
        ids = selection.take(candidates)
        of_candidates = of_candidates.where(is_class(ids, problem.vocab_size), 0.0)
        upstream = upstream._replace(candidate_logprob=of_candidates)
    of_rows, unit = _row_gradient(runtime, selection, kept, upstream), None
    if of_candidates is not None:
        entries = _entries(runtime, selection, ids, kept, of_candidates, of_rows)
    if plan.dtypes.in_units:
        unit = _grad_unit(selection, of_rows, entries)
        for gradients in (of_rows, None if entries is None else entries.values):
            if gradients is not None:
                gradients *= unit
    scales = vectors.LossScales(problem, runtime.backend, with_gradients=False)
    classes = classes_of(problem, selection, scales, runtime.arena, kept.normalizer)
    of_rows[TARGET] = classes.without_targets_elsewhere(of_rows[TARGET])
    if entries is not None:
        entries = entries._replace(ids=classes.local_ids(entries.ids))
    stage = stage_of(plan, runtime, classes, unit=unit, row_gradient=of_rows, entries=entries)
    plan.schedule.backward(stage)
    return stage.gradients()


def _row_gradient(runtime: Runtime, selection: Selection, kept: Kept, upstream: Upstream) -> Tensor:
    """(slots, rows), see `TileCall.row_gradient`; NaN for wrong targets. ENTROPY, where entropies have a gradient."""
    slots = LOSS_GRADIENT_SLOTS if upstream.entropy is None else ROW_GRADIENT_SLOTS
    made = runtime.arena.new((slots, selection.most_rows), kept.normalizer.dtype, zero=True)
    target, problem = selection.target, selection.problem
    counts = target != problem.spec.ignore_index

    def given(gradient: Tensor) -> Tensor:
        return gradient.to(made.dtype).where(counts, 0.0)

    if upstream.lse is not None:
        made[SOFTMAX] += given(upstream.lse)
    if upstream.logprob is not None:
        made[TARGET] -= given(upstream.logprob)
        made[SOFTMAX] += made[TARGET]
    if upstream.candidate_logprob is not None:
        made[SOFTMAX] -= given(upstream.candidate_logprob.sum(1))
    if upstream.entropy is not None:
        assert kept.entropy is not None
        made[ENTROPY] += given(upstream.entropy)
        made[SOFTMAX] -= made[ENTROPY] * kept.entropy
    made[SOFTMAX].masked_fill_(counts & ~is_class(target, problem.vocab_size), torch.nan)
    return made


def _grad_unit(selection: Selection, of_rows: Tensor, entries: Entries | None) -> Tensor:
    """() the power of two that brings the largest gradient of float16 logits near FLOAT16_GRAD_PEAK."""
    spec, row_factor = selection.problem.spec, selection.row_factor
    if not of_rows.numel():
        return of_rows.new_ones(())
    peak = of_rows.nan_to_num(0.0, 0.0, 0.0).abs().max() * spec.typical_gradient
    if row_factor is not None:
        peak = peak * row_factor.nan_to_num(0.0, 0.0, 0.0).abs().max()
    if entries is not None:
        peak = torch.maximum(peak, entries.values.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return vectors.power_of_two(vectors.FLOAT16_GRAD_PEAK / peak)


def _entries(
    runtime: Runtime, selection: Selection, ids: Tensor, kept: Kept, upstream: Tensor, of_rows: Tensor
) -> Entries:
    """The whole gradients of the logits of candidates, once for each of several equal ones."""
    problem, logprob = selection.problem, kept.candidate_logprob
    assert logprob is not None
    spec, of_softmax = problem.spec, of_rows[SOFTMAX, :, None]
    values = runtime.arena.new(ids.shape, of_rows.dtype)
    runtime.backend.sum_equal(ids, upstream.to(values.dtype), values)
    values -= of_rows[TARGET, :, None].where(ids == selection.target[:, None], 0.0)
    z = logprob + log_sum_exp(kept.normalizer)[:, None]
    if len(of_rows) > ENTROPY:
        of_softmax = of_softmax - of_rows[ENTROPY, :, None] * logprob.clamp(min=LEAST_LOGPROB)
    values += logprob.exp() * of_softmax
    values *= spec.jacobian(z, selection.row_factor)
    counts = (selection.target != spec.ignore_index)[:, None]
    return Entries(ids, values.where(counts, 0.0))
