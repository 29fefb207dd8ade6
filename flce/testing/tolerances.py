"""Allowed errors of results, for `flce check`, the benchmarks and the tests.

An error is the norm of the difference from the float64 result, divided by the norm of the float64 result. A result is
off if its error is more than ``factor`` times stock's error plus ``slack``. Stock is the same formula with PyTorch's
operators, in the dtype of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bound:
    factor: float
    slack: float

    def allowed(self, stock: float) -> float:
        return self.factor * stock + self.slack


@dataclass(frozen=True)
class Tolerance:
    loss: Bound
    """For losses, and for statistics of each token."""
    gradient: Bound
    """For gradients, and for the results of `flce.softmax`."""


def _same(factor: float, slack: float) -> Tolerance:
    return Tolerance(Bound(factor, slack), Bound(factor, slack))


# Errors may not be larger than stock's errors. The slack of half precision covers another order of summation in a
# logit, which a vendor's matrix product may choose. The slack of float32 and float64 covers a few roundings.
RESULTS = {
    torch.float64: _same(1.05, 1e-12),
    torch.float32: _same(1.05, 3e-6),
    torch.bfloat16: _same(1.05, 1e-4),
    torch.float16: _same(1.05, 1e-4),
}
# Logits are not rounded to half precision. Only the gradient of the logits (once or twice) and the result are. If there
# are few tokens, all roundings may have the same direction: the error is then half a unit in the last place.
EXACT_LOGITS = {
    torch.bfloat16: Tolerance(Bound(0.0, 5e-6), Bound(0.0, 5.5e-3)),
    torch.float16: Tolerance(Bound(0.0, 5e-6), Bound(0.0, 7e-4)),
}
# Triton's interpreter truncates float32 to bfloat16. A GPU rounds.
INTERPRETED = {torch.bfloat16: Tolerance(Bound(1.05, 1e-4), Bound(1.05, 2.5e-3))}
# A model also rounds before and after the head. These roundings change if the gradients change.
MODELS = {torch.float32: _same(1.05, 1e-5), torch.bfloat16: _same(1.05, 5e-3)}

# Shares of the largest element, for results that are computed with the arithmetic of the oracle.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
