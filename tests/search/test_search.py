"""The search: calls that once failed, a few random calls of each kind, and errors that it must find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreted_bfloat16 import fix_interpreter
from tests.search import driver, kinds
from tests.search.driver import Errors, Search, parse

pytestmark = pytest.mark.filterwarnings("ignore")

KEPT = driver.regressions()
# Random calls of `make test`.
COUNTS = {"operator": 120, "logits": 80, "softmax": 150, "logprobs": 40, "divergence": 40}


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.importorskip("triton")
        fix_interpreter(monkeypatch)


def test_lines_can_be_read() -> None:
    known = kinds.load()
    for _, line in KEPT:
        name, call = parse(line)
        assert known[name].line(call) == line
        assert call.keys() <= known[name].defaults.keys()


@pytest.mark.parametrize("where, line", KEPT, ids=[line for _, line in KEPT])
def test_regressions(where: str, line: str, device: torch.device) -> None:
    if where != device.type:
        pytest.skip(f"a call on {where}")
    name, call = parse(line)
    failure = kinds.load(name)[name].run(call, where, Errors())
    assert failure is None, failure


@pytest.fixture
def regressions_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(driver, "REGRESSIONS", tmp_path / "regressions.txt")
    driver.REGRESSIONS.touch()
    return driver.REGRESSIONS


def check_random(name: str, device: torch.device, seed: int, count: int) -> None:
    search = Search(kinds.load(name), device.type)
    search.run(seed, count=count)
    assert not search.failures, search.failures
    assert search.calls > 0.9 * count


@pytest.mark.parametrize("name", COUNTS)
def test_random_calls(name: str, device: torch.device, regressions_file: Path) -> None:
    check_random(name, device, 0, COUNTS[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors of these programs are in CPU memory")
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int, device: torch.device, regressions_file: Path) -> None:
    check_random("lazy", device, seed, 100)


# A planted error of one result: in half a unit in the last place of bfloat16, or in 30 of float32.
WRONG = {"bfloat16 gradient w": 2.0**-7, "float32 gradient x": 1e-5, "float32 lse": 1e-5, "float64 loss": 1e-13}


@pytest.mark.parametrize("what", WRONG)
def test_finds_what_is_wrong(
    what: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, regressions_file: Path, capsys: Any
) -> None:
    """A wrong result is found, shrunk to few arguments, printed and kept; the line fails again."""
    if device.type == "cuda":
        pytest.skip("the calls are of a CPU, with interpreted kernels")
    from tests.search import linear_loss

    run, (dtype, *_, name) = linear_loss.run, what.split()

    def run_wrongly(step: linear_loss.Step, mode: str) -> linear_loss.Results:
        loss, output, grads = run(step, mode)
        if step.half is None and str(step.p.input.dtype) == f"torch.{dtype}":
            factor = 1.0 + WRONG[what]
            grads = {letter: grad * (factor if letter == name else 1.0) for letter, grad in grads.items()}
            loss = loss * factor if name == "loss" else loss
            if name in step.stats:
                output = output._replace(**{name: getattr(output, name) * factor})
        return loss, output, grads

    monkeypatch.setattr(linear_loss, "run", run_wrongly)
    search = Search(kinds.load("operator"), "cpu")
    seed = 0
    while not search.failures:
        search.run(seed, count=10)
        seed += 1
        assert seed < 40, "it was not found"
    (line, *_) = search.failures
    assert len(parse(line)[1]) <= 6, line
    assert regressions_file.read_text().splitlines()[1] == f"cpu {line}"
    printed = capsys.readouterr().out
    assert f"operator {what}" in printed
    assert line in printed
    assert search.try_call(linear_loss.KIND, parse(line)[1]) is not None


def test_bounds_are_tight() -> None:
    """One shape: benchmarks/notes.md has error / bound of all calls. In float64 the oracle has the errors, too."""
    errors = Errors()
    shapes: dict[str, Any] = {"leading": (60,), "hidden": 64, "vocab": 400, "std": 4.0, "stats": ("lse", "logprob")}
    for dtype in ("float32", "bfloat16", "float16"):
        for seed in range(4):
            call = {**shapes, "dtype": dtype, "seed": seed, "reduction": ("mean", "none")[seed % 2], "bias": True}
            assert kinds.load("operator")["operator"].run(call, "cpu", errors) is None
    table = {line[:40].strip(): float(line.split()[-2]) for line in errors.table()}
    assert len(table) == 3 * 6
    assert min(table.values()) >= 0.08, table
    assert min(share for name, share in table.items() if "gradient" in name and "32" not in name) >= 0.25, table
