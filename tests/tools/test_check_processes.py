"""``flce check --processes``: it is right where a divided head is, and finds what is not, hangs included."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
if not dist.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import typer
from typer.testing import CliRunner

from flce.tools.check import processes, suite
from flce.tools.check.checks import CheckResult, Results
from flce.tools.check.processes import SplitCheck, place, run_split, split_checks
from flce.tools.cli.check import check

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wrong(SplitCheck):
    """What is wrong is in the title; in the last process alone."""

    def ours(self) -> Results:
        found = dict(super().ours())
        if dist.get_rank() != dist.get_world_size() - 1:
            return found
        if self.title == "hangs":
            time.sleep(600)
        if self.title == "raises":
            raise RuntimeError("no such process")
        if self.title == "weight gradient":
            found["weight gradient"] = 1.01 * found["weight gradient"]
        if self.title == "another loss":
            found["loss"] = found["loss"] * (1 + 1e-7)
        return found


def of(title: str, like: SplitCheck) -> SplitCheck:
    return Wrong(title, like.backend, like.inputs, like.options, like.sequence_parallel)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> SplitCheck:
    for name in ("TRITON_INTERPRET", "FLCE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return next(each for each in split_checks(2, CPU) if each.inputs.dtype == torch.float32)


def test_what_is_right_and_what_is_not(plain: SplitCheck) -> None:
    titles = ["weight gradient", "another loss", "raises", "never begun"]
    right = [each for each in split_checks(2, CPU) if each.inputs.dtype == torch.float64]
    *fine, gradient, loss, raises = run_split([*right, *(of(title, plain) for title in titles)], 2)
    assert [each.title for each in fine] == [each.title for each in right]
    for each in fine:
        assert each.status == "right", each
        assert {"loss", "input gradient", "weight gradient"} <= {figure.what for figure in each.figures}
        assert "of each of 2 processes" in each.plan
        assert each.device == "2 processes, cpu, gloo"
    assert (gradient.status, loss.status, raises.status) == ("off", "off", "failed")
    assert [figure.what for figure in gradient.figures if figure.off] == ["weight gradient"]
    (sentence,) = gradient.wrong
    assert sentence.startswith("rank 1: weight gradient 1.00e-02 from float64")
    assert "rank 0: The processes have different losses." in loss.wrong
    assert "rank 1: RuntimeError: no such process (flce/" in " ".join(raises.wrong)


def test_a_process_that_hangs(plain: SplitCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENCE", 2.0)
    monkeypatch.setattr(processes, "AFTER_THE_FIRST", 0.5)
    started = time.monotonic()
    (found,) = run_split([of("hangs", plain), plain], 2)
    assert found.status == "failed"
    assert "rank 1: ended or gave no answer within 2 s." in found.wrong
    assert time.monotonic() - started < 200  # without the limits that are set here: 300


@pytest.mark.gpu
def test_on_gpus() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    checks = split_checks(count, None)
    found = run_split(checks, count)
    assert {each.device for each in found} == {f"{count} processes, cuda, nccl"}
    assert len(found) == len(checks)
    assert [each for each in found if each.status != "right"] == []


def test_where(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert place(2, CPU) == CPU
        assert place(2, None) == (cuda if gpus == 2 else CPU)
        if gpus == 2:
            assert place(2, cuda) == cuda
        else:
            with pytest.raises(ValueError, match=f"there are {gpus} GPUs for 2 processes"):
                place(2, cuda)


@pytest.mark.parametrize("status", ["right", "off"])
def test_the_command(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is off among several processes is in its report and in its exit status."""
    result = CheckResult("2 processes", "torch", "default", "float32", status, wrong=("so it is",))
    monkeypatch.setattr(suite, "todo", lambda *_: ([], []))
    monkeypatch.setattr(processes, "run_split", lambda checks, count: [result])
    app = typer.Typer()
    app.command()(check)
    said = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["--quick", "--device", "cpu", "--processes", "2"])
    assert said.exit_code == (status == "off"), said.output
    assert ("so it is" in said.output) == (status == "off")
    assert "$ flce check --quick --device cpu --processes 2\n" in said.output
