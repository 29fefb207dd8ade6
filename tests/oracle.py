"""What ``flce.fused_linear_cross_entropy`` has to return, computed the plain way in float64.

Nothing here is shared with the package: the logits are materialised, every formula is the one of the
documentation, and the gradients come from PyTorch's own autograd. The oracle is itself compared with
``torch.nn.functional.cross_entropy`` in ``test_operator_grid.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OracleResult:
    """The loss, the statistics and the gradients, all float64 (``argmax`` int64, ``correct`` bool)."""

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    logprob: Tensor
    entropy: Tensor
    argmax: Tensor
    correct: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None
    grad_adapters: list[tuple[Tensor, Tensor]]
    logits: Tensor


def shifted_target(target: Tensor, ignore_index: int, shift: int) -> tuple[Tensor, Tensor]:
    """The target that each position predicts and whether the position counts at all."""
    if shift == 0:
        return target, target != ignore_index
    moved = torch.zeros_like(target)
    valid = torch.zeros_like(target, dtype=torch.bool)
    length = target.shape[-1]
    if shift < length:
        moved[..., : length - shift] = target[..., shift:]
        valid[..., : length - shift] = target[..., shift:] != ignore_index
    return moved, valid


def dense_logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    *,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """``z`` for every position and class."""
    z = input @ linear_weight.transpose(0, 1)
    for a, b in adapters:
        z = z + a @ b.transpose(0, 1)
    if linear_bias is not None:
        z = z + linear_bias
    z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def oracle(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: int | Tensor | None = None,
    shift: int = 0,
    grad_output: Tensor | float | None = None,
) -> OracleResult:
    """Loss, statistics and gradients for the upstream gradient ``grad_output`` (ones if not given)."""
    x = input.detach().double().clone().requires_grad_()
    w = linear_weight.detach().double().clone().requires_grad_()
    b = None if linear_bias is None else linear_bias.detach().double().clone().requires_grad_()
    pairs = [tuple(t.detach().double().clone().requires_grad_() for t in pair) for pair in adapters]
    num_classes, hidden = w.shape
    shape = target.shape
    with torch.enable_grad():
        z = dense_logits(
            x.reshape(-1, hidden),
            w,
            b,
            adapters=[(a.reshape(-1, a.shape[-1]), up) for a, up in pairs],
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
        )
        moved, is_valid = shifted_target(target.detach().long(), ignore_index, shift)
        y, valid = moved.reshape(-1), is_valid.reshape(-1)
        rows = valid.nonzero().flatten()
        z_valid, y_valid = z[rows], y[rows]
        lse = torch.logsumexp(z_valid, dim=1)
        z_target = z_valid.gather(1, y_valid[:, None])[:, 0]

        class_weight = z.new_ones(num_classes) if weight is None else weight.detach().double()
        ce = (1.0 - label_smoothing) * class_weight[y_valid] * (lse - z_target)
        if label_smoothing != 0.0:
            every_class = (class_weight * (lse[:, None] - z_valid)).sum(dim=1)
            ce = ce + label_smoothing / num_classes * every_class
        zl = z_loss * lse.square()
        if token_weight is not None:
            per_token = token_weight.detach().double().reshape(-1)[rows]
            ce, zl = per_token * ce, per_token * zl

        if reduction == "none":
            everywhere = torch.zeros(y.shape, dtype=torch.float64, device=z.device)
            loss = everywhere.index_put((rows,), ce + zl).reshape(shape)
            z_part = everywhere.index_put((rows,), zl.detach()).reshape(shape)
        elif reduction == "sum":
            divisor = 1.0 if num_items is None else float(num_items)
            loss = (ce + zl).sum() / divisor
            z_part = zl.detach().sum() / divisor
        elif reduction == "mean":
            loss = ce.sum() / class_weight[y_valid].sum() + zl.sum() / rows.numel()
            z_part = zl.detach().sum() / rows.numel()
        else:
            raise ValueError(reduction)

        leaves = [x, w, *(t for pair in pairs for t in pair), *([] if b is None else [b])]
        if grad_output is None:
            upstream = torch.ones_like(loss)
        else:
            upstream = torch.as_tensor(grad_output, device=z.device).detach().double().expand_as(loss)
        grads = torch.autograd.grad(loss, leaves, upstream)

    with torch.no_grad():
        p = torch.softmax(z_valid, dim=1)
        plogit = torch.where(p > 0, p * z_valid, torch.zeros_like(p))
        highest = z_valid.argmax(dim=1) if rows.numel() else y_valid
        # The lowest index among equals, whatever torch.argmax does.
        if rows.numel():
            is_top = z_valid == z_valid.max(dim=1, keepdim=True).values
            order = torch.arange(num_classes, device=z.device).expand_as(is_top)
            highest = torch.where(is_top, order, num_classes).min(dim=1).values

        def scatter(values: Tensor, fill: Any) -> Tensor:
            out = torch.full(y.shape, fill, dtype=values.dtype, device=values.device)
            out[rows] = values
            return out.reshape(shape)

        return OracleResult(
            loss=loss.detach(),
            z_loss=z_part,
            lse=scatter(lse.detach(), 0.0),
            logprob=scatter((z_target - lse).detach(), 0.0),
            entropy=scatter((lse - plogit.sum(dim=1)).detach(), 0.0),
            argmax=scatter(highest, -1),
            correct=scatter(highest == y_valid, False),
            grad_input=grads[0],
            grad_weight=grads[1],
            grad_bias=grads[-1] if b is not None else None,
            grad_adapters=[(grads[2 + 2 * k], grads[3 + 2 * k]) for k in range(len(pairs))],
            logits=z.detach(),
        )
