"""What a benchmark is: its cases, how one is measured, and the tables and the picture of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from benchmarks.cases import DTYPES, Effort, Plan
from benchmarks.measure import Meter
from benchmarks.results import HEAD, Entry, Result, Run, read
from benchmarks.rounds import Entrant, compete
from benchmarks.tables import Table, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Enter = Callable[[Any, Result], Entrant]  # warms a contender up


class Benchmark:
    """A module of cases has one, with the name of its command."""

    kind: str
    about: str  # what it measures: the help of the command
    noun: str  # what its results are of, in a sentence
    summary: tuple[str, str]  # title and first column of the table with one line for each case
    case_type: type[Any]
    choices: ClassVar[Mapping[str, Collection[str]]] = {"dtype": DTYPES}  # fields of a case, and what they may be
    presets: Mapping[str, Callable[[], Plan]]  # cases and effort by name, those first that matter most
    sizes: str  # the fields of a case that its shape is made of
    defaults: Sequence[Mapping[str, Any]] = ({},)  # the other fields of the cases that are made of a shape
    effort: Effort  # with which they are measured

    def check(self, case: Any) -> None:
        """Raises a ValueError where the case asks for what there is not."""
        for name, known in self.choices.items():
            if getattr(case, name) not in known:
                raise ValueError(f"{name} {getattr(case, name)!r}: one of {', '.join(known)}")
        self.contenders(case)

    def contenders(self, case: Any) -> Sequence[Any]:
        """Who is measured on a case, as far as they apply to it."""
        raise NotImplementedError

    def prepare(self, case: Any, device: torch.device) -> tuple[Meter, Enter]:
        """The operands, the same for every contender; and how one warms up on them."""
        raise NotImplementedError

    def build_ahead(self, cases: Sequence[Any], device: torch.device, seconds: float) -> str | None:
        """What takes long and can be done for all cases at once; says what was done."""
        return None

    def measure(
        self, case: Any, device: torch.device, effort: Effort, contenders: Sequence[Any] | None = None
    ) -> Entry:
        """Of all contenders, or of these."""
        chosen = self.contenders(case) if contenders is None else contenders
        meter, enter = self.prepare(case, device)
        taking_part = [contender for contender in chosen if contender.applies(case, device)]
        return Entry(case, compete(taking_part, enter, meter, effort, case.timed))

    def table(self, entry: Entry) -> Table:
        """Line by line, of one case."""
        raise NotImplementedError

    def cell(self, entry: Entry, result: Result) -> str:
        """Of the table with one line for each case."""
        raise NotImplementedError

    def case_tables(self, entry: Entry) -> list[Table]:
        """What is shown of a case as soon as it is measured."""
        return [self.table(entry)]

    def tables(self, run: Run, brief: bool) -> list[Table]:
        """Of a whole run; `brief` leaves out the line-by-line ones."""
        found = [summary(*self.summary, run.cases, self.cell)] if brief or len(run.cases) > 1 else []
        return found if brief else found + [self.table(entry) for entry in run.cases]

    def targets(self, runs: Sequence[Run], brief: bool) -> list[Table]:
        """What is promised, and whether the median of the runs keeps it; none where nothing is promised."""
        return []

    def dominance(self, runs: Sequence[Run]) -> list[Table]:
        """The peers, and whether each is beaten; none where that is not asked."""
        return []

    def closing(self, run: Run) -> list[Table]:
        """What is shown at the end of a run, after all cases."""
        return []

    def figure(self, run: Run) -> Figure | None:
        """None where the benchmark has no picture."""
        return None

    def entries(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Cases and results of a file, as they are written today."""
        found: list[dict[str, Any]] = document["cases"]
        return found

    def load(self, path: Path) -> Run:
        document = read(path)
        if document["kind"] != self.kind:
            raise ValueError(f"{path} holds no results of {self.noun}")
        run = Run(self.kind, {name: document[name] for name in HEAD})
        for entry in self.entries(document):
            results = [Result.from_dict(result) for result in entry["results"]]
            run.cases.append(Entry(self.case_type.from_dict(entry["case"]), results))
        return run
