"""Custom operators and their derivatives.

Four operators, so that `torch.compile` records a call as one node and autograd knows what to do with it:

* ``flce::linear_cross_entropy``: loss, statistics and, unless the plan defers them, gradients;
* ``flce::linear_cross_entropy_backward``: the gradients of a plan that defers them;
* ``flce::scale_`` and ``flce::scale_cast``: a gradient made in forward times the upstream gradient.

An operator's schema takes tensors and scalars only: `_pack` takes the dataclasses of `problem` and `planning`
apart, `_unpack` puts them together again on the other side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce import engine
from flce.backends import backend_name, get_backend
from flce.planning import ChunkOptions, ChunkPlan, base_plan, make_plan
from flce.problem import LinearCrossEntropyProblem, LossSpec, Needs, accumulation_dtype

# Of _ARGUMENTS: the tensors, and the fields of LossSpec that follow them.
_NUM_TENSORS = 7
_NUM_SPEC = 8
_ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? num_items, "
    "str reduction, int ignore_index, float label_smoothing, float? softcap, float logit_scale, "
    "float temperature, float z_loss, str stats, "
    "bool input_grad, bool weight_grad, bool bias_grad, "
    "int? chunk_rows, int? max_workspace_bytes, str strategy, ScalarType? logits_dtype, "
    "ScalarType accum_dtype, bool? skip_ignored"
)


class Outputs(NamedTuple):
    """What ``flce::linear_cross_entropy`` returns; what was not asked for is empty, of shape (0,)."""

    loss: Tensor  # () or (N,)
    z_loss: Tensor  # like loss
    normalizer: Tensor  # (2, N); its sum is the log-sum-exp
    logprob: Tensor  # (N,)
    entropy: Tensor  # (N,)
    argmax: Tensor  # (N,)
    # Gradients of the loss, times grad_unit: no user sees these.
    input_grad: Tensor  # (N, H)
    weight_grad: Tensor  # (V, H)
    bias_grad: Tensor  # (V,)
    grad_unit: Tensor  # ()


def linear_cross_entropy(problem: LinearCrossEntropyProblem, options: ChunkOptions) -> Outputs:
    """Solve a problem. Differentiable once, in ``loss``.

    Raises:
        RuntimeError: an argument carries a forward-mode tangent, which would be lost without a word.
    """
    if not torch.compiler.is_compiling():
        for tensor in (problem.input, problem.linear_weight, problem.linear_bias):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(
                    "fused_linear_cross_entropy has no forward-mode derivative; use torch.nn.functional.linear "
                    "and cross_entropy for torch.func.jvp and dual tensors"
                )
    return Outputs(*torch.ops.flce.linear_cross_entropy(*_pack(problem, options)))


def _pack(p: LinearCrossEntropyProblem, options: ChunkOptions) -> tuple[Any, ...]:
    spec, needs = p.spec, p.needs
    return (
        p.input,
        p.linear_weight,
        p.target,
        p.linear_bias,
        p.class_weight,
        p.token_weight,
        p.num_items,
        spec.reduction,
        spec.ignore_index,
        float(spec.label_smoothing),
        None if spec.softcap is None else float(spec.softcap),
        float(spec.logit_scale),
        float(spec.temperature),
        float(spec.z_loss),
        ",".join(spec.stats),
        needs.input,
        needs.weight,
        needs.bias,
        options.chunk_rows,
        options.max_workspace_bytes,
        options.strategy,
        options.logits_dtype,
        options.accum_dtype,
        None if options.skip_ignored == "auto" else options.skip_ignored,
    )


def _unpack(args: tuple[Any, ...]) -> tuple[LinearCrossEntropyProblem, ChunkPlan]:
    tensors, scalars = args[:_NUM_TENSORS], args[_NUM_TENSORS:]
    *loss, stats = scalars[:_NUM_SPEC]
    spec = LossSpec(*loss, tuple(stats.split(",")) if stats else ())  # type: ignore[call-arg]
    problem = LinearCrossEntropyProblem(*tensors, spec, _needs(scalars))  # type: ignore[call-arg]
    *chunking, skip = scalars[_NUM_SPEC + 3 :]
    options = ChunkOptions(*chunking, "auto" if skip is None else skip)  # type: ignore[call-arg]
    return problem, _plan(problem, options)


def _needs(scalars: tuple[Any, ...]) -> Needs:
    return Needs(*scalars[_NUM_SPEC : _NUM_SPEC + 3])


def _plan(p: LinearCrossEntropyProblem, options: ChunkOptions) -> ChunkPlan:
    (n, h), v, device = p.input.shape, p.linear_weight.shape[0], p.input.device
    if all(isinstance(size, int) for size in (n, h, v)):
        return make_plan(n, h, v, p.input.dtype, device, p.spec, p.needs, options)
    # While a graph is traced: what the outputs look like does not depend on the sizes of the tiles.
    return base_plan(n, h, v, p.input.dtype, device.type, backend_name(device), p.spec, p.needs, options)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    problem, plan = _unpack(args)
    result = engine.forward(problem, plan)
    empty = problem.input.new_empty(0)

    def put(t: Tensor | None) -> Tensor:
        return empty.clone() if t is None else t  # outputs of an operator must not share memory

    return Outputs(
        result.loss,
        put(result.z_loss),
        result.rows.normalizer,
        put(result.rows.logprob),
        put(result.rows.entropy),
        put(result.rows.argmax),
        put(result.grads.input),
        put(result.grads.weight),
        put(result.grads.bias),
        put(result.grad_unit),
    )


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p, plan = _unpack(args)
    accum, stats = accumulation_dtype(p.input.dtype), p.spec.stats
    n = p.input.shape[0]
    loss_shape = (n,) if p.spec.reduction == "none" else ()
    ahead = p.needs.any and not plan.deferred

    def new(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype = accum) -> Tensor:
        return p.input.new_empty(shape, dtype=dtype) if wanted else p.input.new_empty(0)

    return Outputs(
        new(True, loss_shape),
        new(p.spec.z_loss != 0.0, loss_shape),
        new(True, (2, n)),
        new("logprob" in stats, (n,)),
        new("entropy" in stats, (n,)),
        new("argmax" in stats or "correct" in stats, (n,), torch.int64),
        new(ahead and p.needs.input, tuple(p.input.shape), plan.input_grad_dtype),
        new(ahead and p.needs.weight, tuple(p.linear_weight.shape), plan.weight_grad_dtype),
        new(ahead and p.needs.bias, (p.linear_weight.shape[0],)),
        new(ahead and plan.grad_dtype == torch.float16, ()),
    )


def _backward(normalizer: Tensor, upstream: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, plan = _unpack(args)
    grads = engine.backward(problem, plan, normalizer, upstream)
    results = (problem.input.new_empty(0) if g is None else g for g in (grads.input, grads.weight, grads.bias))
    return tuple(results)  # type: ignore[return-value]


def _backward_fake(normalizer: Tensor, upstream: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    p, _ = _unpack(args)

    def new(wanted: bool, like: Tensor) -> Tensor:
        return like.new_empty(like.shape) if wanted else p.input.new_empty(0)

    bias_grad = p.linear_weight.new_empty(p.linear_weight.shape[0] if p.needs.bias else 0)
    return new(p.needs.input, p.input), new(p.needs.weight, p.linear_weight), bias_grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out = Outputs(*output)
    # Otherwise autograd fills in a zero gradient for every output, one as large as the head among them.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*out[1:])
    _, plan = _unpack(inputs)
    ctx.deferred = plan.deferred
    ctx.scalars = inputs[_NUM_TENSORS:]
    ctx.dtype = plan.dtype
    ctx.used = False
    if plan.deferred:
        ctx.save_for_backward(out.normalizer, *inputs[:_NUM_TENSORS])
    else:
        ctx.save_for_backward(out.input_grad, out.weight_grad, out.bias_grad, out.grad_unit)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (_NUM_TENSORS + len(ctx.scalars) - 4)
    if grad_loss is None:
        return (None,) * 4 + nothing
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused_linear_cross_entropy cannot be differentiated twice (create_graph=True): its gradients are "
            "not part of the graph. Use torch.nn.functional.linear and cross_entropy for that."
        )
    if ctx.used:
        raise RuntimeError(
            "backward through the same fused_linear_cross_entropy a second time: its gradients were handed out "
            "the first time. Call the function again instead of using retain_graph=True."
        )
    ctx.used = True
    needs = _needs(ctx.scalars)
    if ctx.deferred:
        normalizer, *tensors = ctx.saved_tensors
        grads = torch.ops.flce.linear_cross_entropy_backward(normalizer, grad_loss.contiguous(), *tensors, *ctx.scalars)
    else:
        *grads, unit = ctx.saved_tensors
        factor = grad_loss / unit if unit.dim() == 0 else grad_loss
        grads = [_scale(g, factor, ctx.dtype) for g in grads]
    input_grad, weight_grad, bias_grad = (
        g if needed else None for g, needed in zip(grads, (needs.input, needs.weight, needs.bias), strict=True)
    )
    return (input_grad, weight_grad, None, bias_grad, *nothing)


def _scale(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.numel() == 0:
        return grad.to(dtype)
    # In place only where the tensor is real: a graph that is being traced may have it among its outputs.
    if grad.dtype != dtype or type(grad) is not Tensor:
        return torch.ops.flce.scale_cast(grad, factor, dtype)
    torch.ops.flce.scale_(grad, factor)
    return grad


def _scale_in_place(x: Tensor, factor: Tensor) -> None:
    get_backend(x.device).scale_(x, factor)


def _scale_cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return get_backend(x.device).scale_cast(x, factor, dtype)


def _register() -> None:
    def define(name: str, schema: str, implementation: Any, fake: Any) -> None:
        torch.library.define(f"flce::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"flce::{name}", "CompositeExplicitAutograd", implementation)
        torch.library.register_fake(f"flce::{name}", fake)

    outputs = ", ".join(["Tensor"] * len(Outputs._fields))
    define("linear_cross_entropy", f"({_ARGUMENTS}) -> ({outputs})", _forward, _forward_fake)
    define(
        "linear_cross_entropy_backward",
        f"(Tensor normalizer, Tensor upstream, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
        _backward,
        _backward_fake,
    )
    define("scale_", "(Tensor(a!) x, Tensor factor) -> ()", _scale_in_place, lambda x, factor: None)
    define(
        "scale_cast",
        "(Tensor x, Tensor factor, ScalarType dtype) -> Tensor",
        _scale_cast,
        lambda x, factor, dtype: torch.empty_like(x, dtype=dtype),
    )
    torch.library.register_autograd("flce::linear_cross_entropy", _differentiate, setup_context=_setup_context)


_register()
