"""Custom operators of `flce.linear_logprobs` and `flce.linear_divergence`, and their derivatives.

* ``flce::linear_logprobs``: the results of each token. Its plan is the plan of a call without gradients, so the bits of
  the results do not depend on the gradients that are computed later.
* ``flce::linear_logprobs_backward``: the gradients, for any upstream gradients of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import DIVERGENCE_SLOTS, RowOutputs, log_sum_exp
from flce.core import log
from flce.core.problem import LinearCrossEntropyProblem, LogprobSpec, Needs, accumulation_dtype
from flce.engine import per_token
from flce.ops.arguments import refuse_double_backward
from flce.ops.linear_operators import (
    SCHEMA,
    OperatorArguments,
    count_flops,
    fake_gradients,
    make_case,
    plan_for_problem,
    run_plan,
)
from flce.planning import new_shapes
from flce.planning.plan import ChunkPlan
from flce.planning.search import BudgetError
from flce.torch_ops import register_formula, register_operator, update_active_counters


class LogprobResults(NamedTuple):
    """Results of the operator, in its order. Shape (0,): not requested. The first five are differentiable."""

    logprob: Tensor  # (N,)
    entropy: Tensor  # (N,)
    lse: Tensor  # (N,)
    candidate_logprob: Tensor  # (N, K)
    divergence: Tensor  # (N,)
    normalizer: Tensor  # (slots, N)
    argmax: Tensor  # (N,) int64
    mean_logit: Tensor  # (N,)
    log_sum_sq_prob: Tensor  # (N,)
    top_k_logprob: Tensor  # (N, k)
    top_k_ids: Tensor  # (N, k) int64
    teacher_rows: Tensor  # (DIVERGENCE_SLOTS, N)


_NUM_DIFFERENTIABLE = 5
_NUM_SAVED = len(per_token.SavedRows._fields)


def linear_logprobs(problem: LinearCrossEntropyProblem) -> dict[str, Tensor | None]:
    """Return the results of all tokens by name, None if not requested. Differentiable once. Several backward passes can
    use the graph. If each token has 0 candidates, their result is differentiable, too: its gradients are 0."""
    spec, candidates = per_token.logprob_spec(problem), problem.candidates
    if not spec.candidates:
        problem = replace(problem, candidates=None)
    if not problem.is_traced:
        update_active_counters()
    arguments = OperatorArguments.from_problem(problem)
    results = LogprobResults._make(torch.ops.flce.linear_logprobs(*arguments))._asdict()
    for name, requested in zip(LogprobResults._fields, _requested_results(spec), strict=True):
        if name == "candidate_logprob" and candidates is not None:
            results[name] = results[name].view(candidates.shape)
        elif not requested:
            results[name] = None
    return results


def _order_results(outputs: Sequence[Any], lse: Any, **others: Any) -> LogprobResults:
    """Return the values in the order of `LogprobResults`. `outputs`: values in the order of `RowOutputs`; `others`: the
    other fields of `per_token.TokenResults`."""
    named = {**dict(zip(RowOutputs._fields, outputs, strict=True)), "lse": lse, **others}
    return LogprobResults(*[named[name] for name in LogprobResults._fields])


def _requested_results(spec: LogprobSpec) -> LogprobResults:
    """Return a bool for each result: True if the caller requested it."""
    top, divergence = spec.top_k > 0, spec.divergence is not None
    return _order_results(
        RowOutputs.requested_fields(spec), "lse" in spec.stats, candidate_logprob=spec.candidates > 0,
        top_k_logprob=top, top_k_ids=top, divergence=divergence, teacher_rows=divergence,
    )  # fmt: skip


def _without_gradients(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """Return the problem that forward runs and plans: the same without gradients."""
    return replace(p, needs=Needs.from_flat([False] * len(p.needs.flat)))


def _parse_problem(*args: Any) -> LinearCrossEntropyProblem:
    return OperatorArguments(*args).to_problem(LogprobSpec)


def _plan_untraced(p: LinearCrossEntropyProblem) -> ChunkPlan:
    """Return the plan of the same call outside of a graph, so that the results have the same bits."""
    return plan_for_problem(replace(p, is_traced=False))


def _forward_and_backward_plans(p: LinearCrossEntropyProblem) -> list[ChunkPlan]:
    """Return the plan of forward and, if gradients are needed, of backward. An error of a budget that is too small
    names a budget that fits both plans."""
    plans, refused, forward = [], [], _without_gradients(p)
    for planned in (forward, p) if p.needs.any else (forward,):
        try:
            plans.append(_plan_untraced(planned))
        except BudgetError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.least)
    return plans


def _forward(*args: Any) -> tuple[Tensor, ...]:
    p = _parse_problem(*args)
    # The plan of backward is made here too, so that a budget that is too small raises before any work.
    plan, problem = _forward_and_backward_plans(p)[0], _without_gradients(p)
    if log.is_debug_enabled():
        new_shapes.log_new_shape(plan, new_shapes.IN_GRAPH if p.is_traced else new_shapes.DISPATCHED)
    return _results(problem, run_plan(lambda plan: per_token.forward(problem, plan), plan))


def _results(p: LinearCrossEntropyProblem, results: per_token.TokenResults) -> LogprobResults:
    normalizer, others = results.outputs.normalizer, results._asdict()
    lse = log_sum_exp(normalizer) if "lse" in p.spec.stats else None
    ordered = _order_results(others.pop("outputs"), lse, **others)
    return LogprobResults._make(normalizer.new_empty(0) if t is None else t for t in ordered)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p = _parse_problem(*args)
    spec, like, accum = per_token.logprob_spec(p), p.terms[0].input, accumulation_dtype(p.dtype)

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    def entries(size: int, dtype: torch.dtype) -> Tensor | None:
        return new((p.num_tokens, size), dtype) if size else None

    outputs = RowOutputs.allocate(spec, accum, (p.num_tokens,), new)
    top = entries(spec.top_k, accum), entries(spec.top_k, torch.int64)
    teacher = (
        (None, None)
        if spec.divergence is None
        else (new((p.num_tokens,), accum), new((DIVERGENCE_SLOTS, p.num_tokens), accum))
    )
    return _results(p, per_token.TokenResults(outputs, entries(spec.candidates, accum), *top, *teacher))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    results, arguments = LogprobResults._make(output), OperatorArguments(*inputs)
    ctx.mark_non_differentiable(*results[_NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)
    problem = arguments.to_problem(LogprobSpec)
    ctx.num_teacher_terms = len(problem.teacher_terms)
    ctx.name = "linear_divergence" if problem.teacher_terms else "linear_logprobs"
    ctx.needs, ctx.constants = problem.needs.flat, arguments.constants
    saved = results.normalizer, results.entropy, results.candidate_logprob, results.teacher_rows
    ctx.save_for_backward(*saved, *arguments.tensors())


def _differentiate(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward(ctx.name, "torch.nn.functional.linear and log_softmax")
    given = upstream[:_NUM_DIFFERENTIABLE]
    if all(gradient is None for gradient in given):
        return OperatorArguments.place_gradients(ctx.needs, num_teacher_terms=ctx.num_teacher_terms)
    update_active_counters()
    tensors = ctx.saved_tensors  # read once, as checkpoints require
    saved, tensors = tensors[:_NUM_SAVED], tensors[_NUM_SAVED:]
    arguments = OperatorArguments.from_tensors(tensors, ctx.constants)

    contiguous = [None if t is None else t.contiguous() for t in given]
    found = torch.ops.flce.linear_logprobs_backward(*saved, *contiguous, *arguments)
    return OperatorArguments.place_gradients(ctx.needs, found, num_teacher_terms=ctx.num_teacher_terms)


def _backward_arguments(
    *args: Any,
) -> tuple[LinearCrossEntropyProblem, per_token.SavedRows, per_token.UpstreamGradients]:
    num_upstream = len(per_token.UpstreamGradients._fields)
    problem = _parse_problem(*args[_NUM_SAVED + num_upstream :])
    requested = _requested_results(per_token.logprob_spec(problem))

    def select(names: tuple[str, ...], tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors, and None for results that were not requested, which have the shape (0,)."""
        return [t if getattr(requested, name) else None for name, t in zip(names, tensors, strict=True)]

    saved = per_token.SavedRows(*select(per_token.SavedRows._fields, args[:_NUM_SAVED]))
    given = args[_NUM_SAVED : _NUM_SAVED + num_upstream]
    upstream = per_token.UpstreamGradients(*select(per_token.UpstreamGradients._fields, given))
    return problem, saved, upstream


def _backward(*args: Any) -> list[Tensor]:
    problem, saved, upstream = _backward_arguments(*args)
    return run_plan(lambda plan: per_token.backward(problem, plan, saved, upstream), _plan_untraced(problem))


def _backward_fake(*args: Any) -> list[Tensor]:
    problem = _backward_arguments(*args)[0]
    return fake_gradients(problem, make_case(problem).dtypes(deferred=True))


register_operator(
    "linear_logprobs",
    f"({SCHEMA}) -> ({', '.join(['Tensor'] * len(LogprobResults._fields))})",
    _forward,
    _forward_fake,
    backward=_differentiate,
    setup_context=_setup_context,
)
register_operator(
    "linear_logprobs_backward",
    "(Tensor normalizer, Tensor entropy, Tensor candidate_logprob, Tensor teacher_rows, Tensor? grad_logprob, "
    "Tensor? grad_entropy, Tensor? grad_lse, Tensor? grad_candidates, Tensor? grad_divergence, "
    f"{SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
)
register_formula("linear_logprobs", lambda *args, out_val: count_flops(_parse_problem(*args))[0])
register_formula("linear_logprobs_backward", lambda *args, out_val: sum(count_flops(_backward_arguments(*args)[0])))
