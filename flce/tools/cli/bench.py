"""``flce bench``: the fused loss beside the bare matrix products, PyTorch and the libraries that are installed."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from flce.tools.cli.output import Dtype, Json, check_picture, given, print_json, stderr, stdout

if TYPE_CHECKING:
    import torch

    from flce.tools.bench.cases import Effort
    from flce.tools.bench.problem import OperatorCase
    from flce.tools.bench.results import Run
    from flce.tools.bench.tables import Table

# Which part of a training step a call stands for: the keys of `flce.tools.bench.problem.CALLS`.
CallMode = Enum(
    "CallMode",
    {
        "forward+backward": "forward+backward",
        "forward": "forward",
        "frozen-head": "frozen-head",
        "reduction-none": "reduction-none",
    },
)
ROUNDS = 50  # over the contenders, where these are not slow
option = typer.Option


def bench(
    shape: Annotated[
        list[str] | None,
        option(metavar="N,H,V", help="Tokens, hidden size, vocabulary; may be given again. (default: by device)"),
    ] = None,
    dtype: Annotated[Dtype | None, option(show_default="bfloat16; on a CPU float32")] = None,
    device: Annotated[
        str | None, option(metavar="NAME", help="cuda, cuda:1 or cpu. (default: cuda where there is one)")
    ] = None,
    mode: Annotated[list[CallMode] | None, option(show_default="forward+backward")] = None,
    budget: Annotated[
        list[str] | None, option(metavar="SIZE", help="Also flce with at most this workspace: 256MiB or 1GiB, say.")
    ] = None,
    contender: Annotated[
        list[str] | None, option(metavar="NAME", help="Only this one and the bare products; a wrong name lists all.")
    ] = None,
    errors: Annotated[
        bool | None,
        option("--errors/--no-errors", help="Compare with float64. (default: where that takes seconds)"),
    ] = None,
    seconds: Annotated[float, option(min=0.0, help="Timed seconds for each contender, after its first call.")] = 1.0,
    plot: Annotated[
        Path | None, option(metavar="FILE", help="Draw time against workspace: a .png, .pdf or .svg.")
    ] = None,
    json: Json = False,
) -> None:
    """Time, workspace and exactness of flce, PyTorch and other libraries, beside the bare matrix products.

    All take turns in one process; times are medians. Exit status 1: a call of flce failed, or is not as exact as stock.

    Example: flce bench --shape 4096,4096,128256 --budget 256MiB --plot bench.png
    """
    from flce.core.devices import find_device
    from flce.tools.bench.cases import Effort
    from flce.tools.bench.comparison import faults

    if plot is not None:
        check_picture("--plot", plot)
    where = given("--device", find_device, device, ("cuda", "cpu"))
    modes = [each.value for each in mode or [CallMode["forward+backward"]]]
    cases = _cases(where, shape or [], dtype and dtype.value, modes, budget or [], contender or [], errors)
    run = _measured(cases, where, Effort(ROUNDS, seconds))
    wrong = [fault for entry in run.cases for fault in faults(entry)]
    if json:
        print_json({**run.to_dict(), "found_wrong": wrong})
    else:
        _show(run, wrong, stdout())
    if plot is not None:
        _draw(run, plot, stderr())
    if wrong:
        raise typer.Exit(1)


# --- what was asked for ---


def _cases(
    where: torch.device,
    shapes: list[str],
    dtype: str | None,
    modes: list[str],
    budgets: list[str],
    contenders: list[str],
    errors: bool | None,
) -> list[OperatorCase]:
    """One for each shape and mode. Whatever can be checked before a measurement is."""
    from flce.core.sizes import parse_sizes
    from flce.tools.bench.comparison import FLOORS, OTHERS, OURS, default_shape, exactness_is_cheap
    from flce.tools.bench.contenders import budget_name
    from flce.tools.bench.problem import OperatorCase

    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    bounded = [budget_name(given("--budget", _mebibytes, text)) for text in budgets]
    names = (*FLOORS, *(contenders or [OURS]), *bounded, *([] if contenders else OTHERS))
    sizes: list[Any] = [given("--shape", parse_sizes, text) for text in shapes] or [default_shape(where)]
    found = []
    for tokens, hidden, vocab in dict.fromkeys(sizes):
        for each in dict.fromkeys(modes):
            how: dict[str, Any] = {"dtype": dtype, "mode": each, "contenders": tuple(dict.fromkeys(names))}
            case = OperatorCase(tokens, hidden, vocab, **how, errors=bool(errors))
            _check_fits(case, where)
            if errors is None:
                case = replace(case, errors=exactness_is_cheap(case, where))
            found.append(case)
    return found


def _mebibytes(text: str) -> int:
    from flce.core.sizes import MIB, parse_bytes

    size = parse_bytes(text)
    if size % MIB:
        raise ValueError(f"expected whole MiB or GiB, such as 256MiB, got {text!r}")
    return size // MIB


def _wrong(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{option}'")


def _check_fits(case: OperatorCase, where: torch.device) -> None:
    """That the contenders exist, that a budget can be kept, and that there is memory for the operands."""
    from flce.core.sizes import size_text
    from flce.tools.bench.comparison import operand_bytes
    from flce.tools.bench.contenders import select
    from flce.tools.machine import memory_of

    contenders = given("--contender", select, case.contenders)
    needed, there = operand_bytes(case), memory_of(where)
    if needed > there:
        figures = f"{size_text(needed)}, and {where} has {size_text(there)}"
        raise _wrong("--shape", f"{case.title}: operands and gradients take {figures}: give smaller sizes")
    for contender in contenders:
        given("--budget", contender.planned_bytes, case, where)


# --- what is measured ---


def _measured(cases: list[OperatorCase], where: torch.device, effort: Effort) -> Run:
    import torch

    from flce.tools.bench import comparison
    from flce.tools.bench.contenders import select
    from flce.tools.bench.measure import compete
    from flce.tools.bench.results import Run
    from flce.tools.machine import described_run

    run = Run(comparison.KIND, described_run(where, "flce", sys.argv[1:]))
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), _bar() as bar, current:  # what libraries print is no result
        for case in cases:
            task = bar.add_task(f"{case.title}: operands", total=1.0)
            tell = functools.partial(_tell, bar, task)
            try:
                prepared = comparison.prepare(case, where)
            except torch.OutOfMemoryError:
                message = f"{case.title}: {where} has no room for the operands and, with --errors, for float64"
                raise _wrong("--shape", f"{message}: give smaller sizes") from None
            run.cases.append(compete(case, select(case.contenders), prepared, effort, tell))
            bar.remove_task(task)
    return run


def _bar() -> Progress:
    """Without the thread that usually draws it, which would take the host's time from what is measured."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=stderr(), transient=True, auto_refresh=False)


def _tell(bar: Progress, task: TaskID, what: str, share: float) -> None:
    bar.update(task, description=what, completed=share)
    bar.refresh()


# --- what is shown ---


def _show(run: Run, wrong: list[str], console: Console) -> None:
    from flce.tools.bench.comparison import comparison_table
    from flce.tools.bench.tables import absences

    device = run.head["device"]
    threads = f", threads: {device['threads']}" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    _say(console, f"{device['name']}{threads}; {versions}.")
    for entry in run.cases:
        table = comparison_table(entry)
        console.print(_rich(table))
        for note in table.notes:
            _say(console, f"* {note}")
    for line in absences(run):
        _say(console, line)
    for line in wrong:
        _say(console, f"WRONG: {line}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    (_, *figures), *rows = table.lines()
    columns = [Column(title.replace(" ", "\n"), justify="right", no_wrap=True) for title in figures]
    drawn = RichTable("", *columns, title=table.title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _draw(run: Run, path: Path, console: Console) -> None:
    from flce.tools.bench.comparison import figure

    try:
        picture = figure(run)
    except ValueError as error:  # there are no figures
        _say(console, f"no picture: {error}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    _say(console, f"wrote {path}")
