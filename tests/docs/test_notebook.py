"""Run the cells of docs/quick-start.ipynb one after the other, like a notebook service."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

plt = pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("transformers", minversion="4.56")

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "quick-start.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that the notebook runs, instead of running them."""
    run: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: run.append(command))
    return run


def test_the_notebook_trains_and_draws(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "torch")  # Triton's interpreter is too slow to train with
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("Agg")
    names: dict[str, Any] = {}
    for number, text in enumerate(CODE):
        exec(compile(text, f"cell {number}", "exec"), names)
    assert commands == []  # flce is installed
    assert names["stock_losses"] == pytest.approx(names["flce_losses"], abs=1e-4)
    assert names["flce_losses"][-1] < names["flce_losses"][0] - 1
    assert max(names["flce_memory"][1]) < 0.6 * max(names["stock_memory"][1])
    assert names["report"].fused == len(names["batches"]) + 1
    assert [len(axes.lines) for axes in names["figure"].axes] == [2, 2]
    plt.close(names["figure"])


@pytest.mark.parametrize("found", ["flce-0.1.0-py3-none-any.whl", "flce/__init__.py"])
def test_the_notebook_installs_a_wheel_or_a_clone(
    found: str, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Upload the wheel of flce"):
        exec(CODE[0], {})
    (tmp_path / found).parent.mkdir(exist_ok=True)
    (tmp_path / found).touch()
    exec(CODE[0], {})
    ((*pip, package),) = commands
    assert pip[1:4] == ["-m", "pip", "install"]
    assert package == f"{tmp_path / found if found.endswith('whl') else tmp_path}[cli,transformers]"


def test_the_notebook_is_stored_without_outputs() -> None:
    """Check that cells have names but no outputs and no execution counts, so that diffs are small."""
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
