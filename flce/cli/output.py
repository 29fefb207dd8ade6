"""What commands print: results to stdout, one JSON object with ``--json``; progress and notes to stderr."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")]


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
