"""A case of the fused linear cross entropy, its operands, the same for every contender, and its right answer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flce.bench.cases import DTYPES, MIB, Case, Outcome

IGNORE_INDEX = -100
Shape = tuple[int, int, int]  # tokens, hidden size, vocabulary


@dataclass(frozen=True)
class Call:
    """How the operator is called, and the products of 2NHV flops that such a call cannot do without: its floor."""

    input_grad: bool
    weight_grad: bool
    reduction: str
    products: tuple[str, ...]


# Which part of a training step a call stands for.
Mode = Literal["forward+backward", "forward", "frozen-head", "reduction-none"]
LOGITS, INPUT_GRAD, WEIGHT_GRAD = "x W^T", "dlogits W", "dlogits^T x"
CALLS: dict[Mode, Call] = {
    "forward+backward": Call(True, True, "mean", (LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
    "forward": Call(False, False, "mean", (LOGITS,)),  # under no_grad
    "frozen-head": Call(True, False, "mean", (LOGITS, INPUT_GRAD)),
    # Per-token losses with a per-token upstream gradient. A weight gradient that is already summed cannot be scaled
    # per token: the logits are made again in backward.
    "reduction-none": Call(True, True, "none", (LOGITS, LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
}


@dataclass(frozen=True)
class OperatorCase(Case):
    """`time` and `errors` say what is asked of it."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    mode: Mode = "forward+backward"
    ignored: float = 0.0  # share of the labels that are ignore_index
    logits_std: float = 4.0  # standard deviation of the logits; about that of a trained model
    upstream: float = 1.0  # gradient that arrives at the loss, as a GradScaler's scale would
    budget_mib: int = 256  # workspace budget of our memory-saving contender
    time: bool = True
    errors: bool = False  # the distance from a float64 oracle
    contenders: tuple[str, ...] | None = None  # only these; None: all that are listed
    calls: bool = False  # times it also as it is called from an idle device
    label: str = ""  # tells apart cases of the same problem with other contenders

    @property
    def asked(self) -> bool:
        return self.time or self.errors

    @property
    def timed(self) -> bool:
        return self.time

    @property
    def call(self) -> Call:
        return CALLS[self.mode]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def shape(self) -> Shape:
        return self.tokens, self.hidden, self.vocab

    @property
    def title(self) -> str:
        ignored = f"{self.ignored:.0%} of the labels ignored" if self.ignored else ""
        upstream = f"upstream gradient {self.upstream:g}" if self.upstream != 1 else ""
        parts = [" x ".join(map(str, self.shape)), self.dtype, self.mode, ignored, upstream]
        parts += ["as called" if self.calls else "", self.label]
        return ", ".join(filter(None, parts))

    def aligned(self, multiple: int = 64) -> OperatorCase:
        """The next shape whose tokens and vocabulary are multiples of `multiple`."""
        up = lambda n: -(-n // multiple) * multiple  # noqa: E731
        return replace(self, tokens=up(self.tokens), vocab=up(self.vocab))


class Problem:
    """Hidden states, head and labels of a case, and the gradient that arrives at the loss.

    Hidden states and weights are normal, scaled so that the logits have the standard deviation of the case.
    """

    def __init__(self, case: OperatorCase, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int, std: float) -> torch.Tensor:
            values = torch.randn(rows, columns, device=device, generator=generator)
            return values.mul_(std).to(case.torch_dtype)

        self.case = case
        self.input = normal(case.tokens, case.hidden, 1.0).requires_grad_(case.call.input_grad)
        weight = normal(case.vocab, case.hidden, case.logits_std / math.sqrt(case.hidden))
        self.weight = weight.requires_grad_(case.call.weight_grad)
        self.full_target = torch.randint(case.vocab, (case.tokens,), device=device, generator=generator)
        self.target = self.full_target.clone()
        if case.ignored:
            order = torch.rand(case.tokens, device=device, generator=generator).argsort()
            self.target[order[: round(case.tokens * case.ignored)]] = IGNORE_INDEX
        self.upstream = torch.tensor(case.upstream, device=device)  # in float32; with reduction "none" for each token
        if case.call.reduction == "none":
            self.upstream = torch.rand(case.tokens, device=device, generator=generator).add_(0.5).mul_(case.upstream)

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


def row_chunks(tokens: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of the tokens that keep one (rows, vocab) buffer small, for set-up work outside the timing."""
    limit = (1024 if device.type == "cuda" else 128) * MIB
    rows = max(1, min(tokens, limit // bytes_per_row))
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


@torch.no_grad()
def make_oracle(problem: Problem) -> Outcome:
    """The right answer, in float64, for an upstream gradient as the problem has it."""
    x, w, y, call = problem.input, problem.weight.double(), problem.target, problem.case.call
    valid = y != IGNORE_INDEX
    losses = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if call.input_grad else None
    dw = torch.zeros_like(w) if call.weight_grad else None

    share = problem.upstream.double()  # of each token's loss in what is differentiated
    if call.reduction == "mean":
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
    return Outcome(losses if call.reduction == "none" else losses.sum() / valid.sum(), dx, dw)


def exactness(outcome: object, oracle: Outcome) -> dict[str, float] | None:
    """Relative Frobenius errors of what the call returned; infinity rather than NaN where a value is not finite."""
    if not isinstance(outcome, Outcome):
        return None
    errors = {}
    for name, value, truth in zip(Outcome._fields, outcome, oracle, strict=True):
        if value is not None and truth is not None:
            error = float((value.double() - truth).norm() / truth.norm())
            errors[name] = error if math.isfinite(error) else math.inf
    return errors
