"""Tests of ``flce plan``, and of the memory of training steps that it computes."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
pytest.importorskip("transformers", minversion="5", reason="models")

import transformers
import typer
from typer.testing import CliRunner

import flce
from benchmarks.memory import profile_memory
from flce.core.options import ChunkOptions
from flce.huggingface.estimate import rehearsal
from flce.huggingface.estimate import training_memory as memory
from flce.huggingface.estimate.language_model import Lora, step_inputs
from flce.huggingface.estimate.training_memory import Sharding, StepError, StepMemory, Training, TrainingMemory, Variant
from flce.planning.plan import resolve_device
from flce.tools.cli import plan as command
from tests.hopper import clear_device_caches, fake_h100

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "decoder_attention_heads": 4,
    "dropout_rate": 0.0,  # of T5; a mask of dropout has other bytes on a CPU
}
STOCK, PATCHED = Variant(False, False), Variant(True, False)
H200 = resolve_device(torch.device("cuda"), "H200", None)
BFLOAT16 = functools.partial(Training, dtype=torch.bfloat16, optimizer="none")


def config(kind: str = "llama", **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})


def rehearsed(training: Training, kind: str = "llama", **changes: Any) -> TrainingMemory:
    return TrainingMemory(config(kind, **changes), training, H200)


# ------------------------------------------------------------------------------------------- against measured peaks


@pytest.mark.parametrize("model", ["Llama-3.2-1B", "Qwen3-0.6B"])
def test_peaks_measured_on_an_h200(model: str) -> None:
    """Compare with results of benchmarks/models.py, with gradient checkpointing: 4 x 8,192 and 1 x 131,072 tokens."""
    compared = 0
    for case in json.loads((RESULTS / "model-h200.json").read_text())["cases"]:
        settings, variants = case["case"], {"ours": Variant(True, True), "stock": Variant(False, True)}
        if settings["model"] != model:
            continue
        model_config = transformers.AutoConfig.for_model(**settings["config"])
        steps = TrainingMemory(model_config, BFLOAT16(settings["batch"]), H200)
        for result in case["results"]:
            if result["contender"] in variants and result["status"] == "ok":
                variant = variants[result["contender"]]
                step = steps.step(settings["sequence"], variant)
                assert step.peak_bytes == pytest.approx(result["peak_bytes"], rel=0.01), (settings["sequence"], variant)
                assert step.fused == variant.patched
                compared += 1
            elif result["contender"] == "stock":  # the measured step ran out of memory
                assert result["status"] == "oom"
                step = steps.step(settings["sequence"], variants["stock"])
                assert not step.fits(143155 << 20)
                compared += 1
    assert compared == 4


def test_stock_losses_measured_on_an_h200() -> None:
    compared = 0
    for case in json.loads((RESULTS / "h200.json").read_text())["cases"]:
        sizes = case["case"]
        for result in case["results"]:
            if result["contender"] == "stock" and sizes["dtype"] == "bfloat16":
                shape = sizes["tokens"], sizes["hidden"], sizes["vocab"]
                computed = memory.stock_loss_bytes(*shape, torch.bfloat16, True)
                assert computed == pytest.approx(result["workspace_bytes"], rel=0.01), sizes
                compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    "kind, dtype, mixed, checkpointing",
    [
        ("llama", torch.bfloat16, None, True),
        ("llama", torch.float32, torch.bfloat16, False),
        ("gemma2", torch.bfloat16, None, False),
        ("gemma2", torch.float32, torch.bfloat16, True),
        ("t5", torch.bfloat16, None, True),
    ],
)
def test_real_steps(kind: str, dtype: torch.dtype, mixed: torch.dtype | None, checkpointing: bool) -> None:
    """Compare a rehearsed step with a step on a CPU, whose kernels allocate the same results as those of a GPU."""
    # Attention by plain operators: fused kernels of attention differ between devices.
    model_config, length = config(kind, attn_implementation="eager"), 192
    training = Training(2, dtype, mixed, optimizer="none")
    steps = TrainingMemory(model_config, training, H200)
    torch.manual_seed(0)
    model = type(steps.model)._from_config(model_config, dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    inputs, values = step_inputs(steps.model, 2, length)
    inputs |= values

    def run_step() -> None:
        with torch.autocast("cpu", mixed, enabled=mixed is not None):
            loss = model(**inputs).loss
        loss.backward()

    input_tensors = {id(t): t for t in inputs.values() if isinstance(t, Tensor)}.values()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *input_tensors))
    real = held + profile_memory(run_step, device="cpu").peak
    step = steps.step(length, Variant(False, checkpointing))
    assert step.peak_bytes - memory.LIBRARY_BYTES == pytest.approx(real, rel=0.03)


# ------------------------------------------------------------------------------------------------------- the parts


def test_the_heads_gradient_is_allocated_with_the_loss() -> None:
    parts = rehearsed(BFLOAT16(64)).step(512, Variant(True, True)).parts
    assert parts["loss"] > 0
    assert parts["gradients"] >= 4000 * 64 * 2


def test_attention_without_probabilities() -> None:
    """Check that the memory of SDPA is linear in the length, and the memory of plain attention is not."""

    def growth(attention: str) -> float:
        steps = rehearsed(BFLOAT16(1), attn_implementation=attention)
        one, two, four = (steps.step(n, STOCK).peak_bytes for n in (1024, 2048, 4096))
        return (four - two) / (two - one)

    assert growth("sdpa") == pytest.approx(2, rel=0.02)
    assert growth("eager") > 3


def test_a_window_is_a_mask_in_memory() -> None:
    """Check that only sequences longer than a sliding window have a mask of tokens by tokens, as on a GPU."""
    sliding = rehearsed(BFLOAT16(1), "mistral", sliding_window=1024)
    full = rehearsed(BFLOAT16(1), "mistral", sliding_window=None)
    assert sliding.step(1000, STOCK).peak_bytes == full.step(1000, STOCK).peak_bytes
    assert sliding.step(2048, STOCK).peak_bytes > full.step(2048, STOCK).peak_bytes + 2048 * 2048


def test_optimizers() -> None:
    """Compare the state with real optimizers, and the copies in a step with PyTorch's AdamW."""
    steps = rehearsed(Training(1, torch.float32, optimizer="none"))
    parameters = [torch.nn.Parameter(torch.zeros_like(p, device="cpu")) for p in steps.model.parameters()]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    kinds = {
        "adamw": lambda: torch.optim.AdamW(parameters, foreach=False),
        "adamw-foreach": lambda: torch.optim.AdamW(parameters, foreach=True),
        "sgd": lambda: torch.optim.SGD(parameters, foreach=True),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
    }
    for name, create in kinds.items():
        optimizer: Any = create()
        optimizer.step()
        held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        expected = memory.OPTIMIZERS[name]
        assert sum(t.nbytes for t in held if t.dim()) == sum(map(expected.state_bytes, parameters)), name
        if name == "adamw-foreach":
            copies = expected.copies * sum(p.nbytes for p in parameters)
            assert profile_memory(optimizer.step, device="cpu").peak == pytest.approx(copies, rel=0.05)


def test_eight_bits() -> None:
    """Check the state of bitsandbytes: 2 bytes for each entry, 2 float32 for 256 entries; small tensors in float32."""
    state = memory.OPTIMIZERS["adamw-8bit"].state_bytes
    assert state(torch.empty(1 << 20, device="meta")) == (2 << 20) + 2 * 4 * (1 << 20) // 256
    assert state(torch.empty(5000, device="meta")) == 2 * 5000 + 2 * 4 * 20
    assert state(torch.empty(100, device="meta")) == 800


def test_memory_of_training_options() -> None:
    plain = rehearsed(BFLOAT16(1), tie_word_embeddings=False)
    weights = sum(p.nbytes for p in plain.model.parameters())
    head = 4000 * 64 * 2
    accumulated = rehearsed(BFLOAT16(1, accumulation=True), tie_word_embeddings=False).step(512, PATCHED)
    assert accumulated.parts["gradients"] >= weights
    adam = rehearsed(Training(1), tie_word_embeddings=False)
    more = adam.step(512, STOCK).peak_bytes - plain.step(512, STOCK).peak_bytes
    assert more == pytest.approx(2 * weights, rel=0.01)
    mixed = rehearsed(Training(1, torch.float32, torch.bfloat16, optimizer="none"), tie_word_embeddings=False)
    for variant in (STOCK, PATCHED):  # autocast copies the head and its input
        copies = mixed.step(512, variant).parts["loss"] - plain.step(512, variant).parts["loss"]
        assert copies == head + 512 * 64 * 2


def test_a_budget_of_the_loss() -> None:
    """Check that a budget bounds the number of tokens, because it includes vectors of one value for each token."""
    free = rehearsed(BFLOAT16(4), vocab_size=64000).step(2048, PATCHED)
    options = ChunkOptions(max_workspace_bytes=24 << 20)
    assert rehearsed(BFLOAT16(4, options=options), vocab_size=64000).step(2048, PATCHED).peak_bytes < free.peak_bytes
    steps = rehearsed(BFLOAT16(1, options=ChunkOptions(max_workspace_bytes=2 << 20)))
    longest, obstacle = steps.find_longest(PATCHED, 64 << 30, start=64)
    assert longest > 64
    assert obstacle is not None
    assert "too small" in obstacle
    with pytest.raises(StepError, match="too small"):
        steps.step(longest * 2, PATCHED)


def test_dropout_is_the_kernel_of_a_gpu() -> None:
    # The mask has one byte for each entry.
    x = torch.empty(1000, 100, dtype=torch.bfloat16, device="meta", requires_grad=True)
    meter = rehearsal.StepMeter(H200)
    meter.track_storage(x, "weights", is_permanent=True)
    with meter, rehearsal.CudaOperatorsMode():
        kept = torch.nn.functional.dropout(x, 0.1, training=True)
        again = torch.nn.functional.dropout(x, 0.1, training=False)
    assert kept.shape == x.shape
    assert again is x
    assert meter.current["activations"] == pytest.approx(3 * x.numel(), abs=2 * rehearsal.ALLOCATION_BYTES)


# -------------------------------------------------------------------------------------------- the longest sequence


@pytest.mark.parametrize("attention, start", [("sdpa", 16), ("eager", 5000)])
def test_the_longest_fits_and_more_does_not(attention: str, start: int) -> None:
    available = 512 << 20
    steps = rehearsed(BFLOAT16(2), attn_implementation=attention, max_position_embeddings=1 << 20)
    for variant in (STOCK, Variant(True, True)):
        longest, _ = steps.find_longest(variant, memory.CONTEXT_BYTES + available, start=start)
        assert steps.step(longest, variant).peak_bytes <= available
        assert steps.step(int(longest * 1.02), variant).peak_bytes > available * memory.CLOSE_ENOUGH


def test_nothing_fits() -> None:
    steps = rehearsed(BFLOAT16(1))
    assert steps.find_longest(STOCK, memory.CONTEXT_BYTES + memory.LIBRARY_BYTES) == (0, None)
    assert not StepMemory(100, {}, False).fits(memory.CONTEXT_BYTES + 99)
    assert StepMemory(100, {}, False).fits(memory.CONTEXT_BYTES + 100)


# ---------------------------------------------------------------------------------------------------- several GPUs


HEAD_BYTES = 4000 * 64 * 2  # of the full head in bfloat16, and of the full embedding


@pytest.fixture
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set DeepSpeed's defaults to 0. They are larger than these models."""
    for name in ("PERSISTENCE_THRESHOLD", "MAX_REUSE_DISTANCE", "PREFETCH_BUCKET_SIZE", "REDUCE_BUCKET_SIZE"):
        monkeypatch.setattr(memory, name, 0)


@pytest.mark.usefixtures("no_defaults")
@pytest.mark.parametrize("load_in_4bit", [False, True])
@pytest.mark.parametrize("kind", memory.SHARDING_KINDS)
def test_shares_with_adapters(kind: str, load_in_4bit: bool) -> None:
    """Only adapters have gradients and a state. Frozen weights are gathered in backward, too, and freed after it."""
    pytest.importorskip("peft", reason="it is in the extra `trainers`")
    lora: dict[str, Any] = {"lora": Lora(4, "all-linear"), "load_in_4bit": load_in_4bit}
    alone = rehearsed(Training(8, **lora), tie_word_embeddings=False)
    steps = rehearsed(Training(8, sharding=Sharding(kind, 4), **lora), tie_word_embeddings=False)
    for variant in (PATCHED, Variant(True, True)):
        step, full = steps.step(512, variant), alone.step(512, variant)
        absmax = sum(b.nbytes for name, b in steps.model.named_buffers() if "absmax" in name)
        assert step.parts["weights"] == pytest.approx((full.parts["weights"] - absmax) / 4 + absmax, rel=0.1)
        trained = sum(p.numel() for p in steps.model.parameters() if p.requires_grad)
        assert step.parts["optimizer"] == -(-(8 if kind == "fsdp" else 12) * trained // 4)
        assert step.fused
    if kind == "zero3":  # the running module and no other, except the head, which stays gathered
        assert step.parts["unsharded"] <= HEAD_BYTES + max(p.nbytes for p in steps.model.parameters())


@pytest.mark.usefixtures("no_defaults")
@pytest.mark.parametrize("variant", memory.VARIANTS, ids=str)
@pytest.mark.parametrize("kind", memory.SHARDING_KINDS)
def test_shares(kind: str, variant: Variant) -> None:
    """Check the parts that are constant, and the parts while the full head is gathered."""
    steps = rehearsed(Training(8, sharding=Sharding(kind, 4)), tie_word_embeddings=False)
    step = steps.step(512, variant)
    weights = sum(p.nbytes for p in steps.model.parameters())
    assert sum(step.parts.values()) == step.peak_bytes
    assert weights / 4 <= step.parts["weights"] < weights / 4 + 512 * 50  # weights and buffers are rounded to blocks
    trained = sum(p.numel() for p in steps.model.parameters())
    state_bytes = 4 if kind == "fsdp" else 12  # DeepSpeed: AdamW's state and a copy of the weights in float32
    assert step.parts["optimizer"] == -(-state_bytes * trained // 4)
    assert step.parts["unsharded"] >= HEAD_BYTES or step.parts["loss"] == 0
    assert step.fused == variant.patched
    assert all(p.grad is None for p in steps.model.parameters())


def test_defaults_of_deepspeed() -> None:
    """Check the bucket of gradients, and weights that stay gathered: at most all weights of a small model."""
    steps = rehearsed(Training(1, sharding=Sharding("zero3", 2)), tie_word_embeddings=False)
    step = steps.step(64, PATCHED)
    divided = sum(p.nbytes for p in steps.model.parameters() if p.numel() > memory.PERSISTENCE_THRESHOLD)
    assert divided == 2 * HEAD_BYTES
    assert step.parts["unsharded"] <= divided
    assert step.parts["temporary"] >= memory.LIBRARY_BYTES + 2 * memory.REDUCE_BUCKET_SIZE


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config().save_pretrained(tmp_path)
    return tmp_path


def run(*arguments: str | Path) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command.plan)
    return CliRunner(env={"COLUMNS": "140", "TERM": "dumb"}).invoke(app, [str(argument) for argument in arguments])


def test_a_model(folder: Path) -> None:
    output = run("--model", folder, "--seq-len", "512", "--batch-size", "2", "--gpu-memory", "1GiB")
    assert output.exit_code == 0, output.output
    for expected in (
        "H100, 1 GiB; this machine has no GPU: --device-kind names another",
        "checkpointing",
        "  weights",
        "The longest sequence that fits:\n  stock, with checkpointing: ",
    ):
        assert expected in output.stdout
    assert "strategy" not in output.stdout
    verbose = run("--model", folder, "--seq-len", "512", "--verbose", "--no-search").stdout
    assert "strategy 'tokens'" in verbose
    assert "longest" not in verbose


def test_json(folder: Path) -> None:
    arguments = ("--seq-len", "512", "--gpu-memory", "1GiB", "--json")
    output = run("--model", folder / "config.json", *arguments, "--checkpointing", "--device-kind", "sm_80")
    result = json.loads(output.stdout)
    assert result["device"] == {"kind": "sm_80", "memory_bytes": 1 << 30, "notes": []}
    assert [(step["patched"], step["checkpointing"]) for step in result["steps"]] == [(False, True), (True, True)]
    stock, ours = result["steps"]
    assert stock["peak_bytes"] > ours["peak_bytes"]
    assert 512 < stock["longest_sequence"] < ours["longest_sequence"]
    assert (stock["fused"], ours["fused"]) == (False, True)
    assert result["loss"]["stock_bytes"] > result["loss"]["flce_bytes"]
    assert result["model"] == {
        "type": "llama",
        "class": "LlamaForCausalLM",
        "parameters": sum(p.numel() for p in rehearsed(Training(1)).model.parameters()),
        "positions": 4096,
    }


def test_exit_status_where_nothing_fits(folder: Path) -> None:
    output = run("--model", folder, "--seq-len", "512", "--gpu-memory", "520MiB", "--json")
    assert output.exit_code == 1
    assert [step["longest_sequence"] for step in json.loads(output.stdout)["steps"]] == [0] * 4


@pytest.mark.usefixtures("no_search")
def test_what_fits_if_no_step_fits(tmp_path: Path) -> None:
    """Check steps in memory for five bytes a parameter: weights, gradients and the optimizer's state need eight."""
    pytest.importorskip("peft", reason="it is in the extra `cli`")
    model_config = config(hidden_size=512, vocab_size=32000)
    model_config.save_pretrained(tmp_path)
    parameters = TrainingMemory(model_config, Training(1), H200).num_parameters
    available = (memory.CONTEXT_BYTES + memory.LIBRARY_BYTES + 5 * parameters) >> 10
    arguments = "--model", tmp_path, "--seq-len", "64", "--gpu-memory", f"{available}KiB"
    output = run(*arguments)
    assert output.exit_code == 1
    found = json.loads(run(*arguments, "--no-search", "--json").stdout)["smaller_steps"]
    with_adapters = TrainingMemory(model_config, Training(1, lora=Lora(16)), H200).step(64, Variant(True, True))
    assert found["--lora 16"] == {"peak_bytes": with_adapters.peak_bytes, "fits": True}
    assert [*found] == ["--lora 16", "--lora 16 --load-in-4bit", "--gpus 8 --sharding fsdp"]
    needed = re.search(r"weights, gradients and optimizer alone need (\d+) MiB", output.stdout)
    assert needed is not None
    assert 7 * parameters <= int(needed[1]) << 20 <= 8 * parameters
    assert "with --lora 16, which fits" in output.stdout


def test_a_shape() -> None:
    output = run("--shape", "8192,4096,128256", "--device-kind", "H200", "--json")
    loss = json.loads(output.stdout)["loss"]
    assert loss["flce_bytes"] >> 20 == 1469  # the value in docs/performance.md
    assert loss["stock_bytes"] == pytest.approx(10958 << 20, rel=0.01)
    less = json.loads(run("--shape", "8192,4096,128256", "--budget", "64MiB", "--json").stdout)["loss"]
    assert less["flce_bytes"] <= 64 << 20


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the search of the longest sequence, which rehearses many steps."""
    monkeypatch.setattr(TrainingMemory, "find_longest", lambda *_, **__: (64, None))


def test_a_divided_head() -> None:
    """Check the loss of one process."""
    arguments = "--shape", "8192,4096,128256", "--device-kind", "H200", "--shards", "8"
    loss = json.loads(run(*arguments, "--json").stdout)["loss"]
    planned = flce.plan(8192, 4096, 128256, torch.bfloat16, device_kind="H200", shards=8)
    assert (loss["shards"], loss["flce_bytes"], loss["vocab_size"]) == (8, planned.workspace_bytes, 128256)
    assert loss["stock_bytes"] == memory.stock_loss_bytes(8192, 4096, 128256 // 8, torch.bfloat16, True)
    assert "the head divided over 8 processes" in " ".join(run(*arguments).stdout.split())


@pytest.mark.parametrize("number", range(4))
def test_steps_with_adapters_measured_on_an_h100(number: int) -> None:
    pytest.importorskip("peft", reason="it is in the extra `trainers`")
    measured = json.loads((RESULTS / "lora-h100.json").read_text())
    case = measured["cases"][number]
    model_config = transformers.AutoConfig.for_model(**measured["configs"][case["model"]])
    training = Training(case["batch"], lora=Lora(**case["lora"]), load_in_4bit=case["load_in_4bit"])
    steps = TrainingMemory(model_config, training, resolve_device(torch.device("cuda"), "H100", None))
    for result in case["steps"][1:3]:  # patched with checkpointing, stock without; the others take as long again
        step = steps.step(case["sequence"], Variant(result["patched"], result["checkpointing"]))
        assert step.peak_bytes == pytest.approx(result["peak_bytes"], rel=0.01), result
        assert step.fused == result["patched"]


@pytest.mark.usefixtures("no_search")
def test_adapters_of_a_command(folder: Path) -> None:
    pytest.importorskip("peft", reason="it is in the extra `trainers`")
    arguments = "--model", folder, "--lora", "4", "--lora-targets", "q_proj,lm_head", "--load-in-4bit"
    found = json.loads(run(*arguments, "--json").stdout)
    adapters = 2 * 4 * (64 + 64) + 4 * (64 + 4000)
    assert found["training"]["trained_parameters"] == adapters
    assert found["model"]["parameters"] == TrainingMemory(config(), Training(1), H200).num_parameters
    assert [step["fused"] for step in found["steps"]] == [False, True, False, True]
    assert "2 matrix products" in found["loss"]["plan"]  # the head is frozen
    shown = " ".join(run(*arguments).stdout.split())
    assert "in 4 bits and bfloat16, LoRA of rank 4 (17,280 parameters), adamw" in shown


@pytest.mark.parametrize(
    "model_config, left",
    [
        (transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=100), {"lm_head"}),
        (
            transformers.T5Config(d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=100),
            {"lm_head", "encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.2.DenseReluDense.wo"},
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layers_in_4_bits_are_those_of_transformers(model_config: Any, left: set[str]) -> None:
    training = Training(1, lora=Lora(4, "all-linear"), load_in_4bit=True)
    pytest.importorskip("peft", reason="it is in the extra `trainers`")
    steps = TrainingMemory(model_config, training, H200)
    layers = {name.removesuffix(".base_layer"): type(layer).__name__ for name, layer in steps.model.named_modules()}
    assert {name for name, kind in layers.items() if kind in ("Linear", "Conv1D") and ".lora_" not in name} == left
    assert sum(kind == "Linear4bit" for kind in layers.values()) == (4 if model_config.model_type == "gpt2" else 14)
    assert steps.step(32, Variant(True, False)).fused


@pytest.mark.parametrize("version", [None, "4.57.6"])
def test_without_transformers(version: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    output = run("--model", folder)
    assert output.exit_code == 2
    assert "needs Transformers 5: pip install -U transformers, or" in " ".join(output.stderr.split())
    assert run("--shape", "64,64,4000", "--json").exit_code == 0


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error, which is raised before the model is read."""
    monkeypatch.setitem(sys.modules, "peft", None)
    output = run("--model", "nowhere", "--lora", "16")
    assert output.exit_code == 2
    assert "'--lora': the adapters are PEFT's, which is not installed: pip install peft" in output.stderr


@pytest.mark.parametrize(
    "kind, about",
    [
        ("NVIDIA GeForce RTX 4090", "RTX-4090, 23.6 GiB\n"),
        ("V100", "V100, 15.8 GiB; planned for PyTorch's operators: the kernels are for compute capability 7.5"),
        ("T4", "T4, 14.6 GiB; without instructions for bfloat16: give --dtype float16, or"),
    ],
)
def test_kinds_of_gpus(kind: str, about: str) -> None:
    output = run("--shape", "64,64,4000", "--device-kind", kind).stdout
    assert output.startswith(about)
    assert "strategy" not in output


def test_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_h100(monkeypatch, 40 << 30)
    output = run("--shape", "64,64,4000").stdout
    monkeypatch.undo()
    clear_device_caches()
    assert output.startswith("H100, 40 GiB; this machine's GPU\n")


@pytest.mark.usefixtures("no_search")
def test_a_model_on_several_gpus(folder: Path) -> None:
    arguments = "--model", folder, "--seq-len", "64", "--gpu-memory", "2GiB"
    result = json.loads(run(*arguments, "--gpus", "4", "--sharding", "zero3", "--json").stdout)
    assert result["training"]["gpus"] == 4
    assert all(step["parts"]["unsharded"] > 0 for step in result["steps"])
    shown = run(*arguments, "--gpus", "4", "--sharding", "fsdp").stdout
    assert "on each of 4 GPUs, fsdp" in shown
    assert "unsharded" in shown
    assert "  unsharded" not in run(*arguments).stdout
