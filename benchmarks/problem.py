"""The operands of a case: random, and the same for every contender."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.cases import MIB, Case

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Problem:
    """Hidden states, head and labels of a case, and the gradient that arrives at the loss."""

    case: Case
    input: torch.Tensor  # (tokens, hidden)
    weight: torch.Tensor  # (vocab, hidden)
    target: torch.Tensor  # (tokens,)
    full_target: torch.Tensor  # the same before some were ignored
    upstream: torch.Tensor  # float32: 0-d, or (tokens,) with reduction "none"

    @property
    def device(self) -> torch.device:
        return self.input.device

    @property
    def reduction(self) -> str:
        return self.case.mode.call.reduction

    @functools.cached_property
    def logits_gradient(self) -> torch.Tensor:
        """softmax - onehot, in the dtype of the problem: an operand of the bare products."""
        x, w, y = self.input.detach(), self.weight.detach(), self.target
        gradient = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        for rows in row_chunks(len(x), 4 * len(w), x.device):
            probabilities = torch.softmax((x[rows] @ w.T).float(), dim=-1)
            labels = y[rows].clamp(min=0)
            probabilities[torch.arange(len(labels), device=x.device), labels] -= 1
            gradient[rows] = probabilities.masked_fill_((y[rows] == IGNORE_INDEX)[:, None], 0)
        return gradient


def make_problem(case: Case, device: torch.device, seed: int = 0) -> Problem:
    """Normal hidden states and weights, scaled so that the logits have the standard deviation of the case."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        values = torch.randn(rows, columns, device=device, generator=generator)
        return values.mul_(std).to(case.torch_dtype)

    x = normal(case.tokens, case.hidden, 1.0)
    w = normal(case.vocab, case.hidden, case.logits_std / math.sqrt(case.hidden))
    y = torch.randint(case.vocab, (case.tokens,), device=device, generator=generator)
    full = y.clone()
    if case.ignored:
        order = torch.rand(case.tokens, device=device, generator=generator).argsort()
        y[order[: round(case.tokens * case.ignored)]] = IGNORE_INDEX
    call = case.mode.call
    if call.reduction == "none":
        upstream = torch.rand(case.tokens, device=device, generator=generator).add_(0.5).mul_(case.upstream)
    else:
        upstream = torch.tensor(case.upstream, device=device)
    x.requires_grad_(call.input_grad)
    w.requires_grad_(call.weight_grad)
    return Problem(case, x, w, y, full, upstream)


def row_chunks(tokens: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of the tokens that keep one (rows, vocab) buffer small, for set-up work outside the timing."""
    limit = (1024 if device.type == "cuda" else 128) * MIB
    rows = max(1, min(tokens, limit // bytes_per_row))
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))
