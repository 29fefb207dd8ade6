"""The float64 oracle: expected losses, gradients and results of tokens, for `flce check`, benchmarks and tests.

The oracle shares no code with the rest of the package: it computes all logits and the formulas of the documentation.
PyTorch's autograd computes the gradients. ``tests/testing/test_oracle.py`` compares the oracle with
``torch.nn.functional.cross_entropy`` and with values computed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The most logits that are computed at once: several tensors of half a GiB.
MAX_LOGITS = 1 << 26


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
    """Empty if there is no weight."""
    grad_bias: Tensor | None
    grad_adapters: list[tuple[Tensor, Tensor]]
    grad_token_weight: Tensor | None


def shifted_target(target: Tensor, ignore_index: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return the target that each position predicts, and True for each position that counts."""
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
    linear_weight: Tensor | None,
    linear_bias: Tensor | None = None,
    *,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Return the logits of every position and class. Without a weight ``input`` has the logits before scale and cap."""
    z = input if linear_weight is None else input @ linear_weight.transpose(0, 1)
    for a, b in adapters:
        z = z + a @ b.transpose(0, 1)
    if linear_bias is not None:
        z = z + linear_bias
    z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def token_results(z: Tensor, target: Tensor, candidates: Tensor, ignore_index: int = -100) -> dict[str, Tensor]:
    """Return the differentiable results of `flce.linear_logprobs` for logits (N, V), in the dtype of the logits.
    ``candidates`` are (N, K) classes, -1 for none."""
    valid = target != ignore_index
    logprob = z.log_softmax(-1)
    return {
        "logprob": logprob.gather(1, target.where(valid, 0)[:, None])[:, 0] * valid,
        "entropy": -(logprob.exp() * logprob).sum(-1) * valid,
        "lse": z.logsumexp(-1) * valid,
        "candidate_logprob": logprob.gather(1, candidates.clamp(min=0)) * (candidates >= 0) * valid[:, None],
    }


def oracle(
    input: Tensor,
    linear_weight: Tensor | None,
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
    empty_loss: str = "nan",
    grad_output: Tensor | float | None = None,
) -> OracleResult:
    """Return the loss, the statistics and the gradients for the upstream gradient ``grad_output`` (default: ones)."""
    w, b = (None if t is None else _leaf(t) for t in (linear_weight, linear_bias))
    ups = [_leaf(up) for _, up in adapters]
    num_classes = input.shape[-1] if w is None else w.shape[0]
    moved, is_valid = shifted_target(target.detach().long(), ignore_index, shift)
    y, valid = moved.reshape(-1), is_valid.reshape(-1)
    per_class = input.new_ones(num_classes, dtype=torch.float64) if weight is None else weight.detach().double()
    per_token = None if token_weight is None else _leaf(token_weight.reshape(-1))

    # The divisors of the cross-entropy and of the z-loss.
    one = input.new_ones((), dtype=torch.float64)
    if reduction == "mean":
        divisor, z_divisor = per_class[y[valid]].sum(), valid.sum().double()
    elif reduction in ("sum", "none"):
        divisor = z_divisor = one if num_items is None else one * float(num_items)
    else:
        raise ValueError(reduction)
    if empty_loss == "zero":
        divisor, z_divisor = (d.masked_fill(d == 0.0, torch.inf) for d in (divisor, z_divisor))
    upstream = one if grad_output is None else torch.as_tensor(grad_output, device=input.device).detach().double()
    upstream = upstream.expand(target.shape).reshape(-1)

    parts: list[dict[str, Tensor]] = []
    for tokens in torch.arange(len(y), device=y.device).split(max(1, MAX_LOGITS // max(1, num_classes))):
        x = _leaf(input.reshape(-1, input.shape[-1])[tokens])
        sides = [_leaf(a.reshape(-1, a.shape[-1])[tokens]) for a, _ in adapters]
        with torch.enable_grad():
            pairs = list(zip(sides, ups, strict=True))
            cap = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
            z = dense_logits(x, w, b, adapters=pairs, **cap)  # type: ignore[arg-type]
            rows = valid[tokens].nonzero().flatten()
            z_valid, y_valid = z[rows], y[tokens][rows]
            lse = torch.logsumexp(z_valid, dim=1)
            z_target = z_valid.gather(1, y_valid[:, None])[:, 0]
            ce = (1.0 - label_smoothing) * per_class[y_valid] * (lse - z_target)
            if label_smoothing != 0.0:
                every_class = (per_class * (lse[:, None] - z_valid)).sum(dim=1)
                ce = ce + label_smoothing / num_classes * every_class
            zl = z_loss * lse.square()
            if per_token is not None:
                ce, zl = per_token[tokens][rows] * ce, per_token[tokens][rows] * zl
            (upstream[tokens][rows] * (ce / divisor + zl / z_divisor)).sum().backward()
        with torch.no_grad():
            found = {"ce": ce, "zl": zl, "lse": lse, "logprob": z_target - lse, **_statistics(z_valid, lse, y_valid)}
            part = {  # zero or False at ignored rows
                name: values.new_zeros(len(tokens)).index_put((rows,), values.detach())
                for name, values in found.items()
            }
            parts.append({**part, "x": _grad(x), **{f"a{k}": _grad(side) for k, side in enumerate(sides)}})

    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    per_position = {name: values.view(target.shape) for name, values in joined.items() if values.dim() == 1}
    ce, zl = per_position["ce"], per_position["zl"]
    if reduction != "none":
        ce, zl = ce.sum(), zl.sum()
    return OracleResult(
        loss=ce / divisor + zl / z_divisor,
        z_loss=zl / z_divisor,
        lse=per_position["lse"],
        logprob=per_position["logprob"],
        entropy=per_position["entropy"],
        argmax=per_position["argmax"].masked_fill(~is_valid, -1),
        correct=per_position["correct"],
        grad_input=joined["x"].view(input.shape),
        grad_weight=input.new_empty(0) if w is None else _grad(w),
        grad_bias=None if b is None else _grad(b),
        grad_adapters=[(joined[f"a{k}"].view(a.shape), _grad(ups[k])) for k, (a, _) in enumerate(adapters)],
        grad_token_weight=None if per_token is None else _grad(per_token).view(target.shape),
    )


def _leaf(t: Tensor) -> Tensor:
    return t.detach().double().clone().requires_grad_()


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _statistics(z: Tensor, lse: Tensor, y: Tensor) -> dict[str, Tensor]:
    p = torch.softmax(z, dim=1)
    plogit = torch.where(p > 0, p * z, torch.zeros_like(p))
    # The lowest index of equal logits. torch.argmax may return any of them.
    is_top = z == z.amax(dim=1, keepdim=True)
    order = torch.arange(z.shape[1], device=z.device).expand_as(is_top)
    highest = torch.where(is_top, order, z.shape[1]).amin(dim=1)
    return {"entropy": lse - plogit.sum(dim=1), "argmax": highest, "correct": highest == y}
