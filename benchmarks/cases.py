"""What a case is: one problem that all contenders solve, and how long they are measured on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from typing_extensions import Self

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One problem. Its fields are what a result file has of it."""

    @property
    def title(self) -> str:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        """Fields that an older file lacks have their default."""
        hints = get_type_hints(cls)
        names = [field.name for field in fields(cls) if field.name in document]
        return cls(**{name: decoded(hints[name], document[name]) for name in names})


def decoded(hint: Any, value: Any) -> Any:
    """A value of JSON, which has lists for tuples and strings for enumerations."""
    if isinstance(value, list):
        (entries,) = [part for part in (hint, *get_args(hint)) if get_origin(part) is tuple]
        return tuple(decoded(get_args(entries)[0], entry) for entry in value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return value


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
