"""The command ``flce check``: errors of flce's results on this machine."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from flce.core.sizes import size_text
from flce.tools.cli.output import Json, integer_option, parse_option, print_json, print_table, stderr, stdout

if TYPE_CHECKING:
    from flce.tools.check.checks import CheckResult, Figure

MAX_REPORTED = 20  # wrong checks in a bug report


def check(
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the most important checks: about 10 s instead of one to two minutes.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="The device to check, such as cpu or cuda:0. Default: one GPU of each kind, and the CPU."),
    ] = None,
    processes: Annotated[
        int | None,
        integer_option(2, help="Also check a head that is divided over this many processes: GPUs, or gloo on a CPU."),
    ] = None,
    json: Json = False,
) -> None:
    """Check losses and gradients on this machine: both backends, every dtype, and a patched model.

    flce and stock (PyTorch's operators) are compared with float64. The exit status is 1 if a result of flce is further
    from float64 than stock's result, or differs in a second run. The output ends with text for a bug report.

    Example: flce check --quick
    """
    import torch

    from flce.core.devices import find_device
    from flce.tools.check import processes as split
    from flce.tools.check import suite
    from flce.tools.machine import environment

    only = None if device is None else parse_option("--device", find_device, device)
    words = ["flce", "check", *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    words += ["--processes", str(processes)] if processes else []
    command, facts = shlex.join(words), environment()
    checks, missing = suite.list_checks(only, quick)
    divided = parse_option("--processes", split.split_checks, processes, only) if processes else []
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=stderr(), transient=True) as bar:
        shown, results = bar.add_task("", total=len(checks) + len(divided)), []
        if quick:  # these checks are so small that several threads would be slower
            torch.set_num_threads(1)
        for each in checks:
            bar.update(shown, advance=1, description=f"{each.inputs.device} {each.backend} {each.title}")
            results.append(each.run())
        if processes:
            bar.update(shown, description="a divided head")
            results += split.run_split(divided, processes)
    wrong, number = [result for result in results if result.status != "right"], len(results)
    verdict = "Nothing was checked."
    if wrong:
        verdict = f"Something is off: {len(wrong)} of {number} checks did not give what they have to."
    elif results:
        verdict = (
            f"flce is exact here: in {number} checks its results are as close to float64 as those of PyTorch's own "
            "operators or closer, but for roundings, and the same from run to run."
        )
    right = bool(results) and not wrong
    if json:
        report = {"right": right, "verdict": verdict, "command": command, "environment": facts}
        report["checks"] = [asdict(each) | {"figures": [*map(_figure_json, each.figures)]} for each in results]
        print_json({**report, "not_checked": [asdict(each) for each in missing]})
    else:
        _print_results(results)
        stdout().print(verdict, style="bold green" if right else "bold red", soft_wrap=True)
        lines = [f"$ {command}", *_machine_lines(facts), verdict]
        for result in wrong[:MAX_REPORTED]:
            lines.append(
                f"{result.status}: {result.device}, {result.backend} backend, {result.dtype}, {result.title!r}"
            )
            lines += [f"  {line}" for line in (*result.wrong, result.plan) if line]
        if len(wrong) > MAX_REPORTED:
            lines.append(f"and {len(wrong) - MAX_REPORTED} further checks, which --json lists")
        lines += [f"not checked: {each.what}: {each.why}" for each in missing]
        print(f"\n{'For a bug report' if right else 'Please report this'}:\n")
        print("\n".join(["```", *lines, "```"]))
    if not right:
        raise typer.Exit(1)


def _print_results(all_results: list[CheckResult]) -> None:
    """Print a table for each device and backend."""
    console = stdout()
    places: dict[str, list[CheckResult]] = {}
    for result in all_results:
        places.setdefault(f"{result.device}, {result.backend} backend", []).append(result)
    for place, results in places.items():
        dtypes = list(dict.fromkeys(result.dtype for result in results))
        cells = {(result.title, result.dtype): _cell(result) for result in results}
        columns = (Column(dtype, justify="right", no_wrap=True) for dtype in dtypes)
        table = Table("check", *columns, title=place, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in dict.fromkeys(result.title for result in results):
            table.add_row(name, *(cells.get((name, dtype), "") for dtype in dtypes))
        print_table(console, table)
    if places:
        legend = "Errors against float64: for each check the error nearest to its limit. In brackets: stock's error."
        console.print(legend, style="dim")


def _cell(result: CheckResult) -> str:
    """Return the worst error and, in brackets, stock's error, with one digit: 2e-3."""
    if result.worst is None:
        return f"[bold red]{result.status}[/]"
    error, stock = (
        "0" if x == 0 else f"{x:.0e}".replace("e-0", "e-") for x in (result.worst.error, result.worst.stock)
    )
    figures = f"{error} ({stock})"
    return figures if result.status == "right" else f"[bold red]{result.status} {figures}[/]"


def _machine_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of `machine.environment` as lines for a bug report."""
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


def _figure_json(figure: Figure) -> dict[str, Any]:
    """Return a figure for JSON. JSON has no NaN and no infinities: these become text."""
    finite = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in asdict(figure).items()}
    return {**finite, "off": figure.is_off}
