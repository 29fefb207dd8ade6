"""Losses of other libraries, called as their documentation or their own trainer calls them.

Each takes (input, weight, target, reduction) as `contenders.LossFunction` says, and imports its library inside.
"""

from __future__ import annotations

import importlib

import torch

from benchmarks.problem import IGNORE_INDEX

TRL_CHUNK = 32768  # classes; what TRL's trainers pass
QUACK_CHUNK = 4096  # tokens; the default of its function


def trl_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    """The head of TRL's trainers, without the statistics that they log."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    valid = y != IGNORE_INDEX
    temperature, softcap, logit_scale, outputs = 1.0, None, 1.0, ()
    logprob, *_ = function.apply(x, w, None, y.clamp(min=0), temperature, TRL_CHUNK, softcap, logit_scale, outputs)
    losses: torch.Tensor = -logprob.masked_fill(~valid, 0.0)
    return losses if reduction == "none" else losses.sum() / valid.sum()


def fla_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    """Eight chunks and float32 sums, its defaults."""
    module = importlib.import_module("fla.modules.fused_linear_cross_entropy")
    loss: torch.Tensor = module.fused_linear_cross_entropy_loss(x, y, w, reduction=reduction)
    return loss


def quack_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    module = importlib.import_module("quack.linear_cross_entropy")
    loss: torch.Tensor = module.chunked_linear_cross_entropy(x, w, y, chunk_size=QUACK_CHUNK, reduction=reduction)
    return loss
