"""The command line: `python -m benchmarks operator | model | kernels | rows | table | plot`."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.benchmark import AnyBenchmark
from benchmarks.cases import DTYPES, Effort, Plan, needs_package
from benchmarks.environment import describe
from benchmarks.kernels import KERNELS
from benchmarks.models import ARCHITECTURES, MODEL, Optimizer
from benchmarks.models import CONTENDERS as MODELS
from benchmarks.operator import OPERATOR
from benchmarks.operator_contenders import CONTENDERS as OPERATORS
from benchmarks.operator_problem import Mode
from benchmarks.results import Run, read
from benchmarks.rows import ROWS, Operation
from benchmarks.tables import absences, markdown, shortfalls

BENCHMARKS: dict[str, AnyBenchmark] = {benchmark.kind: benchmark for benchmark in (OPERATOR, MODEL, KERNELS, ROWS)}

about = "Measures flce beside the bare matrix products, PyTorch and other libraries."
app = typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
option = typer.Option

# What a command gives of the fields of a case: a list has the values that are wanted, anything else replaces the field.
Fields = dict[str, Any]


def measures(benchmark: AnyBenchmark) -> Callable[[Callable[..., Fields]], Callable[..., Fields]]:
    """Makes a command of a function of the options that a benchmark alone has; to them come those of `run_plan`."""

    def register(function: Callable[..., Fields]) -> Callable[..., Fields]:
        own = inspect.signature(function, eval_str=True).parameters
        common = inspect.signature(run_plan, eval_str=True).parameters
        options = [*own.values(), *list(common.values())[2:]]

        def command(**given: Any) -> None:
            fields = function(**{name: given.pop(name) for name in own})
            run_plan(benchmark, fields, **given)

        # Where typer looks for the options.
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
        )
        command.__annotations__ = {each.name: each.annotation for each in options}
        app.command(benchmark.kind, help=function.__doc__)(command)
        return function

    return register


def run_plan(
    benchmark: AnyBenchmark,
    fields: Fields,
    preset: Annotated[str | None, option(help="Cases and effort together; a wrong name lists them.")] = None,
    shape: Annotated[list[str] | None, option(help="Sizes with commas; several times for several.")] = None,
    dtype: Annotated[list[str] | None, option(help=f"Of {', '.join(DTYPES)}; several times for several.")] = None,
    device: Annotated[str, option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int | None, option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[
        float | None, option(help="Timed seconds for each contender and case, after which it sits out.")
    ] = None,
    deadline: Annotated[float | None, option(help="Seconds after which nothing further is begun.")] = None,
    out: Annotated[
        Path | None, option(help="Result file, written anew after every case; results/COMMAND.json.")
    ] = None,
) -> None:
    """Runs the cases, saving after each, and prints their tables; exits with 1 where figures are missing."""
    started, where = time.monotonic(), resolve_device(device)
    cases = chosen(benchmark, fields | {"dtype": dtype}, preset, shape)
    out = out or Path("results") / f"{benchmark.kind}.json"
    run: Run[Any, Any] = Run(benchmark.kind, describe(where, sys.argv[1:]))

    def expired() -> bool:
        return deadline is not None and time.monotonic() - started > deadline

    def say(text: str) -> None:
        typer.echo(f"[{time.monotonic() - started:.0f} s] {text}", err=True)

    # What is not built in half of the time that there is, is built where it is measured.
    built = benchmark.build_ahead([case for case, _ in cases], where, 120.0 if deadline is None else deadline / 2)
    say(built or f"{len(cases)} cases")
    for index, (case, effort) in enumerate(cases):
        if expired():
            names = "; ".join(left.title for left, _ in cases[index:])
            say(f"The deadline of {deadline:g} s has passed; not measured: {names}")
            break
        say(f"case {index + 1} of {len(cases)}: {case.title}")
        wanted = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)
        run.cases.append(benchmark.measure(case, where, wanted, expired))
        run.save(out)
        for table in benchmark.case_tables(run.cases[-1]):
            typer.echo(table.markdown(), err=True)
    closing = benchmark.closing(run)
    for text in [*absences(run), *(table.markdown() for table in closing)]:
        typer.echo(text, err=True)
    say(f"results in {out}")
    missing = sorted({result.contender for result in shortfalls(run)})
    if missing:
        say(f"No figures for {', '.join(missing)}: see the notes above.")
    if missing or len(run.cases) < len(cases) or any(table.failure for table in closing):
        raise typer.Exit(1)


def chosen(benchmark: AnyBenchmark, fields: Fields, preset: str | None, shapes: list[str] | None) -> Plan[Any]:
    """Of the preset those that are wanted; or all that are wanted of the shapes."""
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    choices = {name: value for name, value in fields.items() if isinstance(value, list) and value}
    changes = {name: value for name, value in fields.items() if not isinstance(value, list) and value is not None}
    for name in choices.get("dtype", []):
        if name not in DTYPES:
            raise typer.BadParameter(f"{name!r}: one of {', '.join(DTYPES)}")
    if preset is None:
        if not shapes:
            raise typer.BadParameter("give --preset or --shape")
        every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
        starts = [parse_sizes(text, benchmark.sizes) for text in shapes]
        made = [
            benchmark.case_type(**{**start, **more, **one})
            for start in starts
            for one in every
            for more in benchmark.defaults
        ]
        plan = [(case, benchmark.effort) for case in dict.fromkeys(made)]
    elif preset in benchmark.presets:
        plan = benchmark.presets[preset]()
    else:
        raise typer.BadParameter(f"preset {preset!r}: one of {', '.join(benchmark.presets)}")
    wanted = [pair for pair in plan if all(getattr(pair[0], name) in values for name, values in choices.items())]
    found = [(case, effort) for before, effort in wanted if (case := replace(before, **changes)).asked]
    if not found:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    for case, _ in found:
        try:
            benchmark.check(case)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return found


def parse_sizes(text: str, names: str) -> dict[str, int]:
    parts = text.replace("x", ",").split(",")
    if len(parts) != len(names.split(",")) or not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r}: give {names} as numbers")
    if min(map(int, parts)) < 1:
        raise typer.BadParameter(f"{text!r}: every size must be positive")
    return dict(zip(names.split(","), map(int, parts), strict=True))


def resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise typer.BadParameter(f"device {name!r}: auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("device cuda: there is none here")
    return torch.device(name)


def contenders_of(table: Collection[Any], more: str = "") -> Any:
    return option(help=f"Only these, of {', '.join(contender.name for contender in table)}{more}.")


@measures(OPERATOR)
def operator(
    mode: Annotated[list[Mode] | None, option(help="What a call does.")] = None,
    contender: Annotated[list[str] | None, contenders_of(OPERATORS, ", ours-256MiB, ours-bf16-64MiB")] = None,
    ignored: Annotated[float | None, option(min=0, max=1, help="Share of the labels that are ignored.")] = None,
    logits_std: Annotated[float | None, option(help="Standard deviation of the logits.")] = None,
    errors: Annotated[bool, option("--errors", help="Compare with a float64 oracle.")] = False,
    time_: Annotated[bool, option("--time/--no-time", help="Measure time.")] = True,
) -> Fields:
    """Time, workspace and, with --errors, exactness of forward and backward."""
    asked = {"errors": None if errors else False, "time": None if time_ else False}
    contenders = tuple(contender) if contender else None
    return {"mode": mode, "contenders": contenders, "ignored": ignored, "logits_std": logits_std, **asked}


@measures(MODEL)
def model(
    name: Annotated[list[str] | None, option("--model", help=f"Of {', '.join(ARCHITECTURES)}.")] = None,
    optimizer: Annotated[Optimizer | None, option(help="What ends a step.")] = None,
    contender: Annotated[list[str] | None, contenders_of(MODELS)] = None,
    budget_mib: Annotated[list[int] | None, option(min=1, help="Budgets of flce, each a contender.")] = None,
) -> Fields:
    """Peak memory and tokens a second of the training step of whole models, with random weights."""
    missing = needs_package("transformers", "transformers", cuda=False)(torch.device("cpu"))
    if missing is not None:
        raise typer.BadParameter(f"models need Transformers: {missing}")
    contenders, budgets = (tuple(values) if values else None for values in (contender, budget_mib))
    return {"model": name, "optimizer": optimizer, "contenders": contenders, "budgets_mib": budgets}


@measures(KERNELS)
def kernels() -> Fields:
    """GB/s of the pass over the logits (statistics, gradient, both), beside a copy in the same run."""
    return {}


@measures(ROWS)
def rows(
    operation: Annotated[list[Operation] | None, option(help="Only these.")] = None,
    compiled: Annotated[bool | None, option("--compile/--no-compile", help="torch.compile, at all sizes.")] = None,
) -> Fields:
    """GB/s of losses and softmaxes over the length of a row, beside a copy, PyTorch and Liger."""
    return {"operation": operation, "compiled": compiled}


def load(path: Path) -> tuple[AnyBenchmark, Run[Any, Any]]:
    kind = read(path)["kind"]
    if kind not in BENCHMARKS:
        raise ValueError(f"{path} holds results of {kind!r}: not one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[kind], BENCHMARKS[kind].load(path)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Result files.", exists=True, dir_okay=False)],
    brief: Annotated[bool, option("--brief", help="One line for each timed case.")] = False,
    targets: Annotated[bool, option("--targets", help="Only what is promised; of several files the median.")] = False,
    dominance: Annotated[bool, option("--dominance", help="Only the peers; of several files the median.")] = False,
    out: Annotated[Path | None, option(help="Write here instead of printing.")] = None,
) -> None:
    """Markdown tables from result files; exits with 1 where a workspace is not as planned."""
    loaded = [load(file) for file in files]
    benchmark, runs = loaded[0][0], [run for _, run in loaded]
    if targets or dominance:
        if len({each.kind for each, _ in loaded}) > 1:
            raise typer.BadParameter("the files are of several benchmarks")
        promised = benchmark.targets(runs, brief) if targets else []
        beaten = benchmark.dominance(runs) if dominance else []
        if (targets and not promised) or (dominance and not beaten):
            raise typer.BadParameter(f"nothing of the kind is asked of {benchmark.noun}")
        shown = [*([] for _ in runs[:-1]), promised + beaten]
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
def plot(
    file: Annotated[Path, typer.Argument(help="Result file.", exists=True, dir_okay=False)],
    out: Annotated[Path | None, option(help="PNG; beside the result file by default.")] = None,
) -> None:
    """A picture of time, or speed, against memory; of rows, of bandwidth over their length."""
    benchmark, run = load(file)
    figure = benchmark.figure(run)
    if figure is None:
        raise typer.BadParameter(f"there is no picture of {benchmark.noun}")
    path = out or file.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    typer.echo(f"wrote {path}")
