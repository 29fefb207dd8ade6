"""Markdown tables of results: the text of figures, and the notes of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.runs import BenchResult, Entry, Run
from flce.core.sizes import GIB, MIB

NONE = "-"
SHAPE = "tokens x hidden x vocabulary"  # the title of a column
Columns = dict[str, Callable[[BenchResult], str]]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failure: bool = False  # the command that prints it fails

    def lines(self) -> list[list[str]]:
        """Return the head and the rows, without the columns that have no figure."""
        figures = [any(row[i] != NONE for row in self.rows) for i in range(len(self.columns))]
        kept = [i for i, found in enumerate(figures) if found or i == 0 or not self.rows]
        return [[line[i] for i in kept] for line in (self.columns, *self.rows)]

    def grid(self, aligned: bool = False) -> str:
        """Return Markdown without title and notes; if aligned, columns are as wide as their longest cell."""
        lines = [[cell.replace("|", "\\|") for cell in line] for line in self.lines()]
        widths = [max(map(len, column)) if aligned else 0 for column in zip(*lines, strict=True)]
        head, *body = [
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        ]
        rule = f"|{'-' * max(3, widths[0] + 2)}|" + "".join(f"{'-' * max(3, width + 1)}:|" for width in widths[1:])
        return "\n".join([head, rule, *body])

    def markdown(self, aligned: bool = False) -> str:
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"**{self.title}**", "", self.grid(aligned), *notes]) + "\n"


def tabulate(title: str, results: Iterable[BenchResult], columns: Columns, notes: list[str]) -> Table:
    return Table(title, list(columns), [[show(result) for show in columns.values()] for result in results], notes)


def table_of(entry: Entry, results: Iterable[BenchResult], columns: Columns) -> Table:
    return tabulate(entry.case.title, results, columns, [*failure_notes(entry), spread_note([entry])])


def format_or_dash(write: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: NONE if value is None else write(value)


milliseconds = format_or_dash(lambda ms: f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3g}")
mebibytes = format_or_dash(lambda size: f"{size / MIB:.0f}" if size >= 10 * MIB else f"{size / MIB:.2f}")
gibibytes = format_or_dash(lambda size: f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.2g}")
gigabytes = format_or_dash(lambda speed: f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}")
percent = format_or_dash(lambda share: f"{share:.0%}")
relative = format_or_dash(lambda error: f"{error:.1e}" if math.isfinite(error) else "not finite")


def ratio(value: float | None, base: float | None = 1.0, digits: int = 2) -> str:
    return NONE if value is None or not base else f"{value / base:.{digits}f}"


FAILURES = {"failed": "failed", "oom": "ran out of memory", "skipped": "was not measured", "unplanned": "has no plan"}


def failure_notes(entry: Entry) -> list[str]:
    failed = [result for result in entry.results if result.status in FAILURES]
    return [f"{r.title} ({r.contender}) {FAILURES[r.status]}: {r.reason}" for r in failed] + [
        f"{r.title} ({r.contender}) cannot be captured: {r.note}" for r in entry.results if r.note is not None
    ]


def spread_note(entries: Sequence[Entry]) -> str:
    """Return the error bar: the difference between the two figures of a call of flce that was measured twice."""
    pairs = [pair for entry in entries for pair in entry.repeats()]
    if not pairs:
        return "spread: not known, no call of flce was measured twice"
    medians = [[result.median_ms or 0.0 for result in pair] for pair in pairs]
    apart = [max(both) / min(both) - 1 for both in medians]
    titles = " or ".join(dict.fromkeys(first.title for first, _ in pairs))
    both = f"{median(apart):.1%} in the median and {max(apart):.1%} at most"
    return f"spread: {both} between {titles} and the same again, {len(pairs)} times"


def measured_on(run: Run) -> str:
    device = run.head["device"]
    threads = f", {device['threads']} threads" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    return f"{device['name']}{threads}; {versions}."


def absences(run: Run) -> list[str]:
    """Return a line for each reason why contenders could not run, with these contenders."""
    missing: dict[str | None, dict[str, None]] = {}
    for result in (result for entry in run.cases for result in entry.results if result.status == "unavailable"):
        missing.setdefault(result.reason, {})[f"{result.title} ({result.contender})"] = None
    return [f"Not measured: {'; '.join(names)}: {reason}" for reason, names in missing.items()]


def tried(run: Run) -> list[Entry]:
    return [entry for entry in run.cases if any(result.status != "unavailable" for result in entry.results)]


def shortfalls(run: Run) -> list[BenchResult]:
    """Return results without figures of contenders that can run anywhere; peers may be missing or fail.

    If stock runs out of memory, or a budget has no plan, this is a finding. If flce runs out of memory, it is a
    shortfall.
    """
    results = [result for entry in tried(run) for result in entry.results if result.family != "peer"]
    missing = [result for result in results if result.status not in ("ok", "unplanned")]
    return [result for result in missing if (result.status, result.family) != ("oom", "stock")]


def summary(
    title: str, first: str, entries: Sequence[Entry], cell: Callable[[Entry, BenchResult], str], line: str = "title"
) -> Table:
    """Return a table with a row for each case, named by the attribute `line`, and a column for each tried contender."""
    tried = [r for entry in entries for r in entry.results if r.samples_ms or r.status == "oom"]
    titles = {result.contender: result.title for result in tried}
    rows = []
    for entry in entries:
        found = [entry.by_name(name) for name in titles]
        cells = [cell(entry, result) if result.contender else NONE for result in found]
        rows.append([str(getattr(entry.case, line)), *cells])
    failures = dict.fromkeys(note for entry in entries for note in failure_notes(entry))
    return Table(title, [first, *titles.values()], rows, [*failures, spread_note(entries)])


def overview(
    title: str, first: str, cell: Callable[[Entry, BenchResult], str], table: Callable[[Entry], Table]
) -> Callable[[Run, bool], list[Table]]:
    """Return a function from a run to its tables: the summary and, unless brief, the table of each case."""

    def run_tables(run: Run, brief: bool) -> list[Table]:
        found = [summary(title, first, run.cases, cell)] if brief or len(run.cases) > 1 else []
        return found if brief else found + [table(entry) for entry in tried(run)]

    return run_tables


def markdown(run: Run, tables: Sequence[Table]) -> str:
    """Return the tables after a head with the device, the versions and the command."""
    head = [measured_on(run), "", f"Measured {run.head['date']} by `{run.head['command']}`."]
    lines = [*head, "", *(f"- {line}" for line in absences(run)), "", *(table.markdown() for table in tables)]
    return "\n".join(lines)
