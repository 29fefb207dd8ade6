"""``flce check``: whether flce is exact on this machine."""

from __future__ import annotations

import contextlib
import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from flce.core.sizes import size_text
from flce.tools.cli.output import Json, parse_option, print_json, print_table, stderr, stdout

if TYPE_CHECKING:
    from flce.tools.check.checks import CheckResult, Figure

MOST = 20  # of the wrong checks in a bug report


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
    from flce.tools.machine import environment, use_threads

    one = None if device is None else parse_option("--device", find_device, device)
    words = ["flce", "check", *(["--quick"] if quick else []), *(["--device", device] if device else [])]
    words += ["--processes", str(processes)] if processes else []
    command, facts = shlex.join(words), environment()
    checks, missing = suite.list_checks(one, quick)
    divided = parse_option("--processes", split.split_checks, processes, one) if processes else []
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=stderr(), transient=True) as bar:
        shown, results = bar.add_task("", total=len(checks) + len(divided)), []
        # The quick checks are so small that threads which wait for each other take longer than the work.
        with use_threads(1) if quick else contextlib.nullcontext():
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
        told = {"right": right, "verdict": verdict, "command": command, "environment": facts}
        told["checks"] = [asdict(each) | {"figures": [*map(_figure, each.figures)]} for each in results]
        print_json({**told, "not_checked": [asdict(each) for each in missing]})
    else:
        _show(results)
        stdout().print(verdict, style="bold green" if right else "bold red", soft_wrap=True)
        lines = [f"$ {command}", *_machine(facts), verdict]
        for result in wrong[:MOST]:
            lines.append(
                f"{result.status}: {result.device}, {result.backend} backend, {result.dtype}, {result.title!r}"
            )
            lines += [f"  {line}" for line in (*result.wrong, result.plan) if line]
        if len(wrong) > MOST:
            lines.append(f"and {len(wrong) - MOST} further checks, which --json lists")
        lines += [f"not checked: {each.what}: {each.why}" for each in missing]
        print(f"\n{'For a bug report' if right else 'Please report this'}:\n")
        print("\n".join(["```", *lines, "```"]))
    if not right:
        raise typer.Exit(1)


def _show(every: list[CheckResult]) -> None:
    """Print a table for each device and backend."""
    console = stdout()
    places: dict[str, list[CheckResult]] = {}
    for result in every:
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
        legend = "Errors against float64, of each check the one that is nearest to its limit. In brackets: stock's."
        console.print(legend, style="dim")


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


def _figure(figure: Figure) -> dict[str, Any]:
    """JSON has no NaN and no infinities: they become text."""
    finite = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in asdict(figure).items()}
    return {**finite, "off": figure.is_off}
