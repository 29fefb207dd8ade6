"""The public functions: they check and document their arguments, make a problem of them, and shape the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import LEAST_LOGPROB, RowOutputs, log_sum_exp
from flce.core.numbers import check_bool, check_dtype, check_int
from flce.core.options import ChunkOptions
from flce.core.problem import (
    LinearCrossEntropyOutput,
    LinearCrossEntropyProblem,
    LinearLogprobsOutput,
    LinearTerm,
    LossSpec,
    Needs,
    accumulation_dtype,
    loss_spec,
)
from flce.core.shard import shard_bounds
from flce.engine.case import Case
from flce.ops import composed
from flce.ops.arguments import (
    LinearArguments,
    check_linear_arguments,
    check_logits_arguments,
    check_logprob_arguments,
    check_options,
    check_tensors,
    dispatches_torch_function,
    shift_target,
)
from flce.ops.cross_entropy import check_overwritable, fused_cross_entropy
from flce.ops.linear_cross_entropy import linear_cross_entropy
from flce.ops.linear_logprobs import linear_logprobs as run_linear_logprobs
from flce.ops.split_head import SplitHeadArguments
from flce.planning.collectives import split_from_arguments
from flce.planning.device_kinds import kind_text, resolve_device
from flce.planning.plan import ChunkPlan
from flce.planning.search import plan_for_case

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.core.signatures import LinearLossArguments, LogitsLossArguments, SomeStats

_DEFAULT_OPTIONS = ChunkOptions()


@overload
def fused_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, stats: tuple[()] = ..., **rest: Unpack[LinearLossArguments]
) -> Tensor: ...
@overload
def fused_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, stats: SomeStats, **rest: Unpack[LinearLossArguments]
) -> LinearCrossEntropyOutput: ...
@overload
def fused_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, stats: tuple[str, ...], **rest: Unpack[LinearLossArguments]
) -> Tensor | LinearCrossEntropyOutput: ...


def fused_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    shift: int = 0,
    stats: tuple[str, ...] = (),
    options: ChunkOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """``cross_entropy(input @ linear_weight.T, target)`` without the ``(tokens, vocabulary)`` logits.

    The logits z of a token, and its loss with target y, class weights w and label smoothing s, are:

        a = input @ linear_weight.T + sum of (a_k @ B_k.T over adapters) + linear_bias
        z = softcap * tanh(logit_scale * a / softcap) / temperature     (without softcap: logit_scale * a / temperature)
        loss = (1 - s) * w[y] * (lse(z) - z[y]) + s / V * sum of (w[k] * (lse(z) - z[k]) over k) + z_loss * lse(z)^2

    The first two terms are those of `torch.nn.functional.cross_entropy`. Logits are made and consumed a chunk at a
    time; gradients are exact. Differentiable once, in `input`, `linear_weight`, `linear_bias`, `adapters` and
    `token_weight`; only the gradients of those that require one are computed. A backward with ``retain_graph=True``
    copies gradients that forward has computed: `ChunkPlan.retained_workspace_bytes`.

    Args:
        input: (..., H) hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, H) weight of the head, in the dtype of `input` (autocast applies as to
            `torch.nn.functional.linear`). A K-dimensional head (V, d_1, ..., d_K, H) is computed with
            its logits in memory.
        target: (...) class indices in [0, V), int64 or int32; those equal to `ignore_index` contribute nothing (a NaN
            or infinity in their hidden states: see `ChunkOptions.skip_ignored`).
            Or class probabilities (..., V) in a floating dtype, for which the logits are in memory.
        linear_bias: (V,) bias of the head, in the dtype of `input` or, for half precision, float32.
        adapters: (..., r) and (V, r) pairs, each adds ``a @ B.T`` to the logits before bias, `logit_scale` and
            `softcap`, as a LoRA adapter on the head does (``a = scale * A(x)``). Any r >= 1, which may be another
            for each; dtypes as of `linear_weight`. Not with a K-dimensional head.
        weight: (V,) class weights.
        reduction: "none": (...) losses. "sum": their sum. "mean": the sum of cross entropies over the sum of
            ``weight[target]``, plus the sum of z-losses over the number of tokens that are not ignored; NaN if
            there are none.
        ignore_index: the target value of tokens that do not count; None means -100.
        label_smoothing: s, in [0, 1].
        softcap: bound of the logits, > 0.
        logit_scale: multiplies the logits before softcap.
        temperature: divides the logits after softcap, > 0.
        z_loss: coefficient of the squared log-sum-exp, >= 0.
        token_weight: (...) in any floating dtype; multiplies each token's loss, z-loss included; not the
            denominators of "mean". Its gradient is that loss over the denominator, also where the weight is 0; it is
            0 for ignored tokens. Belongs to the positions of `input`, also with `shift`.
        num_items: divides the loss; needs ``reduction="sum"``. For gradient accumulation: the number of tokens
            over all micro-batches.
        shift: position t predicts ``target[..., t + shift]``; the last `shift` positions are ignored. At most the
            length of the sequence. Of the hidden states nothing is copied for it.
        stats: any of "lse", "logprob", "entropy", "argmax", "correct": per-token results without gradient.
        options: how memory and precision are used, see `ChunkOptions`.
        process_group: a group whose processes have the same tokens, and each a slice of the head, in the order of their
            ranks (vocabulary parallelism): `linear_weight`, `linear_bias` and the B of `adapters` are (V_local, ...),
            `weight` is that of all classes or of the slice. All other arguments are the same in all processes. Each
            gets the same loss and statistics, the gradients of its slice, and those of `input` and of the a of
            `adapters` summed over the processes: call ``backward`` on the loss in each. See "Several GPUs".
        vocab_size: V, with `process_group`. None: all processes have equally many classes. Otherwise slices are those
            of `torch.chunk`: ceil(V / processes) classes, the last ones fewer, or none.
        sequence_parallel: with `process_group`, `input` (and the a of `adapters`) is this process's share of the
            tokens, (..., S / processes, H): shares are gathered along dimension -2, and their gradient is summed and
            given back in shares. `target`, `token_weight`, results and statistics are those of all tokens.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-d, or (...) for ``reduction="none"``. With `stats` a
        `LinearCrossEntropyOutput`.

    Raises:
        TypeError: an argument has the wrong type or dtype, or `input`, `linear_weight`, `linear_bias` and `adapters`
            differ in dtype outside of autocast.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, no plan keeps
            ``options.max_workspace_bytes``, `linear_weight` is a DTensor and `input` is not, a slice has not the
            classes that `vocab_size` gives it, or (on a CPU or with ``FLCE_DEBUG=1``; otherwise results are undefined)
            processes were given different arguments.
        IndexError: a target is out of range, on a CPU or with ``FLCE_DEBUG=1``; otherwise the loss of that token
            is NaN and nothing is read out of bounds.
        RuntimeError: in backward, for double backward; in forward, for forward-mode differentiation.

    Examples:
        >>> h = torch.randn(2, 6, 16, requires_grad=True)
        >>> W = torch.randn(100, 16, requires_grad=True)
        >>> y = torch.randint(100, (2, 6))
        >>> fused_linear_cross_entropy(h, W, y, shift=1).backward()
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    spec = loss_spec(reduction, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, stats)
    args = check_linear_arguments(
        input, linear_weight, target, linear_bias, adapters, weight, token_weight, num_items, shift, options, spec,
        SplitHeadArguments(process_group, vocab_size, sequence_parallel),
    )  # fmt: skip
    if args.is_composed:
        return composed.linear_cross_entropy(args, spec)
    problem = make_linear_problem(args, spec)
    out = linear_cross_entropy(problem, options or _DEFAULT_OPTIONS)
    return _make_output(out, problem.target, args.target.shape, spec)


def _make_output(
    rows: RowOutputs, target: Tensor, shape: torch.Size, spec: LossSpec
) -> Tensor | LinearCrossEntropyOutput:
    """Return the loss, or with statistics all results.

    Args:
        rows: of N tokens, the losses reduced.
        target: as the loss saw it.
        shape: of the losses of all tokens.
    """
    loss = rows.loss.reshape(shape) if spec.reduction == "none" else rows.loss
    if not spec.stats:
        return loss
    results = rows._asdict() | {"lse": log_sum_exp(rows.normalizer) if "lse" in spec.stats else None}
    shaped = _reshape_results(results, target, shape, spec)
    statistics = (name for name in LinearCrossEntropyOutput._fields[1:] if name in shaped)
    return LinearCrossEntropyOutput(loss, **{name: shaped[name].detach() for name in statistics})


def _reshape_results(
    results: Mapping[str, Tensor | None], target: Tensor, shape: torch.Size, spec: LossSpec
) -> dict[str, Tensor]:
    """Return the results by name, those of tokens in the shape of all tokens.

    Args:
        results: by name, reduced or of each target; the argmax also for "correct". None: not computed.
        target: as the operator saw it.
    """
    named, argmax = dict(results), results["argmax"]
    if argmax is not None and "correct" in spec.stats:  # argmax is -1 where ignored, which `ignore_index` may be too
        named["correct"] = (argmax == target) & (target != spec.ignore_index)
    if "argmax" not in spec.stats:
        named["argmax"] = None
    return {
        name: value.reshape((*shape, *value.shape[target.dim() :])) if value.dim() else value
        for name, value in named.items()
        if value is not None and name != "normalizer"
    }


def make_linear_problem(
    args: LinearArguments, spec: LossSpec, row_factor: Tensor | None = None
) -> LinearCrossEntropyProblem:
    """Return the problem of checked arguments."""
    grad, terms = torch.is_grad_enabled(), ((args.input, args.linear_weight), *args.adapters)
    linear_bias, weight, token_weight = args.linear_bias, args.weight, args.token_weight
    target = args.target.to(torch.int64)
    if args.shift:
        target = shift_target(target, args.shift, spec.ignore_index)
    if weight is not None:
        weight = weight.detach().to(accumulation_dtype(args.input.dtype)).contiguous()
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(accumulation_dtype(args.input.dtype)).contiguous()
    return LinearCrossEntropyProblem(
        # Inputs of two dimensions are left alone: a view takes time of the host, twice if it is differentiated.
        terms=tuple([LinearTerm(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), w) for x, w in terms]),
        # Vectors are short: backends get them contiguous and in one dtype.
        target=target.reshape(-1).contiguous(),
        linear_bias=None if linear_bias is None else linear_bias.contiguous(),
        class_weight=weight,
        token_weight=token_weight,
        num_items=args.num_items,
        spec=spec,
        needs=Needs(
            tuple([grad and x.requires_grad for x, _ in terms]),
            tuple([grad and w.requires_grad for _, w in terms]),
            grad and linear_bias is not None and linear_bias.requires_grad,
        ),
        shift=args.shift,
        token_weight_grad=grad and token_weight is not None and token_weight.requires_grad,
        row_factor=row_factor,
        shard=args.shard,
    )


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    top_k: int = 0,
    outputs: Sequence[str] = ("logprob", "entropy"),
    linear_bias: Tensor | None = None,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    shift: int = 0,
    options: ChunkOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> LinearLogprobsOutput:
    """Log-probabilities, entropies and more of each token of ``input @ linear_weight.T``, without the logits.

    Losses for preferences and reinforcement learning are a few lines of PyTorch on these. The logits z are those of
    `fused_linear_cross_entropy`, in float32 in any case (float64 for float64 inputs). Differentiable in `input`,
    `linear_weight`, `linear_bias` and `adapters`, for any upstream gradients of the results together. A second backward
    through the same results is right; double backward is refused. Forward makes one matrix product, or two for `top_k`
    where logits stay in registers; backward makes three more.

    The same call with and without gradients returns the same bits.

    Args:
        input: (..., H) hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, H) weight of the head, in the dtype of `input` (autocast applies as to
            `torch.nn.functional.linear`).
        target: (...) class indices in [0, V), int64 or int32. Positions equal to `ignore_index` have no results and no
            gradients. None: `outputs` has neither "logprob" nor "correct", and no position is ignored.
        candidates: (..., K) or (K,) class indices, int64 or int32, K up to 256: classes whose log-probabilities are
            wanted, with gradients. -1 is none; an index may be there several times.
        top_k: k, up to 256 and up to V: the most probable classes, without gradients.
        outputs: any of "logprob", "entropy", "lse" (with gradients), "argmax", "correct", "mean_logit" and
            "log_sum_sq_prob" (without).
        linear_bias, adapters, softcap, logit_scale: as in `fused_linear_cross_entropy`.
        temperature: divides the logits after softcap, > 0. A number, or (...) one of each token, in a floating dtype
            and without a gradient.
        ignore_index: the target value of tokens that do not count; None means -100.
        shift: position t predicts ``target[..., t + shift]``; the last `shift` positions are ignored. `candidates` and
            `temperature` belong to the positions of `input`.
        options: as in `fused_linear_cross_entropy`. With ``skip_ignored=True`` ignored tokens cost nothing.
        process_group, vocab_size, sequence_parallel: as in `fused_linear_cross_entropy`. `target` and `candidates` are
            classes of all processes, as are the results, which each process gets.

    Returns:
        A `LinearLogprobsOutput`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, an output is unknown or named
            twice, "logprob" or "correct" is asked for without a target, a temperature requires a gradient (or, on a
            CPU or with ``FLCE_DEBUG=1``, is no finite number > 0; otherwise the results of that token are NaN),
            ``options.logits_dtype`` is of half precision, or no plan keeps ``options.max_workspace_bytes``.
        IndexError: a target or candidate is out of range, on a CPU or with ``FLCE_DEBUG=1``; otherwise its
            log-probability is NaN and nothing is read out of bounds.
        RuntimeError: in backward, for double backward; in forward, for forward-mode differentiation.

    Examples:
        >>> h, W = torch.randn(2, 6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> y = torch.randint(100, (2, 6))
        >>> out = linear_logprobs(h, W, y)
        >>> (out.logprob - 0.01 * out.entropy).mean().backward()
    """
    args, spec, flat_candidates, row_factor = check_logprob_arguments(
        input, linear_weight, target, candidates, top_k, outputs, linear_bias, adapters, temperature, softcap,
        logit_scale, ignore_index, shift, options, SplitHeadArguments(process_group, vocab_size, sequence_parallel),
    )  # fmt: skip
    problem, tokens = make_linear_problem(args, spec, row_factor), args.input.shape[:-1]
    results = run_linear_logprobs(problem, flat_candidates, options or _DEFAULT_OPTIONS)
    shaped = _reshape_results(results, problem.target, tokens, spec)
    return LinearLogprobsOutput(**{name: shaped.get(name) for name in _LOGPROB_FIELDS})


# A compiler cannot look at fields.
_LOGPROB_FIELDS = tuple(field.name for field in fields(LinearLogprobsOutput))


def topk_kl(
    candidate_logprob: Tensor,
    teacher_logprob: Tensor,
    direction: Literal["forward", "reverse"] = "forward",
    tail: bool = True,
) -> Tensor:
    """Kullback-Leibler divergence of a student from a teacher of whom only the top-k log-probabilities are stored.

    Args:
        candidate_logprob: (..., K) log-probabilities of the student at the teacher's classes, as `linear_logprobs`
            returns them.
        teacher_logprob: (..., K) those of the teacher, in any floating dtype; -inf where there is none.
        direction: "forward" is KL(teacher || student), "reverse" KL(student || teacher).
        tail: whether all other classes are one more class, whose probability is what is left of 1. Otherwise what both
            have of these classes is taken as it is, without normalization.

    Returns:
        (...) divergences, in nats, in the dtype of `candidate_logprob`. Differentiable in both arguments. They mean
        nothing at positions that `linear_logprobs` ignored, whose log-probabilities are 0: leave these out of a sum.

    Raises:
        TypeError: an argument is not a dense tensor of a floating dtype, or `tail` is not a bool.
        ValueError: shapes or devices differ, or `direction` is unknown.
    """
    check_tensors({"candidate_logprob": candidate_logprob, "teacher_logprob": teacher_logprob}, dtensors=True)
    check_bool("tail", tail)
    if candidate_logprob.shape != teacher_logprob.shape:
        raise ValueError(
            "candidate_logprob and teacher_logprob must have one shape, got "
            f"{tuple(candidate_logprob.shape)} and {tuple(teacher_logprob.shape)}"
        )
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction must be 'forward' or 'reverse', got {direction!r}")
    present = teacher_logprob > -torch.inf
    teacher_logprob = teacher_logprob.to(candidate_logprob.dtype)
    student, teacher = (t.masked_fill(~present, 0.0) for t in (candidate_logprob, teacher_logprob))
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    # A class that a student excludes has no part in the reverse divergence: 0 * -inf would be NaN.
    divergence = (p.exp() * (p.clamp(min=LEAST_LOGPROB) - q)).masked_fill(~present, 0.0).sum(-1)
    if not tail:
        return divergence
    # log(1 - sum of exp(l)); of probabilities that are rounded the sum may reach 1.
    least = torch.finfo(candidate_logprob.dtype).eps
    p_rest, q_rest = (1.0 - t.exp().masked_fill(~present, 0.0).sum(-1).clamp(max=1.0 - least) for t in (p, q))
    return divergence + p_rest * (p_rest.log() - q_rest.log())


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    stats: tuple[()] = ...,
    **rest: Unpack[LogitsLossArguments],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    stats: SomeStats,
    **rest: Unpack[LogitsLossArguments],
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    stats: tuple[str, ...],
    **rest: Unpack[LogitsLossArguments],
) -> Tensor | LinearCrossEntropyOutput: ...
@dispatches_torch_function
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    shift: int = 0,
    stats: tuple[str, ...] = (),
    inplace: bool = False,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """`torch.nn.functional.cross_entropy` of logits that exist, in one pass over them each way.

    The loss is that of `fused_linear_cross_entropy` with the given `logits` as its a, softcap, scales and
    z-loss included. Nothing of the size of the logits is made in forward but, with ``inplace=True``, their gradient,
    over the logits themselves: then no second tensor of that size ever exists. With ``inplace=False`` the logits are
    kept as they are with a log-sum-exp per token, and backward makes the gradient from them.

    The classes are the **last** dimension, whatever the number of dimensions; ``torch`` has them second, as in
    (N, C, d): ``logits.movedim(1, -1)`` is its equivalent. Logits are read where they are: rows may lie apart
    (``logits[:, :-1]``, ``logits[..., :V]``), batch and sequence be transposed. Only if classes are not next to each
    other in memory, or rows have more than two strides, is a copy made.

    Args:
        logits: (..., V) in float16, bfloat16, float32 or float64, also under autocast. With `process_group` the
            columns of this process, (..., V_local). A DTensor that is sharded over its last dimension is recognised
            as such without `process_group` and `vocab_size`.
        target: (...) class indices in [0, V), int64 or int32; those equal to `ignore_index` contribute nothing.
            Or class probabilities (..., V) in a floating dtype, for which the loss is composed of PyTorch's
            operators, with several tensors of the size of the logits; without `shift`, `inplace` and `process_group`.
        weight: (V,) class weights, of all classes.
        ignore_index, reduction, label_smoothing, softcap, logit_scale, temperature, z_loss: as of
            `fused_linear_cross_entropy`.
        token_weight, num_items, stats: as of `fused_linear_cross_entropy`.
        shift: position t predicts ``target[..., t + shift]``; the last `shift` positions are ignored. Unlike with
            ``logits[:, :-1]``, whose backward copies, the gradient is that of the logits as they are. The positions
            are the last dimension of `target`: (B, S) for logits (B, S, V), and for (S, B, V) `logits` and `target`
            have to be transposed first, which copies no logits.
        inplace: the logits may be overwritten. If they require grad (and grad mode is on), they hold their gradient
            after this call (for an upstream gradient of 1; times one number for float16), and a backward only
            multiplies that, unless by 1. Otherwise there is no gradient, and they stay as they are. While
            `torch.compile` traces, this is ``inplace=False``: the compiler decides itself which memory it uses again.
            Views of one tensor share a version, so a second call on another part of it makes the first one's backward
            an error: give all of it to one call, or copies of the parts.
            Do not use the logits afterwards. Where they are no view, that is an error in backward; of a view, or of
            what they are a view of, nothing tells, and neither value nor gradient would be right. (That also goes for
            what `torch.compile` returned as a view of something that it saved: PyTorch does not notice.)
            Not in a function under `torch.utils.checkpoint.checkpoint` that is given the logits: it would
            run again on what is left of them.
        process_group: a group whose processes have the logits of the same tokens, each for a slice of the
            vocabulary, in the order of their ranks. `target`, `weight`, `token_weight` and `num_items` are the same
            in all. Every process gets the whole loss (and statistics), and the gradient of its columns. One collective
            in forward, of 3 to 7 numbers per token; none in backward.
        vocab_size: V, with `process_group`. None: all processes have equally many columns. Otherwise the slices must be
            those of `torch.chunk`: ceil(V / processes) columns, the last ones fewer, or none. Where they are
            not, statistics, loss and gradient are NaN in all processes (on a CPU, and with ``FLCE_DEBUG=1``, it is a
            ValueError).

    Returns:
        The loss, float32 (float64 for float64 logits): 0-d, or (...) for ``reduction="none"``. With `stats` a
        `LinearCrossEntropyOutput`. Plain tensors, also for a DTensor. The gradient has the dtype of `logits`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, an option is not for class
            probabilities, or a DTensor is sharded in another way than over its classes.
        IndexError: a target is out of range, on a CPU or with ``FLCE_DEBUG=1``; otherwise the loss of that token
            is NaN and nothing is read out of bounds.
        RuntimeError: with ``inplace=True``, in forward: logits that require grad and are a leaf (or a view of one),
            that the operator which made them saved for its backward, that overlap themselves in memory, or whose
            strides call for a copy; in backward: for a second one, and (by autograd, as for any operation in place)
            for whatever else saved the logits. In either case, in backward: for double backward; in forward: for
            forward-mode differentiation.

    Examples:
        >>> logits = model(x)                                                           # (2, 6, 100)
        >>> y = torch.randint(100, (2, 6))
        >>> cross_entropy(logits, y, shift=1, z_loss=1e-4, inplace=True).backward()
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    spec = loss_spec(reduction, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, stats)
    problem = check_logits_arguments(
        logits, target, weight, token_weight, num_items, shift, inplace, process_group, vocab_size, spec
    )
    if problem.target.is_floating_point():
        return composed.cross_entropy(problem)
    overwritten = inplace and problem.logits is not logits and logits.requires_grad and torch.is_grad_enabled()
    if overwritten:
        check_overwritable(logits)
    out = fused_cross_entropy(problem, inplace)
    if overwritten:  # a DTensor counts its versions apart from what is in it
        torch.autograd.graph.increment_version(logits)
    return _make_output(out, problem.target, problem.target.shape, spec)


def plan(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cuda",
    device_kind: str | None = None,
    device_memory: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    stats: tuple[str, ...] = (),
    input_grad: bool = True,
    weight_grad: bool = True,
    bias_grad: bool = False,
    adapter_ranks: Sequence[int] = (),
    options: ChunkOptions | None = None,
    shards: int | None = None,
    sequence_parallel: bool = False,
) -> ChunkPlan:
    """What `fused_linear_cross_entropy` will do for a shape, and the bytes it will take.

    Args:
        num_tokens: N, the tokens of `input` over all leading dimensions.
        hidden_size: H.
        vocab_size: V.
        dtype: of `input` and `linear_weight`, after autocast.
        device: where the tensors will be: a device of this machine. Where it has no GPU, ``"cuda"`` is a GPU of unknown
            kind: its memory is no bound, and kernels that need a certain kind are not counted on.
        device_kind: the kind of GPU to plan for, whatever this machine has: a name of
            `flce.core.device_record.KNOWN_KINDS` such as ``"RTX-4090"``, spaces, hyphens and case ignored, or a compute
            capability such as ``"sm_90"``. With it the plan is the same on every machine.
        device_memory: bytes of the device, in place of those of this machine's or of the kind. Without a budget a
            call takes at most 1/24 of them.
        reduction, label_smoothing, softcap, z_loss, stats: as in `fused_linear_cross_entropy`.
        input_grad, weight_grad, bias_grad: which gradients will be asked for (``False`` for a frozen head).
        adapter_ranks: the rank r of each of `adapters`; gradients of both of its tensors are assumed to be asked for.
        options: as in `fused_linear_cross_entropy`.
        shards: processes over which the head is divided by classes, as with a `process_group` of that many. The plan is
            that of the process that has most classes, ceil(V / shards). None: the head is not divided.
        sequence_parallel: with `shards`, as in `fused_linear_cross_entropy`; `num_tokens` are those of all processes.
            The gathered input, and what its gradient takes before it is given back in shares, come on top of the
            workspace.

    Returns:
        A `ChunkPlan`; ``.workspace_bytes`` is the peak of memory above the inputs and the returned
        gradients, from the beginning of forward to the end of backward. ``str(plan)`` names the device that it is for.
        With `shards`, ``.collectives`` are the numbers of collectives and their bytes.

    Raises:
        ValueError: no plan keeps ``options.max_workspace_bytes`` (the message names the least that works),
            or an argument has an impossible value.
        TypeError: an argument has the wrong type.

    Examples:
        >>> flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200").workspace_bytes >> 20
        1468
    """
    if not isinstance(adapter_ranks, (tuple, list)):
        raise TypeError(f"adapter_ranks must be a sequence of ints, got {type(adapter_ranks).__name__}")
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    sizes |= {f"adapter_ranks[{k}]": rank for k, rank in enumerate(adapter_ranks)}
    sizes = {name: check_int(name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value < (0 if name == "num_tokens" else 1):
            raise ValueError(f"{name} must be positive, got {value}")
    num_tokens, hidden_size, vocab_size, *ranks = sizes.values()
    check_dtype("dtype", dtype)
    check_options(options)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):  # a name that PyTorch does not know, or no name
        raise ValueError(f"device must be a device such as 'cuda' or 'cpu', got {device!r}") from None
    of_adapters, split = (True,) * len(ranks), split_from_arguments(shards, sequence_parallel, num_tokens)
    c = Case(
        num_tokens,
        (hidden_size, *ranks),
        vocab_size if split is None else shard_bounds(vocab_size, split.num_processes, 0)[1],
        dtype,
        device.type,
        *resolve_device(device, device_kind, device_memory),
        LossSpec(reduction, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, stats=stats),
        Needs((input_grad, *of_adapters), (weight_grad, *of_adapters), bias_grad),
        options or _DEFAULT_OPTIONS,
        split,
    )
    return plan_for_case(c).made_for(kind_text(device, device_kind))
