"""Results as tables: Markdown for the documentation, rich for the terminal, from the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import dominance, row_report
from benchmarks.grid import VERDICTS, Grid, gibibytes, gigabytes, mebibytes, milliseconds, percent
from benchmarks.kernels import KernelCase
from benchmarks.models import ModelCase
from benchmarks.results import (
    CaseResult,
    Document,
    Entry,
    KernelCaseResult,
    KernelResult,
    KernelRun,
    Measurement,
    ModelCaseResult,
    ModelResult,
    ModelRun,
    Result,
    RowRun,
    Run,
)
from benchmarks.rows import RowCase
from benchmarks.targets import Check, Shape, check_targets

AnyRun = Document[Any, Any]


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def relative(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


FAILURES = {"failed": "failed", "oom": "ran out of memory", "skipped": "was not measured"}


def failure_notes(entry: Entry[Any, Any]) -> list[str]:
    return [
        f"{result.title} ({result.contender}) {FAILURES[result.status]}: {result.reason}"
        for result in entry.results
        if result.status in FAILURES
    ]


def absences(run: AnyRun) -> list[str]:
    """Contenders that could not run at all, and why: none is dropped in silence."""
    reasons = {
        f"Not measured: {result.title} ({result.contender}): {result.reason}": None
        for entry in run.cases
        for result in entry.results
        if result.status == "unavailable"
    }
    return list(reasons)


def shortfalls(run: AnyRun) -> list[Measurement]:
    """Results without figures of contenders that can run anywhere; peers may be missing or fail.

    That stock runs out of memory is a finding. Of flce it would be a shortfall.
    """
    return [
        result
        for entry in run.cases
        for result in entry.results
        if result.status != "ok" and result.family != "peer" and (result.status, result.family) != ("oom", "stock")
    ]


def time_grid(entry: CaseResult) -> Grid:
    """Time and workspace of every contender on one case."""
    nobody = Result("", "", "")
    floor = entry.by_name("floor") or entry.by_name("floor-aligned") or nobody
    stock = entry.by_name("stock") or nobody
    measured = [result for result in entry.results if result.samples_ms]
    columns: dict[str, Callable[[Result], str]] = {
        "": lambda r: r.title,
        "median ms": lambda r: milliseconds(r.median_ms),
        "least ms": lambda r: milliseconds(min(r.samples_ms)),
        "calls": lambda r: str(len(r.samples_ms)),
        "x floor": lambda r: ratio(r.median_ms, floor.median_ms),
        "x stock": lambda r: ratio(r.median_ms, stock.median_ms),
        "CPU ms": lambda r: milliseconds(r.median_cpu_ms),
        "CPU x stock": lambda r: ratio(r.median_cpu_ms, stock.median_cpu_ms),
        "MiB": lambda r: mebibytes(r.workspace_bytes),
        "MiB x stock": lambda r: ratio(r.workspace_bytes, stock.workspace_bytes),
    }
    if not stock.samples_ms:
        del columns["x stock"], columns["CPU x stock"], columns["MiB x stock"]
    if not any(result.cpu_samples_ms for result in measured):
        del columns["CPU ms"]
        columns.pop("CPU x stock", None)
    rows = [[show(result) for show in columns.values()] for result in measured]
    return Grid(entry.case.title, list(columns), rows, failure_notes(entry))


def error_grid(entry: CaseResult) -> Grid:
    """Distance of every contender from the float64 oracle on one case."""
    names = {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}
    present = [name for name in names if any(name in (result.errors or {}) for result in entry.results)]
    rows = [
        [result.title, *(relative(result.errors.get(name)) for name in present)]
        for result in entry.results
        if result.errors is not None
    ]
    title = f"{entry.case.title}: relative error against float64"
    notes = [] if entry.case.time else failure_notes(entry)  # they stand under the table of times
    return Grid(title, ["", *(names[name] for name in present)], rows, notes)


def model_grid(entry: ModelCaseResult) -> Grid:
    """Speed and memory of every contender on the training step of a model."""
    nobody = ModelResult("", "", "")
    stock, liger = (entry.by_name(name) or nobody for name in ("stock", "liger-loss"))
    tried = [result for result in entry.results if result.status != "unavailable"]
    tokens = entry.case.tokens
    columns: dict[str, Callable[[ModelResult], str]] = {
        "": lambda r: r.title,
        "tokens/s": lambda r: rate(r, tokens),
        "x stock": lambda r: ratio(stock.median_ms, r.median_ms),
        "x Liger": lambda r: ratio(liger.median_ms, r.median_ms),
        "peak GiB": lambda r: gibibytes(r.peak_bytes),
        "GiB x stock": lambda r: ratio(r.peak_bytes, stock.peak_bytes),
        "GiB x Liger": lambda r: ratio(r.peak_bytes, liger.peak_bytes),
        "forward GiB": lambda r: gibibytes(r.forward_peak_bytes),
        "reserved GiB": lambda r: gibibytes(r.reserved_bytes),
        "steps": lambda r: str(len(r.samples_ms)),
        "loss": lambda r: "-" if r.loss is None else f"{r.loss:.5f}",
    }
    for base, name in ((stock, "stock"), (liger, "Liger")):
        if not base.samples_ms:
            del columns[f"x {name}"], columns[f"GiB x {name}"]
    for name, values in {
        "forward GiB": [result.forward_peak_bytes for result in tried],
        "reserved GiB": [result.reserved_bytes for result in tried],
    }.items():
        if all(value is None for value in values):
            del columns[name]
    rows = [[show(result) for show in columns.values()] for result in tried]
    return Grid(entry.case.title, list(columns), rows, failure_notes(entry))


def kernel_grid(entry: KernelCaseResult) -> Grid:
    """Time and bandwidth of every pass over a tile of logits."""
    copy = entry.by_name("copy") or KernelResult("", "", "")
    columns: dict[str, Callable[[KernelResult], str]] = {
        "": lambda r: r.title,
        "median ms": lambda r: f"{r.median_ms:.3g}",
        "least ms": lambda r: f"{min(r.samples_ms):.3g}",
        "calls": lambda r: str(len(r.samples_ms)),
        "bytes per logit": lambda r: f"{r.moved_bytes / (entry.case.tokens * entry.case.columns):.3g}",
        "GB/s": lambda r: gigabytes(r.gigabytes_per_second),
        "of copy": lambda r: percent(r.gigabytes_per_second, copy.gigabytes_per_second),
    }
    measured = [result for result in entry.results if result.samples_ms]
    rows = [[show(result) for show in columns.values()] for result in measured]
    return Grid(entry.case.title, list(columns), rows, failure_notes(entry))


def kernel_cell(entry: KernelCaseResult, result: KernelResult) -> str:
    copy = entry.by_name("copy")
    if result.median_ms is None:
        return "-"
    if copy is None or result is copy:
        return f"{result.median_ms:.3g}"
    return f"{result.median_ms:.3g}, {percent(result.gigabytes_per_second, copy.gigabytes_per_second)}"


def rate(result: ModelResult, tokens: int) -> str:
    """Tokens a second, or why there is no such figure."""
    speed = result.tokens_per_second(tokens)
    if speed is not None:
        return f"{speed:.0f}"
    return "out of memory" if result.status == "oom" else "-"


def summary_grid(title: str, first: str, entries: Sequence[Entry[Any, Any]], cell: Callable[[Any, Any], str]) -> Grid:
    """One line for each case, with a column for every contender that was tried on any."""
    titles: dict[str, str] = {}
    for entry in entries:
        titles |= {
            result.contender: result.title for result in entry.results if result.samples_ms or result.status == "oom"
        }

    def cells(entry: Entry[Any, Any]) -> list[str]:
        found = (entry.by_name(name) for name in titles)
        return ["-" if result is None else cell(entry, result) for result in found]

    rows = [[entry.case.title, *cells(entry)] for entry in entries]
    return Grid(title, [first, *titles.values()], rows, [])


def figures(result: Result) -> str:
    if not result.samples_ms:
        return "-"
    workspace = "" if result.workspace_bytes is None else f", {mebibytes(result.workspace_bytes)}"
    return milliseconds(result.median_ms) + workspace


def operator_cell(entry: CaseResult, result: Result) -> str:
    return figures(result)


def model_cell(entry: ModelCaseResult, result: ModelResult) -> str:
    memory = "" if result.peak_bytes is None or not result.samples_ms else f", {gibibytes(result.peak_bytes)}"
    return rate(result, entry.case.tokens) + memory


def shape_cell(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def target_grid(checks: Sequence[Check]) -> Grid:
    """Every target, its figure, and whether it is met; none at all where the run is about something else."""
    if all(check.milliseconds is None for check in checks):
        return Grid("Targets", ["Not one of them was measured."], [], [])
    columns: dict[str, Callable[[Check], str]] = {
        "": lambda c: c.target.call,
        "tokens x hidden x vocabulary": lambda c: shape_cell(c.target.shape),
        "ms": lambda c: milliseconds(c.milliseconds),
        "times": lambda c: "-" if c.times is None else f"{c.times:.3f}",
        "limit": lambda c: "-" if c.target.limit is None else f"{c.target.limit:.2f} x {c.target.reference}",
        "MiB": lambda c: mebibytes(c.workspace_bytes),
        "limit MiB": lambda c: mebibytes(c.workspace_limit),
        "verdict": lambda c: VERDICTS[c.met],
    }
    rows = [[show(check) for show in columns.values()] for check in checks]
    met = sum(check.met is True for check in checks)
    return Grid(f"Targets: {met} of {len(checks)} met", list(columns), rows, [])


def dominance_grid(found: Sequence[dominance.Duel]) -> Grid:
    """Every peer on every shape, beside the fastest of our settings that takes no more workspace."""
    columns: dict[str, Callable[[dominance.Duel], str]] = {
        "tokens x hidden x vocabulary": lambda d: shape_cell(d.case.shape),
        "peer": lambda d: d.peer.title,
        "ms, MiB": lambda d: figures(d.peer),
        "flce": lambda d: "-" if d.ours is None else d.ours.title,
        "its ms, MiB": lambda d: "-" if d.ours is None else figures(d.ours),
        "times": lambda d: "-" if d.times is None else f"{d.times:.2f}",
        "wanted": lambda d: f"{d.rule.factor:.1f}, {d.rule.least_mib} MiB",
        "verdict": lambda d: VERDICTS[d.met],
    }
    rows = [[show(duel) for show in columns.values()] for duel in found]
    met = sum(duel.met for duel in found)
    notes = [
        "times: of the peer over that of the fastest setting of flce in the workspace that is allowed",
        "wanted: how much that is to be, in the workspace of the peer or the MiB given, whichever is more",
    ]
    return Grid(f"No peer dominates: {met} of {len(found)} met", list(columns), rows, notes)


def verdicts(run: AnyRun) -> list[Grid]:
    """Targets and peers, those that the run has figures of."""
    if isinstance(run, RowRun):
        return [row_report.verdict_grid(run)] if run.head["device"]["type"] == "cuda" else []
    if not isinstance(run, Run):
        return []
    checks, found = check_targets(run), dominance.duels(run)
    grids = [target_grid(checks)] if any(check.milliseconds is not None for check in checks) else []
    return [*grids, dominance_grid(found)] if found else grids


def case_grids(entry: Entry[Any, Any]) -> list[Grid]:
    """The line-by-line tables of a case."""
    if isinstance(entry.case, ModelCase):
        return [model_grid(entry)]
    if isinstance(entry.case, KernelCase):
        return [kernel_grid(entry)]
    if isinstance(entry.case, RowCase):
        return [row_report.case_grid(entry)]
    return ([time_grid(entry)] if entry.case.time else []) + ([error_grid(entry)] if entry.case.errors else [])


def grids(run: AnyRun, brief: bool = False) -> list[Grid]:
    """All tables of a run; `brief` leaves out the line-by-line ones of the timed cases."""
    if isinstance(run, ModelRun):
        several = brief or len(run.cases) > 1
        summary = [summary_grid("Tokens/s, peak GiB", "model, batch x sequence", run.cases, model_cell)]
        return (summary if several else []) + ([] if brief else [model_grid(entry) for entry in run.cases])
    if isinstance(run, KernelRun):
        several = brief or len(run.cases) > 1
        summary = [summary_grid("Median ms, bandwidth of the copy's", "tokens x columns", run.cases, kernel_cell)]
        return (summary if several else []) + ([] if brief else [kernel_grid(entry) for entry in run.cases])
    if isinstance(run, RowRun):
        return ([] if brief else row_report.task_grids(run)) + [row_report.verdict_grid(run)]
    timed = [entry for entry in run.cases if entry.case.time]
    checked = [entry for entry in run.cases if entry.case.errors]
    found = verdicts(run)
    labels: dict[str, list[CaseResult]] = {}
    for entry in timed:
        labels.setdefault(entry.case.label, []).append(entry)
    for label, entries in labels.items():
        if brief or len(entries) > 1:
            title = ", ".join(filter(None, ("Median ms, workspace MiB", label)))
            found.append(summary_grid(title, "tokens x hidden x vocabulary", entries, operator_cell))
    if not brief:
        found += [time_grid(entry) for entry in timed]
    return found + [error_grid(entry) for entry in checked]


def markdown(run: AnyRun, brief: bool = False, only: list[Grid] | None = None) -> str:
    """All tables, or `only` these, after what they were measured on."""
    device = run.head["device"]
    threads = f", {device['threads']} threads" if device["type"] == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.head["versions"].items())
    lines = [
        f"{device['name']}{threads}; {versions}.",
        "",
        f"Measured {run.head['date']} by `{run.head['command']}`.",
        "",
        *(f"- {line}" for line in absences(run)),
        "",
        *(grid.markdown() for grid in (grids(run, brief) if only is None else only)),
    ]
    return "\n".join(lines)
