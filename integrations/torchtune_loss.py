"""Loss of hidden states for torchtune's recipes. torchtune_recipe.py trains with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import flce


class FlceLoss(nn.Module):
    """Cross-entropy of torchtune's models, without logits in memory.

    `loss: {_component_: torchtune_loss.FlceLoss}` in a recipe's configuration creates it. Call `set_model_output` once,
    after the model was created.

    Args:
        ignore_index: targets with this value contribute nothing.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def set_model_output(self, model: Any) -> None:
        """Let a `TransformerDecoder` return the hidden states before its head; `del model.unembed` undoes it.

        Raises:
            TypeError: the head is neither a plain `nn.Linear` without bias nor torchtune's `TiedLinear`.
        """
        tied = hasattr(model.output, "tied_module")  # a TiedLinear multiplies by the weight of the embedding
        head = model.output.tied_module if tied else model.output
        if not tied and (type(head) is not nn.Linear or head.bias is not None):
            raise TypeError(f"the model's output is {head}: expected a plain nn.Linear without bias, or TiedLinear")
        self.head = head
        model.unembed = model.norm.__call__

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of the targets that count. `hidden`: (..., H), `target`: (...)."""
        return flce.fused_linear_cross_entropy(hidden, self.head.weight, target, ignore_index=self.ignore_index)
