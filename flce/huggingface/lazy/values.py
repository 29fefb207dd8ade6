"""Losses and values that are computed without the logits: cross entropy, argmax, logsumexp, gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core import private
from flce.core.problem import MOST_ENTRIES
from flce.huggingface.lazy.elementwise import to_dtype
from flce.huggingface.lazy.fold import Op, fold, needs
from flce.huggingface.lazy.state import LazyState, dimension
from flce.huggingface.staleness import versions_of
from flce.ops.arguments import widened


def values_of(state: LazyState, index: Tensor) -> Tensor:
    """The logits of some classes, classes last; or their log-probabilities.

    Args:
        state: of the logits.
        index: in [0, V): ``(..., K)``, of the tokens' shape, or ``(K,)``.
    """
    if state.folded.form == "logits":
        return state.copied().of_classes(index)
    needs(not state.folded.form.startswith("weighted"))
    at, dtype = next((at, value) for at, (name, value) in enumerate(state.ops) if name in _NORMALISING)
    count, folded = index.shape[-1], fold(state.ops[:at])
    assert folded is not None
    logits = replace(state, ops=state.ops[:at], folded=folded, dtype=dtype)
    with logits.weights():
        if count == 1 and index.dim() == state.ndim:
            made = logits.per_token("logprob", target=index.squeeze(-1)).logprob
            assert made is not None
            values = made.unsqueeze(-1)
        elif 0 < count <= MOST_ENTRIES:
            made = logits.per_token(candidates=index).candidate_logprob
            assert made is not None
            values = made
        else:
            values = logits.of_classes(index) - logsumexp_of(logits).unsqueeze(-1)
    # They are normalised already, and not over these few classes. A log-probability of 0 is a positive zero, as
    # stock's: 1 / x tells them apart.
    values = (values + 0.0).to(state.device, logits.dtype)
    return state.replayed(
        values, tuple([op for before in state.ops[at:] for op in _NORMALISING.get(before[0], (before,))])
    )


# What is left of these where log-probabilities are known. Autograd keeps what `exp` returns: see `LazyState.copied`.
_EXP: tuple[Op, ...] = (("exp", None), ("clone", None))
_NORMALISING = {"log_softmax": (), "softmax": _EXP, "exp": _EXP}


def argmax(state: LazyState, dim: int | None = None, keepdim: bool = False) -> Any:
    folded = state.folded
    needs(dim is not None and dimension(state, dim) == state.ndim - 1 and not folded.negative)
    needs(not folded.form.startswith("weighted"))
    return _tokens(state, state.argmax(), keepdim)


def logsumexp(state: LazyState, dim: Any, keepdim: bool = False) -> Any:
    needs(isinstance(dim, int) and dimension(state, dim) == state.ndim - 1 and state.folded.form == "logits")
    lse = logsumexp_of(state)
    if lse.is_cpu and not torch.compiler.is_compiling():
        needs(not bool(lse.isnan().any()))  # of infinities, which stock's logsumexp gives back
    own = _tokens(state, lse.to(state.dtype), keepdim)
    state.known.setdefault("own", []).append((own, versions_of(own)))
    return own


def logsumexp_of(state: LazyState) -> Tensor:
    lse, _ = state.lse_and_entropy()
    return (lse - state.normalizer()).to(state.device)


def equals_itself(state: LazyState, other: Any) -> Any:
    """``x == x``, by which ``torch.distributions`` validates logits that it has normalised: True, unless one is NaN.

    The result has no memory of its own.
    """
    needs(other is state and state.folded.normalizer is not None and not torch.compiler.is_compiling())
    needs(state.folded.form == "logits" and not bool(logsumexp_of(state).isnan().any()))
    return torch.ones((), dtype=torch.bool, device=state.device).expand(state.shape)


def gather(state: LazyState, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Some classes of each token, whose logits or log-probabilities are made without the others."""
    needs(dimension(state, dim) == state.ndim - 1 and isinstance(index, Tensor) and not sparse_grad)
    needs((index.dtype, index.device, index.dim()) == (torch.int64, state.device, state.ndim))
    count = index.shape[-1]
    needs(index.shape[:-1] == state.shape[:-1])
    # Each token's rows of the head are copied for its logits: more than those, if they are many.
    few = count <= (1 if state.folded.form == "logits" else MOST_ENTRIES)
    needs(few or count * state.weight.shape[1] < state.vocab_size)
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        # Else an error that is PyTorch's to raise; -100 would mean "ignore" below.
        needs(not bool(((index < 0) | (index >= state.vocab_size)).any()))
    return _of_its_own(values_of(state, index).contiguous())


def total(state: LazyState, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum over the vocabulary of log-probabilities, or of what is weighted by probabilities."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    needs(isinstance(dim, int) and dimension(state, dim) == state.ndim - 1 and state.folded.form in _SUMS)
    state = state if dtype is None else to_dtype(state, dtype)
    value = _SUMS[state.folded.form](state)
    value = -value if state.folded.negative else value
    return _tokens(state, value.to(state.device, state.dtype), keepdim)


def _sum_of_logprobs(state: LazyState) -> Tensor:
    """The cross entropy with a uniform distribution, times -V."""
    needs(state.folded.divisor is None and not state.folded.clamped)
    # Any target would do, but for one whose logit is -inf.
    with state.weights():
        return state.cross_entropy(state.argmax(), reduction="none", label_smoothing=1.0) * -state.vocab_size


def _expected_logprob(state: LazyState) -> Tensor:
    _needs_no_infinity(state)
    _, entropy = state.lse_and_entropy()
    return -entropy


def _expected_logit(state: LazyState) -> Tensor:
    _needs_no_infinity(state)
    lse, entropy = state.lse_and_entropy()
    return lse - entropy - state.normalizer()


def _needs_no_infinity(state: LazyState) -> None:
    """Stock's product of a probability of 0 and a logarithm of -inf is NaN. A GPU does not wait for this check."""
    if state.folded.clamped or torch.compiler.is_compiling() or state.home.type != "cpu":
        return
    with state.weights():
        needs(all([term.bias is None or bool(term.bias.isfinite().all()) for term in state.whole_terms]))  # noqa: C419


_SUMS: dict[str, Callable[[LazyState], Tensor]] = {
    "log-probabilities": _sum_of_logprobs,
    "weighted log-probabilities": _expected_logprob,
    "weighted logits": _expected_logit,
}


def _tokens(state: LazyState, values: Tensor, keepdim: bool) -> Tensor:
    return _of_its_own(values.unsqueeze(-1)) if keepdim else values


def _of_its_own(values: Tensor) -> Tensor:
    """Stock's is no view: one that is made without gradients could not be written to with them."""
    return values if torch.is_grad_enabled() else values.clone()


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
    folded = state.folded
    needs(not isinstance(label_smoothing, Tensor) and 0.0 <= label_smoothing <= 1.0 and ignore_index is not None)
    needs(
        isinstance(target, Tensor)
        and (weight is None or isinstance(weight, Tensor))
        and (weight is None or (weight.shape == state.shape[-1:] and not weight.requires_grad))
        and (weight is None or weight.dtype in (state.dtype, widened(state.dtype, state.device.type)))
        and target.device == state.device == (target if weight is None else weight).device
        # Class probabilities are as large as the logits themselves: nothing is saved by doing without those.
        and target.dtype == torch.int64
        and target.shape == state.shape[:-1]
        and state.ndim <= 2  # else the second dimension are the classes
        and folded.has_loss
    )
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
    needs(state.folded.form == "log-probabilities")
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
    needs(process_group is None and vocab_size is None and isinstance(target, Tensor))
    scaled = state if logit_scale == 1.0 else state.with_op("mul", logit_scale)
    if softcap is not None:
        scaled = scaled.with_op("div", softcap).with_op("tanh").with_op("mul", softcap)
    needs(scaled.folded.has_loss and not target.is_floating_point())
    if scaled.folded.form == "log-probabilities":  # what is fused are the logits before that, whose logsumexp is not 0
        stats = spec.get("stats")
        needs(not spec.get("z_loss") and not (isinstance(stats, (tuple, list)) and "lse" in stats))
    with scaled.weights():
        output = scaled.fused(target, weight, **spec)
    wide = torch.float64 if state.dtype == torch.float64 else torch.float32
    loss = output if isinstance(output, Tensor) else output.loss
    needs((loss.dtype, loss.device) == (wide, state.device))
    return output
