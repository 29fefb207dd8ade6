"""PEFT's LoRA adapters and weights in 4 bits for a model on the meta device. ``training_memory.py`` calls this module.

bitsandbytes is not needed: `Linear4bit` has the memory of its layer.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Entries that share a float32 scale: the default of bitsandbytes, without double quantization.
BLOCK_ENTRIES = 64


class AdapterError(RuntimeError):
    """PEFT is missing, or does not find the layers."""


@dataclass(frozen=True)
class Lora:
    """LoRA adapters. Only they are trained."""

    rank: int
    targets: str | None = None
    """"all-linear" (all linear layers except the head), names separated by commas, or None: PEFT's default."""


def add_adapters(model: Any, lora: Lora) -> None:
    """Add adapters to a model in place, and freeze all other weights. Raise AdapterError if PEFT cannot."""
    if importlib.util.find_spec("peft") is None:
        raise AdapterError("the adapters are PEFT's, which is not installed: pip install peft")
    peft = importlib.import_module("peft")
    names = lora.targets if lora.targets in (None, "all-linear") else str(lora.targets).split(",")
    try:
        peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules=names))
    except ValueError as error:
        kind = model.config.model_type
        if names is None:
            message = f"PEFT has no default layers for a {kind}: give all-linear, or names such as q_proj,v_proj"
            raise AdapterError(message) from None
        raise AdapterError(f"a {kind} has no layers {lora.targets!r} for adapters: {error}") from None


def quantize_linear_layers(model: Any) -> None:
    """Replace all linear layers except the head by layers in 4 bits, as Transformers does with bitsandbytes."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer is not head:
                setattr(module, name, Linear4bit(layer))


class Linear4bit(nn.Linear):
    """A frozen linear layer on the meta device with weights in 4 bits. Each product allocates the full weight."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        entries = layer.weight.numel()
        packed = torch.empty((entries + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-entries // BLOCK_ENTRIES), device="meta"), persistent=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Product4bit.apply(input, self.weight, (self.out_features, self.in_features))
        return out if self.bias is None else out + self.bias


class _Product4bit(torch.autograd.Function):
    """``x @ weight.T``. Forward and backward each allocate the weight in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(x, packed.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ packed.new_empty(ctx.shape, dtype=grad.dtype), None, None
