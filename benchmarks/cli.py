"""The command line: `python -m benchmarks quick | operator | model | rows | logprobs | grpo | table | pages | plot`."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.benchmark import Benchmark, Plan, read, save
from benchmarks.grpo import GRPO
from benchmarks.logprobs import LOGPROBS
from benchmarks.models import MODEL
from benchmarks.operator import OPERATOR
from benchmarks.pages import filled
from benchmarks.quick import quick
from benchmarks.reports import markdown, shortfalls
from benchmarks.rows import ROWS
from benchmarks.runs import Run, described_run
from benchmarks.tables import absences
from flce.core.devices import find_device
from flce.core.sizes import parse_sizes
from flce.tools.cli.output import given

BENCHMARKS: dict[str, Benchmark] = {benchmark.kind: benchmark for benchmark in (OPERATOR, MODEL, ROWS, LOGPROBS, GRPO)}

about = "Measures flce beside the bare matrix products, PyTorch and other libraries."
app = typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
option = typer.Option
app.command()(quick)


def finite(value: float | None) -> float | None:
    """The callback of an option: infinity and NaN are refused."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def measure(
    context: typer.Context,
    preset: Annotated[str | None, option(help="Cases and effort together; a wrong name lists them.")] = None,
    shape: Annotated[list[str] | None, option(help="Sizes with commas; several times for several.")] = None,
    device: Annotated[str | None, option(help="cpu or cuda; cuda where there is one.")] = None,
    rounds: Annotated[int | None, option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[
        float | None,
        option(min=0.0, callback=finite, help="Timed seconds for each contender and case, after which it sits out."),
    ] = None,
    deadline: Annotated[
        float | None, option(callback=finite, help="Seconds after which nothing further is begun.")
    ] = None,
    out: Annotated[
        Path | None, option(help="Result file, written anew after every case; results/COMMAND.json.")
    ] = None,
    # Only these cases: several times for several, and a wrong name lists all.
    dtype: Annotated[list[str] | None, option(help="float32, say.")] = None,
    mode: Annotated[list[str] | None, option(help="operator: what a call does.")] = None,
    model: Annotated[list[str] | None, option(help="model, grpo: whose training step.")] = None,
    feature: Annotated[list[str] | None, option(help="operator: what a call has beside head and labels.")] = None,
    operation: Annotated[list[str] | None, option(help="rows: a loss or a softmax.")] = None,
    # What is changed of the cases.
    contender: Annotated[list[str] | None, option(help="operator, model: only these; a wrong name lists all.")] = None,
    ignored: Annotated[float | None, option(min=0, max=1, help="operator: share of the labels ignored.")] = None,
    logits_std: Annotated[
        float | None, option(callback=finite, help="operator: standard deviation of the logits.")
    ] = None,
    errors: Annotated[bool, option("--errors", help="operator: compare with a float64 oracle.")] = False,
    calls: Annotated[bool, option("--calls", help="operator: also time of the host, and in a CUDA graph.")] = False,
    own_products: Annotated[
        bool | None, option("--own-products/--no-own-products", help="operator: flce with or without its own products.")
    ] = None,
    no_time: Annotated[bool, option("--no-time", help="operator: do not measure time.")] = False,
    optimizer: Annotated[str | None, option(help="model: what ends a step: none, sgd, sgd-momentum or adamw.")] = None,
    budget_mib: Annotated[list[int] | None, option(min=1, help="model: budgets, each a contender.")] = None,
    compiled: Annotated[bool | None, option("--compile/--no-compile", help="rows: torch.compile, everywhere.")] = None,
) -> None:
    """Runs the cases, saving after each, and prints their tables; exits with 1 where figures are missing."""
    started, where = time.monotonic(), given("--device", find_device, device, ("cuda", "cpu"))
    benchmark = BENCHMARKS[str(context.info_name)]
    only = {"dtype": dtype, "mode": mode, "model": model, "feature": feature, "operation": operation}
    changes = {
        "contenders": tuple(contender or ()),
        "ignored": ignored,
        "logits_std": logits_std,
        "time": False if no_time else None,
        "calls": calls or None,
        "own_products": own_products,
        "optimizer": optimizer,
        "budgets_mib": tuple(budget_mib or ()),
        "compiled": compiled,
    }
    # The cases of the operator say where there are errors to be had; the others have none.
    if errors != (benchmark is OPERATOR):
        changes["errors"] = errors
    cases = chosen(benchmark, asked_for(only), asked_for(changes), preset, shape)
    until = None if deadline is None else started + deadline
    out = out or Path("results") / f"{benchmark.kind}.json"
    run = Run(benchmark.kind, described_run(where, "python -m benchmarks", sys.argv[1:]))

    def say(text: str) -> None:
        typer.echo(f"[{time.monotonic() - started:.0f} s] {text}", err=True)

    for index, (case, effort) in enumerate(cases):
        effort = replace(effort, **asked_for({"rounds": rounds, "seconds": seconds, "until": until}))
        if effort.expired():
            names = "; ".join(left.title for left, _ in cases[index:])
            say(f"The deadline of {deadline:g} s has passed; not measured: {names}")
            break
        say(f"case {index + 1} of {len(cases)}: {case.title}")
        run.cases.append(benchmark.measure(case, where, effort))
        save(run, out)
        for table in benchmark.case_tables(run.cases[-1]):
            typer.echo(table.markdown(), err=True)
    closing = benchmark.tables(run, True)
    for text in [*absences(run), *(table.markdown() for table in closing)]:
        typer.echo(text, err=True)
    say(f"results in {out}")
    missing = sorted({result.contender for result in shortfalls(run)})
    if missing:
        say(f"No figures for {', '.join(missing)}: see the notes above.")
    if missing or len(run.cases) < len(cases) or any(table.failure for table in closing):
        raise typer.Exit(1)


for each in BENCHMARKS.values():
    app.command(each.kind, help=each.about)(measure)


def asked_for(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [], ())}


def chosen(
    benchmark: Benchmark,
    only: dict[str, list[str]],
    changes: dict[str, Any],
    preset: str | None,
    shapes: Sequence[str] | None,
) -> Plan:
    """The cases that are wanted of the preset, or of the shapes; with these fields changed."""
    foreign = {*only, *changes} - {field.name for field in fields(benchmark.case_type)}
    if foreign:
        raise typer.BadParameter(f"{benchmark.noun}: no such thing as {', '.join(sorted(foreign))}")
    if (preset is None) == (not shapes):
        raise typer.BadParameter("give --preset or --shape" + (", not both" if shapes else ""))
    names = benchmark.sizes.split(",")
    if preset is None:
        parsed = [given("--shape", parse_sizes, text, benchmark.sizes) for text in shapes or ()]
        which = [dict(zip(only, values, strict=True)) for values in itertools.product(*only.values())]
        made = [
            benchmark.case_type(**dict(zip(names, sizes, strict=True)), **{**more, **values})
            for sizes in parsed
            for values in which
            for more in benchmark.defaults
        ]
        plan = [(case, benchmark.effort) for case in dict.fromkeys(made)]
    elif preset in benchmark.presets:
        plan = benchmark.presets[preset]()
    else:
        raise typer.BadParameter(f"preset {preset!r}: one of {', '.join(benchmark.presets)}")
    wanted = [pair for pair in plan if all(getattr(pair[0], name) in values for name, values in only.items())]
    found = [(case, effort) for before, effort in wanted if (case := replace(before, **changes)).asked]
    if not found:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    for case, _ in found:
        try:
            benchmark.check(case)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return found


def load(path: Path) -> tuple[Benchmark, Run]:
    kind = read(path)["kind"]
    if kind not in BENCHMARKS:
        raise ValueError(f"{path} holds results of {kind!r}: not one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[kind], BENCHMARKS[kind].load(path)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Result files.", exists=True, dir_okay=False)],
    brief: Annotated[bool, option("--brief", help="One line for each timed case.")] = False,
    targets: Annotated[bool, option("--targets", help="Only what is promised; of several files the median.")] = False,
    out: Annotated[Path | None, option(help="Write here instead of printing.")] = None,
) -> None:
    """Markdown tables from result files; exits with 1 where a workspace is not as planned."""
    loaded = [load(file) for file in files]
    benchmark, runs = loaded[0][0], [run for _, run in loaded]
    if targets:
        if len({each.kind for each, _ in loaded}) > 1:
            raise typer.BadParameter("the files are of several benchmarks")
        if benchmark.targets is None:
            raise typer.BadParameter(f"nothing is promised of {benchmark.noun}")
        shown = [*([] for _ in runs[:-1]), benchmark.targets(runs, brief)]
    else:
        shown = [each.tables(run, brief) for each, run in loaded]
    text = "\n".join(markdown(run, tables) for run, tables in zip(runs, shown, strict=True))
    if out is None:
        typer.echo(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    if any(one.failure for tables in shown for one in tables):
        raise typer.Exit(1)


@app.command()
def pages(
    files: Annotated[list[Path], typer.Argument(help="Pages with marked blocks.", exists=True, dir_okay=False)],
) -> None:
    """Writes the tables of pages anew from the result files that are named there."""
    for file in files:
        file.write_text(filled(file.read_text()))


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="Result file.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, option(help="PNG; beside the result file by default.")] = None,
) -> None:
    """A picture of time, or speed, against memory; of rows, of bandwidth over their length."""
    benchmark, run = load(file)
    path = out or file.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    benchmark.figure(run).savefig(path, dpi=110)
    typer.echo(f"wrote {path}")
