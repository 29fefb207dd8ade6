"""Tests of a small run of every command, and of the meter on known quantities."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

import flce
from benchmarks.benchmark import save
from benchmarks.cases import Effort, StepOutcome, needs_package
from benchmarks.cli import BENCHMARKS, app
from benchmarks.contenders import CONTENDERS, OperatorContender, budget_name, select
from benchmarks.measure import BenchMeter
from benchmarks.operator import OPERATOR, table
from benchmarks.problem import CALLS, OperatorCase, OperatorProblem
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import markdown, shortfalls, spread_note
from flce.core.sizes import MIB
from flce.ops import linear_call
from flce.planning import device_kinds
from flce.testing.problem import IGNORED
from tests.benchmarks.made_up import HEAD

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


# --- a small run of each kind ---

SHOWN = {
    "operator": ["| flce |", "median ms", "relative error against float64", "spread: "],
    "model": ["| flce, 1 MiB budget |", "tokens/s", "x stock", "| loss |"],
    "rows": ["GB/s, of copy: softmax forward, float32, 8 rows", "| columns | copy | flce | eager | flce, again |"],
    "grpo": ["| TRL's kernel |", "tokens/s", "peak GiB", "tiny-llama, old policy"],
    "logprobs": ["| flce, no gradient |", "| four bare products |", "planned MiB", "spread: "],
    "divergence": ["| flce, jsd, entropy |", "| eight bare products |", "planned MiB", "spread: "],
}
EVERYWHERE = ("ours", "repeat", "stock")


@pytest.fixture(scope="module", params=SHOWN)
def small_run(request, tmp_path_factory):
    """Return the benchmark, and the result file of its tiny preset on the CPU."""
    if request.param in ("model", "grpo"):
        pytest.importorskip("transformers")
    if request.param == "grpo":
        pytest.importorskip("trl", minversion="1.16", reason="it is in the extra `trainers`")
    path = tmp_path_factory.mktemp("benchmarks") / "run.json"
    arguments = ["--preset", "tiny", "--device", "cpu", "--rounds", "2", "--out", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
        done = CliRunner().invoke(app, [request.param, *arguments])
    assert done.exit_code == 0, done.output
    return BENCHMARKS[request.param], path


def test_every_case_of_the_preset_is_measured(small_run):
    """Contenders that cannot run are named with the reason; no other benchmark reads the file."""
    benchmark, path = small_run
    document, run = json.loads(path.read_text()), benchmark.load(path)
    assert (document["schema"], document["kind"], document["date"][-1]) == (1, benchmark.kind, "Z")
    assert {"python", "torch", "flce"} <= set(document["versions"])
    assert {"type", "name", "cores", "threads"} <= set(document["device"])
    assert [entry.case for entry in run.cases] == [case for case, _ in benchmark.presets["tiny"]()]
    for entry in run.cases:
        names = [result.contender for result in entry.results]
        applying = [
            contender.name for contender in benchmark.contenders(entry.case) if contender.applies(entry.case, CPU)
        ]
        first = next(result.contender for result in entry.results if result.family == "ours")
        assert names == [*applying, f"{first}-again"]
        for result in entry.results:
            assert result.status == ("ok" if result.samples_ms else "unavailable"), result.reason
            assert result.samples_ms or (result.family == "peer" and result.reason)
            assert len(result.samples_ms) == 2 or result.family not in EVERYWHERE
    for other in BENCHMARKS.values():
        if other is not benchmark:
            with pytest.raises(ValueError, match=f"no results of {other.kind!r}"):
                other.load(path)


def test_what_a_run_has_is_shown(small_run, tmp_path):
    benchmark, path = small_run
    whole = CliRunner().invoke(app, ["table", str(path)])
    assert whole.exit_code == 0, whole.output
    for text in SHOWN[benchmark.kind]:
        assert text in whole.output
    assert "(liger" in whole.output.partition("Not measured: ")[2]
    out = tmp_path / "sub" / "brief.md"
    assert CliRunner().invoke(app, ["table", str(path), "--brief", "--out", str(out)]).exit_code == 0
    assert len(out.read_text()) < len(whole.output)
    done = CliRunner().invoke(app, ["table", str(path), "--targets"])
    assert done.exit_code == (2 if benchmark.targets is None else 0), done.output


def test_figures_of_a_small_run(small_run):
    """The operator is as exact as stock, a model has stock's loss in less memory."""
    benchmark, path = small_run
    for entry in benchmark.load(path).cases:
        ours, stock = entry.by_name("ours"), entry.by_name("stock")
        if benchmark.kind == "operator" and ours.errors and stock.errors:
            assert set(ours.errors) == set(stock.errors)
            assert all(error <= 1.05 * stock.errors[name] + 1e-6 for name, error in ours.errors.items())
        elif benchmark.kind == "model":
            assert ours.loss == pytest.approx(stock.loss, abs=1e-3)
            assert ours.peak_bytes < stock.peak_bytes


def test_a_package_that_is_not_there_is_named():
    reason = needs_package("no_such_package.at_all", "no-such-package")(CPU)
    assert reason == "not installed (pip install no-such-package)"
    assert needs_package("json", "json")(CPU) == "needs a CUDA device"
    assert needs_package("json", "json", cuda=False)(CPU) is None


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("operator", ["--preset", "nothing"], "tiny"),
        ("operator", [], "--preset or --shape"),
        ("operator", ["--preset", "tiny", "--shape", "1,2,3"], "not both"),
        ("operator", ["--shape", "8,4"], "tokens,hidden,vocab as 3 positive numbers"),
        ("operator", ["--shape", "8,4,0"], "positive"),
        ("operator", ["--shape", "8,4,16", "--set", "dtype=int8"], "float32"),
        ("operator", ["--shape", "8,4,16", "--set", "contenders=nobody"], "there are"),
        ("operator", ["--shape", "8,4,16", "--device", "abacus"], "there is no device 'abacus' here"),
        ("operator", ["--shape", "8,4,16", "--set", "time=false"], "nothing to measure"),
        ("operator", ["--shape", "8,4,16", "--set", "mode=sideways"], "frozen-head"),
        ("model", ["--set", "model=GPT-9", "--shape", "1,8"], "Llama-3.2-1B"),
        ("model", ["--preset", "tiny", "--set", "contenders=nobody"], "there are"),
        ("model", ["--preset", "tiny", "--set", "optimizer=sideways"], "adamw"),
        (
            "rows",
            ["--preset", "tiny", "--set", "errors=true"],
            "rows: no field 'errors'; expected one of rows, columns",
        ),
        ("wrapped", ["--preset", "tp"], "several processes take part"),
    ],
)
def test_wrong_arguments_are_explained(command, arguments, message, tmp_path):
    if command in ("model", "wrapped"):
        pytest.importorskip("transformers")
    out = tmp_path / "none.json"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, *arguments, "--out", str(out)])
    assert done.exit_code == 2
    assert message in done.output
    assert not out.exists()


def test_missing_figures_are_a_failure(monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise RuntimeError("as planned")

    monkeypatch.setattr(flce, "softmax", fail)
    arguments = ["rows", "--shape", "8,16", "--set", "operation=softmax", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "rows.json")])
    assert done.exit_code == 1
    assert "No figures for ours, ours-again" in " ".join(done.output.split())


def test_a_deadline_ends_a_case():
    case = OperatorCase(8, 4, 16, dtype="float32")
    entry = OPERATOR.measure(case, CPU, Effort(5, 1.0, until=0.0), select(["stock", "ours"]))
    assert [(result.status, result.samples_ms) for result in entry.results] == [("skipped", [])] * 3


def test_rounds_are_in_the_given_order_first_and_in_any_order_then():
    calls = []

    def prepare(name):
        def step():
            calls.append(name)
            return StepOutcome(None)

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
    with pytest.raises(ValueError, match="ours-0MiB"):
        select(["ours-0MiB"])


def test_a_budget_without_a_plan_is_no_failure():
    entry = OPERATOR.measure(OperatorCase(400_000, 2, 8, dtype="float32"), CPU, Effort(1, 0.0), select(["ours-1MiB"]))
    assert [result.status for result in entry.results] == ["unplanned"] * 2
    assert "max_workspace_bytes=1048576 is too small" in (entry.results[0].reason or "")


def test_a_call_of_another_problem_is_timed_and_not_judged():
    """Its gradients do not count as workspace."""
    case = OperatorCase(64, 32, 500, dtype="float32", ignored=0.5, errors=True)
    entry = OPERATOR.measure(case, CPU, Effort(1, 0.0), select(["ours", "ours-full"]))
    ours, full, _ = entry.results
    assert (ours.errors is None, full.errors) == (False, {})
    assert full.samples_ms
    assert full.workspace_bytes == pytest.approx(ours.workspace_bytes, rel=0.1)


@pytest.mark.parametrize("mode, feature", [*((mode, "") for mode in CALLS), ("frozen-head", "adapter of rank 16")])
def test_the_floor_is_the_products_of_the_call(mode, feature, monkeypatch):
    """The number of products is right, and their results are the logits and the gradients, also of adapters."""
    problem = OperatorProblem(OperatorCase(24, 8, 40, dtype="float32", mode=mode, feature=feature), CPU)
    results = []
    multiply = torch.mm

    def counting(a, b, out):
        results.append(multiply(a, b, out=out))

    monkeypatch.setattr(torch, "mm", counting)
    (floor,) = select(["floor"])
    floor.prepare(problem)()
    terms = [(x.detach(), w.detach()) for x, w in ((problem.input, problem.weight), *problem.adapters)]
    expected = [x @ w.T for x, w in terms] * {"reduction-none": 2}.get(mode, 1)
    if mode != "forward":
        expected += [problem.logits_gradient @ w for _, w in terms]
    if mode in ("forward+backward", "reduction-none"):
        expected += [problem.logits_gradient.T @ x for x, _ in terms]
    assert len(results) == len(expected)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result, truth)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_meter_counts_a_known_pattern(kind):
    """The peak of a, then a and b, then b and c, excludes earlier allocations and returned gradients."""

    def zeros(mib):
        return torch.zeros(mib * MIB, dtype=torch.uint8, device=kind)

    held = zeros(32)

    def step():
        a, b = zeros(8), zeros(16)
        del a
        c = zeros(64)
        del b, c
        return StepOutcome(None, input_grad=held.clone())

    meter = BenchMeter(torch.device(kind))
    _, sample = meter.warm_up(step)
    # b and c (80 MiB) are the peak, before the 32 MiB that are returned exist. CUDA's blocks may be larger.
    assert sample.workspace_bytes == pytest.approx((16 + 64 - 32) * MIB, abs=0 if kind == "cpu" else 2 * MIB)
    assert meter.sample(step).milliseconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", CALLS)
def test_every_contender_runs_on_cuda(mode, tmp_path):
    """The bare products and compiled stock code run, too. Installed peers may fail."""
    contenders = [c for c in CONTENDERS if c.name != "torch-compile" or mode == "forward+backward"]
    case = OperatorCase(500, 256, 4001, mode=mode, errors=True)
    entry = OPERATOR.measure(case, torch.device("cuda"), Effort(2, 5.0), contenders)
    for result in entry.results:
        if result.family != "peer" or result.contender == "torch-compile":
            assert result.status == "ok", (result.contender, result.reason)
            assert len(result.samples_ms) == 2
    assert entry.by_name("floor-aligned").samples_ms
    save(Run("operator", HEAD, [entry]), tmp_path / "run.json")
    run = OPERATOR.load(tmp_path / "run.json")
    assert "| flce |" in markdown(run, OPERATOR.tables(run, False))


@pytest.mark.parametrize("own", [True, False])
def test_own_products_can_be_off(own, monkeypatch):
    """They are off in the first call, in the plan and in every timed call, and not afterwards."""
    seen: list[bool] = []

    def look(*_):
        seen.extend(module.has_fused_products(CPU) for module in modules)

    modules = (linear_call, device_kinds)
    for module in modules:
        monkeypatch.setattr(module, "has_fused_products", lambda device: True)
    contender = OperatorContender("looks", "", "ours", lambda problem: look, planned_bytes=look)
    OPERATOR.measure(OperatorCase(8, 4, 16, own_products=own), CPU, Effort(2, 1.0), [contender])
    assert seen == [own] * len(seen)
    assert len(seen) >= 2 * 2 * (1 + 1 + 2)  # also of the repeat
    look()
    assert seen[-2:] == [True, True]


def test_problem_is_as_asked_for():
    problem = OperatorProblem(OperatorCase(400, 64, 1000, dtype="float32", ignored=0.25, logits_std=3.0), CPU)
    assert int((problem.target == IGNORED).sum()) == 100
    assert float((problem.input @ problem.weight.T).detach().std()) == pytest.approx(3.0, rel=0.1)


def test_not_finite_errors_survive_the_file(tmp_path):
    result = BenchResult("stock", "stock", "stock", errors={"loss": math.inf, "input_grad": 0.5})
    save(Run("operator", HEAD, [Entry(OperatorCase(8, 4, 16), [result])]), tmp_path / "run.json")
    again = OPERATOR.load(tmp_path / "run.json").cases[0].results[0]
    assert again.errors == result.errors


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_gpu_script_parses():
    script = ROOT / "scripts" / "gpu_session.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)


def entry_of(*milliseconds: float) -> Entry:
    """Return an entry whose steps take these times."""
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
    assert note == "spread: 10.0% in the median and 10.0% at most between flce and the same again, 1 times"
    other = entry_of(1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.3, 1.3, 1.3)
    assert "20.0% in the median and 30.0% at most" in spread_note([entry, other])
    run = Run("operator", HEAD | {"device": {"type": "cpu", "name": "made up", "threads": 1}}, [entry, other])
    assert all("spread: " in "".join(table.notes) for table in OPERATOR.tables(run, False))
    assert "not known" in spread_note([Entry(entry.case, entry.results[:2])])


@pytest.mark.parametrize("name, draws", [("cpu", True), ("h200", False), ("h200-rows", True), ("model-h200", False)])
def test_committed_results_make_tables_and_pictures(name, draws, tmp_path):
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    done = CliRunner().invoke(app, ["table", str(file)])
    assert done.exit_code == 0, done.output
    # Most files are older than the second measurement of flce.
    spread = "% in the median and " if name == "h200" else "not known, no call of flce was measured twice"
    assert spread in done.output
    out = tmp_path / "picture.png"
    if draws or name == "model-h200":  # it has no picture
        assert CliRunner().invoke(app, ["plot", str(file), "--out", str(out)]).exit_code == (0 if draws else 2)
        assert out.exists() == draws


def test_a_result_of_a_benchmark_that_is_gone_is_refused():
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["table", str(ROOT / "benchmarks" / "results" / "kernels-h200.json")]
    )
    assert "holds results of 'kernels': expected one of operator, model, rows" in str(done.exception)


@pytest.mark.parametrize("measured", BENCHMARKS.values(), ids=lambda measured: measured.kind)
def test_the_cases_of_all_presets_survive_the_file(measured):  # pytest-benchmark has a fixture `benchmark`
    for preset in measured.presets.values():
        plan = preset()
        assert plan
        for case, effort in plan:
            assert effort.rounds >= 1
            assert measured.case_type.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_what_fails_is_a_shortfall_and_the_others_go_on():
    calls = iter(range(100))

    def prepare(problem):
        number = next(calls)

        def step():
            if number:
                raise RuntimeError("as planned")

        return step

    ours = OperatorContender("ours", "flce", "ours", prepare)
    case = OperatorCase(8, 4, 16, dtype="float32")
    entry = OPERATOR.measure(case, CPU, Effort(2, 1.0), [ours, *select(["stock"])])
    assert [(result.status, len(result.samples_ms)) for result in entry.results] == [
        ("ok", 2),
        ("ok", 2),
        ("failed", 0),
    ]
    (missing,) = shortfalls(Run("operator", {}, [entry]))
    assert (missing.contender, missing.reason) == ("ours-again", "RuntimeError: as planned")
    assert any("not known" in note for note in table(entry).notes)
    assert "flce, again (ours-again) failed: RuntimeError: as planned" in table(entry).notes
