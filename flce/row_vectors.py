"""What both losses, the fused one and the one of logits that exist, do with vectors of one value per row."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from flce.backends.contract import RowOutputs
from flce.problem import LossSpec, accumulation_dtype

# The largest entry that the gradient of float16 logits should have. float16 reaches from 6e-8 to 65504; the head
# room of 2^6 is for z-losses of a log-sum-exp beyond TYPICAL_LSE.
FLOAT16_GRAD_PEAK = 2.0**10
TYPICAL_LSE = 32.0


class RowProblem(Protocol):
    """What is known of N rows of logits, wherever these come from. N may be several dimensions here."""

    @property
    def target(self) -> Tensor: ...  # (N,) int64
    @property
    def class_weight(self) -> Tensor | None: ...  # (V,)
    @property
    def token_weight(self) -> Tensor | None: ...  # (N,)
    @property
    def num_items(self) -> Tensor | None: ...  # ()
    @property
    def spec(self) -> LossSpec: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...  # of the logits
    @property
    def device(self) -> torch.device: ...


def allocate(p: RowProblem, num_rows: int) -> RowOutputs:
    """Memory for what the backend makes of `num_rows` rows."""
    accum = accumulation_dtype(p.dtype)
    stats = p.spec.stats

    def new(*shape: int, dtype: torch.dtype = accum) -> Tensor:
        return torch.empty(*shape, num_rows, dtype=dtype, device=p.device)

    return RowOutputs(
        new(),
        new() if p.spec.z_loss else None,
        new(2),
        new() if "logprob" in stats else None,
        new() if "entropy" in stats else None,
        new(dtype=torch.int64) if "argmax" in stats or "correct" in stats else None,
    )


def constants(p: RowProblem) -> Tensor:
    """(3,): what the sums of cross entropies and of z-losses are multiplied by; sum of the class weights.

    Stays on the device: nothing here may wait for it.
    """
    accum = accumulation_dtype(p.dtype)
    one = torch.ones((), dtype=accum, device=p.device)
    weight_sum = one * p.vocab_size if p.class_weight is None else p.class_weight.sum(dtype=accum)
    if p.spec.reduction == "mean":
        valid = p.target != p.spec.ignore_index
        z_scale = valid.sum().to(accum).reciprocal()
        ce_scale = z_scale
        if p.class_weight is not None:
            weights = p.class_weight[p.target.clamp(0, p.vocab_size - 1)].to(accum)
            ce_scale = torch.where(valid, weights, 0.0).sum().reciprocal()
    else:
        ce_scale = z_scale = one if p.num_items is None else p.num_items.to(accum).reciprocal()
    return torch.stack((ce_scale, z_scale, weight_sum))


def scaled(constants: Tensor, factor: Tensor | None) -> Tensor:
    """`constants` for a loss that is multiplied by `factor`; None: 1."""
    if factor is None:
        return constants
    return torch.cat((constants[:2] * factor, constants[2:]))


def grad_unit(p: RowProblem, constants: Tensor) -> Tensor:
    """The power of two that brings the largest gradient of float16 logits near FLOAT16_GRAD_PEAK.

    ``1 / N`` or a small weight would push float16 gradients into its subnormal range; the backward pass
    divides this unit out in float32, together with the upstream gradient.
    """
    z_loss = 2.0 * p.spec.z_loss * TYPICAL_LSE
    peak = constants[0] * (abs(p.spec.logit_scale) / p.spec.temperature * (1.0 + z_loss))
    if p.class_weight is not None:
        peak = peak * p.class_weight.abs().max()
    if p.token_weight is not None and p.token_weight.numel():
        peak = peak * p.token_weight.masked_fill(p.target == p.spec.ignore_index, 0.0).abs().max()
    exponent = torch.log2(FLOAT16_GRAD_PEAK / peak).floor()
    # No valid row, or only weights of 0: peak is inf, nan or 0, and any unit will do.
    return torch.exp2(exponent.nan_to_num(0.0, 0.0, 0.0).clamp(-60.0, 60.0))


def reduce(p: RowProblem, rows: RowOutputs, constants: Tensor) -> tuple[Tensor, Tensor | None]:
    """Loss (z-loss included) and z-loss."""
    if p.spec.reduction == "none":
        return (rows.loss if rows.z_loss is None else rows.loss + rows.z_loss), rows.z_loss
    loss = rows.loss.sum() * constants[0]
    if rows.z_loss is None:
        return loss, None
    z_loss = rows.z_loss.sum() * constants[1]
    return loss + z_loss, z_loss


def looks_at_values(device: torch.device) -> bool:
    """Whether the host looks at values: where that is free (CPU), or was asked for (FLCE_DEBUG=1)."""
    return device.type == "cpu" or os.environ.get("FLCE_DEBUG", "0") not in ("", "0")


def check_targets(p: RowProblem) -> None:
    """IndexError for a target out of range, where the host looks at values."""
    if not looks_at_values(p.target.device):
        return
    vocab_size = p.vocab_size
    target = p.target.reshape(-1)
    wrong = ((target < 0) | (target >= vocab_size)) & (target != p.spec.ignore_index)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0, 0])
        raise IndexError(
            f"target {int(target[position])} at position {position} (of the flattened, shifted target) is out "
            f"of range: expected 0 <= target < {vocab_size}, or ignore_index={p.spec.ignore_index}"
        )
