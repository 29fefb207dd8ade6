"""Whole models: what is measured of them, and how they are built. Random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from benchmarks.cases import DTYPES, Effort


@dataclass(frozen=True)
class Architecture:
    """A model type of Transformers, and the configuration that makes it the model of that name."""

    model_type: str
    config: dict[str, Any]


ARCHITECTURES = {
    "Llama-3.2-1B": Architecture(
        "llama",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Qwen3-0.6B": Architecture(
        "qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "tiny-llama": Architecture(
        "llama",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
            "vocab_size": 2000,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128,
        },
    ),
}


class Optimizer(str, Enum):
    """What ends a training step, after forward and backward. The gradients are dropped in any case."""

    none = "none"
    sgd = "sgd"
    adamw = "adamw"


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch shape."""

    model: str
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    optimizer: Optimizer = Optimizer.none
    budgets_mib: tuple[int, ...] = ()  # workspace budgets, each a contender of its own
    contenders: tuple[str, ...] | None = None  # only these; None: all
    warm_up_sequence: int | None = None  # tokens of a sequence while warming up, where whole ones take too long

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def title(self) -> str:
        parts = [f"{self.model}, {self.batch} x {self.sequence} tokens", self.dtype]
        return ", ".join(parts if self.optimizer is Optimizer.none else [*parts, self.optimizer.value])

    def to_dict(self) -> dict[str, Any]:
        config = {"model_type": self.architecture.model_type, **self.architecture.config}
        return asdict(self) | {"optimizer": self.optimizer.value, "config": config}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> ModelCase:
        known = {name: document[name] for name in (field.name for field in fields(cls))}
        names = known["contenders"]
        return cls(
            **known
            | {
                "optimizer": Optimizer(known["optimizer"]),
                "budgets_mib": tuple(known["budgets_mib"]),
                "contenders": None if names is None else tuple(names),
            }
        )


class ModelPreset(str, Enum):
    tiny = "tiny"  # seconds on a CPU; for the tests
    h200 = "h200"  # about five minutes of one large GPU
    h200_short = "h200-short"  # half a minute: one model, without the long sequences


def preset_models(preset: ModelPreset) -> list[ModelCase]:
    """The cases of a preset, those first that matter most."""
    if preset is ModelPreset.tiny:
        tiny = ModelCase("tiny-llama", 2, 64, dtype="float32", budgets_mib=(1,))
        return [tiny, replace(tiny, batch=1, sequence=128, warm_up_sequence=32)]
    models = ("Llama-3.2-1B", "Qwen3-0.6B")
    if preset is ModelPreset.h200_short:
        contenders = ("ours", "ours-budget", "liger-loss", "stock")
        return [ModelCase(models[0], 4, 8192, budgets_mib=(384,), contenders=contenders)]
    short = [ModelCase(model, 4, 8192, budgets_mib=(384, 1024)) for model in models]
    # A step takes some 20 s, nearly all of it attention: memory is what differs here.
    long = [
        ModelCase(
            model,
            1,
            131072,
            budgets_mib=(1280,),
            contenders=("ours", "ours-budget", "liger-loss", "liger-loss-float32", "stock"),
            warm_up_sequence=4096,
        )
        for model in models
    ]
    return short + long


def preset_model_effort(preset: ModelPreset) -> Effort:
    return {
        ModelPreset.tiny: Effort(rounds=2, seconds=1.0),
        # Four rounds of the short sequences, one of the long ones.
        ModelPreset.h200: Effort(rounds=4, seconds=6.0),
        ModelPreset.h200_short: Effort(rounds=3, seconds=4.0),
    }[preset]


def build(case: ModelCase, device: torch.device, seed: int = 0) -> nn.Module:
    """The model with random weights, made on the device, ready for training with gradient checkpointing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    architecture = case.architecture
    config = AutoConfig.for_model(architecture.model_type, **architecture.config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=case.torch_dtype, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made: nn.Module = model.train()
    return made


def make_optimizer(case: ModelCase, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """With a learning rate of 0: it works as always, and every contender finds the same weights."""
    if case.optimizer is Optimizer.none:
        return None
    kind = torch.optim.SGD if case.optimizer is Optimizer.sgd else torch.optim.AdamW
    return kind(parameters, lr=0.0)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """What exists between two steps: weights, buffers, and what the optimizer keeps."""
    tensors = [*model.parameters(), *model.buffers()]  # tied weights are given once
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_batch(case: ModelCase, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random tokens, which are their own labels: the model shifts them."""
    generator = torch.Generator(device).manual_seed(seed)
    vocab = case.architecture.config["vocab_size"]
    return torch.randint(vocab, (case.batch, case.sequence), device=device, generator=generator)
