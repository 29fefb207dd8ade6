"""`python -m benchmarks quick`: one call of the loss on this machine, by flce and by every installed contender."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import tables
from benchmarks.benchmark import save
from benchmarks.cases import Effort
from benchmarks.contenders import PEERS, budget_name
from benchmarks.operator import FLOORS, NAMES, OPERATOR, OURS, table
from benchmarks.plots import figure
from benchmarks.problem import OperatorCase, Shape
from benchmarks.runs import Run, describe_run
from benchmarks.tables import shortfalls
from flce.core.devices import find_device
from flce.core.sizes import GIB, MIB, parse_bytes, parse_sizes, size_text
from flce.tools.cli.output import parse_option, usage_error
from flce.tools.machine import DTYPES

EFFORT = Effort(rounds=50, seconds=1.0)
COLUMNS = ("", "median ms", "x products", "x stock", "MiB", *NAMES.values())
option = typer.Option


def quick(
    shape: Annotated[
        str | None, option(metavar="N,H,V", help="Tokens, hidden size, vocabulary.", show_default="by device")
    ] = None,
    dtype: Annotated[str | None, option(show_default="bfloat16; on a CPU float32")] = None,
    device: Annotated[str | None, option(help="cpu or cuda:0, say.", show_default="cuda if available")] = None,
    budget: Annotated[
        list[str] | None, option(metavar="SIZE", help="Also flce with at most this workspace: 256MiB, say.")
    ] = None,
    out: Annotated[Path, option(help="Result file. The picture is beside it.")] = Path("results/quick.json"),
) -> None:
    """Measure one shape in less than a minute: time, workspace and exactness, as a table and as a picture.

    Exit status 1: a call of flce failed.
    """
    where = parse_option("--device", find_device, device, ("cuda", "cpu"))
    tokens, hidden, vocab = parse_option("--shape", parse_sizes, shape) if shape else default_shape(where)
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if dtype not in DTYPES:
        raise usage_error("--dtype", f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    budgets = [budget_name(parse_option("--budget", parse_mebibytes, text)) for text in budget or ()]
    case = OperatorCase(tokens, hidden, vocab, dtype, contenders=(*FLOORS, OURS, *budgets, "stock", *PEERS))
    # Hidden states and head, and their gradients.
    needed, available = 2 * (tokens + vocab) * hidden * case.torch_dtype.itemsize, memory_of(where)
    if needed > available:
        figures = f"{size_text(needed)}, and {where} has {size_text(available)}"
        raise usage_error("--shape", f"{case.title}: operands and gradients take {figures}: give smaller sizes")
    case = replace(case, errors=float64_is_cheap(case, where))

    run = Run(OPERATOR.kind, describe_run(where, "python -m benchmarks", sys.argv[1:]))
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), current:  # libraries print to stdout
        run.cases.append(OPERATOR.measure(case, where, EFFORT))
    save(run, out)
    typer.echo(f"{tables.measured_on(run)}\n\n{table(run.cases[0], COLUMNS).markdown(aligned=True)}")
    typer.echo("\n".join(tables.absences(run)))
    picture = out.with_suffix(".png")
    figure(run).savefig(picture, dpi=110)
    typer.echo(f"wrote {out} and {picture}", err=True)
    if shortfalls(run):
        raise typer.Exit(1)


# Flops of the float64 products: three seconds on a CPU; on a GPU half a second, or fifteen without float64 units.
CHEAP_FLOPS = {"cpu": 2e11, "cuda": 2e13}
CHEAP_SHARE = 0.25  # of the memory


def default_shape(device: torch.device) -> Shape:
    """Return a shape that takes half a minute: a head of Llama 3 on a GPU, a smaller one on a CPU."""
    if device.type == "cpu":
        return 512, 512, 32000
    return (4096, 4096, 128256) if memory_of(device) >= 32 * GIB else (2048, 2048, 128256)


def memory_of(device: torch.device) -> int:
    """Return the bytes of the device; for a CPU of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse_mebibytes(text: str) -> int:
    if (size := parse_bytes(text)) < MIB:
        raise ValueError(f"expected at least 1MiB, got {text!r}")
    return size // MIB


def float64_is_cheap(case: OperatorCase, device: torch.device) -> bool:
    flops, entries = 6 * math.prod(case.shape), (case.tokens + case.vocab) * case.hidden
    return flops <= CHEAP_FLOPS[device.type] and 16 * entries <= CHEAP_SHARE * memory_of(device)
