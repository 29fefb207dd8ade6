"""Results of each token instead of a loss: log-probabilities, entropies and others, and their gradients.

`ops/linear_logprobs.py` and the dry run call it. Forward computes only statistics. Its plan does not depend on the
needed gradients, so that results have the same bits with and without gradients. Backward recomputes the logits. With l
the log-probabilities of a row, p = exp(l), S its entropy and g the upstream gradients of its results, the gradient in
its logits z is

    p * (g_lse - g_logprob - sum of g_candidates - g_entropy * (l + S) + g_divergence * (w - mean of w under p)),
    plus g_logprob at the target and g_candidates at the candidates.

(The derivative of S = -sum(p * l) in z is -p * (l + S).) `Backend.divergence` defines w. "jsd" needs the normalizers
of both models before it can be summed: if no tile has all classes of its rows, forward computes all logits twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends import contract
from flce.backends.contract import (
    ENTROPY,
    LOG_SUM,
    LOSS_GRADIENT_SLOTS,
    OFFSET,
    ROW_GRADIENT_SLOTS,
    SOFTMAX,
    TARGET,
    RowOutputs,
    Teacher,
    log_sum_exp,
)
from flce.backends.formulas import finish_divergence, is_class, softmax_factor_with_entropy
from flce.core.problem import LinearCrossEntropyProblem, LogprobSpec
from flce.engine import vectors
from flce.engine.pass_context import CandidateGrads, PassContext
from flce.engine.passes import Plan, Runtime, build_context, runtime_on
from flce.engine.rows import Selection
from flce.engine.vectors import TopK

# The id that is not a class.
NO_CANDIDATE = -1


class TokenResults(NamedTuple):
    """Results of forward of all N rows, in the order of the operator's results. None: not requested. The first
    NUM_DIFFERENTIABLE have gradients."""

    logprob: Tensor | None  # (N,)
    entropy: Tensor | None  # (N,)
    lse: Tensor | None  # (N,)
    candidate_logprob: Tensor | None  # (N, K)
    divergence: Tensor | None  # (N,)
    normalizer: Tensor  # (slots, N)
    argmax: Tensor | None  # (N,) int64
    mean_logit: Tensor | None  # (N,)
    top_k_logprob: Tensor | None  # (N, k)
    top_k_ids: Tensor | None  # (N, k) int64
    teacher_rows: Tensor | None  # (DIVERGENCE_SLOTS, N)
    samples: Tensor | None  # the memory of `Samples` for backward, if gradients are sampled

    @staticmethod
    def requested_fields(spec: LogprobSpec) -> dict[str, bool]:
        """Return for each field True if a call requests it."""
        rows = dict(zip(RowOutputs._fields, RowOutputs.requested_fields(spec), strict=True))
        top, divergence = spec.top_k > 0, spec.divergence is not None
        requested = {**rows, "lse": "lse" in spec.stats, "candidate_logprob": spec.candidates > 0, "samples": True}
        requested |= {"top_k_logprob": top, "top_k_ids": top, "divergence": divergence, "teacher_rows": divergence}
        return {name: requested[name] for name in TokenResults._fields}


NUM_DIFFERENTIABLE = 5


class UpstreamGradients(NamedTuple):
    """Upstream gradients of results. None for results without a gradient."""

    logprob: Tensor | None  # (N,)
    entropy: Tensor | None  # (N,)
    lse: Tensor | None  # (N,)
    candidate_logprob: Tensor | None  # (N, K)
    divergence: Tensor | None = None  # (N,)


class SavedRows(NamedTuple):
    """Results of forward that backward reads."""

    normalizer: Tensor  # (slots, N)
    entropy: Tensor | None  # (N,) if it has a gradient
    candidate_logprob: Tensor | None  # (N, K) if they have a gradient
    teacher_rows: Tensor | None = None  # (DIVERGENCE_SLOTS, N) if the divergence has a gradient
    samples: Tensor | None = None  # the memory of `Samples`, or (0,)


def logprob_spec(problem: LinearCrossEntropyProblem) -> LogprobSpec:
    assert isinstance(problem.spec, LogprobSpec)
    return problem.spec


def forward(problem: LinearCrossEntropyProblem, plan: Plan, runtime: Runtime | None = None) -> TokenResults:
    """Compute the results of all tokens."""
    spec, accum = logprob_spec(problem), problem.accum
    none_ignored = vectors.check_targets(problem)
    vectors.check_candidates(problem.candidates, problem.vocab_size)
    problem = replace(problem, inverse_temperature=vectors.check_inverse_temperature(problem.inverse_temperature))
    runtime = runtime or runtime_on(problem.device, plan.case.backend)
    selection = runtime.select(problem, not none_ignored and plan.case.skip_ignored, False)
    outputs = RowOutputs.allocate(spec, accum, (selection.max_num_rows,), runtime.arena.new)
    top_k = TopK.allocate(selection.max_num_rows, spec.top_k, accum, spec.scale, runtime.arena) if spec.top_k else None
    scales = vectors.LossScales(problem, runtime.backend, needs_scales=False)
    teacher = None
    if problem.teacher_terms:
        rows = runtime.arena.new((contract.DIVERGENCE_SLOTS, selection.max_num_rows), accum, zero=True)
        rows[: contract.DIVERGENCE : contract.STUDENT] = -torch.inf  # the offsets
        teacher = Teacher.from_problem(problem, rows, "forward_kl" if spec.divergence == "jsd" else None)
    fields = selection, scales, runtime.arena, outputs.normalizer, outputs
    context = build_context(plan, runtime, fields, top_k=top_k, teacher=teacher)
    plan.schedule.forward(context)
    context.rows.merge_results(slice(0, selection.num_rows))

    valid = (selection.target != spec.ignore_index)[:, None]
    candidate_logprob = top_k_logprob = top_k_ids = divergence = teacher_rows = None
    if teacher is not None:
        if not context.has_mixture:
            context.rows.merge_divergences(rows, teacher.kind)
            finish_divergence(rows, str(spec.divergence))
        if spec.divergence == "jsd" and not context.has_mixture:  # The terms are summed in a second pass.
            context.teacher = Teacher.from_problem(problem, rows)
            plan.schedule.forward(context)
            context.rows.sum_over_processes(rows[contract.DIVERGENCE :])
        if not context.problem.spec.stats:
            outputs.normalizer[: contract.LOGPROB] = rows[contract.STUDENT : contract.DIVERGENCE]
            outputs.normalizer[contract.LOGPROB] = 0.0  # not computed, and an output of the operator
        teacher_rows = selection.scatter(rows.masked_fill_(~valid[:, 0], 0.0), 1)
        divergence = teacher_rows[contract.DIVERGENCE].clone()
    if problem.candidates is not None:
        ids = selection.take(problem.candidates)
        values = _subtract_normalizer(_candidate_logits(context, ids), outputs.normalizer)
        values = values.masked_fill_(~is_class(ids, problem.vocab_size), torch.nan)
        candidate_logprob = selection.scatter(values.masked_fill_(~valid | (ids == NO_CANDIDATE), 0.0))
    if top_k is not None:
        top_k = context.rows.merge_top_k(top_k)
        z = spec.transform(top_k.logits, selection.inverse_temperature)
        values = _subtract_normalizer(z, outputs.normalizer)
        top_k_logprob = selection.scatter(values.masked_fill_(~valid, 0.0))
        top_k_ids = selection.scatter(top_k.ids.masked_fill_(~valid, NO_CANDIDATE))
    outputs = selection.scatter_outputs(outputs)
    lse = log_sum_exp(outputs.normalizer) if "lse" in spec.stats else None
    return TokenResults(
        outputs.logprob, outputs.entropy, lse, candidate_logprob, divergence, outputs.normalizer, outputs.argmax,
        outputs.mean_logit, top_k_logprob, top_k_ids, teacher_rows, context.samples_memory,
    )  # fmt: skip


def _candidate_logits(context: PassContext, ids: Tensor) -> Tensor:
    """Compute z of some classes of each selected row, (rows, K); 0 where an id is not a class. One collective: each
    process adds z of its classes."""
    problem, local_ids = context.problem, context.rows.local_ids(ids)
    logits = context.arena.new(ids.shape, context.normalizer.dtype, zero=True)
    for term in context.terms:
        context.backend.row_products(context.selection.take(term.input), term.weight, local_ids, logits)
    if problem.linear_bias is not None:
        logits += problem.linear_bias[local_ids.clamp(0, context.vocab_size - 1)]
    z = problem.spec.transform(logits, context.selection.inverse_temperature)
    return context.rows.sum_over_processes(z.masked_fill_(local_ids == NO_CANDIDATE, 0.0))


def _subtract_normalizer(z: Tensor, normalizer: Tensor) -> Tensor:
    """Return the log-probabilities of z, (rows, K)."""
    # The offset is subtracted first: exact if all logits share a large offset.
    return z.sub_(normalizer[OFFSET][:, None]).sub_(normalizer[LOG_SUM][:, None])


def backward(
    problem: LinearCrossEntropyProblem,
    plan: Plan,
    saved: SavedRows,
    upstream: UpstreamGradients,
    runtime: Runtime | None = None,
) -> list[Tensor]:
    """Compute the gradients from recomputed logits, or from samples of forward."""
    runtime = runtime or runtime_on(problem.device, plan.case.backend)
    selection = runtime.select(problem, plan.case.skip_ignored, False)
    *of_rows, samples = saved
    of_rows = [None if t is None else selection.take(t, dim) for t, dim in zip(of_rows, (1, 0, 0, 1), strict=True)]
    saved = SavedRows(*of_rows)  # type: ignore[arg-type]
    upstream = UpstreamGradients(*(None if t is None else selection.take(t) for t in upstream))
    candidate_grads, candidate_upstream = None, upstream.candidate_logprob
    if candidate_upstream is not None:
        assert problem.candidates is not None
        ids = selection.take(problem.candidates)
        candidate_upstream = candidate_upstream.where(is_class(ids, problem.vocab_size), 0.0)
        upstream = upstream._replace(candidate_logprob=candidate_upstream)
    has_teacher = upstream.divergence is not None and saved.teacher_rows is not None
    teacher = Teacher.from_problem(problem, saved.teacher_rows) if has_teacher else None  # type: ignore[arg-type]
    row_gradient, gradient_scale = _compute_row_gradient(runtime, selection, saved, upstream), None
    if candidate_upstream is not None:
        candidate_grads = _compute_candidate_grads(
            runtime, selection, ids, saved, candidate_upstream, row_gradient, plan.schedule.samples
        )
    if plan.dtypes.unscales_sums:
        gradient_scale = _compute_gradient_scale(selection, row_gradient, candidate_grads)
        for gradients in (row_gradient, *(() if candidate_grads is None else candidate_grads[1:])):
            if gradients is not None:
                gradients *= gradient_scale
    scales = vectors.LossScales(problem, runtime.backend, needs_scales=False)
    rows = selection, scales, runtime.arena, saved.normalizer
    context = build_context(
        plan, runtime, rows, gradient_scale=gradient_scale, row_gradient=row_gradient, teacher=teacher,
        samples_memory=samples,
    )  # fmt: skip
    if candidate_grads is not None:
        context.candidate_grads = candidate_grads._replace(ids=context.rows.local_ids(candidate_grads.ids))
    plan.schedule.backward(context)
    return context.finish_gradients()


def _compute_row_gradient(
    runtime: Runtime, selection: Selection, saved: SavedRows, upstream: UpstreamGradients
) -> Tensor:
    """Return `GradientCall.row_gradient`: (slots, rows) factors, NaN for wrong targets. The slots ENTROPY and
    DIVERGENCE_FACTOR are included if entropies or divergences have a gradient."""
    is_loss = upstream.entropy is None and upstream.divergence is None
    slots = LOSS_GRADIENT_SLOTS if is_loss else ROW_GRADIENT_SLOTS
    factors = runtime.arena.new((slots, selection.max_num_rows), saved.normalizer.dtype, zero=True)
    target, problem = selection.target, selection.problem
    valid = target != problem.spec.ignore_index

    def zero_ignored(gradient: Tensor) -> Tensor:
        return gradient.to(factors.dtype).where(valid, 0.0)

    if upstream.lse is not None:
        factors[SOFTMAX] += zero_ignored(upstream.lse)
    if upstream.logprob is not None:
        factors[TARGET] -= zero_ignored(upstream.logprob)
        factors[SOFTMAX] += factors[TARGET]
    if upstream.candidate_logprob is not None:
        factors[SOFTMAX] -= zero_ignored(upstream.candidate_logprob.sum(1))
    if upstream.entropy is not None:
        assert saved.entropy is not None
        factors[ENTROPY] += zero_ignored(upstream.entropy)
        factors[SOFTMAX] -= factors[ENTROPY] * saved.entropy
    if upstream.divergence is not None:
        assert saved.teacher_rows is not None
        factors[contract.DIVERGENCE_FACTOR] += zero_ignored(upstream.divergence)
        factors[SOFTMAX] -= factors[contract.DIVERGENCE_FACTOR] * saved.teacher_rows[contract.MEAN_WEIGHT]
    factors[SOFTMAX].masked_fill_(valid & ~is_class(target, problem.vocab_size), torch.nan)
    return factors


def _compute_gradient_scale(
    selection: Selection, row_gradient: Tensor, candidate_grads: CandidateGrads | None
) -> Tensor:
    """Return the power of two, (), with which the largest gradient of float16 logits is near FLOAT16_GRAD_PEAK."""
    spec, inverse_temperature = selection.problem.spec, selection.inverse_temperature
    if not row_gradient.numel():
        return row_gradient.new_ones(())
    peak = spec.typical_gradient(row_gradient.nan_to_num(0.0, 0.0, 0.0).abs().max())
    if inverse_temperature is not None:
        peak = peak * inverse_temperature.nan_to_num(0.0, 0.0, 0.0).abs().max()
    if candidate_grads is not None:
        peak = torch.maximum(peak, candidate_grads.values.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return vectors.floor_power_of_two(vectors.FLOAT16_GRAD_PEAK / peak)


def _compute_candidate_grads(
    runtime: Runtime, selection: Selection, ids: Tensor, saved: SavedRows, upstream: Tensor, row_gradient: Tensor,
    samples: bool,
) -> CandidateGrads:  # fmt: skip
    """Compute the complete gradients of the logits of candidates. Equal candidates of a row have equal values."""
    problem, logprob = selection.problem, saved.candidate_logprob
    assert logprob is not None
    spec = problem.spec
    values = runtime.arena.new(ids.shape, row_gradient.dtype)
    runtime.backend.sum_equal(ids, upstream.to(values.dtype), values)
    values -= row_gradient[TARGET, :, None].where(ids == selection.target[:, None], 0.0)
    z = logprob + log_sum_exp(saved.normalizer)[:, None]
    values += logprob.exp() * softmax_factor_with_entropy(row_gradient[:, :, None], logprob)
    jacobian = spec.jacobian(z, selection.inverse_temperature)
    # Values of ids that are no classes are not written, but would count for the gradient scale.
    valid = (selection.target != spec.ignore_index)[:, None] & is_class(ids, problem.vocab_size)
    terms = runtime.arena.new(ids.shape, values.dtype) if samples else None
    if terms is not None:
        terms.copy_((upstream * jacobian).where(valid, 0.0))
    return CandidateGrads(ids, values.mul_(jacobian).where(valid, 0.0), terms)
