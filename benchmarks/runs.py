"""What was measured: one JSON document for one run of one benchmark.

It says what was measured on and with: enough to judge it later, nothing that names a person's machine.
"""

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


def median(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


@dataclass
class BenchResult:
    """One contender on one case. Each benchmark has figures of its own; what is None is not in the file."""

    contender: str
    title: str
    family: str
    # Or "unavailable" here, "unplanned" in its budget, "failed" when tried, "oom" (out of memory), "skipped" for the
    # deadline.
    status: str = "ok"
    reason: str | None = None  # unless it is "ok"
    samples_ms: list[float] = field(default_factory=list)  # every timed call, or `calls` of them, in order
    workspace_bytes: int | None = None  # peak above what was allocated before a call, and above what it returns
    note: str | None = None  # why it could not be captured in a CUDA graph
    # Calls from an idle device, beside the time until it has finished.
    host_samples_ms: list[float] = field(default_factory=list)  # until the call returned
    alone_samples_ms: list[float] = field(default_factory=list)  # of replays
    # The operator's.
    planned_bytes: int | None = None  # the workspace of ours as `flce.plan` has it
    errors: dict[str, float] | None = None  # relative, against float64
    # A model's: all that was allocated, and what the allocator took from the device.
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    forwards: int | None = None  # of a patched model in training
    fused: int | None = None  # losses of these that flce has computed: of the others stock code has
    # The longest sequence that trains, and the one that is predicted.
    tokens: int | None = None
    predicted_tokens: int | None = None
    # Those of passes over memory.
    moved_bytes: int | None = None  # what a call has to read and write
    calls: int = 1  # made one after the other, whose time is one sample
    method: str | None = None  # how they were timed, see `row_calls`

    @classmethod
    def of(cls, contender: Contender, **figures: Any) -> BenchResult:
        return cls(contender.name, contender.title, contender.family, **figures)

    @property
    def median_ms(self) -> float | None:
        return median(self.samples_ms)

    @property
    def host_ms(self) -> float | None:
        return median(self.host_samples_ms)

    @property
    def alone_ms(self) -> float | None:
        return median(self.alone_samples_ms)

    @property
    def gigabytes_per_second(self) -> float | None:
        if self.median_ms is None or self.moved_bytes is None:
            return None
        return self.moved_bytes * self.calls / self.median_ms / 1e6

    def share_of(self, other: BenchResult) -> float | None:
        """Its bandwidth, of that of another."""
        speed, whole = self.gigabytes_per_second, other.gigabytes_per_second
        return None if speed is None or whole is None else speed / whole

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
        known = {field.name for field in fields(cls)}
        result = cls(**{name: value for name, value in document.items() if name in known})
        if result.errors is not None:
            result.errors = {name: float(error) for name, error in result.errors.items()}
        return result


NO_RESULT = BenchResult("", "", "")  # without any figure: in the place of one that was not measured


@dataclass
class Entry:
    """All contenders on one case."""

    case: Any
    results: list[BenchResult] = field(default_factory=list)

    def by_name(self, contender: str) -> BenchResult:
        return next((result for result in self.results if result.contender == contender), NO_RESULT)

    def repeats(self) -> Iterator[tuple[BenchResult, BenchResult]]:
        """What was measured under two names, where both have figures."""
        for result in self.results:
            if result.family == "repeat" and result.samples_ms:
                first = self.by_name(result.contender.removesuffix(AGAIN))
                if first.samples_ms:
                    yield first, result


@dataclass
class Run:
    """All cases, and what they were measured on."""

    kind: str  # the benchmark
    head: dict[str, Any]  # date, command, versions, device: see `describe_run`
    cases: list[Entry] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        cases = [
            {"case": entry.case.to_dict(), "results": [result.to_dict() for result in entry.results]}
            for entry in self.cases
        ]
        return {"schema": SCHEMA, "kind": self.kind, **self.head, "cases": cases}


def describe_run(device: torch.device, program: str, arguments: Iterable[str]) -> dict[str, Any]:
    """What a result file says of its run. Of absolute paths in the command only the last part is kept."""
    shown = [Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]
    load = {"load_at_start": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    facts = device_facts(device)
    if facts.get("profile"):
        facts["profile"] = Path(facts["profile"]).name
    here = {"python": platform.python_version(), "flce": flce.__version__, "cuda": torch.version.cuda}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join([program, *shown]),
        "commit": source_version(),
        "versions": {name: found for name, found in here.items() if found} | versions(),
        "device": {"cpu": cpu_name(), **facts, **load},
    }


def source_version() -> str | None:
    """The commit of the checkout, with "-dirty" where files differ from it; None of a package that is installed."""
    folder = Path(flce.__file__).parents[1]
    if not (folder / ".git").exists():  # git would look further up, and find another repository
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL).strip() or None
    return None
