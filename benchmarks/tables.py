"""Tables in Markdown: how figures are written, what stands beside them, and whether what is promised is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

from benchmarks.cases import GIB, MIB
from benchmarks.results import Entry, Result, Run

NONE = "-"
Columns = dict[str, Callable[[Result], str]]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failure: bool = False  # whether the command that shows it fails

    def markdown(self) -> str:
        """A column that has no figure at all is left out."""
        figures = [any(row[i] != NONE for row in self.rows) for i in range(len(self.columns))]
        kept = [i for i, found in enumerate(figures) if found or i == 0 or not self.rows]
        lines = [[row[i].replace("|", "\\|") for i in kept] for row in (self.columns, *self.rows)]
        head, *body = ["| " + " | ".join(line) + " |" for line in lines]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"**{self.title}**", "", head, "|---|" + "---:|" * (len(kept) - 1), *body, *notes]) + "\n"


def tabulate(title: str, results: Iterable[Result], columns: Columns, notes: list[str]) -> Table:
    """A line for each result."""
    return Table(title, list(columns), [[show(result) for show in columns.values()] for result in results], notes)


def table_of(entry: Entry, results: Iterable[Result], columns: Columns) -> Table:
    """The lines of one case."""
    return tabulate(entry.case.title, results, columns, [*failure_notes(entry), spread_note([entry])])


# --- figures ---


def written(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """That way, where there is a figure."""
    return lambda value: NONE if value is None else write(value)


milliseconds = written(lambda ms: f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3g}")
mebibytes = written(lambda size: f"{size / MIB:.0f}" if size >= 10 * MIB else f"{size / MIB:.2f}")
gibibytes = written(lambda size: f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.2g}")
gigabytes = written(lambda speed: f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}")
percent = written(lambda share: f"{share:.0%}")
relative = written(lambda error: f"{error:.1e}" if math.isfinite(error) else "not finite")


def ratio(value: float | None, base: float | None = 1.0, digits: int = 2) -> str:
    return NONE if value is None or not base else f"{value / base:.{digits}f}"


# --- what stands beside the figures ---

FAILURES = {"failed": "failed", "oom": "ran out of memory", "skipped": "was not measured"}


def failure_notes(entry: Entry) -> list[str]:
    failed = [result for result in entry.results if result.status in FAILURES]
    return [f"{r.title} ({r.contender}) {FAILURES[r.status]}: {r.reason}" for r in failed] + [
        f"{r.title} ({r.contender}) cannot be captured: {r.note}" for r in entry.results if r.note is not None
    ]


def spread_note(entries: Sequence[Entry]) -> str:
    """The error bar: how far the two figures of one call of ours differ that was measured under two names."""
    pairs = [pair for entry in entries for pair in entry.repeats()]
    if not pairs:
        return "spread: not known, nothing of ours was measured twice"
    medians = [[result.median_ms or 0.0 for result in pair] for pair in pairs]
    apart = [max(both) / min(both) - 1 for both in medians]
    if len(pairs) == 1:
        first, again = pairs[0]
        times = " and ".join(milliseconds(result.median_ms) for result in (first, again))
        return f"spread: {apart[0]:.1%} between {first.title} and {again.title}, the same call ({times} ms)"
    middle, most, titles = median(apart), max(apart), " or ".join(dict.fromkeys(first.title for first, _ in pairs))
    both = f"{middle:.1%} in the median and {most:.1%} at most"
    return f"spread: {both} between {titles} and the same again, {len(pairs)} times"


def median_note(runs: Sequence[Run]) -> list[str]:
    return [f"the median of {len(runs)} runs"] if len(runs) > 1 else []


def absences(run: Run) -> list[str]:
    """Contenders that could not run at all, and why: none is dropped in silence."""
    missing = [result for entry in run.cases for result in entry.results if result.status == "unavailable"]
    return list(dict.fromkeys(f"Not measured: {r.title} ({r.contender}): {r.reason}" for r in missing))


def shortfalls(run: Run) -> list[Result]:
    """Results without figures of contenders that can run anywhere; peers may be missing or fail.

    That stock runs out of memory is a finding. Of flce it would be a shortfall.
    """
    return [
        result
        for entry in run.cases
        for result in entry.results
        if result.status != "ok" and result.family != "peer" and (result.status, result.family) != ("oom", "stock")
    ]


def summary(
    title: str, first: str, entries: Sequence[Entry], cell: Callable[[Entry, Result], str], line: str = "title"
) -> Table:
    """One line for each case, named by this attribute, with a column for every contender that was tried on any."""
    tried = [r for entry in entries for r in entry.results if r.samples_ms or r.status == "oom"]
    titles = {result.contender: result.title for result in tried}
    rows = []
    for entry in entries:
        found = [entry.by_name(name) for name in titles]
        cells = [cell(entry, result) if result.contender else NONE for result in found]
        rows.append([str(getattr(entry.case, line)), *cells])
    return Table(title, [first, *titles.values()], rows, [spread_note(entries)])


def overview(
    title: str, first: str, cell: Callable[[Entry, Result], str], table: Callable[[Entry], Table]
) -> Callable[[Run, bool], list[Table]]:
    """Of a whole run the summary, and unless that is all the table of each case."""

    def tables(run: Run, brief: bool) -> list[Table]:
        found = [summary(title, first, run.cases, cell)] if brief or len(run.cases) > 1 else []
        return found if brief else found + [table(entry) for entry in run.cases]

    return tables


def markdown(run: Run, tables: Sequence[Table]) -> str:
    """The tables, after what they were measured on."""
    device = run.head["device"]
    threads = f", {device['threads']} threads" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    head = [f"{device['name']}{threads}; {versions}.", "", f"Measured {run.head['date']} by `{run.head['command']}`."]
    lines = [*head, "", *(f"- {line}" for line in absences(run)), "", *(table.markdown() for table in tables)]
    return "\n".join(lines)


# --- verdicts: a target is met by the median of the runs, within 2% of the limit ---

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
