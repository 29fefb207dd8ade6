"""Results of one run of one benchmark, stored as one JSON document. Nothing in it names a person's machine."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import flce
from benchmarks.cases import AGAIN, Contender
from flce.tools.machine import cpu_name, device_facts, versions

SCHEMA = 1


def median_of(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


@dataclass
class BenchResult:
    """One contender on one case. Each benchmark sets other figures. The file omits fields that are None."""

    contender: str
    title: str
    family: str
    status: str = "ok"  # or "unavailable", "unplanned" (in its budget), "failed", "oom", "skipped" (for the deadline)
    reason: str | None = None  # unless the status is "ok"
    samples_ms: list[float] = field(default_factory=list)  # every timed call, or `calls` calls, in order
    workspace_bytes: int | None = None  # peak above the memory before a call and above its results
    distribution: dict[str, float] | None = None  # of a real head, in the result of its bare products
    note: str | None = None  # why the call could not be captured in a CUDA graph
    # Calls from an idle device, in addition to the time until the device has finished.
    host_samples_ms: list[float] = field(default_factory=list)  # until the call returned
    alone_samples_ms: list[float] = field(default_factory=list)  # of replays
    # The operator.
    planned_bytes: int | None = None  # workspace of flce, from `flce.plan`
    errors: dict[str, float] | None = None  # relative, against float64
    # Models: allocated memory, and memory that the allocator reserved on the device.
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    forwards: int | None = None  # of a patched model in training
    fused: int | None = None  # losses among these that flce has computed; stock code has computed the others
    sampled: int | None = None  # backward passes with `sample_below` whose gradients are sampled, and dense ones
    dense: int | None = None
    # The longest sequence that trains, and the predicted one.
    tokens: int | None = None
    predicted_tokens: int | None = None
    # Passes over memory.
    moved_bytes: int | None = None  # bytes that a call has to read and write
    calls: int = 1  # in files of 2026-11-25 and older: consecutive calls whose time is one sample

    @classmethod
    def of(cls, contender: Contender, **figures: Any) -> BenchResult:
        return cls(contender.name, contender.title, contender.family, **figures)

    @property
    def median_ms(self) -> float | None:
        return median_of(self.samples_ms)

    @property
    def host_ms(self) -> float | None:
        return median_of(self.host_samples_ms)

    @property
    def alone_ms(self) -> float | None:
        return median_of(self.alone_samples_ms)

    @property
    def gigabytes_per_second(self) -> float | None:
        if self.median_ms is None or self.moved_bytes is None:
            return None
        return self.moved_bytes * self.calls / self.median_ms / 1e6

    def share_of(self, other: BenchResult) -> float | None:
        speed, base = self.gigabytes_per_second, other.gigabytes_per_second
        return None if speed is None or base is None else speed / base

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        for name in [name for name in document if name.endswith("samples_ms")]:
            document[name] = [round(sample, 4) for sample in document[name]]
        document["median_ms"] = None if self.median_ms is None else round(self.median_ms, 4)
        if self.errors is not None:  # JSON has no infinity
            document["errors"] = {k: error if math.isfinite(error) else str(error) for k, error in self.errors.items()}
        return {name: value for name, value in document.items() if value is not None}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> BenchResult:
        result = cls(**{field.name: document[field.name] for field in fields(cls) if field.name in document})
        if result.errors is not None:
            result.errors = {name: float(error) for name, error in result.errors.items()}
        return result


NO_RESULT = BenchResult("", "", "")  # without figures; used if a contender was not measured


@dataclass
class Entry:
    case: Any
    results: list[BenchResult] = field(default_factory=list)

    def by_name(self, contender: str) -> BenchResult:
        return next((result for result in self.results if result.contender == contender), NO_RESULT)

    def repeats(self) -> Iterator[tuple[BenchResult, BenchResult]]:
        """Yield the two results of each contender that was measured under two names."""
        for result in self.results:
            if result.family == "repeat" and result.samples_ms:
                first = self.by_name(result.contender.removesuffix(AGAIN))
                if first.samples_ms:
                    yield first, result


@dataclass
class Run:
    kind: str  # the benchmark
    head: dict[str, Any]  # date, command, versions, device: see `describe_run`
    cases: list[Entry] = field(default_factory=list)

    def find(self, **fields: object) -> Entry:
        """Return the first case with these values of fields or properties."""
        return next(e for e in self.cases if all(getattr(e.case, name) == value for name, value in fields.items()))

    def to_dict(self) -> dict[str, Any]:
        cases = [{"case": e.case.to_dict(), "results": [r.to_dict() for r in e.results]} for e in self.cases]
        return {"schema": SCHEMA, "kind": self.kind, **self.head, "cases": cases}


def describe_run(device: torch.device, program: str, arguments: Iterable[str]) -> dict[str, Any]:
    """Return the head of a result file. Absolute paths in the command are shortened to their last part."""
    shown = [Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]
    facts = device_facts(device)
    if facts.get("profile"):
        facts["profile"] = Path(facts["profile"]).name
    here = {"python": platform.python_version(), "flce": flce.__version__, "cuda": torch.version.cuda}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join([program, *shown]),
        "commit": source_version(),
        "versions": {name: found for name, found in here.items() if found} | versions(),
        "device": {"cpu": cpu_name(), **facts},
    }


def source_version() -> str | None:
    """Return the commit of the checkout, with "-dirty" if files differ from it; None of an installed package."""
    folder = Path(flce.__file__).parents[1]
    if not (folder / ".git").exists():  # git would look further up, and find another repository
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip() or None
    return None
