"""Custom operators and their derivatives.

Four operators, so that `torch.compile` records a call as one node and autograd knows what to do with it:

* ``flce::linear_cross_entropy``: loss, statistics and, unless the plan defers them, gradients;
* ``flce::linear_cross_entropy_backward``: the gradients of a plan that defers them;
* ``flce::scale_`` and ``flce::scale_cast``: a gradient made in forward times the upstream gradient.

An operator's schema takes tensors, scalars and lists of them only: `_pack` takes the dataclasses of `problem` and
`planning.search` apart, `_unpack` puts them together again on the other side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flce.backends import backend_name, get_backend, has_product
from flce.backends.contract import RowOutputs
from flce.core import log, private
from flce.core.callers import caller
from flce.core.devices import device_record
from flce.core.options import ChunkOptions
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LossSpec, Needs, accumulation_dtype
from flce.core.shard import Shard
from flce.engine import passes, vectors
from flce.engine.case import Case
from flce.ops.arguments import refuse_double_backward
from flce.planning import new_shapes
from flce.planning.device_kinds import Described
from flce.planning.plan import ChunkPlan
from flce.planning.search import make_plan, plan_of_call, plan_of_slice
from flce.torch_ops import flops
from flce.torch_ops.frames import mark_frames, never_compiled
from flce.torch_ops.registration import as_text, define, from_text
from flce.torch_ops.vmap import for_each, is_batched, register_loop

# Tensors and lists of them. Then the LossSpec and the ChunkOptions, the shift, whether the weights of tokens have a
# gradient, `Needs.flat`, whether the call is part of a graph, which is good for other numbers of tokens too, and the
# shard.
_ARGUMENTS = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, "
    "str settings, int shift, bool token_weight_grad, bool[] needs, bool traced, "
    "str? group, int start, int vocab_size, bool sequence_parallel"
)
_NUM_TENSORS = 7
_NEEDS = _NUM_TENSORS + 3
# The results of `vectors.as_outputs`, of which the first is the loss; its gradients times a unit, as `Needs.flat` lists
# them, which no user sees; that unit, () or, for 1, (0,); and the gradient in the weights of tokens, (N,), or (0,).
_RESULTS = ", ".join(
    ["Tensor"] * len(RowOutputs._fields) + ["Tensor[] grads", "Tensor grad_unit", "Tensor weight_grad"]
)

ResultT = TypeVar("ResultT")


def linear_cross_entropy(problem: LinearCrossEntropyProblem, options: ChunkOptions) -> RowOutputs:
    """Solve a problem. Differentiable once, in ``loss``."""
    tensors = _tensors(problem)
    if _nobody_watches(tensors):
        return RowOutputs._make(flce_linear_cross_entropy.apply(problem, options, *tensors))
    if not torch.compiler.is_compiling():
        flops.tell_active_counters()
    *rows, _, _, _ = torch.ops.flce.linear_cross_entropy(*_pack(problem, options))
    return RowOutputs.given(problem.spec, rows)


def _pack(p: LinearCrossEntropyProblem, options: ChunkOptions) -> tuple[Any, ...]:
    return (
        [term.input for term in p.terms],
        [term.weight for term in p.terms],
        p.target,
        p.linear_bias,
        p.class_weight,
        p.token_weight,
        p.num_items,
        as_text(p.spec, options),
        p.shift,
        p.token_weight_grad,
        p.needs.flat,
        torch.compiler.is_compiling(),
        *Shard.fields_of(p.shard),
    )


def _unpack(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    target: Tensor,
    linear_bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: Tensor | None,
    settings: str,
    shift: int,
    token_weight_grad: bool,
    needs: Sequence[bool],
    traced: bool,
    *shard: Any,
) -> tuple[LinearCrossEntropyProblem, ChunkOptions, bool]:
    """The problem, its options, and whether it is part of a graph: from the arguments of an operator."""
    spec, options = from_text(settings, (LossSpec, ChunkOptions))
    terms = tuple(map(LinearTerm, inputs, weights))
    optional = linear_bias, class_weight, token_weight, num_items
    others = spec, Needs.from_flat(needs), shift, token_weight_grad
    problem = LinearCrossEntropyProblem(terms, target, *optional, *others, shard=Shard.of_fields(*shard))
    return problem, options, traced


def fields_of_case(
    p: LinearCrossEntropyProblem, options: ChunkOptions, traced: bool, gpu: Described | None = None
) -> tuple[Any, ...]:
    """The fields of a `Case`; with a GPU, as if the tensors were there."""
    # Kernels beside products with an epilogue go along rows.
    row_major = all(term.input.stride(-1) == 1 == term.weight.stride(-1) for term in p.terms)
    if traced and options.strategy == "auto" and p.dtype == torch.float16:
        # See `_makes_gradients`. Gradients in float16 are to be rounded when the upstream gradient is known.
        options = replace(options, strategy="tokens" if options.max_workspace_bytes is None else "vocab")
    return (
        p.num_tokens,
        p.hidden_sizes,
        p.slice_size if p.shard is None else p.shard.most_classes,
        p.dtype,
        "cuda" if gpu else p.device.type,
        gpu.backend if gpu else backend_name(p.device),
        row_major and (gpu.has_product if gpu else has_product(p.device)),
        gpu.device if gpu else device_record(p.device),
        p.spec,
        p.needs,
        options,
        None if p.shard is None else p.shard.split,
    )


def _makes_gradients(call: tuple[Any, ...], traced: bool) -> bool:
    """Whether gradients are among the results of forward.

    A graph must know that without a plan, for any number of tokens. So with ``strategy="auto"`` forward makes them in
    any case there, also by a schedule that would leave them to backward.
    """
    num_tokens, hidden_sizes, vocab_size, *others = call
    *_, spec, needs, options, _ = others
    if not needs.any or spec.reduction == "none" or options.strategy != "auto":
        return needs.any and spec.reduction != "none" and options.strategy == "tokens"
    if traced:
        return True
    try:
        # Sizes may be symbols of another tracer than `torch.compile`. Its graph is for these sizes alone.
        return not plan_of_call(int(num_tokens), tuple(map(int, hidden_sizes)), int(vocab_size), *others).deferred
    except ValueError:  # no plan keeps the budget, as a call says
        return True


def plan_of(p: LinearCrossEntropyProblem, call: tuple[Any, ...]) -> ChunkPlan:
    """The plan of a problem, of which `call` are the `fields_of_case`."""
    plan = plan_of_call(*call)
    return plan if p.slice_size == plan.case.vocab_size else plan_of_slice(plan, p.slice_size)


def run_plan(run: Callable[[ChunkPlan], ResultT], plan: ChunkPlan, shard: Shard | None = None) -> ResultT:
    """`run` with the plan of a call; where its memory cannot be had, with a smaller one.

    Not with a budget, which says how much there is, nor while a graph is captured, whose memory is its own, nor where
    other processes go on with the plan.
    """
    limited = plan.case.options.max_workspace_bytes is not None or shard is not None
    while True:
        try:
            return run(plan)
        except torch.OutOfMemoryError:
            capturing = plan.case.device_type == "cuda" and torch.cuda.is_current_stream_capturing()
            smaller = None if limited or capturing else _smaller(plan)
            if smaller is None:
                raise
        # Here, where the frames of the attempt are gone, and their tensors with them.
        caller().warn(
            f"flce could not have the {plan.workspace_bytes / 2**20:.0f} MiB of its plan, and goes on with "
            f"{smaller.workspace_bytes / 2**20:.0f} MiB. To save the attempt, give options=flce.ChunkOptions("
            f"max_workspace_bytes={smaller.workspace_bytes}).",
            RuntimeWarning,
        )
        plan = smaller


@functools.lru_cache(maxsize=64)
def _smaller(plan: ChunkPlan) -> ChunkPlan | None:
    """A plan of a quarter of the workspace, or a half or more, with outputs that look the same; None: there is none."""
    for quarters in (1, 2, 3):
        options = replace(
            plan.case.options,
            chunk_rows=None,
            max_workspace_bytes=max(1, plan.workspace_bytes * quarters // 4),
            strategy=plan.strategy,  # type: ignore[arg-type]
        )
        with contextlib.suppress(ValueError):
            smaller = make_plan(replace(plan.case, options=options))
            return smaller if smaller.workspace_bytes < plan.workspace_bytes else None
    return None


def _forward(*args: Any) -> tuple[Any, ...]:
    problem, options, traced = _unpack(*args)
    result = _solved(problem, options, traced, new_shapes.IN_GRAPH if traced else new_shapes.WATCHED)
    optional = result.grad_unit, result.weight_grad
    unit, weight_grad = (result.rows.loss.new_empty(0) if t is None else t for t in optional)
    return *vectors.as_outputs(result.rows), result.grads, unit, weight_grad


def _solved(p: LinearCrossEntropyProblem, options: ChunkOptions, traced: bool, how: str) -> passes.ForwardResult:
    call = fields_of_case(p, options, traced)
    plan, gradients = plan_of(p, call), _makes_gradients(call, traced)
    if log.telling():
        new_shapes.log_new_shape(plan, how)
    return run_plan(lambda plan: passes.forward(p, plan, gradients), plan, p.shard)


def _forward_fake(*args: Any) -> tuple[Any, ...]:
    problem, options, traced = _unpack(*args)
    return _fake_outputs(problem, fields_of_case(problem, options, traced), traced)


def _fake_outputs(p: LinearCrossEntropyProblem, call: tuple[Any, ...], traced: bool) -> tuple[Any, ...]:
    gradients = _makes_gradients(call, traced)
    dtypes = Case(*call).dtypes(deferred=not gradients)
    accum, like = accumulation_dtype(p.dtype), p.terms[0].input
    grads = fake_gradients(p, dtypes.input_grad, dtypes.weight_grad, accum) if gradients else []
    scaled = gradients and dtypes.logits_grad == torch.float16
    unit = like.new_empty(() if scaled else (0,), dtype=accum)
    weight_grad = like.new_empty(p.num_tokens if p.token_weight_grad else 0, dtype=accum)
    return *vectors.fake_outputs(p, like), grads, unit, weight_grad


def rehearsed(args: tuple[Any, ...], gpu: Described) -> tuple[tuple[Any, ...], ChunkPlan]:
    """What ``flce::linear_cross_entropy`` returns for tensors without values where they stand for those of a GPU, and
    the plan there.

    Args:
        args: of the operator.
        gpu: what stands in place of their device.
    """
    problem, options, traced = _unpack(*args)
    call = fields_of_case(problem, options, traced, gpu)
    return _fake_outputs(problem, call, traced), plan_of_call(*call)


def _backward(normalizer: Tensor, upstream: Tensor, *args: Any) -> list[Tensor]:
    problem, options, traced = _unpack(*args)
    plan = plan_of(problem, fields_of_case(problem, options, traced))
    return run_plan(lambda plan: passes.backward(problem, plan, normalizer, upstream), plan, problem.shard)


def _backward_fake(normalizer: Tensor, upstream: Tensor, *args: Any) -> list[Tensor]:
    p, *_ = _unpack(*args)
    return fake_gradients(p, p.dtype, p.dtype, accumulation_dtype(p.dtype))


def fake_gradients(
    p: LinearCrossEntropyProblem, input_dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype
) -> list[Tensor]:
    """The gradients that are needed, in the order of `Needs.flat`."""
    weight = p.terms[0].weight
    grads = (
        *(term.input.new_empty(term.input.shape, dtype=input_dtype) for term in p.terms),
        *(term.weight.new_empty(term.weight.shape, dtype=weight_dtype) for term in p.terms),
        weight.new_empty(p.slice_size, dtype=bias_dtype),
    )
    return [grad for grad, needed in zip(grads, p.needs.flat, strict=True) if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *rows, grads, unit, weight_grad = output
    ctx.mark_non_differentiable(*rows[1:], *grads, unit, weight_grad)
    of_inputs, of_weights, *tensors = inputs[:_NUM_TENSORS]
    ctx.scalars = inputs[_NUM_TENSORS:]
    _, _, ctx.weighs, needs, *_ = ctx.scalars
    ctx.needs = Needs.from_flat(needs)
    normalizer = RowOutputs(*rows).normalizer
    _keep(ctx, grads, unit, weight_grad, normalizer, (*of_inputs, *of_weights, *tensors))


def _keep(
    ctx: Any,
    grads: Sequence[Tensor],
    grad_unit: Tensor | None,
    weight_grad: Tensor | None,
    normalizer: Tensor,
    tensors: Sequence[Tensor | None],
) -> None:
    """For backward: the gradient in the weights of tokens; the others, or the normalizer and the problem's tensors."""
    # Otherwise autograd fills in a zero gradient for every output, one as large as the head among them.
    ctx.set_materialize_grads(False)
    assert tensors[0] is not None
    ctx.dtype = tensors[0].dtype
    ctx.deferred = not grads
    ctx.save_for_backward(weight_grad, *((normalizer, *tensors) if ctx.deferred else (*grads, grad_unit)))


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    terms = len(ctx.needs.inputs)
    *of_terms, bias_grad, weight_grad = _wanted(ctx, grad_loss)
    nothing = (None,) * (_NUM_TENSORS + len(ctx.scalars) - 6)
    return (of_terms[:terms], of_terms[terms:], None, bias_grad, None, weight_grad, *nothing)


def _wanted(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    """For each of `Needs.flat`, and for the weights of tokens, the gradient, or None."""
    if grad_loss is None:
        return [None] * (len(ctx.needs.flat) + 1)
    refuse_double_backward("fused_linear_cross_entropy", "torch.nn.functional.linear and cross_entropy")
    flops.tell_active_counters()
    # In place only where nothing needs what was saved again: another backward, or another upstream gradient of a batch.
    in_place, (weight_grad, *saved) = not (private.keeps_graph() or is_batched(grad_loss)), ctx.saved_tensors
    gradients = (
        for_each(lambda upstream: _gradients(ctx, saved, upstream, in_place), grad_loss) if ctx.needs.any else ()
    )
    needed = iter(gradients)
    flat = [next(needed) if need else None for need in ctx.needs.flat]
    return [*flat, grad_loss * weight_grad if ctx.weighs else None]


def _gradients(ctx: Any, saved: Sequence[Tensor], upstream: Tensor, in_place: bool) -> list[Tensor]:
    """The gradients that are needed, in the order of `Needs.flat`; in the memory of what was saved if that may be."""
    terms, directly = len(ctx.needs.inputs), _nobody_watches((upstream, *saved))
    if ctx.deferred:
        normalizer, *others = saved
        tensors = (others[:terms], others[terms : 2 * terms], *others[2 * terms :])
        backward = _backward if directly else torch.ops.flce.linear_cross_entropy_backward
        return backward(normalizer, upstream.contiguous(), *tensors, *ctx.scalars)
    *grads, unit = saved
    factor = upstream / unit if unit is not None and unit.dim() == 0 else upstream
    assert factor.dim() == 0, "an upstream gradient of each token is for schedules that defer theirs"
    scale_cast = _scale_cast if directly else torch.ops.flce.scale_cast
    result, in_its_place = [], []
    # What takes memory comes first: if there is none, nothing has been changed, and backward can be tried again.
    for grad in grads:
        # The bias, a vector, came in the dtype in which it is summed.
        dtype = grad.dtype if grad.dim() == 1 else ctx.dtype
        # In place only where the tensor is real: a graph that is being traced may have it among its outputs.
        if in_place and type(grad) is Tensor and grad.dtype == dtype:
            in_its_place.append(grad)
            result.append(grad)
        else:
            result.append(scale_cast(grad, factor, dtype))
    if in_its_place:
        (_scale_all if directly else torch.ops.flce.scale_)(in_its_place, factor)
    return result


# ------------------------------------------------------------------------------------------- without the operators


def _nobody_watches(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call need not be an operator: no compiler, tracer, mode or transform is there to see one."""
    if (
        torch.compiler.is_compiling()
        or private.get_tracing_state() is not None
        or private.len_torch_dispatch_stack()
        or private.peek_interpreter_stack() is not None
    ):
        return False
    for t in tensors:  # noqa: SIM110  a generator takes three times as long
        if t is not None and (type(t) not in _PLAIN or t.is_meta or is_batched(t)):
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)


def _tensors(p: LinearCrossEntropyProblem) -> tuple[Tensor | None, ...]:
    of_terms = [*[term.input for term in p.terms], *[term.weight for term in p.terms]]
    return (*of_terms, p.target, p.linear_bias, p.class_weight, p.token_weight, p.num_items)


class flce_linear_cross_entropy(torch.autograd.Function):
    """``flce::linear_cross_entropy`` where nothing watches the call. An operator takes more time in Python than a
    small call does.

    The class has the name that its node is to have in a graph of autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: LinearCrossEntropyProblem, options: ChunkOptions, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mark_frames()
        result = _solved(problem, options, False, new_shapes.ROUND)
        rows = result.rows
        ctx.needs, ctx.weighs = problem.needs, problem.token_weight_grad
        if not result.grads:
            ctx.scalars = (
                as_text(problem.spec, options),
                problem.shift,
                ctx.weighs,
                problem.needs.flat,
                False,
                *Shard.fields_of(problem.shard),
            )
        ctx.mark_non_differentiable(*[t for t in rows[1:] if t is not None])
        _keep(ctx, result.grads, result.grad_unit, result.weight_grad, rows.normalizer, tensors)
        # Every tensor that a node returns takes time of the host. This one is for statistics.
        return (*rows[:2], rows.normalizer if problem.spec.stats else None, *rows[3:])

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *of_terms, bias_grad, weight_grad = _wanted(ctx, grad_loss)
        return (None, None, *of_terms, None, bias_grad, None, weight_grad, None)


def _forward_flops(*args: Any, out_val: tuple[Any, ...]) -> int:
    logits, gradients = product_flops(args[0], args[1], args[_NEEDS])
    *_, grads, _, _ = out_val
    return logits + (gradients if grads else 0)


def _backward_flops(normalizer: Tensor, upstream: Tensor, *args: Any, out_val: Any) -> int:
    return sum(product_flops(args[0], args[1], args[_NEEDS]))


def product_flops(inputs: Sequence[Tensor], weights: Sequence[Tensor], flat: Sequence[bool]) -> tuple[int, int]:
    """Flops of the products for the logits, and of those for the gradients that are needed (`Needs.flat`)."""
    needs = Needs.from_flat(flat)
    of_terms = [2 * x.shape[0] * weight.numel() for x, weight in zip(inputs, weights, strict=True)]
    wanted = zip(of_terms * 2, needs.inputs + needs.weights, strict=True)
    return sum(of_terms), sum(count for count, needed in wanted if needed)


def _scale_all(xs: Sequence[Tensor], factor: Tensor) -> None:
    get_backend(factor.device).scale_(xs, factor)


def _scale_cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return get_backend(x.device).scale_cast(x, factor, dtype)


def _register() -> None:
    define(
        "linear_cross_entropy",
        f"({_ARGUMENTS}) -> ({_RESULTS})",
        _forward,
        _forward_fake,
        backward=_differentiate,
        setup_context=_setup_context,
    )
    define(
        "linear_cross_entropy_backward",
        f"(Tensor normalizer, Tensor upstream, {_ARGUMENTS}) -> Tensor[]",
        _backward,
        _backward_fake,
    )
    define("scale_", "(Tensor(a!)[] xs, Tensor factor) -> ()", _scale_all, lambda xs, factor: None)
    define(
        "scale_cast",
        "(Tensor x, Tensor factor, ScalarType dtype) -> Tensor",
        _scale_cast,
        lambda x, factor, dtype: torch.empty_like(x, dtype=dtype),
    )
    flops.declare("linear_cross_entropy", _forward_flops)
    flops.declare("linear_cross_entropy_backward", _backward_flops)
    register_loop("linear_cross_entropy_backward")
    register_loop("scale_cast")


_register()
