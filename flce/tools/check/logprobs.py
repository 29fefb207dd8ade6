"""A check of `flce.linear_logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce.core.options import ChunkOptions
from flce.functional import linear_logprobs
from flce.testing import tolerances
from flce.testing.oracle import MOST_LOGITS, dense_logits, token_results
from flce.testing.problem import Problem
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Results
from flce.tools.check.inputs import InputsCheck, problem_of
from flce.tools.machine import exact_device, interpreted

CANDIDATES = 5
Made = Mapping[str, Tensor]


@dataclass(frozen=True)
class LogprobsCheck(InputsCheck):
    """Log-probabilities of targets and of candidates, entropies, and the gradients for upstream gradients of all."""

    temperatures: bool = False
    """Whether each token has a temperature of its own."""
    options: ChunkOptions | None = None

    def call(self) -> Results:
        def ours(p: Problem, temperature: Tensor | float, candidates: Tensor) -> Made:
            how: dict[str, Any] = {"linear_bias": p.linear_bias, "options": self.options, **p.kwargs}
            how |= {"candidates": candidates, "temperature": temperature}
            return vars(linear_logprobs(p.input, p.linear_weight, p.target, **how))

        return self._solved(problem_of(self.inputs), ours)

    def references(self) -> tuple[Results, Results]:
        p = problem_of(self.inputs)
        exact = p.to(exact_device(self.inputs.device)).map(lambda t, _: t.double())
        return self._solved(p, _by_torch), self._solved(
            exact, _by_torch, max(1, MOST_LOGITS // self.inputs.shape.vocab)
        )

    def tolerance(self) -> Tolerance:
        usual = super().tolerance()
        return (
            usual if interpreted(self.inputs.device, self.backend) else tolerances.EXACT_LOGITS.get(self.dtype, usual)
        )

    def _solved(self, p: Problem, solve: Callable[..., Made], most_tokens: int | None = None) -> Results:
        """Results and gradients, of so many tokens at a time."""
        tokens, hidden, vocab = self.inputs.shape
        g = torch.Generator().manual_seed(1)
        candidates = torch.randint(vocab, (tokens, CANDIDATES), generator=g)
        candidates[:, 1], candidates[::2, 2] = candidates[:, 0], -1
        temperature = torch.rand(tokens, generator=g) + 0.5
        upstream = {
            "logprob": torch.randn(tokens, generator=g),
            "entropy": torch.randn(tokens, generator=g),
            "candidate_logprob": torch.randn(tokens, CANDIDATES, generator=g),
        }
        p = p.map(lambda t, _: t.detach().clone().requires_grad_())
        x, y, device = p.input.reshape(tokens, hidden or 0), p.target.reshape(tokens), p.input.device
        size = most_tokens or tokens
        parts: list[dict[str, Tensor]] = []
        for rows in (slice(start, start + size) for start in range(0, tokens, size)):
            of_each = temperature[rows].to(device) if self.temperatures else 1.0
            made = solve(replace(p, input=x[rows], target=y[rows]), of_each, candidates[rows].to(device))
            sums = [(made[name] * weight[rows].to(made[name])).sum() for name, weight in upstream.items()]
            torch.stack(sums).sum().backward()
            parts.append({name: made[name].detach() for name in upstream})
        found = {name: torch.cat([part[name] for part in parts]) for name in upstream}
        grads = {"input gradient": p.input.grad, "weight gradient": p.linear_weight.grad}
        grads |= {} if p.linear_bias is None else {"bias gradient": p.linear_bias.grad}
        return {**found, **{name: grad for name, grad in grads.items() if grad is not None}}


def _by_torch(p: Problem, temperature: Tensor | float, candidates: Tensor) -> Made:
    """With products in the dtype of the problem, and logits of float32, or of float64."""
    z = F.linear(p.input, p.linear_weight, p.linear_bias)
    each = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    cap = {name: value for name, value in p.kwargs.items() if name in ("softcap", "logit_scale")}
    z = dense_logits(z if z.dtype == torch.float64 else z.float(), None, temperature=each, **cap)
    return token_results(z, p.target, candidates)
