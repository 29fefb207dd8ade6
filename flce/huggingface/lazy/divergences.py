"""Divergences of two models: `kl_div`, and sums of probabilities times differences of log-probabilities; called by
`tables` and `values`. The state of a difference is the student's, with the state of the other model as its teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.distillation import linear_divergence
from flce.huggingface.lazy.normal_form import require_lazy
from flce.huggingface.lazy.state import LazyState
from flce.ops.arguments import autocast_result_dtype


def subtract_logprobs(state: LazyState, other: LazyState) -> LazyState:
    """Subtract the log-probabilities of two models. The student is the model that requires a gradient."""
    require_lazy(state.normal_form.is_logprob and other.normal_form.is_logprob)
    require_lazy((state.shape, state.device, state.dtype) == (other.shape, other.device, other.dtype))
    student, teacher, sign = (other, state, -1.0) if other.requires_grad else (state, other, 1.0)
    require_lazy(state.division is other.division is None and not (teacher.requires_grad and torch.is_grad_enabled()))
    ratio = replace(student, teacher=teacher.detach()).with_op("sub_teacher")
    return ratio if sign > 0 else ratio.with_op("mul", sign)


def multiply(state: LazyState, other: LazyState) -> LazyState:
    """Multiply probabilities by a function of the same logits, or by a log ratio whose teacher they are of."""
    dtype = torch.promote_types(state.dtype, other.dtype)
    if _have_same_logits(state, other):
        state, other = (other, state) if other.teacher is not None else (state, other)
        vectors = {**state.token_vectors, **other.token_vectors}
        product = replace(state, token_vectors=vectors, dtype=dtype).with_op("times", other.ops)
    else:
        ratio, weights = (state, other) if other.teacher is None else (other, state)
        require_lazy(ratio.teacher is not None and dtype == ratio.dtype)
        assert ratio.teacher is not None
        expected = ratio.teacher.normal_form._replace(form="probabilities")
        require_lazy(_have_same_logits(weights, ratio.teacher) and weights.normal_form == expected)
        product = ratio.with_op("times_teacher")
    return product if torch.is_grad_enabled() else product.detach()


def _have_same_logits(state: LazyState, other: LazyState) -> bool:
    """Return True if both are functions of the same logits, with the same gradients and the same vectors of tokens."""
    return (
        state.cached_results is other.cached_results
        and (state.calls, state.device, state.division) == (other.calls, other.device, other.division)
        and (state.differentiated_terms == other.differentiated_terms or not torch.is_grad_enabled())
        and all([other.token_vectors.get(name, vector) is vector for name, vector in state.token_vectors.items()])  # noqa: C419
    )


def divergence(
    student: LazyState, teacher: LazyState, target: Tensor | None, options: ChunkOptions | None, **spec: Any
) -> Tensor:
    """Call :func:`flce.linear_divergence` for the logits of two states, with gradients of the first."""
    require_lazy(student.division is None and teacher.division is None and len(teacher.terms) == 1)
    require_lazy(not (student.normal_form.has_divisor or teacher.normal_form.has_divisor))
    require_lazy(student.autocast_dtype == teacher.autocast_dtype)

    def rename(given: dict[str, Any], model: str) -> None:
        """Move arguments of the head of one of both models to `spec`."""
        for name in ("linear_bias", "logit_scale", "softcap"):
            spec[f"{model}_{name.removeprefix('linear_')}"] = given.pop(name)

    def store_teacher(hidden: Tensor, weight: Tensor, target: None, **given: Any) -> None:
        rename(given, "teacher")
        spec.update(teacher=hidden, teacher_weight=weight)

    def run(hidden: Tensor, weight: Tensor, target: Tensor | None, adapters: Any = (), **given: Any) -> Any:
        rename(given, "student")
        return linear_divergence(hidden, weight, target=target, student_adapters=adapters, **given, **spec)

    student.note_values()
    with student.gathered_weights(), teacher.gathered_weights():
        teacher._call_operator(store_teacher, None, None)
        values: Tensor = student._call_operator(run, target, options).divergence
    return values


def kl_div(
    state: LazyState, target: LazyState, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", log_target: bool = False,
) -> Any:  # fmt: skip
    """Compute ``torch.nn.functional.kl_div`` of the log-probabilities of two models."""
    require_lazy(isinstance(target, LazyState) and log_target and size_average is None and reduce is None)
    require_lazy(reduction in ("none", "sum", "mean", "batchmean"))
    # Autocast runs stock's divergence in float32, on all devices.
    state, target = (x.with_op("to", autocast_result_dtype(x.dtype, x.device.type)) for x in (state, target))
    terms = multiply(target.with_op("exp"), subtract_logprobs(target, state))
    if reduction == "none":
        return terms
    return sum_of_terms(terms).sum() / {"sum": 1, "mean": state.shape.numel(), "batchmean": state.shape[0]}[reduction]


def sum_of_terms(state: LazyState) -> Tensor:
    """Return the sums over the vocabulary of weighted differences, with their sign, in the dtype of the state."""
    form, teacher = state.normal_form.form, state.teacher
    require_lazy(teacher is not None and form != "log ratio")
    assert teacher is not None
    # The terms are p (s - t) or q (s - t).
    kind, sign = ("reverse_kl", 1.0) if form == "weighted log ratio" else ("forward_kl", -1.0)
    values = divergence(state, teacher, None, state.token_options, kind=kind).to(state.device, state.dtype)
    return values * (-sign if state.normal_form.is_negative else sign)
