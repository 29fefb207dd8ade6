"""What a case is: one problem that all contenders solve, and how long they are measured on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch
from typing_extensions import Self

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One problem. Its fields are what a result file has of it, and one of them is its `dtype`."""

    @property
    def title(self) -> str:
        raise NotImplementedError

    @property
    def asked(self) -> bool:
        """Whether anything is to be measured on it."""
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

    However slow it is, every contender is timed once.
    """

    rounds: int
    seconds: float


CaseT = TypeVar("CaseT", bound=Case)

# What one call of the command measures, in its order: what a deadline may cut off comes last.
Plan = list[tuple[CaseT, Effort]]


def planned(cases: Iterable[CaseT], rounds: int, seconds: float) -> Plan[CaseT]:
    return [(case, Effort(rounds, seconds)) for case in cases]
