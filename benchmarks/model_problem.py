"""A whole model at one batch shape, and how it is built: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from benchmarks.cases import DTYPES, Case

# What makes a model of Transformers the one of that name.
FIELDS = "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size"


def configured(*values: Any, positions: int = 131072, **others: Any) -> dict[str, Any]:
    sizes = dict(zip(FIELDS.split(), values, strict=True))
    return sizes | others | {"tie_word_embeddings": True, "max_position_embeddings": positions}


LLAMA: dict[str, Any] = {"head_dim": 64, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
QWEN: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
ARCHITECTURES = {
    "Llama-3.2-1B": configured("llama", 2048, 16, 32, 8, 8192, 128256, **LLAMA),
    "Qwen3-0.6B": configured("qwen3", 1024, 28, 16, 8, 3072, 151936, **QWEN),
    "tiny-llama": configured("llama", 32, 2, 2, 1, 64, 2000, positions=128),
}


class Optimizer(str, Enum):
    """What ends a training step, after forward and backward. The gradients are dropped in any case."""

    none = "none"
    sgd = "sgd"
    adamw = "adamw"


@dataclass(frozen=True)
class ModelCase(Case):
    """One model at one batch shape."""

    model: str
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    optimizer: Optimizer = Optimizer.none
    budgets_mib: tuple[int, ...] = ()  # workspace budgets, each a contender of its own
    contenders: tuple[str, ...] | None = None  # only these; None: all
    warm_up_sequence: int | None = None  # tokens of a sequence while warming up, where whole ones take too long

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", Optimizer(self.optimizer))

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def title(self) -> str:
        parts = [f"{self.model}, {self.batch} x {self.sequence} tokens", self.dtype]
        return ", ".join(parts if self.optimizer is Optimizer.none else [*parts, self.optimizer.value])

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"config": ARCHITECTURES[self.model]}


def build(case: ModelCase, device: torch.device, seed: int = 0) -> nn.Module:
    """The model with random weights, made on the device, ready for training with gradient checkpointing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**ARCHITECTURES[case.model])
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[case.dtype], attn_implementation="sdpa")
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
    vocab = ARCHITECTURES[case.model]["vocab_size"]
    return torch.randint(vocab, (case.batch, case.sequence), device=device, generator=generator)
