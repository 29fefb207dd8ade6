"""Divergences of two models: `kl_div`, and sums of probabilities times differences of log-probabilities; called by
`tables` and `values`. The state of a difference is the student's, with the state of the other model as its teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.distillation import linear_divergence
from flce.huggingface.lazy.normal_form import require_lazy, to_normal_form
from flce.huggingface.lazy.state import LazyState
from flce.ops.arguments import autocast_operand_dtype


def subtract_logprobs(state: LazyState, other: LazyState) -> LazyState:
    """Subtract the log-probabilities of two models. The student is the model that requires a gradient."""
    forms = state.normal_form, other.normal_form
    require_lazy(forms[0].is_logprob and forms[1].is_logprob)
    require_lazy(state.division is None and other.division is None)
    require_lazy((state.shape, state.device, state.dtype) == (other.shape, other.device, other.dtype))
    student, teacher, sign = (other, state, -1.0) if other.requires_grad else (state, other, 1.0)
    require_lazy(not (teacher.requires_grad and torch.is_grad_enabled()))
    ratio = replace(student, teacher=teacher.detach()).with_op("sub_teacher")
    return ratio if sign > 0 else ratio.with_op("mul", sign)


def weigh(state: LazyState, other: LazyState) -> LazyState:
    """Multiply a difference of log-probabilities by the probabilities of one of both models."""
    ratio, weights = (state, other) if state.teacher is not None else (other, state)
    require_lazy(ratio.teacher is not None and weights.teacher is None)
    assert ratio.teacher is not None
    if weights.cached_results is ratio.cached_results:
        return ratio.with_op("times", weights.ops)
    expected = ratio.teacher.normal_form._replace(form="probabilities")
    require_lazy(weights.cached_results is ratio.teacher.cached_results and weights.normal_form == expected)
    return ratio.with_op("times_teacher")


def divergence(student: LazyState, teacher: LazyState, **spec: Any) -> Tensor:
    """Call :func:`flce.linear_divergence` for the logits of two states, which have no divisor, with gradients of the
    first. `spec`: other arguments."""

    def arguments(hidden: Tensor, weight: Tensor, target: None, **others: Any) -> dict[str, Any]:
        dtype = autocast_operand_dtype(hidden.dtype, hidden.device.type)
        return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), **others}

    def run(hidden: Tensor, weight: Tensor, target: Tensor | None, **ours: Any) -> Tensor:
        for name in ("bias", "logit_scale", "softcap"):
            spec[f"student_{name}"], spec[f"teacher_{name}"] = (
                given["linear_bias" if name == "bias" else name] for given in (ours, theirs)
            )
        values = linear_divergence(
            hidden, weight, theirs["hidden"], theirs["weight"], target=target,
            student_adapters=ours.get("adapters", ()), options=ours["options"], **spec,
        ).divergence  # fmt: skip
        assert values is not None
        return values

    require_lazy(student.division is None and teacher.division is None)
    require_lazy(len(teacher.terms) == 1 and not (student.normal_form.has_divisor or teacher.normal_form.has_divisor))
    target, options = spec.pop("target", None), spec.pop("options", student.token_options)
    student.note_values()
    with student.gathered_weights(), teacher.gathered_weights():
        theirs = teacher._call_operator(arguments, None, None)
        values: Tensor = student._call_operator(run, target, options)
    return values


def kl_div(
    state: LazyState,
    target: LazyState,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Compute ``torch.nn.functional.kl_div`` of the log-probabilities of a model and the values of another model."""
    require_lazy(size_average is None and reduce is None and isinstance(target, LazyState))
    require_lazy(reduction in ("none", "sum", "mean", "batchmean") and state.normal_form.is_logprob)
    if not log_target:
        require_lazy(target.normal_form.form == "probabilities" and target.ops[-1][0] in ("softmax", "exp"))
        *ops, (name, dtype) = target.ops
        normal_form = to_normal_form(tuple(ops))
        assert normal_form is not None
        target = replace(target, ops=tuple(ops), normal_form=normal_form)
        target = target.with_op("log_softmax", dtype) if name == "softmax" else target
    terms = weigh(target.with_op("exp"), subtract_logprobs(target, state))
    if reduction == "none":
        return terms
    total = terms_of(terms).sum()
    return total / {"sum": 1, "mean": state.shape.numel(), "batchmean": state.shape[0]}[reduction]


def terms_of(state: LazyState) -> Tensor:
    """Return the sums over the vocabulary of weighted differences, with their sign, in the dtype of the state."""
    form = state.normal_form.form
    require_lazy(state.teacher is not None and form in ("weighted log ratio", "log ratio weighted by the teacher"))
    assert state.teacher is not None
    if form == "weighted log ratio":
        value = divergence(state, state.teacher, kind="reverse_kl")
    else:  # the terms are q (s - t)
        value = -divergence(state, state.teacher, kind="forward_kl")
    return (-value if state.normal_form.is_negative else value).to(state.device, state.dtype)
