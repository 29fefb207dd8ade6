"""Tests that the tables of pages agree with the result files that the pages name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import pages
from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.models import QUOTED, SETTINGS
from benchmarks.pages import BLOCK, KINDS, PLANNED, ROOT, fill_page
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.targets import curve_case
from flce.core.sizes import GIB, MIB
from tests.benchmarks.made_up import HEAD

SHAPES = (4096, 4096, 128256), (16384, 1024, 151936)
ERRORS = {"loss": 1e-6, "input_grad": 1.7e-3, "weight_grad": 1.8e-3}


@pytest.mark.parametrize("page, blocks", [("README.md", 2), ("docs/performance.md", 2), ("docs/devices.md", 5)])
def test_the_pages_say_what_the_results_say(page: str, blocks: int) -> None:
    text = (ROOT / page).read_text()
    assert fill_page(text) == text, "python -m benchmarks pages README.md docs/performance.md docs/devices.md"
    found = [match["kind"] for match in BLOCK.finditer(text)]
    assert len(found) >= blocks
    assert set(found) <= {*KINDS, *PLANNED}


def result(name: str, title: str, family: str, figures: tuple[float, float] | str, **more: Any) -> BenchResult:
    if isinstance(figures, str):
        return BenchResult(name, title, family, figures, "as planned")
    milliseconds, size = figures
    return BenchResult(name, title, family, samples_ms=[milliseconds], workspace_bytes=round(size), **more)


def run_of(kind: str, *entries: Entry) -> Run:
    return Run(kind, HEAD, list(entries))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a page with a block of every kind, and write the results that it names."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    entries = []
    for shape in SHAPES:
        ours = result("ours", "flce", "ours", (10.4, 566 * MIB), errors=ERRORS)
        few = "unplanned" if shape == SHAPES[1] else (19.0, 4 * MIB)
        others = [
            result("ours-4MiB", "flce, 4 MiB budget", "ours", few),
            result("ours-8MiB", "flce, 8 MiB budget", "ours", (18.0, 8 * MIB)),
            result("cce", "CCE", "peer", "unavailable"),
            result("stock", "stock (of PyTorch)", "stock", (14.0, 4978 * MIB), errors=ERRORS),
            result("ours-again", "flce, again", "repeat", (10.5, 566 * MIB)),
        ]
        entries.append(Entry(curve_case(shape), [result("floor", "products", "floor", (10.0, 0)), ours, *others]))
    save(run_of("operator", *entries), tmp_path / "operator.json")
    steps = []
    for setting in SETTINGS:
        for model in ("Llama-3.2-1B", "Qwen3-0.6B"):
            stock = "oom" if setting == SETTINGS[2] else (1e3, 9 * GIB)
            figures = [result("ours", "flce", "ours", (500.0, 5 * GIB)), result("stock", "stock", "stock", stock)]
            for each in figures:
                each.peak_bytes = each.workspace_bytes
            steps.append(Entry(replace(QUOTED, model=model, **setting), figures))
    save(run_of("model", *steps), tmp_path / "model.json")
    blocks = [f"<!-- {kind} {benchmark.kind}.json -->\nold\nold" for kind, (benchmark, _) in KINDS.items()]
    path = tmp_path / "page.md"
    path.write_text("\n\n".join(["before", *blocks, "after"]) + "\n")
    return path


def test_blocks_are_made_from_their_files(page: Path) -> None:
    for _ in range(2):  # a second time changes nothing
        assert CliRunner().invoke(app, ["pages", str(page)]).exit_code == 0
        text = page.read_text()
        assert "old" not in text
        assert text.startswith("before\n\n<!-- heads operator.json -->\n| ")
        assert text.endswith(".\n\nafter\n")
        sizes = "| 4096 x 4096 x 128256, ms | workspace, MiB | 16384 x 1024 x 151936, ms | workspace, MiB |"
        assert text.count(sizes) == 1
        assert "\n| flce | 10.4 | 566 | 10.4 | 566 |\n| flce, 4 MiB budget | 19.0 | 4.00 | no plan | - |\n" in text
        assert "8 MiB" not in text  # it is in the picture
        assert "| stock | 1.40 | 4978 | 1.7e-03 | 1.8e-03 |" in text
        assert text.count("| 4 x 8192 tokens, bfloat16 | flce | 65,536 | 5.0 | 65,536 | 5.0 |") == 2  # all, the first
        assert "| 4 x 8192 tokens, bfloat16, LoRA of rank 16 | flce | 65,536 " in text
        assert text.count("|  | stock | out of memory | - | out of memory | - |") == 1
        assert text.count("Measured 2026-11-26 on made up; torch 2.11.0.\n") == 2
        assert "\nNot measured: CCE (cce): as planned\n" in text
        assert "again" not in text
