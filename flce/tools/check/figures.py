"""What a check found: figures, and what else is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flce.testing.oracle import OracleResult
from flce.testing.problem import CallResult, relative_error
from flce.testing.tolerances import Bound, Tolerance


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
        """The part of what is allowed that the error takes."""
        return self.error / self.allowed if self.error == self.error else float("inf")

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


@dataclass(frozen=True)
class Measurement:
    figures: tuple[Figure, ...]
    wrong: tuple[str, ...] = ()
    """What is wrong beside figures, a sentence each."""
    plan: str = ""
    """The plan of the call, if it has one."""


class ExactnessCheck(Protocol):
    """What is called."""

    @property
    def title(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def measure(self) -> Measurement: ...


Results = Mapping[str, Tensor]
"""What was computed, by name."""
STATISTICS = ("lse", "logprob", "entropy", "candidate_logprob")


def named(result: CallResult | OracleResult) -> Results:
    """The loss, the statistics and the gradients that there are."""
    statistics = result.output if isinstance(result, CallResult) else result
    found = {
        "loss": result.loss,
        **{name: getattr(statistics, name, None) for name in STATISTICS},
        "input gradient": result.grad_input,
        "weight gradient": result.grad_weight,
        "bias gradient": result.grad_bias,
    }
    for number, (a, b) in enumerate(result.grad_adapters, 1):
        found |= {f"adapter {number} input gradient": a, f"adapter {number} weight gradient": b}
    return {name: value for name, value in found.items() if value is not None}


def compared(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """A figure for each of `ours`.

    Raises:
        ValueError: a result has another shape, or is missing in the others.
    """
    figures = []
    for what, got in ours.items():
        bound: Bound = tolerance.loss if what in ("loss", *STATISTICS) else tolerance.gradient
        beside = relative_error(stock[what], truth[what])
        figures.append(Figure(what, relative_error(got, truth[what]), beside, bound.allowed(beside)))
    return tuple(figures)


def differing(ours: Results, again: Results) -> tuple[str, ...]:
    """A sentence if a second run has other bits."""
    names = [what for what, got in ours.items() if not torch.equal(got, again[what])]
    return (f"A second run gave other bits: {', '.join(names)}.",) if names else ()
