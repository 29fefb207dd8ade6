"""The command line: `python -m benchmarks operator | model | kernels | rows | table | plot`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.benchmark import AnyBenchmark, read
from benchmarks.cases import DTYPES, Case, Effort, Plan
from benchmarks.contenders import needs_package
from benchmarks.environment import describe
from benchmarks.kernels import KERNELS, KernelCase
from benchmarks.model_contenders import CONTENDERS as MODELS
from benchmarks.model_contenders import select as select_models
from benchmarks.model_problem import ARCHITECTURES, ModelCase, Optimizer
from benchmarks.models import MODEL
from benchmarks.operator import OPERATOR
from benchmarks.operator_contenders import CONTENDERS as OPERATORS
from benchmarks.operator_contenders import budget_name, select
from benchmarks.operator_problem import Mode, OperatorCase
from benchmarks.results import Run
from benchmarks.rounds import Watch
from benchmarks.row_build import build_ahead, default_workers
from benchmarks.row_problem import Operation, RowCase
from benchmarks.rows import ROWS
from benchmarks.tables import absences, markdown, shortfalls

BENCHMARKS: dict[str, AnyBenchmark] = {benchmark.kind: benchmark for benchmark in (OPERATOR, MODEL, KERNELS, ROWS)}

about = "Measures flce beside the bare matrix products, PyTorch and other libraries."
app = typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
option = typer.Option
NAMES = ", ".join(DTYPES)
BUDGETS = f"{budget_name(256)} or, with bfloat16 sums, {budget_name(64, bfloat16_sums=True)}"


def names_of(table: Iterable[Any]) -> str:
    return ", ".join(contender.name for contender in table)


Preset = Annotated[str | None, option(help="Cases and effort together; a wrong name lists them.")]
Shapes = Annotated[list[str] | None, option("--shape", help="Sizes with commas; several times for several.")]
Dtype = Annotated[str | None, option(help=f"One of {NAMES}.")]
Dtypes = Annotated[list[str] | None, option("--dtype", help=f"Of {NAMES}; several times for several.")]
Device = Annotated[str, option(help="auto, cpu or cuda.")]
Rounds = Annotated[int | None, option(min=1, help="Rounds over the contenders.")]
Seconds = Annotated[float | None, option(help="Timed seconds for each contender and case, after which it sits out.")]
Deadline = Annotated[float | None, option(help="Seconds after which nothing further is begun.")]
Out = Annotated[Path | None, option(help="Result file, written anew after every case; results/COMMAND.json.")]


@dataclass(frozen=True)
class Common:
    """What every benchmark is asked for."""

    preset: str | None
    shapes: list[str] | None
    device: str
    rounds: int | None
    seconds: float | None
    deadline: float | None
    out: Path | None


@app.command()
def operator(
    preset: Preset = None,
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    mode: Annotated[list[Mode] | None, option(help="What a call does.")] = None,
    contender: Annotated[list[str] | None, option(help=f"Of {names_of(OPERATORS)}, {BUDGETS}.")] = None,
    device: Device = "auto",
    threads: Annotated[int | None, option(min=1, help="Threads of PyTorch on the CPU.")] = None,
    rounds: Rounds = None,
    seconds: Seconds = None,
    ignored: Annotated[float | None, option(min=0, max=1, help="Share of the labels that are ignored.")] = None,
    logits_std: Annotated[float, option(help="Standard deviation of the logits.")] = 4.0,
    upstream: Annotated[float | None, option(help="Gradient at the loss, such as 65536 for float16.")] = None,
    budget_mib: Annotated[int | None, option(help="Workspace budget of our memory-saving contender.")] = None,
    errors: Annotated[bool, option("--errors", help="Compare with a float64 oracle.")] = False,
    time_: Annotated[bool, option("--time/--no-time", help="Measure time.")] = True,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """Time, workspace and, with --errors, exactness of forward and backward."""

    def made(*sizes: Any) -> list[OperatorCase]:
        pairs = [(dtype, one) for dtype in dtypes or ["bfloat16"] for one in mode or [Mode.forward_backward]]
        return [replace(OperatorCase(*sizes), dtype=dtype, mode=one, errors=True) for dtype, one in pairs]

    def changed(case: OperatorCase) -> OperatorCase | None:
        case = replace(
            case,
            ignored=case.ignored if ignored is None else ignored,
            logits_std=logits_std,
            upstream=case.upstream if upstream is None else upstream,
            budget_mib=budget_mib or case.budget_mib,
            time=case.time and time_,
            errors=case.errors and errors,
            contenders=tuple(contender) if contender else case.contenders,
        )
        wanted = among(case.dtype, dtypes) and among(case.mode, mode)
        return case if wanted and (case.time or case.errors) else None

    check(select, contender)
    check_dtypes(dtypes)
    if threads is not None:
        torch.set_num_threads(threads)
    common = Common(preset, shapes, device, rounds, seconds, deadline, out)
    run_plan(OPERATOR, common, "tokens,hidden,vocab", made, Effort(10, 10.0), changed)


@app.command()
def model(
    preset: Preset = None,
    name: Annotated[list[str] | None, option("--model", help=f"Of {', '.join(ARCHITECTURES)}.")] = None,
    shapes: Shapes = None,
    dtype: Dtype = None,
    optimizer: Annotated[Optimizer, option(help="What ends a step.")] = Optimizer.none,
    contender: Annotated[list[str] | None, option(help=f"Only these, of {names_of(MODELS)}.")] = None,
    budget_mib: Annotated[list[int] | None, option(min=1, help="Budgets of flce, each a contender.")] = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seconds: Seconds = None,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """Peak memory and tokens a second of the training step of whole models, with random weights."""

    def changed(case: ModelCase) -> ModelCase | None:
        case = replace(
            case,
            dtype=dtype or case.dtype,
            optimizer=optimizer,
            budgets_mib=tuple(budget_mib) if budget_mib else case.budgets_mib,
            contenders=tuple(contender) if contender else case.contenders,
        )
        return case if among(case.model, name) else None

    missing = needs_package("transformers", "transformers", cuda=False)(torch.device("cpu"))
    if missing is not None:
        raise typer.BadParameter(f"models need Transformers: {missing}")
    for one in name or []:
        if one not in ARCHITECTURES:
            raise typer.BadParameter(f"{one!r}: one of {', '.join(ARCHITECTURES)}")
    if preset is None and not (name and shapes):
        raise typer.BadParameter("give --preset, or --model and --shape")
    check(select_models, contender)
    check_dtypes([dtype] if dtype else None)
    common = Common(preset, shapes, device, rounds, seconds, deadline, out)
    made = lambda *sizes: [ModelCase(one, *sizes) for one in name or []]  # noqa: E731
    run_plan(MODEL, common, "batch,sequence", made, Effort(5, 10.0), changed)


@app.command()
def kernels(
    preset: Preset = None,
    shapes: Shapes = None,
    dtype: Dtype = None,
    grad_dtype: Annotated[str | None, option(help="Of the gradient, if it is not written over them.")] = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seconds: Seconds = None,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """GB/s of the pass over the logits (statistics, gradient, both), beside a copy in the same run."""

    def changed(case: KernelCase) -> KernelCase:
        return replace(case, dtype=dtype or case.dtype, grad_dtype=grad_dtype or case.grad_dtype)

    check_dtypes([one for one in (dtype, grad_dtype) if one])
    common = Common(preset, shapes, device, rounds, seconds, deadline, out)
    made = lambda tokens, vocab: [KernelCase(tokens, vocab, vocab)]  # noqa: E731
    run_plan(KERNELS, common, "tokens,vocab", made, Effort(10, 5.0), changed)


@app.command()
def rows(
    preset: Preset = None,
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    operation: Annotated[list[Operation] | None, option(help="Only these.")] = None,
    compiled: Annotated[bool | None, option("--compile/--no-compile", help="torch.compile, at all sizes.")] = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seconds: Seconds = None,
    workers: Annotated[int | None, option(min=0, help="Processes that compile ahead; by default for a GPU.")] = None,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """GB/s of losses and softmaxes over the length of a row, beside a copy, PyTorch and Liger."""

    def changed(case: RowCase) -> RowCase | None:
        operations = tuple(operation) if operation else case.operations
        case = replace(case, operations=operations, compiled=case.compiled if compiled is None else compiled)
        return case if among(case.dtype, dtypes) else None

    def ahead(cases: Sequence[RowCase], where: torch.device, console: Console) -> None:
        """Compiling gets half of the time that there is: what is not built then is built one after the other."""
        count = default_workers(where) if workers is None else workers
        if count:
            started = time.monotonic()
            built = build_ahead(cases, where, count, 120.0 if deadline is None else deadline / 2)
            spent = time.monotonic() - started
            console.print(f"{built} sets of kernels compiled ahead, {count} at a time, in {spent:.0f} s", markup=False)

    check_dtypes(dtypes)
    common = Common(preset, shapes, device, rounds, seconds, deadline, out)
    made = lambda *sizes: [replace(RowCase(*sizes), dtype=dtype) for dtype in dtypes or ["bfloat16"]]  # noqa: E731
    run_plan(ROWS, common, "rows,columns", made, Effort(10, 1.0), changed, ahead)


def among(value: str, wanted: Sequence[str] | None) -> bool:
    return not wanted or value in wanted


def check(choose: Callable[[list[str]], object], names: list[str] | None) -> None:
    try:
        choose(names or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_dtypes(names: Sequence[str] | None) -> None:
    for name in names or []:
        if name not in DTYPES:
            raise typer.BadParameter(f"{name!r}: one of {NAMES}")


def parse_sizes(text: str, names: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != len(names.split(",")):
        raise typer.BadParameter(f"{text!r}: give {names} as numbers")
    if min(sizes) < 1:
        raise typer.BadParameter(f"{text!r}: every size must be positive")
    return sizes


def resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise typer.BadParameter(f"device {name!r}: auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("device cuda: there is none here")
    return torch.device(name)


def planned(
    benchmark: AnyBenchmark, common: Common, sizes: str, made: Callable[..., list[Any]], effort: Effort
) -> Plan[Any]:
    """That of the preset, or all cases of the shapes."""
    preset, shapes = common.preset, common.shapes
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    if preset is None and not shapes:
        raise typer.BadParameter("give --preset or --shape")
    if preset is None:
        return [(case, effort) for text in shapes or [] for case in made(*parse_sizes(text, sizes))]
    if preset not in benchmark.presets:
        raise typer.BadParameter(f"preset {preset!r}: one of {', '.join(benchmark.presets)}")
    return benchmark.presets[preset]()


def run_plan(
    benchmark: AnyBenchmark,
    common: Common,
    sizes: str,
    made: Callable[..., list[Any]],
    default: Effort,
    changed: Callable[[Any], Any],
    ahead: Callable[[Sequence[Any], torch.device, Console], None] | None = None,
) -> None:
    """Runs the cases, saving after each, and prints their tables; exits with 1 where figures are missing."""
    where, started = resolve_device(common.device), time.monotonic()
    plan = planned(benchmark, common, sizes, made, default)
    chosen = [(case, effort) for before, effort in plan if (case := changed(before)) is not None]
    if not chosen:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    out = common.out or Path("results") / f"{benchmark.kind}.json"
    run: Run[Any, Any] = Run(benchmark.kind, describe(where, sys.argv[1:]))
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)  # a file: for tables

    def expired() -> bool:
        return common.deadline is not None and time.monotonic() - started > common.deadline

    if ahead is not None:
        ahead([case for case, _ in chosen], where, console)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for index, (case, effort) in enumerate(chosen):
            if expired():
                names = "; ".join(left.title for left, _ in chosen[index:])
                console.print(f"The deadline of {common.deadline:g} s has passed; not measured: {names}", markup=False)
                break

            def tell(doing: str, share: float, index: int = index, case: Case = case) -> None:
                progress.update(task, description=f"{case.title}: {doing}", completed=index + share)

            seconds = effort.seconds if common.seconds is None else common.seconds
            wanted = Effort(common.rounds or effort.rounds, seconds)
            run.cases.append(benchmark.measure(case, where, wanted, Watch(tell, expired)))
            run.save(out)
            for table in benchmark.case_tables(run.cases[-1]):
                console.print(table.rich())
            spent = time.monotonic() - started
            console.print(f"{index + 1} of {len(chosen)} cases after {spent:.0f} s; results in {out}", markup=False)
        for line in absences(run):
            console.print(line, markup=False)
        for table in benchmark.closing(run):
            console.print(table.rich())
    missing = sorted({result.contender for result in shortfalls(run)})
    if missing:
        console.print(f"No figures for {', '.join(missing)}: see the notes above.", style="red")
    if missing or len(run.cases) < len(chosen):
        raise typer.Exit(1)


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
    """Markdown tables from result files."""
    loaded = [load(file) for file in files]
    if targets or dominance:
        benchmarks = {benchmark.kind: benchmark for benchmark, _ in loaded}
        if len(benchmarks) > 1:
            raise typer.BadParameter(f"the files are of several benchmarks: {', '.join(benchmarks)}")
        benchmark, runs = loaded[0][0], [run for _, run in loaded]
        promised = benchmark.targets(runs, brief) if targets else []
        beaten = benchmark.dominance(runs) if dominance else []
        if (targets and not promised) or (dominance and not beaten):
            raise typer.BadParameter(f"nothing of the kind is asked of {benchmark.noun}")
        texts = [*(markdown(run, []) for run in runs[:-1]), markdown(runs[-1], promised + beaten)]
    else:
        texts = [markdown(run, benchmark.tables(run, brief)) for benchmark, run in loaded]
    text = "\n".join(texts)
    if out is None:
        typer.echo(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


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
