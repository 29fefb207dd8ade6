"""``flce check``: whether flce is exact on this machine."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flce.core.sizes import size_text
from flce.tools.cli.output import Json, given, print_json, print_table, stderr, stdout

if TYPE_CHECKING:
    from flce.tools.check.run import CheckReport, CheckResult


def check(
    quick: Annotated[
        bool, typer.Option("--quick", help="The most telling checks only: some 20 s in place of up to two minutes.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Check one device, cpu or cuda:0, say. Default: one of each kind, and the CPU."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=2, help="Check a head that is divided over this many processes too: GPUs, or gloo on a CPU."),
    ] = None,
    json: Json = False,
) -> None:
    """Whether losses and gradients are exact here: both backends, every dtype, and a patched model.

    They are compared with float64. Stock, that is PyTorch's own operators, is measured beside them. The exit status is
    1 if a result is further from float64 than stock's, or another in a second run. It ends with text for a bug report.

    Example: flce check --quick
    """
    from flce.core.devices import find_device
    from flce.tools.check.processes import Where, checks_of, place, run_split
    from flce.tools.check.report import as_json, bug_report
    from flce.tools.check.run import Task, run, todo
    from flce.tools.check.suite import Missing
    from flce.tools.machine import environment

    one = None if device is None else given("--device", find_device, device)
    words = ["flce", "check", *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    words += ["--processes", str(processes)] if processes else []
    command, facts = shlex.join(words), environment()
    what = todo(one, quick)
    where = place(processes, one) if processes else None
    split = checks_of(processes, where) if processes and isinstance(where, Where) else []
    text = TextColumn("{task.description}", markup=False)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text
    with Progress(*columns, console=stderr(), transient=True) as bar:
        shown = bar.add_task("", total=len(what.tasks) + len(split))

        def begun(task: Task) -> None:
            bar.update(shown, advance=1, description=str(task))

        report = run(what, begun)
        if processes and isinstance(where, Where):
            report = replace(report, results=(*report.results, *run_split(split, processes, where, begun)))
        elif isinstance(where, Missing):
            report = replace(report, missing=(*report.missing, where))
    if json:
        print_json(as_json(report, facts, command))
    else:
        _show(report)
        heading = "For a bug report" if report.right else "Please report this"
        print(f"\n{heading}:\n\n{bug_report(report, _described(facts), command)}")
    if not report.right:
        raise typer.Exit(1)


def _show(report: CheckReport) -> None:
    """A table for each device and backend, what was wrong, what was not checked, and the verdict."""
    console = stdout()
    places: dict[str, list[CheckResult]] = {}
    for result in report.results:
        places.setdefault(f"{result.device}, {result.backend} backend", []).append(result)
    for place, results in places.items():
        print_table(console, _table(place, results))
    if places:
        legend = "Errors against float64, of each check the one that is nearest to its limit. In brackets: stock's."
        console.print(legend, style="dim")
    for result in report.wrong:
        console.print(f"[bold red]{result.status}[/]: {escape(result.name)}", soft_wrap=True)
        for sentence in result.wrong:
            console.print(f"  {escape(sentence)}", soft_wrap=True)
    for missing in report.missing:
        console.print(f"[yellow]not checked[/]: {escape(f'{missing.what}: {missing.why}.')}", soft_wrap=True)
    console.print(f"[bold {'green' if report.right else 'red'}]{escape(report.verdict)}[/]", soft_wrap=True)


def _table(title: str, results: list[CheckResult]) -> Table:
    """Checks down, dtypes across."""
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    cells = {(result.title, result.dtype): _cell(result) for result in results}
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("check")
    for dtype in dtypes:
        table.add_column(dtype, justify="right", no_wrap=True)
    for name in dict.fromkeys(result.title for result in results):
        table.add_row(name, *(cells.get((name, dtype), "") for dtype in dtypes))
    return table


def _cell(result: CheckResult) -> str:
    """The figure that takes most of what is allowed to it."""
    worst = result.worst
    if worst is None:
        return f"[bold red]{result.status}[/]"
    figures = f"{_short(worst.error)} ({_short(worst.stock)})"
    return figures if result.status == "right" else f"[bold red]{result.status} {figures}[/]"


def _short(value: float) -> str:
    """One digit: 2e-3."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _described(facts: dict[str, Any]) -> list[str]:
    """What `environment` returned, in lines for a bug report."""
    packages = [f"{name} {found}" for name, found in facts["packages"].items() if found is not None]
    lines = [
        ", ".join([f"flce {facts['flce']}", *packages]),
        f"Python {facts['python']}, {facts['platform']}, CUDA {facts['cuda'] or 'none'}",
    ]
    for device in facts["devices"]:
        size = f"{size_text(device['memory'])}, capability {device['capability']}" if "memory" in device else ""
        about = [device["name"], size or f"{device['cores']} cores", f"backend {device['backend']} ({device['why']})"]
        lines.append(f"{device['device']}: {', '.join(about)}")
    return lines + [f"{name}={value}" for name, value in facts["variables"].items()]
