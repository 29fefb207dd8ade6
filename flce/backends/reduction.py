"""Loss scales and the reduction over all rows in plain PyTorch: `loss_scales` and `reduce` of the PyTorch backend."""

from __future__ import annotations

import torch
from torch import Tensor

from flce.backends.contract import RowOutputs, RowProblem
from flce.core.problem import accumulation_dtype


def loss_scales(p: RowProblem) -> Tensor:
    accum, target = accumulation_dtype(p.dtype), p.target
    if p.class_weight is None:
        weight_sum = torch.full((), p.vocab_size, dtype=accum, device=p.device)
    else:
        weight_sum = p.class_weight.sum(dtype=accum)
    if p.spec.reduction == "mean":
        valid = target != p.spec.ignore_index
        ce_scale = z_scale = valid.sum().to(accum).reciprocal()
        if p.class_weight is not None:
            weights = p.class_weight[target.clamp(0, p.vocab_size - 1)].to(accum)
            ce_scale = torch.where(valid, weights, 0.0).sum().reciprocal()
    elif p.num_items is None:
        ce_scale = z_scale = torch.ones_like(weight_sum)
    else:
        ce_scale = z_scale = p.num_items.to(accum).reciprocal()
    return torch.stack((ce_scale, z_scale, weight_sum))


def reduce(p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    scales = loss_scales(p) if scales is None else scales
    cross_entropy, z_loss = out.losses
    loss = cross_entropy.sum() * scales[0]
    if z_loss is None:
        return loss, None, scales
    total_z_loss = z_loss.sum() * scales[1]
    return loss + total_z_loss, total_z_loss, scales
