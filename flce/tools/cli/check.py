"""``flce check``: whether flce is exact on this machine."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flce.core.sizes import size_text
from flce.tools.cli.output import Json, given, print_json, print_table, stderr, stdout

if TYPE_CHECKING:
    from flce.tools.check.results import CheckReport, CheckResult


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
    from flce.tools.check import processes as split
    from flce.tools.check import suite
    from flce.tools.check.results import CheckReport, Missing
    from flce.tools.machine import environment, threads

    one = None if device is None else given("--device", find_device, device)
    words = ["flce", "check", *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    words += ["--processes", str(processes)] if processes else []
    command, facts = shlex.join(words), environment()
    checks, missing = suite.todo(one, quick)
    place = split.place(processes, one) if processes else None
    divided = split.split_checks(processes, place) if processes and isinstance(place, split.Where) else []
    missing += [place] if isinstance(place, Missing) else []
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=stderr(), transient=True) as bar:
        shown, results = bar.add_task("", total=len(checks) + len(divided)), []
        # The quick checks are so small that threads which wait for each other take longer than the work.
        with threads(1) if quick else contextlib.nullcontext():
            for each in checks:
                bar.update(shown, advance=1, description=str(each))
                results.append(each.run())
        if processes and isinstance(place, split.Where):
            bar.update(shown, description="a divided head")
            results += split.run_split(divided, processes, place)
    report = CheckReport(tuple(results), tuple(missing))
    if json:
        print_json(report.as_json(facts, command))
    else:
        _show(report)
        heading = "For a bug report" if report.right else "Please report this"
        print(f"\n{heading}:\n\n{report.bug_report(_machine(facts), command)}")
    if not report.right:
        raise typer.Exit(1)


def _show(report: CheckReport) -> None:
    """Print a table for each device and backend, what was wrong, what was not checked, and the verdict."""
    console = stdout()
    places: dict[str, list[CheckResult]] = {}
    for result in report.results:
        places.setdefault(f"{result.device}, {result.backend} backend", []).append(result)
    for place, results in places.items():
        dtypes = list(dict.fromkeys(result.dtype for result in results))
        cells = {(result.title, result.dtype): _cell(result) for result in results}
        table = Table(title=place, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("check")
        for dtype in dtypes:
            table.add_column(dtype, justify="right", no_wrap=True)
        for name in dict.fromkeys(result.title for result in results):
            table.add_row(name, *(cells.get((name, dtype), "") for dtype in dtypes))
        print_table(console, table)
    if places:
        legend = "Errors against float64, of each check the one that is nearest to its limit. In brackets: stock's."
        console.print(legend, style="dim")
    for result in report.wrong:
        lines = [
            f"[bold red]{result.status}[/]: {escape(result.name)}",
            *(f"  {escape(line)}" for line in result.wrong),
        ]
        console.print("\n".join(lines), soft_wrap=True)
    for missing in report.missing:
        console.print(f"[yellow]not checked[/]: {escape(f'{missing.what}: {missing.why}.')}", soft_wrap=True)
    console.print(f"[bold {'green' if report.right else 'red'}]{escape(report.verdict)}[/]", soft_wrap=True)


def _cell(result: CheckResult) -> str:
    """Return the worst error and, in brackets, stock's, with one digit: 2e-3."""
    if result.worst is None:
        return f"[bold red]{result.status}[/]"
    error, stock = (
        "0" if x == 0 else f"{x:.0e}".replace("e-0", "e-") for x in (result.worst.error, result.worst.stock)
    )
    figures = f"{error} ({stock})"
    return figures if result.status == "right" else f"[bold red]{result.status} {figures}[/]"


def _machine(facts: dict[str, Any]) -> list[str]:
    """Return `environment`'s facts as lines for a bug report."""
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
