"""Loss of hidden states for torchtitan (0.3), without logits in memory.

In a configuration: `loss=torchtitan_loss.FlceLoss.Config()` instead of `ChunkedLossWrapper.Config(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper

import flce


class FlceLoss(ChunkedLossWrapper):
    """Cross-entropy of the hidden states that torchtitan's trainer passes to a `ChunkedLossWrapper`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """`num_chunks` and `loss_fn` are not used."""

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, which is differentiable, and no metrics. `pred`: (B, S, H) hidden states."""
        if loss_inputs:
            raise TypeError(f"FlceLoss takes hidden states, labels and global_valid_tokens, got {[*loss_inputs]} too")
        head: Any = self.lm_head
        if isinstance(head, FSDPModule):
            head.unshard()  # FSDP reduces the gradient and frees the weight at the end of backward
        loss = flce.fused_linear_cross_entropy(
            pred, head.weight, labels, reduction="sum", num_items=global_valid_tokens
        )
        if isinstance(head, FSDPModule) and not loss.requires_grad:
            head.reshard()
        return loss, {}
