"""Whether what is promised is kept: a target is met by the median of the runs, within 2% of the limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from flce.bench.tables import Table

TOLERANCE = 0.02  # equal calls differ by as much


class Verdict(str, Enum):
    """From the best to the worst."""

    met = "met"
    nearly = "met within 2%"
    unmeasured = "not measured"
    missed = "MISSED"


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


@dataclass(frozen=True)
class Check:
    """A target, and the figure that was measured of it; None where nothing was."""

    key: Any  # which target it is: the same in every run
    value: float | None
    limit: float | None  # None: nothing is asked of the value
    at_least: bool = False  # whether the limit is the least instead of the most
    others: tuple[Verdict, ...] = ()  # on what else is asked
    cells: dict[str, str] = field(default_factory=dict)  # what its line of a table says, by column

    @property
    def verdict(self) -> Verdict:
        asked = self.limit is not None or not self.others
        found = [*([judge(self.value, self.limit, self.at_least)] if asked else []), *self.others]
        return Verdict.unmeasured if Verdict.unmeasured in found else worst(found)


def middle(runs: Sequence[Sequence[Check]]) -> list[Check]:
    """Of every target the check of the run that is the median of those that measured it; of two the worse."""
    groups: dict[Any, list[Check]] = {}
    for check in (check for checks in runs for check in checks):
        groups.setdefault(check.key, []).append(check)
    found = []
    for group in groups.values():
        measured = [check for check in group if check.value is not None]
        measured.sort(key=lambda check: check.value or 0.0, reverse=group[0].at_least)
        found.append(measured[len(measured) // 2] if measured else group[0])
    return found


def tally(checks: Sequence[Check]) -> str:
    """How many are met, and how many of these by the tolerance alone."""
    found = [check.verdict for check in checks]
    nearly = found.count(Verdict.nearly)
    met = found.count(Verdict.met) + nearly
    return (f"{met} of {len(found)}" if found else "-") + (f" ({nearly} within 2%)" if nearly else "")


def verdict_table(title: str, checks: Sequence[Check], notes: list[str]) -> Table:
    """A line for each target, of cells that all of them have."""
    columns = [*checks[0].cells, "verdict"] if checks else ["Not one of them was measured."]
    rows = [[*check.cells.values(), check.verdict.value] for check in checks]
    return Table(f"{title}: {tally(checks)}", columns, rows, notes)
