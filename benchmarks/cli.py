"""The command line: `python -m benchmarks operator | model | kernels | rows | table | plot`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import plot as plotting
from benchmarks import report, results, row_report
from benchmarks.cases import DTYPES, Case, Effort, Mode
from benchmarks.contenders import CONTENDERS, budget_name, needs_package, select
from benchmarks.dominance import duels
from benchmarks.environment import describe
from benchmarks.kernel_bench import run_kernel_case
from benchmarks.kernels import KernelCase, KernelPreset, preset_kernel_effort, preset_kernels
from benchmarks.model_bench import run_model_case
from benchmarks.model_contenders import MODEL_CONTENDERS, known_contenders
from benchmarks.models import ARCHITECTURES, ModelCase, ModelPreset, Optimizer, preset_model_effort, preset_models
from benchmarks.operator_bench import run_case
from benchmarks.presets import Preset, preset_cases, preset_effort
from benchmarks.rounds import Report
from benchmarks.row_bench import run_row_case
from benchmarks.row_build import build_ahead, default_workers
from benchmarks.rows import Operation, RowCase, RowPreset, preset_row_effort, preset_rows
from benchmarks.targets import check_targets

app = typer.Typer(
    help="Measures flce beside the bare matrix products, PyTorch and other libraries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def parse_sizes(text: str, names: str, example: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != len(names.split(",")):
        raise typer.BadParameter(f"{text!r}: give {names} such as {example}")
    if min(sizes) < 1:
        raise typer.BadParameter(f"{text!r}: every size must be positive")
    return sizes


def parse_shape(text: str) -> tuple[int, int, int]:
    tokens, hidden, vocab = parse_sizes(text, "tokens,hidden,vocab", "4096,4096,128256")
    return tokens, hidden, vocab


def parse_dtype(text: str) -> str:
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r}: one of {', '.join(DTYPES)}")
    return text


@app.command()
def operator(
    preset: Annotated[Preset | None, typer.Option(help="Shapes, dtypes and effort together.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="tokens,hidden,vocab; several times for several.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="What a call does.")] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only these, of {', '.join(c.name for c in CONTENDERS)}, and budgets of flce such as "
            f"{budget_name(256)} or, with bfloat16 sums, {budget_name(64, bfloat16_sums=True)}."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Timed seconds for each contender and case, after which it sits out."),
    ] = None,
    ignored: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the labels that are ignored.")] = None,
    logits_std: Annotated[float, typer.Option(help="Standard deviation of the logits.")] = 4.0,
    upstream: Annotated[float | None, typer.Option(help="Gradient at the loss, such as 65536 for float16.")] = None,
    budget_mib: Annotated[int | None, typer.Option(help="Workspace budget of our memory-saving contender.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Compare with a float64 oracle.")] = False,
    time_: Annotated[bool, typer.Option("--time/--no-time", help="Measure time.")] = True,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which no further case is begun.")] = None,
    out: Annotated[Path, typer.Option(help="Result file, written anew after every case.")] = Path(
        "results/operator.json"
    ),
) -> None:
    """Time, workspace and, with --errors, exactness of forward and backward."""
    console = terminal()
    try:
        select(contender)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    where = resolve_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    cases = make_cases(preset, shape, dtype, mode, errors)
    cases = [
        replace(
            case,
            ignored=case.ignored if ignored is None else ignored,
            logits_std=logits_std,
            upstream=case.upstream if upstream is None else upstream,
            budget_mib=budget_mib or case.budget_mib,
            time=case.time and time_,
            contenders=tuple(contender) if contender else case.contenders,
        )
        for case in cases
    ]
    cases = [case for case in cases if case.time or case.errors]
    if not cases:
        raise typer.BadParameter("nothing to measure: these options leave no case")

    def run_one(case: Case, show: Report, expired: Callable[[], bool]) -> results.CaseResult:
        effort = preset_effort(preset, case) if preset else Effort(rounds=10, seconds=10.0)
        effort = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)
        return run_case(case, select(case.contenders), where, effort, show, expired)

    run = results.Run(describe(where, sys.argv[1:]))
    measure(run, cases, run_one, deadline, out, console)


@app.command()
def model(
    preset: Annotated[ModelPreset | None, typer.Option(help="Models, batch shapes and effort together.")] = None,
    name: Annotated[
        list[str] | None, typer.Option("--model", help=f"Of {', '.join(ARCHITECTURES)}; several times for several.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="batch,sequence; several times for several.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="What ends a step.")] = Optimizer.none,
    contender: Annotated[
        list[str] | None,
        typer.Option(help=f"Only these, of {', '.join(c.name for c in MODEL_CONTENDERS)}."),
    ] = None,
    budget_mib: Annotated[
        list[int] | None, typer.Option(min=1, help="Workspace budgets of flce, each a contender of its own.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Timed seconds for each contender and case, after which it sits out."),
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which no further step is begun.")] = None,
    out: Annotated[Path, typer.Option(help="Result file, written anew after every case.")] = Path("results/model.json"),
) -> None:
    """Peak memory and tokens a second of the training step of whole models, with random weights."""
    console = terminal()
    missing = needs_package("transformers", "transformers", cuda=False)(torch.device("cpu"))
    if missing is not None:
        raise typer.BadParameter(f"models need Transformers: {missing}")
    where = resolve_device(device)
    cases = make_model_cases(preset, name, shape)
    try:
        chosen = None if contender is None else known_contenders(contender)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    cases = [
        replace(
            case,
            dtype=case.dtype if dtype is None else parse_dtype(dtype),
            optimizer=optimizer,
            budgets_mib=case.budgets_mib if budget_mib is None else tuple(budget_mib),
            contenders=case.contenders if chosen is None else chosen,
        )
        for case in cases
    ]
    effort = preset_model_effort(preset) if preset else Effort(rounds=5, seconds=10.0)
    effort = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)

    def run_one(case: ModelCase, show: Report, expired: Callable[[], bool]) -> results.ModelCaseResult:
        return run_model_case(case, where, effort, show, expired)

    run = results.ModelRun(describe(where, sys.argv[1:]))
    measure(run, cases, run_one, deadline, out, console)


def make_model_cases(preset: ModelPreset | None, names: list[str] | None, shapes: list[str] | None) -> list[ModelCase]:
    """A preset narrowed to the asked-for models, or models x batch shapes."""
    for name in names or []:
        if name not in ARCHITECTURES:
            raise typer.BadParameter(f"{name!r}: one of {', '.join(ARCHITECTURES)}")
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    if preset is not None:
        cases = [case for case in preset_models(preset) if not names or case.model in names]
    else:
        if not names or not shapes:
            raise typer.BadParameter("give --preset, or --model and --shape")
        sizes = [parse_sizes(text, "batch,sequence", "4,8192") for text in shapes]
        cases = [ModelCase(name, batch, sequence) for batch, sequence in sizes for name in names]
    if not cases:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    return cases


@app.command()
def kernels(
    preset: Annotated[KernelPreset | None, typer.Option(help="Tiles, dtypes and effort together.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="tokens,vocab; several times for several.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Of the logits, one of {', '.join(DTYPES)}.")] = None,
    grad_dtype: Annotated[str | None, typer.Option(help="Of the gradient, if it is not written over them.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds over the passes.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Timed seconds for each pass and case, after which it sits out.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which no further call is begun.")] = None,
    out: Annotated[Path, typer.Option(help="Result file, written anew after every case.")] = Path(
        "results/kernels.json"
    ),
) -> None:
    """GB/s of the pass over the logits (statistics, gradient, both), beside a copy in the same run."""
    console = terminal()
    where = resolve_device(device)
    cases = make_kernel_cases(preset, shape)
    cases = [
        replace(
            case,
            dtype=case.dtype if dtype is None else parse_dtype(dtype),
            grad_dtype=case.grad_dtype if grad_dtype is None else parse_dtype(grad_dtype),
        )
        for case in cases
    ]
    effort = preset_kernel_effort(preset) if preset else Effort(rounds=10, seconds=5.0)
    effort = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)

    def run_one(case: KernelCase, show: Report, expired: Callable[[], bool]) -> results.KernelCaseResult:
        return run_kernel_case(case, where, effort, show, expired)

    run = results.KernelRun(describe(where, sys.argv[1:]))
    measure(run, cases, run_one, deadline, out, console)


def make_kernel_cases(preset: KernelPreset | None, shapes: list[str] | None) -> list[KernelCase]:
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    if preset is not None:
        return preset_kernels(preset)
    if not shapes:
        raise typer.BadParameter("give --preset or --shape")
    sizes = [parse_sizes(text, "tokens,vocab", "4096,128256") for text in shapes]
    return [KernelCase(tokens, vocab, vocab) for tokens, vocab in sizes]


@app.command()
def rows(
    preset: Annotated[RowPreset | None, typer.Option(help="Sizes, dtypes and effort together.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="rows,columns; several times for several.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Of the rows, of {', '.join(DTYPES)}.")] = None,
    operation: Annotated[list[Operation] | None, typer.Option(help="Only these.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile too: at all sizes, or at none.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds over the contenders.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Timed seconds for each contender and task, after which it sits out.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile kernels ahead; by default only for a GPU.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which no further call is begun.")] = None,
    out: Annotated[Path, typer.Option(help="Result file, written anew after every case.")] = Path("results/rows.json"),
) -> None:
    """GB/s of losses and softmaxes over the length of a row, beside a copy, PyTorch and Liger."""
    console = terminal()
    where = resolve_device(device)
    cases = make_row_cases(preset, shape, dtype)
    cases = [
        replace(
            case,
            operations=tuple(operation) if operation else case.operations,
            compiled=case.compiled if compiled is None else compiled,
        )
        for case in cases
    ]
    effort = preset_row_effort(preset) if preset else Effort(rounds=10, seconds=1.0)
    effort = Effort(rounds or effort.rounds, effort.seconds if seconds is None else seconds)
    run = results.RowRun(describe(where, sys.argv[1:]))
    started = time.monotonic()
    build_rows(cases, where, default_workers(where) if workers is None else workers, deadline, console)
    if deadline is not None:
        deadline = max(deadline - (time.monotonic() - started), 0.0)

    def run_one(case: RowCase, show: Report, expired: Callable[[], bool]) -> results.RowCaseResult:
        return run_row_case(case, where, effort, show, expired)

    measure(run, cases, run_one, deadline, out, console)


def make_row_cases(preset: RowPreset | None, shapes: list[str] | None, dtypes: list[str] | None) -> list[RowCase]:
    """A preset narrowed to the asked-for dtypes, or shapes x dtypes."""
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    wanted = [parse_dtype(text) for text in dtypes or []]
    if preset is not None:
        cases = [case for case in preset_rows(preset) if not wanted or case.dtype in wanted]
    else:
        if not shapes:
            raise typer.BadParameter("give --preset or --shape")
        sizes = [parse_sizes(text, "rows,columns", "4096,32768") for text in shapes]
        cases = [RowCase(count, columns, dtype) for count, columns in sizes for dtype in wanted or ["bfloat16"]]
    if not cases:
        raise typer.BadParameter("nothing to measure: these options leave no case")
    return cases


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

        def report_built(done: int, total: int) -> None:
            progress.update(task, total=total, completed=done)

        built = build_ahead(cases, where, workers, limit, report_built)
    console.print(f"{built} sets of kernels compiled ahead in {time.monotonic() - started:.0f} s", markup=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def terminal() -> Console:
    """Standard error; wide enough for the tables where it is a file."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=120)


def measure(
    run: results.Document[results.CaseT, results.ResultT],
    cases: Sequence[results.CaseT],
    run_one: Callable[[results.CaseT, Report, Callable[[], bool]], results.Entry[results.CaseT, results.ResultT]],
    deadline: float | None,
    out: Path,
    console: Console,
) -> None:
    """Runs the cases, saving after each, and prints their tables; exits with 1 where figures are missing."""
    started = time.monotonic()

    def expired() -> bool:
        return deadline is not None and time.monotonic() - started > deadline

    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for index, case in enumerate(cases):
            if expired():
                names = "; ".join(left.title for left in cases[index:])
                console.print(f"The deadline of {deadline:g} s has passed; not measured: {names}", markup=False)
                break

            def show(doing: str, share: float, index: int = index, case: results.CaseT = case) -> None:
                progress.update(task, description=f"{case.title}: {doing}", completed=index + share)

            entry = run_one(case, show, expired)
            run.cases.append(entry)
            run.save(out)
            for grid in report.case_grids(entry):
                console.print(grid.rich())
            spent = time.monotonic() - started
            console.print(f"{index + 1} of {len(cases)} cases after {spent:.0f} s; results in {out}", markup=False)
        for line in report.absences(run):
            console.print(line, markup=False)
        for grid in report.verdicts(run):
            console.print(grid.rich())

    missing = sorted({result.contender for result in report.shortfalls(run)})
    if missing:
        console.print(f"No figures for {', '.join(missing)}: see the notes above.", style="red")
    if missing or len(run.cases) < len(cases):
        raise typer.Exit(1)


def resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise typer.BadParameter(f"device {name!r}: auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("device cuda: there is none here")
    return torch.device(name)


def make_cases(
    preset: Preset | None,
    shapes: list[str] | None,
    dtypes: list[str] | None,
    modes: list[Mode] | None,
    errors: bool,
) -> list[Case]:
    """A preset narrowed to the asked-for dtypes and modes, or shapes x dtypes x modes."""
    if preset is not None and shapes:
        raise typer.BadParameter("give --preset or --shape, not both")
    wanted = [parse_dtype(text) for text in dtypes or []]
    if preset is not None:
        cases = preset_cases(preset, errors)
        cases = [case for case in cases if not wanted or case.dtype in wanted]
        return [case for case in cases if not modes or case.mode in modes]
    if not shapes:
        raise typer.BadParameter("give --preset or --shape")
    return [
        Case(*parse_shape(text), dtype=dtype, mode=mode, errors=errors)
        for text in shapes
        for dtype in wanted or ["bfloat16"]
        for mode in modes or [Mode.forward_backward]
    ]


Files = Annotated[list[Path], typer.Argument(help="Result files.", exists=True, dir_okay=False)]


@app.command()
def table(
    files: Files,
    brief: Annotated[bool, typer.Option("--brief", help="One line for each timed case.")] = False,
    targets: Annotated[bool, typer.Option("--targets", help="Only what is promised, and whether it is kept.")] = False,
    dominance: Annotated[bool, typer.Option("--dominance", help="Only the peers, and whether each is beaten.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
) -> None:
    """Markdown tables from result files."""
    texts = []
    for file in files:
        run = results.load_any(file)
        only = None
        if targets and not dominance and isinstance(run, results.RowRun):
            only = row_report.target_grids(run, brief)
        elif targets or dominance:
            if not isinstance(run, results.Run):
                raise typer.BadParameter(f"{file} holds no results of the operator")
            only = [report.target_grid(check_targets(run))] if targets else []
            only += [report.dominance_grid(duels(run))] if dominance else []
        texts.append(report.markdown(run, brief, only))
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
    path = out or file.with_suffix(".png")
    plotting.draw(results.load_any(file), path)
    typer.echo(f"wrote {path}")
