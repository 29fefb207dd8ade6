"""The problems of calls: checked, gathered, cast and flattened arguments. `functional` and `distillation` call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core.numbers import check_bool
from flce.core.options import DEFAULT_OPTIONS, ChunkOptions
from flce.core.problem import (
    CrossEntropyProblem,
    LinearCrossEntropyProblem,
    LinearTerm,
    LogprobSpec,
    LossSpec,
    Needs,
    accumulation_dtype,
)
from flce.ops import vocabulary_parallel
from flce.ops.arguments import (
    FLOATING,
    adapters_by_name,
    autocast_dtype,
    cast_bias,
    cast_operand,
    check_linear_arguments,
    check_logprob_arguments,
    check_logprob_tensors,
    check_shapes,
    check_shift,
    check_tensors,
    num_items_tensor,
    refuse_class_weight_gradient,
    refuse_shape,
    refuse_transforms,
    shift_target,
)
from flce.ops.gradient_accumulation import check_parameters
from flce.ops.vocabulary_parallel import NOT_DIVIDED, DivisionArguments, divide_head


def make_linear_problem(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    spec: LossSpec,
    *,
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    shift: int,
    options: ChunkOptions | None,
    division: DivisionArguments,
) -> LinearCrossEntropyProblem:
    """Return the problem of a call of `flce.fused_linear_cross_entropy`, which documents the arguments and the errors.
    `spec`: the checked scalar arguments; a `LogprobSpec` for the arguments of `flce.linear_logprobs`."""
    operands = {"input": input, "linear_weight": linear_weight}
    if type(adapters) is not tuple or adapters:
        operands |= adapters_by_name(adapters)
    check_linear_arguments(operands, target, linear_bias, weight, token_weight, options, spec)
    if type(shift) is not int or shift:
        shift = check_shift(shift, target)
    if options is not None and options.gradient_accumulation_fusion and not torch.compiler.is_compiling():
        check_parameters([*operands.items()][1::2])
    shard, num_class_weights = None, len(linear_weight)
    if division != NOT_DIVIDED:
        operands, linear_bias, shard = divide_head(operands, linear_bias, division)
        # Class weights cover the shard or all classes.
        if weight is None or weight.shape != (num_class_weights,):
            num_class_weights = shard.vocab_size
    if autocast_dtype(input.device.type) is not None:
        operands = {name: cast_operand(tensor) for name, tensor in operands.items()}
    check_shapes(operands, target, linear_bias, weight, token_weight, num_class_weights)
    grad, tensors = torch.is_grad_enabled(), tuple(operands.values())
    inputs, weights = tensors[::2], tensors[1::2]
    if linear_bias is not None:
        linear_bias = cast_bias(linear_bias, inputs[0]).contiguous()
    target, weight, token_weight, num_items = _as_vectors(
        target, weight, token_weight, num_items, shift, spec, inputs[0]
    )
    # Two-dimensional inputs need no view: a view costs host time, and twice as much if it is differentiated.
    rows = [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in inputs]
    return LinearCrossEntropyProblem(
        tuple([LinearTerm(x, w) for x, w in zip(rows, weights, strict=True)]),
        target,
        linear_bias,
        weight,
        token_weight,
        num_items,
        spec,
        Needs(
            tuple([grad and x.requires_grad for x in inputs]),
            tuple([grad and w.requires_grad for w in weights]),
            grad and linear_bias is not None and linear_bias.requires_grad,
        ),
        options or DEFAULT_OPTIONS,
        shift,
        grad and token_weight is not None and token_weight.requires_grad,
        shard=shard,
        is_traced=torch.compiler.is_compiling(),
    )


def _as_vectors(
    target: Tensor, weight: Tensor | None, token_weight: Tensor | None, num_items: int | Tensor | None, shift: int,
    spec: LossSpec, like: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the shifted target, the class weights, the token weights and `num_items` as backends require them. Vectors
    are short, so a copy is cheap. `like`: a tensor of the call's dtype and device."""
    divisor = None if num_items is None else num_items_tensor(num_items, spec, like)
    target = target.to(torch.int64)
    if shift:
        target = shift_target(target, shift, spec.ignore_index)
    if weight is not None:
        weight = weight.detach().to(accumulation_dtype(like.dtype)).contiguous()
    if token_weight is not None:
        token_weight = token_weight.reshape(-1).to(accumulation_dtype(like.dtype)).contiguous()
    return target.reshape(-1).contiguous(), weight, token_weight, divisor


def make_logprob_problem(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    *,
    candidates: Tensor | None,
    mask: Tensor | None = None,
    top_k: int = 0,
    outputs: Sequence[str],
    linear_bias: Tensor | None,
    adapters: Sequence[tuple[Tensor, Tensor]],
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    ignore_index: int | None,
    shift: int,
    options: ChunkOptions | None,
    division: DivisionArguments,
) -> LinearCrossEntropyProblem:
    """Return the problem of a call of `flce.linear_logprobs`, which documents the arguments and the errors."""
    row_temperature = temperature if isinstance(temperature, Tensor) and temperature.dim() > 0 else None
    check_logprob_tensors(input, linear_weight, target, candidates, mask, row_temperature, division)
    tokens = division.tokens(input)
    if candidates is not None:
        size = candidates.shape[-1]
        candidates = candidates.to(torch.int64).expand(*tokens, size).reshape(math.prod(tokens), size)
    spec = LogprobSpec(
        ignore_index=None if target is None else ignore_index,  # type: ignore[arg-type]  # converted by the spec
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature if row_temperature is None else 1.0,  # type: ignore[arg-type]  # converted by the spec
        stats=outputs,  # type: ignore[arg-type]
        candidates=0 if candidates is None else candidates.shape[-1],
        top_k=top_k,
        row_temperature=row_temperature is not None,
    )
    # Without a target no result depends on the class, and no position is ignored.
    classes = torch.zeros(tokens, dtype=torch.int64, device=input.device) if target is None else target
    if mask is not None:
        classes = classes.to(torch.int64).masked_fill(~mask, spec.ignore_index)
    problem = make_linear_problem(
        input, linear_weight, classes, spec, linear_bias=linear_bias, adapters=adapters, shift=shift, options=options,
        division=division,
    )  # fmt: skip
    of = "linear_weight" if division == NOT_DIVIDED else "all processes"
    check_logprob_arguments(target, shift, options, spec, problem.vocab_size, of)
    if row_temperature is not None:
        row_temperature = 1.0 / row_temperature.to(problem.accum).reshape(-1)
    return replace(problem, candidates=candidates, inverse_temperature=row_temperature)


def make_logits_problem(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: int | Tensor | None,
    shift: int,
    inplace: bool,
    process_group: dist.ProcessGroup | None,
    vocab_size: int | None,
    spec: LossSpec,
) -> CrossEntropyProblem:
    """Return the problem of a call of `flce.cross_entropy`, which documents the arguments and the errors. `spec`: the
    checked scalar arguments. For a DTensor the problem has the local tensor."""
    tensors = {"logits": logits, "target": target, "weight": weight, "token_weight": token_weight}
    check_tensors(tensors, dtensors=True)
    shift = check_shift(shift, target)
    check_bool("inplace", inplace)
    if logits.dim() < 1:
        raise ValueError("logits must have shape (..., V), got a 0-d tensor")
    if logits.dtype not in FLOATING:
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if vocabulary_parallel.is_dtensor(logits):
        if process_group is not None or vocab_size is not None:
            raise ValueError(
                "process_group and vocab_size need plain logits, got a DTensor: omit them, or give logits.to_local()"
            )
        logits, process_group, vocab_size = vocabulary_parallel.local_logits(logits)
    target, weight, token_weight, num_items = (
        vocabulary_parallel.local_tensor(value, name)
        for name, value in {**tensors, "num_items": num_items}.items()
        if name != "logits"
    )
    shard, tokens, total_vocab_size = None, logits.shape[:-1], logits.shape[-1]
    if process_group is not None:
        shard = vocabulary_parallel.shard_from_group(logits.shape[-1], vocab_size, process_group)
        total_vocab_size = shard.vocab_size
    elif vocab_size is not None:
        vocabulary_parallel.refuse_without_group(vocab_size=vocab_size)
    if total_vocab_size == 0:
        raise ValueError(f"logits must have V > 0 classes, got shape {tuple(logits.shape)}")
    for name, value, shape in (
        ("target", target, tokens),
        ("weight", weight, (total_vocab_size,)),
        ("token_weight", token_weight, tokens),
    ):
        if value is not None and value.shape != shape:
            refuse_shape(name, value, shape, {"logits": logits})
    refuse_transforms("cross_entropy", "torch.nn.functional.cross_entropy", (logits, token_weight))
    if weight is not None:
        refuse_class_weight_gradient(weight)
    target, weight, token_weight, num_items = _as_vectors(target, weight, token_weight, num_items, shift, spec, logits)
    needs_token_weight = torch.is_grad_enabled() and token_weight is not None and token_weight.requires_grad
    return CrossEntropyProblem(logits, target, weight, token_weight, num_items, spec, shard, shift, needs_token_weight)
