"""A check of `flce.patch_model` on a small model that is made from its configuration."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from flce.testing import tolerances
from flce.testing.models import VOCAB_SIZE, tiny_model
from flce.testing.problem import IGNORED
from flce.tools.check.figures import Measurement, Results, compared
from flce.tools.machine import has_float64

BATCH, TOKENS = 2, 32


@dataclass(frozen=True)
class Model:
    """An architecture, and where it runs."""

    architecture: str
    dtype: torch.dtype
    device: torch.device
    own_loss: bool
    """Whether the loss is made of the model's logits, in ``train()``, rather than of labels."""
    tied: bool = False
    """Whether the head is the embedding."""


@dataclass(frozen=True)
class ModelCheck:
    """The loss and the gradients of all parameters, patched, beside those of the same model as it was."""

    title: str
    model: Model

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def measure(self) -> Measurement:
        from flce.huggingface import patch_model

        exact_device = self.model.device if has_float64(self.model.device) else torch.device("cpu")
        stock = _step(_build(self.model), self.model)
        # The loss that a model makes of labels would round its logits to float32.
        truth = _step(_build(self.model).to(exact_device, torch.float64), replace(self.model, own_loss=True))
        # What is not fused is an error then.
        ours = _step(patch_model(_build(self.model), on_materialize="raise"), self.model)
        return Measurement(compared(ours, stock, truth, tolerances.MODELS[self.dtype]))


@functools.lru_cache(maxsize=1)
def _weights(architecture: str, tied: bool) -> Any:
    return tiny_model(architecture, tie_word_embeddings=tied, initializer_range=0.1)


def _build(m: Model) -> Any:
    """The same weights every time."""
    return copy.deepcopy(_weights(m.architecture, m.tied)).to(m.device, m.dtype)


def _step(model: Any, m: Model) -> Results:
    """One forward and backward pass; the gradients of all parameters as one vector, and that of the head."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (BATCH, TOKENS), generator=generator).to(model.device)
    labels = ids.clone()
    labels[:, : TOKENS // 4] = IGNORED
    model.train()
    if m.own_loss:
        logits = model(input_ids=ids).logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    head = model.get_output_embeddings().weight.grad
    others = [p.grad.flatten() for p in model.parameters() if p.grad is not head]
    return {"loss": loss.detach(), "head's gradient": head, "other gradients": torch.cat(others)}
