"""A case of the fused linear cross entropy, its operands, the same for every contender, and its right answer."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.cases import BenchCase, StepOutcome
from flce.core.sizes import MIB
from flce.testing.oracle import oracle
from flce.testing.problem import IGNORED, LOGITS_STD, make_problem, relative_error
from flce.tools.machine import DTYPES

Shape = tuple[int, int, int]  # tokens, hidden size, vocabulary


@dataclass(frozen=True)
class BenchCall:
    """How the operator is called, and the products of 2NHV flops that such a call cannot do without: its floor."""

    input_grad: bool
    weight_grad: bool
    reduction: str
    products: tuple[str, ...]


# Which part of a training step a call stands for.
Mode = Literal["forward+backward", "forward", "frozen-head", "reduction-none"]
LOGITS, INPUT_GRAD, WEIGHT_GRAD = "x W^T", "dlogits W", "dlogits^T x"
CALLS: dict[Mode, BenchCall] = {
    "forward+backward": BenchCall(True, True, "mean", (LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
    "forward": BenchCall(False, False, "mean", (LOGITS,)),  # under no_grad
    "frozen-head": BenchCall(True, False, "mean", (LOGITS, INPUT_GRAD)),
    # Per-token losses with a per-token upstream gradient. A weight gradient that is already summed cannot be scaled
    # per token: the logits are made again in backward.
    "reduction-none": BenchCall(True, True, "none", (LOGITS, LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
}


# What a call has beside hidden states, head and labels: arguments of `make_problem`, by their name in a case.
FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"bias": True},
    "label smoothing": {"label_smoothing": 0.1},
    "adapter of rank 16": {"adapter_ranks": (16,)},
}


@dataclass(frozen=True)
class OperatorCase(BenchCase):
    """`time` and `errors` say what is asked of it."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    mode: Mode = "forward+backward"
    ignored: float = 0.0  # share of the labels that are ignore_index
    logits_std: float = LOGITS_STD  # standard deviation of the logits
    upstream: float = 1.0  # gradient that arrives at the loss, as a GradScaler's scale would
    budget_mib: int = 256  # workspace budget of our memory-saving contender
    time: bool = True
    errors: bool = False  # the distance from a float64 oracle
    contenders: tuple[str, ...] | None = None  # only these; None: all that are listed
    calls: bool = False  # times it also as it is called from an idle device
    feature: str = ""  # one of `FEATURES`
    own_products: bool = True  # whether flce has its own products, where the device is one for them
    label: str = ""  # tells apart cases of the same problem with other contenders

    @property
    def is_measured(self) -> bool:
        return self.time or self.errors

    @property
    def is_timed(self) -> bool:
        return self.time

    @property
    def problem(self) -> OperatorCase:
        """The same, whoever takes part, and whatever is compared."""
        return replace(self, contenders=None, errors=False)

    @property
    def call(self) -> BenchCall:
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
        parts = [" x ".join(map(str, self.shape)), self.dtype, self.mode, self.feature, ignored, upstream]
        parts += ["" if self.own_products else "own products off", "as called" if self.calls else ""]
        return ", ".join(filter(None, parts))

    def aligned(self, multiple: int = 64) -> OperatorCase:
        """The next shape whose tokens and vocabulary are multiples of `multiple`."""
        up = lambda n: -(-n // multiple) * multiple  # noqa: E731
        return replace(self, tokens=up(self.tokens), vocab=up(self.vocab))


class OperatorProblem:
    """Hidden states, head and labels of a case, and the gradient that arrives at the loss.

    Hidden states and weights are normal, scaled so that the logits have the standard deviation of the case.
    """

    def __init__(self, case: OperatorCase, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        sizes = {"dtype": case.torch_dtype, "device": device, "std": case.logits_std}
        more: dict[str, Any] = {**sizes, **FEATURES[case.feature]}
        made = make_problem((case.tokens,), case.hidden, case.vocab, **more, generator=generator)
        self.case = case
        # Of adapters and of a bias, too, gradients are wanted.
        made = made.map(
            lambda t, which: t.requires_grad_(case.call.weight_grad if which == "w" else case.call.input_grad)
        )
        self.input, self.weight, self.adapters = made.input, made.linear_weight, made.adapters
        # Arguments of `fused_linear_cross_entropy` beside the first three.
        self.more: dict[str, Any] = {**made.kwargs, "linear_bias": made.linear_bias, "adapters": made.adapters}
        self.full_target = made.target
        self.target = made.target.clone()
        if case.ignored:
            order = torch.rand(case.tokens, device=device, generator=generator).argsort()
            self.target[order[: round(case.tokens * case.ignored)]] = IGNORED
        self.upstream = torch.tensor(case.upstream, device=device)  # in float32; with reduction "none" for each token
        if case.call.reduction == "none":
            self.upstream = torch.rand(case.tokens, device=device, generator=generator).add_(0.5).mul_(case.upstream)

    def changed(self, **attributes: Any) -> OperatorProblem:
        """The same tensors, but for these."""
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    @functools.cached_property
    def logits_gradient(self) -> torch.Tensor:
        """softmax - onehot of x W^T, in the dtype of the problem: an operand of the bare products."""
        x, w, y = self.input.detach(), self.weight.detach(), self.target
        gradient = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        # A few tokens at a time: this is work outside the timing, which is not to take much memory.
        rows = max(1, (1024 if x.is_cuda else 128) * MIB // (4 * len(w)))
        for some, labels, out in zip(x.split(rows), y.split(rows), gradient.split(rows), strict=True):
            probabilities = torch.softmax((some @ w.T).float(), dim=-1)
            probabilities[torch.arange(len(labels), device=x.device), labels.clamp(min=0)] -= 1
            out.copy_(probabilities.masked_fill_((labels == IGNORED)[:, None], 0))
        return gradient


def make_oracle(problem: OperatorProblem) -> StepOutcome:
    """The right answer, in float64, for an upstream gradient as the problem has it."""
    call = problem.case.call
    how: dict[str, Any] = {"reduction": call.reduction, "grad_output": problem.upstream, **problem.more}
    right = oracle(problem.input, problem.weight, problem.target, **how)
    return StepOutcome(
        right.loss, right.grad_input if call.input_grad else None, right.grad_weight if call.weight_grad else None
    )


def exactness(outcome: object, right: StepOutcome) -> dict[str, float] | None:
    """Relative errors of what the call returned; infinity rather than NaN where a value is not finite."""
    if not isinstance(outcome, StepOutcome):
        return None
    errors = {}
    for name in ("loss", "input_grad", "weight_grad"):
        value, truth = getattr(outcome, name), getattr(right, name)
        if value is not None and truth is not None:
            error = relative_error(value, truth)
            errors[name] = error if math.isfinite(error) else math.inf
    return errors
