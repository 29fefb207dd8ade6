"""A table before it is drawn, and how figures are written in it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from benchmarks.cases import MIB

GIB = 1024 * MIB
VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


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


def gibibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}" if value >= GIB / 100 else f"{value / GIB:.2g}"


def gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def percent(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.0%}"
