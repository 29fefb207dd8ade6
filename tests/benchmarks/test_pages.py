"""Tests that the tables of pages agree with the result files that the pages name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import pages
from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.gains import SPEED, Gain, gains, gradient_error
from benchmarks.models import MODEL, QUOTED, SETTINGS
from benchmarks.operator import OPERATOR
from benchmarks.pages import BLOCK, KINDS, ROOT, UNNAMED, fill_page
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.small_card import FULL
from benchmarks.targets import curve_case
from flce.core.sizes import GIB, MIB
from tests.benchmarks.made_up import HEAD

PAGES = (
    "README",
    *(f"docs/{name}" for name in ("performance", "devices", "memory", "numerics", "distillation")),
    "benchmarks/notes",
)
SHAPES = (4096, 4096, 128256), (16384, 1024, 151936)
ERRORS = {"loss": 1e-6, "input_grad": 1.7e-3, "weight_grad": 1.8e-3}
OTHER_FILES = {name: name for name in ("logprobs", "divergence", "small-card", "plan")} | {"models": "model"}


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_say_what_the_results_say(page: str) -> None:
    text = (ROOT / f"{page}.md").read_text()
    assert fill_page(text) == text, f"python -m benchmarks pages {page}.md"
    found = [match["kind"] for match in BLOCK.finditer(text)]
    assert {*found} <= {*KINDS, *UNNAMED}
    assert found


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
            stock = "oom" if setting == SETTINGS[1] else (1e3, 9 * GIB)
            figures = [result("ours", "flce", "ours", (500.0, 5 * GIB)), result("stock", "stock", "stock", stock)]
            for each in figures:
                each.peak_bytes = each.workspace_bytes
            steps.append(Entry(replace(QUOTED, model=model, **setting), figures))
    save(run_of("model", *steps), tmp_path / "model.json")
    card = [replace(steps[0].results[0], tokens=1000, predicted_tokens=900), steps[0].results[1]]
    save(run_of("small-card", Entry(replace(FULL, model="Qwen3-0.6B"), card)), tmp_path / "small-card.json")
    floors = [result("floor", "products", "floor", (10.0, 0)), result("floor-forward", "one", "floor", (4.0, 0))]
    calls = [result("ours", "flce", "ours", (11.0, MIB)), result("ours-forward", "forward", "ours", (5.0, MIB))]
    for kind in ("logprobs", "divergence"):
        save(run_of(kind, Entry(curve_case(SHAPES[0]), [*floors, *calls])), tmp_path / f"{kind}.json")
    step: dict[str, Any] = {"patched": True, "checkpointing": False, "peak_bytes": 3 * GIB, "longest_sequence": None}
    step["parts"] = {"loss": GIB, "unsharded": 0}
    (tmp_path / "plan.json").write_text(json.dumps({"training": {"sharding": "fsdp"}, "steps": [step]}))
    names = {kind: OTHER_FILES.get(re.sub("-measured|-sharded", "", kind), "operator") for kind in KINDS}
    blocks = [f"<!-- {kind} {name}.json -->\nold\nold" for kind, name in names.items()]
    path = tmp_path / "page.md"
    path.write_text("\n\n".join(["before", *blocks, "after"]) + "\n")
    return path


def test_blocks_are_made_from_their_files(page: Path) -> None:
    for _ in range(2):  # a second time changes nothing
        assert CliRunner().invoke(app, ["pages", str(page)]).exit_code == 0
        text = page.read_text()
        assert "old" not in text
        assert text.startswith("before\n\n<!-- heads operator.json -->\n| ")
        assert text.endswith(" |\n\nafter\n")
        sizes = "| 4096 x 4096 x 128256, ms | workspace, MiB | 16384 x 1024 x 151936, ms | workspace, MiB |"
        assert text.count(sizes) == 1
        assert "\n| flce | 10.4 (1.04) | 566 | 10.4 (1.04) | 566 |\n" in text
        assert "\n| flce, 4 MiB budget | 19.0 (1.90) | 4.00 | no plan | - |\n" in text
        assert "8 MiB" not in text  # it is in the picture
        assert "| stock | 1.0e-06 | 1.7e-03 | 1.8e-03 |" in text
        assert text.count("| 4 x 8192 tokens, bfloat16 | flce | 65,536 | 5.0 | 65,536 | 5.0 |") == 1
        assert "| 4 x 8192 tokens, bfloat16, LoRA of rank 16 | flce | 65,536 " in text
        assert text.count("|  | stock | out of memory | - | out of memory | - |") == 1
        assert "\n|  | bfloat16, loss | bfloat16, dX | bfloat16, dW |\n" in text
        assert "\n| flce | 1.10 (1.00) |\n| forward | 1.25 (1.00) |\n" in text  # log-probabilities
        assert "\n| all weights, no checkpointing | flce | 1,000 | 900 | 0.90 |\n" in text
        assert "\n| GiB | patched |\n|---|---:|\n| peak | 3.00 |\n| loss | 1.00 |\n" in text
        assert "\n| GiB | fsdp, patched |\n|---|---:|\n| peak | 3.00 |\n| longest sequence, tokens | - |\n" in text
        assert text.count("Measured 2026-11-26 on made up; torch 2.11.0.\n") == 5
        assert "\nNot measured: CCE (cce): as planned\n" in text
        assert "again" not in text


def test_a_block_without_its_file_says_so() -> None:
    marker = "<!-- heads benchmarks/results/none.json -->\n"
    text = "(Not measured yet: this table is made from `benchmarks/results/none.json`.)\n"
    assert fill_page(f"{marker}old\n") == marker + text


def test_a_gain_is_a_row_of_one_file(page: Path) -> None:
    case = {"model": "Qwen3-0.6B", "lora_rank": 16}
    others = {"liger-loss": "Liger's loss", "stock": "stock"}
    speed = Gain("Tokens/s", MODEL, "model.json", SPEED, others, case).row(page.parent, "results")
    assert speed == ["Tokens/s", "65,536", "stock 32,768", "[made, 2026-11-26](results/model.json)"]
    first = {"shape": SHAPES[0]}
    error = Gain("error", OPERATOR, "operator.json", gradient_error, others, first).row(page.parent, "results")
    assert error[1:3] == ["1.8e-03", "stock 1.8e-03"]
    assert gains(page.parent, "results").count("\n") == 1  # only the head: no file of the README is in this folder
