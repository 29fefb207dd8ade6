"""What commands print: results to stdout, one JSON object with ``--json``; progress and notes to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
FOLDED = 20  # characters that a column of words has at least, if it has as many
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")]


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """A table; where the console is too narrow for it, a line for each row. Nothing is cut.

    Columns with ``no_wrap``, those of figures, stay as wide as they are. Words of the others may be folded.
    """
    words = [column for column in table.columns if not column.no_wrap]
    for column in words:
        column.overflow, column.max_width = "fold", FOLDED
    least = Measurement.get(console, console.options.update(width=10_000), table).minimum
    for column in words:
        column.max_width = None
    if least <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic", soft_wrap=True)
    heads = [" ".join(_plain(column.header).split()) for column in table.columns]
    for row in zip(*(map(_plain, column.cells) for column in table.columns), strict=True):
        fields = [f"{head} {cell}".strip() for head, cell in zip(heads[1:], row[1:], strict=True) if cell.strip()]
        console.print(": ".join(filter(None, (row[0].strip(), "; ".join(fields)))), markup=False, soft_wrap=True)


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(cell).plain


def parse_option(option: str, parse: Callable[..., T], *arguments: Any) -> T:
    """What `parse` makes of the value of an option; its ValueError is wrong usage."""
    try:
        return parse(*arguments)
    except ValueError as error:
        raise usage_error(option, f"{error}") from None


def usage_error(option: str, message: str) -> typer.BadParameter:
    """Wrong usage of an option, to be raised."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
