"""A model that tensor, context and pipeline parallelism divide, for ``training_memory.py``: the GPU of the last stage.

Each GPU of the last stage runs a smaller model: the last layers, with a share of the heads, of the intermediate size
and of the classes. Its sequences are shorter. Collectives need no memory beyond their results.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flce.huggingface.estimate.language_model import make_model, shard_config

# Fields of a config that tensor parallelism divides.
_DIVIDED_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class Parallelism:
    """Numbers of GPUs that divide each layer, each sequence, and the layers."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def remarks(self) -> list[str]:
        found = []
        if self.tensor > 1:
            found.append("Hidden states between layers are not divided. Stock gathers the logits of all classes.")
        if self.pipeline > 1:
            found.append("The last stage has one micro-batch at a time, as in 1F1B; GPipe stores all of a step.")
        return found

    def local_length(self, length: int) -> int:
        """Return the number of tokens that one GPU has of a sequence."""
        return -(-length // self.context)

    def make_model(self, config: Any, dtype: torch.dtype) -> Any:
        """Return the model of one GPU of the last stage. Raise ValueError if a size is not divisible."""
        model, text = make_model(copy.deepcopy(config), dtype), config.get_text_config(decoder=True)
        if self.tensor > 1:
            divided = shard_config(config, self.tensor)
            self._divide_sizes(text, divided.get_text_config(decoder=True))
            full_model, model = model, make_model(divided, dtype)
            self._check_shapes(model, full_model)
        if self.pipeline > 1:
            self._keep_last_layers(model)
            model.set_input_embeddings(_ReceivedStates(text.hidden_size, dtype))
        return model

    def _divide_sizes(self, text: Any, divided: Any) -> None:
        for name in _DIVIDED_SIZES:
            size = getattr(text, name, None)
            if isinstance(size, int):
                if size % self.tensor:
                    raise ValueError(f"{name} of this model is {size}, which {self.tensor} GPUs cannot divide equally")
                setattr(divided, name, size // self.tensor)
        heads = getattr(text, "num_attention_heads", None)
        is_computed = isinstance(getattr(type(text), "head_dim", None), property)
        if heads is not None and not is_computed:  # otherwise models compute it from the number of heads
            divided.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads

    def _keep_last_layers(self, model: Any) -> None:
        """Keep the layers of the last stage: the layers that are left over if others have equal numbers."""
        text = model.config.get_text_config(decoder=True)
        count = getattr(text, "num_hidden_layers", 0)
        if count < self.pipeline:
            raise ValueError(f"this model has {count} layers, which {self.pipeline} stages cannot divide")
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
        if len(lists) != 1 or getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"flce plan finds no single list of {count} layers in a {model.config.model_type}")
        last = count - count // self.pipeline * (self.pipeline - 1)
        del lists[0][:-last]
        for name, value in list(vars(text).items()):
            if isinstance(value, (list, tuple)) and len(value) == count:  # a value for each layer
                setattr(text, name, value[-last:])
        text.num_hidden_layers = last

    def _check_shapes(self, model: Any, full_model: Any) -> None:
        """Raise ValueError if a parameter is neither complete nor divided in one dimension, or if most of the entries
        of all layers are not divided."""
        full = dict(full_model.named_parameters())
        embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m}
        entries = {True: 0, False: 0}
        message = f"flce plan cannot divide the layers of a {model.config.model_type}: their sizes do not follow from "
        for name, parameter in model.named_parameters():
            sizes = [size for size in zip(parameter.shape, full[name].shape, strict=True) if size[0] != size[1]]
            if len(sizes) > 1 or any(local != -(-size // self.tensor) for local, size in sizes):
                raise ValueError(f"{message}its config ({name})")
            if id(parameter) not in embeddings:
                entries[bool(sizes)] += full[name].numel()
        if entries[False] > entries[True]:
            raise ValueError(f"{message}the fields {', '.join(_DIVIDED_SIZES)}")

    @contextmanager
    def gathered_logits(self, model: Any, config: Any) -> Iterator[None]:
        """Return a context in which the head of ``model`` returns logits of all classes, as stock's head does."""
        head = model.get_output_embeddings() if self.tensor > 1 else None
        if head is None:
            yield
            return
        text, vocab_size = model.config.get_text_config(decoder=True), config.get_text_config(decoder=True).vocab_size
        classes = text.vocab_size
        owners = [owner for owner in (text, model) if hasattr(owner, "vocab_size")]

        def gather(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
            return torch.cat([logits] * self.tensor, -1)[..., :vocab_size]

        handle = head.register_forward_hook(gather)
        for owner in owners:
            owner.vocab_size = vocab_size
        try:
            yield
        finally:
            handle.remove()
            for owner in owners:
                owner.vocab_size = classes


class _ReceivedStates(nn.Module):
    """Stand-in for the embedding of a last stage: the hidden states that the stage before it has sent."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
