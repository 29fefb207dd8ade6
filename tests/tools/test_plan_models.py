"""Tests of the models that ``flce plan`` supports, and of its errors for other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
pytest.importorskip("transformers", minversion="5", reason="models")

import transformers
from typer.testing import CliRunner

from flce.huggingface.estimate import language_model
from flce.huggingface.estimate.training_memory import StepError, Training, TrainingMemory, Variant
from flce.planning.plan import resolve_device
from flce.tools.cli import app
from tests.huggingface.architectures import OVERRIDES, small_config

H200 = resolve_device(torch.device("cuda"), "H200", None)
PATCHED = Variant(True, False)


def small(kind: str, **changes: Any) -> Any:
    """Return a small config of an architecture."""
    config = small_config(transformers.AutoConfig.for_model(kind), OVERRIDES.get(kind, {}))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def training_memory(config: Any) -> TrainingMemory:
    return TrainingMemory(config, Training(2), H200)


def planned(config: Any, folder: Path, *arguments: str, code: int = 0) -> Any:
    config.save_pretrained(folder)
    output = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, ["plan", "--model", str(folder), *arguments])
    assert output.exit_code == code, output.output
    return output


@pytest.mark.parametrize(
    "kind, name",
    [
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
        ("bert", "BertLMHeadModel"),
        ("distilbert", "DistilBertForMaskedLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("mamba2", "Mamba2ForCausalLM"),
    ],
)
def test_models_that_patch_model_fuses(kind: str, name: str) -> None:
    steps = training_memory(small(kind))
    assert type(steps.model).__name__ == name
    assert steps.step(16, PATCHED).fused


def test_the_class_that_a_config_names() -> None:
    for name in ("BartForCausalLM", "BartForConditionalGeneration", "BertForMaskedLM", "BertLMHeadModel"):
        kind = name[:4].lower()
        assert type(training_memory(small(kind, architectures=[name])).model).__name__ == name


def test_a_model_without_tokens() -> None:
    with pytest.raises(ValueError, match="expects input_values instead of tokens"):
        training_memory(small("moonshine"))


def test_infinity_in_a_config(tmp_path: Path) -> None:
    """Load a config with infinity, which Transformers writes as an object that only its reader supports."""
    small("mamba2").save_pretrained(tmp_path)
    config = language_model.load_config(str(tmp_path / "config.json"))
    assert config.time_step_limit[1] == float("inf")
    assert training_memory(config).step(16, PATCHED).fused


def test_a_model_in_the_cache(tmp_path: Path) -> None:
    """Check that a hub id is found only in the cache."""
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "0"
    small("llama").save_pretrained(snapshot)
    refs = tmp_path / "models--some--llama" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.TRANSFORMERS_CACHE"):
            patch.setattr(name, str(tmp_path), raising=False)
        assert language_model.load_config("some/llama").model_type == "llama"
        with pytest.raises(ValueError, match="some/other does not exist, and the cache of Transformers has no config"):
            language_model.load_config("some/other")


# ------------------------------------------------------------------------------------------------ limits of models


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_search_ends_at_the_models_limit(kind: str) -> None:
    """Check models of 64 positions: BERT's code fails beyond them, and GPT-2's embedding would on a GPU."""
    steps = training_memory(small(kind))
    longest, obstacle = steps.find_longest(PATCHED, 64 << 30, start=16)
    assert longest == steps.positions == 64
    assert obstacle == f"a {type(steps.model).__name__} has 64 positions, and 65 do not fit"
    with pytest.raises(StepError, match="has 64 positions, and 1,024 do not fit"):
        steps.step(1024, PATCHED)


def test_a_sequence_that_is_too_long(tmp_path: Path) -> None:
    """Check the error, and that the default of ``--seq-len`` is a length that the model supports."""
    output = planned(small("bert"), tmp_path / "bert", "--seq-len", "1024", code=2)
    message = " ".join(output.stderr.replace("│", " ").split())
    assert "'--seq-len': a BertLMHeadModel has 64 positions, and 1,024 do not fit" in message
    assert (output.stdout, "Traceback" in output.stderr) == ("", False)
    output = planned(small("bert"), tmp_path / "bert", "--json")
    result = json.loads(output.stdout)
    assert result["training"]["sequence_length"] == result["model"]["positions"] == 64
    assert result["steps"][0]["longest_obstacle"] == "a BertLMHeadModel has 64 positions, and 65 do not fit"


def test_more_than_the_positions_of_a_model(tmp_path: Path) -> None:
    """Check the warning for a llama, which runs beyond its positions, and the obstacle of GPT-2."""
    output = planned(small("llama", max_position_embeddings=64), tmp_path, "--seq-len", "16", "--gpu-memory", "1GiB")
    assert "tokens, more than the 64 positions of the config" in output.stdout
    assert "LlamaForCausalLM, " in output.stdout
    output = planned(small("gpt2"), tmp_path, "--seq-len", "16", "--gpu-memory", "1GiB")
    assert "64 tokens, a GPT2LMHeadModel has 64 positions, and 65 do not fit" in output.stdout


def test_a_model_without_checkpointing(tmp_path: Path) -> None:
    output = planned(small("xlm"), tmp_path, "--seq-len", "16", "--json")
    result = json.loads(output.stdout)
    assert [step["checkpointing"] for step in result["steps"]] == [False, False]
    output = planned(small("xlm"), tmp_path, "--checkpointing", code=2)
    assert "has no gradient checkpointing" in output.stderr


# --------------------------------------------------------------------------------------------------------- values
