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
from flce.testing.tolerances import RESULTS
from flce.tools import machine
from flce.tools.check import checks, processes, suite
from flce.tools.check.checks import Check, CheckResult, Figure, LogprobsCheck, Results, compare_results
from flce.tools.check.processes import SplitCheck, choose_device, run_split, split_checks
from flce.tools.check.suite import SkippedCheck
from flce.tools.cli.check import check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_INTERPRET", "FLCE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    checks.compute_references.cache_clear()


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, list(arguments))


def some(*titles: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,), quick: bool = True) -> list[Check]:
    """Return the checks of these titles on a CPU."""
    found = [each for each in suite.list_checks(CPU, quick)[0] if each.title in titles and each.inputs.dtype in dtypes]
    assert {each.title for each in found} == set(titles)
    return found


def results(*titles: str, **selection: Any) -> list[CheckResult]:
    return [each.run() for each in some(*titles, **selection)]


# --------------------------------------------------------------------------------------------------------- output


def test_quick_is_right_on_a_cpu() -> None:
    start = time.perf_counter()
    output = invoke("--quick", "--device", "cpu")
    assert output.exit_code == 0, output.output
    assert time.perf_counter() - start < 60  # about 5 s on an idle machine
    for title in ("default", "small budget", "adapters", "linear_logprobs", "cross_entropy in place", "log_softmax"):
        assert re.search(rf"^{title} +\S+ \(\S+\) +\S+ \(\S+\) +\S+ \(\S+\) +\S+ \(\S+\)", output.stdout, re.M), title
    assert "flce is exact here" in output.stdout
    assert "not checked: cpu, triton backend: the kernels are for NVIDIA GPUs" in output.stdout
    block = output.stdout.partition("```\n")[2].removesuffix("```\n")
    assert block.startswith("$ flce check --quick --device cpu\nflce ")
    assert f"torch {torch.__version__}" in block
    assert "cpu: " in block
    assert "```" not in block


def test_json_is_all_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = some("default", "small budget", "softmax", "cross_entropy and more")
    monkeypatch.setattr(suite, "list_checks", lambda *_: (chosen, [SkippedCheck("cpu, triton backend", "no GPU")]))
    output = invoke("--quick", "--json", "--device", "cpu")
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)
    assert found["right"] is True
    assert found["command"] == "flce check --quick --device cpu"
    assert found["environment"]["flce"] == flce.__version__
    assert [entry["what"] for entry in found["not_checked"]] == ["cpu, triton backend"]
    for entry in found["checks"]:
        assert entry["figures"], entry
        assert all(0 <= figure["error"] <= figure["allowed"] for figure in entry["figures"]), entry
    (operator_check,) = [entry for entry in found["checks"] if entry["title"] == "small budget"]
    assert "workspace" in operator_check["plan"]


def test_skipped_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("FLCE_BACKEND", "torch")  # the user's choice does not matter
        without.setattr("flce.backends._has_triton", lambda: False)
        without.setattr("flce.backends._choose", flce.backends._choose.__wrapped__)
        why = machine.why_no_backend(torch.device("cuda", 0), "triton")
        assert (why, os.environ["FLCE_BACKEND"]) == ("Triton is not installed", "torch")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    assert suite.list_backend_checks(CPU, "torch", True)[1] == [
        SkippedCheck("cpu, patched models", "Transformers is not installed")
    ]
    if importlib.util.find_spec("triton") is not None:
        interpreted = SkippedCheck("cpu, triton backend", "Triton's interpreter is for tests")
        assert suite.list_backend_checks(CPU, "triton", True) == ([], [interpreted])
    gpus = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(suite, "distinct_devices", lambda: ([gpus[0], CPU], {gpus[1]: gpus[0]}))
    monkeypatch.setattr(suite, "list_backend_checks", lambda *args: ([], []))
    output = invoke("--quick")
    assert output.exit_code == 1
    assert "Nothing was checked." in output.stdout
    assert "not checked: cuda:1: it is the same as cuda:0; --device cuda:1 checks it" in output.stdout


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
    chosen = some("default", "softmax", "Llama, labels", dtypes=dtypes)
    monkeypatch.setattr(suite, "list_checks", lambda *_: (chosen, []))
    output = invoke("--quick", "--device", "cpu")
    assert output.exit_code == 1, output.output
    block = output.stdout.partition("```\n")[2]
    assert "off: cpu, torch backend, float32, 'default'" in block
    assert re.search(r"^off: cpu, torch backend, bfloat16, 'default'\n  input gradient 1\.\d\de-02 from", block, re.M)
    assert "Something is off: " in block
    assert "N=256, H=64, V=1000" in block  # the plan
    assert re.search(r"^Llama, labels +off ", output.stdout, re.M)
    # Softmax does not call this method.
    assert re.search(r"^softmax +\S+ \(\S+\)", output.stdout, re.M)


@pytest.mark.parametrize(
    "method, title",
    [
        ("gradient", "reduction none"),
        ("gradient", "blocks of classes"),
        ("gradient", "linear_logprobs"),
        ("loss_and_gradient", "cross_entropy in place"),
    ],
)
def test_gradients_of_other_schedules(method: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch, method)
    assert [result.status for result in results(title)] == ["off"]


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
    (result,) = results("Llama, labels")
    assert result.status == "failed"
    assert result.wrong[0].startswith("MaterializedLogitsError: ")


def test_nan_is_off() -> None:
    figure = Figure("loss", float("nan"), 0.0, 1.0)
    assert figure.is_off
    assert figure.share == float("inf")
    one = {"loss": torch.ones(())}
    assert not compare_results(one, one, one, RESULTS[torch.float64])[0].is_off


def test_stock_in_float64_is_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that stock in float64 equals the oracle, also if the oracle computes few tokens at a time."""
    monkeypatch.setattr(checks, "MAX_LOGITS", 100 * suite.SMALLER.vocab)
    for each in suite.list_checks(CPU, quick=True)[0]:
        few = isinstance(each, LogprobsCheck) and each.inputs.dtype == torch.float32
        if each.inputs.dtype == torch.float64 or few:
            stock, exact = each.references()
            assert stock.keys() <= exact.keys()
            for name, value in stock.items():
                assert relative_error(value, exact[name]) < (2e-6 if few else 1e-12), (each.title, name)


def test_the_full_suite_has_more() -> None:
    """Check that the suite has both models, with labels and with an own loss, and every regime in every dtype."""
    pytest.importorskip("transformers")
    found = [(each.title, each.inputs.dtype) for each in suite.list_backend_checks(CPU, "torch", quick=False)[0]]
    regimes = (suite.DEFAULT, *suite.REGIMES, *suite.LOGPROBS, *suite.ROW_REGIMES, *suite.MODELS)
    expected = [(regime.title, dtype) for regime in regimes for dtype in regime.dtypes]
    assert all(found.count(each) == 1 for each in expected)
    assert [each.status for each in results("Qwen3, own loss", dtypes=(torch.bfloat16,), quick=False)] == ["right"]


def test_checks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the lists for a GPU with 80 GiB and for a small, old GPU, without running the checks."""
    cuda = torch.device("cuda", 0)
    free, bf16 = 80 << 30, True
    monkeypatch.setattr(suite, "why_no_backend", lambda device, backend: None)
    monkeypatch.setattr(machine, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: bf16 or emulated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 96 << 30))
    (quick, _), (full, missing) = (suite.list_backend_checks(cuda, "triton", quick) for quick in (True, False))
    assert not missing or "Transformers" in missing[0].why
    assert [each.title for each in full].count("large: default") == 2
    assert {each.title for each in quick} < {each.title for each in full}
    assert len(quick) < 12 < len(full)
    assert not [each for each in suite.list_backend_checks(cuda, "torch", False)[0] if each.title.startswith("large")]
    free = 8 << 30
    assert suite.list_backend_checks(cuda, "triton", True)[1][-1] == SkippedCheck(
        "cuda:0, large shapes", "8 GiB are free, 16 are needed"
    )
    bf16 = False
    old, missing = suite.list_backend_checks(cuda, "triton", False)
    assert SkippedCheck("cuda:0, bfloat16", "a GPU has no bfloat16") in missing
    assert not [each for each in old if each.inputs.dtype == torch.bfloat16]


# ---------------------------------------------------------------------------------------------- several processes


distributed = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")


@dataclass(frozen=True)
class FaultyCheck(SplitCheck):
    """Check with a fault in the last process. The title names the fault."""

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


def faulty(title: str, like: SplitCheck) -> SplitCheck:
    return FaultyCheck(title, like.backend, like.inputs, like.options, like.sequence_parallel)


@pytest.fixture
def plain() -> SplitCheck:
    return next(each for each in split_checks(2, CPU) if each.inputs.dtype == torch.float32)


@distributed
def test_processes_with_and_without_faults(plain: SplitCheck) -> None:
    titles = ["weight gradient", "another loss", "raises", "never begun"]
    right = [each for each in split_checks(2, CPU) if each.inputs.dtype == torch.float64]
    *fine, gradient, loss, raises = run_split([*right, *(faulty(title, plain) for title in titles)], 2)
    assert [each.title for each in fine] == [each.title for each in right]
    for each in fine:
        assert each.status == "right", each
        assert {"loss", "input gradient", "weight gradient"} <= {figure.what for figure in each.figures}
        assert "of each of 2 processes" in each.plan
        assert each.device == "2 processes, cpu, gloo"
    assert (gradient.status, loss.status, raises.status) == ("off", "off", "failed")
    assert [figure.what for figure in gradient.figures if figure.is_off] == ["weight gradient"]
    (sentence,) = gradient.wrong
    assert sentence.startswith("rank 1: weight gradient 1.00e-02 from float64")
    assert "rank 0: The processes have different losses." in loss.wrong
    assert "rank 1: RuntimeError: no such process (flce/" in " ".join(raises.wrong)


@distributed
def test_a_process_that_hangs(plain: SplitCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COLLECTIVE_TIMEOUT", 2.0)
    monkeypatch.setattr(processes, "TIMEOUT_AFTER_FIRST_EXIT", 0.5)
    (found,) = run_split([faulty("hangs", plain), plain], 2)
    assert found.status == "failed"
    assert "rank 1: ended or gave no result within 2 s." in found.wrong
    monkeypatch.setattr(processes, "TOTAL_TIMEOUT", 0.1)
    (found,) = run_split([plain, plain], 2)  # the processes end before the first check
    assert (found.status, len(found.wrong)) == ("failed", 2)


@distributed
def test_devices_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for gpus in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert choose_device(2, CPU) == CPU
        assert choose_device(2, None) == (cuda if gpus == 2 else CPU)
        if gpus == 2:
            assert choose_device(2, cuda) == cuda
        else:
            with pytest.raises(ValueError, match=f"there are {gpus} GPUs for 2 processes"):
                choose_device(2, cuda)


@distributed
@pytest.mark.parametrize("status", ["right", "off"])
def test_the_command_with_processes(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault of one of several processes is in the report and sets the exit status."""
    result = CheckResult("2 processes", "torch", "default", "float32", status, wrong=("so it is",))
    monkeypatch.setattr(suite, "list_checks", lambda *_: ([], []))
    monkeypatch.setattr(processes, "run_split", lambda checks, count: [result])
    output = invoke("--quick", "--device", "cpu", "--processes", "2")
    assert output.exit_code == (status == "off"), output.output
    assert ("so it is" in output.output) == (status == "off")
    assert "$ flce check --quick --device cpu --processes 2\n" in output.output


# -------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("quick, seconds", [(True, 70), (False, 260)])
def test_on_a_gpu(quick: bool, seconds: int) -> None:
    # The time includes compilation if the cache of kernels is empty.
    start = time.perf_counter()
    output = invoke("--json", "--device", "cuda:0", *(["--quick"] if quick else []))
    assert output.exit_code == 0, output.output
    found = json.loads(output.stdout)
    print(f"{time.perf_counter() - start:.1f} s, {len(found['checks'])} checks")
    assert time.perf_counter() - start < seconds
    assert {entry["backend"] for entry in found["checks"]} == {"triton", "torch"}
    by_triton = {(entry["title"], entry["dtype"]) for entry in found["checks"] if entry["backend"] == "triton"}
    assert {("default", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")} <= by_triton
    assert quick or {("adapters", "float16"), ("long: softmax", "bfloat16")} <= by_triton


@pytest.mark.gpu
def test_processes_on_gpus() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    checks = split_checks(count, None)
    found = run_split(checks, count)
    assert {each.device for each in found} == {f"{count} processes, cuda, nccl"}
    assert len(found) == len(checks)
    assert [each for each in found if each.status != "right"] == []
