"""Custom operators of `flce.linear_logprobs`, and their derivatives.

* ``flce::linear_logprobs``: the results of each token. Its plan is that of a call without gradients, whatever is asked
  for later, so the bits of the results depend on nothing else.
* ``flce::linear_logprobs_backward``: the gradients, for any upstream gradients of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import RowOutputs, log_sum_exp
from flce.core import log
from flce.core.options import ChunkOptions
from flce.core.problem import (
    LinearCrossEntropyProblem,
    LinearTerm,
    LogprobSpec,
    Needs,
    accumulation_dtype,
)
from flce.core.shard import Shard
from flce.engine import per_token
from flce.ops.arguments import refuse_double_backward
from flce.ops.linear_cross_entropy import fake_gradients, fields_of_case, plan_of, product_flops, run_plan
from flce.planning import new_shapes
from flce.planning.plan import ChunkPlan
from flce.planning.search import BudgetError
from flce.torch_ops import flops
from flce.torch_ops.registration import as_text, define, from_text
from flce.torch_ops.vmap import for_each, register_loop

_ARGUMENTS = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? row_factor, Tensor? candidates, "
    "str settings, bool[] needs, bool traced, str? group, int start, int vocab_size, bool sequence_parallel"
)
_NEEDS = 7


class Results(NamedTuple):
    """What the operator returns, in its order; of shape (0,) what was not asked for. The first four are
    differentiable."""

    logprob: Tensor  # (N,)
    entropy: Tensor  # (N,)
    lse: Tensor  # (N,)
    candidate_logprob: Tensor  # (N, K)
    normalizer: Tensor  # (slots, N)
    argmax: Tensor  # (N,) int64
    mean_logit: Tensor  # (N,)
    log_sum_sq_prob: Tensor  # (N,)
    top_k_logprob: Tensor  # (N, k)
    top_k_ids: Tensor  # (N, k) int64


_DIFFERENTIABLE = 4


def linear_logprobs(
    problem: LinearCrossEntropyProblem, candidates: Tensor | None, options: ChunkOptions
) -> dict[str, Tensor | None]:
    """The results of all tokens by name, None for what was not asked for. Differentiable once, as often as one likes.

    Args:
        candidates: (N, K) int64. Results of K = 0 are differentiable, too: their gradients are 0.
    """
    spec = per_token.spec_of(problem)
    if not torch.compiler.is_compiling():
        flops.tell_active_counters()
    packed = _pack(problem, candidates if spec.candidates else None, options)
    made = Results._make(torch.ops.flce.linear_logprobs(*packed))._asdict()
    for name, asked in zip(Results._fields, _asked(spec), strict=True):
        if name == "candidate_logprob" and candidates is not None:
            made[name] = made[name].view(candidates.shape)
        elif not asked:
            made[name] = None
    return made


def _asked(spec: LogprobSpec) -> list[bool]:
    """For each of `Results`, whether it is asked for."""
    named = dict(zip(RowOutputs._fields, RowOutputs.asked(spec), strict=True)) | {
        "lse": "lse" in spec.stats,
        "candidate_logprob": spec.candidates > 0,
        "top_k_logprob": spec.top_k > 0,
        "top_k_ids": spec.top_k > 0,
    }
    return [bool(named[name]) for name in Results._fields]


def _pack(p: LinearCrossEntropyProblem, candidates: Tensor | None, options: ChunkOptions) -> tuple[Any, ...]:
    return (
        [term.input for term in p.terms],
        [term.weight for term in p.terms],
        p.target,
        p.linear_bias,
        p.row_factor,
        candidates,
        as_text(p.spec, options),
        p.needs.flat,
        torch.compiler.is_compiling(),
        *Shard.fields_of(p.shard),
    )


class _Call(NamedTuple):
    problem: LinearCrossEntropyProblem
    candidates: Tensor | None
    options: ChunkOptions
    traced: bool

    def plan(self, gradients: bool) -> ChunkPlan:
        """The plan of forward, or of gradients; in a graph the same as outside: results have the same bits."""
        problem = self.problem if gradients else _without_gradients(self.problem)
        return plan_of(problem, fields_of_case(problem, self.options, traced=False))


def _without_gradients(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    return replace(p, needs=Needs.from_flat([False] * len(p.needs.flat)))


def _unpack(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    target: Tensor,
    linear_bias: Tensor | None,
    row_factor: Tensor | None,
    candidates: Tensor | None,
    settings: str,
    needs: Sequence[bool],
    traced: bool,
    *shard: Any,
) -> _Call:
    """The call, from the arguments of an operator."""
    spec, options = from_text(settings, (LogprobSpec, ChunkOptions))
    terms = tuple(map(LinearTerm, inputs, weights))
    others = (
        linear_bias,
        None,
        None,
        None,
        spec,
        Needs.from_flat(needs),
        0,
        False,
        row_factor,
        Shard.of_fields(*shard),
    )
    return _Call(LinearCrossEntropyProblem(terms, target, *others), candidates, options, traced)


def _plans(call: _Call) -> list[ChunkPlan]:
    """The plan of forward and, if gradients are needed, of backward. Where either cannot keep the budget, the error is
    raised before the work, and names a budget that is enough for both."""
    plans, refused = [], []
    for gradients in (False, True)[: 1 + call.problem.needs.any]:
        try:
            plans.append(call.plan(gradients))
        except BudgetError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.least)
    return plans


def _forward(*args: Any) -> tuple[Tensor, ...]:
    call = _unpack(*args)
    (plan, *_), problem = _plans(call), _without_gradients(call.problem)
    if log.telling():
        new_shapes.log_new_shape(plan, new_shapes.IN_GRAPH if call.traced else new_shapes.WATCHED)
    rows, *others = run_plan(lambda plan: per_token.forward(problem, plan, call.candidates), plan, problem.shard)
    return _results(problem, rows, *others)


def _results(
    p: LinearCrossEntropyProblem,
    rows: RowOutputs,
    candidate_logprob: Tensor | None,
    top_logprob: Tensor | None,
    top_ids: Tensor | None,
) -> Results:
    spec = per_token.spec_of(p)
    made = dict(zip(RowOutputs._fields, rows, strict=True)) | {
        "lse": log_sum_exp(rows.normalizer) if "lse" in spec.stats else None,
        "candidate_logprob": candidate_logprob,
        "top_k_logprob": top_logprob,
        "top_k_ids": top_ids,
    }
    nothing = rows.normalizer
    there = (made[name] for name in Results._fields)
    return Results._make(nothing.new_empty(0) if t is None else t for t in there)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p = _unpack(*args).problem
    spec, like, accum = per_token.spec_of(p), p.terms[0].input, accumulation_dtype(p.dtype)

    def new(slots: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return like.new_empty((*slots, p.num_tokens), dtype=dtype)

    def entries(size: int, dtype: torch.dtype) -> Tensor | None:
        return like.new_empty((p.num_tokens, size), dtype=dtype) if size else None

    rows = RowOutputs.of(spec, accum, new)
    top = entries(spec.top_k, accum), entries(spec.top_k, torch.int64)
    return _results(p, rows, entries(spec.candidates, accum), *top)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    results = Results._make(output)
    ctx.mark_non_differentiable(*results[_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)
    of_inputs, of_weights, *tensors = inputs[:6]
    ctx.terms, ctx.others = len(of_inputs), inputs[6:]
    kept = results.normalizer, results.entropy, results.candidate_logprob
    ctx.save_for_backward(*kept, *of_inputs, *of_weights, *tensors)


def _differentiate(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    refuse_double_backward("linear_logprobs", "torch.nn.functional.linear and log_softmax")
    terms, nothing = ctx.terms, (None,) * (len(ctx.others) + 2)
    given = upstream[:_DIFFERENTIABLE]
    if all(gradient is None for gradient in given):
        return ([None] * terms, [None] * terms, None, None, *nothing)
    flops.tell_active_counters()
    normalizer, entropy, candidate_logprob, *others = ctx.saved_tensors
    tensors = (others[:terms], others[terms : 2 * terms], *others[2 * terms :])
    needs = ctx.others[1]

    def gradients(*upstream: Tensor | None) -> list[Tensor]:
        contiguous = [None if t is None else t.contiguous() for t in upstream]
        grads: list[Tensor] = torch.ops.flce.linear_logprobs_backward(
            normalizer, entropy, candidate_logprob, *contiguous, *tensors, *ctx.others
        )
        return grads

    made = iter(for_each(gradients, *given))
    *of_terms, of_bias = [next(made) if need else None for need in needs]
    return (of_terms[:terms], of_terms[terms:], None, of_bias, *nothing)


def _backward(
    normalizer: Tensor,
    entropy: Tensor,
    candidate_logprob: Tensor,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    of_lse: Tensor | None,
    of_candidates: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    call = _unpack(*args)
    asked = Results._make(_asked(per_token.spec_of(call.problem)))
    kept = per_token.Kept(
        normalizer, entropy if asked.entropy else None, candidate_logprob if asked.candidate_logprob else None
    )
    upstream = per_token.Upstream(of_logprob, of_entropy, of_lse, of_candidates if asked.candidate_logprob else None)
    return run_plan(
        lambda plan: per_token.backward(call.problem, plan, call.candidates, kept, upstream),
        call.plan(True),
        call.problem.shard,
    )


def _backward_fake(*args: Any) -> list[Tensor]:
    p = _unpack(*args[7:]).problem
    return fake_gradients(p, p.dtype, p.dtype, accumulation_dtype(p.dtype))


def _forward_flops(*args: Any, out_val: Any) -> int:
    return product_flops(args[0], args[1], args[_NEEDS])[0]


def _backward_flops(*args: Any, out_val: Any) -> int:
    _, _, _, _, _, _, _, *others = args
    return sum(product_flops(others[0], others[1], others[_NEEDS]))


def _register() -> None:
    results = ", ".join(["Tensor"] * len(Results._fields))
    define(
        "linear_logprobs",
        f"({_ARGUMENTS}) -> ({results})",
        _forward,
        _forward_fake,
        backward=_differentiate,
        setup_context=_setup_context,
    )
    define(
        "linear_logprobs_backward",
        "(Tensor normalizer, Tensor entropy, Tensor candidate_logprob, Tensor? of_logprob, Tensor? of_entropy, "
        f"Tensor? of_lse, Tensor? of_candidates, {_ARGUMENTS}) -> Tensor[]",
        _backward,
        _backward_fake,
    )
    flops.declare("linear_logprobs", _forward_flops)
    flops.declare("linear_logprobs_backward", _backward_flops)
    register_loop("linear_logprobs_backward")


_register()
