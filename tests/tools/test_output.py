"""Check that tables of commands fit the console, and that no figure is cut."""

from __future__ import annotations

import io
import re

import pytest

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

from rich.console import Console
from rich.table import Column, Table

from flce.tools.cli.output import print_table

WIDTHS = (200, 80, 60, 40, 20)


def figures(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d.,e+-]*", text))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_of_a_table_is_cut(width: int) -> None:
    rows = [("PyTorch chunked (F.linear_cross_entropy)", "12.25", "1.0e-07", "128,256"), ("flce", "3.5", "", "7")]
    table = Table("", *(Column(head, no_wrap=True) for head in ("ms", "error\nof dX", "tokens")), title="A title")
    for row in rows:
        table.add_row(*row)
    output = io.StringIO()
    print_table(Console(file=output, width=width), table)
    assert figures(output.getvalue()) == sorted(cell for row in rows for cell in row[1:] if cell)
    assert "…" not in output.getvalue()
    assert width < 60 or max(map(len, output.getvalue().splitlines())) <= width
