"""Cases and contenders: a problem, how long it is measured, and a way to solve it or the reason why not here.

Every benchmark has one table of contenders. Optional packages are imported when a contender is prepared.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import Self


@dataclass(frozen=True)
class BenchCase:
    """One problem. Its fields are what a result file has of it, and one of them is its `dtype`."""

    @property
    def title(self) -> str:
        raise NotImplementedError

    @property
    def is_measured(self) -> bool:
        """Whether anything is to be measured on it."""
        return True

    @property
    def is_timed(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Fields that an older file lacks have their default. JSON has lists for tuples."""
        known = {field.name for field in fields(cls)} & set(document)
        values = {name: document[name] for name in known}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds over all contenders, seconds of timed calls for each contender and case.

    However slow it is, every contender is timed once, unless the deadline has passed.
    """

    rounds: int
    seconds: float
    until: float = math.inf  # the deadline, by time.monotonic: nothing further is begun then

    def expired(self) -> bool:
        return time.monotonic() > self.until

    def enough(self, spent: float) -> bool:
        """Whether a contender has had its seconds."""
        return spent >= self.seconds


# --- contenders ---

AGAIN = "-again"


class StepOutcome(NamedTuple):
    """What a call returned whose gradients are no part of its workspace."""

    loss: torch.Tensor | None
    input_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None
    others: tuple[torch.Tensor | None, ...] = ()  # those of a bias and of adapters


Step = Callable[[], object]  # does the work once

Unavailable = Callable[[torch.device], str | None]  # why a contender cannot run on this device, if so
Condition = Callable[[Any, torch.device], bool]  # of a case: whether a contender is measured on it


@dataclass(frozen=True)
class Contender:
    """The benchmarks add what makes a step of it."""

    name: str
    title: str
    family: str  # "floor", "ours", "repeat" (see `with_repeat`), "stock" or "peer"
    unavailable: Unavailable = field(default=lambda device: None, kw_only=True)
    applies: Condition = field(default=lambda case, device: True, kw_only=True)


ContenderT = TypeVar("ContenderT", bound=Contender)


def with_repeat(contenders: Sequence[ContenderT]) -> list[ContenderT]:
    """The contenders, and at the end the first of ours once more under another name.

    That is our default wherever it takes part. How far the two figures differ is how far equal calls differ: the error
    bar of the table.
    """
    first = next((contender for contender in contenders if contender.family == "ours"), None)
    if first is None:
        return list(contenders)
    return [*contenders, replace(first, name=first.name + AGAIN, title=f"{first.title}, again", family="repeat")]


def select_contenders(table: Sequence[ContenderT], names: Sequence[str]) -> list[ContenderT]:
    """The contenders of these names, in their order."""
    found = {contender.name: contender for contender in table}
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise ValueError(f"unknown contender {', '.join(unknown)}; there are: {', '.join(found)}")
    return [found[name] for name in names]


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


def needs_package(module: str, distribution: str, cuda: bool = True) -> Unavailable:
    """Says why a contender from an optional package cannot run here."""

    def unavailable(device: torch.device) -> str | None:
        # A package that is not there, and one that is of another version or broken here, are different news.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"not installed (pip install {distribution})"
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
        return needs_cuda(device) if cuda else None

    return unavailable
