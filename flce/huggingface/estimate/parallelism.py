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
        text = config.get_text_config(decoder=True)
        divided = shard_config(config, self.tensor) if self.tensor > 1 else copy.deepcopy(config)
        divided_text = divided.get_text_config(decoder=True)
        if self.tensor > 1:
            self._divide_sizes(text, divided_text)
        if self.pipeline > 1:
            self._keep_last_layers(divided_text)
        model = make_model(divided, dtype)
        if self.tensor > 1:
            self._check_shapes(model, make_model(config, dtype))
        if self.pipeline > 1:
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
        if heads is not None:  # otherwise models compute it from the number of heads
            divided.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads

    def _keep_last_layers(self, text: Any) -> None:
        """Keep the layers of the last stage: the layers that are left over if others have equal numbers."""
        layers = getattr(text, "num_hidden_layers", 0)
        if layers < self.pipeline:
            raise ValueError(f"this model has {layers} layers, which {self.pipeline} stages cannot divide")
        last = layers - layers // self.pipeline * (self.pipeline - 1)
        for name, value in list(vars(text).items()):
            if isinstance(value, (list, tuple)) and len(value) == layers:  # a value for each layer
                setattr(text, name, value[-last:])
        text.num_hidden_layers = last

    def _check_shapes(self, model: Any, full_model: Any) -> None:
        """Raise ValueError if a parameter is neither complete nor divided in one dimension."""
        full = dict(full_model.named_parameters())
        for name, parameter in model.named_parameters():
            sizes = [size for size in zip(parameter.shape, full[name].shape, strict=True) if size[0] != size[1]]
            if len(sizes) > 1 or any(local != -(-size // self.tensor) for local, size in sizes):
                raise ValueError(f"the sizes of a {model.config.model_type} do not follow from its config: {name}")

    @contextmanager
    def gathered_logits(self, model: Any, config: Any) -> Iterator[None]:
        """Return a context in which the head of ``model`` returns logits of all classes, as stock's head does."""
        head = model.get_output_embeddings() if self.tensor > 1 else None
        if head is None:
            yield
            return
        text = model.config.get_text_config(decoder=True)
        classes, text.vocab_size = text.vocab_size, config.get_text_config(decoder=True).vocab_size

        def gather(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
            return torch.cat([logits] * self.tensor, -1)[..., : text.vocab_size]

        handle = head.register_forward_hook(gather)
        try:
            yield
        finally:
            handle.remove()
            text.vocab_size = classes


class _ReceivedStates(nn.Module):
    """Stand-in for the embedding of a last stage: the hidden states that the stage before it has sent."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size, self.dtype = hidden_size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
