"""What was measured, and its file: one JSON document for one run of one benchmark."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from benchmarks.cases import CaseT
from benchmarks.contenders import AGAIN, Contender

SCHEMA = 1
HEAD = ("date", "command", "commit", "versions", "device")  # what environment.describe gives

STATUSES = {
    "ok": "measured",
    "unavailable": "cannot run here",
    "failed": "tried, and raised",
    "oom": "tried, and the memory of the device did not suffice",
    "skipped": "the deadline had passed",
}


@dataclass
class Result:
    """One contender on one case: what every benchmark has of it. They add figures of their own."""

    contender: str
    title: str
    family: str
    status: str = "ok"  # see STATUSES
    reason: str | None = None  # unless it is "ok"
    samples_ms: list[float] = field(default_factory=list)  # every timed call, in order
    cpu_samples_ms: list[float] = field(default_factory=list)  # processor time of the same calls, on a CPU
    workspace_bytes: int | None = None  # peak above what was allocated before a call, and above what it returns

    @classmethod
    def of(cls, contender: Contender, **figures: Any) -> Self:
        return cls(contender.name, contender.title, contender.family, **figures)

    @property
    def task(self) -> str:
        """Tells results apart that one contender has on one case."""
        return ""

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def median_cpu_ms(self) -> float | None:
        return statistics.median(self.cpu_samples_ms) if self.cpu_samples_ms else None

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("samples_ms", "cpu_samples_ms"):
            document[name] = [round(sample, 4) for sample in document[name]]
        document["median_ms"] = None if self.median_ms is None else round(self.median_ms, 4)
        return {name: encoded(value) for name, value in document.items()}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Self:
        return cls(**{name: decoded(value) for name, value in document.items() if name != "median_ms"})


def encoded(value: Any) -> Any:
    """JSON has no infinity and no NaN: their names stand for them."""
    if isinstance(value, dict):
        return {name: encoded(entry) for name, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: decoded(entry) for name, entry in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value


ResultT = TypeVar("ResultT", bound=Result)


@dataclass
class Entry(Generic[CaseT, ResultT]):
    """All contenders on one case."""

    case: CaseT
    results: list[ResultT] = field(default_factory=list)

    def by_name(self, contender: str, task: str = "") -> ResultT | None:
        found = (result for result in self.results if (result.contender, result.task) == (contender, task))
        return next(found, None)

    def repeats(self) -> Iterator[tuple[ResultT, ResultT]]:
        """What was measured under two names, where both have figures."""
        for result in self.results:
            if result.family == "repeat" and result.samples_ms:
                first = self.by_name(result.contender.removesuffix(AGAIN), result.task)
                if first is not None and first.samples_ms:
                    yield first, result


@dataclass
class Run(Generic[CaseT, ResultT]):
    """Everything that a result file holds."""

    kind: str  # the benchmark
    head: dict[str, Any]  # date, command, versions, device: see environment.describe
    cases: list[Entry[CaseT, ResultT]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Written to a second file first, so that an interrupted run leaves a whole one behind."""
        document = {
            "schema": SCHEMA,
            "kind": self.kind,
            **self.head,
            "cases": [
                {"case": entry.case.to_dict(), "results": [result.to_dict() for result in entry.results]}
                for entry in self.cases
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)

    @classmethod
    def from_document(cls, document: dict[str, Any], case: type[CaseT], result: type[ResultT]) -> Run[CaseT, ResultT]:
        entries = [
            Entry(case.from_dict(entry["case"]), [result.from_dict(fields) for fields in entry["results"]])
            for entry in document["cases"]
        ]
        return Run(document["kind"], {name: document[name] for name in HEAD}, entries)
