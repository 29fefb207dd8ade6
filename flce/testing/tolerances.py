"""What "off" means: how far a result may be from float64, in `flce check`, in benchmarks and in the tests.

An error is the norm of the difference from float64 over the norm of what float64 gives. A result is off if its error is
more than ``factor`` times stock's plus ``slack``. Stock is the same formula of PyTorch's operators, in the dtype of the
tensors.
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


# Results may be no further off than stock's. The slack of half precision is what another order of summation within a
# logit, which a vendor's product is free to choose, does to a loss. That of float32 and float64 is a few roundings.
RESULTS = {
    torch.float64: _same(1.05, 1e-12),
    torch.float32: _same(1.05, 3e-6),
    torch.bfloat16: _same(1.05, 1e-4),
    torch.float16: _same(1.05, 1e-4),
}
# Of half precision nothing is rounded but the gradient of the logits, once or twice, and the result. That of few tokens
# may be rounded alike: by half a unit in the last place.
EXACT_LOGITS = {
    torch.bfloat16: Tolerance(Bound(0.0, 5e-6), Bound(0.0, 5.5e-3)),
    torch.float16: Tolerance(Bound(0.0, 5e-6), Bound(0.0, 7e-4)),
}
# Triton's interpreter truncates float32 to bfloat16 where a GPU rounds.
INTERPRETED = {torch.bfloat16: Tolerance(Bound(1.05, 1e-4), Bound(1.05, 2.5e-3))}
# A model makes roundings of its own, before the head and behind it, which are others with other gradients.
MODELS = {torch.float32: _same(1.05, 1e-5), torch.bfloat16: _same(1.05, 5e-3)}

# Shares of the largest element, for results whose arithmetic is that of the oracle.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
