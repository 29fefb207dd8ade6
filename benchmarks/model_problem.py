"""A whole model at one batch shape, and how it is built: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from benchmarks.cases import DTYPES, Case


@dataclass(frozen=True)
class Architecture:
    """A model type of Transformers, and the configuration that makes it the model of that name."""

    model_type: str
    config: dict[str, Any]


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **others: Any) -> Any:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        **others,
    }


LLAMA = {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
QWEN = {"head_dim": 128, "rope_theta": 1000000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}
ARCHITECTURES = {
    "Llama-3.2-1B": Architecture("llama", sizes(2048, 16, 32, 8, 8192, 128256, **LLAMA)),
    "Qwen3-0.6B": Architecture("qwen3", sizes(1024, 28, 16, 8, 3072, 151936, **QWEN)),
    "tiny-llama": Architecture("llama", sizes(32, 2, 2, 1, 64, 2000, max_position_embeddings=128)),
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
        return super().to_dict() | {"config": config}


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
