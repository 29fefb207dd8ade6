"""Loss of logits that the user has computed: its custom operators, and the gradient that overwrites the logits.

There are two ways to compute the gradient:

* Two custom operators, ``flce::cross_entropy`` and ``flce::cross_entropy_backward``. Forward computes statistics and
saves the logits and the normalizer of each row. Backward computes the gradient in new memory, multiplied by the
upstream gradient. No tensor is changed in place, so `torch.compile` and autograd may reorder the operators.
* `_InPlace`, for logits that may be overwritten, in eager mode. Forward reads a row, and writes its gradient to the
same memory while the row is in the cache. Backward multiplies the gradient by the upstream gradient, unless it is 1.

If the vocabulary is divided, both merge statistics over the shards between the passes (`engine/rows.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, GradientCall, RowOutputs, RowProblem, TileClasses
from flce.backends.formulas import write_empty_state
from flce.core.log import is_debug_enabled, logger
from flce.core.problem import CrossEntropyProblem, LossSpec
from flce.core.shard import Shard
from flce.engine import vectors
from flce.engine.rows import Rows, Selection, ShardRows
from flce.engine.vectors import Arena
from flce.ops.arguments import refuse_double_backward
from flce.torch_ops import from_json, register_operator, register_skipped_frames, skip_frame_and_callees, to_json

_SCHEMA = "Tensor logits, Tensor target, Tensor? class_weight, Tensor? token_weight, Tensor? num_items, str constants"
# The fields of `RowOutputs`, (0,) if not requested; the result of `Backend.loss_scales` for backward, (3,), or (0,) if
# there are no scales; and the gradient of `token_weight`, (N,) or (0,).
_RESULTS = ", ".join(["Tensor"] * len(RowOutputs._fields) + ["Tensor loss_scales", "Tensor token_weight_grad"])


def fused_cross_entropy(problem: CrossEntropyProblem, inplace: bool) -> RowOutputs:
    """Compute loss and statistics of a problem. ``loss`` is differentiable once, and if `inplace` is False, several
    backward passes can use the graph.

    Raises:
        RuntimeError: the logits cannot be overwritten.
    """
    logits = problem.logits
    if inplace and not torch.compiler.is_compiling() and logits.requires_grad and torch.is_grad_enabled():
        check_overwritable(logits)
        # If the autograd function also returns the logits, backward raises an error if they were used after the call. A
        # view, or logits that retain their gradient, cannot be returned.
        returns_logits = logits._base is None and not logits.retains_grad
        outputs = _InPlace.apply(logits, problem.token_weight, problem, returns_logits)
        *outputs, _, _ = outputs[1:] if returns_logits else outputs
    else:
        *outputs, _, _ = torch.ops.flce.cross_entropy(*_Arguments.from_problem(problem))
    return RowOutputs.from_tensors(problem.spec, outputs)


def check_overwritable(logits: Tensor) -> None:
    """Raise RuntimeError if the gradient must not, or cannot, be written to the memory of the logits.

    This function detects logits that were saved by the operator that computed them, such as tanh. If another operator
    saved the logits, autograd raises an error in that operator's backward, because the version of the tensor differs.
    """
    instead = "Use inplace=False, or give a copy."
    base = logits._base
    for tensor, reason in ((logits, "are a leaf"), (base, "are a view of a leaf")):
        if tensor is not None and tensor.is_leaf and tensor.requires_grad:
            raise RuntimeError(
                f"inplace=True would overwrite logits that {reason} that requires grad: its value would be lost. "
                f"{instead}"
            )
    for tensor in (logits, base):
        # Not `_saved_result`, which unpacks the saved tensor and calls hooks.
        if tensor is not None and hasattr(tensor.grad_fn, "_raw_saved_result"):
            raise RuntimeError(
                f"inplace=True would overwrite logits that {type(tensor.grad_fn).__name__} still needs: it saved its "
                f"result for its own backward. {instead}"
            )
    if not has_rows(logits):
        raise RuntimeError(
            "inplace=True needs logits whose classes are next to each other and whose rows have one stride, got shape "
            f"{tuple(logits.shape)}, strides {logits.stride()}. Give shift=1 instead of logits[:, :-1]. {instead}"
        )
    rows = as_rows(logits)
    if len(rows) > 1 and rows.stride(0) < rows.shape[1]:
        raise RuntimeError(
            "inplace=True cannot write to logits of which several elements share memory (shape "
            f"{tuple(logits.shape)}, strides {logits.stride()}). {instead}"
        )


# ---------------------------------------------------------------------------------------------------------
# The work


def _compute_losses(p: CrossEntropyProblem) -> tuple[Tensor, ...]:
    """Return the results of the operator, as `_RESULTS` lists them."""
    if is_debug_enabled() and not has_rows(p.logits):
        logger.debug("logits of shape %s are copied, strides %s", tuple(p.logits.shape), p.logits.stride())
    rows = _make_rows(p, vectors.LossScales(p, get_backend(p.device), needs_scales=False))
    _compute_statistics(rows, as_rows(p.logits))
    return _reduce_outputs(p, rows)


def _compute_losses_and_gradient(p: CrossEntropyProblem) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the results of the operator, and the gradient scale (None: 1). Overwrite the logits with their gradient
    times this scale: the gradient of the reduced loss, or of the loss of each row if losses are not reduced.
    """
    backend, logits = get_backend(p.device), as_rows(p.logits)
    scales = vectors.LossScales(p, backend, needs_scales=True, has_gradient_scale=p.dtype == torch.float16)
    rows = _make_rows(p, scales)
    if rows.is_shard:
        row_gradient = _compute_statistics(rows, logits)
        if logits.shape[-1] and row_gradient is not None:
            backend.gradient(logits, logits, _gradient_call(rows, row_gradient))
    else:
        vectors.check_targets(p)
        backend.loss_and_gradient(logits, logits, rows.statistics_call(slice(0, p.num_tokens))._replace(tile=_tile(p)))
    return _reduce_outputs(p, rows), scales.gradient_scale


def _compute_gradient(p: CrossEntropyProblem, normalizer: Tensor, loss_scales: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of the logits in new memory. `upstream` has the shape of the loss."""
    grad = p.logits.new_empty(p.logits.shape)
    if grad.numel():
        backend = get_backend(p.device)
        scales = vectors.LossScales(p, backend, needs_scales=True)
        if loss_scales.numel():
            scales.for_loss = loss_scales
        rows = _make_rows(p, scales, normalizer, upstream)
        call = _gradient_call(rows, rows.compute_row_gradient(slice(0, p.num_tokens)), keep_logits=True)
        backend.gradient(as_rows(p.logits), as_rows(grad), call)
    return grad


def _make_rows(
    p: CrossEntropyProblem, scales: vectors.LossScales, normalizer: Tensor | None = None, upstream: Tensor | None = None
) -> Rows:
    """Return the rows of a forward pass, with memory for results, or of a backward pass, with the `normalizer`."""
    arena, out = Arena(p.device), None
    if normalizer is None:
        out = RowOutputs.allocate(p.spec, p.accum, (p.num_tokens,), arena.new)
        normalizer = out.normalizer
    return (Rows if p.shard is None else ShardRows)(Selection(p, None), scales, arena, normalizer, out, upstream)


def _compute_statistics(rows: Rows, logits: Tensor) -> Tensor | None:
    """Compute losses and statistics. If the vocabulary is divided, return the row gradient."""
    p, backend = rows.problem, rows.scales.backend
    call = rows.statistics_call(slice(0, p.num_tokens))._replace(tile=_tile(p, keep_logits=True))
    if not rows.is_shard:
        vectors.check_targets(p)
        backend.statistics(logits, call, None)
        return None
    state = rows.arena.new((STATE_SLOTS, p.num_tokens), p.accum)
    if logits.shape[-1]:
        backend.statistics(logits, call, state)
    else:
        write_empty_state(state)
    rows.keep_state(slice(0, p.num_tokens), state)
    row_gradient = rows.merge_results(slice(0, p.num_tokens))
    # Checked after the collective: otherwise the other processes would wait for a process that raised an error.
    vectors.check_targets(p)
    return row_gradient


def _gradient_call(rows: Rows, row_gradient: Tensor, keep_logits: bool = False) -> GradientCall:
    inputs, tile = rows.tile_inputs(slice(0, rows.problem.num_tokens)), _tile(rows.problem, keep_logits)
    return GradientCall(inputs, rows.spec, tile, rows.normalizer, row_gradient)


def _tile(p: RowProblem, keep_logits: bool = False) -> TileClasses:
    # Memory after the last class of a row belongs to the user: kernels must not access it.
    cols = p.local_vocab_size
    return TileClasses(0, cols, cols, cols, is_shard=p.shard is not None, keep_logits=keep_logits)


def _reduce_outputs(p: CrossEntropyProblem, rows: Rows) -> tuple[Tensor, ...]:
    """Return the results of the operator, as `_RESULTS` lists them, from the outputs of all rows."""
    assert rows.out is not None
    results, *others = vectors.reduce(p, rows.scales.backend, rows.out, rows.scales.for_loss)
    return vectors.pack((*results, *others), rows.normalizer)


# ---------------------------------------------------------------------------------------------------------
# The gradient overwrites the logits


class _InPlace(torch.autograd.Function):
    """Autograd function of a loss whose gradient overwrites the logits. A custom operator that mutates an argument
    cannot have a derivative."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_weight: Tensor | None, problem: CrossEntropyProblem, returns_logits: bool
    ) -> tuple[Tensor, ...]:
        register_skipped_frames()
        out, gradient_scale = _compute_losses_and_gradient(problem)
        # Autograd does not see the writes of kernels. With a new version it detects in backward that logits changed.
        if returns_logits:
            ctx.mark_dirty(logits)
        else:
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits.detach(), gradient_scale, problem.target, out[-1])
        ctx.returns_logits, ctx.needs_token_weight = returns_logits, problem.needs_token_weight
        ctx.ignore_index = problem.spec.ignore_index
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[1:])
        ctx.has_run = False
        return (logits, *out) if returns_logits else out

    @staticmethod
    @skip_frame_and_callees
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if ctx.returns_logits:
            grad_logits, *grads = grads  # type: ignore[assignment]
            if grad_logits is not None:
                raise RuntimeError(
                    "logits were used after flce.cross_entropy(inplace=True) had overwritten them with their gradient. "
                    "Use them before the call, or give inplace=False."
                )
        grad_loss = grads[0]
        if grad_loss is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            refuse_double_backward("flce.cross_entropy", "torch.nn.functional.cross_entropy")
        if ctx.has_run:
            raise RuntimeError(
                "backward through the same flce.cross_entropy(inplace=True) a second time: the first backward returned "
                "the memory of the logits as the gradient. Use inplace=False for retain_graph=True."
            )
        ctx.has_run = True
        grad, gradient_scale, target, token_weight_grad = ctx.saved_tensors
        token_weight_grad = grad_loss * token_weight_grad if ctx.needs_token_weight else None
        factor = grad_loss if gradient_scale is None else grad_loss / gradient_scale
        # Copies, if a hook on saved tensors returned other strides.
        rows, target = as_rows(grad), target.contiguous()
        # An ignored row stays 0, also for an infinite or NaN upstream gradient.
        get_backend(grad.device).scale_rows_(rows, factor.contiguous(), target, ctx.ignore_index)
        return rows.view(grad.shape), token_weight_grad, None, None


# ---------------------------------------------------------------------------------------------------------
# Operators


class _Arguments(NamedTuple):
    """Arguments of an operator, in the order of `_SCHEMA`, or their gradients under the same names."""

    logits: Any = None
    target: Any = None
    class_weight: Any = None
    token_weight: Any = None
    num_items: Any = None
    constants: Any = None
    """JSON of everything that is not a tensor."""

    @staticmethod
    def from_problem(p: CrossEntropyProblem) -> _Arguments:
        others = {"shift": p.shift, "needs_token_weight": p.needs_token_weight}
        tensors = p.logits, p.target, p.class_weight, p.token_weight, p.num_items
        return _Arguments(*tensors, to_json(others, spec=p.spec, shard=p.shard))

    def to_problem(self) -> CrossEntropyProblem:
        *tensors, constants = self
        return CrossEntropyProblem(*tensors, **from_json(constants, spec=LossSpec, shard=Shard))


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    p = _Arguments(*args).to_problem()
    num_scales = 3 if p.spec.reduction != "none" or p.class_weight is not None else 0
    shapes = (num_scales,), p.target.shape if p.needs_token_weight else (0,)
    others = (p.logits.new_empty(shape, dtype=p.accum) for shape in shapes)
    return *vectors.fake_outputs(p, p.logits), *others


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *outputs, loss_scales, token_weight_grad = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    *tensors, ctx.constants = inputs
    ctx.save_for_backward(RowOutputs(*outputs).normalizer, loss_scales, token_weight_grad, *tensors)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_loss is None:
        return tuple(_Arguments())
    if torch.is_grad_enabled():
        refuse_double_backward("flce.cross_entropy", "torch.nn.functional.cross_entropy")
    normalizer, loss_scales, token_weight_grad, logits, *others = ctx.saved_tensors
    needed, grad = _Arguments(*ctx.needs_input_grad), None
    if needed.logits:
        # Contiguous: a hook on saved tensors may have returned other strides.
        rows = [None if t is None else t.contiguous() for t in (normalizer, loss_scales, grad_loss)]
        others = [None if t is None else t.contiguous() for t in others]
        grad = torch.ops.flce.cross_entropy_backward(*rows, logits, *others, ctx.constants)
    return tuple(_Arguments(logits=grad, token_weight=grad_loss * token_weight_grad if needed.token_weight else None))


register_operator(
    "cross_entropy",
    f"({_SCHEMA}) -> ({_RESULTS})",
    lambda *args: _compute_losses(_Arguments(*args).to_problem()),
    _forward_fake,
    backward=_differentiate,
    setup_context=_setup_context,
)
register_operator(
    "cross_entropy_backward",
    f"(Tensor normalizer, Tensor loss_scales, Tensor upstream, {_SCHEMA}) -> Tensor",
    lambda normalizer, scales, upstream, *args: _compute_gradient(
        _Arguments(*args).to_problem(), normalizer, scales, upstream
    ),
    lambda normalizer, loss_scales, upstream, logits, *args: logits.new_empty(logits.shape),
)


# ---------------------------------------------------------------------------------------------------------
# Memory layout of rows of logits


def has_rows(x: Tensor) -> bool:
    """Return True if (..., V) is rows with contiguous classes and one stride between them, or empty."""
    try:
        rows = x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        return x.numel() == 0
    return x.numel() == 0 or rows.shape[-1] == 1 or rows.stride(-1) == 1


def as_rows(x: Tensor) -> Tensor:
    """Return (..., V) as (N, V): a view, or a copy if `has_rows` is False."""
    return (x if has_rows(x) else x.contiguous()).reshape(x.shape[:-1].numel(), x.shape[-1])
