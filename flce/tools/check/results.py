"""What came of checks: figures, results of checks, and the report of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from flce.testing.problem import relative_error
from flce.testing.tolerances import Tolerance

Results = Mapping[str, Tensor]
"""What was computed, by name."""
STATISTICS = ("lse", "logprob", "entropy", "candidate_logprob")
MOST = 20  # of the wrong checks in a bug report


@dataclass(frozen=True)
class Figure:
    """The distance of one result from float64."""

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
        """The error as a part of what is allowed."""
        return self.error / self.allowed if self.error == self.error else math.inf

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


def compared(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """Return a figure for each of `ours`."""
    figures = []
    for what, got in ours.items():
        bound = tolerance.loss if what in ("loss", *STATISTICS) else tolerance.gradient
        beside = relative_error(stock[what], truth[what])
        figures.append(Figure(what, relative_error(got, truth[what]), beside, bound.allowed(beside)))
    return tuple(figures)


@dataclass(frozen=True)
class CheckResult:
    device: str
    backend: str
    title: str
    dtype: str
    status: Literal["right", "off", "failed"]
    """"off": further from float64 than allowed, or different in a second run. "failed": an exception."""
    figures: tuple[Figure, ...] = ()
    wrong: tuple[str, ...] = ()
    """What is wrong, a sentence each."""
    plan: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Figure | None:
        """The figure that is nearest to what is allowed, or furthest beyond."""
        return max(self.figures, key=lambda figure: figure.share, default=None)

    @property
    def name(self) -> str:
        return f"{self.device}, {self.backend} backend, {self.dtype}, {self.title!r}"


@dataclass(frozen=True)
class Missing:
    """What is not checked."""

    what: str
    why: str


@dataclass(frozen=True)
class CheckReport:
    results: tuple[CheckResult, ...]
    missing: tuple[Missing, ...]

    @property
    def wrong(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.status != "right")

    @property
    def right(self) -> bool:
        return bool(self.results) and not self.wrong

    @property
    def verdict(self) -> str:
        number, wrong = len(self.results), len(self.wrong)
        if not number:
            return "Nothing was checked."
        if wrong:
            return f"Something is off: {wrong} of {number} checks did not give what they have to."
        return (
            f"flce is exact here: in {number} checks its results are as close to float64 as those of PyTorch's own "
            "operators or closer, but for roundings, and the same from run to run."
        )

    def bug_report(self, machine: list[str], command: str) -> str:
        """Return text to paste, within a fence."""
        lines = [f"$ {command}", *machine, self.verdict]
        for result in self.wrong[:MOST]:
            lines += [
                f"{result.status}: {result.name}",
                *(f"  {line}" for line in (*result.wrong, result.plan) if line),
            ]
        if len(self.wrong) > MOST:
            lines.append(f"and {len(self.wrong) - MOST} further checks, which --json lists")
        lines += [f"not checked: {missing.what}: {missing.why}" for missing in self.missing]
        return "\n".join(["```", *lines, "```"])

    def as_json(self, environment: dict[str, Any], command: str) -> dict[str, Any]:
        return {
            "right": self.right,
            "verdict": self.verdict,
            "command": command,
            "environment": environment,
            "checks": [{**asdict(result), "figures": [*map(_figure, result.figures)]} for result in self.results],
            "not_checked": [asdict(missing) for missing in self.missing],
        }


def _figure(figure: Figure) -> dict[str, Any]:
    """JSON has no NaN and no infinities: they become text."""
    finite = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in asdict(figure).items()}
    return {**finite, "off": figure.off}
