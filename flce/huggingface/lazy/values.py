"""Operations with results without logits: cross entropy, argmax, logsumexp, gather; called by `tables`, `indexing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from flce.core.problem import MAX_ENTRIES, Reduction, accumulation_dtype
from flce.huggingface.head_call import version_of
from flce.huggingface.lazy import divergences
from flce.huggingface.lazy.elementwise import to_autocast_dtype, to_dtype
from flce.huggingface.lazy.normal_form import Op, require_lazy, to_normal_form
from flce.huggingface.lazy.state import LazyState, is_class_dim
from flce.ops.arguments import autocast_result_dtype


def class_values(state: LazyState, index: Tensor) -> Tensor:
    """Return the logits ``(..., K)`` of some classes, or their log-probabilities or probabilities, as the state has.

    ``index``: classes in [0, V), ``(..., K)`` for each token, or ``(K,)`` for all tokens.
    """
    if state.normal_form.form == "logits":
        return state.as_copy().of_classes(index)
    require_lazy(not state.normal_form.form.startswith("weighted"))
    first, dtype = next((i, value) for i, (name, value) in enumerate(state.ops) if name in _OPS_AFTER_LOGPROBS)
    count, normal_form = index.shape[-1], to_normal_form(state.ops[: first + 1])
    require_lazy(count <= MAX_ENTRIES)
    logits = replace(state, ops=state.ops[:first], normal_form=normal_form, dtype=dtype)
    if count == 1 and index.dim() == state.ndim:
        values = logits.token_results("logprob", target=index.squeeze(-1)).logprob.unsqueeze(-1)
    else:
        values = logits.token_results(candidates=index).candidate_logprob
    # The values are normalised over all classes already. `+ 0.0` turns a log-probability of -0.0 into 0.0, as in stock.
    values = (values + 0.0).to(state.device, logits.dtype)
    remaining = [op for recorded in state.ops[first:] for op in _OPS_AFTER_LOGPROBS.get(recorded[0], (recorded,))]
    return state.apply_ops(values, tuple(remaining))


# Recorded operations, and the operations that replace them if the values are log-probabilities already. Autograd saves
# the result of `exp`: see `LazyState.as_copy`.
_EXP: tuple[Op, ...] = (("exp", None), ("clone", None))
_OPS_AFTER_LOGPROBS = {"log_softmax": (), "softmax": _EXP, "exp": _EXP}


def argmax(state: LazyState, dim: int | None = None, keepdim: bool = False) -> Any:
    require_lazy(is_class_dim(state, dim) and not state.normal_form.is_negative)
    require_lazy(not state.normal_form.form.startswith("weighted"))
    return _with_kept_dim(state.argmax(), keepdim)


def logsumexp(state: LazyState, dim: Any, keepdim: bool = False) -> Any:
    require_lazy(is_class_dim(state, dim) and state.normal_form.form == "logits")
    lse = logsumexp_of(state)
    if lse.is_cpu and not torch.compiler.is_compiling():
        require_lazy(not bool(lse.isnan().any()))  # stock's logsumexp of infinite logits is infinite
    result = _with_kept_dim(lse.to(to_autocast_dtype(state).dtype), keepdim)
    state.cached_results.setdefault("logsumexp", []).append((result, version_of(result)))
    return result


def logsumexp_of(state: LazyState) -> Tensor:
    lse, _ = state.lse_and_entropy()
    return (lse - state.normalizer()).to(state.device)


def equals_itself(state: LazyState, other: Any) -> Any:
    """Return the result of ``x == x``, with which ``torch.distributions`` validates its normalised logits.

    The result is an expanded ``True``. If a logit is NaN, the operation has no lazy form.
    """
    require_lazy(other is state and state.normal_form.has_normalizer and not torch.compiler.is_compiling())
    require_lazy(state.normal_form.form == "logits" and not bool(logsumexp_of(state).isnan().any()))
    return torch.ones((), dtype=torch.bool, device=state.device).expand(state.shape)


def gather(state: LazyState, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Gather the values of some classes of each token, without computing other classes' logits in memory."""
    require_lazy(is_class_dim(state, dim) and isinstance(index, Tensor) and not sparse_grad)
    require_lazy((index.dtype, index.device, index.dim()) == (torch.int64, state.device, state.ndim))
    count = index.shape[-1]
    require_lazy(index.shape[:-1] == state.shape[:-1])
    # Logits: the rows of the head are copied for each token. With many classes the copies are larger than all logits.
    is_small = count <= 1 or count * state.weight.shape[1] < state.vocab_size
    require_lazy(is_small or state.normal_form.form != "logits")
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        # PyTorch raises an error for such an index, whereas flce ignores tokens with -100.
        require_lazy(not bool(((index < 0) | (index >= state.vocab_size)).any()))
    return _not_a_view(class_values(state, index).contiguous())


def reduction(
    state: LazyState, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, is_mean: bool
) -> Any:
    """Compute the mean or the sum over the vocabulary. A ``dim`` of None means all dimensions."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    is_total = dim is None and not keepdim and (is_mean or state.teacher is not None)
    require_lazy(is_total or is_class_dim(state, dim))
    if dtype is not None or not is_mean:
        state = to_autocast_dtype(state) if dtype is None else to_dtype(state, dtype)
    if state.teacher is not None:
        value = divergences.sum_of_terms(state)
    else:
        value = _mean_of_tokens(state) if is_mean else _sum_of_tokens(state)
        value = 0.0 - value if state.normal_form.is_negative else value  # a sum that is zero is +0.0 in stock
        value = value.to(state.device, state.dtype)
    if is_total:
        return value.mean() if is_mean else value.sum()
    return _with_kept_dim(value, keepdim)


def _sum_of_tokens(state: LazyState) -> Tensor:
    """Return the sums of log-probabilities, or of values that are weighted by probabilities, without their sign."""
    form = state.normal_form.form
    if form == "log-probabilities":
        return _mean_of_tokens(state) * state.vocab_size
    require_lazy(form in ("weighted logits", "weighted log-probabilities"))
    if not state.normal_form.is_clamped:
        state.require_finite_bias()
    lse, entropy = state.lse_and_entropy()
    return 0.0 - entropy if form == "weighted log-probabilities" else lse - entropy - state.normalizer()


def _mean_of_tokens(state: LazyState) -> Tensor:
    """Return the means of logits, or of log-probabilities without their sign."""
    normal_form = state.normal_form
    require_lazy(normal_form.form in ("logits", "log-probabilities") and not normal_form.is_clamped)
    if normal_form.form == "log-probabilities":  # the negative cross entropy with a uniform distribution
        require_lazy(not normal_form.has_divisor)
        # Any target has the same result, except a target whose logit is -inf. The argmax never is.
        with state.gathered_weights():
            return 0.0 - state.cross_entropy(state.argmax(), reduction="none", label_smoothing=1.0, is_loss=False)
    if normal_form.softcap is not None:
        require_lazy(not (state.requires_grad and torch.is_grad_enabled()))
        values: Tensor = state.token_results("mean_logit").mean_logit
        return values - state.normalizer()
    require_lazy(state.division is None)

    wide = accumulation_dtype(state.weight.dtype)
    mean: Callable[[Tensor], Tensor] = lambda x: (x.sum(0, keepdim=True, dtype=wide) / len(x)).to(x.dtype)  # noqa: E731
    state.count_result(is_loss=False)
    with state.gathered_weights():
        terms = [term.map_tensors(mean, "weight", "bias") for term in state.resolved_terms]
    return state.with_terms(terms).as_copy().logits().sum(-1)  # the sum over one class is no view


def _with_kept_dim(values: Tensor, keepdim: bool) -> Tensor:
    return _not_a_view(values.unsqueeze(-1)) if keepdim else values


def _not_a_view(values: Tensor) -> Tensor:
    """Return a copy if gradients are disabled: autograd forbids later writes with gradients to such a view."""
    return values if torch.is_grad_enabled() else values.clone()


def cross_entropy(
    state: LazyState, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Compute ``torch.nn.functional.cross_entropy``. Invalid arguments run stock code, which raises stock's errors."""
    require_lazy(size_average is None and reduce is None)
    normal_form = state.normal_form
    if isinstance(target, LazyState):
        require_lazy(normal_form.has_loss and state.ndim <= 2 and weight is None and reduction in get_args(Reduction))
        require_lazy(label_smoothing == 0.0 and isinstance(ignore_index, int) and ignore_index < 0)
        return divergences.cross_entropy(state, target, reduction)
    require_lazy(
        (not isinstance(label_smoothing, Tensor) and 0.0 <= label_smoothing <= 1.0 and ignore_index is not None)
        and isinstance(target, Tensor)
        and (weight is None or isinstance(weight, Tensor))
        and (weight is None or (weight.shape == (state.vocab_size,) and not weight.requires_grad))
        and (weight is None or weight.dtype in (state.dtype, autocast_result_dtype(state.dtype, state.device.type)))
        and target.device == state.device == (target if weight is None else weight).device
        # Class probabilities are as large as the logits, so a loss without logits would save no memory.
        and target.dtype == torch.int64
        and target.shape == state.hidden.shape[:-1]
        and (target.dim() <= 1 or state.class_dim == 1)  # with more dimensions, stock's classes are in the second one
        and normal_form.has_loss
    )
    return state.cross_entropy(
        target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def nll_loss(
    state: LazyState, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Compute ``torch.nn.functional.nll_loss`` of log-probabilities."""
    require_lazy(state.normal_form.form == "log-probabilities" and isinstance(target, Tensor))
    return cross_entropy(state, target, weight, size_average, ignore_index, reduce, reduction)


def flce_cross_entropy(
    state: LazyState, target: Tensor, weight: Tensor | None = None, *, softcap: float | None = None,
    logit_scale: float = 1.0, inplace: bool = False, process_group: Any = None, vocab_size: int | None = None,
    **spec: Any,
) -> Any:  # fmt: skip
    """Compute :func:`flce.cross_entropy`. ``inplace`` has no effect, because no logits are in memory."""
    require_lazy(process_group is None and vocab_size is None and isinstance(target, Tensor))
    scaled = state if logit_scale == 1.0 else state.with_op("mul", logit_scale)
    if softcap is not None:
        scaled = scaled.with_op("div", softcap).with_op("tanh").with_op("mul", softcap)
    require_lazy(scaled.normal_form.has_loss and not target.is_floating_point())
    if scaled.normal_form.form == "log-probabilities":
        # The fused loss reads the logits before log_softmax. Their logsumexp is not 0, which z-loss and lse would need.
        stats = spec.get("stats")
        require_lazy(not spec.get("z_loss") and not (isinstance(stats, (tuple, list)) and "lse" in stats))
    with scaled.gathered_weights():
        output = scaled.fused_loss(target, weight, **spec)
    wide = torch.float64 if state.dtype == torch.float64 else torch.float32
    loss = output if isinstance(output, Tensor) else output.loss
    require_lazy((loss.dtype, loss.device) == (wide, state.device))
    return output
