"""The command line: `python -m benchmarks operator | model | kernels | rows | table | plot`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.benchmark import AnyBenchmark, Benchmark, read
from benchmarks.cases import DTYPES, CaseT, Effort, Plan
from benchmarks.contenders import needs_package
from benchmarks.environment import describe
from benchmarks.kernels import KERNELS, KernelCase
from benchmarks.model_contenders import CONTENDERS as MODEL_CONTENDERS
from benchmarks.model_contenders import select as select_models
from benchmarks.model_problem import ARCHITECTURES, ModelCase, Optimizer
from benchmarks.models import MODEL
from benchmarks.operator import OPERATOR
from benchmarks.operator_contenders import CONTENDERS as OPERATOR_CONTENDERS
from benchmarks.operator_contenders import budget_name, select
from benchmarks.operator_problem import Mode, OperatorCase
from benchmarks.results import ResultT, Run
from benchmarks.rounds import Watch
from benchmarks.row_build import build_ahead, default_workers
from benchmarks.row_problem import Operation, RowCase
from benchmarks.rows import ROWS
from benchmarks.tables import absences, markdown, shortfalls

BENCHMARKS: dict[str, AnyBenchmark] = {benchmark.kind: benchmark for benchmark in (OPERATOR, MODEL, KERNELS, ROWS)}

app = typer.Typer(
    help="Measures flce beside the bare matrix products, PyTorch and other libraries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# --- options that the benchmarks share ---


def preset_of(benchmark: AnyBenchmark) -> Any:
    return typer.Option(help=f"Cases and effort together, one of {', '.join(benchmark.presets)}.")


Shapes = Annotated[list[str] | None, typer.Option("--shape", help="Sizes with commas; several times for several.")]
Dtype = Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help=f"Of {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds over the contenders.")]
Seconds = Annotated[
    float | None, typer.Option(help="Timed seconds for each contender and case, after which it sits out.")
]
Deadline = Annotated[float | None, typer.Option(help="Seconds after which nothing further is begun.")]
Out = Annotated[Path | None, typer.Option(help="Result file, written anew after every case.")]


@app.command()
def operator(
    preset: Annotated[str | None, preset_of(OPERATOR)] = None,
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="What a call does.")] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only these, of {', '.join(c.name for c in OPERATOR_CONTENDERS)}, and budgets of flce such as "
            f"{budget_name(256)} or, with bfloat16 sums, {budget_name(64, bfloat16_sums=True)}."
        ),
    ] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = None,
    rounds: Rounds = None,
    seconds: Seconds = None,
    ignored: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the labels that are ignored.")] = None,
    logits_std: Annotated[float, typer.Option(help="Standard deviation of the logits.")] = 4.0,
    upstream: Annotated[float | None, typer.Option(help="Gradient at the loss, such as 65536 for float16.")] = None,
    budget_mib: Annotated[int | None, typer.Option(help="Workspace budget of our memory-saving contender.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Compare with a float64 oracle.")] = False,
    time_: Annotated[bool, typer.Option("--time/--no-time", help="Measure time.")] = True,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """Time, workspace and, with --errors, exactness of forward and backward."""

    def made(tokens: int, hidden: int, vocab: int) -> list[OperatorCase]:
        return [
            OperatorCase(tokens, hidden, vocab, dtype=dtype, mode=one, errors=True)
            for dtype in dtypes or ["bfloat16"]
            for one in mode or [Mode.forward_backward]
        ]

    def changed(case: OperatorCase) -> OperatorCase | None:
        if (dtypes and case.dtype not in dtypes) or (mode and case.mode not in mode):
            return None
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
        return case if case.time or case.errors else None

    check_names(select, contender)
    check_dtypes(dtypes)
    if threads is not None:
        torch.set_num_threads(threads)
    plan = planned(OPERATOR, preset, shapes, "tokens,hidden,vocab", made, Effort(rounds=10, seconds=10.0))
    run_plan(OPERATOR, plan, changed, device, rounds, seconds, deadline, out)


@app.command()
def model(
    preset: Annotated[str | None, preset_of(MODEL)] = None,
    name: Annotated[
        list[str] | None, typer.Option("--model", help=f"Of {', '.join(ARCHITECTURES)}; several times for several.")
    ] = None,
    shapes: Shapes = None,
    dtype: Dtype = None,
    optimizer: Annotated[Optimizer, typer.Option(help="What ends a step.")] = Optimizer.none,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"Only these, of {', '.join(c.name for c in MODEL_CONTENDERS)}.")
    ] = None,
    budget_mib: Annotated[
        list[int] | None, typer.Option(min=1, help="Workspace budgets of flce, each a contender of its own.")
    ] = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seconds: Seconds = None,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """Peak memory and tokens a second of the training step of whole models, with random weights."""

    def made(batch: int, sequence: int) -> list[ModelCase]:
        return [ModelCase(one, batch, sequence) for one in name or []]

    def changed(case: ModelCase) -> ModelCase | None:
        if name and case.model not in name:
            return None
        return replace(
            case,
            dtype=dtype or case.dtype,
            optimizer=optimizer,
            budgets_mib=tuple(budget_mib) if budget_mib else case.budgets_mib,
            contenders=tuple(contender) if contender else case.contenders,
        )

    missing = needs_package("transformers", "transformers", cuda=False)(torch.device("cpu"))
    if missing is not None:
        raise typer.BadParameter(f"models need Transformers: {missing}")
    for one in name or []:
        if one not in ARCHITECTURES:
            raise typer.BadParameter(f"{one!r}: one of {', '.join(ARCHITECTURES)}")
    if preset is None and not (name and shapes):
        raise typer.BadParameter("give --preset, or --model and --shape")
    check_names(select_models, contender)
    check_dtypes([dtype] if dtype else None)
    plan = planned(MODEL, preset, shapes, "batch,sequence", made, Effort(rounds=5, seconds=10.0))
    run_plan(MODEL, plan, changed, device, rounds, seconds, deadline, out)


@app.command()
def kernels(
    preset: Annotated[str | None, preset_of(KERNELS)] = None,
    shapes: Shapes = None,
    dtype: Dtype = None,
    grad_dtype: Annotated[str | None, typer.Option(help="Of the gradient, if it is not written over them.")] = None,
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
    plan = planned(
        KERNELS,
        preset,
        shapes,
        "tokens,vocab",
        lambda tokens, vocab: [KernelCase(tokens, vocab, vocab)],
        Effort(10, 5.0),
    )
    run_plan(KERNELS, plan, changed, device, rounds, seconds, deadline, out)


@app.command()
def rows(
    preset: Annotated[str | None, preset_of(ROWS)] = None,
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    operation: Annotated[list[Operation] | None, typer.Option(help="Only these.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile too: at all sizes, or at none.")
    ] = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seconds: Seconds = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile kernels ahead; by default only for a GPU.")
    ] = None,
    deadline: Deadline = None,
    out: Out = None,
) -> None:
    """GB/s of losses and softmaxes over the length of a row, beside a copy, PyTorch and Liger."""

    def made(count: int, columns: int) -> list[RowCase]:
        return [RowCase(count, columns, dtype) for dtype in dtypes or ["bfloat16"]]

    def changed(case: RowCase) -> RowCase | None:
        if dtypes and case.dtype not in dtypes:
            return None
        return replace(
            case,
            operations=tuple(operation) if operation else case.operations,
            compiled=case.compiled if compiled is None else compiled,
        )

    def ahead(cases: Sequence[RowCase], where: torch.device, console: Console) -> None:
        build_rows(cases, where, default_workers(where) if workers is None else workers, deadline, console)

    check_dtypes(dtypes)
    plan = planned(ROWS, preset, shapes, "rows,columns", made, Effort(rounds=10, seconds=1.0))
    run_plan(ROWS, plan, changed, device, rounds, seconds, deadline, out, ahead)


# --- from options to a plan ---


def check_dtypes(names: Sequence[str] | None) -> None:
    for name in names or []:
        if name not in DTYPES:
            raise typer.BadParameter(f"{name!r}: one of {', '.join(DTYPES)}")


def check_names(choose: Callable[[list[str]], object], names: list[str] | None) -> None:
    try:
        choose(names or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


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


def planned(
    benchmark: Benchmark[CaseT, ResultT],
    preset: str | None,
    shapes: list[str] | None,
    sizes: str,
    made: Callable[..., list[CaseT]],
    effort: Effort,
) -> Plan[CaseT]:
    """That of the preset, or all cases of the shapes."""
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    if preset is None and not shapes:
        raise typer.BadParameter("give --preset or --shape")
    if preset is None:
        return [(case, effort) for text in shapes or [] for case in made(*parse_sizes(text, sizes))]
    if preset not in benchmark.presets:
        raise typer.BadParameter(f"preset {preset!r}: one of {', '.join(benchmark.presets)}")
    return benchmark.presets[preset]()


def resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise typer.BadParameter(f"device {name!r}: auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("device cuda: there is none here")
    return torch.device(name)


# --- measuring ---


def run_plan(
    benchmark: Benchmark[CaseT, ResultT],
    plan: Plan[CaseT],
    changed: Callable[[CaseT], CaseT | None],
    device: str,
    rounds: int | None,
    seconds: float | None,
    deadline: float | None,
    out: Path | None,
    ahead: Callable[[Sequence[CaseT], torch.device, Console], None] | None = None,
) -> None:
    """Runs the cases, saving after each, and prints their tables; exits with 1 where figures are missing."""
    where = resolve_device(device)
    chosen = [(case, effort) for before, effort in plan if (case := changed(before)) is not None]
    if not chosen:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    out = out or Path("results") / f"{benchmark.kind}.json"
    run: Run[CaseT, ResultT] = Run(benchmark.kind, describe(where, sys.argv[1:]))
    console = terminal()
    started = time.monotonic()

    def expired() -> bool:
        return deadline is not None and time.monotonic() - started > deadline

    if ahead is not None:
        ahead([case for case, _ in chosen], where, console)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for index, (case, effort) in enumerate(chosen):
            if expired():
                names = "; ".join(left.title for left, _ in chosen[index:])
                console.print(f"The deadline of {deadline:g} s has passed; not measured: {names}", markup=False)
                break

            def tell(doing: str, share: float, index: int = index, case: CaseT = case) -> None:
                progress.update(task, description=f"{case.title}: {doing}", completed=index + share)

            wanted = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)
            entry = benchmark.measure(case, where, wanted, Watch(tell, expired))
            run.cases.append(entry)
            run.save(out)
            for table in benchmark.case_tables(entry):
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


def build_rows(
    cases: Sequence[RowCase], where: torch.device, workers: int, deadline: float | None, console: Console
) -> None:
    """Compiling ahead gets half of the time that there is: what is not built then is built one after the other."""
    if not workers:
        return
    started = time.monotonic()
    limit = 120.0 if deadline is None else deadline / 2
    with progress_bar(console) as progress:
        task = progress.add_task(f"compiling ahead in {workers} processes", total=1)
        built = build_ahead(
            cases, where, workers, limit, lambda done, total: progress.update(task, total=total, completed=done)
        )
    console.print(f"{built} sets of kernels compiled ahead in {time.monotonic() - started:.0f} s", markup=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def terminal() -> Console:
    """Standard error; wide enough for the tables where it is a file."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=120)


# --- from result files ---


def load(path: Path) -> tuple[AnyBenchmark, Run[Any, Any]]:
    kind = read(path)["kind"]
    if kind not in BENCHMARKS:
        raise ValueError(f"{path} holds results of {kind!r}: not one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[kind], BENCHMARKS[kind].load(path)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Result files.", exists=True, dir_okay=False)],
    brief: Annotated[bool, typer.Option("--brief", help="One line for each timed case.")] = False,
    targets: Annotated[
        bool, typer.Option("--targets", help="Only what is promised, and whether the median of the files keeps it.")
    ] = False,
    dominance: Annotated[
        bool, typer.Option("--dominance", help="Only the peers, and whether the median of the files beats each.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
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
    out: Annotated[Path | None, typer.Option(help="PNG; beside the result file by default.")] = None,
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
