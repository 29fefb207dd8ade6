"""What ``flce bench`` does once its options are parsed: cases, measured in turn, a table of each, and a picture."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from flce.core.sizes import MIB, parse_bytes, parse_sizes, size_text
from flce.tools.bench import comparison
from flce.tools.bench.cases import Effort
from flce.tools.bench.comparison import FLOORS, OTHERS, OURS
from flce.tools.bench.contenders import budget_name, select
from flce.tools.bench.measure import compete
from flce.tools.bench.problem import OperatorCase
from flce.tools.bench.results import Run
from flce.tools.bench.tables import Table, absences, measured_on
from flce.tools.cli.output import given, print_table, stderr, wrong
from flce.tools.machine import described_run, memory_of

# --- what was asked for ---


def cases_of(
    where: torch.device,
    shapes: Sequence[str],
    dtype: str | None,
    modes: Sequence[Any],
    budgets: Sequence[str],
    contenders: Sequence[str],
    errors: bool | None,
) -> list[OperatorCase]:
    """One for each shape and mode. Whatever can be checked before a measurement is."""
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    bounded = [budget_name(given("--budget", _mebibytes, text)) for text in budgets]
    names = (*FLOORS, *(contenders or [OURS]), *bounded, *([] if contenders else OTHERS))
    sizes: list[Any] = [given("--shape", parse_sizes, text) for text in shapes] or [comparison.default_shape(where)]
    found = []
    for tokens, hidden, vocab in dict.fromkeys(sizes):
        for mode in dict.fromkeys(modes):
            case = OperatorCase(tokens, hidden, vocab, dtype, mode, contenders=tuple(dict.fromkeys(names)))
            _check_fits(case, where)
            cheap = errors is None and comparison.exactness_is_cheap(case, where)
            found.append(replace(case, errors=bool(errors or cheap)))
    return found


def _mebibytes(text: str) -> int:
    """Whole MiB, so that the budget is kept."""
    size = parse_bytes(text)
    if size < MIB:
        raise ValueError(f"expected at least 1MiB, got {text!r}")
    return size // MIB


def _check_fits(case: OperatorCase, where: torch.device) -> None:
    """That the contenders exist, that a budget can be kept, and that there is memory for the operands."""
    contenders = given("--contender", select, case.contenders)
    needed, there = comparison.operand_bytes(case), memory_of(where)
    if needed > there:
        figures = f"{size_text(needed)}, and {where} has {size_text(there)}"
        raise wrong("--shape", f"{case.title}: operands and gradients take {figures}: give smaller sizes")
    for contender in contenders:
        given("--budget", contender.planned_bytes, case, where)


# --- what is measured ---


def measured(cases: Sequence[OperatorCase], where: torch.device, effort: Effort) -> Run:
    run = Run(comparison.KIND, described_run(where, "flce", sys.argv[1:]))
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    # Without the thread that usually draws the bar, which would take the host's time from what is measured.
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=stderr(), transient=True, auto_refresh=False)
    with contextlib.redirect_stdout(sys.stderr), bar, current:  # what libraries print is no result
        for case in cases:
            task = bar.add_task(f"{case.title}: operands", total=1.0)
            try:
                prepared = comparison.prepare(case, where)
            except torch.OutOfMemoryError:
                message = f"{case.title}: {where} has no room for the operands and, with --errors, for float64"
                raise wrong("--shape", f"{message}: give smaller sizes") from None
            tell = functools.partial(_tell, bar, task)
            run.cases.append(compete(case, select(case.contenders), prepared, effort, tell))
            bar.remove_task(task)
    return run


def _tell(bar: Progress, task: Any, what: str, share: float) -> None:
    bar.update(task, description=what, completed=share, refresh=True)


# --- what is shown ---


def show(run: Run, found_wrong: Sequence[str], console: Console) -> None:
    say(console, measured_on(run))
    for table in map(comparison.comparison_table, run.cases):
        print_table(console, _rich(table))
        say(console, *(f"* {note}" for note in table.notes))
    say(console, *absences(run), *(f"WRONG: {line}" for line in found_wrong))


def say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    (_, *figures), *rows = table.lines()
    columns = [Column(title.replace(" ", "\n"), justify="right", no_wrap=True) for title in figures]
    drawn = RichTable("", *columns, title=table.title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def draw(run: Run, path: Path, console: Console) -> None:
    try:
        picture = comparison.figure(run)
    except ValueError as error:  # there are no figures
        return say(console, f"no picture: {error}")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    return say(console, f"wrote {path}")
