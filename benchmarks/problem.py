"""A case of the fused linear cross entropy, its operands (the same for every contender), and its result in float64."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.cases import BenchCase, StepOutcome
from benchmarks.real_heads import real_head
from flce.core.sizes import MIB
from flce.testing.oracle import oracle
from flce.testing.problem import IGNORED, LOGITS_STD, make_problem, relative_error
from flce.tools.machine import DTYPES

Shape = tuple[int, int, int]  # tokens, hidden size, vocabulary


def parse_shapes(text: str) -> list[Shape]:
    """Return the shapes of a text such as "8192x4096x128256 64x4096x128256"."""
    sizes = (tuple(map(int, shape.split("x"))) for shape in text.split())
    return [(tokens, hidden, vocab) for tokens, hidden, vocab in sizes]


@dataclass(frozen=True)
class BenchCall:
    """A way to call the operator, and its floor: the products of 2NHV flops that every such call needs."""

    input_grad: bool
    weight_grad: bool
    reduction: str
    products: tuple[str, ...]


Mode = Literal["forward+backward", "forward", "frozen-head", "reduction-none"]
LOGITS, INPUT_GRAD, WEIGHT_GRAD = "x W^T", "dlogits W", "dlogits^T x"
CALLS: dict[Mode, BenchCall] = {
    "forward+backward": BenchCall(True, True, "mean", (LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
    "forward": BenchCall(False, False, "mean", (LOGITS,)),  # under no_grad
    "frozen-head": BenchCall(True, False, "mean", (LOGITS, INPUT_GRAD)),
    # Losses and upstream gradients for each token. A weight gradient that is already summed cannot be scaled for each
    # token, so backward computes the logits again.
    "reduction-none": BenchCall(True, True, "none", (LOGITS, LOGITS, INPUT_GRAD, WEIGHT_GRAD)),
}

# Options of a call in addition to hidden states, head and labels: arguments of `make_problem`, by their name in a case.
FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"bias": True},
    "label smoothing": {"label_smoothing": 0.1},
    "adapter of rank 16": {"adapter_ranks": (16,)},
}


@dataclass(frozen=True)
class OperatorCase(BenchCase):
    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    mode: Mode = "forward+backward"
    ignored: float = 0.0  # share of the labels that are ignore_index
    logits_std: float = LOGITS_STD  # standard deviation of the logits
    budget_mib: int = 256  # workspace budget of the contender "ours-vocab"
    errors: bool = False  # the distance from a float64 oracle
    contenders: tuple[str, ...] | None = None  # only these; None: all that are listed
    calls: bool = False  # the call is also timed from an idle device
    feature: str = ""  # one of `FEATURES`
    head: str = ""  # of `real_heads.real_head` instead of random numbers
    own_products: bool = True  # flce uses its fused products if the device has them

    @property
    def problem(self) -> OperatorCase:
        """The case without its contenders and without `errors`."""
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
        parts = [self.head, " x ".join(map(str, self.shape)), self.dtype, self.mode, self.feature, ignored]
        parts += ["" if self.own_products else "own products off", "as called" if self.calls else ""]
        return ", ".join(filter(None, parts))

    def on(self, shape: Shape, **fields: Any) -> OperatorCase:
        """Return the case of another shape, with these fields changed."""
        tokens, hidden, vocab = shape
        return replace(self, tokens=tokens, hidden=hidden, vocab=vocab, **fields)

    def aligned(self) -> OperatorCase:
        """Return the case of the next larger shape whose tokens and vocabulary are multiples of 64."""
        return self.on((-(-self.tokens // 64) * 64, self.hidden, -(-self.vocab // 64) * 64))


class OperatorProblem:
    """Normal hidden states and head, labels, and the gradient that arrives at the loss."""

    def __init__(self, case: OperatorCase, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"dtype": case.torch_dtype, "device": device, "std": case.logits_std}
        options |= FEATURES[case.feature]
        problem = make_problem((case.tokens,), case.hidden, case.vocab, **options, generator=generator)
        if case.head:
            x, w, y = real_head(case.head, case.shape, device)
            problem = replace(problem, input=x.to(case.torch_dtype), linear_weight=w.to(case.torch_dtype), target=y)
        self.case = case
        # Adapters and a bias need gradients, too.
        problem = problem.map(
            lambda t, which: t.requires_grad_(case.call.weight_grad if which == "w" else case.call.input_grad)
        )
        self.input, self.weight, self.adapters = problem.input, problem.linear_weight, problem.adapters
        # Arguments of `fused_linear_cross_entropy` after the first three.
        self.more: dict[str, Any] = {**problem.kwargs, "linear_bias": problem.linear_bias, "adapters": problem.adapters}
        self.full_target = problem.target
        self.target = problem.target.clone()
        if case.ignored:
            order = torch.rand(case.tokens, device=device, generator=generator).argsort()
            self.target[order[: round(case.tokens * case.ignored)]] = IGNORED
        self.upstream = torch.ones((), device=device)  # in float32; with reduction "none" for each token
        if case.call.reduction == "none":
            self.upstream = torch.rand(case.tokens, device=device, generator=generator).add_(0.5)

    def changed(self, **attributes: Any) -> OperatorProblem:
        """Return the problem with these attributes. It shares all other tensors."""
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    @functools.cached_property
    def logits_gradient(self) -> torch.Tensor:
        """softmax - onehot of x W^T, in the dtype of the problem: an operand of the bare products."""
        x, w, y = self.input.detach(), self.weight.detach(), self.target
        gradient = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        # This work is not timed. Chunks of tokens limit its memory.
        rows = max(1, (1024 if x.is_cuda else 128) * MIB // (4 * len(w)))
        for chunk, labels, out in zip(x.split(rows), y.split(rows), gradient.split(rows), strict=True):
            probabilities = torch.softmax((chunk @ w.T).float(), dim=-1)
            probabilities[torch.arange(len(labels), device=x.device), labels.clamp(min=0)] -= 1
            out.copy_(probabilities.masked_fill_((labels == IGNORED)[:, None], 0))
        return gradient


def make_oracle(problem: OperatorProblem) -> StepOutcome:
    """Compute the result in float64, for the upstream gradient of the problem."""
    call, options = problem.case.call, {"grad_output": problem.upstream, **problem.more}
    exact = oracle(problem.input, problem.weight, problem.target, reduction=call.reduction, **options)
    gradients = exact.grad_input if call.input_grad else None, exact.grad_weight if call.weight_grad else None
    return StepOutcome(exact.loss, *gradients)


def exactness(outcome: object, exact: StepOutcome) -> dict[str, float] | None:
    """Return the relative errors of the results of a call. The error of a value that is not finite is infinity."""
    if not isinstance(outcome, StepOutcome):
        return None
    errors = {}
    for name in ("loss", "input_grad", "weight_grad"):
        value, truth = getattr(outcome, name), getattr(exact, name)
        if value is not None and truth is not None:
            error = relative_error(value, truth)
            errors[name] = error if math.isfinite(error) else math.inf
    return errors
