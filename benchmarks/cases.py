"""Cases (problems) and contenders (ways to solve them), the base classes of every benchmark."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self


@dataclass(frozen=True)
class BenchCase:
    """One problem. A result file stores its fields. One field is the `dtype`."""

    @property
    def title(self) -> str:
        raise NotImplementedError

    @property
    def is_measured(self) -> bool:
        return True

    @property
    def is_timed(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Return the case. Fields that an older file lacks get their default. Lists of JSON become tuples."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True)
class Effort:
    """Rounds over all contenders, and seconds of timed calls for each contender and case."""

    rounds: int
    seconds: float
    until: float = math.inf  # the deadline, by time.monotonic: no call begins after it

    def expired(self) -> bool:
        return time.monotonic() > self.until

    def enough(self, spent: float) -> bool:
        return spent >= self.seconds


class AgreedEffort(Effort):
    """An effort of several processes, whose answers are the answers of the first process."""

    def expired(self) -> bool:
        return broadcast(super().expired())

    def enough(self, spent: float) -> bool:
        return broadcast(super().enough(spent))


def broadcast(answer: bool) -> bool:
    dist.broadcast_object_list(answers := [answer])
    return answers[0]


def count_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_processes() -> None:
    """Raise a ValueError if this process is the only one."""
    if not dist.is_initialized():
        raise ValueError("several processes take part: start them by python -m torch.distributed.run -m benchmarks")


AGAIN = "-again"


class StepOutcome(NamedTuple):
    """Results of a call. The gradients among them do not count as workspace."""

    loss: torch.Tensor | None
    input_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None
    others: tuple[torch.Tensor | None, ...] = ()  # gradients of a bias and of adapters


Step = Callable[[], object]  # does the work once

Unavailable = Callable[[torch.device], str | None]  # the reason why a contender cannot run on a device, or None
Condition = Callable[[Any, torch.device], bool]  # of a case: True if a contender is measured on it


@dataclass(frozen=True)
class Contender:
    """A way to solve a case. Each benchmark adds the field that creates a step."""

    name: str
    title: str
    family: str  # "floor", "ours", "repeat" (see `with_repeat`), "stock" or "peer"
    unavailable: Unavailable = field(default=lambda device: None, kw_only=True)
    applies: Condition = field(default=lambda case, device: True, kw_only=True)


ContenderT = TypeVar("ContenderT", bound=Contender)


def with_repeat(contenders: Sequence[ContenderT]) -> list[ContenderT]:
    """Return the contenders, and at the end the first contender of flce again: their difference is the error bar."""
    first = next((contender for contender in contenders if contender.family == "ours"), None)
    if first is None:
        return list(contenders)
    return [*contenders, replace(first, name=first.name + AGAIN, title=f"{first.title}, again", family="repeat")]


def select_contenders(table: Sequence[ContenderT], names: Sequence[str] | None) -> Sequence[ContenderT]:
    """Return the contenders of these names, in the order of the names; without names, all of the table."""
    found = {contender.name: contender for contender in table}
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        raise ValueError(f"unknown contender {', '.join(unknown)}; there are: {', '.join(found)}")
    return [found[name] for name in names] if names else table


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


class StandIn(ModuleType):
    """A module from which any name can be imported, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def stand_ins(modules: Sequence[str]) -> Iterator[None]:
    """Replace missing modules by stand-ins while other modules are imported."""
    absent = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        sys.modules[name] = StandIn(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def needs_package(module: str, distribution: str, cuda: bool = True, stands_in: Sequence[str] = ()) -> Unavailable:
    """Return a function that returns why a contender cannot run. It does not use the modules `stands_in`."""

    def unavailable(device: torch.device) -> str | None:
        # A missing package and a package that is broken here have different reasons.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"not installed (pip install {distribution})"
        try:
            with stand_ins(stands_in):
                importlib.import_module(module)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
        return needs_cuda(device) if cuda else None

    return unavailable
