"""Custom operators of `flce.fused_linear_cross_entropy`, and their derivatives.

There are four operators. `torch.compile` records each call as one node, and autograd has a rule for it:

* ``flce::linear_cross_entropy``: loss, statistics and, unless the plan defers them, gradients;
* ``flce::linear_cross_entropy_backward``: the gradients of a plan that defers them;
* ``flce::scale_`` and ``flce::scale_cast``: a gradient that forward has computed, times the upstream gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.backends.contract import RowOutputs
from flce.core import log, private
from flce.core.problem import LinearCrossEntropyProblem
from flce.engine import passes, vectors
from flce.engine.case import Case
from flce.ops.arguments import PLAIN_TENSORS, refuse_double_backward
from flce.ops.gradient_accumulation import find_targets, replace_added
from flce.ops.linear_operators import (
    SCHEMA,
    OperatorArguments,
    as_saved,
    count_flops,
    fake_deferred_gradients,
    fake_gradients,
    is_deferred,
    make_case,
    on_problem,
    pack_samples,
    plan_for_problem,
    problem_tensors,
    run_plan,
)
from flce.planning.plan import ChunkPlan, DescribedDevice, log_new_shape
from flce.planning.search import plan_for_case
from flce.torch_ops import (
    register_formula,
    register_operator,
    register_skipped_frames,
    skip_frame_and_callees,
    update_active_counters,
)

# The fields of `RowOutputs`, (0,) if not requested; the gradients times a gradient scale, in the order of `Needs.flat`
# (not visible to users); the gradient scale, () or, for 1, (0,); the gradient of `token_weight`, (N,) or (0,); and the
# memory of `Samples`, or (0,).
_RESULTS = ", ".join(["Tensor"] * len(RowOutputs._fields) + ["Tensor[] grads"] + ["Tensor"] * 3)


def linear_cross_entropy(problem: LinearCrossEntropyProblem) -> RowOutputs:
    """Compute the loss and the statistics of a problem. Differentiable once, in ``loss``."""
    if not problem.is_traced:
        tensors = problem_tensors(problem)
        if _can_bypass_dispatcher(tensors):
            return RowOutputs._make(flce_linear_cross_entropy.apply(problem, *tensors))
        update_active_counters()
    *outputs, _, _, _, _ = torch.ops.flce.linear_cross_entropy(*OperatorArguments.from_problem(problem))
    return RowOutputs.from_tensors(problem.spec, outputs)


def _forward(problem: LinearCrossEntropyProblem) -> tuple[Any, ...]:
    outputs, grads, *optional, samples = _run_forward(problem)
    others = vectors.pack(optional, outputs.loss)
    return *vectors.pack(outputs, outputs.loss), grads, *others, pack_samples(problem, samples)


def _run_forward(problem: LinearCrossEntropyProblem) -> passes.ForwardResult:
    plan = plan_for_problem(problem)
    deferred = is_deferred(plan.case, True) if problem.is_traced else plan.deferred
    if log.is_debug_enabled():
        log_new_shape(plan)
    return run_plan(lambda plan: passes.forward(problem, plan, deferred), plan)


def _fake_outputs(p: LinearCrossEntropyProblem, c: Case) -> tuple[Any, ...]:
    c.check()
    gradients, dtypes = c.needs.any and not is_deferred(c, p.is_traced), c.dtypes(deferred=False)
    accum, like = p.accum, p.terms[0].input
    scaled = gradients and dtypes.logits_grad == torch.float16
    gradient_scale = like.new_empty(() if scaled else (0,), dtype=accum)
    token_weight_grad = like.new_empty(p.num_tokens if p.needs_token_weight else 0, dtype=accum)
    grads = fake_gradients(p, dtypes) if gradients else []
    return *vectors.fake_outputs(p, like), grads, gradient_scale, token_weight_grad, pack_samples(p, None)


def fake_outputs_and_plan(args: tuple[Any, ...], gpu: DescribedDevice) -> tuple[tuple[Any, ...], ChunkPlan]:
    """Return fake results of ``flce::linear_cross_entropy``, and the plan, for tensors without values. `gpu` replaces
    the device of the tensors."""
    problem = OperatorArguments(*args).to_problem()
    case = make_case(problem, gpu)
    return _fake_outputs(problem, case), plan_for_case(case)


def _backward(
    normalizer: Tensor, samples: Tensor | None, upstream: Tensor, problem: LinearCrossEntropyProblem
) -> list[Tensor]:
    plan, can_repeat = plan_for_problem(problem), not problem.dw_targets
    return run_plan(
        lambda plan: passes.backward(problem, plan, normalizer, upstream, samples=samples), plan, can_repeat
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *outputs, grads, gradient_scale, token_weight_grad, samples = output
    ctx.mark_non_differentiable(*outputs[1:], *grads, gradient_scale, token_weight_grad, samples)
    problem, normalizer = OperatorArguments(*inputs).to_problem(), RowOutputs(*outputs).normalizer
    _save_for_backward(ctx, problem, grads, gradient_scale, token_weight_grad, normalizer, samples)


def _save_for_backward(
    ctx: Any,
    p: LinearCrossEntropyProblem,
    grads: Sequence[Tensor],
    gradient_scale: Tensor | None,
    token_weight_grad: Tensor | None,
    normalizer: Tensor,
    samples: Tensor | None,
) -> None:
    """Save for backward: the gradient of `token_weight`; the gradients, or the normalizer, the samples and the
    problem's tensors."""
    ctx.needs, ctx.needs_token_weight = p.needs.flat, p.needs_token_weight
    ctx.dtype, ctx.deferred = p.dtype, not grads
    # Otherwise autograd allocates a zero gradient for every output, also for an output as large as the head.
    ctx.set_materialize_grads(False)
    if grads:
        ctx.save_for_backward(token_weight_grad, *grads, gradient_scale)
    else:
        ctx.constants = OperatorArguments.from_problem(p).constants
        ctx.save_for_backward(token_weight_grad, normalizer, samples, *problem_tensors(p))


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Return the gradients at the positions of the arguments, None for arguments without a gradient."""
    if grad_loss is None:
        return OperatorArguments.place_gradients(ctx.needs)
    if torch.is_grad_enabled():
        refuse_double_backward("fused_linear_cross_entropy", "torch.nn.functional.linear and cross_entropy")
    token_weight_grad, *saved = ctx.saved_tensors
    gradients: Sequence[Tensor] = ()
    can_bypass = _can_bypass_dispatcher((grad_loss, *saved))
    if not can_bypass:
        update_active_counters()
    if any(ctx.needs):  # in place only if no other backward reads the saved gradients again
        gradients = _compute_gradients(ctx, saved, grad_loss, can_bypass, in_place=not private.is_graph_retained())
    return OperatorArguments.place_gradients(
        ctx.needs, gradients, grad_loss * token_weight_grad if ctx.needs_token_weight else None
    )


def _compute_gradients(
    ctx: Any, saved: Sequence[Tensor], upstream: Tensor, can_bypass: bool, in_place: bool
) -> Sequence[Tensor]:
    """Return the needed gradients, in the order of `Needs.flat`. `can_bypass`: the result of `_can_bypass_dispatcher`;
    `in_place`: True if the memory of saved gradients may be overwritten."""
    if ctx.deferred:
        (normalizer, samples, upstream), tensors = as_saved((*saved[:2], upstream), saved[2:])
        arguments = OperatorArguments.from_tensors(tensors, ctx.constants)
        problem = find_targets(arguments.to_problem())
        if can_bypass or problem.dw_targets:
            return replace_added(_backward(normalizer, samples, upstream, problem), problem)
        operator: Any = torch.ops.flce.linear_cross_entropy_backward
        gradients: list[Tensor] = operator(normalizer, samples, upstream, *arguments)
        return gradients
    *grads, gradient_scale = saved
    factor = upstream
    if gradient_scale is not None and gradient_scale.dim() == 0:
        # All gradients are written to new memory: dX and dW change dtype, and the bias gradient, which is small, is
        # copied for simplicity.
        factor, in_place = upstream / gradient_scale, False
    assert factor.dim() == 0, "forward gradients need an upstream gradient of shape ()"
    scaling: Any = get_backend(factor.device) if can_bypass else torch.ops.flce
    result, scaled_in_place = [], []
    # Allocations come first: if one fails, no gradient is overwritten yet, and backward can be called again.
    for grad in grads:
        # The bias gradient, a vector, stays in the dtype of its sum.
        dtype = grad.dtype if grad.dim() == 1 else ctx.dtype
        # In place only for real tensors: in a traced graph the tensor may be an output of the graph.
        if in_place and type(grad) is Tensor and grad.dtype == dtype:
            scaled_in_place.append(grad)
            result.append(grad)
        else:
            result.append(scaling.scale_cast(grad, factor, dtype))
    if scaled_in_place:
        scaling.scale_(scaled_in_place, factor)
    return result


# ------------------------------------------------------------------------------------------- without the operators


def _can_bypass_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if no compiler, tracer, mode or transform is active, so that the call need not be an operator."""
    if (
        torch.compiler.is_compiling()
        or private.get_tracing_state() is not None
        or private.len_torch_dispatch_stack()
        or private.peek_interpreter_stack() is not None
    ):
        return False
    # A generator takes three times as long.
    return all([t is None or (type(t) in PLAIN_TENSORS and not t.is_meta) for t in tensors])  # noqa: C419


class flce_linear_cross_entropy(torch.autograd.Function):
    """Autograd function with the results of ``flce::linear_cross_entropy``, for calls that can bypass the dispatcher.

    A custom operator costs more Python time than a small call. The class has the name that its autograd node shows.
    """

    @staticmethod
    def forward(ctx: Any, p: LinearCrossEntropyProblem, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run a call. Autograd requires the tensors of the problem as separate arguments: `tensors`."""
        register_skipped_frames()
        outputs, grads, gradient_scale, token_weight_grad, samples = _run_forward(p)
        ctx.mark_non_differentiable(*[t for t in outputs[1:] if t is not None])
        _save_for_backward(ctx, p, grads, gradient_scale, token_weight_grad, outputs.normalizer, samples)
        # Every tensor that a node returns costs host time. The caller needs the normalizer for statistics
        # only; backward has it from `_save_for_backward`.
        return (*outputs[:2], outputs.normalizer if p.spec.stats else None, *outputs[3:])

    @staticmethod
    @skip_frame_and_callees
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        inputs, weights, *others, _ = _differentiate(ctx, grad_loss)
        return (None, *inputs, *weights, *others)


def _forward_flops(problem: LinearCrossEntropyProblem, out_val: tuple[Any, ...]) -> int:
    logits, gradients = count_flops(problem)
    *_, grads, _, _, _ = out_val
    return logits + (gradients if grads else 0)


register_operator(
    "linear_cross_entropy",
    f"({SCHEMA}) -> ({_RESULTS})",
    on_problem(_forward),
    on_problem(lambda problem: _fake_outputs(problem, make_case(problem))),
    backward=_differentiate,
    setup_context=_setup_context,
)
register_operator(
    "linear_cross_entropy_backward",
    f"(Tensor normalizer, Tensor? samples, Tensor upstream, {SCHEMA}) -> Tensor[]",
    on_problem(_backward, 3),
    on_problem(lambda *args: fake_deferred_gradients(args[-1]), 3),
)
register_operator(
    "scale_",
    "(Tensor(a!)[] xs, Tensor factor) -> ()",
    lambda xs, factor: get_backend(factor.device).scale_(xs, factor),
    lambda xs, factor: None,
)
register_operator(
    "scale_cast",
    "(Tensor x, Tensor factor, ScalarType dtype) -> Tensor",
    lambda x, factor, dtype: get_backend(x.device).scale_cast(x, factor, dtype),
    lambda x, factor, dtype: torch.empty_like(x, dtype=dtype),
)
register_formula("linear_cross_entropy", on_problem(_forward_flops))
register_formula("linear_cross_entropy_backward", on_problem(lambda *args, out_val: sum(count_flops(args[-1])), 3))
