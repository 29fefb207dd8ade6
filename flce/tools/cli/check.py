"""The command ``flce check``: errors of flce's results on this machine."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Column, Table

from flce.tools.cli.output import (
    Json,
    integer_option,
    machine_lines,
    parse_option,
    print_json,
    print_table,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from flce.tools.check import CheckResult, Figure


def check(
    device: Annotated[
        str | None,
        typer.Option(help="The device to check, such as cpu or cuda:1. Default: a GPU if there is one, and the CPU."),
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

    Example: flce check
    """
    import torch

    from flce.core.devices import find_device
    from flce.tools.check import list_checks, run_split, split_checks
    from flce.tools.machine import environment

    only = None if device is None else parse_option("--device", find_device, device)
    given = {"--device": device, "--processes": processes}
    command = shlex.join(["flce", "check", *(f"{word}" for pair in given.items() if pair[1] for word in pair)])
    divided = parse_option("--processes", split_checks, processes, only) if processes else []
    checks, missing = list_checks({find_device(None), torch.device("cpu")} if only is None else {only})
    torch.set_num_threads(1)  # the checks are so small that several threads would be slower
    shown = track(checks, f"{len(checks)} checks", console=stderr(), transient=True)
    results = [each.run() for each in shown] + (run_split(divided, processes) if processes else [])
    wrong, number = [result for result in results if result.status != "right"], len(results)
    verdict = "Nothing was checked."
    if wrong:
        verdict = f"Something is off: {len(wrong)} of {number} checks did not give what they have to."
    elif results:
        verdict = (
            f"flce is exact here: in {number} checks its results are as close to float64 as those of PyTorch's own "
            "operators or closer, but for roundings, and the same from run to run."
        )
    right, facts = bool(results) and not wrong, environment()
    if json:
        report = {"right": right, "verdict": verdict, "command": command, "environment": facts}
        report["checks"] = [asdict(each) | {"figures": [*map(_figure_json, each.figures)]} for each in results]
        print_json({**report, "not_checked": [{"what": what, "why": why} for what, why in missing.items()]})
    else:
        if results:
            print_table(stdout(), _results_table(results))
        stdout().print(verdict, style="bold green" if right else "bold red", soft_wrap=True)
        lines = [f"$ {command}", *machine_lines(facts), verdict]
        for result in wrong:
            place = f"{result.device}, {result.backend} backend, {result.dtype}, {result.title!r}"
            lines += [f"{result.status}: {place}", *(f"  {sentence}" for sentence in result.wrong)]
        lines += [f"not checked: {what}: {why}" for what, why in missing.items()]
        print("\n".join(["", "For a bug report" if right else "Please report this", "", "```", *lines, "```"]))
    if not right:
        raise typer.Exit(1)


def _results_table(results: list[CheckResult]) -> Table:
    cells: dict[tuple[str, str], dict[str, str]] = {}  # of a row by dtype
    for result in results:
        place = f"{result.device}, {result.backend} backend"
        cells.setdefault((place, result.title), {})[result.dtype] = _cell(result)
    dtypes = dict.fromkeys(result.dtype for result in results)
    columns = (Column(dtype, justify="right", no_wrap=True) for dtype in dtypes)
    caption = "Errors against float64: for each check the error nearest to its limit. In brackets: stock's error."
    table = Table("check", *columns, caption=caption, caption_justify="left", box=None, padding=(0, 2, 0, 0))
    shown = ""
    for (place, title), row in cells.items():
        if place != shown:
            table.add_row(f"[bold]{place}[/]")
        table.add_row(title, *(row.get(dtype, "") for dtype in dtypes))
        shown = place
    return table


def _cell(result: CheckResult) -> str:
    """Return the worst error and, in brackets, stock's error, with one digit: 2e-3."""
    if result.worst is None:
        return f"[bold red]{result.status}[/]"
    error, stock = (
        "0" if x == 0 else f"{x:.0e}".replace("e-0", "e-") for x in (result.worst.error, result.worst.stock)
    )
    figures = f"{error} ({stock})"
    return figures if result.status == "right" else f"[bold red]{result.status} {figures}[/]"


def _figure_json(figure: Figure) -> dict[str, Any]:
    """Return a figure for JSON. JSON has no NaN and no infinities: these become text."""
    finite = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in asdict(figure).items()}
    return {**finite, "off": figure.is_off}
