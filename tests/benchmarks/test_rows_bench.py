"""Tests of `rows`: its calls, their timing, and its tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")


from benchmarks.cases import Effort
from benchmarks.measure import BenchMeter
from benchmarks.row_calls import Calls, launched_region, make_region
from benchmarks.rows import (
    CACHES,
    CONTENDERS,
    CPU_CACHE_BYTES,
    ROWS,
    TASKS,
    RowCase,
    RowProblem,
    make_calls,
)
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import markdown
from tests.benchmarks.made_up import HEAD

CPU = torch.device("cpu")


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: " ".join(task).replace(" ", "-"))


def taking_part(case: RowCase) -> list[str]:
    return [contender.name for contender in CONTENDERS if contender.applies(case, CPU)]


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


@every_task
@pytest.mark.parametrize("name", ["ours", "eager"])
def test_a_call_does_the_task(task, name):
    """The result is right on each input, also after a call has overwritten the input."""
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
    region = launched_region(calls)
    for _ in range(2):
        log.clear()
        with region.turn(BenchMeter(CPU)):
            assert log == ["restore", "ahead 0", "ahead 1"]
            region.step()
        assert log[3:] == ["timed 0 0", "timed 1 1"]
    log.clear()
    assert make_region(calls, CPU).note is None
    assert log == ["ahead 0", "timed 0 0"]  # the warm-up


def figure(contender: str, gigabytes: float, case: RowCase, **fields: Any) -> BenchResult:
    (known,) = [known for known in CONTENDERS if known.name == contender]
    moved = known.bytes(case)
    samples = [moved / gigabytes / 1e6 * 7]
    return BenchResult.of(known, samples_ms=samples, moved_bytes=moved, calls=7, **fields)


def test_speeds_and_shares_of_a_copy():
    case = RowCase(4096, 1000, direction="in-place forward+backward")
    results = [figure("copy", 4000, case), figure("ours", 1000, case)]
    results += [figure("eager", 1040, case), figure("liger", 1080, case, method="launched", note="waits")]
    run = Run("rows", HEAD, [Entry(case, results)])
    speeds = markdown(run, ROWS.tables(run, False))
    assert "| 1000 | 4000 | 1000, 25% | 1040, 26% | 1080, 27%* |" in speeds
    assert "- * Liger launched, not captured: waits" in speeds


def test_where_a_contender_did_not_run_is_said():
    entries = []
    for columns in (4096, 2048):
        case = RowCase(4096, columns, operation="softmax")
        names = ["copy", "ours", "torch-compile"] if columns == 4096 else ["copy", "ours"]
        entries.append(Entry(case, [figure(name, 100, case) for name in names]))
    run = Run("rows", HEAD, entries)
    text = markdown(run, ROWS.tables(run, False))
    assert "- torch.compile ran at 4096 columns only" in text
    assert text.index("| 2048 |") < text.index("| 4096 |")


@pytest.mark.gpu
@every_task
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_run_on_cuda(dtype, task):
    """Contenders that do not wait for the device are captured. Installed peers may fail."""
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
    """Each replay computes the results of the new numbers in its inputs."""
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
            with region.turn(BenchMeter(device)):
                region.step()
            torch.cuda.synchronize()
            for sums, x in zip(written, problem.spare, strict=True):
                truth = expected(x, problem).double().square().sum()
                torch.testing.assert_close(sums, truth, rtol=1e-4, atol=0)
