"""A check of `flce.patch_model` on a small model that is made from its configuration."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from flce.testing import tolerances
from flce.testing.models import VOCAB_SIZE, tiny_model
from flce.testing.problem import IGNORED
from flce.tools.check.figures import Measurement, Results, compared
from flce.tools.machine import exact_device

BATCH, TOKENS = 2, 32


@dataclass(frozen=True)
class ModelCheck:
    """The loss and the gradients of all parameters, patched, beside those of the same model as it was."""

    title: str
    architecture: str
    dtype: torch.dtype
    device: torch.device
    own_loss: bool
    """Whether the loss is made of the model's logits, in ``train()``, rather than of labels."""
    tied: bool = False
    """Whether the head is the embedding."""

    def measure(self) -> Measurement:
        from flce.huggingface import patch_model

        stock = _step(self._model(), self.own_loss)
        # The loss that a model makes of labels would round its logits to float32.
        truth = _step(self._model().to(exact_device(self.device), torch.float64), own_loss=True)
        # What is not fused is an error then.
        ours = _step(patch_model(self._model(), on_materialize="raise"), self.own_loss)
        return Measurement(compared(ours, stock, truth, tolerances.MODELS[self.dtype]))

    def _model(self) -> Any:
        """The same weights every time."""
        return copy.deepcopy(_weights(self.architecture, self.tied)).to(self.device, self.dtype)


@functools.lru_cache(maxsize=1)
def _weights(architecture: str, tied: bool) -> Any:
    return tiny_model(architecture, tie_word_embeddings=tied, initializer_range=0.1)


def _step(model: Any, own_loss: bool) -> Results:
    """One forward and backward pass; the gradients of all parameters as one vector, and that of the head."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (BATCH, TOKENS), generator=generator).to(model.device)
    labels = ids.clone()
    labels[:, : TOKENS // 4] = IGNORED
    model.train()
    if own_loss:
        logits = model(input_ids=ids).logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    head = model.get_output_embeddings().weight.grad
    others = [p.grad.flatten() for p in model.parameters() if p.grad is not head]
    return {"loss": loss.detach(), "head's gradient": head, "other gradients": torch.cat(others)}
