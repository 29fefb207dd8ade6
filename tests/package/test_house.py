"""Tests of the folders: floors as in docs/architecture.md, and limits of their sizes."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import flce

ROOT = Path(flce.__file__).parents[1]
PACKAGE = ROOT / "flce"
FLOOR = re.compile(r"^\| `flce/(\w+)(?:/|\.py)` \|", re.M)


def floors() -> list[str]:
    """Return the folders and files of the package, from the top floor down."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return FLOOR.findall(text[text.index("## Floors") : text.index("## Files")])


def modules() -> dict[str, Path]:
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}


def imports(file: Path) -> set[str]:
    """Return the modules of flce that a file imports, also for type checkers only. Public names are not included."""
    existing, found = modules(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flce."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in existing else node.module for name in names}
    return {name if name in existing else f"{name}.__init__" for name in found}


def test_imports_go_downward() -> None:
    order = floors()
    folders = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {*order} == folders - {"__init__", "__main__"}
    for module, file in modules().items():
        folder = module.split(".")[1]
        if folder in order:
            above = order[: order.index(folder)]
            assert not [name for name in imports(file) if name.split(".")[1] in above], module


def test_imports_have_no_cycles() -> None:
    TopologicalSorter({module: imports(file) for module, file in modules().items()}).prepare()


def test_folders_and_files_are_small() -> None:
    assert len([*PACKAGE.glob("*.py")]) <= 8
    long = [file for file in PACKAGE.rglob("*.py") if len(file.read_text().splitlines()) > 700]
    assert not long


def test_tests_have_the_folders_of_the_package() -> None:
    """Check that a folder of tests belongs to a folder of the package, or tests other parts of the repository."""
    others = {"benchmarks", "distributed", "docs", "integrations", "package", "real", "search"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if [*path.glob("test_*.py")]}
    assert folders - others <= {*floors()}
    assert not [*(ROOT / "tests").glob("test_*.py")]
