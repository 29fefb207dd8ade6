"""PEFT's LoRA adapters and weights in 4 bits for a model on the meta device. ``training_memory.py`` calls this module.

bitsandbytes is not needed: `Linear4bit` has the memory of its layer.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
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
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it warns of its kernels for a CPU
    peft = importlib.import_module("peft")
    names: str | list[str] | None = lora.targets
    kind = model.config.model_type
    if isinstance(names, str) and names != "all-linear":
        names = [name.strip() for name in names.split(",")]
        layers = [layer for layer, _ in model.named_modules()]
        for name in names:  # PEFT ignores a name without a layer if another name has one
            if not any(f".{layer}".endswith(f".{name}") for layer in layers if name):
                raise AdapterError(f"a {kind} has no layer {name!r}: give all-linear, or names such as q_proj,v_proj")
    try:
        peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules=names))
    except ValueError as error:
        if names is None:
            message = f"PEFT has no default layers for a {kind}: give all-linear, or names such as q_proj,v_proj"
            raise AdapterError(message) from None
        raise AdapterError(f"PEFT cannot add adapters to the layers {lora.targets!r} of a {kind}: {error}") from None
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        # PEFT's code of these adapters does not run on the meta device.
        message = f"a {kind} has experts, whose adapters cannot be planned: give names of layers, such as q_proj,v_proj"
        raise AdapterError(message)


def quantize_linear_layers(model: Any) -> None:
    """Replace linear layers by layers in 4 bits, as Transformers does with bitsandbytes.

    The head, the layers that the model names in `_keep_in_fp32_modules`, and subclasses of `nn.Linear` are left.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    left = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, layer in list(model.named_modules()):
        is_linear = type(layer) is nn.Linear or isinstance(layer, Conv1D)
        if is_linear and layer is not head and not any(f".{part}." in f".{name}." for part in left):
            model.set_submodule(name, Linear4bit(layer))


class Linear4bit(nn.Linear):
    """A frozen linear layer on the meta device with weights in 4 bits. Each product allocates the full weight."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        sizes = layer.weight.shape  # those of GPT-2's `Conv1D` are in the other order
        self.out_features, self.in_features = sizes if isinstance(layer, nn.Linear) else reversed(sizes)
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
