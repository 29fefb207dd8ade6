"""``flce check``: it is right where flce is, finds what is not, and says what it did not look at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")

import typer
from typer.testing import CliRunner

import flce
from flce.backends import backend_name
from flce.backends.eager import TorchBackend
from flce.testing.problem import relative_error
from flce.testing.tolerances import RESULTS
from flce.tools import machine
from flce.tools.check import logprobs, run, suite
from flce.tools.check.figures import Figure, compared
from flce.tools.check.inputs import stock, truth
from flce.tools.cli.check import check

ROOT = Path(flce.__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_a_user_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the Triton backend is looked at only with its interpreter."""
    for name in ("TRITON_INTERPRET", "FLCE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, list(arguments))


def some(*titles: str, quick: bool = True) -> run.CheckReport:
    """The checks of these titles, on a CPU."""
    of_all = run.todo(CPU, quick)
    tasks = tuple(task for task in of_all.tasks if task.check.title in titles)
    assert {task.check.title for task in tasks} == set(titles)
    return run.run(run.Todo(tasks, of_all.missing, quick), lambda task: None)


# --------------------------------------------------------------------------------------------------- what it says


def test_quick_is_right_on_a_cpu() -> None:
    started = time.perf_counter()
    said = invoke("--quick", "--device", "cpu")
    assert said.exit_code == 0, said.output
    assert time.perf_counter() - started < 60  # some 5 s on a machine that does nothing else
    for title in ("default", "small budget", "adapters", "linear_logprobs", "cross_entropy in place", "log_softmax"):
        assert re.search(rf"^{title} +\S+ \(\S+\) +\S+ \(\S+\) +\S+ \(\S+\) +\S+ \(\S+\)", said.stdout, re.M), title
    assert "flce is exact here" in said.stdout
    assert "not checked: cpu, triton backend: the kernels are for NVIDIA GPUs" in said.stdout
    block = said.stdout.partition("```\n")[2].removesuffix("```\n")
    assert block.startswith("$ flce check --quick --device cpu\nflce ")
    assert f"torch {torch.__version__}" in block
    assert "cpu: " in block
    assert "```" not in block


def test_json_is_all_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    report = some("default", "small budget", "softmax", "cross_entropy and more")
    monkeypatch.setattr(run, "run", lambda what, begun: report)
    said = invoke("--quick", "--json", "--device", "cpu")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["right"] is True
    assert found["command"] == "flce check --quick --device cpu"
    assert found["environment"]["flce"] == flce.__version__
    assert [entry["what"] for entry in found["not_checked"]] == ["cpu, triton backend"]
    of_dtypes = {entry["dtype"] for entry in found["checks"]}
    assert of_dtypes == {"float16", "bfloat16", "float32", "float64"}
    for entry in found["checks"]:
        assert entry["figures"], entry
        assert all(0 <= figure["error"] <= figure["allowed"] for figure in entry["figures"]), entry
    of_operator = [entry for entry in found["checks"] if entry["title"] == "small budget"]
    assert all("workspace" in entry["plan"] for entry in of_operator)


WITHOUT = """
import sys
for name in {hidden}:
    sys.modules[name] = None
import typer
from flce.tools.cli.check import check
app = typer.Typer()
app.command()(check)
app()
"""


def test_without_triton_and_transformers() -> None:
    """Status 0, and it says what was not checked."""
    hidden = ("triton", "transformers", "tokenizers", "accelerate", "peft")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLCE_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(hidden=hidden), "--quick"],
        capture_output=True,
        text=True,
        env={**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not checked: cpu, patched models: Transformers is not installed" in done.stdout
    assert "not checked: cpu, triton backend: " in done.stdout
    assert "flce is exact here" in done.stdout


def test_why_a_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "torch")  # what the user asks for does not matter
    cuda = torch.device("cuda", 0)
    assert machine.why_no_backend(cuda, "torch") is None
    monkeypatch.setattr("flce.backends._has_triton", lambda: False)
    monkeypatch.setattr("flce.backends._choose", flce.backends._choose.__wrapped__)
    assert machine.why_no_backend(cuda, "triton") == "Triton is not installed"
    assert "TRITON_INTERPRET=1 runs them" in str(machine.why_no_backend(CPU, "triton"))
    assert os.environ["FLCE_BACKEND"] == "torch"


def test_a_device_that_is_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(run, "devices_of_a_kind", lambda: ([gpus[0], CPU], {gpus[1]: gpus[0]}))
    monkeypatch.setattr(run, "suite", lambda *args: suite.Suite((), ()))
    (missing,) = run.todo(None, quick=True).missing
    assert str(missing.why) == "it is as cuda:0; --device cuda:1 checks it"


def test_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "QUICK_SECONDS", 0.0)
    report = some("default", "softmax")
    assert [result.title for result in report.results] == ["default"]
    assert len(report.late) == 7  # of two checks in four dtypes
    assert report.right
    assert report.verdict.endswith("There was no time for 7 further checks.")
    monkeypatch.setattr(run, "QUICK_SECONDS", -1.0)
    nothing = some("default")
    assert not nothing.right
    assert nothing.verdict == "Nothing was checked. There was no time for 4 further checks."


# --------------------------------------------------------------------------------------------------- what it finds


def larger(method: str, share: float, backend: Any = TorchBackend) -> Callable[..., Any]:
    """The backend's method, whose gradient is larger by this share."""
    original = getattr(backend, method)

    def wrong(self: Any, logits: Tensor, grad: Tensor, *rest: Any) -> None:
        original(self, logits, grad, *rest)
        grad.mul_(1.0 + share)

    return wrong


def test_a_gradient_that_is_off_by_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "loss_and_gradient", larger("loss_and_gradient", 0.01))
    report = some("default", "softmax", "Llama, labels")
    monkeypatch.setattr(run, "run", lambda what, begun: report)
    said = invoke("--quick", "--device", "cpu")
    assert said.exit_code == 1, said.output
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        name = f"off: cpu, torch backend, {dtype}, 'default'"
        table, _, block = said.stdout.partition("```\n")
        assert name in table
    assert re.search(r"^off: cpu, torch backend, bfloat16, 'default'\n  input gradient 1\.\d\de-02 from", block, re.M)
    assert "Something is off: " in block
    assert "N=256, H=64, V=1000" in block  # the plan
    assert re.search(r"^Llama, labels +off ", said.stdout, re.M)
    # What does not go that way is right.
    assert re.search(r"^softmax +\S+ \(\S+\)", said.stdout, re.M)


@pytest.mark.parametrize(
    "method, title",
    [
        ("gradient", "reduction none"),
        ("gradient", "blocks of classes"),
        ("gradient", "linear_logprobs"),
        ("loss_and_gradient", "cross_entropy in place"),
    ],
)
def test_gradients_of_other_ways(method: str, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, method, larger(method, 0.01))
    report = some(title)
    assert {result.status for result in report.results} == {"off"}


def test_a_loss_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TorchBackend.reduce

    def wrong(self: Any, *args: Any) -> Any:
        loss, *rest = original(*args)
        return loss * 1.001, *rest

    monkeypatch.setattr(TorchBackend, "reduce", wrong)
    (result, *_) = some("no gradients").wrong
    (figure,) = [figure for figure in result.figures if figure.off]
    assert figure.what == "loss"
    assert figure.error == pytest.approx(1e-3, rel=1e-2)


def test_other_bits_in_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what is allowed."""
    original, calls = TorchBackend.softmax, iter(range(1000))

    def wrong(self: Any, *args: Any) -> Tensor:
        return original(self, *args) * (1.0 + 1e-15 * (next(calls) % 2))

    monkeypatch.setattr(TorchBackend, "softmax", wrong)
    (result,) = some("softmax").wrong
    assert result.dtype == "float64"
    assert result.wrong == ("A second run gave other bits: result, gradient.",)
    assert not any(figure.off for figure in result.figures)


def test_an_exception_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Tensor:
        raise RuntimeError("the device is on fire\nand so on")

    monkeypatch.setattr(TorchBackend, "softmax", fails)
    report = some("softmax", "cross_entropy")
    assert {result.title: result.status for result in report.results} == {"softmax": "failed", "cross_entropy": "right"}
    (sentence,) = report.wrong[0].wrong
    assert re.fullmatch(r"RuntimeError: the device is on fire \(flce/ops/softmax.py:\d+\)", sentence)


def test_a_model_that_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("flce.huggingface.patch.why_not_lazy", lambda *args: "nobody wants it", raising=True)
    (result,) = some("Llama, labels").wrong
    assert result.status == "failed"
    assert result.wrong[0].startswith("MaterializedLogitsError: ")


def test_what_is_not_a_number_is_off() -> None:
    figure = Figure("loss", float("nan"), 0.0, 1.0)
    assert figure.off
    assert figure.share == float("inf")
    one = {"loss": torch.ones(())}
    assert not compared(one, one, one, RESULTS[torch.float64])[0].off


@pytest.mark.parametrize("regime", suite.REGIMES, ids=lambda regime: regime.title)
def test_stock_in_float64_is_the_truth(regime: suite.Regime) -> None:
    """Else what is measured beside it would allow anything."""
    inputs = regime.check(suite.TINY, torch.float64, CPU, "torch").inputs
    beside, right = stock(inputs), truth(inputs)
    assert beside.keys() == right.keys()
    for name, value in beside.items():
        assert relative_error(value, right[name]) < 1e-12, name


@pytest.mark.parametrize("title", ["linear_logprobs", "linear_logprobs and more"])
def test_results_of_tokens_a_few_at_a_time(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth of many logits; it is that of all at once."""
    monkeypatch.setattr(logprobs, "MOST_LOGITS", 7 * suite.TINY.vocab)
    checks = suite._of_logprobs(suite.TINY, [torch.float32], CPU, "torch")
    beside, right = next(check for check in checks if check.title == title).references()
    assert beside.keys() == right.keys()
    for name, value in beside.items():
        assert relative_error(value, right[name]) < 2e-6, name


def test_the_full_suite_has_more() -> None:
    """Models of both architectures, by labels and by a loss of one's own, also in bfloat16."""
    pytest.importorskip("transformers")
    titles = ("Llama, labels", "Llama, own loss", "Qwen3, labels", "Qwen3, own loss")
    report = some(*titles, quick=False)
    assert report.right, report.wrong
    assert len(report.results) == 8


def test_the_full_suite_has_every_regime_in_every_dtype() -> None:
    checks = suite.suite(torch.device("cpu"), "torch", quick=False).checks
    found = [(check.title, check.dtype) for check in checks]
    expected = [(regime.title, dtype) for regime in suite.REGIMES for dtype in regime.dtypes]
    assert all(found.count(each) == 1 for each in expected)


def test_what_there_is_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of one with 80 GiB, and of a small and old one. Nothing runs."""
    cuda = torch.device("cuda", 0)
    free, bf16 = 80 << 30, True
    monkeypatch.setattr(suite, "why_no_backend", lambda device, backend: None)
    monkeypatch.setattr(machine, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: bf16 or emulated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 96 << 30))
    quick, full = (suite.suite(cuda, "triton", quick) for quick in (True, False))
    assert not full.missing or "Transformers" in full.missing[0].why
    assert [check.title for check in full.checks].count("large: default") == 2
    assert {check.title for check in quick.checks} < {check.title for check in full.checks}
    assert len(quick.checks) < 12 < len(full.checks)
    assert not [check for check in suite.suite(cuda, "torch", False).checks if check.title.startswith("large")]
    free = 8 << 30
    assert suite.suite(cuda, "triton", True).missing[-1] == suite.Missing(
        "cuda:0, large shapes", "8 GiB are free, 16 are needed"
    )
    bf16 = False
    old = suite.suite(cuda, "triton", False)
    assert suite.Missing("cuda:0, bfloat16", "a GPU has no bfloat16") in old.missing
    assert not [check for check in old.checks if check.dtype == torch.bfloat16]


def test_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    of_all = run.todo(CPU, quick=True)
    assert [missing.what for missing in of_all.missing] == ["cpu, triton backend, a second run"]
    tasks = tuple(task for task in of_all.tasks if task.backend == "triton")
    seen: list[str] = []
    report = run.run(run.Todo(tasks, (), True), lambda task: seen.append(str(task)))
    assert seen == ["cpu triton float32 default", "cpu triton float32 softmax"]
    assert report.right, report.wrong
    assert "triton backend" in report.results[0].plan
    assert backend_name(CPU) == "triton"


# -------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("quick, seconds", [(True, 70), (False, 260)])
def test_on_a_gpu(quick: bool, seconds: int) -> None:
    """From a cache of kernels that may be empty. The limit is that of the command."""
    started = time.perf_counter()
    said = invoke("--json", "--device", "cuda:0", *(["--quick"] if quick else []))
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    print(f"{time.perf_counter() - started:.1f} s, {len(found['checks'])} checks, no time for {found['no_time_for']}")
    assert time.perf_counter() - started < seconds
    assert not found["no_time_for"]
    assert {entry["backend"] for entry in found["checks"]} == {"triton", "torch"}
    by_triton = {(entry["title"], entry["dtype"]) for entry in found["checks"] if entry["backend"] == "triton"}
    assert {("default", dtype) for dtype in ("float16", "bfloat16", "float32", "float64")} <= by_triton
    assert quick or {("adapters", "float16"), ("long: softmax", "bfloat16")} <= by_triton


@pytest.mark.gpu
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from flce.backends.triton import TritonBackend

    monkeypatch.setattr(TritonBackend, "loss_and_gradient", larger("loss_and_gradient", 0.01, TritonBackend))
    said = invoke("--quick", "--device", "cuda:0")
    assert said.exit_code == 1, said.output
    assert "off: cuda:0, triton backend, bfloat16, 'default'" in said.stdout
