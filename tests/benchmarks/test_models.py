"""Tests of small runs of `model`, its table, the picture of memory, and contenders that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


from benchmarks import memory
from benchmarks.benchmark import save
from benchmarks.cases import Effort
from benchmarks.models import (
    ARCHITECTURES,
    CONTENDERS,
    MODEL,
    ModelCase,
    ModelContender,
    build,
    held_bytes,
    liger,
)
from benchmarks.runs import Run
from benchmarks.tables import markdown, shortfalls
from tests.benchmarks.made_up import HEAD

CPU = torch.device("cpu")


CASE = ModelCase("tiny-llama", 1, 16, dtype="float32")


def named(name):
    return next(contender for contender in CONTENDERS if contender.name == name)


def exhausting(name, family, from_step):
    """Return a contender whose forward runs out of memory from this call on."""
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
    """Memory runs out in the warm-up, or in the first timed step."""
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


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adamw"])
def test_contenders_find_the_same_weights(optimizer):
    """This also holds after steps of an optimizer. Its states count as held bytes."""
    case = dataclasses.replace(CASE, optimizer=optimizer)
    entry = MODEL.measure(case, CPU, Effort(2, 1.0), [named("ours"), named("stock")])
    ours, stock, _ = entry.results
    assert ours.status == stock.status == "ok", (ours.reason, stock.reason)
    assert ours.loss == pytest.approx(stock.loss, abs=1e-5)
    assert stock.peak_bytes is not None
    assert stock.workspace_bytes is not None
    model = build(case, CPU)
    copies = {"adamw": 3, "sgd-momentum": 2}[optimizer]
    held = held_bytes(model, None)
    assert stock.peak_bytes - stock.workspace_bytes == pytest.approx(copies * held, rel=0.01)


def test_settings_of_a_step():
    """With LoRA only adapters of the layers are trained, and the head has no adapter."""
    pytest.importorskip("peft")
    case = dataclasses.replace(CASE, lora_rank=4, checkpointing=False)
    model = build(case, CPU)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name and "lm_head" not in name for name in trained)
    assert not model.is_gradient_checkpointing
    assert build(CASE, CPU).is_gradient_checkpointing
    assert case.title == "tiny-llama, 1 x 16 tokens, float32, LoRA of rank 4, no checkpointing"


def test_without_peft_its_cases_are_not_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    entry = MODEL.measure(dataclasses.replace(CASE, lora_rank=4, contenders=("ours", "stock")), CPU, Effort(1, 1.0))
    assert {(result.status, result.reason) for result in entry.results} == {
        ("unavailable", "not installed (pip install peft)")
    }


def test_the_picture_of_memory(tmp_path, monkeypatch):
    """The picture of a tiny model on a CPU. Stock allocates logits, flce does not."""
    monkeypatch.setattr(memory, "find_device", lambda *_: torch.device("cpu"))
    memory.main(tmp_path / "memory.png")
    document = json.loads((tmp_path / "memory.json").read_text())
    assert document["case"]["model"] == "tiny-llama"
    assert document["peak_bytes"]["flce.patch_model(model)"] < document["peak_bytes"]["stock"]
    assert (tmp_path / "memory.png").exists()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_architectures_have_the_sizes_of_their_names(architecture):
    transformers = pytest.importorskip("transformers")
    known = ARCHITECTURES[architecture]
    config = transformers.AutoConfig.for_model(**known)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = {"Llama-3.2-1B": 1_235_814_400, "Qwen3-0.6B": 596_049_920, "tiny-llama": 2_000 * 32 + 18_592}
    expected["Gemma-3-270m"] = 268_098_176
    expected["Llama-3-8B, 2 layers"] = 8_030_261_248 - 30 * 218_112_000  # layers less than Llama-3-8B
    expected["tiny-llama, untied"] = 2 * 2_000 * 32 + 18_592
    assert count == expected[architecture]


def test_what_liger_changes_is_put_back(monkeypatch):
    """A stand-in for Liger binds methods to modules and replaces names in the file of the model."""
    from transformers.models.llama import modeling_llama

    class Patch:
        @staticmethod
        def _apply_liger_kernel_to_instance(model, **kernels):
            model.forward = lambda **kwargs: None
            model.model.norm.offset = 1.0
            modeling_llama.apply_rotary_pos_emb = None

    # `importlib.import_module` itself is not replaced, because Transformers imports its modules with it.
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
    """Installed peers may fail."""
    case = ModelCase("tiny-llama", 2, 128, budgets_mib=(1,))
    entry = MODEL.measure(case, torch.device("cuda"), Effort(2, 5.0))
    stock = entry.by_name("stock")
    for result in entry.results:
        if result.family != "peer":
            assert result.status == "ok", (result.contender, result.reason)
            assert result.peak_bytes is not None
            assert result.reserved_bytes is not None
            assert result.peak_bytes <= 1.1 * result.reserved_bytes
            assert result.loss == pytest.approx(stock.loss, abs=1e-2)
