"""Loss of hidden states for NeMo Automodel (0.7), without logits in memory.

In a recipe's YAML: `loss_fn: {_target_: automodel_loss.FlceLinearCrossEntropy}`.
"""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from torch import Tensor

import flce


class FlceLinearCrossEntropy(LinearCrossEntropy):
    """Cross-entropy of hidden states and the weight of the head, with the arguments of Automodel's fused loss.

    Args:
        ignore_index: labels with this value contribute nothing.
        logit_softcapping: bound of the logits; 0: none.
    """

    def __init__(self, ignore_index: int = -100, logit_softcapping: float = 0.0) -> None:
        super().__init__()
        self.ignore_index, self.logit_softcapping = ignore_index, logit_softcapping

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the losses, divided by `num_label_tokens`. With 0 tokens the loss is 0."""
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        loss: Tensor = flce.fused_linear_cross_entropy(
            hidden_states.to(weight.dtype),  # a head in float32: `lm_head_precision`
            weight,
            labels,
            ignore_index=self.ignore_index,
            softcap=self.logit_softcapping or None,
            token_weight=loss_weights,
            reduction="sum",
            num_items=num_label_tokens,
            empty_loss="zero",
        )
        return loss
