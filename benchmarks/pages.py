"""Tables in README.md and docs/, written from result files, so that pages and results cannot disagree.

    python -m benchmarks pages README.md docs/performance.md docs/devices.md

rewrites each block of a page. A block begins with a line `<!-- KIND benchmarks/results/FILE.json -->`, with a KIND of
`KINDS`, or with `<!-- KIND -->`, with a KIND of `PLANNED`, which needs no results. It ends before the next empty line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import device_plans, tables
from benchmarks.benchmark import Benchmark
from benchmarks.contenders import budget_name, contender_of_budget
from benchmarks.models import MODEL, tokens_per_second
from benchmarks.operator import OPERATOR, error_columns, products_ms
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import Table, format_or_dash
from benchmarks.targets import CURVE_SHAPES
from flce.core.sizes import GIB
from flce.planning.search import MEMORY_SHARE

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?P<first><!-- (?P<kind>\S+?)(?: (?P<file>\S+\.json))? -->\n)(?:.+\n)*")
WHY_NOT = {"oom": "out of memory", "unplanned": "no plan"}
# Budgets of the table of all sizes; the picture also has the others.
BUDGETS = {budget_name(mib) for mib in (4, 16, 64, 256)}


def shown(entries: Sequence[Entry]) -> dict[str, str]:
    results = [result for entry in entries for result in entry.results if result.family != "repeat"]
    return {r.contender: short_title(r) for r in results if r.samples_ms or r.status in WHY_NOT}


def short_title(result: BenchResult) -> str:
    title, _, _ = result.title.partition(" (")
    return "bare products" if result.family == "floor" else title  # older files have other titles of floors


def head_entries(run: Run) -> list[Entry]:
    """Return the entries of the picture, in its order: all entries with stock."""
    timed = [entry for entry in run.cases if entry.by_name("stock").samples_ms and not entry.case.calls]
    found = {entry.case.shape: entry for entry in timed}
    return [found[shape] for shape in CURVE_SHAPES if shape in found]


def heads(run: Run) -> Table:
    """Return the table of milliseconds and workspace, two columns for each size."""
    entries = head_entries(run)
    names = [name for entry in entries for name in (f"{' x '.join(map(str, entry.case.shape))}, ms", "workspace, MiB")]
    rows = [
        [title, *(cell for entry in entries for cell in head_cells(entry.by_name(name)))]
        for name, title in shown(entries).items()
        if contender_of_budget(name) is None or name in BUDGETS
    ]
    return Table("", ["", *names], rows)


def head_cells(result: BenchResult) -> tuple[str, str]:
    time = WHY_NOT.get(result.status, tables.milliseconds(result.median_ms))
    return time, tables.mebibytes(result.workspace_bytes)


def head(run: Run) -> Table:
    """Return the table of time, workspace and errors of gradients at the first size, without budgets."""
    entry = head_entries(run)[0]
    timed = [result for result in entry.results if result.samples_ms and result.family not in ("repeat", "floor")]
    columns: tables.Columns = {
        "": short_title,
        "time / the three bare products": lambda r: tables.ratio(r.median_ms, products_ms(entry)),
        "workspace, MiB": lambda r: tables.mebibytes(r.workspace_bytes),
        **{f"error of {name}": show for name, show in error_columns().items() if name != "loss"},
    }
    listed = [result for result in timed if contender_of_budget(result.contender) is None]
    return tables.tabulate("", listed, columns, [])


def models(run: Run, settings: int | None = None) -> Table:
    """Return the table of tokens a second and peak memory of all or of the first `settings` settings."""
    cases = {(entry.case.setting, entry.case.model): entry for entry in run.cases}
    names = dict.fromkeys(model for _, model in cases)
    rows = []
    for setting in list(dict.fromkeys(setting for setting, _ in cases))[:settings]:
        entries = [cases[setting, model] for model in names]
        for index, (name, title) in enumerate(shown(entries).items()):
            cells = [cell for entry in entries for cell in model_cells(entry, entry.by_name(name))]
            rows.append(["" if index else setting, title, *cells])
    return Table("", ["", "", *(name for model in names for name in (f"{model}, tokens/s", "peak, GiB"))], rows)


def model_cells(entry: Entry, result: BenchResult) -> tuple[str, str]:
    tokens = format_or_dash(lambda rate: f"{rate:,.0f}")(tokens_per_second(result, entry.case))
    peak = format_or_dash(lambda size: f"{size / GIB:.1f}")(result.peak_bytes if result.samples_ms else None)
    return WHY_NOT.get(result.status, tokens), peak


def measured(run: Run) -> str:
    return "\n".join([f"Measured {run.head['date'][:10]} on {tables.measured_on(run)}", *tables.absences(run)])


KINDS: dict[str, tuple[Benchmark, Callable[[Run], str]]] = {
    "heads": (OPERATOR, lambda run: heads(run).grid()),
    "head": (OPERATOR, lambda run: head(run).grid()),
    "heads-measured": (OPERATOR, measured),
    "device-plans-measured": (OPERATOR, device_plans.measured),
    "models": (MODEL, lambda run: models(run).grid()),
    "models-first": (MODEL, lambda run: models(run, 1).grid()),
    "models-measured": (MODEL, measured),
}
PLANNED: dict[str, Callable[[], str]] = {
    "devices": device_plans.known,
    "device-plans-training": lambda: device_plans.plans(frozen=False),
    "device-plans-lora": lambda: device_plans.plans(frozen=True),
    "device-plans-twice-the-memory": lambda: device_plans.plans(frozen=False, share=2 * MEMORY_SHARE),
}


def fill_page(page: str) -> str:
    """Return the page with its blocks rewritten from their files."""

    def rewrite(block: re.Match[str]) -> str:
        if block["file"] is None:
            return f"{block['first']}{PLANNED[block['kind']]()}\n"
        benchmark, write = KINDS[block["kind"]]
        return f"{block['first']}{write(benchmark.load(ROOT / block['file']))}\n"

    return BLOCK.sub(rewrite, page)
