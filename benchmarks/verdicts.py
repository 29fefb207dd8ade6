"""What it means that a target is met: the median of the runs, within 2% of the limit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

TOLERANCE = 0.02  # equal calls differ by as much


class Verdict(str, Enum):
    """From the best to the worst."""

    met = "met"
    nearly = "met within 2%"
    unmeasured = "not measured"
    missed = "MISSED"

    @property
    def counts(self) -> bool:
        return self in (Verdict.met, Verdict.nearly)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of nothing: not measured."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.unmeasured)


def judge(value: float | None, limit: float | None, at_least: bool = False, tolerance: float = TOLERANCE) -> Verdict:
    if value is None or limit is None:
        return Verdict.unmeasured
    excess = limit - value if at_least else value - limit
    if excess <= 0:
        return Verdict.met
    return Verdict.nearly if excess <= tolerance * limit else Verdict.missed


@dataclass(frozen=True, kw_only=True)
class Check:
    """A target, and the figure that was measured of it; None where nothing was."""

    value: float | None
    limit: float | None
    at_least: bool = False  # whether the limit is the least instead of the most

    @property
    def key(self) -> Hashable:
        """Which target it is: the same in every run."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        return judge(self.value, self.limit, self.at_least)


CheckT = TypeVar("CheckT", bound=Check)


def middle(runs: Sequence[Sequence[CheckT]]) -> list[CheckT]:
    """Of every target the check of the run that is the median of those that measured it; of two the worse."""
    groups: dict[Hashable, list[CheckT]] = {}
    for checks in runs:
        for check in checks:
            groups.setdefault(check.key, []).append(check)
    return [median(group) for group in groups.values()]


def median(group: Sequence[CheckT]) -> CheckT:
    measured = sorted(
        (check for check in group if check.value is not None),
        key=lambda check: (-1 if check.at_least else 1) * (check.value or 0.0),
    )
    return measured[len(measured) // 2] if measured else group[0]


def tally(verdicts: Iterable[Verdict]) -> str:
    """How many are met, and how many of these by the tolerance alone."""
    found = list(verdicts)
    nearly = found.count(Verdict.nearly)
    met = sum(verdict.counts for verdict in found)
    return (f"{met} of {len(found)}" if found else "-") + (f" ({nearly} within 2%)" if nearly else "")
