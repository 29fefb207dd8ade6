"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flce.check.tolerances import Bound, Tolerance


@dataclass(frozen=True)
class Figure:
    """How far one result is from float64."""

    what: str
    error: float
    stock: float
    """The error of PyTorch's operators."""
    allowed: float

    @property
    def off(self) -> bool:
        return not self.error <= self.allowed  # NaN is off

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.error / self.allowed if self.error == self.error else float("inf")

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


@dataclass(frozen=True)
class Measurement:
    figures: tuple[Figure, ...]
    wrong: tuple[str, ...] = ()
    """What is wrong beside figures, a sentence each."""
    plan: str = ""
    """Of the call, if it has one."""


class Check(Protocol):
    @property
    def title(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def measure(self) -> Measurement: ...


Results = Mapping[str, Tensor]
"""Names, and what was computed."""
LOSSES = ("loss", "lse", "logprob", "entropy")


def compared(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """A figure for each of `ours`.

    Raises:
        ValueError: a result has another shape, or is missing in the others.
    """
    figures = []
    for what, got in ours.items():
        bound: Bound = tolerance.loss if what in LOSSES else tolerance.gradient
        beside = relative_error(stock[what], truth[what])
        figures.append(Figure(what, relative_error(got, truth[what]), beside, bound.allowed(beside)))
    return tuple(figures)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    if actual.shape != expected.shape:
        raise ValueError(f"a result has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    exact = expected.double()
    difference, norm = float((actual.to(exact.device).double() - exact).norm()), float(exact.norm())
    return difference / norm if norm else difference


def differing(ours: Results, again: Results | None) -> tuple[str, ...]:
    """A sentence if a second run has other bits; None: there was none."""
    if again is None:
        return ()
    names = [what for what, got in ours.items() if not torch.equal(got, again[what])]
    return (f"A second run gave other bits: {', '.join(names)}.",) if names else ()
