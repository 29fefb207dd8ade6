"""A small run of every subcommand, and the measuring itself on known quantities."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks.benchmark import save
from benchmarks.cli import BENCHMARKS, app
from benchmarks.operator import OPERATOR, PRESETS, time_table
from benchmarks.reports import markdown, shortfalls
from flce.bench.cases import MIB, Effort, Outcome, needs_package
from flce.bench.contenders import CONTENDERS, OperatorContender, autograd_step, budget_name, select, stock_loss
from flce.bench.measure import Meter
from flce.bench.problem import CALLS, IGNORE_INDEX, OperatorCase, Problem, exactness, make_oracle
from flce.bench.results import Entry, Result, Run
from flce.bench.tables import absences, spread_note

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


PEERS = {"liger", "liger-float32-8x", "cce", "cce-unfiltered", "cce-exact", "trl", "fla", "quack"}


# Neither the peers nor, in half precision, the bare products are measured on a CPU.
CUDA_ONLY = {*PEERS, "torch-compile", "torch-chunked", "floor", "floor-aligned"}


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """One tiny run of `operator`, on the CPU."""
    path = tmp_path_factory.mktemp("benchmarks") / "operator.json"
    arguments = ["operator", "--preset", "tiny", "--device", "cpu", "--errors", "--rounds", "2", "--out", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return path


def test_every_case_of_the_preset_is_measured(result_file):
    run = OPERATOR.load(result_file)
    assert [entry.case for entry in run.cases] == [case for case, _ in PRESETS["tiny"]()]
    for entry in run.cases:
        first = "ours-full" if entry.case.ignored else "ours"
        for name in (*(entry.case.contenders or ("ours", "ours-vocab", "stock")), f"{first}-again"):
            if name in CUDA_ONLY:
                continue
            result = entry.by_name(name)
            assert result.status == "ok", result.reason
            assert len(result.samples_ms) == 2
            assert result.workspace_bytes is not None
            assert bool(result.errors) == (entry.case.errors and "ours-full" not in name)  # of another problem


def test_schema(result_file):
    document = json.loads(result_file.read_text())
    assert document["schema"] == 1
    assert document["kind"] == "operator"
    assert document["date"].endswith("Z")
    assert document["command"].startswith("python -m benchmarks")
    assert {"python", "torch"} <= set(document["versions"])
    assert {"type", "name", "threads"} <= set(document["device"])
    for entry in document["cases"]:
        assert set(entry) == {"case", "results"}
        assert {"tokens", "hidden", "vocab", "dtype", "mode", "ignored", "upstream"} <= set(entry["case"])
        for result in entry["results"]:
            assert {"contender", "title", "family", "status", "samples_ms", "cpu_samples_ms"} <= set(result)
            assert set(result) <= {field.name for field in fields(Result)} | {"median_ms"}
            assert result["status"] in ("ok", "unavailable", "failed")
            assert ("reason" in result) == (result["status"] != "ok") == ("median_ms" not in result)


def test_missing_peers_are_named(result_file):
    run = OPERATOR.load(result_file)
    for entry in run.cases:
        some = {"fla", "quack"} if entry.case.mode == "reduction-none" else set()  # have no per-token losses
        for name in PEERS - some if entry.case.contenders is None else PEERS & {*entry.case.contenders}:
            result = entry.by_name(name)
            assert result.status == "unavailable", f"{name} was dropped in silence"
            assert result.reason
    assert any("(liger)" in line for line in absences(run))
    assert any("(cce)" in line for line in absences(run))


def test_a_package_that_is_not_there_is_named():
    reason = needs_package("no_such_package.at_all", "no-such-package")(CPU)
    assert reason == "not installed (pip install no-such-package)"
    assert needs_package("json", "json")(CPU) == "needs a CUDA device"
    assert needs_package("json", "json", cuda=False)(CPU) is None


def test_ours_is_as_exact_as_it_promises(result_file):
    for entry in OPERATOR.load(result_file).cases:
        if entry.case.contenders is not None:
            continue
        ours, stock = entry.by_name("ours"), entry.by_name("stock")
        assert ours.errors is not None
        assert stock.errors is not None
        assert set(ours.errors) == set(stock.errors)
        for name, error in ours.errors.items():
            assert error <= 1.05 * stock.errors[name] + 1e-6, (entry.case.title, name)


def test_table(result_file, tmp_path):
    done = CliRunner().invoke(app, ["table", str(result_file)])
    assert done.exit_code == 0, done.output
    assert "| flce |" in done.output
    assert "median ms" in done.output
    assert "relative error against float64" in done.output
    assert "Not measured: Liger" in done.output
    brief, out = tmp_path / "sub" / "brief.md", str(tmp_path / "sub" / "brief.md")
    assert CliRunner().invoke(app, ["table", str(result_file), "--brief", "--out", out]).exit_code == 0
    assert "| median ms |" not in brief.read_text()


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        *((command, ["--preset", "nothing"], "tiny") for command in BENCHMARKS),
        ("operator", [], "--preset or --shape"),
        ("operator", ["--preset", "tiny", "--shape", "1,2,3"], "not both"),
        ("operator", ["--shape", "8,4"], "tokens,hidden,vocab"),
        ("operator", ["--shape", "8,4,0"], "positive"),
        ("operator", ["--shape", "8,4,16", "--dtype", "int8"], "float32"),
        ("operator", ["--shape", "8,4,16", "--contender", "nobody"], "there are"),
        ("operator", ["--shape", "8,4,16", "--device", "abacus"], "auto, cpu or cuda"),
        ("operator", ["--shape", "8,4,16", "--no-time"], "nothing to measure"),
        ("model", [], "--preset or --shape"),
        ("model", ["--model", "GPT-9", "--shape", "1,8"], "Llama-3.2-1B"),
        ("model", ["--preset", "tiny", "--shape", "1,8"], "not both"),
        ("model", ["--model", "tiny-llama", "--shape", "8"], "batch,sequence"),
        ("model", ["--preset", "tiny", "--contender", "nobody"], "there are"),
        ("model", ["--preset", "tiny", "--model", "Qwen3-0.6B"], "nothing to measure"),
        ("kernels", [], "--preset or --shape"),
        ("kernels", ["--preset", "tiny", "--shape", "8,16"], "not both"),
        ("kernels", ["--shape", "8"], "tokens,columns"),
        ("kernels", ["--shape", "8,16", "--dtype", "int8"], "float16"),
        ("rows", [], "--preset or --shape"),
        ("rows", ["--preset", "tiny", "--shape", "8,16"], "not both"),
        ("rows", ["--shape", "8"], "rows,columns"),
        ("rows", ["--shape", "8,16", "--dtype", "int8"], "float16"),
        ("rows", ["--preset", "tiny", "--dtype", "float64"], "nothing to measure"),
        ("rows", ["--preset", "tiny", "--errors"], "rows: no such thing as errors"),
        ("kernels", ["--preset", "tiny", "--mode", "forward"], "the kernels: no such thing as mode"),
        ("operator", ["--shape", "8,4,16", "--mode", "sideways"], "frozen-head"),
        ("model", ["--preset", "tiny", "--optimizer", "sideways"], "adamw"),
    ],
)
def test_wrong_arguments_are_explained(command, arguments, message, tmp_path):
    if command == "model":
        pytest.importorskip("transformers")
    out = tmp_path / "none.json"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, *arguments, "--out", str(out)])
    assert done.exit_code == 2
    assert message in done.output
    assert not out.exists()


def test_a_failing_contender_is_reported_and_the_others_go_on():
    def prepare(problem):
        def step():
            raise RuntimeError("as planned")

        return step

    broken = OperatorContender("broken", "A broken one", "peer", prepare)
    case = OperatorCase(8, 4, 16, dtype="float32")
    entry = OPERATOR.measure(case, CPU, Effort(2, 1.0), [broken, *select(["stock"])])
    failed, stock = entry.by_name("broken"), entry.by_name("stock")
    assert failed.status == "failed"
    assert failed.reason == "RuntimeError: as planned"
    assert len(stock.samples_ms) == 2


def test_a_slow_contender_gets_one_sample():
    entry = OPERATOR.measure(OperatorCase(8, 4, 16, dtype="float32"), CPU, Effort(5, 0.0), select(["stock"]))
    assert len(entry.results[0].samples_ms) == 1


def test_a_deadline_ends_a_case():
    case = OperatorCase(8, 4, 16, dtype="float32")
    entry = OPERATOR.measure(case, CPU, Effort(5, 1.0, until=0.0), select(["stock", "ours"]))
    assert [(result.status, result.samples_ms) for result in entry.results] == [("skipped", [])] * 3


def test_rounds_are_in_the_given_order_first_and_in_any_order_then():
    calls = []

    def prepare(name):
        def step():
            calls.append(name)
            return Outcome(None)

        return lambda problem: step

    contenders = [OperatorContender(name, name, "peer", prepare(name)) for name in "abcd"]
    rounds = 6
    OPERATOR.measure(OperatorCase(8, 4, 16), CPU, Effort(rounds, 60.0), contenders)
    turns = ["".join(calls[start : start + 4]) for start in range(4, 4 * (rounds + 1), 4)]  # after the warm-up
    assert turns[0] == "abcd"
    assert all(sorted(turn) == list("abcd") for turn in turns)
    assert len(set(turns)) > 1


def test_a_budget_is_a_contender():
    float32, bfloat16 = select([budget_name(3), budget_name(2, "bf16")])
    assert (float32.name, bfloat16.name) == ("ours-3MiB", "ours-bf16-2MiB")
    assert "3 MiB" in float32.title
    assert "bfloat16 sums" in bfloat16.title
    case = OperatorCase(2000, 32, 500, dtype="float32")
    assert float32.applies(case, CPU)
    assert not bfloat16.applies(case, CPU)
    entry = OPERATOR.measure(case, CPU, Effort(1, 1.0), [float32])
    assert entry.results[0].status == "ok", entry.results[0].reason
    assert entry.results[0].workspace_bytes is not None
    assert entry.results[0].workspace_bytes <= 3 * MIB
    with pytest.raises(ValueError, match="ours-0MiB"):
        select(["ours-0MiB"])


@pytest.mark.parametrize("mode", CALLS)
def test_the_floor_is_the_products_of_the_call(mode, monkeypatch):
    """Counted, with their results, which must be the logits and the gradients."""
    problem = Problem(OperatorCase(24, 8, 40, dtype="float32", mode=mode), CPU)
    results = []
    multiply = torch.mm

    def counting(a, b, out):
        results.append(multiply(a, b, out=out))

    monkeypatch.setattr(torch, "mm", counting)
    (floor,) = select(["floor"])
    floor.prepare(problem)()
    x, w = problem.input.detach(), problem.weight.detach()
    expected = [x @ w.T] * {"reduction-none": 2}.get(mode, 1)
    if mode != "forward":
        expected.append(problem.logits_gradient @ w)
    if mode in ("forward+backward", "reduction-none"):
        expected.append(problem.logits_gradient.T @ x)
    assert len(results) == len(expected)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result, truth)


def test_the_recomputed_floor_has_the_logits_twice():
    (contender,) = select(["floor-recomputed"])
    assert contender.applies(OperatorCase(8, 4, 16, dtype="float32"), CPU)
    assert not contender.applies(OperatorCase(8, 4, 16, dtype="float32", mode="reduction-none"), CPU)
    contender.prepare(Problem(OperatorCase(8, 4, 16, dtype="float32"), CPU))()


def test_cpu_meter_counts_a_known_pattern():
    """Peak of a, then a and b, then b and c, above what is there before and what is returned."""
    held = torch.zeros(8 * MIB, dtype=torch.uint8)

    def step():
        a = torch.zeros(2 * MIB, dtype=torch.uint8)
        b = torch.zeros(4 * MIB, dtype=torch.uint8)
        del a
        c = torch.zeros(16 * MIB, dtype=torch.uint8)
        del b, c
        return Outcome(None, input_grad=held.clone())

    _, sample = Meter(CPU).warm_up(step)
    # b and c (20 MiB) are the peak, before the 8 MiB that are returned exist.
    assert sample.workspace_bytes == (4 + 16 - 8) * MIB


def test_cpu_meter_sees_the_backward_pass():
    """Stock float32 holds at least the log-probabilities and their gradient."""
    problem = Problem(OperatorCase(256, 32, 4096, dtype="float32"), CPU)
    _, sample = Meter(CPU).warm_up(autograd_step(problem, stock_loss))
    logits = 256 * 4096 * 4
    assert sample.workspace_bytes is not None
    assert 2 * logits <= sample.workspace_bytes + (256 + 4096) * 32 * 4 <= 3.2 * logits


@pytest.mark.gpu
def test_cuda_meter_counts_a_known_pattern():
    device = torch.device("cuda")

    def step():
        a = torch.zeros(32 * MIB, dtype=torch.uint8, device=device)
        b = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
        del a, b
        return Outcome(None, input_grad=torch.zeros(8 * MIB, dtype=torch.uint8, device=device))

    meter = Meter(device)
    _, sample = meter.warm_up(step)
    assert sample.workspace_bytes == pytest.approx((32 + 64 - 8) * MIB, abs=2 * MIB)  # blocks may be larger
    assert meter.sample(step).milliseconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", CALLS)
def test_every_contender_runs_on_cuda(mode, tmp_path):
    """Also the bare products and the compiled stock path; of the peers, those that are installed may fail."""
    contenders = [c for c in CONTENDERS if c.name != "torch-compile" or mode == "forward+backward"]
    case = OperatorCase(500, 256, 4001, mode=mode, errors=True)
    entry = OPERATOR.measure(case, torch.device("cuda"), Effort(2, 5.0), contenders)
    for result in entry.results:
        if result.family != "peer" or result.contender == "torch-compile":
            assert result.status == "ok", (result.contender, result.reason)
            assert len(result.samples_ms) == 2
    assert entry.by_name("floor-aligned").samples_ms
    head: dict[str, Any] = {"date": "", "command": "", "commit": None, "versions": {}}
    save(Run("operator", head | {"device": {"type": "cuda", "name": ""}}, [entry]), tmp_path / "run.json")
    run = OPERATOR.load(tmp_path / "run.json")
    assert "| flce |" in markdown(run, OPERATOR.tables(run, False))


@pytest.mark.parametrize("mode", CALLS)
def test_oracle_agrees_with_autograd_in_float64(mode):
    case = OperatorCase(50, 16, 70, dtype="float64", mode=mode, ignored=0.3, upstream=3.0)
    problem = Problem(case, CPU)
    errors = exactness(autograd_step(problem, float64_stock)(), make_oracle(problem))
    assert errors is not None
    gradients = {"forward": 0, "frozen-head": 1}.get(mode, 2)
    assert len(errors) == 1 + gradients
    assert max(errors.values()) < 1e-12


def float64_stock(x, w, y, reduction):
    return torch.nn.functional.cross_entropy(x @ w.T, y, reduction=reduction)


def test_problem_is_as_asked_for():
    problem = Problem(OperatorCase(400, 64, 1000, dtype="float32", ignored=0.25, logits_std=3.0), CPU)
    assert int((problem.target == IGNORE_INDEX).sum()) == 100
    assert float((problem.input @ problem.weight.T).detach().std()) == pytest.approx(3.0, rel=0.1)


def test_not_finite_errors_survive_the_file(tmp_path):
    entry = Entry(OperatorCase(8, 4, 16))
    result = OPERATOR.measure(OperatorCase(8, 4, 16, dtype="float32"), CPU, Effort(1, 1.0), select(["stock"])).results[
        0
    ]
    result.errors = {"loss": math.inf, "input_grad": 0.5}
    entry.results.append(result)
    head: dict[str, Any] = {"date": "d", "command": "c", "commit": None, "versions": {}, "device": {}}
    save(Run("operator", head, [entry]), tmp_path / "run.json")
    again = OPERATOR.load(tmp_path / "run.json").cases[0].results[0]
    assert again.errors == result.errors


def test_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("benchmarks", run_name="__main__")
    assert done.value.code == 0
    shown = capsys.readouterr().out
    for name in ("operator", "model", "kernels", "rows", "table", "plot"):
        assert name in shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_gpu_script_parses():
    script = ROOT / "scripts" / "gpu_session.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def entry_of(*milliseconds: float) -> Entry:
    """Steps that take as long, by a clock of their own."""
    figures = iter(milliseconds)
    entry = OPERATOR.measure(OperatorCase(8, 4, 16, dtype="float32"), CPU, Effort(1, 9.0), select(["ours", "stock"]))
    for result in entry.results:
        result.samples_ms = [next(figures) for _ in range(3)]
    return entry


def test_our_default_is_measured_twice_and_the_tables_say_how_far_apart():
    entry = entry_of(1.0, 9.0, 2.0, 5.0, 5.0, 5.0, 2.2, 0.1, 30.0)
    assert [result.contender for result in entry.results] == ["ours", "stock", "ours-again"]
    assert [result.family for result in entry.results] == ["ours", "stock", "repeat"]
    assert [result.median_ms for result in entry.results] == [2.0, 5.0, 2.2]
    note = spread_note([entry])
    assert note == "spread: 10.0% between flce and flce, again, the same call (2 and 2.2 ms)"
    other = entry_of(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.3, 1.3, 1.3)
    assert "20.0% in the median and 30.0% at most" in spread_note([entry, other])
    head: dict[str, Any] = {"device": {"type": "cpu", "name": "made up"}}
    run = Run("operator", head, [entry, other])
    assert all("spread: " in table.notes[-1] for table in OPERATOR.tables(run, False))
    assert "not known" in spread_note([Entry(entry.case, entry.results[:2])])


@pytest.mark.parametrize("name", ["cpu", "h200", "h200-rows", "kernels-h200", "model-h200"])
def test_committed_results_make_tables_and_pictures(name, tmp_path):
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    done = CliRunner().invoke(app, ["table", str(file)])
    assert done.exit_code == 0, done.output
    # Most are older than the second measurement of the first of ours.
    spread = "% in the median and " if name == "h200" else "not known, nothing of ours was measured twice"
    assert spread in done.output
    out = tmp_path / "picture.png"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plot", str(file), "--out", str(out)])
    if "kernels" in file.name:
        assert "there is no picture of the kernels" in done.output
    else:
        assert done.exit_code == 0, done.output
        assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda benchmark: benchmark.kind)
def test_results_of_others_are_told_apart(benchmark, tmp_path):
    head: dict[str, Any] = {"date": "d", "command": "c", "commit": None, "versions": {}, "device": {}}
    for other in BENCHMARKS.values():
        save(Run(other.kind, head, []), tmp_path / "run.json")
        if other is benchmark:
            assert benchmark.load(tmp_path / "run.json").cases == []
        else:
            with pytest.raises(ValueError, match=f"no results of {benchmark.noun}"):
                benchmark.load(tmp_path / "run.json")


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda benchmark: benchmark.kind)
def test_the_cases_of_all_presets_survive_the_file(benchmark):
    for preset in benchmark.presets.values():
        plan = preset()
        assert plan
        for case, effort in plan:
            assert effort.rounds >= 1
            assert benchmark.case_type.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_a_failing_repeat_is_a_shortfall():
    calls = iter(range(100))

    def prepare(problem):
        if next(calls):
            raise RuntimeError("as planned")
        return lambda: None

    ours = OperatorContender("ours", "flce", "ours", prepare)
    entry = OPERATOR.measure(OperatorCase(8, 4, 16, dtype="float32"), CPU, Effort(1, 1.0), [ours])
    (missing,) = shortfalls(Run("operator", {}, [entry]))
    assert (missing.contender, missing.reason) == ("ours-again", "RuntimeError: as planned")
    assert "not known" in time_table(entry).notes[-1]
    assert "flce, again (ours-again) failed: RuntimeError: as planned" in time_table(entry).notes
