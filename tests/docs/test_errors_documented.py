"""Check that the rows of docs/troubleshooting.md under "Messages" quote texts of flce, with `...` for each value."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import flce

PACKAGE = Path(flce.__file__).parent
ROWS = re.findall(
    r"^\| (`.*`) \| `\w+` \| (.*) \|$", (PACKAGE.parent / "docs" / "troubleshooting.md").read_text(), re.M
)


@functools.cache
def texts() -> list[str]:
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("quotes, remedy", ROWS, ids=lambda value: value[:40])
def test_a_row_quotes_a_message(quotes: str, remedy: str) -> None:
    assert len(remedy.split()) >= 3
    for quote in re.findall(r"`([^`]+)`", quotes):
        assert any(quote in text for text in texts()), quote
