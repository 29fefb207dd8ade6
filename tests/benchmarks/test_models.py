"""A small run of `model`, its table and its picture, and what becomes of contenders that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.models import (
    ARCHITECTURES,
    CONTENDERS,
    MODEL,
    OPTIMIZERS,
    ModelCase,
    ModelContender,
    build,
    entrants,
    held_bytes,
    liger,
)
from benchmarks.reports import markdown, shortfalls
from flce.bench.cases import Effort
from flce.bench.results import Run

CPU = torch.device("cpu")


CASE = ModelCase("tiny-llama", 1, 16, dtype="float32")
HEAD = {"date": "d", "command": "c", "commit": None, "versions": {}, "device": {"type": "cuda", "name": "a GPU"}}


def named(name):
    return next(contender for contender in CONTENDERS if contender.name == name)


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """One tiny run of `model`, on the CPU."""
    path = tmp_path_factory.mktemp("benchmarks") / "model.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
        done = CliRunner().invoke(app, ["model", "--preset", "tiny", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    return path


def test_every_case_of_the_preset_is_measured(result_file):
    run = MODEL.load(result_file)
    assert [entry.case for entry in run.cases] == [case for case, _ in MODEL.presets["tiny"]()]
    for entry in run.cases:
        stock = entry.by_name("stock")
        for name in ("ours", "ours-budget-1", "stock", "ours-again"):
            result = entry.by_name(name)
            assert result.status == "ok", result.reason
            assert len(result.samples_ms) == 2
            assert result.loss == pytest.approx(stock.loss, abs=1e-3)
            assert result.peak_bytes is not None
        ours = entry.by_name("ours")
        assert ours.peak_bytes is not None
        assert stock.peak_bytes is not None
        assert ours.peak_bytes < stock.peak_bytes


def test_schema(result_file):
    document = json.loads(result_file.read_text())
    assert document["kind"] == "model"
    assert {"python", "torch", "transformers"} <= set(document["versions"])
    for entry in document["cases"]:
        assert {"model", "batch", "sequence", "dtype", "optimizer", "config"} <= set(entry["case"])
        for result in entry["results"]:
            assert ({"median_ms", "peak_bytes", "loss"} <= set(result)) == (result["status"] == "ok")
            assert ("reason" in result) == (result["status"] != "ok")


def test_missing_peers_are_named(result_file):
    for entry in MODEL.load(result_file).cases:
        for contender in CONTENDERS:
            if contender.family == "peer":
                result = entry.by_name(contender.name)
                assert result.status == "unavailable", f"{contender.name} was dropped in silence"
                assert result.reason == "not installed (pip install liger-kernel)"


def test_table(result_file):
    done = CliRunner().invoke(app, ["table", str(result_file)])
    assert done.exit_code == 0, done.output
    assert "| flce, 1 MiB budget |" in done.output
    assert "tokens/s" in done.output
    assert "x stock" in done.output
    assert "x Liger" not in done.output
    assert "Not measured: Liger" in done.output
    brief = CliRunner().invoke(app, ["table", str(result_file), "--brief"])
    assert "Tokens/s, peak GiB" in brief.output
    assert "| loss |" not in brief.output


def exhausting(name, family, from_step):
    """A contender whose forward runs out of memory from that call on."""
    calls = 0

    @contextlib.contextmanager
    def applied(model):
        nonlocal calls
        calls += 1
        forward = model.forward

        def fail(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 62.62 GiB. GPU 0 has a capacity of ...")

        if calls >= from_step:
            model.forward = fail
        try:
            yield
        finally:
            model.forward = forward

    return ModelContender(name, name, family, applied)


@pytest.mark.parametrize("from_step", [1, 2])
def test_out_of_memory_is_recorded_and_the_others_go_on(from_step, tmp_path):
    """In the warm-up, and in the first timed step."""
    contenders = [exhausting("stock", "stock", from_step), named("ours")]
    entry = MODEL.measure(CASE, CPU, Effort(2, 1.0), contenders)
    stock, ours, _ = entry.results
    assert stock.status == "oom"
    assert stock.reason == "OutOfMemoryError: CUDA out of memory. Tried to allocate 62.62 GiB."
    assert ours.status == "ok"
    assert len(ours.samples_ms) == 2
    run = Run("model", HEAD, [entry])
    assert shortfalls(run) == []
    save(run, tmp_path / "run.json")
    run = MODEL.load(tmp_path / "run.json")
    text = markdown(run, MODEL.tables(run, False))
    assert "| stock | out of memory |" in text
    assert "62.62 GiB" in text
    assert MODEL.figure is not None
    MODEL.figure(run).savefig(tmp_path / "run.png")


def test_flce_out_of_memory_is_a_shortfall():
    entry = MODEL.measure(CASE, CPU, Effort(1, 1.0), [exhausting("ours", "ours", 1)])
    assert [result.contender for result in shortfalls(Run("model", HEAD, [entry]))] == ["ours", "ours-again"]


def test_after_the_deadline_no_step_is_begun():
    answers = iter([False] * 4)  # the three warm-ups, one timed step

    class Countdown(Effort):
        def expired(self) -> bool:
            return next(answers, True)

    entry = MODEL.measure(CASE, CPU, Countdown(2, 1.0), [named("ours"), named("stock")])
    ours, stock, _ = entry.results
    assert (ours.status, len(ours.samples_ms)) == ("ok", 1)
    assert (stock.status, stock.reason) == ("skipped", "the deadline had passed")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_contenders_find_the_same_weights(optimizer):
    """Also after the steps of others with an optimizer, whose states belong to what is held."""
    case = dataclasses.replace(CASE, optimizer=optimizer)
    entry = MODEL.measure(case, CPU, Effort(2, 1.0), [named("ours"), named("stock")])
    ours, stock, _ = entry.results
    assert ours.status == stock.status == "ok", (ours.reason, stock.reason)
    assert ours.loss == pytest.approx(stock.loss, abs=1e-5)
    assert stock.peak_bytes is not None
    assert stock.workspace_bytes is not None
    model = build(case, CPU)
    copies = {"adamw": 3}.get(optimizer, 1)
    held = held_bytes(model, None)
    assert stock.peak_bytes - stock.workspace_bytes == pytest.approx(copies * held, rel=0.01)


def test_not_finite_losses_survive_the_file(tmp_path):
    entry = MODEL.measure(CASE, CPU, Effort(1, 1.0), [named("stock")])
    entry.results[0].loss = math.nan
    save(Run("model", HEAD, [entry]), tmp_path / "run.json")
    again = MODEL.load(tmp_path / "run.json").cases[0].results[0].loss
    assert again is not None
    assert math.isnan(again)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_architectures_have_the_sizes_of_their_names(architecture):
    transformers = pytest.importorskip("transformers")
    known = ARCHITECTURES[architecture]
    config = transformers.AutoConfig.for_model(**known)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = {"Llama-3.2-1B": 1_235_814_400, "Qwen3-0.6B": 596_049_920, "tiny-llama": 2_000 * 32 + 18_592}
    assert count == expected[architecture]


def test_a_budget_is_a_contender():
    case = dataclasses.replace(CASE, budgets_mib=(64, 256), contenders=("ours-budget", "stock"))
    assert [contender.name for contender in entrants(case)] == ["ours-budget-64", "ours-budget-256", "stock"]


def test_what_liger_changes_is_put_back(monkeypatch):
    """Stands in for Liger: it binds methods to modules and replaces names in the file of the model."""
    from transformers.models.llama import modeling_llama

    class Patch:
        @staticmethod
        def _apply_liger_kernel_to_instance(model, **kernels):
            model.forward = lambda **kwargs: None
            model.model.norm.offset = 1.0
            modeling_llama.apply_rotary_pos_emb = None

    # Not instead of `importlib.import_module`: Transformers loads its own modules with that, when they are asked for.
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", Patch)
    model, rotate = build(CASE, CPU), modeling_llama.apply_rotary_pos_emb
    with liger(model):
        assert "forward" in vars(model)
        assert modeling_llama.apply_rotary_pos_emb is None
    assert "forward" not in vars(model)
    assert not hasattr(model.model.norm, "offset")
    assert modeling_llama.apply_rotary_pos_emb is rotate


@pytest.mark.gpu
def test_every_contender_runs_on_cuda():
    """Of the peers those that are installed may fail."""
    for warm_up in (None, 64):
        case = ModelCase("tiny-llama", 2, 128, budgets_mib=(1,), warm_up_sequence=warm_up)
        entry = MODEL.measure(case, torch.device("cuda"), Effort(2, 5.0))
        stock = entry.by_name("stock")
        for result in entry.results:
            if result.family != "peer":
                assert result.status == "ok", (result.contender, result.reason)
                assert result.peak_bytes is not None
                assert result.forward_peak_bytes is not None
                assert result.reserved_bytes is not None
                assert result.forward_peak_bytes <= result.peak_bytes <= 1.1 * result.reserved_bytes
                assert result.loss == pytest.approx(stock.loss, abs=1e-2)
