"""What a benchmark is: its cases, how one is measured, and the tables and the picture of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import torch

from benchmarks.cases import CaseT, Effort, Plan
from benchmarks.results import HEAD, Entry, ResultT, Run, read
from benchmarks.rounds import Expired
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
    sizes: ClassVar[str]  # the fields of a case that its shape is made of
    defaults: Sequence[Mapping[str, Any]] = ({},)  # the other fields of the cases that are made of a shape
    effort: Effort  # with which they are measured

    def check(self, case: CaseT) -> None:
        """Raises a ValueError where the case asks for what there is not."""

    def build_ahead(self, cases: Sequence[CaseT], device: torch.device, seconds: float) -> str | None:
        """What takes long and can be done for all cases at once; says what was done."""
        return None

    def measure(self, case: CaseT, device: torch.device, effort: Effort, expired: Expired) -> Entry[CaseT, ResultT]:
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

    def entries(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Cases and results of a file, as they are written today."""
        found: list[dict[str, Any]] = document["cases"]
        return found

    def load(self, path: Path) -> Run[CaseT, ResultT]:
        document = read(path)
        if document["kind"] != self.kind:
            raise ValueError(f"{path} holds no results of {self.noun}")
        run: Run[CaseT, ResultT] = Run(self.kind, {name: document[name] for name in HEAD})
        for entry in self.entries(document):
            results = [self.result_type.from_dict(result) for result in entry["results"]]
            run.cases.append(Entry(self.case_type.from_dict(entry["case"]), results))
        return run


AnyBenchmark = Benchmark[Any, Any]
