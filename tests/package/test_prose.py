"""Check rules of the style page: openings of docstrings, and words that no file of the package contains."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("flce", "tests", "benchmarks", "integrations", "scripts")
OPENING = re.compile(r"\s*(What|Whether|Where|Which|How|Of|Who|When|Why|Those|That)\b")
WORDS = re.compile(r"\b(told|tells|in\s+the\s+place\s+of|no\s+multiple\s+of)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> list[tuple[int, str]]:
    """Return the lines and texts of the docstrings of a file. A field's docstring is a string after the field."""
    tree = ast.parse(file.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                if before is not None and not isinstance(before, (ast.Assign, ast.AnnAssign)):
                    continue
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    found.append((statement.lineno, str(statement.value.value)))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_openings_of_docstrings(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.split(chr(10))[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(file)
        if OPENING.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_words_of_the_package() -> None:
    wrong = []
    for file in sorted((ROOT / "flce").rglob("*.py")):
        text = re.sub(r"\n\s*# ", "\n", file.read_text())  # a phrase may continue in the next line of a comment
        wrong += [f"{file.relative_to(ROOT)}: {found[0]!r}" for found in WORDS.finditer(text)]
    assert not wrong, "\n".join(wrong)
