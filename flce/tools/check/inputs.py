"""The inputs of a check: a description that can be compared, the tensors made of it, and what they have to give."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce.core.problem import LossSpec
from flce.testing import tolerances
from flce.testing.problem import LOGITS_STD, Problem, make_problem, run_oracle, run_stock
from flce.testing.tolerances import Tolerance
from flce.tools.check.figures import Measurement, Results, compared, differing, named
from flce.tools.machine import exact_device, interpreted


class Shape(NamedTuple):
    tokens: int
    hidden: int | None
    """None: there is no head, and the inputs are logits."""
    vocab: int


PLAIN = LossSpec()


@dataclass(frozen=True)
class Inputs:
    """Hidden states, a head and labels of two sequences."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    loss: LossSpec = PLAIN
    shift: int = 0
    bias: bool = False
    ignored: float = 0.0
    """Share of the labels."""
    adapter_ranks: tuple[int, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the loss that are not their defaults."""
        given = {f.name: getattr(self.loss, f.name) for f in fields(LossSpec) if f.name != "stats"}
        return {name: value for name, value in given.items() if value != getattr(PLAIN, name)} | {"shift": self.shift}

    @property
    def grad_output(self) -> Tensor | float:
        """The upstream gradient: of each token another, or one number."""
        if self.loss.reduction == "none":
            return torch.linspace(0.5, 1.5, self.shape.tokens).view(2, -1)
        # Under a float16 loss a scale as in training, without which gradients are below the least float16.
        return 2.0**16 if self.dtype == torch.float16 and self.loss.reduction == "mean" else 1.0


@functools.lru_cache(maxsize=1)  # of many checks in a row they are the same
def problem_of(inputs: Inputs) -> Problem:
    """The same numbers on every device, as far as the dtype has them. Not to be written to."""
    tokens, hidden, vocab = inputs.shape
    return make_problem(
        (2, tokens // 2),
        hidden,
        vocab,
        dtype=inputs.dtype,
        device=inputs.device,
        bias=inputs.bias,
        ignored=inputs.ignored,
        adapter_ranks=inputs.adapter_ranks,
        std=LOGITS_STD,
        **inputs.arguments,
    )


@functools.lru_cache(maxsize=64)  # checks of other options have the same inputs
def stock(inputs: Inputs) -> Results:
    """Losses, statistics and gradients by PyTorch's own operators, in the dtype of the inputs."""
    return named(run_stock(problem_of(inputs), inputs.grad_output))


@functools.lru_cache(maxsize=64)
def truth(inputs: Inputs) -> Results:
    """The same in float64, on the device of the inputs if that has float64."""
    problem = problem_of(inputs)
    return named(run_oracle(problem.to(exact_device(inputs.device)), inputs.grad_output))


def forget() -> None:
    """Frees what was kept."""
    problem_of.cache_clear()
    stock.cache_clear()
    truth.cache_clear()


@dataclass(frozen=True)
class InputsCheck:
    """The results of a call, and that a second one has the same bits."""

    title: str
    inputs: Inputs
    backend: str

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    def measure(self) -> Measurement:
        ours = self.call()
        # Where logits begin in memory, modulo 128 bytes, decides in which order a kernel adds. Memory of a GPU always
        # begins alike there, but that of a CPU, which kernels see in the interpreter, does not.
        again = ours if interpreted(self.inputs.device, self.backend) else self.call()
        return Measurement(compared(ours, *self.references(), self.tolerance()), differing(ours, again), self.plan())

    def call(self) -> Results:
        raise NotImplementedError

    def references(self) -> tuple[Results, Results]:
        """What stock gives, and the same in float64."""
        return stock(self.inputs), truth(self.inputs)

    def tolerance(self) -> Tolerance:
        usual = tolerances.RESULTS[self.dtype]
        is_interpreted = interpreted(self.inputs.device, self.backend)
        return tolerances.INTERPRETED.get(self.dtype, usual) if is_interpreted else usual

    def plan(self) -> str:
        """The plan of the call, if it has one."""
        return ""
