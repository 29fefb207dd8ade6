"""What is measured: a case is one problem (shape, dtype, mode), and who is measured on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

import torch

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

MIB = 1 << 20


class Product(str, Enum):
    """A matrix product of 2NHV flops."""

    logits = "x W^T"
    input_grad = "dlogits W"
    weight_grad = "dlogits^T x"


@dataclass(frozen=True)
class Call:
    """How the operator is called, and the products that such a call cannot do without: its floor."""

    input_grad: bool
    weight_grad: bool
    reduction: str
    products: tuple[Product, ...]


class Mode(str, Enum):
    """Which part of a training step a call stands for."""

    forward_backward = "forward+backward"  # mean loss, gradients of the hidden states and of the head
    forward = "forward"  # mean loss under no_grad
    frozen = "frozen-head"  # mean loss, gradient of the hidden states only
    none = "reduction-none"  # per-token losses with a per-token upstream gradient, both gradients

    @property
    def call(self) -> Call:
        return CALLS[self]


ALL_PRODUCTS = (Product.logits, Product.input_grad, Product.weight_grad)
CALLS = {
    Mode.forward_backward: Call(True, True, "mean", ALL_PRODUCTS),
    Mode.forward: Call(False, False, "mean", (Product.logits,)),
    Mode.frozen: Call(True, False, "mean", (Product.logits, Product.input_grad)),
    # A weight gradient that is already summed cannot be scaled per token: the logits are made again in backward.
    Mode.none: Call(True, True, "none", (Product.logits, *ALL_PRODUCTS)),
}


@dataclass(frozen=True)
class Case:
    """One problem to measure. `time` and `errors` say what is asked of it."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    mode: Mode = Mode.forward_backward
    ignored: float = 0.0  # share of the labels that are ignore_index
    logits_std: float = 4.0  # standard deviation of the logits; about that of a trained model
    upstream: float = 1.0  # gradient that arrives at the loss, as a GradScaler's scale would
    budget_mib: int = 256  # workspace budget of our memory-saving contender
    time: bool = True
    errors: bool = False
    contenders: tuple[str, ...] | None = None  # only these; None: all that are listed
    label: str = ""  # tells apart cases of the same problem with other contenders

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.tokens, self.hidden, self.vocab

    @property
    def title(self) -> str:
        parts = [f"{self.tokens} x {self.hidden} x {self.vocab}", self.dtype, self.mode.value]
        if self.ignored:
            parts.append(f"{self.ignored:.0%} of the labels ignored")
        if self.upstream != 1:
            parts.append(f"upstream gradient {self.upstream:g}")
        if self.label:
            parts.append(self.label)
        return ", ".join(parts)

    def aligned(self, multiple: int = 64) -> Case:
        """The next shape whose tokens and vocabulary are multiples of `multiple`."""
        up = lambda n: -(-n // multiple) * multiple  # noqa: E731
        return replace(self, tokens=up(self.tokens), vocab=up(self.vocab))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mode": self.mode.value}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Case:
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        names = known.get("contenders")
        return cls(**known | {"mode": Mode(known["mode"]), "contenders": None if names is None else tuple(names)})


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds over all contenders, seconds of timed calls for each contender and case.

    However slow it is, every contender is timed once.
    """

    rounds: int
    seconds: float
