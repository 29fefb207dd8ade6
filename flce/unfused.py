"""The same losses composed from PyTorch's own operators, with the logits, and more of their size, in memory.

For what fusing gains nothing in: class-probability targets, which are as large as the logits themselves, and
K-dimensional heads, whose softmax runs over a strided dimension. Differentiable any number of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.problem import LinearCrossEntropyOutput, LossSpec, accumulation_dtype, check_shapes


def linear_cross_entropy(
    input: Tensor,  # (..., H)
    linear_weight: Tensor,  # (V, d_1, ..., d_K, H)
    target: Tensor,  # (..., d_1, ..., d_K) indices or (..., V, d_1, ..., d_K) probabilities
    linear_bias: Tensor | None,  # (V, d_1, ..., d_K)
    adapters: Sequence[tuple[Tensor, Tensor]],  # (..., r) and (V, r) each; none for K > 0
    weight: Tensor | None,  # (V,)
    token_weight: Tensor | None,  # (..., d_1, ..., d_K)
    num_items: Tensor | None,  # ()
    spec: LossSpec,
) -> Tensor | LinearCrossEntropyOutput:
    """See `flce.fused_linear_cross_entropy`.

    Raises:
        ValueError: shapes do not fit, or a statistic of the target is asked for and it is a probability.
    """
    vocab_size, *inner = linear_weight.shape[:-1]
    leading = tuple(input.shape[:-1])
    tokens = (*leading, *inner)
    probabilities = target.is_floating_point()
    expected = (*leading, vocab_size, *inner) if probabilities else tokens
    if adapters and inner:
        raise ValueError(f"adapters need a two-dimensional linear_weight, got shape {tuple(linear_weight.shape)}")
    check_shapes(
        input,
        linear_weight,
        adapters,
        ("target", target, expected),
        ("linear_bias", linear_bias, (vocab_size, *inner)),
        ("weight", weight, (vocab_size,)),
        ("token_weight", token_weight, tokens),
    )
    if probabilities:
        _check_probabilities(spec)
    else:
        _check_indices(target, vocab_size, spec.ignore_index)

    # One row of logits per token: (T, V) with T = prod(leading) * prod(inner).
    logits = F.linear(input.reshape(-1, input.shape[-1]), linear_weight.reshape(-1, input.shape[-1]))
    for a, b in adapters:
        logits = logits + F.linear(a.reshape(-1, a.shape[-1]), b)
    if linear_bias is not None:
        logits = logits + linear_bias.reshape(-1)
    rows = math.prod(leading)
    logits = logits.reshape(rows, vocab_size, math.prod(inner)).movedim(1, 2).reshape(-1, vocab_size)
    if probabilities:
        y = target.reshape(rows, vocab_size, math.prod(inner)).movedim(1, 2).reshape(-1, vocab_size)
    else:
        y = target.reshape(-1)
    return _loss_of_rows(logits, y, weight, token_weight, num_items, spec, tokens)


def cross_entropy(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (..., V) probabilities
    weight: Tensor | None,  # (V,)
    token_weight: Tensor | None,  # (...)
    num_items: Tensor | None,  # ()
    spec: LossSpec,
) -> Tensor | LinearCrossEntropyOutput:
    """See `flce.cross_entropy`; of shapes that fit.

    Raises:
        ValueError: a statistic of the target is asked for.
    """
    _check_probabilities(spec)
    vocab_size = logits.shape[-1]
    y = target.reshape(-1, vocab_size)
    tokens = tuple(logits.shape[:-1])
    return _loss_of_rows(logits.reshape(-1, vocab_size), y, weight, token_weight, num_items, spec, tokens)


def _loss_of_rows(
    logits: Tensor,  # (T, V)
    y: Tensor,  # (T,) indices or (T, V) probabilities
    weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: Tensor | None,
    spec: LossSpec,
    tokens: tuple[int, ...],  # the shape of T losses
) -> Tensor | LinearCrossEntropyOutput:
    vocab_size = logits.shape[1]
    z = _transform(logits.to(accumulation_dtype(logits.dtype)), spec)
    if y.is_floating_point():
        y = y.to(z.dtype)
        valid = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
        count = valid.sum()
        denominator = count.to(z.dtype)  # as torch: probabilities are averaged over the tokens
    else:
        y = y.to(torch.int64)
        valid = y != spec.ignore_index
        count = valid.sum()
        class_weight = None if weight is None else weight[y.clamp(0, vocab_size - 1)].to(z.dtype)
        denominator = count if class_weight is None else torch.where(valid, class_weight, 0.0).sum()
    ce = F.cross_entropy(
        z,
        y,
        weight=None if weight is None else weight.to(z.dtype),
        reduction="none",
        ignore_index=spec.ignore_index,
        label_smoothing=spec.label_smoothing,
    )
    lse = z.logsumexp(-1) if spec.z_loss or "lse" in spec.stats else None
    zl = torch.where(valid, spec.z_loss * lse.square(), 0.0) if lse is not None and spec.z_loss else None
    if token_weight is not None:
        ce = ce * token_weight.reshape(-1).detach()
        zl = None if zl is None else zl * token_weight.reshape(-1).detach()
    if spec.reduction == "none":
        loss = ce.reshape(tokens)
        z_loss = None if zl is None else zl.reshape(tokens)
    elif spec.reduction == "mean":
        loss = ce.sum() / denominator
        z_loss = None if zl is None else zl.sum() / count
    else:
        scale = 1.0 if num_items is None else num_items.to(z.dtype).reciprocal()
        loss = ce.sum() * scale
        z_loss = None if zl is None else zl.sum() * scale
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


def _transform(a: Tensor, spec: LossSpec) -> Tensor:
    z = a * spec.logit_scale
    if spec.softcap is not None:
        z = spec.softcap * torch.tanh(z / spec.softcap)
    return z / spec.temperature


def _stats(z: Tensor, lse: Tensor | None, y: Tensor, valid: Tensor, spec: LossSpec) -> dict[str, Tensor]:
    """By name, those of each row that are asked for, and what they need."""
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


def _check_probabilities(spec: LossSpec) -> None:
    """ValueError for what is defined for class indices only."""
    if {"logprob", "correct"} & set(spec.stats):
        raise ValueError("stats 'logprob' and 'correct' need class-index targets, got class probabilities")
    if spec.ignore_index >= 0:
        raise ValueError(f"ignore_index={spec.ignore_index} needs class-index targets, got class probabilities")


def _check_indices(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """A target out of range is an IndexError on the CPU, as in the fused path; elsewhere PyTorch asserts."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(
            f"target {int(target[position])} at position {position} is out of range: expected "
            f"0 <= target < {vocab_size}, or ignore_index={ignore_index}"
        )
