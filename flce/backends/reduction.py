"""What is made of all rows at once, in plain PyTorch, for every backend: `Backend.constants` and `Backend.reduce`."""

from __future__ import annotations

import torch
from torch import Tensor

from flce.backends.contract import RowOutputs, RowProblem
from flce.problem import accumulation_dtype


def make_constants(p: RowProblem) -> Tensor:
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


def reduce(p: RowProblem, rows: RowOutputs, constants: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    constants = make_constants(p) if constants is None else constants
    first, second = rows.losses
    loss = first.sum() * constants[0]
    if second is None:
        return loss, None, constants
    part = second.sum() * constants[1]
    return loss + part, part, constants
