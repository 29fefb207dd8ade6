"""Results as tables: Markdown for the documentation, rich for the terminal, from the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from benchmarks.cases import MIB
from benchmarks.results import CaseResult, Result, Run


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines) + "\n"

    def rich(self) -> Table:
        caption = "\n".join(self.notes) or None
        table = Table(title=self.title, title_justify="left", caption=caption, caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in self.rows:
            style = "bold" if row[0].startswith("flce") else None
            table.add_row(*row, style=style)
        return table


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def mebibytes(value: int | None) -> str:
    if value is None:
        return "-"
    return f"{value / MIB:.0f}" if value >= 10 * MIB else f"{value / MIB:.2f}"


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def relative(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def failure_notes(entry: CaseResult) -> list[str]:
    return [
        f"{result.title} ({result.contender}) failed: {result.reason}"
        for result in entry.results
        if result.status == "failed"
    ]


def absences(run: Run) -> list[str]:
    """Contenders that could not run at all, and why: none is dropped in silence."""
    reasons = {
        f"Not measured: {result.title} ({result.contender}): {result.reason}": None
        for entry in run.cases
        for result in entry.results
        if result.status == "unavailable"
    }
    return list(reasons)


def shortfalls(run: Run) -> list[Result]:
    """Results without figures of contenders that can run anywhere; peers may be missing or fail."""
    return [
        result for entry in run.cases for result in entry.results if result.status != "ok" and result.family != "peer"
    ]


def time_grid(entry: CaseResult) -> Grid:
    """Time and workspace of every contender on one case."""
    nobody = Result("", "", "")
    floor, stock = (entry.by_name(name) or nobody for name in ("floor", "stock"))
    measured = [result for result in entry.results if result.samples_ms]
    columns: dict[str, Callable[[Result], str]] = {
        "": lambda r: r.title,
        "median ms": lambda r: milliseconds(r.median_ms),
        "least ms": lambda r: milliseconds(min(r.samples_ms)),
        "calls": lambda r: str(len(r.samples_ms)),
        "x floor": lambda r: ratio(r.median_ms, floor.median_ms),
        "x stock": lambda r: ratio(r.median_ms, stock.median_ms),
        "CPU ms": lambda r: milliseconds(r.median_cpu_ms),
        "CPU x stock": lambda r: ratio(r.median_cpu_ms, stock.median_cpu_ms),
        "MiB": lambda r: mebibytes(r.workspace_bytes),
        "MiB x stock": lambda r: ratio(r.workspace_bytes, stock.workspace_bytes),
    }
    if not any(result.cpu_samples_ms for result in measured):
        del columns["CPU ms"], columns["CPU x stock"]
    rows = [[show(result) for show in columns.values()] for result in measured]
    return Grid(entry.case.title, list(columns), rows, failure_notes(entry))


def error_grid(entry: CaseResult) -> Grid:
    """Distance of every contender from the float64 oracle on one case."""
    names = {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}
    present = [name for name in names if any(name in (result.errors or {}) for result in entry.results)]
    rows = [
        [result.title, *(relative(result.errors.get(name)) for name in present)]
        for result in entry.results
        if result.errors is not None
    ]
    title = f"{entry.case.title}: relative error against float64"
    notes = [] if entry.case.time else failure_notes(entry)  # they stand under the table of times
    return Grid(title, ["", *(names[name] for name in present)], rows, notes)


def summary_grid(entries: list[CaseResult]) -> Grid:
    """One line for each case: "median ms, workspace MiB" of every contender that was measured anywhere."""
    titles: dict[str, str] = {}
    for entry in entries:
        titles |= {result.contender: result.title for result in entry.results if result.samples_ms}

    def cell(result: Result | None) -> str:
        if result is None or not result.samples_ms:
            return "-"
        workspace = "" if result.workspace_bytes is None else f", {mebibytes(result.workspace_bytes)}"
        return milliseconds(result.median_ms) + workspace

    rows = [[entry.case.title, *(cell(entry.by_name(name)) for name in titles)] for entry in entries]
    return Grid("Median ms, workspace MiB", ["tokens x hidden x vocabulary", *titles.values()], rows, [])


def grids(run: Run, brief: bool = False) -> list[Grid]:
    """All tables of a run; `brief` leaves out the line-by-line ones of the timed cases."""
    timed = [entry for entry in run.cases if entry.case.time]
    checked = [entry for entry in run.cases if entry.case.errors]
    found = [summary_grid(timed)] if timed and (brief or len(timed) > 1) else []
    if not brief:
        found += [time_grid(entry) for entry in timed]
    return found + [error_grid(entry) for entry in checked]


def markdown(run: Run, brief: bool = False) -> str:
    """All tables, after what they were measured on."""
    device = run.head["device"]
    threads = f", {device['threads']} threads" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    lines = [
        f"{device['name']}{threads}; {versions}.",
        "",
        f"Measured {run.head['date']} by `{run.head['command']}`.",
        "",
        *(f"- {line}" for line in absences(run)),
        "",
        *(grid.markdown() for grid in grids(run, brief)),
    ]
    return "\n".join(lines)
