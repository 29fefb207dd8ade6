"""A small run of `rows`, its tables, verdicts and picture; and the procedure by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks import rows
from benchmarks.cli import app
from benchmarks.reports import markdown
from benchmarks.row_calls import Calls, launched, make_region
from benchmarks.rows import (
    CACHES,
    COMPILED_COLUMNS,
    CONTENDERS,
    CPU_CACHE_BYTES,
    PRESETS,
    ROWS,
    TASKS,
    RowCase,
    RowContender,
    RowProblem,
    check_rows,
    make_calls,
    targets,
)
from benchmarks.verdicts import Verdict
from flce.bench.cases import Effort
from flce.bench.measure import Meter
from flce.bench.results import Entry, Result, Run

CPU = torch.device("cpu")
HEAD: dict[str, Any] = {
    "date": "2026-11-21T00:00:00Z",
    "command": "python -m benchmarks rows",
    "commit": None,
    "versions": {},
    "device": {"type": "cuda", "name": "made up"},
}


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: " ".join(task).replace(" ", "-"))


def taking_part(case: RowCase) -> list[str]:
    return [contender.name for contender in CONTENDERS if contender.applies(case, CPU)]


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """One tiny run of `rows`, on the CPU."""
    path = tmp_path_factory.mktemp("benchmarks") / "rows.json"
    done = CliRunner().invoke(app, ["rows", "--preset", "tiny", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    return path


def test_every_task_is_measured(result_file):
    run = ROWS.load(result_file)
    assert [entry.case for entry in run.cases] == [case for case, _ in PRESETS["tiny"]()]
    assert {(entry.case.operation, entry.case.direction) for entry in run.cases} == set(TASKS)
    for entry in run.cases:
        assert [result.contender for result in entry.results] == [
            *taking_part(entry.case),
            "ours-again",
        ]
        for name in ("copy", "ours", "eager", "ours-again"):
            result = entry.by_name(name)
            assert result.status == "ok", result.reason
            assert (len(result.samples_ms), result.calls, result.method) == (2, 3, "launched")
            assert result.gigabytes_per_second is not None


def test_schema(result_file):
    document = json.loads(result_file.read_text())
    assert document["kind"] == "rows"
    assert {"date", "command", "versions", "device"} <= set(document)
    for entry in document["cases"]:
        assert {"rows", "columns", "dtype", "operation", "direction"} <= set(entry["case"])
        for result in entry["results"]:
            measured = {"median_ms", "moved_bytes", "calls", "method"} <= set(result)
            assert measured == (result["status"] == "ok")


def test_peers_that_cannot_run_are_named(result_file):
    """Liger and torch.compile run on GPUs alone; at sizes that are not for torch.compile it is not tried."""
    for entry in ROWS.load(result_file).cases:
        names = {"liger": "unavailable"} if "liger" in taking_part(entry.case) else {}
        assert {r.contender: r.status for r in entry.results if r.family == "peer"} == names
    case = RowCase(4, 8, "float32", compiled=True, calls=1)
    entry = ROWS.measure(case, CPU, Effort(1, 1.0))
    assert {r.contender: r.reason for r in entry.results if r.family == "peer"}[
        "torch-compile"
    ] == "needs a CUDA device"
    done = CliRunner().invoke(app, ["table", str(result_file)])
    assert "Not measured: Liger (liger)" in done.output


def test_tables(result_file, tmp_path):
    done = CliRunner().invoke(app, ["table", str(result_file)])
    assert done.exit_code == 0, done.output
    for operation, direction in TASKS:
        for dtype in ("float32", "bfloat16"):
            assert f"**GB/s, of copy: {operation} {direction}, {dtype}, 8 rows**" in done.output
    assert "| columns | copy | flce | eager | flce, again |" in done.output
    assert "| 2049 |" in done.output
    out = tmp_path / "targets.md"
    assert CliRunner().invoke(app, ["table", str(result_file), "--targets", "--out", str(out)]).exit_code == 0
    text = out.read_text()
    # At 2049 columns against the copy, at both sizes against eager PyTorch, seven tasks and two dtypes.
    assert "**Rows, met: " in text
    assert " of 42" in text
    assert "GB/s" not in text
    assert "| columns | of copy | wanted | time / eager | verdict |" in text
    brief = CliRunner().invoke(app, ["table", str(result_file), "--targets", "--brief"])
    assert "| columns |" not in brief.output
    assert "**Rows, met: " in brief.output
    other = CliRunner().invoke(app, ["table", str(result_file), "--dominance"])
    assert other.exit_code == 2


def test_the_fewest_bytes():
    """A copy moves two entries for each, whatever it is compared with."""
    sizes = {task: RowCase(100, 1000, "bfloat16", *task) for task in TASKS}
    contenders = {contender.name: contender for contender in CONTENDERS}
    entry = 2 * 100 * 1000
    moved = {" ".join(task): contenders["ours"].bytes(case) // entry for task, case in sizes.items()}
    assert moved == {
        "cross_entropy forward": 1,
        "cross_entropy backward": 2,
        "cross_entropy in-place forward+backward": 2,
        "softmax forward": 2,
        "softmax backward": 3,
        "log_softmax forward": 2,
        "log_softmax backward": 3,
    }
    assert {contenders["copy"].bytes(case) for case in sizes.values()} == {2 * entry}
    assert RowCase(100, 1000, "float32").bytes(1) == 4 * 100 * 1000


def test_bandwidth_is_of_one_call():
    result = Result("ours", "flce", "ours", samples_ms=[10.0, 8.0, 12.0], moved_bytes=4_000_000, calls=5)
    assert result.gigabytes_per_second == pytest.approx(2.0)


def test_a_row_fits_on_chip_up_to_128_kib():
    assert RowCase(1, 65536, "bfloat16").on_chip
    assert not RowCase(1, 65537, "bfloat16").on_chip
    assert RowCase(1, 32768, "float32").on_chip
    assert not RowCase(1, 50257, "float32").on_chip


def test_inputs_are_more_than_the_cache_holds():
    for columns in (2048, 3001, 262144):
        case = RowCase(16, columns, "float32")
        calls = case.calls_for(CPU_CACHE_BYTES)
        assert calls * case.bytes(1) > CACHES * CPU_CACHE_BYTES
    cache, region = 50 << 20, 1 << 30
    expected = {128: 256, 512: 256, 2048: 64, 32768: 4, 50257: 2, 262144: 1}
    assert {columns: RowCase(4096, columns).calls_for(cache, region) for columns in expected} == expected
    assert RowCase(4096, 128).calls_for(2 * cache, region) == 401
    assert len(RowProblem(RowCase(2, 3, "float32"), CPU, calls=4).x) == 4


def test_the_preset_is_the_issues():
    cases = [case for case, _ in PRESETS["h200-rows"]()]
    columns = {case.columns for case in cases}
    assert {1 << power for power in range(7, 19)} <= columns
    assert len([count for count in columns if count & (count - 1)]) == 8
    found = {(case.columns, case.dtype, (case.operation, case.direction)) for case in cases}
    assert found == {(c, d, task) for c in columns for d in ("bfloat16", "float32") for task in TASKS}
    assert len(found) == len(cases)
    assert {case.rows for case in cases} == {4096}
    assert {case.columns for case in cases if case.compiled} == set(COMPILED_COLUMNS)


@every_task
@pytest.mark.parametrize("name", ["ours", "eager"])
def test_a_call_does_the_task(task, name):
    """On each input, also after a call wrote over it."""
    (contender,) = [contender for contender in CONTENDERS if contender.name == name]
    problem = RowProblem(RowCase(6, 50, "float64", *task), CPU, calls=2)
    for index, row in enumerate(problem.spare):  # inputs that differ
        row.mul_(1 + index)
    problem.restore()
    calls = make_calls(contender, problem)
    for _ in range(2):
        calls.restore()
        for result, x in zip(calls.run(calls.prepare()), problem.spare, strict=True):
            torch.testing.assert_close(result, expected(x, problem), check_dtype=False)
    assert (calls.restore == problem.restore) == (
        name == "ours" and problem.case.direction == "in-place forward+backward"
    )


def expected(x: torch.Tensor, problem: RowProblem) -> torch.Tensor:
    x = x.clone().requires_grad_()
    if problem.case.operation == "cross_entropy":
        out = torch.nn.functional.cross_entropy(x, problem.target)
    else:
        out = getattr(torch, problem.case.operation)(x, -1)
    if problem.case.direction == "forward":
        return out.detach()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out) if out.dim() == 0 else x.detach())
    return grad


def test_the_roof_moves_what_a_copy_does():
    (copy,) = [contender for contender in CONTENDERS if contender.roof]
    for task in TASKS:
        problem = RowProblem(RowCase(3, 5, "float32", *task), CPU, calls=2)
        results = make_calls(copy, problem).run([None, None])
        for result, x in zip(results, problem.x, strict=True):
            assert isinstance(result, torch.Tensor)
            assert torch.equal(result, -x)  # every element read, and written elsewhere
            assert result.data_ptr() != x.data_ptr()


def test_what_comes_before_is_not_timed():
    log: list[str] = []

    def ahead(index: int) -> int:
        log.append(f"ahead {index}")
        return index

    calls = Calls(2, lambda i, ready: log.append(f"timed {i} {ready}"), ahead, lambda: log.append("restore"))
    region = launched(calls)
    for _ in range(2):
        log.clear()
        with region.turn(Meter(CPU)):
            assert log == ["restore", "ahead 0", "ahead 1"]
            region.step()
        assert log[3:] == ["timed 0 0", "timed 1 1"]
    log.clear()
    assert make_region(calls, CPU).note is None
    assert log == ["ahead 0", "timed 0 0"]  # the warm-up


def test_a_failing_contender_is_reported_and_the_others_go_on(monkeypatch):
    def fail(case):
        raise RuntimeError("as planned")

    broken = RowContender("broken", "A broken one", "peer", fail)
    monkeypatch.setattr("benchmarks.rows.CONTENDERS", [broken, *CONTENDERS])
    case = RowCase(4, 8, "float32", "softmax", calls=2)
    entry = ROWS.measure(case, CPU, Effort(1, 1.0))
    assert {r.reason for r in entry.results if r.contender == "broken"} == {"RuntimeError: as planned"}
    assert all(r.samples_ms for r in entry.results if r.contender in ("copy", "ours", "eager"))
    assert "A broken one failed: RuntimeError: as planned" in "".join(
        table.markdown() for table in ROWS.tables(Run("rows", HEAD, [entry]), False)
    )


def test_a_deadline_ends_a_case():
    entry = ROWS.measure(RowCase(4, 8, "float32", calls=1), CPU, Effort(2, 1.0, until=0.0))
    assert {result.status for result in entry.results} == {"skipped"}
    assert not any(result.samples_ms for result in entry.results)


def figure(contender: str, gigabytes: float, case: RowCase, **fields: Any) -> Result:
    (known,) = [known for known in CONTENDERS if known.name == contender]
    moved = known.bytes(case)
    samples = [moved / gigabytes / 1e6 * 7]
    return Result.of(known, samples_ms=samples, moved_bytes=moved, calls=7, **fields)


@pytest.mark.parametrize(
    "columns, dtype, share, met",
    [
        (65536, "bfloat16", 0.86, Verdict.met),
        (65536, "bfloat16", 0.84, Verdict.nearly),
        (131072, "bfloat16", 0.66, Verdict.met),
        (131072, "bfloat16", 0.63, Verdict.missed),
        (65536, "float32", 0.66, Verdict.met),
        (2048, "float32", 0.83, Verdict.missed),
    ],
)
def test_a_share_of_the_bandwidth_of_a_copy(columns, dtype, share, met):
    case = RowCase(4096, columns, dtype, "softmax", "backward")
    results = [figure("copy", 4000, case), figure("ours", 4000 * share, case)]
    (check,) = check_rows([Run("rows", HEAD, [Entry(case, results)])])
    assert (check.key.against, check.verdict) == ("copy", met)
    assert check.value == pytest.approx(share)


def test_nobody_is_faster_by_more_than_five_percent():
    """At any size; the share of a copy is wanted from 2048 columns on."""
    case = RowCase(4096, 1000, direction="in-place forward+backward")
    results = [figure("copy", 4000, case), figure("ours", 1000, case)]
    results += [figure("eager", 1040, case), figure("liger", 1080, case, method="launched", note="waits")]
    run = Run("rows", HEAD, [Entry(case, results)])
    assert {check.key.against: check.verdict for check in check_rows([run])} == {
        "eager": Verdict.met,
        "liger": Verdict.missed,
    }
    whole = markdown(run, targets([run], False))
    assert "Rows, met: 1 of 2" in whole
    assert "| 1000 | 25% | 1.04 | 1.08 | MISSED: Liger |" in whole
    speeds = markdown(run, ROWS.tables(run, False))
    assert "| 1000 | 4000 | 1000, 25% | 1040, 26% | 1080, 27%* |" in speeds
    assert "- * Liger launched, not captured: waits" in speeds


def test_without_a_figure_of_ours_nothing_is_met():
    case = RowCase(4096, 4096, operation="softmax")
    run = Run("rows", HEAD, [Entry(case, [figure("copy", 4000, case), figure("eager", 1, case)])])
    assert [check.verdict for check in check_rows([run])] == [Verdict.unmeasured] * 2
    assert "not measured" in markdown(run, targets([run], False))


def test_where_somebody_did_not_run_is_said():
    entries = []
    for columns in (4096, 2048):
        case = RowCase(4096, columns, operation="softmax")
        names = ["copy", "ours", "torch-compile"] if columns == 4096 else ["copy", "ours"]
        entries.append(Entry(case, [figure(name, 100, case) for name in names]))
    run = Run("rows", HEAD, entries)
    text = markdown(run, ROWS.tables(run, False))
    assert "- torch.compile ran at 4096 columns only" in text
    assert text.index("| 2048 |") < text.index("| 4096 |")


def test_who_takes_part():
    def names(operation: Any, direction: Any, compiled: bool = False) -> list[str]:
        return taking_part(RowCase(1, 1, "float32", operation, direction, compiled))

    assert names("cross_entropy", "forward") == ["copy", "ours", "eager", "liger"]
    assert names("cross_entropy", "backward") == ["copy", "ours", "eager"]
    assert names("log_softmax", "forward", compiled=True) == ["copy", "ours", "eager", "torch-compile"]


def test_kernels_are_built_ahead():
    case = RowCase(4, 8, "float32")
    assert ROWS.build_ahead([case], CPU, 1.0) is None
    assert rows.build(case, CPU) == 1  # ours; the others are not for a CPU
    assert rows.build(case, torch.device("cuda:99")) == 0


def test_one_shape_of_one_operation(tmp_path: Path):
    out = tmp_path / "rows.json"
    options = ["--dtype", "float32", "--operation", "softmax", "--rounds", "1"]
    done = CliRunner().invoke(app, ["rows", "--shape", "4000,300", "--device", "cpu", *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    forward, backward = ROWS.load(out).cases
    assert forward.case == RowCase(4000, 300, "float32", "softmax")
    assert backward.case == RowCase(4000, 300, "float32", "softmax", "backward")
    assert {result.calls for result in forward.results if result.samples_ms} == {7}  # inputs of 4.6 MiB, 32 MiB in all


@pytest.mark.gpu
@every_task
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_run_on_cuda(dtype, task):
    """All but those that wait for the device are captured; of the peers, those that are installed may fail."""
    case = RowCase(256, 3001, dtype, task[0], task[1], compiled=dtype == "float32", calls=5)
    entry = ROWS.measure(case, torch.device("cuda"), Effort(3, 5.0))
    for result in entry.results:
        if result.family != "peer":
            assert result.status == "ok", (result.contender, result.reason)
            assert (result.method, result.note) == ("captured", None), result.contender
        if result.contender == "torch-compile":
            assert result.status == "ok", result.reason


@pytest.mark.gpu
@every_task
def test_captured_calls_write_what_they_should(task):
    """In a replay, on numbers that were not there when it was captured; as often as one likes."""
    device = torch.device("cuda")
    problem = RowProblem(RowCase(64, 1000, "float32", *task), device, calls=3)
    for contender in CONTENDERS:
        if contender.family == "peer" or contender.roof:
            continue
        calls = make_calls(contender, problem)
        written: list[torch.Tensor] = []

        def timed(index, ready, calls=calls, written=written):
            result = calls.timed(index, ready)
            sums = result.double().square().sum()
            if torch.cuda.is_current_stream_capturing():
                written.append(sums)
            return result, sums

        region = make_region(Calls(3, timed, calls.ahead, calls.restore), device)
        assert region.method == "captured", region.note
        for seed in (1, 2):
            problem.spare.normal_(generator=torch.Generator(device).manual_seed(seed))
            problem.restore()
            with region.turn(Meter(device)):
                region.step()
            torch.cuda.synchronize()
            for sums, x in zip(written, problem.spare, strict=True):
                truth = expected(x, problem).double().square().sum()
                torch.testing.assert_close(sums, truth, rtol=1e-4, atol=0)
