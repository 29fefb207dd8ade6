"""What is shown of whole runs: their tables, and what is missing in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import NONE, Table, absences, measured_on, spread_note


def shortfalls(run: Run) -> list[BenchResult]:
    """Results without figures of contenders that can run anywhere; peers may be missing or fail.

    That stock runs out of memory is a finding, of flce it would be a shortfall; that a budget has no plan is a finding.
    """
    return [
        result
        for entry in run.cases
        for result in entry.results
        if result.status != "ok"
        and result.status != "unplanned"
        and result.family != "peer"
        and (result.status, result.family) != ("oom", "stock")
    ]


def summary(
    title: str, first: str, entries: Sequence[Entry], cell: Callable[[Entry, BenchResult], str], line: str = "title"
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
    title: str, first: str, cell: Callable[[Entry, BenchResult], str], table: Callable[[Entry], Table]
) -> Callable[[Run, bool], list[Table]]:
    """The summary of a whole run, and unless that is all the table of each case."""

    def tables(run: Run, brief: bool) -> list[Table]:
        found = [summary(title, first, run.cases, cell)] if brief or len(run.cases) > 1 else []
        tried = [entry for entry in run.cases if any(result.status != "unavailable" for result in entry.results)]
        return found if brief else found + [table(entry) for entry in tried]

    return tables


def markdown(run: Run, tables: Sequence[Table]) -> str:
    """The tables, after what they were measured on."""
    head = [measured_on(run), "", f"Measured {run.head['date']} by `{run.head['command']}`."]
    lines = [*head, "", *(f"- {line}" for line in absences(run)), "", *(table.markdown() for table in tables)]
    return "\n".join(lines)
