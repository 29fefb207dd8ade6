"""Tests of README and docs: links have targets, commands and options exist. `test_snippets.py` runs Python blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "notes.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = re.compile(r"^( *)```(?:sh|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def ids(document: Path) -> str:
    return document.name


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, named like common renderers name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_blocks() -> list[Any]:
    """Return the blocks of commands of all documents."""
    return [
        pytest.param(match[2].replace("\n" + match[1], "\n"), id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, match in enumerate(COMMANDS.finditer(document.read_text()))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", target):  # a URL
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_pictures_need_no_network(document: Path) -> None:
    """Check that pictures are files. A block of Mermaid needs a script from the network."""
    text = document.read_text()
    assert "```mermaid" not in text
    for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
        picture = document.parent / target
        assert picture.is_file(), target
        if picture.suffix == ".svg":
            root = ElementTree.parse(picture).getroot()
            assert root.find("{http://www.w3.org/2000/svg}title") is not None
            assert not [element for element in root.iter() if any("href" in name for name in element.attrib)]


@pytest.mark.parametrize("text", command_blocks())
def test_commands(text: str) -> None:
    """Check targets of the Makefile, parts of the GPU script, extras, commands and options of flce and benchmarks."""
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / "scripts" / "gpu_session.sh").read_text()
    for line in text.splitlines():
        words = line.partition(" #")[0].removeprefix("$ ").split()
        if not words or words[0].startswith("#"):
            continue
        while "=" in words[0]:  # a variable of the environment
            del words[0]
        if words[0] == "make":
            assert re.search(rf"^{re.escape(words[1])}:", makefile, re.M), line
        elif words[0] == "scripts/gpu_session.sh":
            for part in words[1:]:
                assert re.search(rf"^ +([\w-]+ \| )*{re.escape(part)}( \| [\w-]+)*\)", script, re.M), line
        elif words[:2] == ["pip", "install"]:
            (extra,) = re.findall(r"^'?(?:\.|dist/\S+|flce)\[([a-z]+)\]'?$", words[2])
            assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.M), line
        elif words[:2] == ["python", "finetune.py"]:
            assert (ROOT / "finetune.py").is_file()
        elif words[0] == "flce":
            from flce.tools.cli import app as flce_app

            check_command(flce_app, words[1:])
        else:
            from benchmarks.cli import app

            assert words[:3] == ["python", "-m", "benchmarks"], line
            check_command(app, words[3:])


def check_command(app: Any, words: list[str]) -> None:
    typer = pytest.importorskip("typer")
    command = typer.main.get_command(app).commands[words[0]]
    options = {name for parameter in command.params for name in parameter.opts}
    for word in words[1:]:
        assert not word.startswith("-") or word in options, word


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=ids)
def test_rows_of_tables_are_narrow(document: Path) -> None:
    rows = [line for line in document.read_text().splitlines() if line.startswith("|") and len(line) > 160]
    assert not rows, rows[0]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    assert "## Quick start" in lines[:30]
    assert [line for line in lines if len(line) > 120 and line[0] != "|"] == []
