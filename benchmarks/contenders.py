"""What a contender is: somebody who solves the problem of a case, or says why not here.

Every benchmark has one table of them. Optional packages are imported when a contender is prepared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

AGAIN = "-again"


class Outcome(NamedTuple):
    """What a call returned whose gradients are no part of its workspace."""

    loss: torch.Tensor | None
    input_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None


Step = Callable[[], object]  # does the work once

Unavailable = Callable[[torch.device], str | None]  # why somebody cannot run on this device, if so


@dataclass(frozen=True)
class Contender:
    """The benchmarks add what makes a step of it."""

    name: str
    title: str
    family: str  # "floor", "ours", "repeat" (see `with_repeat`), "stock" or "peer"
    unavailable: Unavailable = field(default=lambda device: None, kw_only=True)


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


def known(table: Sequence[ContenderT], names: Sequence[str]) -> list[ContenderT]:
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
        try:
            importlib.import_module(module)
        except Exception as error:
            # A package that is not there, and one that is broken here, are different news.
            top = module.partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and (error.name or top).partition(".")[0] == top:
                return f"not installed (pip install {distribution})"
            return f"cannot be imported: {type(error).__name__}: {error}"
        return needs_cuda(device) if cuda else None

    return unavailable


needs_flce = needs_package("flce", ".", cuda=False)
