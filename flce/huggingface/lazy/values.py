"""Losses and values that are computed without the logits: cross entropy, argmax, logsumexp, gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.huggingface.lazy.elementwise import to_dtype
from flce.huggingface.lazy.fold import replay
from flce.huggingface.lazy.state import LazyState, dimension


def values_of(state: LazyState, take: Callable[[LazyState], Tensor]) -> Tensor:
    """What ``take`` makes of logits, classes last. Log-probabilities are those less their logsumexp."""
    names = [name for name, _ in state.ops]
    if "log_softmax" not in names:
        return take(state.copied())
    at = names.index("log_softmax")
    logits = replace(state, ops=state.ops[:at])
    with logits.weights():
        values = (take(logits) - logsumexp_of(logits).unsqueeze(-1)).to(logits.dtype)
    # They are normalised already, and not over these few classes.
    return replay(values, tuple(op for op in state.ops[at:] if op[0] != "log_softmax"))


def argmax(state: LazyState, dim: int | None = None, keepdim: bool = False) -> Any:
    folded = state.folded
    if dim is None or dimension(state, dim) != state.class_dim or folded.factor <= 0.0:
        return NotImplemented
    (largest,) = state.statistics("argmax")
    return _tokens(state, largest, keepdim)


def logsumexp(state: LazyState, dim: Any, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or dimension(state, dim) != state.class_dim or state.folded.normalised:
        return NotImplemented
    return _tokens(state, logsumexp_of(state).to(state.dtype), keepdim)


def logsumexp_of(state: LazyState) -> Tensor:
    """Its gradient is that of ``(lse - z_k) + z_k``, a fused loss and one logit of each token: the largest."""
    with state.weights():
        lse, largest = state.statistics("lse", "argmax")
        if torch.is_grad_enabled() and state.requires_grad:
            picked = state.picked(largest.unsqueeze(-1)).squeeze(-1)
            for part in (state.cross_entropy(largest, reduction="none"), picked):
                # Nothing but a gradient: the values are rounded in other places than the sum that they make.
                lse = lse + (part - part.detach()).to(lse.dtype)
    return lse


def gather(state: LazyState, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Some classes of each token, whose logits or log-probabilities are made without the others."""
    if dimension(state, dim) != state.class_dim or not isinstance(index, Tensor) or sparse_grad:
        return NotImplemented
    if index.dtype != torch.int64 or index.device != state.device or index.dim() != state.ndim:
        return NotImplemented
    sizes = list(state.shape)
    sizes[state.class_dim] = count = index.shape[state.class_dim]
    # Each token's rows of the head are copied for it: more than its logits, if they are many.
    if list(index.shape) != sizes or (count > 1 and count * state.head.weight.shape[1] >= state.vocab_size):
        return NotImplemented
    on_cpu = index.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and bool(((index < 0) | (index >= state.vocab_size)).any()):
        return NotImplemented  # an error that is PyTorch's to raise; -100 would mean "ignore" below
    if count != 1 or not state.folded.normalised:
        index = index.movedim(state.class_dim, -1)
        values = values_of(state, lambda logits: logits.picked(index))
        if count == 1:
            return _tokens(state, values.squeeze(-1), keepdim=True)
        return values.movedim(-1, state.class_dim).contiguous()
    target = index.squeeze(state.class_dim)
    loss = state.cross_entropy(target, reduction="none")
    return _tokens(state, (loss * -state.folded.factor).to(state.dtype), keepdim=True)


def take_along_dim(state: LazyState, indices: Tensor, dim: int | None = None) -> Any:
    """``gather`` of indices that are broadcast over the tokens."""
    if dim is None or not isinstance(indices, Tensor) or indices.dim() != state.ndim:
        return NotImplemented
    sizes = [-1 if at == dimension(state, dim) else size for at, size in enumerate(state.shape)]
    if any(given not in (1, size) for given, size in zip(indices.shape, sizes, strict=True) if size != -1):
        return NotImplemented
    return gather(state, dim, indices.expand(sizes))


def total(state: LazyState, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum of log-probabilities over the vocabulary: the cross entropy with a uniform distribution, times -V."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or dimension(state, dim) != state.class_dim or not state.folded.normalised:
        return NotImplemented
    state = state if dtype is None else to_dtype(state, dtype)
    if state is NotImplemented:
        return NotImplemented
    # Any target would do, but for one whose logit is -inf.
    with state.weights():
        (target,) = state.statistics("argmax")
        loss = state.cross_entropy(target, reduction="none", label_smoothing=1.0)
    return _tokens(state, (loss * (-state.folded.factor * state.vocab_size)).to(state.dtype), keepdim)


def _tokens(state: LazyState, values: Tensor, keepdim: bool) -> Tensor:
    return values.unsqueeze(state.class_dim) if keepdim else values


def cross_entropy(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy``. What stock would reject goes to stock, for stock's own error."""
    if size_average is not None or reduce is not None:
        reduction = private.legacy_reduction(size_average, reduce)
    if not isinstance(target, Tensor) or state.folded.factor != 1.0 or state.class_dim != min(1, state.ndim - 1):
        return NotImplemented
    if target.device != state.device or getattr(weight, "device", state.device) != state.device:
        return NotImplemented
    if weight is not None and not isinstance(weight, Tensor):
        return NotImplemented
    sizes = list(state.shape)
    del sizes[state.class_dim]
    # Class probabilities are as large as the logits themselves: nothing is saved by doing without those.
    if target.dtype != torch.int64 or list(target.shape) != sizes:
        return NotImplemented
    return state.cross_entropy(
        target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def nll_loss(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """``torch.nn.functional.nll_loss`` of log-probabilities."""
    if not state.folded.normalised:
        return NotImplemented
    return cross_entropy(state, target, weight, size_average, ignore_index, reduce, reduction)


def own_cross_entropy(
    state: LazyState,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace: bool = False,
    process_group: Any = None,
    vocab_size: int | None = None,
    **spec: Any,
) -> Any:
    """:func:`flce.cross_entropy`. There is nothing that ``inplace`` could save."""
    if process_group is not None or vocab_size is not None or not isinstance(target, Tensor):
        return NotImplemented
    capped = () if softcap is None else (("div", softcap), ("tanh", None), ("mul", softcap))
    scaled = state.with_ops(*(() if logit_scale == 1.0 else (("mul", logit_scale),)), *capped)
    if scaled is NotImplemented or scaled.folded.factor != 1.0 or not scaled.vocab_last or target.is_floating_point():
        return NotImplemented
    with scaled.weights():
        output = scaled.fused(target, weight, **spec)
    wide = torch.float64 if state.dtype == torch.float64 else torch.float32
    loss = output if isinstance(output, Tensor) else output.loss
    return output if (loss.dtype, loss.device) == (wide, state.device) else NotImplemented
