"""What a benchmark is: its cases, how one is measured, and the tables and the picture of its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch

from benchmarks.cases import CaseT, Effort, Plan
from benchmarks.results import SCHEMA, Entry, ResultT, Run
from benchmarks.rounds import Watch
from benchmarks.tables import Table, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Benchmark(Generic[CaseT, ResultT]):
    """A module of cases has one, with the name of its command."""

    kind: ClassVar[str]
    noun: ClassVar[str]  # what its results are of, in a sentence
    summary: ClassVar[tuple[str, str]]  # title and first column of the table with one line for each case
    case_type: type[CaseT]
    result_type: type[ResultT]
    presets: Mapping[str, Callable[[], Plan[CaseT]]]  # cases and effort by name, those first that matter most

    def measure(self, case: CaseT, device: torch.device, effort: Effort, watch: Watch) -> Entry[CaseT, ResultT]:
        raise NotImplementedError

    def table(self, entry: Entry[CaseT, ResultT]) -> Table:
        """Line by line, of one case."""
        raise NotImplementedError

    def cell(self, entry: Entry[CaseT, ResultT], result: ResultT) -> str:
        """Of the table with one line for each case."""
        raise NotImplementedError

    def case_tables(self, entry: Entry[CaseT, ResultT]) -> list[Table]:
        """What is shown of a case as soon as it is measured."""
        return [self.table(entry)]

    def tables(self, run: Run[CaseT, ResultT], brief: bool) -> list[Table]:
        """Of a whole run; `brief` leaves out the line-by-line ones."""
        found = [summary(*self.summary, run.cases, self.cell)] if brief or len(run.cases) > 1 else []
        return found if brief else found + [self.table(entry) for entry in run.cases]

    def targets(self, runs: Sequence[Run[CaseT, ResultT]], brief: bool) -> list[Table]:
        """What is promised, and whether the median of the runs keeps it; none where nothing is promised."""
        return []

    def dominance(self, runs: Sequence[Run[CaseT, ResultT]]) -> list[Table]:
        """The peers, and whether each is beaten; none where that is not asked."""
        return []

    def closing(self, run: Run[CaseT, ResultT]) -> list[Table]:
        """What is shown at the end of a run, after all cases."""
        return []

    def figure(self, run: Run[CaseT, ResultT]) -> Figure | None:
        """None where the benchmark has no picture."""
        return None

    def load(self, path: Path) -> Run[CaseT, ResultT]:
        document = read(path)
        if document["kind"] != self.kind:
            raise ValueError(f"{path} holds no results of {self.noun}")
        return Run.from_document(document, self.case_type, self.result_type)


AnyBenchmark = Benchmark[Any, Any]


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != SCHEMA or "kind" not in document:
        raise ValueError(f"{path} is no result of schema {SCHEMA}")
    return document
