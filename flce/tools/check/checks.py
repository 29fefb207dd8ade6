"""The checks: what is called, what it has to return, and what came of it."""

from __future__ import annotations

import functools
import inspect
import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from flce.core.options import ChunkOptions
from flce.engine.case import dtype_text
from flce.testing import tolerances
from flce.testing.models import tiny_model
from flce.testing.oracle import MAX_LOGITS, OracleResult, dense_logits, token_results
from flce.testing.problem import (
    ALL_GRADS,
    LOGITS_STD,
    CallResult,
    Problem,
    make_problem,
    relative_error,
    run_fused,
    run_oracle,
    run_stock,
)
from flce.testing.tolerances import Tolerance
from flce.tools.machine import exact_device, use_backend

Results = Mapping[str, Tensor]
"""What was computed, by name."""
STATISTICS = ("lse", "logprob", "entropy", "candidate_logprob")
DEFAULT_OPTIONS = ChunkOptions()
PLAN_ARGUMENTS = inspect.signature(flce.plan).parameters  # the arguments of the loss that a plan depends on
CANDIDATES = 5


@dataclass(frozen=True)
class Figure:
    """The distance of one result from float64."""

    what: str
    error: float
    stock: float
    """The error of PyTorch's operators."""
    allowed: float

    @property
    def is_off(self) -> bool:
        return not self.error <= self.allowed  # NaN is off

    @property
    def share(self) -> float:
        """The error as a part of what is allowed."""
        return self.error / self.allowed if self.error == self.error else math.inf

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


def compare_results(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """Return a figure for each of `ours`."""
    figures = []
    for what, got in ours.items():
        bound = tolerance.loss if what in ("loss", *STATISTICS) else tolerance.gradient
        beside = relative_error(stock[what], truth[what])
        figures.append(Figure(what, relative_error(got, truth[what]), beside, bound.allowed(beside)))
    return tuple(figures)


@dataclass(frozen=True)
class CheckResult:
    device: str
    backend: str
    title: str
    dtype: str
    status: Literal["right", "off", "failed"]
    """"off": further from float64 than allowed, or different in a second run. "failed": an exception."""
    figures: tuple[Figure, ...] = ()
    wrong: tuple[str, ...] = ()
    """What is wrong, a sentence each."""
    plan: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Figure | None:
        """The figure that is nearest to what is allowed, or furthest beyond."""
        return max(self.figures, key=lambda figure: figure.share, default=None)


# --- hidden states and a head, or logits ---


class Shape(NamedTuple):
    tokens: int
    hidden: int | None  # None: there is no head, and the inputs are logits
    vocab: int


@dataclass(frozen=True)
class Inputs:
    """Hidden states, a head and labels of two sequences."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    loss: tuple[tuple[str, Any], ...] = ()
    """Arguments of the loss, by name."""
    bias: bool = False
    ignored: float = 0.0
    """Share of the labels."""
    adapter_ranks: tuple[int, ...] = ()

    @property
    def grad_output(self) -> Tensor | float:
        """The upstream gradient: of each token another, or one number."""
        if dict(self.loss).get("reduction") == "none":
            return torch.linspace(0.5, 1.5, self.shape.tokens).view(2, -1)
        # Under a float16 loss a scale as in training, without which gradients are below the least float16.
        return 2.0**16 if self.dtype == torch.float16 else 1.0


@functools.lru_cache(maxsize=1)  # of many checks in a row they are the same
def problem_of(inputs: Inputs) -> Problem:
    """The same numbers on every device, as far as the dtype has them. Not to be written to."""
    tokens, hidden, vocab = inputs.shape
    how: dict[str, Any] = {name: getattr(inputs, name) for name in ("dtype", "device", "bias", "ignored")}
    how |= {"adapter_ranks": inputs.adapter_ranks, "std": LOGITS_STD, **dict(inputs.loss)}
    return make_problem((2, tokens // 2), hidden, vocab, **how)


def plan_of(inputs: Inputs, **how: Any) -> str:
    tokens, hidden, vocab = inputs.shape
    how |= {name: value for name, value in inputs.loss if name in PLAN_ARGUMENTS} | {
        "adapter_ranks": inputs.adapter_ranks
    }
    return str(flce.plan(tokens, hidden or 0, vocab, inputs.dtype, device=inputs.device, **how))


@functools.lru_cache(maxsize=16)  # checks of other options have the same inputs
def references_of(inputs: Inputs) -> tuple[Results, Results]:
    """Return stock's results, and the same in float64."""
    p, upstream = problem_of(inputs), inputs.grad_output
    return results_by_name(run_stock(p, upstream)), results_by_name(
        run_oracle(p.to(exact_device(inputs.device)), upstream)
    )


def results_by_name(result: CallResult | OracleResult) -> Results:
    """The loss, the statistics and the gradients that there are."""
    statistics = result.output if isinstance(result, CallResult) else result
    found = {"loss": result.loss, **{name: getattr(statistics, name, None) for name in STATISTICS}}
    found |= {"input gradient": result.grad_input, "weight gradient": result.grad_weight}
    found |= {"bias gradient": result.grad_bias}
    for number, (a, b) in enumerate(result.grad_adapters, 1):
        found |= {f"adapter {number} input gradient": a, f"adapter {number} weight gradient": b}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Check:
    title: str
    backend: str
    inputs: Inputs

    def ours(self) -> Results:
        raise NotImplementedError

    def references(self) -> tuple[Results, Results]:
        """Return stock's results, and the same in float64."""
        return references_of(self.inputs)

    def tolerance(self) -> Tolerance:
        return tolerances.RESULTS[self.inputs.dtype]

    def plan(self) -> str:
        return ""

    def other_failures(self, ours: Results) -> list[str]:
        """Return what is wrong besides the figures: a second run that has other bits."""
        again = self.ours()
        names = [what for what, got in ours.items() if not torch.equal(got, again[what])]
        return [f"A second run gave other bits: {', '.join(names)}."] if names else []

    def run(self) -> CheckResult:
        """An exception is a failed check."""
        began, found = time.monotonic(), dict[str, Any]()
        try:
            with use_backend(self.backend):
                ours = self.ours()
                figures = compare_results(ours, *self.references(), self.tolerance())
                wrong = *(f"{figure}." for figure in figures if figure.is_off), *self.other_failures(ours)
                found |= {
                    "status": "off" if wrong else "right",
                    "figures": figures,
                    "wrong": wrong,
                    "plan": self.plan(),
                }
        except Exception as error:
            found = {"status": "failed", "wrong": (_sentence(error),)}
        where = str(self.inputs.device), self.backend, self.title, dtype_text(self.inputs.dtype)
        return CheckResult(*where, **found, seconds=time.monotonic() - began)


def _sentence(error: Exception) -> str:
    """Return its class and first line, and the last line of flce that it passed."""
    package = Path(flce.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(package)]
    where = f" (flce/{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}{where}"


@dataclass(frozen=True)
class OperatorCheck(Check):
    """`flce.fused_linear_cross_entropy`: losses, statistics and gradients."""

    options: ChunkOptions = DEFAULT_OPTIONS
    stats: tuple[str, ...] = ()
    grads: str = ALL_GRADS

    def ours(self) -> Results:
        how: dict[str, Any] = {"options": self.options, "stats": self.stats, "grads": self.grads}
        return results_by_name(run_fused(problem_of(self.inputs), grad_output=self.inputs.grad_output, **how))

    def tolerance(self) -> Tolerance:
        usual = super().tolerance()
        return usual if self.options.logits_dtype is not None else tolerances.EXACT_LOGITS.get(self.inputs.dtype, usual)

    def plan(self) -> str:
        how: dict[str, Any] = {"input_grad": "x" in self.grads, "weight_grad": "w" in self.grads, "stats": self.stats}
        return plan_of(self.inputs, options=self.options, bias_grad=self.inputs.bias and "b" in self.grads, **how)


@dataclass(frozen=True)
class LogitsCheck(Check):
    """`flce.cross_entropy`, of inputs that are logits."""

    inplace: bool = False
    stats: tuple[str, ...] = ()

    def ours(self) -> Results:
        p = problem_of(self.inputs)
        leaf = p.input.clone().requires_grad_()
        logits = leaf * 1 if self.inplace else leaf  # not a leaf, which may not be written to
        out: Any = flce.cross_entropy(logits, p.target, inplace=self.inplace, stats=self.stats, **p.kwargs)
        loss = out.loss if self.stats else out
        loss.backward(torch.as_tensor(self.inputs.grad_output).to(loss))
        return results_by_name(CallResult(loss.detach(), leaf.grad, None, None, output=out))


@dataclass(frozen=True)
class SoftmaxCheck(Check):
    """`flce.softmax` or `flce.log_softmax`, as the title begins."""

    def ours(self) -> Results:
        return self._solve(flce, torch.Tensor.detach)

    def references(self) -> tuple[Results, Results]:
        return self._solve(F, torch.Tensor.detach), self._solve(F, lambda t: t.to(exact_device(t.device)).double())

    def _solve(self, library: Any, convert: Any) -> Results:
        x = problem_of(self.inputs).input
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
        leaf = convert(x).clone().requires_grad_()
        y = getattr(library, self.title.split()[-1])(leaf, -1)
        y.backward(convert(upstream))
        return {"result": y.detach(), "gradient": leaf.grad}


@dataclass(frozen=True)
class LogprobsCheck(Check):
    """`flce.linear_logprobs`: results of targets and candidates, entropies, and gradients for upstream ones of all."""

    temperatures: bool = False
    """Whether each token has a temperature of its own."""
    options: ChunkOptions | None = None

    def ours(self) -> Results:
        return self._solve(problem_of(self.inputs), self.inputs.shape.tokens, by_torch=False)

    def references(self) -> tuple[Results, Results]:
        p, (tokens, _, vocab) = problem_of(self.inputs), self.inputs.shape
        exact = p.to(exact_device(self.inputs.device)).map(lambda t, _: t.double())
        return self._solve(p, tokens), self._solve(exact, max(1, MAX_LOGITS // vocab))

    def tolerance(self) -> Tolerance:
        return tolerances.EXACT_LOGITS.get(self.inputs.dtype, super().tolerance())

    def _solve(self, p: Problem, most: int, by_torch: bool = True) -> Results:
        """Results and gradients, of so many tokens at a time."""
        (tokens, _, vocab), g = self.inputs.shape, torch.Generator().manual_seed(1)
        candidates = torch.randint(vocab, (tokens, CANDIDATES), generator=g)
        candidates[:, 1], candidates[::2, 2] = candidates[:, 0], -1
        temperature = torch.rand(tokens, generator=g) + 0.5
        shapes = {"logprob": (tokens,), "entropy": (tokens,), "candidate_logprob": (tokens, CANDIDATES)}
        upstream = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        p = p.map(lambda t, _: t.detach().clone().requires_grad_())
        parts: list[dict[str, Tensor]] = []
        for rows in torch.arange(tokens).split(most):
            x, y, some = (t[rows.to(t.device)] for t in (p.input.flatten(0, 1), p.target.flatten(), candidates))
            of_each = temperature[rows].to(x.device) if self.temperatures else 1.0
            if by_torch:  # with products in the dtype of the problem, and logits of float32, or of float64
                z = F.linear(x, p.linear_weight, p.linear_bias)
                each = of_each[:, None] if isinstance(of_each, Tensor) else of_each
                z = dense_logits(z if z.dtype == torch.float64 else z.float(), None, temperature=each, **p.kwargs)
                found = token_results(z, y, some.to(x.device))
            else:
                how: dict[str, Any] = {"linear_bias": p.linear_bias, "options": self.options, **p.kwargs}
                how |= {"candidates": some.to(x.device), "temperature": of_each}
                found = vars(flce.linear_logprobs(x, p.linear_weight, y, **how))
            sums = [(found[name] * weight[rows].to(found[name])).sum() for name, weight in upstream.items()]
            torch.stack(sums).sum().backward()
            parts.append({name: found[name].detach() for name in upstream})
        grads = {"input gradient": p.input.grad, "weight gradient": p.linear_weight.grad}
        grads |= {} if p.linear_bias is None else {"bias gradient": p.linear_bias.grad}
        joined = {name: torch.cat([part[name] for part in parts]) for name in upstream}
        return joined | {name: grad for name, grad in grads.items() if grad is not None}


# --- a model that is made from its configuration ---


@dataclass(frozen=True)
class ModelCheck(Check):
    """The loss and the gradients of all parameters of a patched model, beside those of the same model as it was.

    The title has the architecture, and what computes the loss: the model, from labels, or this code, from its logits.
    """

    def ours(self) -> Results:
        from flce.huggingface import patch_model

        return self._step(patch_model(self._model(), on_materialize="raise"))

    def references(self) -> tuple[Results, Results]:
        exact = self._model().to(exact_device(self.inputs.device), torch.float64)
        return self._step(self._model()), self._step(exact)

    def tolerance(self) -> Tolerance:
        return tolerances.MODELS[self.inputs.dtype]

    def other_failures(self, ours: Results) -> list[str]:
        return []  # other operators of a model may add in any order

    def _model(self) -> Any:
        """The same weights every time."""
        architecture = self.title.partition(",")[0]
        made = tiny_model(architecture, tie_word_embeddings=architecture == "Qwen3", initializer_range=0.1)
        return made.to(self.inputs.device, self.inputs.dtype).train()

    def _step(self, model: Any) -> Results:
        """One forward and backward pass; the gradients of all parameters as one vector, and that of the head."""
        labels = problem_of(self.inputs).target.to(model.device)
        ids = labels.clamp(min=0)
        if self.title.endswith("own loss") or model.dtype == torch.float64:
            logits = model(input_ids=ids).logits  # from labels a model would round them to float32
            wide = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        head = model.get_output_embeddings().weight.grad
        others = [p.grad.flatten() for p in model.parameters() if p.grad is not head]
        return {"loss": loss.detach(), "head's gradient": head, "other gradients": torch.cat(others)}
