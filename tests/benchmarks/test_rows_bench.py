"""Tests of `rows`: its calls, their timing, and its tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")


from benchmarks.cases import Effort
from benchmarks.rows import CONTENDERS, ROWS, TASKS, RowCase, RowProblem, make_call
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import markdown
from tests.benchmarks.made_up import HEAD

CPU = torch.device("cpu")


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: " ".join(task).replace(" ", "-"))


@every_task
@pytest.mark.parametrize("name", ["ours", "eager"])
def test_a_call_does_the_task(task, name):
    """The result is right on each input, also after a call has overwritten the input."""
    (contender,) = [contender for contender in CONTENDERS if contender.name == name]
    problem = RowProblem(RowCase(6, 50, "float64", *task), CPU)
    call, before = make_call(contender, problem)
    for _ in range(2):
        before()
        torch.testing.assert_close(call(), expected(problem.spare, problem), check_dtype=False)
    overwrites = name == "ours" and problem.case.direction == "in-place forward+backward"
    assert torch.equal(problem.x, problem.spare) != overwrites


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


def test_the_roof_reads_and_writes_every_element():
    (copy,) = [contender for contender in CONTENDERS if contender.name == "copy"]
    for task in TASKS:
        problem = RowProblem(RowCase(3, 5, "float32", *task), CPU)
        result = make_call(copy, problem)[0]()
        assert torch.equal(result, -problem.x)
        assert result.data_ptr() != problem.x.data_ptr()


def test_inputs_of_the_presets_are_larger_than_a_cache():
    for case, _ in ROWS.presets["h200-rows"]():
        assert case.bytes(1) > 240 << 20
    for case, _ in ROWS.presets["cpu"]():
        assert case.bytes(1) > 32_000_000


def figure(contender: str, gigabytes: float, case: RowCase, **fields: Any) -> BenchResult:
    (known,) = [known for known in CONTENDERS if known.name == contender]
    moved = known.bytes(case)
    samples = [moved / gigabytes / 1e6 * 7]
    return BenchResult.of(known, samples_ms=samples, moved_bytes=moved, calls=7, **fields)


def test_speeds_and_shares_of_a_copy():
    case = RowCase(4096, 1000, direction="in-place forward+backward")
    results = [figure("copy", 4000, case), figure("ours", 1000, case)]
    results += [figure("eager", 1040, case), figure("liger", 1080, case, note="waits")]
    shorter = replace(case, columns=500)
    run = Run(
        "rows", HEAD, [Entry(case, results), Entry(shorter, [figure(name, 100, shorter) for name in ("copy", "ours")])]
    )
    speeds = markdown(run, ROWS.tables(run, False))
    assert "| 1000 | 4000 | 1000, 25% | 1040, 26% | 1080, 27% |" in speeds
    assert speeds.index("| 500 | 100 | 100, 100% | - | - |") < speeds.index("| 1000 |")
    assert "- Liger (liger) cannot be captured: waits" in speeds


@pytest.mark.gpu
@every_task
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_run_on_cuda(dtype, task):
    """Installed peers may fail."""
    case = RowCase(256, 3001, dtype, task[0], task[1], compiled=dtype == "float32")
    entry = ROWS.measure(case, torch.device("cuda"), Effort(3, 5.0))
    for result in entry.results:
        if result.family != "peer" or result.contender == "torch-compile":
            assert result.status == "ok", (result.contender, result.reason)
            assert len(result.samples_ms) == 3
