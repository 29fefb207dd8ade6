"""Products of lazy logits, and divergences of two models: `kl_div`, `cross_entropy`, sums of products; called by
`tables`, `elementwise` and `values`. A state of two models is the student's, with the other model as its teacher."""

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
    student, teacher, sign = (other, state, -1.0) if other.requires_grad else (state, other, 1.0)
    ratio = _with_teacher(student, teacher).with_op("sub_teacher")
    return ratio if sign > 0 else ratio.with_op("mul", sign)


def _with_teacher(student: LazyState, teacher: LazyState) -> LazyState:
    """Return the state of the student with log-probabilities of a teacher, which gets no gradient."""
    require_lazy(not (teacher.requires_grad and torch.is_grad_enabled()))
    require_lazy((student.shape, student.device, student.dtype) == (teacher.shape, teacher.device, teacher.dtype))
    require_lazy(student.class_dim == teacher.class_dim == -1 and student.division is teacher.division is None)
    return replace(student, teacher=teacher.detach())


def _logarithm(state: LazyState) -> LazyState:
    """Return the log-probabilities whose exponentials the state has."""
    ops = [("log_softmax", value) if name == "softmax" else (name, value) for name, value in state.ops if name != "exp"]
    require_lazy(state.normal_form.form == "probabilities" and not state.normal_form.is_negative)
    return replace(state, ops=tuple(ops), normal_form=state.normal_form._replace(form="log-probabilities"))


def multiply(state: LazyState, other: LazyState) -> LazyState:
    """Multiply probabilities by a function of the same logits, or the probabilities of a teacher by log-probabilities
    of a student or by their difference from the teacher's."""
    dtype = torch.promote_types(state.dtype, other.dtype)
    if _have_same_logits(state, other):
        state, other = (other, state) if other.teacher is not None else (state, other)
        vectors = {**state.token_vectors, **other.token_vectors}
        product = replace(state, token_vectors=vectors, dtype=dtype).with_op("times", other.ops)
    else:
        values, weights = (state, other) if other.normal_form.form == "probabilities" else (other, state)
        teacher = _logarithm(weights)
        values = _with_teacher(values, teacher) if values.teacher is None else values
        assert values.teacher is not None
        require_lazy(_have_same_logits(weights, values.teacher) and dtype == values.dtype)
        require_lazy(teacher.normal_form == values.teacher.normal_form)
        product = values.with_op("times_teacher")
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
    require_lazy(student.division is None and teacher.division is None)
    require_lazy(not (student.normal_form.has_divisor or teacher.normal_form.has_divisor))
    require_lazy(student.autocast_dtype == teacher.autocast_dtype)

    def rename(given: dict[str, Any], model: str) -> None:
        """Move arguments of the head of one of both models to `spec`."""
        for name in ("linear_bias", "logit_scale", "softcap", "adapters"):
            spec[f"{model}_{name.removeprefix('linear_')}"] = given.pop(name, ())

    def store_teacher(hidden: Tensor, weight: Tensor, target: None, **given: Any) -> None:
        rename(given, "teacher")
        spec.update(teacher=hidden, teacher_weight=weight)

    def run(hidden: Tensor, weight: Tensor, target: Tensor | None, **given: Any) -> Any:
        rename(given, "student")
        return linear_divergence(hidden, weight, target=target, **given, **spec)

    with student.gathered_weights(), teacher.gathered_weights():
        teacher._call_operator(store_teacher, None, None)
        values: Tensor = student._call_operator(run, target, options).divergence
    return values


def kl_div(
    state: LazyState, target: LazyState, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", log_target: bool = False,
) -> Any:  # fmt: skip
    """Compute ``torch.nn.functional.kl_div`` of the log-probabilities of two models."""
    require_lazy(isinstance(target, LazyState) and size_average is None and reduce is None)
    require_lazy(reduction in ("none", "sum", "mean", "batchmean"))
    state, target = _to_loss_dtype(state), _to_loss_dtype(target)
    weights, target = (target.with_op("exp"), target) if log_target else (target, _logarithm(target))
    terms = multiply(weights, subtract_logprobs(target, state))
    if reduction == "none":
        return terms
    return sum_of_terms(terms).sum() / {"sum": 1, "mean": state.shape.numel(), "batchmean": state.shape[0]}[reduction]


def cross_entropy(state: LazyState, target: LazyState, reduction: str) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of a student's logits (N, V) or (V,) with a teacher's
    probabilities."""
    state, target = _to_loss_dtype(state), _to_loss_dtype(target)
    values = 0.0 - sum_of_terms(multiply(target, state.with_op("log_softmax", state.dtype)))
    return values if reduction == "none" else values.sum() / (values.numel() if reduction == "mean" else 1)


def _to_loss_dtype(state: LazyState) -> LazyState:
    """Cast to the dtype in which autocast computes losses, on all devices."""
    return state.with_op("to", autocast_result_dtype(state.dtype, state.device.type))


def sum_of_terms(state: LazyState) -> Tensor:
    """Return the sums over the vocabulary of weighted values of two models, with their sign, in the dtype of the
    state."""
    form, teacher = state.normal_form.form, state.teacher
    require_lazy(teacher is not None and form != "log ratio")
    assert teacher is not None
    state.require_finite_bias()
    teacher.require_finite_bias()
    # The terms are p (s - t), q (s - t) or q s.
    kind, sign = ("reverse_kl", 1.0) if form == "weighted log ratio" else ("forward_kl", -1.0)
    values = divergence(state, teacher, None, state.token_options, kind=kind)
    if form == "log-probabilities weighted by the teacher":
        values = values + teacher.lse_and_entropy()[1]
    return values.to(state.device, state.dtype) * (-sign if state.normal_form.is_negative else sign)
