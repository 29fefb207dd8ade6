"""Tables in Markdown: how figures are written, and what stands beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from benchmarks.cases import GIB, MIB
from benchmarks.results import Entry, Result, Run

NONE = "-"
T = TypeVar("T")
Columns = dict[str, Callable[[T], str]]
AnyRun = Run[Any, Any]
AnyEntry = Entry[Any, Any]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failure: bool = False  # whether the command that shows it fails

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"


def tabulate(title: str, items: Iterable[T], columns: Columns[T], notes: Sequence[str] = ()) -> Table:
    """A line for each item. A column that has no figure at all is left out."""
    rows = [[show(item) for show in columns.values()] for item in items]
    kept = [i for i in range(len(columns)) if i == 0 or not rows or any(row[i] != NONE for row in rows)]
    names = list(columns)
    return Table(title, [names[i] for i in kept], [[row[i] for i in kept] for row in rows], [*notes])


def table_of(entry: AnyEntry, results: Iterable[T], columns: Columns[T]) -> Table:
    """The lines of one case."""
    return tabulate(entry.case.title, results, columns, [*failure_notes(entry), spread_note([entry])])


# --- figures ---


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def mebibytes(value: int | None) -> str:
    if value is None:
        return NONE
    return f"{value / MIB:.0f}" if value >= 10 * MIB else f"{value / MIB:.2f}"


def gibibytes(value: int | None) -> str:
    return NONE if value is None else f"{value / GIB:.2f}" if value >= GIB / 100 else f"{value / GIB:.2g}"


def gigabytes(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def percent(value: float | None, base: float | None = 1.0) -> str:
    return NONE if value is None or not base else f"{value / base:.0%}"


def ratio(value: float | None, base: float | None = 1.0, digits: int = 2) -> str:
    return NONE if value is None or not base else f"{value / base:.{digits}f}"


def relative(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}" if math.isfinite(value) else "not finite"


# --- what stands beside the figures ---

FAILURES = {"failed": "failed", "oom": "ran out of memory", "skipped": "was not measured"}


def failure_notes(entry: AnyEntry) -> list[str]:
    return [
        f"{result.title} ({result.contender}) {FAILURES[result.status]}: {result.reason}"
        for result in entry.results
        if result.status in FAILURES
    ]


def spread_note(entries: Sequence[AnyEntry]) -> str:
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


def median_note(runs: Sequence[AnyRun]) -> list[str]:
    return [f"the median of {len(runs)} runs"] if len(runs) > 1 else []


def absences(run: AnyRun) -> list[str]:
    """Contenders that could not run at all, and why: none is dropped in silence."""
    missing = [result for entry in run.cases for result in entry.results if result.status == "unavailable"]
    return list(dict.fromkeys(f"Not measured: {r.title} ({r.contender}): {r.reason}" for r in missing))


def shortfalls(run: AnyRun) -> list[Result]:
    """Results without figures of contenders that can run anywhere; peers may be missing or fail.

    That stock runs out of memory is a finding. Of flce it would be a shortfall.
    """
    return [
        result
        for entry in run.cases
        for result in entry.results
        if result.status != "ok" and result.family != "peer" and (result.status, result.family) != ("oom", "stock")
    ]


def summary(title: str, first: str, entries: Sequence[AnyEntry], cell: Callable[[Any, Any], str]) -> Table:
    """One line for each case, with a column for every contender that was tried on any."""
    tried = [r for entry in entries for r in entry.results if r.samples_ms or r.status == "oom"]
    titles = {result.contender: result.title for result in tried}
    rows = []
    for entry in entries:
        found = [entry.by_name(name) for name in titles]
        rows.append([entry.case.title, *(NONE if result is None else cell(entry, result) for result in found)])
    return Table(title, [first, *titles.values()], rows, [spread_note(entries)])


def markdown(run: AnyRun, tables: Sequence[Table]) -> str:
    """The tables, after what they were measured on."""
    device = run.head["device"]
    threads = f", {device['threads']} threads" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    head = [f"{device['name']}{threads}; {versions}.", "", f"Measured {run.head['date']} by `{run.head['command']}`."]
    lines = [*head, "", *(f"- {line}" for line in absences(run)), "", *(table.markdown() for table in tables)]
    return "\n".join(lines)
