"""Private names are in one table. Importing flce needs none, and a patched model trains as stock without any one."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import flce
from flce.core import private
from tests.processes import run_python

PACKAGE = Path(flce.__file__).parent


def test_nothing_else_is_private() -> None:
    """Each attribute or import with an underscore is defined by flce, in the table, or documented."""
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    own = set(private.DOCUMENTED) | {"_flce"}  # attribute that patch_model sets on a model
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    found = []
    for file, tree in trees.items():
        if file.name == "private.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
                path = ast.unparse(node)
                if not path.startswith("private.") and not any(name.startswith(path) for name in private.DOCUMENTED):
                    found.append(f"{file.name}:{node.lineno} {path}")
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("flce"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [name for name in names if _is_private(name) and name not in private.DOCUMENTED]
    assert found == []


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_this_version_has_them() -> None:
    importlib.import_module("torch.distributed.fsdp")
    assert private.incomplete_entries() == []


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    # On a machine with GPUs autograd starts threads, and a process with threads cannot be forked.
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "tests.without_private_names", *private.NAMES, env=env)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", private.NAMES)
def test_without(name: str, outcomes: dict[str, Any]) -> None:
    """The import looks up no name; losses and gradients equal stock's; one warning has the consequence."""
    outcome, entry = outcomes[name], private.NAMES[name]
    assert "error" not in outcome, outcome["error"]
    assert outcome["early"] == []
    assert outcome["values"] == pytest.approx(outcome["stock"], rel=1e-5)
    (warning,) = outcome["said"]
    assert entry.purpose in warning
    assert entry.consequence in warning
    assert entry.paths[0] in warning


REFUSED = [name for name, entry in private.NAMES.items() if entry.consequence.startswith("That raises RuntimeError")]


@pytest.mark.parametrize("name", REFUSED)
def test_names_without_a_fallback_raise(name: str) -> None:
    with pytest.raises(RuntimeError, match="lacks a private name that flce needs for"):
        private.NAMES[name].fallback()
