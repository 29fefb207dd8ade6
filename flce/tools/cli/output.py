"""Output of the commands: results to stdout (with ``--json`` one JSON object), progress and notes to stderr."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from flce.core.sizes import size_text

T = TypeVar("T")
MIN_FOLDED = 20  # the least width in characters of a column of words that is folded
Json = Annotated[bool, typer.Option("--json", help="Print only one JSON object to stdout.")]


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table. Text is never cut: a console that is too narrow gets lines that are longer than the console.

    Columns with ``no_wrap``, which have figures, keep their width. Text of other columns may be folded.
    """
    words = [column for column in table.columns if not column.no_wrap]
    for column in words:
        column.overflow, column.max_width = "fold", MIN_FOLDED
    console.width = max(console.width, Measurement.get(console, console.options.update(width=10_000), table).minimum)
    for column in words:
        column.max_width = None
    console.print(table)


def parse_option(option: str, parse: Callable[..., T], *arguments: Any) -> T:
    """Return `parse(*arguments)`. A ValueError of `parse` is raised as wrong usage of the option."""
    try:
        return parse(*arguments)
    except ValueError as error:
        raise usage_error(option, f"{error}") from None


def usage_error(option: str, message: str) -> typer.BadParameter:
    """Return the exception for wrong usage of an option."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def integer_option(least: int, help: str, metavar: str = "INTEGER", **settings: Any) -> Any:
    """Return an option for integers of at least ``least``. The error names the value, which Typer's error does not."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise typer.BadParameter(f"expected an integer of at least {least}, got {text!r}")

    return typer.Option(parser=parse, help=help, metavar=f"{metavar}>={least}", **settings)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1, default=lambda dtype: f"{dtype}".removeprefix("torch.")))


def machine_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of `machine.environment` as lines of text."""
    packages = [f"{name} {found}" for name, found in facts["packages"].items() if found is not None]
    lines = [
        ", ".join([f"flce {facts['flce']}", *packages]),
        f"Python {facts['python']}, {facts['platform']}, CUDA {facts['cuda'] or 'none'}",
    ]
    for device in facts["devices"]:
        size = f"{size_text(device['memory'])}, capability {device['capability']}" if "memory" in device else ""
        about = [device["name"], size or f"{device['cores']} cores", f"backend {device['backend']} ({device['why']})"]
        about += ["logits in registers"] * device.get("logits_in_registers", False)
        about += [f"profile {device['profile']}"] if device.get("profile") else []
        lines.append(f"{device['device']}: {', '.join(about)}")
    return lines + [f"{name}={value}" for name, value in facts["variables"].items()]
