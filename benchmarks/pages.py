"""Tables in README.md and docs/, written from result files, so that pages and results cannot disagree.

    python -m benchmarks pages README.md docs/performance.md docs/devices.md docs/memory.md docs/numerics.md \
        docs/rl.md benchmarks/notes.md

rewrites each block of a page. A block begins with a line `<!-- KIND FILE ... -->`, with a KIND of `KINDS` and result
files, or with `<!-- KIND -->`, with a KIND of `UNNAMED`. It ends before the next empty line. If a file does not exist,
the block says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import device_plans, tables
from benchmarks.benchmark import Benchmark
from benchmarks.contenders import budget_name, contender_of_budget
from benchmarks.divergence import DIVERGENCE
from benchmarks.gains import cards, others
from benchmarks.logprobs import LOGPROBS
from benchmarks.models import MODEL, tokens_per_second
from benchmarks.operator import OPERATOR, error_columns, format_times, products_ms
from benchmarks.problem import OperatorCase
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.small_card import SMALL_CARD
from benchmarks.tables import NONE, Table, format_or_dash
from benchmarks.targets import target_table
from flce.core.sizes import GIB
from flce.tools.machine import PEERS

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
BLOCK = re.compile(r"(?P<first><!-- (?P<kind>\S+?)(?P<files>(?: \S+\.json)*) -->\n)(?:.+\n)*")
COMPARED = ("torch", "triton", "transformers", "trl", "nvidia-cutlass-dsl", *PEERS)
WHY_NOT = {"oom": "out of memory", "unplanned": "no plan"}
# Budgets of the table of all sizes; the picture also has the others.
BUDGETS = {budget_name(mib) for mib in (4, 16, 64, 256)}


def shown(entries: Sequence[Entry]) -> dict[str, str]:
    results = [result for entry in entries for result in entry.results if result.family != "repeat"]
    return {r.contender: short_title(r) for r in results if r.samples_ms or r.status in WHY_NOT}


def short_title(result: BenchResult) -> str:
    title, _, _ = result.title.partition(" (")
    return "bare products" if result.family == "floor" else title  # older files have other titles of floors


def shape_text(case: OperatorCase) -> str:
    return " x ".join(map(str, case.shape))


def by_case(
    run: Run,
    names: dict[str, str],
    cell: Callable[[Entry, BenchResult], str],
    title: Callable[[Any], str] = shape_text,
    first: str = tables.SHAPE,
) -> Table:
    """Return a table with a row for each case, and a column for each contender of `names`."""
    rows = [[title(entry.case), *(cell(entry, entry.by_name(name)) for name in names)] for entry in run.cases]
    return Table("", [first, *names.values()], rows)


def times_and_mebibytes(result: BenchResult, floor_ms: float | None) -> str:
    time = tables.ratio(result.median_ms, floor_ms)
    return time if time == NONE else f"{time} ({tables.mebibytes(result.workspace_bytes)})"


def heads(run: Run) -> Table:
    """Return the table of milliseconds, multiples of the bare products and workspace: two columns for each size."""
    names = [column for entry in run.cases for column in (f"{shape_text(entry.case)}, ms", "workspace, MiB")]
    rows = [
        [title, *(cell for entry in run.cases for cell in head_cells(entry, entry.by_name(name)))]
        for name, title in shown(run.cases).items()
        if contender_of_budget(name) is None or name in BUDGETS
    ]
    return Table("", ["", *names], rows)


def head_cells(entry: Entry, result: BenchResult) -> tuple[str, str]:
    """Return the time, with its multiple of the bare products in brackets, and the workspace."""
    time = tables.milliseconds(result.median_ms)
    if time != NONE and result.family != "floor":
        time += f" ({tables.ratio(result.median_ms, products_ms(entry))})"
    return WHY_NOT.get(result.status, time), tables.mebibytes(result.workspace_bytes)


def models(run: Run) -> Table:
    """Return the table of tokens a second and peak memory."""
    cases = {(entry.case.setting, entry.case.model): entry for entry in run.cases}
    names = dict.fromkeys(model for _, model in cases)
    rows = []
    for setting in dict.fromkeys(setting for setting, _ in cases):
        entries = [cases.get((setting, model), Entry(None)) for model in names]  # a deadline cuts off the last cases
        for index, (name, title) in enumerate(shown(entries).items()):
            cells = [cell for entry in entries for cell in model_cells(entry, entry.by_name(name))]
            rows.append(["" if index else setting, title, *cells])
    return Table("", ["", "", *(name for model in names for name in (f"{model}, tokens/s", "peak, GiB"))], rows)


def model_cells(entry: Entry, result: BenchResult) -> tuple[str, str]:
    tokens = format_or_dash(lambda rate: f"{rate:,.0f}")(tokens_per_second(result, entry.case))
    peak = format_or_dash(lambda size: f"{size / GIB:.1f}")(result.peak_bytes if result.samples_ms else None)
    return WHY_NOT.get(result.status, tokens), peak


def rivals(run: Run) -> Table:
    """Return the table of multiples of the bare products and, in brackets, MiB: a row for each size."""
    names = {name: title for name, title in shown(run.cases).items() if contender_of_budget(name) is None}
    names = {name: title for name, title in names.items() if not name.startswith("floor")}
    return by_case(run, names, lambda entry, result: times_and_mebibytes(result, products_ms(entry)))


HEAD_TITLES = {"gemma3": "Gemma 3 270M", "smollm2": "SmolLM2 135M", "trained": "trained", "zipf": "Zipf and noise"}
HEAD_METHODS = {"ours": "flce", "ours-sampled": "flce, sampled", "stock": "stock"}
TOKENS_OF_HEADS = 8192


def sampled_heads(run: Run) -> Table:
    """Return a row for each head, text and size: multiples of the bare products (errors of dX / of dW)."""

    def cell(entry: Entry, result: BenchResult) -> str:
        time, errors = tables.ratio(result.median_ms, products_ms(entry)), result.errors or {}
        both = " / ".join(tables.relative(errors.get(name)) for name in ("input_grad", "weight_grad"))
        return f"{time} ({both})" if errors else time

    return by_case(run, HEAD_METHODS, cell, head_title, "head, text, H x V")


def head_title(case: OperatorCase) -> str:
    model, text = case.head.split()
    more = f", {case.tokens} tokens" * (case.tokens != TOKENS_OF_HEADS) + ", frozen" * (case.mode == "frozen-head")
    more += ", vendor's products" * (not case.own_products)
    return f"{HEAD_TITLES[model]}, {text.replace('english', 'English')}, {' x '.join(map(str, case.shape[1:]))}{more}"


def calls(run: Run) -> Table:
    """Return the table of calls from an idle GPU: multiples of the bare products as called and alone, and host ms."""
    return by_case(run, shown(run.cases), format_times, lambda case: re.sub(", bfloat16|, as called", "", case.title))


def errors(run: Run) -> Table:
    """Return the table of relative errors against float64: three columns for each case that has errors."""
    entries = [entry for entry in run.cases if entry.case.errors]
    found = [result for result in entries[0].results if result.errors and result.family != "repeat"]
    listed = {r.contender: short_title(r) for r in found if contender_of_budget(r.contender) is None}
    columns = [f"{entry.case.dtype}, {name}" for entry in entries for name in error_columns()]
    rows = [
        [title, *(show(entry.by_name(name)) for entry in entries for show in error_columns().values())]
        for name, title in listed.items()
    ]
    return Table("", ["", *columns], rows)


def logprobs(run: Run) -> Table:
    """Return the table of multiples of the bare products and, in brackets, MiB: a column for each size."""

    def cell(entry: Entry, result: BenchResult) -> str:
        kind = "-forward" * result.contender.endswith("-forward") or "-jsd" * ("jsd" in result.title)
        return times_and_mebibytes(result, entry.by_name(f"floor{kind}").median_ms)

    names = {name: title for name, title in shown(run.cases).items() if not name.startswith("floor")}
    rows = [[title, *(cell(entry, entry.by_name(name)) for entry in run.cases)] for name, title in names.items()]
    return Table("", ["", *(shape_text(entry.case) for entry in run.cases)], rows)


def float32_head(run: Run) -> Table:
    """Return the table of heads in several precisions: time over bare products, MiB, and errors against float64."""
    (entry,) = run.cases
    floor_ms, columns = products_ms(entry), error_columns()
    rows = [
        [
            result.title,
            tables.ratio(result.median_ms, floor_ms),
            tables.mebibytes(result.workspace_bytes),
            *(show(result) for show in columns.values()),
        ]
        for result in entry.results
        if result.errors and result.family != "repeat"
    ]
    return Table("", ["", "relative time", "workspace, MiB", *columns], rows)


def small_card(run: Run) -> Table:
    """Return the table of the longest sequences that train on a small card, measured and planned."""
    rows = []
    for entry in run.cases:
        parts = [f"LoRA of rank {entry.case.lora_rank}" if entry.case.lora_rank else "all weights"]
        setting = ", ".join(parts + ["no checkpointing"] * (not entry.case.checkpointing))
        for index, r in enumerate(result for result in entry.results if result.tokens):
            counts = map(format_or_dash("{:,}".format), (r.tokens, r.predicted_tokens))
            share = tables.ratio(r.predicted_tokens, r.tokens)
            rows.append(["" if index else setting, r.title, *counts, share])
    return Table("", ["", "", "measured", "`flce plan`", "planned / measured"], rows)


def plan(*files: Path) -> str:
    """Return the table of the steps of stored outputs of ``flce plan --json``, in GiB: the parts of each peak of one
    file, or the peaks of several files by sharding."""
    steps: dict[str, dict[str, Any]] = {}
    for document in (json.loads(file.read_text()) for file in files):
        sharding = f"{document['training']['sharding']}, " * (len(files) > 1)
        for step in document["steps"]:
            title = f"{'patched' if step['patched'] else 'stock'}{', checkpointing' * step['checkpointing']}"
            steps[sharding + title] = step
    parts = next(iter(steps.values()))["parts"] if len(files) == 1 else ()
    rows = [["peak", *(f"{step['peak_bytes'] / GIB:.2f}" for step in steps.values())]]
    for name in parts:
        if any(step["parts"][name] for step in steps.values()):
            rows.append([name, *(f"{step['parts'][name] / GIB:.2f}" for step in steps.values())])
    longest = [format_or_dash("{:,}".format)(step["longest_sequence"]) for step in steps.values()]
    return Table("", ["GiB", *steps], [*rows, ["longest sequence, tokens", *longest]]).grid()


def measured(run: Run) -> str:
    """Return the date, the device, the versions of the compared libraries, and the contenders that are missing."""
    versions = {name: version for name, version in run.head["versions"].items() if name in COMPARED}
    head = {**run.head, "versions": versions}
    on = tables.measured_on(Run(run.kind, head))
    results = (result for entry in run.cases for result in entry.results)
    missing = dict.fromkeys(result.title for result in results if result.status == "unavailable")
    line = f"Not available in this environment: {'; '.join(missing)}."
    return "\n".join([f"Measured {run.head['date'][:10]} on {on}", *[line] * bool(missing)])


def from_run(benchmark: Benchmark, write: Callable[[Run], str | Table]) -> Callable[[Path], str]:
    """Return a function from a result file of the benchmark to the text of a block."""

    def text(file: Path) -> str:
        written = write(benchmark.load(file))
        return written.grid() if isinstance(written, Table) else written

    return text


KINDS: dict[str, Callable[..., str]] = {
    "heads": from_run(OPERATOR, heads),
    "rivals": from_run(OPERATOR, rivals),
    "sampled-heads": from_run(OPERATOR, sampled_heads),
    "errors": from_run(OPERATOR, errors),
    "calls": from_run(OPERATOR, calls),
    "targets": from_run(OPERATOR, target_table),
    "heads-measured": from_run(OPERATOR, measured),
    "models": from_run(MODEL, models),
    "models-measured": from_run(MODEL, measured),
    "logprobs": from_run(LOGPROBS, logprobs),
    "logprobs-measured": from_run(LOGPROBS, measured),
    "float32-head": from_run(LOGPROBS, float32_head),
    "float32-head-errors": from_run(LOGPROBS, errors),
    "divergence": from_run(DIVERGENCE, logprobs),
    "divergence-measured": from_run(DIVERGENCE, measured),
    "small-card": from_run(SMALL_CARD, small_card),
    "small-card-measured": from_run(SMALL_CARD, measured),
    "plan": plan,
}
UNNAMED: dict[str, Callable[[], str]] = {
    "cards": lambda: cards(ROOT / RESULTS, RESULTS),
    "others": lambda: others(ROOT / RESULTS, RESULTS),
    "devices": device_plans.known,
}


def fill_page(page: str) -> str:
    """Return the page with its blocks rewritten from their files."""

    def rewrite(block: re.Match[str]) -> str:
        files = [ROOT / name for name in block["files"].split()]
        if missing := [file.relative_to(ROOT).as_posix() for file in files if not file.exists()]:
            text = f"(Not measured yet: this table is made from `{'`, `'.join(missing)}`.)"
        else:
            text = KINDS[block["kind"]](*files) if files else UNNAMED[block["kind"]]()
        return f"{block['first']}{text}\n"

    return BLOCK.sub(rewrite, page)
