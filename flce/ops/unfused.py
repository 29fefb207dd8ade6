"""Losses that PyTorch's operators compute, with the logits, and several tensors of their size, in memory.

`functional` calls this module where fused kernels save nothing: for class-probability targets, which are as large as
the logits, and for heads (V, d_1, ..., d_K, H), whose softmax runs over a strided dimension. Logits are at least
float32: half precision is cast before the product, which copies the head. Differentiable any number of times.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.core.problem import CrossEntropyProblem, LinearCrossEntropyOutput, LossSpec, accumulation_dtype
from flce.engine.vectors import check_num_items, check_targets
from flce.ops.arguments import LinearArguments


def linear_cross_entropy(args: LinearArguments, spec: LossSpec) -> Tensor | LinearCrossEntropyOutput:
    """Compute `flce.fused_linear_cross_entropy`."""
    input, linear_weight, target = args.input, args.linear_weight, args.target
    vocab_size, *inner = linear_weight.shape[:-1]
    leading = tuple(input.shape[:-1])

    # One row of logits per token: (T, V) with T = prod(leading) * prod(inner). They are not rounded: PyTorch has no
    # product of half precision with a float32 result that can be differentiated.
    wide = accumulation_dtype(input.dtype)
    input, linear_weight = input.to(wide), linear_weight.to(wide)
    has_autocast = torch.amp.is_autocast_available(input.device.type)
    with torch.autocast(input.device.type, enabled=False) if has_autocast else contextlib.nullcontext():
        logits = F.linear(input.reshape(-1, input.shape[-1]), linear_weight.reshape(-1, input.shape[-1]))
        for a, b in args.adapters:
            logits = logits + F.linear(a.reshape(-1, a.shape[-1]).to(wide), b.to(wide))
    if args.linear_bias is not None:
        logits = logits + args.linear_bias.reshape(-1)

    def classes_last(t: Tensor) -> Tensor:  # (leading, V, inner) as (T, V)
        return t.reshape(math.prod(leading), vocab_size, math.prod(inner)).movedim(1, 2).reshape(-1, vocab_size)

    y = classes_last(target) if target.is_floating_point() else target.reshape(-1)
    p = CrossEntropyProblem(classes_last(logits), y, args.weight, args.token_weight, args.num_items, spec, None)
    return _loss_of_rows(p, (*leading, *inner))


def cross_entropy(p: CrossEntropyProblem) -> Tensor | LinearCrossEntropyOutput:
    """Compute `flce.cross_entropy` for class probabilities."""
    logits, y = (t.reshape(-1, p.vocab_size) for t in (p.logits, p.target))
    return _loss_of_rows(replace(p, logits=logits, target=y), tuple(p.logits.shape[:-1]))


def _loss_of_rows(p: CrossEntropyProblem, tokens: tuple[int, ...]) -> Tensor | LinearCrossEntropyOutput:
    """Return the loss, of shape `tokens` if it is not reduced, for logits (T, V) and T targets: indices, or (T, V)
    probabilities."""
    y, weight, token_weight, num_items, spec = p.target, p.class_weight, p.token_weight, p.num_items, p.spec
    if not torch.compiler.is_compiling():
        if not y.is_floating_point():
            check_targets(p)
        elif num_items is not None and num_items.device.type == "cpu":
            check_num_items(num_items)
    z = spec.transform(p.logits.to(accumulation_dtype(p.dtype)))
    if y.is_floating_point():
        y = y.to(z.dtype)
        valid = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
        count = valid.sum()
        denominator = count.to(z.dtype)  # as torch: probabilities are averaged over the tokens
    else:
        y = y.to(torch.int64)
        valid = y != spec.ignore_index
        count = valid.sum()
        class_weight = None if weight is None else weight[y.clamp(0, p.vocab_size - 1)].to(z.dtype)
        denominator = count if class_weight is None else torch.where(valid, class_weight, 0.0).sum()
    losses = F.cross_entropy(
        z,
        y,
        weight=None if weight is None else weight.to(z.dtype),
        reduction="none",
        ignore_index=spec.ignore_index,
        label_smoothing=spec.label_smoothing,
    )
    lse = z.logsumexp(-1) if spec.z_loss or "lse" in spec.stats else None
    z_losses = torch.where(valid, spec.z_loss * lse.square(), 0.0) if lse is not None and spec.z_loss else None
    if token_weight is not None:
        # A weight of an ignored token must have no effect, also if it is NaN.
        weights = torch.where(valid, token_weight.reshape(-1).to(losses.dtype), 0.0)
        losses = losses * weights
        z_losses = None if z_losses is None else z_losses * weights

    def reduce(values: Tensor, denominator: Tensor) -> Tensor:
        if spec.reduction == "none":
            return values.reshape(tokens)
        if spec.reduction == "mean":
            return values.sum() / denominator
        return values.sum() if num_items is None else values.sum() * num_items.to(z.dtype).reciprocal()

    loss = reduce(losses, denominator)
    z_loss = None if z_losses is None else reduce(z_losses, count)
    loss = loss if z_loss is None else loss + z_loss
    if not spec.stats:
        return loss
    with torch.no_grad():
        stats = _stats(z.detach(), None if lse is None else lse.detach(), y, valid, spec)
    return LinearCrossEntropyOutput(
        loss,
        None if z_loss is None else z_loss.detach(),
        **{name: value.reshape(tokens) for name, value in stats.items() if name in spec.stats},
    )


def _stats(z: Tensor, lse: Tensor | None, y: Tensor, valid: Tensor, spec: LossSpec) -> dict[str, Tensor]:
    """Return the requested statistics of each row by name, and the intermediate results that they need."""
    stats = {}
    if lse is not None:
        stats["lse"] = torch.where(valid, lse, 0.0)
    if {"logprob", "entropy"} & set(spec.stats):
        log_softmax = z.log_softmax(-1)
        if "logprob" in spec.stats:
            picked = log_softmax.gather(1, y.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
            stats["logprob"] = torch.where(valid, picked, 0.0)
        if "entropy" in spec.stats:
            stats["entropy"] = torch.where(valid, torch.special.entr(log_softmax.exp()).sum(-1), 0.0)
    if {"argmax", "correct"} & set(spec.stats):
        stats["argmax"] = torch.where(valid, z.argmax(-1), -1)
        if "correct" in spec.stats:
            stats["correct"] = (stats["argmax"] == y) & valid
    return stats
