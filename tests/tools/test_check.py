"""Tests of ``flce check``: exact results pass, planted faults are found, skipped checks are listed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

import typer
from typer.testing import CliRunner

import flce
from flce.backends.eager import TorchBackend
from flce.testing.problem import relative_error
from flce.tools import check, machine
from flce.tools.check import CPU, Check, CheckResult, Results, Source, SplitCheck, list_checks, run_split, split_checks
from flce.tools.cli.check import check as check_command


@pytest.fixture(autouse=True)
def _user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_INTERPRET", "FLCE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(check_command)
    return CliRunner().invoke(app, list(arguments))


def some(*titles: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[Check]:
    """Return the checks of these titles on a CPU."""
    found = [each for each in list_checks([CPU])[0] if each.title in titles and each.dtype in dtypes]
    assert {each.title for each in found} == set(titles)
    return found


def results(*titles: str, **selection: Any) -> list[CheckResult]:
    return [each.run() for each in some(*titles, **selection)]


# --------------------------------------------------------------------------------------------------------- output


def test_all_is_right_on_a_cpu() -> None:
    """Check that one table has every check in every dtype."""
    pytest.importorskip("transformers")
    start = time.process_time()
    output = invoke("--device", "cpu")
    assert output.exit_code == 0, output.output
    assert time.process_time() - start < 60  # about 5 s
    assert output.stdout.count("\ncpu, torch backend ") == output.stdout.count("bfloat16") == 1
    for each in (*check.CHECKS, check.MODEL):
        figures = r" +\S+ \(\S+\)" * len(each.dtypes)
        assert re.search(rf"^{each.title}{figures}", output.stdout, re.M), each.title
    assert "flce is exact here" in output.stdout
    assert "not checked: cpu, triton backend: the kernels are for NVIDIA GPUs" in output.stdout
    block = output.stdout.partition("```\n")[2].removesuffix("```\n")
    assert block.startswith("$ flce check --device cpu\nflce ")
    assert f"torch {torch.__version__}" in block
    assert "cpu: " in block
    assert "```" not in block


def test_json_is_all_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = some("default", "small budget", "softmax", "cross_entropy")
    monkeypatch.setattr(check, "list_checks", lambda *_: (chosen, {"cpu, triton backend": "no GPU"}))
    output = invoke("--json", "--device", "cpu")
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)
    assert found["right"] is True
    assert found["command"] == "flce check --device cpu"
    assert found["environment"]["flce"] == flce.__version__
    assert [entry["what"] for entry in found["not_checked"]] == ["cpu, triton backend"]
    for entry in found["checks"]:
        assert entry["figures"], entry
        assert all(0 <= figure["error"] <= figure["allowed"] for figure in entry["figures"]), entry


def test_skipped_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("FLCE_BACKEND", "torch")  # the user's choice does not matter
        without.setattr("flce.backends._has_triton", lambda: False)
        without.setattr("flce.backends._choose", flce.backends._choose.__wrapped__)
        why = machine.why_no_backend(torch.device("cuda", 0), "triton")
        assert (why, os.environ["FLCE_BACKEND"]) == ("Triton is not installed", "torch")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    found, missing = list_checks([CPU])
    assert not [each for each in found if each.backend == "triton" or each.title == check.MODEL.title]
    assert missing["cpu, patched model"] == "Transformers is not installed"
    if importlib.util.find_spec("triton") is not None:
        assert missing["cpu, triton backend"] == "Triton's interpreter is for tests"
    monkeypatch.setattr(check, "list_checks", lambda *_: ([], {"cuda:1": "a reason"}))
    output = invoke()
    assert output.exit_code == 1
    assert "Nothing was checked." in output.stdout
    assert "not checked: cuda:1: a reason" in output.stdout


# ---------------------------------------------------------------------------------------------------------- faults


def plant_fault(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Replace a method of the PyTorch backend: its gradient is too large by 1%."""
    original = getattr(TorchBackend, method)

    def wrong(self: Any, logits: Tensor, grad: Tensor, *rest: Any) -> None:
        original(self, logits, grad, *rest)
        grad.mul_(1.01)

    monkeypatch.setattr(TorchBackend, method, wrong)


def test_a_gradient_that_is_off_by_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch, "loss_and_gradient")
    dtypes = torch.bfloat16, torch.float32
    chosen = some("default", "softmax", "patched model", dtypes=dtypes)
    monkeypatch.setattr(check, "list_checks", lambda *_: (chosen, {}))
    output = invoke("--device", "cpu")
    assert output.exit_code == 1, output.output
    block = output.stdout.partition("```\n")[2]
    assert "off: cpu, torch backend, float32, 'default'" in block
    assert re.search(r"^off: cpu, torch backend, bfloat16, 'default'\n  input gradient 1\.\d\de-02 from", block, re.M)
    assert "Something is off: " in block
    assert re.search(r"^patched model +off ", output.stdout, re.M)
    # Softmax does not call this method.
    assert re.search(r"^softmax +\S+ \(\S+\)", output.stdout, re.M)


def test_a_loss_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TorchBackend.reduce

    def wrong(self: Any, *args: Any) -> Any:
        loss, *rest = original(*args)
        return loss * 1.001, *rest

    monkeypatch.setattr(TorchBackend, "reduce", wrong)
    (result,) = results("no gradients")
    (figure,) = [figure for figure in result.figures if figure.is_off]
    assert figure.what == "loss"
    assert figure.error == pytest.approx(1e-3, rel=1e-2)


def test_other_bits_in_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The difference is smaller than the allowed error.
    original, calls = TorchBackend.softmax, iter(range(1000))

    def wrong(self: Any, *args: Any) -> Tensor:
        return original(self, *args) * (1.0 + 1e-15 * (next(calls) % 2))

    monkeypatch.setattr(TorchBackend, "softmax", wrong)
    (result,) = results("softmax", dtypes=(torch.float64,))
    assert result.wrong == ("A second run gave other bits: result, gradient.",)
    assert not any(figure.is_off for figure in result.figures)


def test_an_exception_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Tensor:
        raise RuntimeError("the device is on fire\nand so on")

    monkeypatch.setattr(TorchBackend, "softmax", fails)
    found = {result.title: result for result in results("softmax", "cross_entropy")}
    assert {title: each.status for title, each in found.items()} == {"softmax": "failed", "cross_entropy": "right"}
    (sentence,) = found["softmax"].wrong
    assert re.fullmatch(r"RuntimeError: the device is on fire \(flce/ops/softmax.py:\d+\)", sentence)


def test_a_model_that_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("flce.huggingface.patch.reason_wrapper_not_lazy", lambda *args: "nobody wants it", raising=True)
    (result,) = results("patched model")
    assert result.status == "failed"
    assert result.wrong[0].startswith("MaterializedLogitsError: ")


def test_stock_in_float64_is_the_truth() -> None:
    for each in list_checks([CPU])[0]:
        if each.dtype == torch.float64:
            stock, exact = each.results("stock"), each.results("float64")
            assert stock.keys() <= exact.keys()
            for name, value in stock.items():
                assert relative_error(value, exact[name]) < 1e-12, (each.title, name)


def test_checks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the lists for a GPU with 80 GiB and for a small, old GPU, without running the checks."""
    cuda = torch.device("cuda", 0)
    free, bf16 = 80 << 30, True
    monkeypatch.setattr(check, "why_no_backend", lambda device, backend: None)
    monkeypatch.setattr(machine, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: bf16 or emulated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 96 << 30))
    found, missing = list_checks([cuda])
    assert not [why for why in missing.values() if "Transformers" not in why]
    for backend in ("triton", "torch"):
        pairs = {(each.title, each.dtype) for each in found if each.backend == backend}
        assert pairs >= {(each.title, dtype) for each in check.CHECKS for dtype in each.dtypes}
        assert (("large: default", torch.bfloat16) in pairs) == (backend == "triton")
    free, bf16 = 8 << 30, False
    old, missing = list_checks([cuda])
    assert missing["cuda:0, large shapes"] == "8 GiB are free, 16 are needed"
    assert missing["cuda:0, bfloat16"] == "a GPU has no bfloat16"
    assert not [each for each in old if each.dtype == torch.bfloat16 or each.title.startswith("large")]


# ---------------------------------------------------------------------------------------------- several processes


distributed = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


@dataclass(frozen=True)
class FaultyCheck(SplitCheck):
    """Check with a fault in the last process. The title names the fault."""

    def results(self, source: Source) -> Results:
        found = dict(super().results(source))
        if source != "flce" or dist.get_rank() != dist.get_world_size() - 1:
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


def faulty(title: str, like: SplitCheck) -> SplitCheck:
    names = ("shape", "device", "backend", "dtype")
    return FaultyCheck(title, **{name: getattr(like, name) for name in names})


@pytest.fixture
def plain() -> SplitCheck:
    return next(each for each in split_checks(2, CPU) if each.dtype == torch.float32)


@distributed
def test_processes_with_and_without_faults(plain: SplitCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "COLLECTIVE_TIMEOUT", 10.0)  # of the process that waits for the one that raises
    titles = ["weight gradient", "another loss", "raises", "never begun"]
    right = [each for each in split_checks(2, CPU) if each.dtype == torch.float64]
    *fine, gradient, loss, raises = run_split([*right, *(faulty(title, plain) for title in titles)], 2)
    assert [each.title for each in fine] == [each.title for each in right]
    for each in fine:
        assert each.status == "right", each
        assert {"loss", "input gradient", "weight gradient"} <= {figure.what for figure in each.figures}
        assert each.device == "2 processes, cpu, gloo"
    assert (gradient.status, loss.status, raises.status) == ("off", "off", "failed")
    assert [figure.what for figure in gradient.figures if figure.is_off] == ["weight gradient"]
    (sentence,) = gradient.wrong
    assert sentence.startswith("rank 1: weight gradient 1.00e-02 from float64")
    assert "rank 0: The processes have different losses." in loss.wrong
    assert "rank 1: RuntimeError: no such process (flce/" in " ".join(raises.wrong)


@distributed
def test_a_process_that_hangs(plain: SplitCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "COLLECTIVE_TIMEOUT", 2.0)
    monkeypatch.setattr(check, "CHECK_TIMEOUT", 12.0)
    (found,) = run_split([faulty("hangs", plain), plain], 2)
    assert found.status == "failed"
    assert "rank 1: ended or gave no result within 12 s." in found.wrong


@distributed
@pytest.mark.parametrize("status", ["right", "off"])
def test_the_command_with_processes(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault of one of several processes is in the report and sets the exit status."""
    result = CheckResult("2 processes", "torch", "default", "float32", status, wrong=("so it is",))
    monkeypatch.setattr(check, "list_checks", lambda *_: ([], {}))
    monkeypatch.setattr(check, "run_split", lambda checks, count: [result])
    output = invoke("--device", "cpu", "--processes", "2")
    assert output.exit_code == (status == "off"), output.output
    assert ("so it is" in output.output) == (status == "off")
    assert "$ flce check --device cpu --processes 2\n" in output.output


# -------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    start = time.perf_counter()
    output = invoke("--json", "--device", "cuda:0")
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)
    print(f"{time.perf_counter() - start:.1f} s, {len(found['checks'])} checks")
    assert time.perf_counter() - start < 260  # with the compilation of kernels
    by_triton = {(entry["title"], entry["dtype"]) for entry in found["checks"] if entry["backend"] == "triton"}
    assert {("default", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")} <= by_triton
    assert {("adapters", "float16"), ("large: default", "bfloat16")} <= by_triton


@pytest.mark.gpu
def test_processes_on_gpus() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    chosen = split_checks(count, None)
    found = run_split(chosen, count)
    assert {each.device for each in found} == {f"{count} processes, cuda, nccl"}
    assert len(found) == len(chosen)
    assert [each for each in found if each.status != "right"] == []
