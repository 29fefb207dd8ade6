"""``flce bench``: the fused loss beside the bare matrix products, PyTorch and the libraries that are installed."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flce.tools.cli.output import Dtype, Json, check_picture, finite, given, print_json, stderr, stdout

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
        list[str] | None, option(metavar="SIZE", help="Also flce with at most this workspace: 256MiB or 1.5GiB, say.")
    ] = None,
    contender: Annotated[
        list[str] | None, option(metavar="NAME", help="Only this one and the bare products; a wrong name lists all.")
    ] = None,
    errors: Annotated[
        bool | None,
        option("--errors/--no-errors", help="Compare with float64. (default: where that takes seconds)"),
    ] = None,
    seconds: Annotated[
        float, option(min=0.0, callback=finite, help="Timed seconds for each contender, after its first call.")
    ] = 1.0,
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
    from flce.tools.cli import bench_run

    if plot is not None:
        check_picture("--plot", plot)
    where = given("--device", find_device, device, ("cuda", "cpu"))
    modes = [each.value for each in mode or [CallMode["forward+backward"]]]
    cases = bench_run.cases_of(where, shape or [], dtype and dtype.value, modes, budget or [], contender or [], errors)
    run = bench_run.measured(cases, where, Effort(ROUNDS, seconds))
    wrong = [fault for entry in run.cases for fault in faults(entry)]
    if json:
        print_json({**run.to_dict(), "found_wrong": wrong})
    else:
        bench_run.show(run, wrong, stdout())
    if plot is not None:
        bench_run.draw(run, plot, stderr())
    if wrong:
        raise typer.Exit(1)
