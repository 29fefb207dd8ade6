"""The result file: one JSON document for one run."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case

SCHEMA = 1


@dataclass
class Result:
    """One contender on one case."""

    contender: str
    title: str
    family: str
    status: str = "ok"  # or "unavailable" (cannot run here) or "failed" (tried, and raised)
    reason: str | None = None
    samples_ms: list[float] = field(default_factory=list)  # every timed call, in order
    cpu_samples_ms: list[float] = field(default_factory=list)  # processor time of the same calls, on a CPU
    workspace_bytes: int | None = None
    errors: dict[str, float] | None = None  # relative, against float64

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def median_cpu_ms(self) -> float | None:
        return statistics.median(self.cpu_samples_ms) if self.cpu_samples_ms else None


@dataclass
class CaseResult:
    case: Case
    results: list[Result] = field(default_factory=list)

    def by_name(self, contender: str) -> Result | None:
        return next((result for result in self.results if result.contender == contender), None)


@dataclass
class Run:
    """Everything that a result file holds."""

    head: dict[str, Any]  # date, command, versions, device: see environment.describe
    cases: list[CaseResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Written to a second file first, so that an interrupted run leaves a whole one behind."""
        document = {
            "schema": SCHEMA,
            "kind": "operator",
            **self.head,
            "cases": [
                {"case": entry.case.to_dict(), "results": [result_to_dict(r) for r in entry.results]}
                for entry in self.cases
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)


def result_to_dict(result: Result) -> dict[str, Any]:
    fields = asdict(result)
    if result.errors is not None:  # JSON has no infinity: null stands for "not finite"
        fields["errors"] = {k: v if math.isfinite(v) else None for k, v in result.errors.items()}
    for name in ("samples_ms", "cpu_samples_ms"):
        fields[name] = [round(sample, 4) for sample in fields[name]]
    fields["median_ms"] = None if result.median_ms is None else round(result.median_ms, 4)
    return fields


def result_from_dict(fields: dict[str, Any]) -> Result:
    fields = {name: value for name, value in fields.items() if name != "median_ms"}
    if fields["errors"] is not None:
        fields["errors"] = {k: math.inf if v is None else v for k, v in fields["errors"].items()}
    return Result(**fields)


def load(path: Path) -> Run:
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA or document.get("kind") != "operator":
        raise ValueError(f"{path} is no operator result of schema {SCHEMA}")
    head = {name: document[name] for name in ("date", "command", "commit", "versions", "device")}
    cases = [
        CaseResult(Case.from_dict(entry["case"]), [result_from_dict(r) for r in entry["results"]])
        for entry in document["cases"]
    ]
    return Run(head, cases)
