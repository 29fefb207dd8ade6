"""The checks of `flce check`: the call of flce, its references, and the record of the comparison."""

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
"""Computed tensors by name: losses, statistics, gradients."""
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
        """The error divided by the allowed error."""
        return self.error / self.allowed if self.error == self.error else math.inf

    def __str__(self) -> str:
        return f"{self.what} {self.error:.2e} from float64, allowed {self.allowed:.2e}, stock {self.stock:.2e}"


def compare_results(ours: Results, stock: Results, truth: Results, tolerance: Tolerance) -> tuple[Figure, ...]:
    """Return a figure for each result of flce."""
    figures = []
    for what, got in ours.items():
        bound = tolerance.loss if what in ("loss", *STATISTICS) else tolerance.gradient
        stock_error = relative_error(stock[what], truth[what])
        figures.append(Figure(what, relative_error(got, truth[what]), stock_error, bound.allowed(stock_error)))
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
    """Sentences, one for each fault."""
    plan: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Figure | None:
        """The figure with the largest share of its allowed error, or None."""
        return max(self.figures, key=lambda figure: figure.share, default=None)


class Shape(NamedTuple):
    tokens: int
    hidden: int | None  # None: without a head; the inputs are logits
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
    """The share of the labels that are ignored."""
    adapter_ranks: tuple[int, ...] = ()

    @property
    def grad_output(self) -> Tensor | float:
        """The upstream gradient: a different number for each token if the reduction is "none", else one number."""
        if dict(self.loss).get("reduction") == "none":
            return torch.linspace(0.5, 1.5, self.shape.tokens).view(2, -1)
        # A float16 loss needs a scale, as in training: without it gradients are smaller than the least float16.
        return 2.0**16 if self.dtype == torch.float16 else 1.0


@functools.lru_cache(maxsize=1)  # many checks in a row have the same inputs
def create_problem(inputs: Inputs) -> Problem:
    """Create the tensors of a check: the same numbers on every device, rounded to the dtype. Do not write to them."""
    tokens, hidden, vocab = inputs.shape
    names = "dtype", "device", "bias", "ignored", "adapter_ranks"
    settings: dict[str, Any] = {name: getattr(inputs, name) for name in names} | dict(inputs.loss)
    return make_problem((2, tokens // 2), hidden, vocab, std=LOGITS_STD, **settings)


def plan_text(inputs: Inputs, **settings: Any) -> str:
    tokens, hidden, vocab = inputs.shape
    settings |= {name: value for name, value in inputs.loss if name in PLAN_ARGUMENTS}
    settings |= {"adapter_ranks": inputs.adapter_ranks, "device": inputs.device}
    return str(flce.plan(tokens, hidden or 0, vocab, inputs.dtype, **settings))


@functools.lru_cache(maxsize=16)  # checks with different options have the same inputs
def compute_references(inputs: Inputs) -> tuple[Results, Results]:
    """Return stock's results, and the results in float64."""
    p, upstream = create_problem(inputs), inputs.grad_output
    return results_by_name(run_stock(p, upstream)), results_by_name(
        run_oracle(p.to(exact_device(inputs.device)), upstream)
    )


def results_by_name(result: CallResult | OracleResult) -> Results:
    """Return the loss, the statistics and the gradients that are not None."""
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
        """Return stock's results, and the results in float64."""
        return compute_references(self.inputs)

    def tolerance(self) -> Tolerance:
        return tolerances.RESULTS[self.inputs.dtype]

    def plan(self) -> str:
        return ""

    def other_failures(self, ours: Results) -> list[str]:
        """Return the faults that are not figures: results of a second run with other bits."""
        again = self.ours()
        names = [what for what, got in ours.items() if not torch.equal(got, again[what])]
        return [f"A second run gave other bits: {', '.join(names)}."] if names else []

    def run(self) -> CheckResult:
        """Run the check. An exception is recorded as "failed"."""
        start, outcome = time.monotonic(), dict[str, Any]()
        try:
            with use_backend(self.backend):
                ours = self.ours()
                figures = compare_results(ours, *self.references(), self.tolerance())
                wrong = *(f"{figure}." for figure in figures if figure.is_off), *self.other_failures(ours)
                outcome |= {
                    "status": "off" if wrong else "right",
                    "figures": figures,
                    "wrong": wrong,
                    "plan": self.plan(),
                }
        except Exception as error:
            outcome = {"status": "failed", "wrong": (_describe_error(error),)}
        names = str(self.inputs.device), self.backend, self.title, dtype_text(self.inputs.dtype)
        return CheckResult(*names, **outcome, seconds=time.monotonic() - start)


def _describe_error(error: Exception) -> str:
    """Return the error's class, its first line, and the innermost line of flce in its traceback."""
    package = Path(flce.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(package)]
    where = f" (flce/{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}{where}"


@dataclass(frozen=True)
class OperatorCheck(Check):
    """Check of `flce.fused_linear_cross_entropy`: losses, statistics and gradients."""

    options: ChunkOptions = DEFAULT_OPTIONS
    stats: tuple[str, ...] = ()
    grads: str = ALL_GRADS

    def ours(self) -> Results:
        settings: dict[str, Any] = {"options": self.options, "stats": self.stats, "grads": self.grads}
        return results_by_name(run_fused(create_problem(self.inputs), grad_output=self.inputs.grad_output, **settings))

    def tolerance(self) -> Tolerance:
        usual = super().tolerance()
        return usual if self.options.logits_dtype is not None else tolerances.EXACT_LOGITS.get(self.inputs.dtype, usual)

    def plan(self) -> str:
        grads = {"input_grad": "x" in self.grads, "weight_grad": "w" in self.grads}
        grads["bias_grad"] = self.inputs.bias and "b" in self.grads
        return plan_text(self.inputs, options=self.options, stats=self.stats, **grads)


@dataclass(frozen=True)
class LogitsCheck(Check):
    """Check of `flce.cross_entropy`. The inputs are logits."""

    inplace: bool = False
    stats: tuple[str, ...] = ()

    def ours(self) -> Results:
        p = create_problem(self.inputs)
        leaf = p.input.clone().requires_grad_()
        logits = leaf * 1 if self.inplace else leaf  # a leaf may not be written to
        out: Any = flce.cross_entropy(logits, p.target, inplace=self.inplace, stats=self.stats, **p.kwargs)
        loss = out.loss if self.stats else out
        loss.backward(torch.as_tensor(self.inputs.grad_output).to(loss))
        return results_by_name(CallResult(loss.detach(), leaf.grad, None, None, output=out))


@dataclass(frozen=True)
class SoftmaxCheck(Check):
    """Check of `flce.softmax` or `flce.log_softmax`: the last word of the title names the function."""

    def ours(self) -> Results:
        return self._run(flce, torch.Tensor.detach)

    def references(self) -> tuple[Results, Results]:
        return self._run(F, torch.Tensor.detach), self._run(F, lambda t: t.to(exact_device(t.device)).double())

    def _run(self, library: Any, convert: Any) -> Results:
        x = create_problem(self.inputs).input
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x)
        leaf = convert(x).clone().requires_grad_()
        y = getattr(library, self.title.split()[-1])(leaf, -1)
        y.backward(convert(upstream))
        return {"result": y.detach(), "gradient": leaf.grad}


@dataclass(frozen=True)
class LogprobsCheck(Check):
    """Check of `flce.linear_logprobs`: results of targets and candidates, entropies, and the gradients of all."""

    temperatures: bool = False
    """True if each token has a separate temperature."""
    options: ChunkOptions | None = None

    def ours(self) -> Results:
        return self._run(create_problem(self.inputs), self.inputs.shape.tokens, by_torch=False)

    def references(self) -> tuple[Results, Results]:
        p, (tokens, _, vocab) = create_problem(self.inputs), self.inputs.shape
        exact = p.to(exact_device(self.inputs.device)).map(lambda t, _: t.double())
        return self._run(p, tokens), self._run(exact, max(1, MAX_LOGITS // vocab))

    def tolerance(self) -> Tolerance:
        return tolerances.EXACT_LOGITS.get(self.inputs.dtype, super().tolerance())

    def _run(self, p: Problem, max_tokens: int, by_torch: bool = True) -> Results:
        """Return results and gradients, computed for at most `max_tokens` tokens at a time."""
        (tokens, _, vocab), g = self.inputs.shape, torch.Generator().manual_seed(1)
        candidates = torch.randint(vocab, (tokens, CANDIDATES), generator=g)
        candidates[:, 1], candidates[::2, 2] = candidates[:, 0], -1
        temperature = torch.rand(tokens, generator=g) + 0.5
        shapes = {"logprob": (tokens,), "entropy": (tokens,), "candidate_logprob": (tokens, CANDIDATES)}
        upstream = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        p = p.map(lambda t, _: t.detach().clone().requires_grad_())
        parts: list[dict[str, Tensor]] = []
        for rows in torch.arange(tokens).split(max_tokens):
            x, y, some = (t[rows.to(t.device)] for t in (p.input.flatten(0, 1), p.target.flatten(), candidates))
            divisor = temperature[rows].to(x.device) if self.temperatures else 1.0
            if by_torch:  # with products in the dtype of the problem, and logits of float32, or of float64
                z = F.linear(x, p.linear_weight, p.linear_bias)
                column = divisor[:, None] if isinstance(divisor, Tensor) else divisor
                z = dense_logits(z if z.dtype == torch.float64 else z.float(), None, temperature=column, **p.kwargs)
                found = token_results(z, y, some.to(x.device))
            else:
                settings: dict[str, Any] = {"linear_bias": p.linear_bias, "options": self.options, **p.kwargs}
                settings |= {"candidates": some.to(x.device), "temperature": divisor}
                found = vars(flce.linear_logprobs(x, p.linear_weight, y, **settings))
            sums = [(found[name] * weight[rows].to(found[name])).sum() for name, weight in upstream.items()]
            torch.stack(sums).sum().backward()
            parts.append({name: found[name].detach() for name in upstream})
        grads = {"input gradient": p.input.grad, "weight gradient": p.linear_weight.grad}
        grads |= {} if p.linear_bias is None else {"bias gradient": p.linear_bias.grad}
        joined = {name: torch.cat([part[name] for part in parts]) for name in upstream}
        return joined | {name: grad for name, grad in grads.items() if grad is not None}


@dataclass(frozen=True)
class ModelCheck(Check):
    """Check of a patched model: its loss and the gradients of all parameters, compared with the unpatched model.

    The title names the architecture and the source of the loss: "labels" (the model) or "own loss" (this code, from the
    model's logits).
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
        return []  # operators of a model may add in any order

    def _model(self) -> Any:
        """Create the model, with the same weights at each call."""
        architecture = self.title.partition(",")[0]
        model = tiny_model(architecture, tie_word_embeddings=architecture == "Qwen3", initializer_range=0.1)
        return model.to(self.inputs.device, self.inputs.dtype).train()

    def _step(self, model: Any) -> Results:
        """Return the loss, the head's gradient, and the gradients of all other parameters as one vector."""
        labels = create_problem(self.inputs).target.to(model.device)
        ids = labels.clamp(min=0)
        if self.title.endswith("own loss") or model.dtype == torch.float64:
            logits = model(input_ids=ids).logits  # if a model computes the loss, it rounds logits to float32
            wide = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        head = model.get_output_embeddings().weight.grad
        others = [p.grad.flatten() for p in model.parameters() if p.grad is not head]
        return {"loss": loss.detach(), "head's gradient": head, "other gradients": torch.cat(others)}
