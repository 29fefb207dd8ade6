"""Tests of the commands: small runs, wrong arguments, committed results and the pages that quote them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from benchmarks import grpo, quick
from benchmarks.cases import Effort
from benchmarks.cli import BENCHMARKS, app
from benchmarks.models import MODEL, ModelCase
from benchmarks.operator import OPERATOR
from benchmarks.pages import BLOCK, KINDS, ROOT, UNNAMED, fill_page
from benchmarks.problem import CALLS, OperatorCase
from benchmarks.rows import ROWS, TASKS, RowCase

CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {
    "operator": ["| flce |", "median ms", "relative error against float64", "spread: "],
    "model": ["| flce, 1 MiB budget |", "tokens/s", "x stock", "| loss |"],
    "rows": ["GB/s, of copy: softmax forward, float32, 8 rows", "| columns | copy | flce | eager | flce, again |"],
    "grpo": ["| TRL's kernel |", "tokens/s", "peak GiB", "tiny-llama, old policy"],
    "logprobs": ["| flce, no gradient |", "| four bare products |", "planned MiB", "spread: "],
    "divergence": ["| flce, jsd, entropy |", "| eight bare products |", "planned MiB", "spread: "],
}


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("kind", SHOWN)
def test_a_small_run(kind, tmp_path, monkeypatch):
    """Every contender is measured and shown. The operator is as exact as stock, a model needs less memory."""
    if kind == "grpo":
        pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    benchmark, path = BENCHMARKS[kind], tmp_path / "run.json"
    done = invoke(kind, "--preset", "tiny", "--device", "cpu", "--rounds", 2, "--out", path)
    assert done.exit_code == 0, done.output
    document, run = json.loads(path.read_text()), benchmark.load(path)
    assert (document["schema"], document["kind"], document["date"][-1]) == (1, kind, "Z")
    assert {"python", "torch", "flce"} <= set(document["versions"])
    assert [entry.case for entry in run.cases] == [case for case, _ in benchmark.presets["tiny"]()]
    for entry in run.cases:
        applying = [each.name for each in benchmark.contenders(entry.case) if each.applies(entry.case, CPU)]
        first = next(result.contender for result in entry.results if result.family == "ours")
        assert [result.contender for result in entry.results] == [*applying, f"{first}-again"]
        for result in entry.results:
            assert result.status == ("ok" if result.samples_ms else "unavailable"), result.reason
            assert len(result.samples_ms) == 2 or result.family not in ("ours", "repeat", "stock")
            assert result.samples_ms or (result.family == "peer" and result.reason)
        ours, stock = (cast("Any", entry.by_name(name)) for name in ("ours", "stock"))
        if kind == "operator" and ours.errors and stock.errors:
            assert all(error <= 1.05 * stock.errors[name] + 1e-6 for name, error in ours.errors.items())
        elif kind == "model":
            assert ours.loss == pytest.approx(stock.loss, abs=1e-3)
            assert ours.peak_bytes < stock.peak_bytes
        elif kind in ("logprobs", "divergence"):
            assert ours.planned_bytes > 0
    whole = invoke("table", path).output
    assert all(text in whole for text in SHOWN[kind])
    assert "(liger" in whole.partition("Not measured: ")[2]
    assert invoke("table", path, "--brief", "--out", path.with_suffix(".md")).exit_code == 0
    assert len(path.with_suffix(".md").read_text()) < len(whole)
    with pytest.raises(ValueError, match="no results of 'wrapped'"):
        BENCHMARKS["wrapped"].load(path)


def test_quick(tmp_path, monkeypatch):
    """A table, a file without folders of the machine, and a picture."""
    monkeypatch.setattr(quick, "EFFORT", Effort(1, 0.0))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "quick", "--out", "/home/somebody/quick.json"])
    call = ("quick", "--out", tmp_path / "quick.json", "--device", "cpu", "--shape", "96,64,500", "--budget", "1.5MiB")
    done = invoke(*call)
    assert done.exit_code == 0, done.output
    assert len({len(line) for line in done.stdout.splitlines() if line.startswith("| ")}) == 1  # aligned
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "quick.json").read_text())
    assert document["command"] == "python -m benchmarks quick --out quick.json"
    (entry,) = OPERATOR.load(tmp_path / "quick.json").cases
    for name in ("ours", "ours-1MiB", "stock", "ours-again"):
        assert max((entry.by_name(name).errors or {"": 1.0}).values()) < 1e-5
    assert (entry.by_name("ours-1MiB").workspace_bytes or 0) <= 2**20


@pytest.mark.parametrize(
    "command, message",
    [
        ("operator --preset nothing", "tiny"),
        ("operator --shape 8,4", "tokens,hidden,vocab as 3 positive numbers"),
        ("operator --shape 8,4,16 --set contenders=nobody", "there are"),
        ("operator --shape 8,4,16 --device abacus", "there is no device 'abacus' here"),
        ("rows --shape 8,16 --set operation=softmax --set direction=sideways", "nothing to measure"),
        ("model --set model=GPT-9 --shape 1,8", "Llama-3.2-1B"),
        ("rows --preset tiny --set errors=true", "rows: no field 'errors'; expected one of rows, columns"),
        ("wrapped --preset tp", "several processes take part"),
        ("quick --budget 0.5MiB", "expected at least 1MiB, got '0.5MiB'"),
        ("quick --shape 1000000000,100000,16 --device cpu", "operands and gradients take 745,058 GiB, and cpu has"),
    ],
)
def test_wrong_arguments_are_explained(command, message, tmp_path):
    done = invoke(*command.split(), "--out", tmp_path / "none.json")
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("name, exit_code", [("cpu", 0), ("h200-rows", 2), ("model-h200", 2)])
def test_committed_results_have_tables_and_pictures(name, exit_code, tmp_path):
    assert "not known, no call of flce was measured twice" in invoke("table", RESULTS / f"{name}.json").output  # then
    assert invoke("plot", RESULTS / f"{name}.json", "--out", tmp_path / "picture.png").exit_code == exit_code
    assert (tmp_path / "picture.png").exists() == (exit_code == 0)


@pytest.mark.parametrize(
    "page",
    [
        "README",
        *(f"docs/{name}" for name in ("performance", "devices", "memory", "numerics", "distillation", "rl")),
        "benchmarks/notes",
    ],
)
def test_the_pages_say_what_the_results_say(page):
    text = (ROOT / f"{page}.md").read_text()
    assert fill_page(text) == text, f"python -m benchmarks pages {page}.md"
    assert set() < {match["kind"] for match in BLOCK.finditer(text)} <= {*KINDS, *UNNAMED}
    marker = "<!-- heads benchmarks/results/none.json -->\n"
    assert fill_page(f"{marker}old\n").startswith(f"{marker}(Not measured yet: this table is made from ")


@pytest.mark.parametrize("measured", BENCHMARKS.values(), ids=lambda measured: measured.kind)
def test_the_cases_of_all_presets_survive_the_file(measured):  # pytest-benchmark has a fixture `benchmark`
    for preset in measured.presets.values():
        assert preset()
        for case, effort in preset():
            assert effort.rounds >= 1
            assert measured.case_type.from_dict(json.loads(json.dumps(case.to_dict()))) == case


ON_CUDA: list[tuple[Any, Any]] = [
    *((OPERATOR, OperatorCase(500, 256, 4001, mode=mode, errors=True)) for mode in CALLS),
    (OPERATOR, OperatorCase(4096, 1024, 32000, calls=True)),
    (MODEL, ModelCase("tiny-llama", 2, 128, budgets_mib=(1,))),
    *((grpo.GRPO, replace(grpo.TINY, part=part, dtype="bfloat16", sequence=128, prompt=64)) for part in grpo.PARTS),
    *((ROWS, RowCase(256, 3001, dtype, *task)) for dtype in ("bfloat16", "float32") for task in TASKS),
]


@pytest.mark.gpu
@pytest.mark.parametrize("measured, case", ON_CUDA, ids=lambda each: getattr(each, "kind", None))
def test_every_contender_runs_on_cuda(measured, case):
    """Installed peers may fail. A call that is captured has three times."""
    entry = measured.measure(case, torch.device("cuda"), Effort(2, 5.0))
    ours, stock = entry.by_name("ours"), entry.by_name("stock")
    for result in entry.results:
        if result.family != "peer" or result.contender == "torch-compile":
            assert (result.status, len(result.samples_ms)) == ("ok", 2), (result.contender, result.reason)
            assert result.loss is None or result.loss == pytest.approx(stock.loss, abs=1e-2)
            assert result.note is None, (result.contender, result.note)
            if getattr(case, "calls", False):
                assert result.host_ms <= result.median_ms
                assert 0.5 < result.median_ms / result.alone_ms < 10, result.contender
    if getattr(case, "calls", False):  # replays include backward
        assert entry.by_name("floor").alone_ms < ours.alone_ms < 1.1 * stock.alone_ms
