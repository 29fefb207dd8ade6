"""Custom operators of `flce.linear_logprobs` and `flce.linear_divergence`, and their derivatives.

* ``flce::linear_logprobs``: the results of each token. Its plan is the plan of a call without gradients, so the bits of
  the results do not depend on the gradients that are computed later.
* ``flce::linear_logprobs_backward``: the gradients, for any upstream gradients of the results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.backends.contract import DIVERGENCE_SLOTS, NORMALIZER_SLOTS
from flce.core import log
from flce.core.problem import LinearCrossEntropyProblem, LogprobSpec, Needs
from flce.engine import per_token, vectors
from flce.engine.per_token import NUM_DIFFERENTIABLE, SavedRows, TokenResults, UpstreamGradients
from flce.ops.arguments import refuse_double_backward
from flce.ops.gradient_accumulation import find_targets, replace_added
from flce.ops.linear_operators import (
    SCHEMA,
    OperatorArguments,
    as_saved,
    count_flops,
    fake_deferred_gradients,
    on_problem,
    pack_samples,
    plan_for_problem,
    problem_tensors,
    run_plan,
)
from flce.planning.plan import ChunkPlan, log_new_shape
from flce.planning.search import BudgetError
from flce.torch_ops import register_formula, register_operator, update_active_counters

_NUM_SAVED = len(SavedRows._fields)
_NUM_ROWS = _NUM_SAVED + NUM_DIFFERENTIABLE


def linear_logprobs(problem: LinearCrossEntropyProblem) -> dict[str, Tensor | None]:
    """Return the results of all tokens by name, None if not requested. Differentiable once. Several backward passes can
    use the graph. If each token has 0 candidates, their result is differentiable, too: its gradients are 0."""
    spec, candidates = per_token.logprob_spec(problem), problem.candidates
    if not spec.candidates:
        problem = replace(problem, candidates=None)
    if not problem.is_traced:
        update_active_counters()
    values = torch.ops.flce.linear_logprobs(*OperatorArguments.from_problem(problem))
    requested = TokenResults.requested_fields(spec)
    results = {name: value if requested[name] else None for name, value in zip(requested, values, strict=True)}
    if candidates is not None:
        results["candidate_logprob"] = values[TokenResults._fields.index("candidate_logprob")].view(candidates.shape)
    return results


def _without_gradients(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """Return the problem that forward runs and plans: the same without gradients."""
    return replace(p, needs=Needs.from_flat([False] * len(p.needs.flat)))


def _forward_and_backward_plans(p: LinearCrossEntropyProblem) -> list[ChunkPlan]:
    """Return the plan of forward and, if gradients are needed, of backward. An error of a budget that is too small
    names a budget that fits both plans."""
    plans, refused, forward = [], [], _without_gradients(p)
    for planned in (forward, p) if p.needs_gradients else (forward,):
        try:
            plans.append(plan_for_problem(planned))
        except BudgetError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.least)
    return plans


def _forward(p: LinearCrossEntropyProblem) -> tuple[Tensor, ...]:
    # The plan of backward is made here too, so that a budget that is too small raises before any work.
    plan, *backward_plan = _forward_and_backward_plans(p)
    problem = _without_gradients(p)
    if backward_plan and backward_plan[0].schedule.samples:
        plan = backward_plan[0]  # It has the same results, and a list of entries.
    if log.is_debug_enabled():
        log_new_shape(plan)
    results = run_plan(lambda plan: per_token.forward(problem, plan), plan)
    return vectors.pack(results._replace(samples=pack_samples(p, results.samples)), results.normalizer)


def _forward_fake(p: LinearCrossEntropyProblem) -> tuple[Tensor, ...]:
    spec, n, accum = per_token.logprob_spec(p), p.num_tokens, p.accum
    # The shape and the dtype of each result, unless they are (n,) and `accum`.
    others = {
        "candidate_logprob": ((n, spec.candidates), accum),
        "normalizer": ((NORMALIZER_SLOTS, n), accum),
        "argmax": ((n,), torch.int64),
        "top_k_logprob": ((n, spec.top_k), accum),
        "top_k_ids": ((n, spec.top_k), torch.int64),
        "teacher_rows": ((DIVERGENCE_SLOTS, n), accum),
        "samples": (pack_samples(p, None).shape, torch.int32),
    }
    requested = TokenResults.requested_fields(spec)
    results = (others.get(name, ((n,), accum)) if requested[name] else ((0,), accum) for name in requested)
    return tuple(p.terms[0].input.new_empty(shape, dtype=dtype) for shape, dtype in results)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = OperatorArguments(*inputs)
    problem = arguments.to_problem(LogprobSpec)
    ctx.mark_non_differentiable(*output[NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)
    ctx.num_teacher_terms = len(problem.teacher_terms)
    ctx.name = "linear_divergence" if problem.teacher_terms else "linear_logprobs"
    ctx.needs, ctx.constants = problem.needs.flat, arguments.constants
    ctx.requested = requested = TokenResults.requested_fields(per_token.logprob_spec(problem))
    results = {name: value for name, value in zip(requested, output, strict=True) if requested[name]}
    ctx.save_for_backward(*[results.get(name) for name in SavedRows._fields], *problem_tensors(problem))


def _differentiate(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_double_backward(ctx.name, "torch.nn.functional.linear and log_softmax")
    given = [*upstream[:NUM_DIFFERENTIABLE]]
    if all(gradient is None for gradient in given):
        return OperatorArguments.place_gradients(ctx.needs, num_teacher_terms=ctx.num_teacher_terms)
    update_active_counters()
    tensors = ctx.saved_tensors  # read once, as checkpoints require
    saved, tensors = as_saved(tensors[:_NUM_SAVED], tensors[_NUM_SAVED:])
    arguments = OperatorArguments.from_tensors(tensors, ctx.constants)
    requested = [*ctx.requested.values()][:NUM_DIFFERENTIABLE]
    given = [None if g is None or not ok else g.contiguous() for g, ok in zip(given, requested, strict=True)]
    problem = find_targets(arguments.to_problem(LogprobSpec))
    if problem.dw_targets:
        found = replace_added(_backward(*saved, *given, problem), problem)
    else:
        found = torch.ops.flce.linear_logprobs_backward(*saved, *given, *arguments)
    return OperatorArguments.place_gradients(ctx.needs, found, num_teacher_terms=ctx.num_teacher_terms)


def _backward(*args: Any) -> list[Tensor]:
    *rows, p = args
    saved, upstream = SavedRows(*rows[:_NUM_SAVED]), UpstreamGradients(*rows[_NUM_SAVED:])
    plan, can_repeat = plan_for_problem(p), not p.dw_targets
    return run_plan(lambda plan: per_token.backward(p, plan, saved, upstream), plan, can_repeat)


register_operator(
    "linear_logprobs",
    f"({SCHEMA}) -> ({', '.join(['Tensor'] * len(TokenResults._fields))})",
    on_problem(_forward, spec=LogprobSpec),
    on_problem(_forward_fake, spec=LogprobSpec),
    backward=_differentiate,
    setup_context=_setup_context,
)
register_operator(
    "linear_logprobs_backward",
    "(Tensor normalizer, Tensor? entropy, Tensor? candidate_logprob, Tensor? teacher_rows, Tensor? samples, "
    "Tensor? grad_logprob, "
    "Tensor? grad_entropy, Tensor? grad_lse, Tensor? grad_candidates, Tensor? grad_divergence, "
    f"{SCHEMA}) -> Tensor[]",
    on_problem(_backward, _NUM_ROWS, LogprobSpec),
    on_problem(lambda *args: fake_deferred_gradients(args[-1]), _NUM_ROWS, LogprobSpec),
)
register_formula("linear_logprobs", on_problem(lambda p, out_val: count_flops(p)[0], spec=LogprobSpec))
register_formula(
    "linear_logprobs_backward",
    on_problem(lambda *args, out_val: sum(count_flops(args[-1])), _NUM_ROWS, LogprobSpec),
)
