"""What both losses, the fused one and the one of logits that exist, do with vectors of one value per row."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.backends.contract import RowOutputs, RowProblem
from flce.problem import accumulation_dtype

# The largest entry that the gradient of float16 logits should have. float16 reaches from 6e-8 to 65504; the head
# room of 2^6 is for z-losses of a log-sum-exp beyond TYPICAL_LSE.
FLOAT16_GRAD_PEAK = 2.0**10
TYPICAL_LSE = 32.0


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
    """As of `Backend.constants`."""
    return get_backend(p.device).constants(p)


def statistics_constants(p: RowProblem) -> Tensor | None:
    """What statistics need of them: nothing for unweighted classes. Then `reduce` makes them, in the same kernel."""
    return None if p.class_weight is None else constants(p)


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


def reduce(p: RowProblem, rows: RowOutputs, constants: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss (z-loss included), z-loss, and the constants where there are some."""
    if p.spec.reduction == "none":
        return (rows.loss if rows.z_loss is None else rows.loss + rows.z_loss), rows.z_loss, constants
    return get_backend(p.device).reduce(p, rows, constants)


def looks_at_values(device: torch.device) -> bool:
    """Whether the host looks at values: where that is free (CPU), or was asked for (FLCE_DEBUG=1)."""
    if device.type == "meta":
        return False  # it has none
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
