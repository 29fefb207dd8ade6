"""The record of a benchmark: its cases, how a case is measured, its result file, its tables and its picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import BenchCase, Effort
from benchmarks.measure import Prepared, compete, do_nothing
from benchmarks.runs import SCHEMA, BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.tools.machine import DTYPES

HEAD = ("date", "command", "commit", "versions", "device")  # see `describe_run`
Plan = list[tuple[Any, Effort]]  # the cases of one call of the command, in order; a deadline cuts off the last
EFFORT = Effort(rounds=10, seconds=5.0)  # of the cases of `--shape`


def plan_cases(cases: Iterable[BenchCase], rounds: int, seconds: float) -> Plan:
    return [(case, Effort(rounds, seconds)) for case in cases]


def save(run: Run, path: Path) -> None:
    """Write a second file first, then rename it, so that an interrupted run leaves a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(run.to_dict(), indent=1) + "\n")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != SCHEMA or "kind" not in document:
        raise ValueError(f"{path} is not a result file of schema {SCHEMA}")
    return document


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its command. Fields with a default are optional."""

    kind: str  # the name of the command
    about: str  # the help of the command
    case_type: type[Any]
    sizes: str  # the fields of a case that `--shape` sets
    presets: Mapping[str, Callable[[], Plan]]  # cases and effort by name, the most important cases first
    contenders: Callable[[Any], Sequence[Any]]  # the contenders of a case
    prepare: Callable[[Any, torch.device], Prepared]  # allocates the operands of a case, the same for every contender
    table: Callable[[Entry], Table]  # of a case, printed after it is measured
    tables: Callable[[Run, bool], list[Table]]  # of a run; if the flag is True, without the tables of single cases
    begin: Callable[[torch.device], object] = do_nothing  # called before any other use of the device
    choices: Mapping[str, Collection[Any]] = field(default_factory=dict)  # allowed values of fields of a case
    defaults: Sequence[Mapping[str, Any]] = ({},)  # the other fields of the cases of `--shape`

    def check(self, case: Any) -> None:
        """Raise a ValueError if a field of the case or a contender is unknown."""
        for name, known in {"dtype": DTYPES, **self.choices}.items():
            if getattr(case, name) not in known:
                raise ValueError(f"{name} {getattr(case, name)!r}: expected one of {', '.join(map(str, known))}")
        self.contenders(case)

    def measure(
        self, case: Any, device: torch.device, effort: Effort, contenders: Sequence[Any] | None = None
    ) -> Entry:
        chosen = self.contenders(case) if contenders is None else contenders
        return compete(case, chosen, self.prepare(case, device), effort)

    def load(self, path: Path) -> Run:
        document = read(path)
        if document["kind"] != self.kind:
            raise ValueError(f"{path} holds no results of {self.kind!r}")
        run = Run(self.kind, {name: document[name] for name in HEAD})
        for entry in document["cases"]:
            results = [BenchResult.from_dict(result) for result in entry["results"]]
            run.cases.append(Entry(self.case_type.from_dict(entry["case"]), results))
        return run
