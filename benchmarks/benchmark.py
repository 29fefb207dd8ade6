"""What a benchmark is: its cases, how one is measured, its result file, and the tables and the picture of that."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases import BenchCase, Effort
from benchmarks.measure import Prepared, compete, nothing
from benchmarks.runs import SCHEMA, BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.tools.machine import DTYPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = ("date", "command", "commit", "versions", "device")  # what `describe` gives

# What one call of the command measures, in its order: what a deadline may cut off comes last.
Plan = list[tuple[Any, Effort]]


EFFORT = Effort(rounds=10, seconds=5.0)  # of cases that are made of a shape


def planned(cases: Iterable[BenchCase], rounds: int, seconds: float) -> Plan:
    return [(case, Effort(rounds, seconds)) for case in cases]


def save(run: Run, path: Path) -> None:
    """Written to a second file first, so that an interrupted run leaves a whole one behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(run.to_dict(), indent=1) + "\n")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != SCHEMA or "kind" not in document:
        raise ValueError(f"{path} is no result of schema {SCHEMA}")
    return document


@dataclass(frozen=True)
class Benchmark:
    """A module of cases has one, with the name of its command. What may be None or empty not all of them have."""

    kind: str
    about: str  # what it measures: the help of the command
    noun: str  # what its results are of, in a sentence
    case_type: type[Any]
    sizes: str  # the fields of a case that its shape is made of
    presets: Mapping[str, Callable[[], Plan]]  # cases and effort by name, those first that matter most
    contenders: Callable[[Any], Sequence[Any]]  # who is measured on a case, as far as they apply to it
    prepare: Callable[[Any, torch.device], Prepared]  # the operands of a case, the same for every contender
    table: Callable[[Entry], Table]  # of a case, shown as soon as it is measured
    tables: Callable[[Run, bool], list[Table]]  # of a whole run; if that is true, without the line-by-line ones
    begin: Callable[[torch.device], object] = nothing  # before anything else is asked of the device
    figure: Callable[[Run], Figure] | None = None
    targets: Callable[[Sequence[Run], bool], list[Table]] | None = None  # what is promised; the same
    choices: Mapping[str, Collection[Any]] = field(default_factory=dict)  # fields of a case, and what they may be
    defaults: Sequence[Mapping[str, Any]] = ({},)  # the other fields of the cases that are made of a shape

    def check(self, case: Any) -> None:
        """Raises a ValueError where the case asks for what there is not."""
        for name, known in {"dtype": DTYPES, **self.choices}.items():
            if getattr(case, name) not in known:
                raise ValueError(f"{name} {getattr(case, name)!r}: one of {', '.join(map(str, known))}")
        self.contenders(case)

    def measure(
        self,
        case: Any,
        device: torch.device,
        effort: Effort,
        contenders: Sequence[Any] | None = None,
        say: Callable[[str], object] = nothing,
    ) -> Entry:
        """The figures of all contenders, or of these."""
        chosen = self.contenders(case) if contenders is None else contenders
        return compete(case, chosen, self.prepare(case, device), effort, say)

    def load(self, path: Path) -> Run:
        document = read(path)
        if document["kind"] != self.kind:
            raise ValueError(f"{path} holds no results of {self.noun}")
        run = Run(self.kind, {name: document[name] for name in HEAD})
        for entry in document["cases"]:
            results = [BenchResult.from_dict(result) for result in entry["results"]]
            run.cases.append(Entry(self.case_type.from_dict(entry["case"]), results))
        return run
