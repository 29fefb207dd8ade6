"""Operations on logits, recorded: their normal form, which flce's functions compute, and their replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# One recorded operation, without tensors:
#   ("mul" | "div", number), ("tanh", None), ("to", dtype), ("clone", None), ("clamp", the least number)
#   ("log_softmax" | "softmax", dtype), over the vocabulary; ("exp", None), of log-probabilities
#   ("div_row" | "sub_row", place), by the vector of one number a token that the state has at that place
#   ("times", operations): the product with what these would make of the same sum
Op = tuple[str, Any]


class NoLazyFormError(Exception):
    """An operation has no lazy form: it is done to the real logits."""


def require_lazy(condition: bool) -> None:
    """Ends an operation that would be lazy only on this condition."""
    if not condition:
        raise NoLazyFormError


Form = Literal["logits", "log-probabilities", "probabilities", "weighted logits", "weighted log-probabilities"]
"""Weighted: by their probabilities, for a sum over the vocabulary."""


class NormalForm(NamedTuple):
    """``z = softcap * tanh(logit_scale * x / softcap) / divisor``, and what was made of it.

    Attributes:
        logit_scale: of x, the sum of the terms.
        softcap: None: no tanh.
        form: what was made of z.
        is_negative: minus that; of the logits themselves the sign is in `logit_scale`.
        divisor: the place of a vector of one number a token; None: none.
        normalizer: the place of the vector of logsumexps that was subtracted from the logits; None: none.
        is_clamped: no class is -inf.
    """

    logit_scale: float
    softcap: float | None
    form: Form = "logits"
    is_negative: bool = False
    divisor: int | None = None
    normalizer: int | None = None
    is_clamped: bool = False

    @property
    def is_linear(self) -> bool:
        plain = self.softcap is None and self.divisor is None and self.normalizer is None
        return plain and self.form == "logits" and not self.is_clamped

    @property
    def is_logprob(self) -> bool:
        """Whether these are log-probabilities, and not their negatives."""
        return self.form == "log-probabilities" and not self.is_negative

    @property
    def has_loss(self) -> bool:
        """Whether the loss of these is one of z, which has no divisor."""
        plain = self.divisor is None and self.normalizer is None and not self.is_clamped and not self.is_negative
        return plain and self.form in ("logits", "log-probabilities")


IDENTITY = NormalForm(1.0, None)


def to_normal_form(ops: tuple[Op, ...]) -> NormalForm | None:
    """Bring recorded operations into the normal form.

    Casts and copies are skipped: flce computes in float32 (or float64) whatever the model rounds to. So is a
    log-softmax of log-probabilities, which are normalised already.

    Returns:
        None where the operations do not fit (two tanh, a factor that is not finite).
    """
    normal_form: NormalForm | None = IDENTITY
    for name, value in ops:
        step = NORMAL_FORM_UPDATES[name].fold
        if normal_form is not None and step is not None:
            normal_form = step(normal_form, value)
    return normal_form


def _multiplied(f: NormalForm, number: Any) -> NormalForm | None:
    factor = float(number)
    if f.form != "logits":
        return f._replace(is_negative=not f.is_negative, is_clamped=False) if factor == -1.0 else None
    if not math.isfinite(factor) or f.normalizer is not None:
        return None
    cap = None if f.softcap is None else f.softcap * abs(factor)  # tanh is odd: a sign goes inside
    # A softcap of nothing leaves nothing.
    scale, cap = (0.0, None) if cap == 0.0 else (f.logit_scale * factor, cap)
    if abs(scale - 1.0) < 1e-14:  # of ``x / c * c``, by a rounding error: let the operator see that there is no scale
        scale = 1.0
    fits = math.isfinite(scale) and math.isfinite(cap or 0.0)
    return f._replace(logit_scale=scale, softcap=cap, is_clamped=False) if fits else None


def _divided(f: NormalForm, number: Any) -> NormalForm | None:
    return None if number == 0 else _multiplied(f, 1.0 / float(number))


def _tanh(f: NormalForm, _: Any) -> NormalForm | None:
    return f._replace(softcap=1.0) if f.is_linear else None


def _log_softmax(f: NormalForm, _: Any) -> NormalForm | None:
    if f.form == "logits" or f.is_logprob:
        return f._replace(form="log-probabilities", normalizer=None, is_clamped=False)
    return None


def _softmax(f: NormalForm, _: Any) -> NormalForm | None:
    normalised = _log_softmax(f, None)
    return None if normalised is None else normalised._replace(form="probabilities")


def _exp(f: NormalForm, _: Any) -> NormalForm | None:
    return f._replace(form="probabilities", is_clamped=False) if f.is_logprob else None


def _clamp(f: NormalForm, _: Any) -> NormalForm | None:
    return f._replace(is_clamped=True) if f.form in ("logits", "log-probabilities") else None


def _divided_by_row(f: NormalForm, place: int) -> NormalForm | None:
    fits = f.form == "logits" and f.divisor is None and f.normalizer is None
    return f._replace(divisor=place, is_clamped=False) if fits else None


def _normalised_by_row(f: NormalForm, place: int) -> NormalForm | None:
    fits = f.form == "logits" and f.normalizer is None
    return f._replace(normalizer=place, is_clamped=False) if fits else None


def _times(f: NormalForm, ops: tuple[Op, ...]) -> NormalForm | None:
    """Probabilities times the logits that they are of, or times the logarithms of the probabilities."""
    other = to_normal_form(ops)
    if other is None:
        return None
    p, x = (f, other) if f.form == "probabilities" else (other, f)
    if p.form != "probabilities" or p.is_negative or p[:2] != x[:2] or p.divisor != x.divisor:
        return None
    form = _WEIGHTED.get(x.form)
    return None if form is None else x._replace(form=form)


_WEIGHTED: dict[Form, Form] = {"logits": "weighted logits", "log-probabilities": "weighted log-probabilities"}


class Step(NamedTuple):
    """One operation: on the normal form, and on real logits. None: it changes no value, but for roundings."""

    fold: Callable[[NormalForm, Any], NormalForm | None] | None
    replay: Callable[[Tensor, Any], Tensor]


NORMAL_FORM_UPDATES: dict[str, Step] = {
    "mul": Step(_multiplied, torch.mul),
    "div": Step(_divided, torch.div),
    "tanh": Step(_tanh, lambda z, _: torch.tanh(z)),
    "log_softmax": Step(_log_softmax, lambda z, _: torch.log_softmax(z, -1)),
    "softmax": Step(_softmax, lambda z, _: torch.softmax(z, -1)),
    "exp": Step(_exp, lambda z, _: torch.exp(z)),
    "clamp": Step(_clamp, lambda z, least: torch.clamp(z, min=least)),
    "div_row": Step(_divided_by_row, torch.div),
    "sub_row": Step(_normalised_by_row, torch.sub),
    "times": Step(_times, torch.mul),
    "clone": Step(None, lambda z, _: z.clone()),
    "to": Step(None, Tensor.to),
}


def replay(z: Tensor, ops: tuple[Op, ...], token_vectors: Sequence[Tensor] = ()) -> Tensor:
    """Do to real logits, vocabulary last, what was recorded.

    Args:
        z: the logits.
        ops: what was recorded.
        token_vectors: ``(..., 1)``, the vectors of one number a token.
    """
    start = z
    for name, value in ops:
        other = (
            replay(start, value, token_vectors)
            if name == "times"
            else token_vectors[value]
            if name.endswith("_row")
            else value
        )
        z = NORMAL_FORM_UPDATES[name].replay(z, other)
    return z
