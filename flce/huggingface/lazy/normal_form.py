"""Recorded operations on logits: their normal form, which flce's operators compute, and their replay on real logits.

`state` and `terms` call this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# One recorded operation, without tensors:
#   ("mul" | "div", number), ("tanh", None), ("to", dtype), ("clone", None), ("clamp", the least number)
#   ("log_softmax" | "softmax", dtype), over the vocabulary; ("exp", None), of log-probabilities
#   ("div_row" | "sub_row", None), by a vector of the state's `token_vectors`, which has one number for each token
#   ("times", operations): the product with the result of these operations on the same sum
#   ("sub_teacher" | "times_teacher", None), by the log-probabilities or the probabilities of the state's teacher
Op = tuple[str, Any]


class NoLazyFormError(Exception):
    """An operation has no lazy form, so the real logits are computed."""


def require_lazy(condition: bool) -> None:
    """Raise `NoLazyFormError` if ``condition`` is False."""
    if not condition:
        raise NoLazyFormError


Form = Literal[
    "logits", "log-probabilities", "probabilities", "weighted logits", "weighted log-probabilities",
    "log ratio", "weighted log ratio", "log ratio weighted by the teacher", "log-probabilities weighted by the teacher",
]  # fmt: skip
"""Weighted values are multiplied by their probabilities, for a sum over the vocabulary. A log ratio is the difference
of the log-probabilities of a student and a teacher."""


class NormalForm(NamedTuple):
    """The logits ``z = softcap * tanh(logit_scale * x / softcap) / divisor``, or a function of them.

    Attributes:
        logit_scale: the scale of x, the sum of the terms.
        softcap: the softcap; None: no tanh.
        form: the function of z.
        is_negative: whether the values have the opposite sign. The sign of the logits themselves is in `logit_scale`.
        has_divisor: whether the logits were divided by a temperature for each token.
        has_normalizer: whether the logsumexp of each token was subtracted from the logits.
        is_clamped: whether -inf was replaced by the least number of the dtype.
    """

    logit_scale: float
    softcap: float | None
    form: Form = "logits"
    is_negative: bool = False
    has_divisor: bool = False
    has_normalizer: bool = False
    is_clamped: bool = False

    @property
    def is_linear(self) -> bool:
        return self == NormalForm(self.logit_scale, None)

    @property
    def is_logprob(self) -> bool:
        """True for log-probabilities, but not for their negatives."""
        return self.form == "log-probabilities" and not self.is_negative

    @property
    def has_loss(self) -> bool:
        """True if the cross-entropy of the values is the cross-entropy of z, and z has no divisor."""
        plain_forms = [NormalForm(*self[:2]), NormalForm(*self[:2], "log-probabilities")]
        return self in plain_forms


IDENTITY = NormalForm(1.0, None)


def to_normal_form(ops: tuple[Op, ...]) -> NormalForm:
    """Return the normal form of recorded operations. Raise NoLazyFormError if they have none (two tanh, a factor of
    infinity).

    Casts and copies are skipped, because flce computes in float32 (or float64) in any case. A log-softmax of
    log-probabilities is skipped, because they are normalised already.
    """
    normal_form = IDENTITY
    for name, value in ops:
        normal_form = NORMAL_FORM_UPDATES[name].fold(normal_form, value)
    return normal_form


def _unchanged(normal_form: NormalForm, _: Any) -> NormalForm:
    return normal_form


def _multiplied(normal_form: NormalForm, number: Any) -> NormalForm:
    factor = float(number)
    if normal_form.form != "logits":
        require_lazy(factor == -1.0)
        return normal_form._replace(is_negative=not normal_form.is_negative, is_clamped=False)
    # tanh is odd, so `scale` has the sign.
    cap = None if normal_form.softcap is None else normal_form.softcap * abs(factor)
    scale, cap = (0.0, None) if cap == 0.0 else (normal_form.logit_scale * factor, cap)
    if abs(scale - 1.0) < 1e-14:  # ``x / c * c`` with a rounding error: the operator is faster without a scale
        scale = 1.0
    if normal_form.has_normalizer or not (math.isfinite(scale) and math.isfinite(cap or 0.0)):
        raise NoLazyFormError
    return normal_form._replace(logit_scale=scale, softcap=cap, is_clamped=False)


def _divided(normal_form: NormalForm, number: Any) -> NormalForm:
    require_lazy(number != 0)
    return _multiplied(normal_form, 1.0 / float(number))


def _tanh(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.is_linear)
    return normal_form._replace(softcap=1.0)


def _log_softmax(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.form == "logits" or normal_form.is_logprob)
    return normal_form._replace(form="log-probabilities", has_normalizer=False, is_clamped=False)


def _softmax(normal_form: NormalForm, _: Any) -> NormalForm:
    return _log_softmax(normal_form, None)._replace(form="probabilities")


def _exp(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.is_logprob)
    return normal_form._replace(form="probabilities", is_clamped=False)


def _clamp(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.form in ("logits", "log-probabilities"))
    return normal_form._replace(is_clamped=True)


def _divided_by_row(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.form == "logits" and not normal_form.has_divisor and not normal_form.has_normalizer)
    return normal_form._replace(has_divisor=True, is_clamped=False)


def _normalised_by_row(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.form == "logits" and not normal_form.has_normalizer)
    return normal_form._replace(has_normalizer=True, is_clamped=False)


def _times(normal_form: NormalForm, ops: tuple[Op, ...]) -> NormalForm:
    """Multiply probabilities by their logits, or by their logarithms."""
    other = to_normal_form(ops)
    weights, values = (normal_form, other) if normal_form.form == "probabilities" else (other, normal_form)
    is_same_z = weights[:2] == values[:2] and weights.has_divisor == values.has_divisor
    require_lazy(weights.form == "probabilities" and not weights.is_negative and is_same_z)
    require_lazy(values.form in _WEIGHTED)
    return values._replace(form=_WEIGHTED[values.form])


def _times_teacher(normal_form: NormalForm, _: Any) -> NormalForm:
    require_lazy(normal_form.form in _BY_TEACHER)
    return normal_form._replace(form=_BY_TEACHER[normal_form.form])


_WEIGHTED: dict[Form, Form] = {
    "logits": "weighted logits", "log-probabilities": "weighted log-probabilities", "log ratio": "weighted log ratio",
}  # fmt: skip
_BY_TEACHER: dict[Form, Form] = {
    "log ratio": "log ratio weighted by the teacher", "log-probabilities": "log-probabilities weighted by the teacher",
}  # fmt: skip


class Update(NamedTuple):
    """An operation on the normal form, which raises NoLazyFormError for a form without it, and on real logits."""

    fold: Callable[[NormalForm, Any], NormalForm]
    replay: Callable[[Tensor, Any], Tensor]


NORMAL_FORM_UPDATES: dict[str, Update] = {
    "mul": Update(_multiplied, torch.mul),
    "div": Update(_divided, torch.div),
    "tanh": Update(_tanh, lambda z, _: torch.tanh(z)),
    "log_softmax": Update(_log_softmax, lambda z, _: torch.log_softmax(z, -1)),
    "softmax": Update(_softmax, lambda z, _: torch.softmax(z, -1)),
    "exp": Update(_exp, lambda z, _: torch.exp(z)),
    "clamp": Update(_clamp, lambda z, least: torch.clamp(z, min=least)),
    "div_row": Update(_divided_by_row, torch.div),
    "sub_row": Update(_normalised_by_row, torch.sub),
    "times": Update(_times, torch.mul),
    "sub_teacher": Update(lambda form, _: form._replace(form="log ratio"), torch.sub),
    "times_teacher": Update(_times_teacher, lambda z, teacher: z * teacher.exp()),
    "clone": Update(_unchanged, lambda z, _: z.clone()),
    "to": Update(_unchanged, Tensor.to),
}


def replay(z: Tensor, ops: tuple[Op, ...], token_vectors: Mapping[str, Tensor] | None = None) -> Tensor:
    """Apply recorded operations to real logits. ``token_vectors``: the vector of each operation that has one."""
    token_vectors, start = token_vectors or {}, z
    for name, value in ops:
        other = replay(start, value, token_vectors) if name == "times" else token_vectors.get(name, value)
        z = NORMAL_FORM_UPDATES[name].replay(z, other)
    return z
