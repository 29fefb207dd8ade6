"""The command line: `python -m benchmarks quick | table | pages | plot`, and a command for each of `MEASURED`."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import benchmarks
from benchmarks.benchmark import EFFORT, Benchmark, Plan, read, save
from benchmarks.cases import AgreedEffort, Effort
from benchmarks.divergence import DIVERGENCE
from benchmarks.grpo import GRPO
from benchmarks.logprobs import LOGPROBS
from benchmarks.models import MODEL
from benchmarks.operator import OPERATOR
from benchmarks.pages import fill_page
from benchmarks.plots import figure
from benchmarks.quick import quick
from benchmarks.rows import ROWS
from benchmarks.runs import Run, describe_run
from benchmarks.small_card import SMALL_CARD
from benchmarks.split_head import SPLIT_HEAD
from benchmarks.tables import absences, markdown, shortfalls
from benchmarks.wrapped import WRAPPED
from flce.core.devices import find_device
from flce.core.sizes import parse_sizes
from flce.tools.cli.output import parse_option

MEASURED = (OPERATOR, MODEL, ROWS, LOGPROBS, DIVERGENCE, GRPO, SMALL_CARD, SPLIT_HEAD, WRAPPED)
BENCHMARKS: dict[str, Benchmark] = {benchmark.kind: benchmark for benchmark in MEASURED}

app = typer.Typer(help=benchmarks.__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
option = typer.Option
app.command()(quick)


def join_processes() -> torch.device:
    """Initialize the process group. Return the device of this process."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return device


def measure(
    context: typer.Context,
    preset: Annotated[str | None, option(help="Cases and effort; a wrong name lists the presets.")] = None,
    shape: Annotated[list[str] | None, option(help="Sizes with commas; may be repeated.")] = None,
    changes: Annotated[
        list[str] | None, option("--set", metavar="NAME=VALUES", help="Values of a field of every case, with commas.")
    ] = None,
    device: Annotated[str | None, option(help="cpu or cuda; cuda if available.")] = None,
    rounds: Annotated[int | None, option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[float | None, option(min=0.0, help="Most seconds of timed calls of a contender.")] = None,
    deadline: Annotated[float | None, option(help="Seconds after which no call begins.")] = None,
    out: Annotated[Path | None, option(help="Result file, saved after every case; results/COMMAND.json.")] = None,
) -> None:
    """Measure the cases, save after each, and print their tables; exit with 1 if figures are missing."""
    started, several = time.monotonic(), dist.is_torchelastic_launched()
    where = join_processes() if several else parse_option("--device", find_device, device, ("cuda", "cpu"))
    is_first = not several or dist.get_rank() == 0
    benchmark = BENCHMARKS[str(context.info_name)]
    cases = choose_cases(benchmark, preset, shape, changes or ())
    until = math.inf if deadline is None else started + deadline
    out = out or Path("results") / f"{benchmark.kind}.json"
    launcher = f"torch.distributed.run --nproc-per-node {dist.get_world_size()} -m " if several else ""
    benchmark.begin(where)
    run = Run(benchmark.kind, describe_run(where, f"python -m {launcher}benchmarks", sys.argv[1:]))

    def show(*texts: str) -> None:
        if is_first:
            typer.echo("\n".join(texts), err=True)

    def report(text: str) -> None:
        show(f"[{time.monotonic() - started:.0f} s] {text}")

    for index, (case, effort) in enumerate(cases):
        limit = effort.seconds if seconds is None else seconds
        effort = (AgreedEffort if several else Effort)(rounds or effort.rounds, limit, until)
        if effort.expired():
            names = "; ".join(left.title for left, _ in cases[index:])
            report(f"The deadline of {deadline:g} s has passed; not measured: {names}")
            break
        report(f"case {index + 1} of {len(cases)}: {case.title}")
        run.cases.append(benchmark.measure(case, where, effort))
        if is_first:
            save(run, out)
        show(benchmark.table(run.cases[-1]).markdown())
    closing = benchmark.tables(run, True)
    show(*absences(run), *(table.markdown() for table in closing))
    report(f"results in {out}")
    if several:
        dist.destroy_process_group()
    missing = sorted({result.contender for result in shortfalls(run)})
    if missing:
        report(f"No figures for {', '.join(missing)}: see the notes above.")
    if missing or len(run.cases) < len(cases) or any(table.failure for table in closing):
        raise typer.Exit(1)


for benchmark in MEASURED:
    app.command(benchmark.kind, help=benchmark.about)(measure)


def parse_value(text: str) -> Any:
    """Return a number, True, False or None, or else the text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def parse_changes(benchmark: Benchmark, changes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of the fields. A field that is a tuple gets all of its values."""
    kinds, found = {field.name: str(field.type) for field in fields(benchmark.case_type)}, {}
    for text in changes:
        name, _, listed = text.partition("=")
        if name not in kinds:
            raise typer.BadParameter(f"{benchmark.kind}: no field {name!r}; expected one of {', '.join(kinds)}")
        values = [parse_value(value) for value in listed.split(",")]
        found[name] = [tuple(values)] if kinds[name].startswith("tuple") else values
    return (dict(zip(found, values, strict=True)) for values in itertools.product(*found.values()))


def choose_cases(
    benchmark: Benchmark, preset: str | None, shapes: Sequence[str] | None, changes: Sequence[str]
) -> Plan:
    """Return the cases of the preset, or of the shapes, with these fields changed."""
    if (preset is None) == (not shapes):
        raise typer.BadParameter("give --preset or --shape" + (", not both" if shapes else ""))
    if preset is None:
        names = benchmark.sizes.split(",")
        sizes = [parse_option("--shape", parse_sizes, text, benchmark.sizes) for text in shapes or ()]
        cases = [{**dict(zip(names, size, strict=True)), **more} for size in sizes for more in benchmark.defaults]
        plan = [(benchmark.case_type(**case), EFFORT) for case in cases]
    elif preset in benchmark.presets:
        plan = benchmark.presets[preset]()
    else:
        raise typer.BadParameter(f"--preset: expected one of {', '.join(benchmark.presets)}, got {preset!r}")
    changed = list(parse_changes(benchmark, changes))
    found = {replace(case, **values): effort for case, effort in plan for values in changed}
    plan = [(case, effort) for case, effort in found.items() if case.is_measured]
    if not plan:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    for case, _ in plan:
        try:
            benchmark.check(case)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return plan


def load(path: Path) -> tuple[Benchmark, Run]:
    kind = read(path)["kind"]
    if kind not in BENCHMARKS:
        raise ValueError(f"{path} holds results of {kind!r}: expected one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[kind], BENCHMARKS[kind].load(path)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Result files.", exists=True, dir_okay=False)],
    brief: Annotated[bool, option("--brief", help="One row for each timed case.")] = False,
    out: Annotated[Path | None, option(help="Write to this file instead of printing.")] = None,
) -> None:
    """Print Markdown tables of result files; exit with 1 if a workspace differs from its plan."""
    loaded = [load(file) for file in files]
    shown = [(run, benchmark.tables(run, brief)) for benchmark, run in loaded]
    text = "\n".join(markdown(run, tables) for run, tables in shown)
    if out is None:
        typer.echo(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    if any(table.failure for _, tables in shown for table in tables):
        raise typer.Exit(1)


@app.command()
def pages(
    files: Annotated[list[Path], typer.Argument(help="Pages with marked blocks.", exists=True, dir_okay=False)],
) -> None:
    """Rewrite the tables of pages from the result files that the pages name."""
    for file in files:
        file.write_text(fill_page(file.read_text()))


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="Result file.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, option(help="PNG; beside the result file by default.")] = None,
) -> None:
    """Draw time against workspace of a run of the operator."""
    benchmark, run = load(file)
    if benchmark is not OPERATOR:
        raise typer.BadParameter(f"{benchmark.kind!r} has no picture")
    path = out or file.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(run).savefig(path, dpi=110)
    typer.echo(f"wrote {path}")
