"""Which models ``flce plan`` can plan, and what it says of those that it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("typer", reason="the command line")
pytest.importorskip("rich", reason="the command line")
pytest.importorskip("transformers", reason="models")

import transformers
from typer.testing import CliRunner

from flce.huggingface.estimate import language_model, rehearsal
from flce.huggingface.estimate.training_memory import StepError, Training, TrainingMemory, Variant
from flce.planning.device_kinds import resolve_device
from flce.tools.cli.app import app
from tests.huggingface.architectures import OVERRIDES, small_config

H200 = resolve_device(torch.device("cuda"), "H200", None)
# Transformers 4 asks which tokens an expert gets, and where images begin of a config that does not say so.
NEWER = pytest.mark.skipif(transformers.__version__ < "5", reason="Transformers 4 needs values there")
PATCHED = Variant(True, False)
TEXT_ALONE = "A step has text alone, without {}; all weights are counted."
BOTH = "The encoder and the decoder get a sequence of this length each."


def small(kind: str, **changes: Any) -> Any:
    """The config of an architecture, made small."""
    config = small_config(transformers.AutoConfig.for_model(kind), OVERRIDES.get(kind, {}))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def steps_of(config: Any) -> TrainingMemory:
    return TrainingMemory(config, Training(2), H200)


def planned(config: Any, folder: Path, *arguments: str, code: int = 0) -> Any:
    config.save_pretrained(folder)
    said = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, ["plan", "--model", str(folder), *arguments])
    assert said.exit_code == code, said.output
    return said


@pytest.mark.parametrize(
    "kind, name, remarks",
    [
        ("t5", "T5ForConditionalGeneration", [BOTH]),
        ("bart", "BartForConditionalGeneration", [BOTH]),
        ("gemma3", "Gemma3ForConditionalGeneration", [TEXT_ALONE.format("images")]),
        pytest.param(
            *("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", [TEXT_ALONE.format("images or videos")]), marks=NEWER
        ),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", [TEXT_ALONE.format("sound")]),
        ("bert", "BertLMHeadModel", []),
        ("distilbert", "DistilBertForMaskedLM", []),
        pytest.param("mixtral", "MixtralForCausalLM", [], marks=NEWER),
        ("mamba2", "Mamba2ForCausalLM", []),
    ],
)
def test_what_patch_model_fuses_is_planned(kind: str, name: str, remarks: list[str]) -> None:
    steps = steps_of(small(kind))
    assert type(steps.model).__name__ == name
    assert steps.remarks == remarks
    assert steps.step(16, PATCHED).fused


def test_the_class_that_a_config_names() -> None:
    for name in ("BartForCausalLM", "BartForConditionalGeneration", "BertForMaskedLM", "BertLMHeadModel"):
        kind = name[:4].lower()
        assert type(steps_of(small(kind, architectures=[name])).model).__name__ == name


def test_a_model_that_takes_no_tokens() -> None:
    with pytest.raises(ValueError, match="expects input_values instead of tokens"):
        steps_of(small("moonshine"))


def test_infinity_in_a_config(tmp_path: Path) -> None:
    """Transformers writes it as an object, which only its own reader understands."""
    small("mamba2").save_pretrained(tmp_path)
    config = language_model.load_config(str(tmp_path / "config.json"))
    assert config.time_step_limit[1] == float("inf")
    assert steps_of(config).step(16, PATCHED).fused


def test_a_model_in_the_cache(tmp_path: Path) -> None:
    """A hub id is looked for in the cache alone."""
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


# ------------------------------------------------------------------------------------------- what a model cannot do


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_search_ends_where_the_model_does(kind: str) -> None:
    """BERT's own code fails at more than 64 positions, and on a GPU the embedding of GPT-2 would."""
    steps = steps_of(small(kind))
    longest = steps.find_longest(PATCHED, 64 << 30, start=16)
    assert longest.tokens == steps.positions == 64
    assert longest.obstacle is not None
    assert f"{type(steps.model).__name__} cannot run a step of 2 x 65 tokens" in longest.obstacle
    with pytest.raises(StepError, match="cannot run a step of 2 x 1,024 tokens"):
        steps.step(1024, PATCHED)


def test_a_sequence_that_the_model_cannot_take(tmp_path: Path) -> None:
    """One sentence, and nothing on stdout; without ``--seq-len`` it gets what it can take."""
    said = planned(small("bert"), tmp_path / "bert", "--seq-len", "1024", code=2)
    assert "BertLMHeadModel cannot run a step of 1 x 1,024 tokens" in " ".join(said.stderr.replace("│", " ").split())
    assert (said.stdout, "Traceback" in said.stderr) == ("", False)
    said = planned(small("bert"), tmp_path / "bert", "--json")
    told = json.loads(said.stdout)
    assert told["training"]["sequence_length"] == told["model"]["positions"] == 64
    assert "row 64 is asked of" in told["steps"][0]["longest_obstacle"] or "64" in told["steps"][0]["longest_obstacle"]


def test_more_than_the_positions_of_a_model(tmp_path: Path) -> None:
    """A llama runs beyond them, and the table says that it was not made for that."""
    said = planned(small("llama", max_position_embeddings=64), tmp_path, "--seq-len", "16", "--gpu-memory", "1GiB")
    assert "The config names 64 positions: longer sequences fit" in said.stdout
    assert "LlamaForCausalLM, " in said.stdout
    said = planned(small("gpt2"), tmp_path, "--seq-len", "16", "--gpu-memory", "1GiB")
    assert "The config names" not in said.stdout
    assert "Why no sequence is longer: GPT2LMHeadModel cannot run" in said.stdout


def test_a_model_without_checkpointing(tmp_path: Path) -> None:
    said = planned(small("xlm"), tmp_path, "--seq-len", "16", "--json")
    told = json.loads(said.stdout)
    assert [step["checkpointing"] for step in told["steps"]] == [False, False]
    assert told["model"]["remarks"] == ["A XLMWithLMHeadModel has no gradient checkpointing."]
    said = planned(small("xlm"), tmp_path, "--checkpointing", code=2)
    assert "has no gradient checkpointing" in said.stderr


# --------------------------------------------------------------------------------------------------------- values


class AsksForValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


@pytest.fixture
def known_ids() -> tuple[rehearsal.StepMeter, Tensor]:
    """A meter, and tokens whose values it knows."""
    meter = rehearsal.StepMeter(H200)
    ids = torch.empty(2, 3, dtype=torch.int64, device="meta")
    meter.set_value(ids, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    meter.track_storage(ids)
    return meter, ids


def test_values_that_are_not_there(known_ids: tuple[rehearsal.StepMeter, Tensor]) -> None:
    """Integers that follow from the tokens have values; activations have none, and the error says so."""
    meter, ids = known_ids
    with meter:
        assert int((ids[:, 1:] + 1).sum()) == 20
        assert bool((torch.arange(3, device="meta") == ids.new_zeros(3)).any())
        with pytest.raises(rehearsal.ValuesNeededError, match="value of an activation"):
            AsksForValues()(torch.empty(3, device="meta"))
        with pytest.raises(rehearsal.ValuesNeededError, match="depends on values of activations"):
            torch.empty(3, device="meta").nonzero()


def test_values_that_are_there(known_ids: tuple[rehearsal.StepMeter, Tensor]) -> None:
    """Those that follow from the tokens and from constants, until something unknown is written over them."""
    meter, ids = known_ids
    with meter, rehearsal.CudaOperatorsMode():
        assert 4 in ids[:, [-1, 0]]
        mask = torch.ones(3, device="meta")
        assert bool(mask.all())
        assert torch.tensor(2.0).item() == 2  # of a CPU
        part = mask[1:]
        part.copy_(torch.empty(2, device="meta"))
        for stale in (mask, part):
            with pytest.raises(rehearsal.ValuesNeededError, match="value of an activation"):
                AsksForValues()(stale)
        table = torch.empty(6, 4, device="meta")
        with pytest.raises(IndexError, match="reads row 6 of an embedding with 6 rows"):
            nn.functional.embedding(ids, table)
