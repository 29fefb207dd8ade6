"""Check that the output of commands fits the console, and that no figure is cut."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

from rich.console import Console
from rich.table import Column, Table
from typer.testing import CliRunner

from flce.tools.cli.app import app
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
    in_lines = "flce: ms 3.5; tokens 7\n" in output.getvalue()
    assert in_lines == (width < 60)
    assert in_lines or max(map(len, output.getvalue().splitlines())) <= width


@pytest.mark.parametrize("width", [200, 60, 40])
def test_the_chart_of_a_plan_fits(width: int, tmp_path: Path) -> None:
    """Check that the bars fit the width, and that a narrow console gets no chart."""
    transformers = pytest.importorskip("transformers", reason="models")
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 4000}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path)
    arguments = ["plan", "--model", str(tmp_path), "--seq-len", "64", "--gpu-memory", "600MiB"]
    output = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, arguments).stdout
    bars = [
        line
        for line in output.splitlines()
        if re.search(r"^ *(stock|patched|the GPU)\S*( checkpointing)? +[A-Z=]", line)
    ]
    legend = [line for line in output.splitlines() if re.search(r"\b[WLT] (weights|loss|temporary)\b", line)]
    assert bool(bars) == bool(legend) == (width > 42)
    assert all(len(line.rstrip()) <= width for line in (*bars, *legend))
    assert "…" not in output
