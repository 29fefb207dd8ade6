"""The public functions. Each function checks its arguments, builds the problem and shapes the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, overload

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import RowOutputs, log_sum_exp
from flce.core.numbers import check_bool, check_dtype, check_int
from flce.core.options import DEFAULT_OPTIONS, ChunkOptions
from flce.core.problem import LinearCrossEntropyOutput, LinearLogprobsOutput, LogprobSpec, LossSpec, Needs, loss_spec
from flce.core.shard import shard_bounds
from flce.engine.case import Case
from flce.ops.arguments import check_options, dispatches_torch_function, names_replacements
from flce.ops.cross_entropy import check_overwritable, fused_cross_entropy
from flce.ops.dtensors import supports_divided_heads
from flce.ops.linear_cross_entropy import linear_cross_entropy
from flce.ops.linear_logprobs import linear_logprobs as run_linear_logprobs
from flce.ops.problems import make_linear_problem, make_logits_problem, make_logprob_problem
from flce.ops.vocabulary_parallel import DivisionArguments
from flce.planning.plan import ChunkPlan, resolve_device
from flce.planning.search import plan_for_case

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flce.core.signatures import LinearLossArguments, LogitsLossArguments, SomeStats


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
@supports_divided_heads
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
    empty_loss: str = "nan",
    stats: tuple[str, ...] = (),
    options: ChunkOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """Compute ``cross_entropy(input @ linear_weight.T, target)`` without the ``(tokens, vocabulary)`` logits in memory.

    The logits z of a token, and the loss of the token with target y, class weights w and label smoothing s, are:

        a = input @ linear_weight.T + sum of (a_k @ B_k.T over adapters) + linear_bias
        z = softcap * tanh(logit_scale * a / softcap) / temperature     (without softcap: logit_scale * a / temperature)
        loss = (1 - s) * w[y] * (lse(z) - z[y]) + s / V * sum of (w[k] * (lse(z) - z[k]) over k) + z_loss * lse(z)^2

    The sum of the first two terms is `torch.nn.functional.cross_entropy` of class indices. Logits are computed and
    processed one chunk at a time. Gradients are exact. The loss is differentiable once, in `input`, `linear_weight`,
    `linear_bias`, `adapters` and `token_weight`. Only gradients of tensors that require a gradient are computed. A
    backward with ``retain_graph=True`` copies the gradients that forward has computed.

    Args:
        input: (..., H) hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, H) weight of the head, in the dtype of `input`. Autocast applies as to
            `torch.nn.functional.linear`.
        target: (...) class indices in [0, V), int64 or int32. Tokens whose target is `ignore_index` contribute nothing
            to loss and gradients (for a NaN or infinity in their hidden states, see `ChunkOptions.skip_ignored`).
        linear_bias: (V,) bias of the head, in the dtype of `input` or, for half precision, float32.
        adapters: (..., r) and (V, r) pairs. Each pair adds ``a @ B.T`` to the logits before bias, `logit_scale` and
            `softcap`, as a LoRA adapter on the head does (``a = scale * A(x)``). Any r >= 1; each pair may have a
            different r. The dtype is the dtype of `linear_weight`.
        weight: (V,) class weights.
        reduction: "none": (...) losses. "sum": the sum of the losses. "mean": the sum of cross entropies divided by the
            sum of ``weight[target]``, plus the sum of z-losses divided by the number of tokens that are not ignored. If
            all tokens are ignored, see `empty_loss`.
        ignore_index: the target value of ignored tokens; None means -100.
        label_smoothing: s, in [0, 1].
        softcap: bound of the logits, > 0.
        logit_scale: multiplies the logits before softcap.
        temperature: divides the logits after softcap, > 0.
        z_loss: coefficient of the squared log-sum-exp, >= 0.
        token_weight: (...) in any floating dtype. Multiplies the loss of each token, z-loss included, and not the
            denominators of "mean". The gradient of `token_weight` is the unweighted loss of the token divided by the
            denominator, also where the weight is 0; it is 0 for ignored tokens. With `shift`, `token_weight` belongs to
            the positions of `input`.
        num_items: divides the loss; needs ``reduction="sum"``. For gradient accumulation: the number of tokens over all
            micro-batches. A number is > 0. A 0-d tensor may be 0, because a GPU's values are not read: then the loss is
            NaN or infinite, as in a division, unless `empty_loss` is "zero".
        shift: position t predicts ``target[..., t + shift]``, and the last `shift` positions are ignored. At most the
            length of the sequence. Hidden states are not copied. Positions are the last dimension of `target`: if B
            sequences are flattened to (B * T, H) and (B * T), the last token of each sequence predicts, without an
            error, the first token of the next one. Give (B, T, H) and (B, T).
        empty_loss: the loss where a divisor is 0, without waiting for the device. "nan": as in PyTorch, NaN if all
            tokens are ignored. "zero": if the sum of ``weight[target]`` or `num_items` is 0, the loss is 0 and its
            gradients are 0; so a process or micro-batch without labels does not spoil a sum. `num_items` may then be
            the number 0. The z-loss has a divisor of its own, the number of tokens, if `reduction` is "mean".
        stats: any of "lse", "logprob", "entropy", "argmax", "correct": results of each token without gradient.
        options: memory and precision, see `ChunkOptions`.
        process_group: a group over which the head is divided (vocabulary parallelism). All processes have the same
            tokens, and each process has one shard of the head, in the order of the ranks: `linear_weight`,
            `linear_bias` and the B of `adapters` are (V_local, ...), `weight` has all classes or the shard. All other
            arguments are the same in all processes. Each process gets the same loss and statistics, the gradients of
            its shard, and the gradients of `input` and of the a of `adapters` summed over the processes. Call
            ``backward`` on the loss in each process. See "Several GPUs".
        vocab_size: V, with `process_group`. None: all processes have the same number of classes. Otherwise shards must
            be the chunks of `torch.chunk`: ceil(V / processes) classes; the last shards have fewer or none.
        sequence_parallel: with `process_group`, `input` (and the a of `adapters`) is the share of the tokens of this
            process, (..., S / processes, H). The shares are gathered along dimension -2. Their gradient is summed over
            the processes, and each process gets the gradient of its share. `target`, `token_weight`, results and
            statistics belong to all tokens.

    `input`, `linear_weight`, `linear_bias` and `adapters` may be DTensors on one mesh. Then no `process_group` is
    given. `linear_weight`, `linear_bias` and the B of `adapters` are ``Shard(0)`` on at most one dimension of the mesh
    and ``Replicate()`` on the others. `input` is ``Replicate()``, or ``Shard`` of a dimension of tokens, on each
    dimension. `target` and other tensors of tokens are DTensors with any placements. They may be plain tensors if only
    the dimension that divides the classes divides the tokens, or none. The loss is a plain tensor, over all tokens of
    the mesh. Results of each token have the placements of `target`. Gradients have the placements of their tensors.

    Returns:
        The loss, float32 (float64 for float64 inputs): 0-d, or (...) for ``reduction="none"``. With `stats` a
        `LinearCrossEntropyOutput`.

    Raises:
        TypeError: an argument has the wrong type or dtype, or `input`, `linear_weight`, `linear_bias` and `adapters`
            differ in dtype outside of autocast.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, no plan fits into
            ``options.max_workspace_bytes``, `linear_weight` is a DTensor and `input` is not, placements of DTensors do
            not fit, a shard does not have the number of classes that follows from `vocab_size`, or (on a CPU or with
            ``FLCE_DEBUG=1``; otherwise results are undefined) processes were given different arguments.
        IndexError: a target is out of range, on a CPU or with ``FLCE_DEBUG=1``. Otherwise the loss of that token is
            NaN, and no memory is read out of bounds.
        RuntimeError: in backward, for double backward; in forward, for forward-mode differentiation.

    Examples:
        >>> h = torch.randn(2, 6, 16, requires_grad=True)
        >>> W = torch.randn(100, 16, requires_grad=True)
        >>> y = torch.randint(100, (2, 6))
        >>> fused_linear_cross_entropy(h, W, y, shift=1).backward()
    """
    spec = loss_spec(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
        logit_scale=logit_scale, temperature=temperature, z_loss=z_loss, stats=stats, empty_loss=empty_loss,
    )  # fmt: skip
    problem = make_linear_problem(
        input, linear_weight, target, spec, linear_bias=linear_bias, adapters=adapters, weight=weight,
        token_weight=token_weight, num_items=num_items, shift=shift, options=options,
        division=DivisionArguments(process_group, vocab_size, sequence_parallel),
    )  # fmt: skip
    return _make_output(linear_cross_entropy(problem), problem.target, target.shape, spec)


def _make_output(
    rows: RowOutputs, target: Tensor, shape: torch.Size, spec: LossSpec
) -> Tensor | LinearCrossEntropyOutput:
    """Return the loss or, with statistics, all results. rows: outputs of N tokens, with reduced losses; shape: of the
    losses of all tokens."""
    loss = rows.loss.reshape(shape) if spec.reduction == "none" else rows.loss
    if not spec.stats:
        return loss
    results = rows._asdict() | {"lse": log_sum_exp(rows.normalizer) if "lse" in spec.stats else None}
    shaped = _reshape_results(results, target, shape, spec)
    statistics = (name for name in LinearCrossEntropyOutput._fields[1:] if name in shaped)
    return LinearCrossEntropyOutput(loss, **{name: shaped[name].detach() for name in statistics})


def _reshape_results(
    results: Mapping[str, Tensor | None], target: Tensor, shape: tuple[int, ...], spec: LossSpec
) -> dict[str, Tensor]:
    """Return the computed results by name. Results of N tokens get the `shape` of all tokens. "correct" follows
    from the argmax."""
    named, argmax = dict(results), results["argmax"]
    if argmax is not None and "correct" in spec.stats:  # at ignored rows argmax is -1, and `ignore_index` may be -1
        named["correct"] = (argmax == target) & (target != spec.ignore_index)
    if "argmax" not in spec.stats:
        named["argmax"] = None
    return {
        name: value.reshape((*shape, *value.shape[target.dim() :])) if value.dim() else value
        for name, value in named.items()
        if value is not None and name not in ("normalizer", "samples")
    }


@supports_divided_heads
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    mask: Tensor | None = None,
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
    """Compute log-probabilities, entropies and other results of each token of ``input @ linear_weight.T``.

    The logits are not stored in memory. Losses for preferences and reinforcement learning are a few lines of PyTorch on
    these results. The logits z are defined as in `fused_linear_cross_entropy`; they are always float32 (float64 for
    float64 inputs). The results are differentiable in `input`, `linear_weight`, `linear_bias` and `adapters`, for any
    upstream gradients of several results together. A second backward through the same results is correct; double
    backward raises an error. Forward runs one matrix product, or two for `top_k` where logits stay in registers;
    backward runs three more.

    A call with gradients and a call without gradients return the same bits.

    Args:
        input: (..., H) hidden states; float16, bfloat16, float32 or float64.
        linear_weight: (V, H) weight of the head, in the dtype of `input`. Autocast applies as to
            `torch.nn.functional.linear`.
        target: (...) class indices in [0, V), int64 or int32. Positions equal to `ignore_index` have no results and no
            gradients. None: `outputs` has neither "logprob" nor "correct", and no position is ignored.
        candidates: (..., K) or (K,) class indices, int64 or int32, K up to 256. The log-probabilities of these classes
            are returned, with gradients. -1 is an empty entry; an index may occur several times.
        mask: (...) bool, of the shape of `target`: False for targets to ignore, such as the tokens of a prompt. Equal
            to `ignore_index` in `target`. Without a target: False for positions to ignore.
        top_k: k, up to 256 and up to V: the k most probable classes are returned, without gradients.
        outputs: any of "logprob", "entropy", "lse" (with gradients), "argmax", "correct" and "mean_logit"
            (without).
        linear_bias, adapters, softcap, logit_scale: as in `fused_linear_cross_entropy`.
        temperature: divides the logits after softcap, > 0. A number, or (...) one number for each token, in a floating
            dtype and without a gradient.
        ignore_index: the target value of ignored tokens; None means -100.
        shift: position t predicts ``target[..., t + shift]``, and the last `shift` positions are ignored. `mask`
            belongs to the targets, `candidates` and `temperature` belong to the positions of `input`.
        options: as in `fused_linear_cross_entropy`. With ``skip_ignored=True`` ignored tokens cost no products. The
            default does this on a CPU only: on a GPU the host waits for their number.
        process_group, vocab_size, sequence_parallel: as in `fused_linear_cross_entropy`. `target`, `candidates` and the
            results refer to the classes of all processes. `target`, `mask` and the results have all tokens.

    DTensors are supported as in `fused_linear_cross_entropy`. Without `target`, results have the placements of `input`.

    Returns:
        A `LinearLogprobsOutput`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, an output is unknown or named
            twice, `outputs` has "logprob" or "correct" and `target` is None, a temperature requires a gradient (or, on
            a CPU or with ``FLCE_DEBUG=1``, is not a finite number > 0; otherwise the results of that token are NaN),
            ``options.logits_dtype`` is half precision, or no plan fits into ``options.max_workspace_bytes``.
        IndexError: a target or candidate is out of range, on a CPU or with ``FLCE_DEBUG=1``. Otherwise its
            log-probability is NaN, and no memory is read out of bounds.
        RuntimeError: in backward, for double backward; in forward, for forward-mode differentiation.

    Examples:
        >>> h, W = torch.randn(2, 6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> y = torch.randint(100, (2, 6))
        >>> out = linear_logprobs(h, W, y)
        >>> (out.logprob - 0.01 * out.entropy).mean().backward()
    """
    division = DivisionArguments(process_group, vocab_size, sequence_parallel)
    problem = make_logprob_problem(
        input, linear_weight, target, candidates=candidates, mask=mask, top_k=top_k, outputs=outputs,
        linear_bias=linear_bias, adapters=adapters, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        ignore_index=ignore_index, shift=shift, options=options, division=division,
    )  # fmt: skip
    results, tokens = run_linear_logprobs(problem), division.tokens(input)
    shaped = _reshape_results(results, problem.target, tokens, problem.spec)
    return LinearLogprobsOutput(**{name: shaped.get(name) for name in _LOGPROB_FIELDS})


# `torch.compile` cannot trace `dataclasses.fields`.
_LOGPROB_FIELDS = tuple(field.name for field in fields(LinearLogprobsOutput))


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
@supports_divided_heads
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
    empty_loss: str = "nan",
    stats: tuple[str, ...] = (),
    inplace: bool = False,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Compute `torch.nn.functional.cross_entropy` of logits that you have already computed.

    Forward and backward each read the logits once. The loss is the loss of `fused_linear_cross_entropy` with `logits`
    as a, softcap, scales and z-loss included. Forward allocates no memory of the size of the logits. With
    ``inplace=True`` forward writes the gradient over the logits: no second tensor of that size is allocated. With
    ``inplace=False`` forward saves the logits, unchanged, and one log-sum-exp for each token; backward computes the
    gradient from them.

    The classes are the **last** dimension, for any number of dimensions. In ``torch`` they are the second dimension, as
    in (N, C, d); the equivalent here is ``logits.movedim(1, -1)``. Logits are read without a copy if the classes are
    contiguous in memory and there is one stride between rows, as in ``logits[..., :V]``. Others are copied, such as
    ``logits[:, :-1]``: give ``shift=1`` instead. ``FLCE_LOG=debug`` logs each copy.

    Args:
        logits: (..., V) in float16, bfloat16, float32 or float64, also under autocast. With `process_group` the columns
            of this process, (..., V_local). A DTensor that is sharded over its last dimension needs neither
            `process_group` nor `vocab_size`.
        target: (...) class indices in [0, V), int64 or int32. Tokens whose target is `ignore_index` contribute nothing.
        weight: (V,) class weights, of all classes.
        ignore_index, reduction, label_smoothing, softcap, logit_scale, temperature, z_loss: as in
            `fused_linear_cross_entropy`.
        token_weight, num_items, empty_loss, stats: as in `fused_linear_cross_entropy`.
        shift: position t predicts ``target[..., t + shift]``, and the last `shift` positions are ignored. Positions are
            the last dimension of `target`: (B, S) for logits (B, S, V).
        inplace: True: the logits may be overwritten. If they require grad (and grad mode is on), they contain their
            gradient after this call (for an upstream gradient of 1; for float16 multiplied by one factor). Backward
            multiplies this gradient by the upstream gradient, unless that is 1. If the logits do not require
            grad, they stay unchanged. While `torch.compile` traces, ``inplace=True`` has the effect of
            ``inplace=False``, because the compiler reuses memory itself.
            Views of one tensor share a version counter. A second call on another part of the tensor makes the backward
            of the first call raise an error: pass the whole tensor to one call, or copy the parts.
            Do not use the logits after the call. If they are not a view, a later use raises an error in backward. If
            they are a view, a later use of the view or of its base is not detected, and has a wrong value and gradient.
            (This includes logits that `torch.compile` returned as a view of a tensor that it saved.)
            Do not call this with ``inplace=True`` in a function under `torch.utils.checkpoint.checkpoint` that gets the
            logits as an argument: the function would run again on the overwritten logits.
        process_group: a group over which the classes are divided. All processes have the logits of the same tokens, and
            each process has one shard of the vocabulary, in the order of the ranks. `target`, `weight`, `token_weight`
            and `num_items` are the same in all processes. Each process gets the loss (and statistics) over all classes,
            and the gradient of its columns. Forward runs one collective, of 3 to 6 numbers for each token; backward
            runs none.
        vocab_size: V, with `process_group`. None: all processes have the same number of columns. Otherwise shards must
            be the chunks of `torch.chunk`: ceil(V / processes) columns; the last shards have fewer or none. If the
            shards are different, statistics, loss and gradient are NaN in all processes (on a CPU, and with
            ``FLCE_DEBUG=1``, a ValueError is raised).

    Returns:
        The loss, float32 (float64 for float64 logits): 0-d, or (...) for ``reduction="none"``. With `stats` a
        `LinearCrossEntropyOutput`. Plain tensors, also for a DTensor. The gradient has the dtype of `logits`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit, devices differ, a scalar is out of its range, or a DTensor is sharded over
            another dimension than its classes.
        IndexError: a target is out of range, on a CPU or with ``FLCE_DEBUG=1``. Otherwise the loss of that token is
            NaN, and no memory is read out of bounds.
        RuntimeError: with ``inplace=True`` in forward: the logits require grad and are a leaf (or a view of a leaf),
            were saved for backward by the operator that computed them, share memory between elements, or have strides
            that need a copy. With ``inplace=True`` in backward: for a second backward, and (raised by autograd, as for
            any in-place operation) if another operator saved the logits. For any `inplace`: in backward for double
            backward, in forward for forward-mode differentiation.

    Examples:
        >>> logits = model(x)                                                           # (2, 6, 100)
        >>> y = torch.randint(100, (2, 6))
        >>> cross_entropy(logits, y, shift=1, z_loss=1e-4, inplace=True).backward()
    """
    spec = loss_spec(
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap,
        logit_scale=logit_scale, temperature=temperature, z_loss=z_loss, stats=stats, empty_loss=empty_loss,
    )  # fmt: skip
    problem = make_logits_problem(
        logits, target, weight, token_weight, num_items, shift, inplace, process_group, vocab_size, spec
    )
    overwritten = inplace and problem.logits is not logits and logits.requires_grad and torch.is_grad_enabled()
    if overwritten:
        check_overwritable(logits)
    out = fused_cross_entropy(problem, inplace)
    if overwritten:  # a DTensor and its local tensor have separate version counters
        torch.autograd.graph.increment_version(logits)
    return _make_output(out, problem.target, problem.logits.shape[:-1], spec)


@names_replacements
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
    teacher_hidden_size: int | None = None,
) -> ChunkPlan:
    """Return the schedule and the memory of a call of `fused_linear_cross_entropy`, without running it.

    Args:
        num_tokens: N, the tokens of `input` over all leading dimensions.
        hidden_size: H.
        vocab_size: V.
        dtype: dtype of `input` and `linear_weight`, after autocast.
        device: device of the tensors, on this machine. If the machine has no GPU, ``"cuda"`` is a GPU of unknown kind:
            its memory sets no limit, and kernels that need a certain kind of GPU are not used.
        device_kind: the kind of GPU to plan for, independent of this machine: a name of
            `flce.core.devices.KNOWN_KINDS` such as ``"RTX-4090"``, PyTorch's ``"NVIDIA GeForce RTX 4090"``, or a
            compute capability such as ``"sm_90"``. With `device_kind` the plan is the same on every machine.
        device_memory: bytes of the device; replaces the memory of this machine's device or of the kind. Without a
            budget a call uses at most 1/24 of the memory, or more if it would take more than 1.5 times as long as the
            fastest plan within 1/8: ``str(plan)`` states the excess.
        reduction, label_smoothing, softcap, z_loss, stats: as in `fused_linear_cross_entropy`.
        input_grad, weight_grad, bias_grad: True if the gradient is required (``weight_grad=False`` for a frozen head).
        adapter_ranks: the rank r of each of `adapters`. The plan includes the gradients of both tensors of each
            adapter.
        options: as in `fused_linear_cross_entropy`.
        shards: number of processes over which the classes of the head are divided, as with a `process_group` of that
            size. The plan is the plan of the process with the most classes, ceil(V / shards). None: the head is not
            divided.
        sequence_parallel: with `shards`, as in `fused_linear_cross_entropy`. `num_tokens` counts the tokens of all
            processes. The workspace does not include the gathered input and the memory of its gradient before the
            gradient is scattered.
        teacher_hidden_size: H of the teacher's head, of the same dtype. The plan is the plan of `linear_divergence`.
            "jsd" with a small budget or with `shards` has two more products. `stats` are "logprob" and "entropy".

    Returns:
        A `ChunkPlan`. ``.workspace_bytes`` is the peak of memory above the inputs and the returned gradients, from the
        beginning of forward to the end of backward. ``str(plan)`` names the device.

    Raises:
        ValueError: no plan fits into ``options.max_workspace_bytes`` (the message names the smallest budget that
            works), or an argument has an impossible value.
        TypeError: an argument has the wrong type.

    Examples:
        >>> flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200").workspace_bytes >> 20
        1469
    """
    if not isinstance(adapter_ranks, (tuple, list)):
        raise TypeError(f"adapter_ranks must be a sequence of ints, got {type(adapter_ranks).__name__}")
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    sizes |= {f"adapter_ranks[{k}]": rank for k, rank in enumerate(adapter_ranks)}
    sizes |= {} if teacher_hidden_size is None else {"teacher_hidden_size": teacher_hidden_size}
    sizes = {name: check_int(name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value < (0 if name == "num_tokens" else 1):
            raise ValueError(f"{name} must be positive, got {value}")
    teacher = None if teacher_hidden_size is None else ((sizes.pop("teacher_hidden_size"),), dtype)
    num_tokens, hidden_size, vocab_size, *ranks = sizes.values()
    check_dtype("dtype", dtype)
    spec = LossSpec(reduction, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, stats=stats)
    if teacher_hidden_size is not None:
        if spec.reduction != "mean" or label_smoothing or z_loss:
            raise ValueError("teacher_hidden_size plans linear_divergence: give no reduction, label_smoothing, z_loss")
        spec = LogprobSpec(softcap=softcap, stats=stats, divergence="forward_kl")
    check_options(options)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):  # the name is unknown to PyTorch, or `device` is not a name
        raise ValueError(f"device must be a device such as 'cuda' or 'cpu', got {device!r}") from None
    check_bool("sequence_parallel", sequence_parallel)
    if shards is None and sequence_parallel:
        raise ValueError("sequence_parallel=True needs shards, the number of processes")
    if shards is not None:
        shards = check_int("shards", shards, "None or an int")
        if shards < 1:
            raise ValueError(f"shards must be positive, got {shards}")
        if sequence_parallel and num_tokens % shards:
            raise ValueError(
                f"with sequence_parallel num_tokens must be a multiple of shards={shards}, as all processes have "
                f"equally many, got {num_tokens}"
            )
    adapter_needs = (True,) * len(ranks)
    case = Case(
        num_tokens,
        (hidden_size, *ranks),
        shard_bounds(vocab_size, shards or 1, 0)[1],
        dtype,
        device.type,
        *resolve_device(device, device_kind, device_memory),
        spec,
        Needs((input_grad, *adapter_needs), (weight_grad, *adapter_needs), bias_grad),
        options or DEFAULT_OPTIONS,
        shards,
        teacher,
    )
    return plan_for_case(case)
