"""What is measured: a case is one problem (shape, dtype, mode), a preset a list of cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
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


class Mode(str, Enum):
    """Which part of a training step a call stands for."""

    forward_backward = "forward+backward"  # mean loss, gradients of the hidden states and of the head
    forward = "forward"  # mean loss under no_grad
    frozen = "frozen-head"  # mean loss, gradient of the hidden states only
    none = "reduction-none"  # per-token losses with a per-token upstream gradient, both gradients


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

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def title(self) -> str:
        parts = [f"{self.tokens} x {self.hidden} x {self.vocab}", self.dtype, self.mode.value]
        if self.ignored:
            parts.append(f"{self.ignored:.0%} of the labels ignored")
        if self.upstream != 1:
            parts.append(f"upstream gradient {self.upstream:g}")
        return ", ".join(parts)

    def aligned(self, multiple: int = 64) -> Case:
        """The next shape whose tokens and vocabulary are multiples of `multiple`."""
        up = lambda n: -(-n // multiple) * multiple  # noqa: E731
        return replace(self, tokens=up(self.tokens), vocab=up(self.vocab))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mode": self.mode.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        return cls(**(fields | {"mode": Mode(fields["mode"])}))


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds over all contenders, seconds of timed calls for each contender and case.

    However slow it is, every contender is timed once.
    """

    rounds: int
    seconds: float


class Preset(str, Enum):
    tiny = "tiny"  # seconds on a CPU; for the tests
    cpu = "cpu"  # the shape that flce promises not to lose on a CPU
    h200 = "h200"  # shapes of language-model heads, for one large GPU


def preset_cases(preset: Preset, errors: bool) -> list[Case]:
    """The cases of a preset; `errors` adds the comparison with the float64 oracle."""
    if preset is Preset.tiny:
        shape = (96, 64, 500)
        return [
            Case(*shape, dtype=dtype, mode=mode, budget_mib=1, errors=errors)
            for dtype in ("float32", "bfloat16")
            for mode in Mode
        ]
    if preset is Preset.cpu:
        return [Case(2048, 512, 32000, dtype=dtype, budget_mib=32, errors=errors) for dtype in ("float32", "bfloat16")]
    shapes = [
        (4096, 4096, 128256),
        (8192, 4096, 128256),
        (8192, 2304, 256000),
        (16384, 1024, 151936),
        (16384, 768, 50257),
    ]
    exactness = Case(32768, 1024, 32000, time=False, errors=True)
    checked = [exactness, replace(exactness, dtype="float16", upstream=2.0**16)] if errors else []
    return checked + [Case(*shape) for shape in shapes]


def preset_effort(preset: Preset) -> Effort:
    return {
        Preset.tiny: Effort(rounds=3, seconds=1.0),
        Preset.cpu: Effort(rounds=9, seconds=15.0),
        Preset.h200: Effort(rounds=20, seconds=1.5),
    }[preset]
