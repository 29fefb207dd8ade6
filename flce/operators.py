"""Custom operators and their derivatives.

Four operators, so that `torch.compile` records a call as one node and autograd knows what to do with it:

* ``flce::linear_cross_entropy``: loss, statistics and, unless the plan defers them, gradients;
* ``flce::linear_cross_entropy_backward``: the gradients of a plan that defers them;
* ``flce::scale_`` and ``flce::scale_cast``: a gradient made in forward times the upstream gradient.

An operator's schema takes tensors, scalars and lists of them only: `_pack` takes the dataclasses of `problem` and
`planning` apart, `_unpack` puts them together again on the other side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flce import engine, flops, log, private, vectors
from flce.arguments import refuse_forward_mode
from flce.backends import backend_name, get_backend, has_product, total_memory
from flce.backends.contract import RowOutputs
from flce.batching import for_each, is_batched, register_loop
from flce.callers import caller
from flce.case import Case
from flce.custom_op import Flat, define
from flce.frames import mark_frames, never_compiled
from flce.options import ChunkOptions
from flce.planning import make_plan
from flce.plans import ChunkPlan
from flce.problem import SPEC, LinearCrossEntropyProblem, LinearTerm, Needs, accumulation_dtype

_OPTIONS = Flat(ChunkOptions)
# Tensors and lists of them; then scalars: the fields of LossSpec, `Needs.flat`, the fields of ChunkOptions, and whether
# the call is part of a graph, which is good for other numbers of tokens too.
_ARGUMENTS = (
    "Tensor[] inputs, Tensor[] weights, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    f"Tensor? token_weight, Tensor? num_items, {SPEC.schema}, bool[] needs, {_OPTIONS.schema}, bool traced"
)
_NUM_TENSORS = 7


ResultT = TypeVar("ResultT")


class Outputs(NamedTuple):
    """What ``flce::linear_cross_entropy`` returns, one after the other."""

    rows: tuple[Tensor, ...]  # `rows.as_outputs`; the first is the loss
    grads: list[Tensor]  # of the loss, times grad_unit, as `Needs.flat` lists them; no user sees these
    grad_unit: Tensor  # (), or (0,) for 1

    @staticmethod
    def of(flat: Sequence[Any]) -> Outputs:
        *rows, grads, unit = flat
        return Outputs(tuple(rows), grads, unit)

    @property
    def flat(self) -> tuple[Any, ...]:
        return (*self.rows, self.grads, self.grad_unit)


def linear_cross_entropy(problem: LinearCrossEntropyProblem, options: ChunkOptions) -> RowOutputs:
    """Solve a problem. Differentiable once, in ``loss``.

    Raises:
        RuntimeError: an argument carries a forward-mode tangent, which would be lost without a word.
    """
    tensors = _tensors(problem)
    refuse_forward_mode(
        "fused_linear_cross_entropy", "torch.nn.functional.linear and torch.nn.functional.cross_entropy", tensors
    )
    if _nobody_watches(tensors):
        return RowOutputs._make(flce_linear_cross_entropy.apply(problem, options, *tensors))
    if not torch.compiler.is_compiling():
        flops.tell_active_counters()
    out = Outputs.of(torch.ops.flce.linear_cross_entropy(*_pack(problem, options)))
    return RowOutputs.given(problem.spec, out.rows)


def _pack(p: LinearCrossEntropyProblem, options: ChunkOptions) -> tuple[Any, ...]:
    return (
        [term.input for term in p.terms],
        [term.weight for term in p.terms],
        p.target,
        p.linear_bias,
        p.class_weight,
        p.token_weight,
        p.num_items,
        *SPEC.pack(p.spec),
        p.needs.flat,
        *_OPTIONS.pack(options),
        torch.compiler.is_compiling(),
    )


def _unpack(args: tuple[Any, ...]) -> tuple[LinearCrossEntropyProblem, Case]:
    inputs, weights, target, linear_bias, class_weight, token_weight, num_items = args[:_NUM_TENSORS]
    scalars = args[_NUM_TENSORS:]
    problem = LinearCrossEntropyProblem(
        terms=tuple(map(LinearTerm, inputs, weights)),
        target=target,
        linear_bias=linear_bias,
        class_weight=class_weight,
        token_weight=token_weight,
        num_items=num_items,
        spec=SPEC.unpack(scalars[: len(SPEC)]),
        needs=_needs(scalars),
    )
    return problem, _case(problem, _OPTIONS.unpack(scalars[len(SPEC) + 1 : -1]), traced=scalars[-1])


def _needs(scalars: Sequence[Any]) -> Needs:
    return Needs.from_flat(scalars[len(SPEC)])


def _case(
    p: LinearCrossEntropyProblem, options: ChunkOptions, traced: bool = False, make: Callable[..., Case] = Case
) -> Case:
    # Kernels beside products with an epilogue go along rows.
    row_major = all(term.input.stride(-1) == 1 == term.weight.stride(-1) for term in p.terms)
    if traced and options.strategy == "auto" and p.dtype == torch.float16:
        # See `_makes_gradients`. Gradients in float16 are to be rounded when the upstream gradient is known.
        options = replace(options, strategy="tokens" if options.max_workspace_bytes is None else "vocab")
    return make(
        p.num_tokens,
        p.hidden_sizes,
        p.vocab_size,
        p.dtype,
        p.device.type,
        backend_name(p.device),
        row_major and has_product(p.device),
        total_memory(p.device),
        p.spec,
        p.needs,
        options,
    )


@functools.lru_cache(maxsize=1024)
def _known_case(*args: Any) -> Case:
    """The same object for equal cases. Plans are looked up by it several times in a call, which is then quick."""
    case = Case(*args)
    if log.telling():
        log.tell(make_plan(case), log.ROUND)
    return case


def _makes_gradients(c: Case, traced: bool) -> bool:
    """Whether gradients are among the results of forward.

    A graph must know that without a plan, for any number of tokens. So with ``strategy="auto"`` forward makes them in
    any case there, also by a schedule that would leave them to backward.
    """
    if not c.needs.any or c.spec.reduction == "none" or c.options.strategy != "auto":
        return c.needs.any and c.spec.reduction != "none" and c.options.strategy == "tokens"
    if traced:
        return True
    if not all(isinstance(size, int) for size in (c.num_tokens, *c.hidden_sizes, c.vocab_size)):
        hidden_sizes = tuple(map(int, c.hidden_sizes))  # what traces otherwise has a graph for these sizes alone
        c = replace(c, num_tokens=int(c.num_tokens), hidden_sizes=hidden_sizes, vocab_size=int(c.vocab_size))
    try:
        return not make_plan(c).deferred
    except ValueError:  # no plan keeps the budget, as a call says
        return True


def _run(run: Callable[[ChunkPlan], ResultT], p: LinearCrossEntropyProblem, c: Case) -> ResultT:
    """`run` with the plan of a call; where its memory cannot be had, with a smaller one.

    Not with a budget, which says how much there is, nor while a graph is captured, whose memory is its own.
    """
    plan = make_plan(c)
    while True:
        try:
            return run(plan)
        except torch.OutOfMemoryError:
            smaller = _smaller(p, plan) if c.options.max_workspace_bytes is None else None
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


def _smaller(p: LinearCrossEntropyProblem, plan: ChunkPlan) -> ChunkPlan | None:
    """A plan of a quarter of the workspace, or a half or more, with outputs that look the same; None: there is none."""
    if p.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
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
    problem, case = _unpack(args)
    if log.telling():
        log.tell(make_plan(case), log.IN_GRAPH if args[-1] else log.WATCHED)
    gradients = _makes_gradients(case, args[-1])
    result = _run(lambda plan: engine.forward(problem, plan, gradients), problem, case)
    unit = result.rows.loss.new_empty(0) if result.grad_unit is None else result.grad_unit
    return Outputs(vectors.as_outputs(result.rows), result.grads, unit).flat


def _forward_fake(*args: Any) -> tuple[Any, ...]:
    p, case = _unpack(args)
    return _outputs_of(p, case, _makes_gradients(case, args[-1]))


def _outputs_of(p: LinearCrossEntropyProblem, case: Case, gradients: bool) -> tuple[Any, ...]:
    dtypes = case.dtypes(deferred=not gradients)
    accum, like = accumulation_dtype(p.dtype), p.terms[0].input
    scaled = gradients and dtypes.logits_grad == torch.float16
    return Outputs(
        vectors.fake_outputs(p, like),
        _fake_grads(p, dtypes.input_grad, dtypes.weight_grad, accum) if gradients else [],
        like.new_empty(() if scaled else (0,), dtype=accum),
    ).flat


def rehearsed(args: tuple[Any, ...], device: Callable[[Case], Case]) -> tuple[tuple[Any, ...], ChunkPlan]:
    """What ``flce::linear_cross_entropy`` returns for tensors without values where they stand for those of another
    device, and the plan there.

    Args:
        args: of the operator.
        device: puts the device into a case.
    """
    p, case = _unpack(args)
    case = device(case)
    return _outputs_of(p, case, _makes_gradients(case, args[-1])), make_plan(case)


def _backward(normalizer: Tensor, upstream: Tensor, *args: Any) -> list[Tensor]:
    problem, case = _unpack(args)
    return _run(lambda plan: engine.backward(problem, plan, normalizer, upstream), problem, case)


def _backward_fake(normalizer: Tensor, upstream: Tensor, *args: Any) -> list[Tensor]:
    p, _ = _unpack(args)
    return _fake_grads(p, p.dtype, p.dtype, accumulation_dtype(p.dtype))


def _fake_grads(
    p: LinearCrossEntropyProblem, input_dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype
) -> list[Tensor]:
    """Those that are needed, in the order of `Needs.flat`."""
    weight = p.terms[0].weight
    grads = (
        *(term.input.new_empty(term.input.shape, dtype=input_dtype) for term in p.terms),
        *(term.weight.new_empty(term.weight.shape, dtype=weight_dtype) for term in p.terms),
        weight.new_empty(p.vocab_size, dtype=bias_dtype),
    )
    return [grad for grad, needed in zip(grads, p.needs.flat, strict=True) if needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    out = Outputs.of(output)
    ctx.mark_non_differentiable(*out.rows[1:], *out.grads, out.grad_unit)
    of_inputs, of_weights, *tensors = inputs[:_NUM_TENSORS]
    ctx.scalars = inputs[_NUM_TENSORS:]
    ctx.needs = _needs(ctx.scalars)
    _keep(ctx, out.grads, out.grad_unit, RowOutputs(*out.rows).normalizer, (*of_inputs, *of_weights, *tensors))


def _keep(
    ctx: Any, grads: Sequence[Tensor], grad_unit: Tensor | None, normalizer: Tensor, tensors: Sequence[Tensor | None]
) -> None:
    """For backward: the gradients, or the normalizer and the tensors of the problem."""
    # Otherwise autograd fills in a zero gradient for every output, one as large as the head among them.
    ctx.set_materialize_grads(False)
    assert tensors[0] is not None
    ctx.dtype = tensors[0].dtype
    ctx.deferred = not grads
    ctx.handed_out = False
    ctx.save_for_backward(*((normalizer, *tensors) if ctx.deferred else (*grads, grad_unit)))


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    terms = len(ctx.needs.inputs)
    *of_terms, bias_grad = _wanted(ctx, grad_loss)
    nothing = (None,) * (_NUM_TENSORS + len(ctx.scalars) - 4)
    return (of_terms[:terms], of_terms[terms:], None, bias_grad, *nothing)


def _wanted(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    """For each of `Needs.flat` its gradient, or None."""
    if grad_loss is None:
        return [None] * len(ctx.needs.flat)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused_linear_cross_entropy cannot be differentiated twice (create_graph=True): its gradients are "
            "not part of the graph. Use torch.nn.functional.linear and cross_entropy for that."
        )
    if ctx.handed_out:
        raise RuntimeError(
            "backward through the same fused_linear_cross_entropy a second time: its gradients were handed out "
            "the first time. Call the function again instead of using retain_graph=True."
        )
    flops.tell_active_counters()
    # In place only where the gradient of one loss is asked for, not of each of a batch.
    in_place, saved = not is_batched(grad_loss), ctx.saved_tensors
    needed = iter(for_each(lambda upstream: _gradients(ctx, saved, upstream, in_place), grad_loss))
    return [next(needed) if need else None for need in ctx.needs.flat]


def _gradients(ctx: Any, saved: tuple[Tensor, ...], upstream: Tensor, in_place: bool) -> list[Tensor]:
    """Those that are needed, in the order of `Needs.flat`; in the memory of what was saved if that may be."""
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
        ctx.handed_out = True
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
    """``flce::linear_cross_entropy`` where nobody watches. What operators take in Python is more than a small call.

    The class has the name that its node is to have in a graph of autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: LinearCrossEntropyProblem, options: ChunkOptions, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mark_frames()
        case = _case(problem, options, make=_known_case)
        gradients = _makes_gradients(case, traced=False)
        result = _run(lambda plan: engine.forward(problem, plan, gradients), problem, case)
        rows = result.rows
        ctx.needs = problem.needs
        if not result.grads:
            ctx.scalars = (*SPEC.pack(problem.spec), problem.needs.flat, *_OPTIONS.pack(options), False)
        ctx.mark_non_differentiable(*[t for t in rows[1:] if t is not None])
        _keep(ctx, result.grads, result.grad_unit, rows.normalizer, tensors)
        # Every tensor that a node returns takes time of the host. This one is for statistics.
        return (*rows[:2], rows.normalizer if problem.spec.stats else None, *rows[3:])

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        *of_terms, bias_grad = _wanted(ctx, grad_loss)
        return (None, None, *of_terms, None, bias_grad, None, None, None)


def _forward_flops(*args: Any, out_val: tuple[Any, ...]) -> int:
    logits, gradients = _flops(args)
    return logits + (gradients if Outputs.of(out_val).grads else 0)


def _backward_flops(normalizer: Tensor, upstream: Tensor, *args: Any, out_val: Any) -> int:
    return sum(_flops(args))


def _flops(args: tuple[Any, ...]) -> tuple[int, int]:
    """Of the products for the logits, and of those for the gradients that are needed."""
    inputs, weights, needs = args[0], args[1], _needs(args[_NUM_TENSORS:])
    of_terms = [2 * x.shape[0] * weight.numel() for x, weight in zip(inputs, weights, strict=True)]
    wanted = zip(of_terms * 2, needs.inputs + needs.weights, strict=True)
    return sum(of_terms), sum(count for count, needed in wanted if needed)


def _scale_all(xs: Sequence[Tensor], factor: Tensor) -> None:
    get_backend(factor.device).scale_(xs, factor)


def _scale_cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return get_backend(x.device).scale_cast(x, factor, dtype)


def _register() -> None:
    outputs = ", ".join([*("Tensor" for _ in RowOutputs._fields), "Tensor[]", "Tensor"])
    define(
        "linear_cross_entropy",
        f"({_ARGUMENTS}) -> ({outputs})",
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
