"""What flce computes, of PyTorch's own operators: the truth in float64, and what stock code makes in the dtype at hand.

No code of flce is used here. ``tests/cli/test_check.py`` holds the truth to the tests' oracle.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.check.machine import has_float64
from flce.check.outcome import Results
from flce.check.problem import IGNORED, Loss, Problem, Tensors, make_tensors

# Of the truth so many logits are made at once: half a GiB, several times.
MOST_LOGITS = 1 << 26


@functools.lru_cache(maxsize=64)  # checks of other options have the same inputs
def stock(p: Problem) -> Results:
    """Losses, statistics and gradients in the dtype of `p`."""
    return _results(make_tensors(p).leaves(), p.loss, p.shape.tokens)


@functools.lru_cache(maxsize=64)
def truth(p: Problem) -> Results:
    """The same in float64, on the device of `p` if that has float64."""
    device = p.device if has_float64(p.device) else torch.device("cpu")
    return _results(make_tensors(p).in_float64(device).leaves(), p.loss, max(1, MOST_LOGITS // p.shape.vocab))


def forget() -> None:
    """Frees what was kept."""
    make_tensors.cache_clear()
    stock.cache_clear()
    truth.cache_clear()


def _results(t: Tensors, loss: Loss, rows: int) -> Results:
    """From so many tokens at a time."""
    target = _shifted(t.target, loss.shift).flatten()
    upstream = t.upstream.expand_as(t.target).flatten() if loss.reduction == "none" else t.upstream
    count = int((target != IGNORED).sum())
    parts: list[dict[str, Tensor]] = []
    for start in range(0, target.numel(), rows):
        part = slice(start, start + rows)
        values = _of_tokens(_logits(t, loss, part), target[part], loss)
        losses = values["loss"]
        if loss.reduction == "none":
            losses.backward(upstream[part])
        else:
            values["loss"] = losses.sum() / (count if loss.reduction == "mean" else 1)
            values["loss"].backward(upstream)
        parts.append({name: value.detach() for name, value in values.items()})
    joined = {name: torch.cat([part[name] for part in parts]).view_as(t.target) for name in parts[0] if name != "loss"}
    if loss.reduction == "none":
        total = torch.cat([part["loss"] for part in parts]).view_as(t.target)
    else:
        total = torch.stack([part["loss"] for part in parts]).sum()
    return {"loss": total, **joined, **t.gradients()}


def _shifted(target: Tensor, shift: int) -> Tensor:
    return F.pad(target, (0, shift), value=IGNORED)[..., shift:]


def _logits(t: Tensors, loss: Loss, rows: slice) -> Tensor:
    """Of some tokens, in float32 or float64."""
    z = t.input.flatten(0, 1)[rows]
    if t.weight is not None:
        z = F.linear(z, t.weight, t.bias)
    for a, b in t.adapters:
        z = z + F.linear(a.flatten(0, 1)[rows], b)
    z = z if z.dtype == torch.float64 else z.float()
    if loss.logit_scale != 1.0:
        z = loss.logit_scale * z
    if loss.softcap is not None:
        z = loss.softcap * torch.tanh(z / loss.softcap)
    return z if loss.temperature == 1.0 else z / loss.temperature


def _of_tokens(z: Tensor, target: Tensor, loss: Loss) -> dict[str, Tensor]:
    """The loss and the statistics of each."""
    losses = F.cross_entropy(z, target, reduction="none", label_smoothing=loss.label_smoothing)
    counts = target != IGNORED
    if loss.z_loss:
        losses = losses + loss.z_loss * z.logsumexp(-1).square() * counts
    with torch.no_grad():
        log_p = F.log_softmax(z, -1)
        statistics = {
            "lse": z.logsumexp(-1),
            "logprob": log_p.gather(-1, target.clamp_min(0)[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
        return {"loss": losses, **{name: value * counts for name, value in statistics.items()}}
