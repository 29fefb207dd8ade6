"""The result file: one JSON document for one run, of the operator, of whole models, of the kernels or of rows."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from typing_extensions import Self

from benchmarks.cases import Case
from benchmarks.kernels import KernelCase
from benchmarks.models import ModelCase
from benchmarks.rows import RowCase

SCHEMA = 1
HEAD = ("date", "command", "commit", "versions", "device")  # what environment.describe gives


@dataclass
class Measurement:
    """One contender on one case: what every benchmark has of it."""

    contender: str
    title: str
    family: str
    status: str = "ok"  # see STATUSES
    reason: str | None = None  # unless it is "ok"
    samples_ms: list[float] = field(default_factory=list)  # every timed call, in order
    cpu_samples_ms: list[float] = field(default_factory=list)  # processor time of the same calls, on a CPU
    workspace_bytes: int | None = None  # peak above what was allocated before a call, and above what it returns

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def median_cpu_ms(self) -> float | None:
        return statistics.median(self.cpu_samples_ms) if self.cpu_samples_ms else None

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("samples_ms", "cpu_samples_ms"):
            fields[name] = [round(sample, 4) for sample in fields[name]]
        fields["median_ms"] = None if self.median_ms is None else round(self.median_ms, 4)
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in fields.items() if name != "median_ms"})


STATUSES = {
    "ok": "measured",
    "unavailable": "cannot run here",
    "failed": "tried, and raised",
    "oom": "tried, and the memory of the device did not suffice",
    "skipped": "the deadline had passed",
}


@dataclass
class Result(Measurement):
    """One contender on one problem of the operator."""

    errors: dict[str, float] | None = None  # relative, against float64

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.errors is not None:  # JSON has no infinity: null stands for "not finite"
            fields["errors"] = {k: v if math.isfinite(v) else None for k, v in self.errors.items()}
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        result = super().from_dict(fields)
        if result.errors is not None:
            result.errors = {k: math.inf if v is None else v for k, v in result.errors.items()}
        return result


@dataclass
class ModelResult(Measurement):
    """One contender on the training step of a model. The workspace is what the step takes above the model."""

    peak_bytes: int | None = None  # all that was allocated: the model, its gradients, activations, the loss
    forward_peak_bytes: int | None = None  # the same until the loss was there
    reserved_bytes: int | None = None  # what the caching allocator took for it from the device
    loss: float | None = None

    def tokens_per_second(self, tokens: int) -> float | None:
        return None if self.median_ms is None else 1e3 * tokens / self.median_ms

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.loss is not None and not math.isfinite(self.loss):
            fields["loss"] = str(self.loss)
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        result = super().from_dict(fields)
        if result.loss is not None:
            result.loss = float(result.loss)
        return result


@dataclass
class KernelResult(Measurement):
    """One pass over the logits."""

    moved_bytes: int = 0  # what had to be read and written

    @property
    def gigabytes_per_second(self) -> float | None:
        return None if self.median_ms is None else self.moved_bytes / self.median_ms / 1e6


@dataclass
class RowResult(Measurement):
    """One contender on one task on rows. A sample is the time of `calls` calls, made one after the other."""

    operation: str = ""
    direction: str = ""
    moved_bytes: int = 0  # the fewest that a call can read and write
    calls: int = 1
    method: str = ""  # how they were timed, see `row_calls.Method`
    note: str | None = None  # why they were not captured

    @property
    def call_ms(self) -> float | None:
        return None if self.median_ms is None else self.median_ms / self.calls

    @property
    def gigabytes_per_second(self) -> float | None:
        return None if self.call_ms is None else self.moved_bytes / self.call_ms / 1e6


class AnyCase(Protocol):
    @property
    def title(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self: ...


CaseT = TypeVar("CaseT", bound=AnyCase)
ResultT = TypeVar("ResultT", bound=Measurement)


@dataclass
class Entry(Generic[CaseT, ResultT]):
    """All contenders on one case."""

    case: CaseT
    results: list[ResultT] = field(default_factory=list)

    def by_name(self, contender: str) -> ResultT | None:
        return next((result for result in self.results if result.contender == contender), None)


CaseResult = Entry[Case, Result]
ModelCaseResult = Entry[ModelCase, ModelResult]
KernelCaseResult = Entry[KernelCase, KernelResult]
RowCaseResult = Entry[RowCase, RowResult]


@dataclass
class Document(Generic[CaseT, ResultT]):
    """Everything that a result file holds."""

    kind: ClassVar[str]
    case_type: ClassVar[type[AnyCase]]
    result_type: ClassVar[type[Measurement]]

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
    def from_document(cls, document: dict[str, Any]) -> Self:
        head = {name: document[name] for name in HEAD}
        cases: list[Any] = [
            Entry(
                cls.case_type.from_dict(entry["case"]),
                [cls.result_type.from_dict(result) for result in entry["results"]],
            )
            for entry in document["cases"]
        ]
        return cls(head, cases)


class Run(Document[Case, Result]):
    """Of the operator."""

    kind = "operator"
    case_type = Case
    result_type = Result


class ModelRun(Document[ModelCase, ModelResult]):
    """Of models."""

    kind = "model"
    case_type = ModelCase
    result_type = ModelResult


class KernelRun(Document[KernelCase, KernelResult]):
    """Of the kernels."""

    kind = "kernels"
    case_type = KernelCase
    result_type = KernelResult


class RowRun(Document[RowCase, RowResult]):
    """Of rows."""

    kind = "rows"
    case_type = RowCase
    result_type = RowResult


AnyRun = Run | ModelRun | KernelRun | RowRun
RunT = TypeVar("RunT", Run, ModelRun, KernelRun, RowRun)


def load_any(path: Path) -> AnyRun:
    document = json.loads(path.read_text())
    if document.get("schema") == SCHEMA:
        for kind in (Run, ModelRun, KernelRun, RowRun):
            if document.get("kind") == kind.kind:
                return kind.from_document(document)
    raise ValueError(f"{path} is no result of schema {SCHEMA}")


def load(path: Path) -> Run:
    return of_kind(path, Run, "the operator")


def load_model(path: Path) -> ModelRun:
    return of_kind(path, ModelRun, "models")


def load_kernels(path: Path) -> KernelRun:
    return of_kind(path, KernelRun, "the kernels")


def load_rows(path: Path) -> RowRun:
    return of_kind(path, RowRun, "rows")


def of_kind(path: Path, kind: type[RunT], name: str) -> RunT:
    run = load_any(path)
    if not isinstance(run, kind):
        raise ValueError(f"{path} holds no results of {name}")
    return run
