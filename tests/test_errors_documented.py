"""Every message of the package has a row in docs/errors.md, with its class and with what to do.

The rule. The text of a message is what it says, with ``...`` for each value in it. A row of a table under "Messages"
quotes in backticks the beginning of that text: three words or more, and no other text begins so. The second cell names
the class, the third says what to do. A row whose quote begins no message fails too.

Messages are found where an exception is made (a call of a name that ends in Error, raised there or returned to be
raised), where a function called ``warn`` or ``warn_explicit`` is called, and among the reasons that are put into such
messages: see REASONS. An ``assert`` is none.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flce

PACKAGE = Path(flce.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "errors.md"
HEADING = "## Messages"
# Functions that return, and names that hold, part of a message: why something was not done.
REASONS = ("_why_not", "why_not_lazy", "obstacle", "EVALUATION", "_UNUSED")
VALUE = "..."


class Message(NamedTuple):
    place: str
    kind: str
    """The class; "reason" for part of a message."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.text}"


class Row(NamedTuple):
    line: int
    quotes: list[str]
    kinds: list[str]
    remedy: str


# ----------------------------------------------------------------------------------------------------- the source


def texts(node: ast.expr | None, scope: dict[str, list[ast.expr]]) -> list[str]:
    """What an expression may say. An empty list: no text, as far as the source tells."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [texts(side, scope) or [VALUE] for side in (node.left, node.right)]
        return ["".join(said) for said in itertools.product(*parts)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, scope) + texts(node.orelse, scope)
    if isinstance(node, ast.Name):
        without = {name: values for name, values in scope.items() if name != node.id}
        return [text for value in scope.get(node.id, []) for text in texts(value, without)]
    if isinstance(node, ast.Call):
        return [text for argument in node.args for text in texts(argument, scope)]
    return []


def assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What is assigned to each plain name in there."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def said(node: ast.AST, inside: list[str]) -> Iterator[tuple[str, ast.expr]]:
    """The class and the expression of each message that is made right here."""
    if isinstance(node, ast.Call) and node.args:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.endswith("Error"):
            yield name, node.args[0]
        # A `warn` of our own hands on what it was given.
        elif name in ("warn", "warn_explicit") and inside[-1:] != ["warn"]:
            category = node.args[1] if len(node.args) > 1 else ast.Name("UserWarning")
            yield ast.unparse(category), node.args[0]
    elif isinstance(node, (ast.Return, ast.Assign)) and node.value is not None:
        of = inside[-1:] if isinstance(node, ast.Return) else [t.id for t in node.targets if isinstance(t, ast.Name)]
        if set(of) & set(REASONS):
            yield "reason", node.value


def messages_of(source: str, file: str) -> tuple[list[Message], list[str]]:
    """The messages of a file, and the places of those of which the source does not tell a word."""
    tree = ast.parse(source)
    found: list[Message] = []
    unknown: list[str] = []

    def walk(node: ast.AST, inside: list[str], scope: dict[str, list[ast.expr]]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside, scope = [*inside, node.name], {**scope, **assigned(node)}
        for kind, message in said(node, inside):
            place = f"{file}:{message.lineno}"
            possible = [re.sub(r"\s+", " ", text).replace(VALUE * 2, VALUE) for text in texts(message, scope)]
            found.extend(Message(place, kind, text) for text in possible)
            if not possible and kind != "reason":
                unknown.append(f"{place}: {kind}: {ast.unparse(message)}")
        for child in ast.iter_child_nodes(node):
            walk(child, inside, scope)

    walk(tree, [], assigned(ast.Module([n for n in tree.body if isinstance(n, ast.Assign)], [])))
    return found, unknown


@functools.lru_cache
def messages() -> tuple[list[Message], list[str]]:
    found: list[Message] = []
    unknown: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here = messages_of(path.read_text(), str(path.relative_to(PACKAGE.parent)))
        found += here[0]
        unknown += here[1]
    return found, unknown


# --------------------------------------------------------------------------------------------------- the document


def rows_of(document: str) -> list[Row]:
    """Of the tables under HEADING, as far as the next heading of its kind."""
    rows, within = [], False
    for number, line in enumerate(document.splitlines(), 1):
        if line.startswith("## "):
            within = line == HEADING
        if within and line.startswith("| `"):
            first, kinds, remedy = (cell.strip() for cell in line.strip("| ").split(" | "))
            quotes, classes = (re.findall(r"`([^`]+)`", cell) for cell in (first, kinds))
            rows.append(Row(number, quotes, classes, remedy))
    return rows


def undocumented(found: list[Message], rows: list[Row]) -> list[str]:
    """What is wrong with the rows for these messages, a line each."""
    wrong = []
    for message in found:
        of_it = [row for row in rows if any(message.text.startswith(quote) for quote in row.quotes)]
        if not of_it:
            wrong.append(f"{message}\n    no row of docs/errors.md quotes its beginning")
        elif not any(message.kind in row.kinds for row in of_it):
            wrong.append(f"{message}\n    docs/errors.md:{of_it[0].line} says {', '.join(of_it[0].kinds)}")
    return wrong


# -------------------------------------------------------------------------------------------------------- the tests


def test_every_message_is_documented() -> None:
    wrong = undocumented(messages()[0], rows_of(DOCUMENT.read_text()))
    assert not wrong, "\n".join(wrong)


def test_every_message_can_be_read_in_the_source() -> None:
    """One that is put together elsewhere would go unnoticed."""
    assert not messages()[1], "\n".join(messages()[1])


@pytest.mark.parametrize("row", rows_of(DOCUMENT.read_text()), ids=lambda row: row.quotes[0])
def test_a_row_is_of_one_message(row: Row) -> None:
    assert len(row.remedy.split()) >= 3, f"docs/errors.md:{row.line} does not say what to do"
    for quote in row.quotes:
        assert len(quote.replace(VALUE, "").split()) >= 3, f"docs/errors.md:{row.line}: {quote!r} says too little"
        of = {message.text for message in messages()[0] if message.text.startswith(quote)}
        assert len(of) == 1, f"docs/errors.md:{row.line}: {quote!r} begins {sorted(of) or 'no message'}"


SOURCE = """
def helper(name, given):
    remedy = " Give it less."
    message = f"{name} is too large: {given!r}." + remedy
    if given:
        raise ValueError(message)
    warnings.warn("a plain warning " "in two parts", RuntimeWarning, stacklevel=2)
    caller().warn(f"{name} warns" if name else "nothing warns", OurWarning)
    return KeyError(next(iter(given), "made here, " + f"raised {name}"))

class Caller:
    def warn(self, message, category):
        warnings.warn_explicit(message, category)

def obstacle():
    assert name, "no message"
    return "why it stops" if name else None

def hidden(parts):
    raise RuntimeError("".join(parts) if parts else parts)

def nothing(parts):
    raise RuntimeError(parts)
"""


def test_what_the_walk_finds() -> None:
    found, unknown = messages_of(SOURCE, "a.py")
    assert [(m.place, m.kind, m.text) for m in found] == [
        ("a.py:6", "ValueError", "... is too large: .... Give it less."),
        ("a.py:7", "RuntimeWarning", "a plain warning in two parts"),
        ("a.py:8", "OurWarning", "... warns"),
        ("a.py:8", "OurWarning", "nothing warns"),
        ("a.py:9", "KeyError", "made here, raised ..."),
        ("a.py:17", "reason", "why it stops"),
    ]
    assert [line.partition(": ")[0] for line in unknown] == ["a.py:20", "a.py:23"]


def test_what_fails() -> None:
    table = f"{HEADING}\n\n| message | class | what to do |\n|---|---|---|\n"
    message: Any = Message("a.py:6", "ValueError", "... is too large: .... Give it less.")
    (said_nothing,) = undocumented([message], rows_of(table))
    assert "a.py:6" in said_nothing
    assert "Give it less" in said_nothing
    (other_class,) = undocumented([message], rows_of(table + "| `... is too large` | `TypeError` | Give it less. |\n"))
    assert "says TypeError" in other_class
    assert not undocumented([message], rows_of(table + "| `... is too large` | `ValueError` | Give it less. |\n"))
    elsewhere = table.replace(HEADING, "## Others") + "| `... is too large` | `ValueError` | Give it less. |\n"
    assert not rows_of(elsewhere)
