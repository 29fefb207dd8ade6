"""What commands print: results to stdout, one JSON object with ``--json``; progress and notes to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

T = TypeVar("T")


class Dtype(str, Enum):
    """What tensors may be of."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, to stdout.")]


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def given(option: str, parse: Callable[..., T], *arguments: Any) -> T:
    """What `parse` makes of the value of an option; its ValueError is wrong usage."""
    try:
        return parse(*arguments)
    except ValueError as error:
        raise typer.BadParameter(f"{error}", param_hint=f"'{option}'") from None


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
