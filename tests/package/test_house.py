"""Where files are: folders that form floors, as docs/architecture.md draws them, and none too full."""

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
    """Folders and files of the root, from the top down."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return FLOOR.findall(text[text.index("## Floors") : text.index("## Files")])


def modules() -> dict[str, Path]:
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}


def imports(file: Path) -> set[str]:
    """Modules of flce that a file imports anywhere, also for type checkers only, but for the public names."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flce."):
            each = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in each}
    return {name if name in known else f"{name}.__init__" for name in found}


def test_imports_go_downward() -> None:
    order = floors()
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {*order} == rooms - {"__init__", "__main__"}
    for module, file in modules().items():
        room = module.split(".")[1]
        if room in order:
            above = order[: order.index(room)]
            assert not [name for name in imports(file) if name.split(".")[1] in above], module


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: imports(file) for module, file in modules().items()}).prepare()


def test_rooms_are_not_too_full() -> None:
    assert len([*PACKAGE.glob("*.py")]) <= 8
    long = [file for file in PACKAGE.rglob("*.py") if len(file.read_text().splitlines()) > 700]
    assert not long


def test_tests_are_where_their_room_is() -> None:
    """A folder of tests is for a room of the package, or for what is not in the package."""
    beside = {"benchmarks", "distributed", "docs", "integrations", "package"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if [*path.glob("test_*.py")]}
    assert folders - beside <= {*floors()}
    assert not [*(ROOT / "tests").glob("test_*.py")]
