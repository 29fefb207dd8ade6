"""Elementwise operations on logits, recorded: their normal form, which the fused loss computes, and their replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# One recorded operation: ("mul" | "div", number), ("tanh", None), ("to", dtype), ("clone", None), or ("log_softmax",
# None), over the vocabulary.
Op = tuple[str, Any]


class NoLazyFormError(Exception):
    """An operation has no lazy form: it is done to the real logits."""


def needs(condition: bool) -> None:
    """Ends an operation that would be lazy only on this condition."""
    if not condition:
        raise NoLazyFormError


class Folded(NamedTuple):
    """``softcap * tanh(logit_scale * x / softcap)``, then perhaps ``factor * log_softmax(...)``."""

    logit_scale: float
    softcap: float | None  # None: no tanh
    normalised: bool = False
    factor: float = 1.0

    @property
    def linear(self) -> bool:
        return self.softcap is None and not self.normalised


def fold(ops: tuple[Op, ...]) -> Folded | None:
    """Bring elementwise operations into the operator's form.

    Casts and copies are skipped: the operator computes in float32 (or float64) whatever the model rounds to. So is a
    log-softmax of log-probabilities, which are normalised already.

    Returns:
        None where the operations do not fit (two tanh, a factor that is not finite).
    """
    if not ops:
        return _UNCHANGED
    inner, outer = 1.0, None  # outer * tanh(inner * x), or inner * x while outer is None
    normalised, behind = False, 1.0
    for name, value in ops:
        if name == "log_softmax":
            if normalised and behind != 1.0:
                return None
            normalised = True
        elif name == "tanh":
            if outer is not None or normalised:
                return None
            outer = 1.0
        elif name not in ("to", "clone"):
            if name == "div" and value == 0:
                return None
            factor = float(value) if name == "mul" else 1.0 / float(value)
            if normalised:
                behind *= factor
            elif outer is None:
                inner *= factor
            else:
                outer *= factor
    if not (math.isfinite(inner) and math.isfinite(outer or 0.0) and math.isfinite(behind)):
        return None
    if outer is None:
        return Folded(_snap(inner), None, normalised, behind)
    if outer == 0.0:
        return Folded(0.0, None, normalised, behind)
    # |outer| is the softcap, whose division of the argument is undone; tanh is odd, so a sign can go inside.
    return Folded(_snap(inner * outer), abs(outer), normalised, behind)


_UNCHANGED = Folded(1.0, None)


def _snap(scale: float) -> float:
    """``x / c * c`` multiplies by 1 up to a rounding error; let the operator see that there is no scale."""
    return 1.0 if abs(scale - 1.0) < 1e-14 else scale


_REPLAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "tanh": lambda z, _: torch.tanh(z),
    "log_softmax": lambda z, _: torch.log_softmax(z, -1),
    "clone": lambda z, _: z.clone(),
    "to": Tensor.to,
}


def replay(z: Tensor, ops: tuple[Op, ...]) -> Tensor:
    """Do to real logits, vocabulary last, what was recorded."""
    for name, value in ops:
        z = _REPLAYS[name](z, value)
    return z


def dtype_after(ops: tuple[Op, ...], before: torch.dtype) -> torch.dtype:
    for name, value in ops:
        if name == "to":
            before = value
    return before
