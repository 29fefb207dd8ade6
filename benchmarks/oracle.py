"""The right answer in float64, a chunk of rows at a time, and how far a contender is from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.contenders import Outcome
from benchmarks.problem import IGNORE_INDEX, Problem, row_chunks


@dataclass(frozen=True)
class Oracle:
    """Loss and gradients for an upstream gradient as the problem has it."""

    loss: torch.Tensor
    input_grad: torch.Tensor | None
    weight_grad: torch.Tensor | None


@torch.no_grad()
def make_oracle(problem: Problem) -> Oracle:
    x, w, y, call = problem.input, problem.weight.double(), problem.target, problem.case.mode.call
    valid = y != IGNORE_INDEX
    losses = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if call.input_grad else None
    dw = torch.zeros_like(w) if call.weight_grad else None

    share = problem.upstream.double()  # of each token's loss in what is differentiated
    if problem.reduction == "mean":
        share = share / valid.sum()
    share = torch.where(valid, share, 0.0)

    for rows in row_chunks(len(x), 8 * len(w), x.device):
        x_rows = x[rows].double()
        logits = x_rows @ w.T
        labels = y[rows].clamp(min=0)[:, None]
        lse = logits.logsumexp(dim=-1, keepdim=True)
        losses[rows] = torch.where(valid[rows], (lse - logits.gather(1, labels))[:, 0], 0.0)
        if dx is None:
            continue
        gradient = logits.sub_(lse).exp_()
        gradient.scatter_add_(1, labels, torch.full_like(lse, -1.0))
        gradient *= share[rows, None]
        dx[rows] = gradient @ w
        if dw is not None:
            dw.addmm_(gradient.T, x_rows)
    loss = losses if problem.reduction == "none" else losses.sum() / valid.sum()
    return Oracle(loss, dx, dw)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative Frobenius error; infinity rather than NaN where a value is not finite."""
    error = float((value.double() - truth).norm() / truth.norm())
    return error if math.isfinite(error) else math.inf


def exactness(outcome: Outcome, oracle: Oracle) -> dict[str, float] | None:
    """Relative errors of the loss, of dX and of dW, those that the call returned."""
    if outcome.loss is None:
        return None
    pairs = {
        "loss": (outcome.loss, oracle.loss),
        "input_grad": (outcome.input_grad, oracle.input_grad),
        "weight_grad": (outcome.weight_grad, oracle.weight_grad),
    }
    return {
        name: relative_error(value, truth)
        for name, (value, truth) in pairs.items()
        if value is not None and truth is not None
    }
