"""Speed against memory, a panel for each case.

Of the operator: time against workspace, a curve for flce in all budgets, points for others, lines for the floor. Of
models: tokens a second against peak memory. Of rows: see `row_plot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import row_plot
from benchmarks.cases import MIB
from benchmarks.contenders import in_budget, sums_in_bfloat16
from benchmarks.grid import GIB
from benchmarks.results import AnyRun, CaseResult, Entry, ModelCaseResult, ModelResult, ModelRun, Result, RowRun

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

CURVE = ("ours", "ours-vocab")  # one operator with the same numerics at different workspaces, beside the budgets
COLOURS = {"ours": "#c0392b", "stock": "#2c3e50", "peer": "#2980b9", "floor": "#7f8c8d"}
MARKERS = "osDv^<>PX*hp"
DOT = "."
LINES = ("--", ":", "-.")


def draw(run: AnyRun, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    if isinstance(run, RowRun):
        row_plot.draw(run, path)
        return
    from matplotlib import pyplot

    entries: list[Entry[Any, Any]] = [entry for entry in run.cases if points(entry)]
    # A panel compares: where flce stands beside its floor alone there is little to see.
    entries = [entry for entry in entries if any(r.family in ("peer", "stock") for r in points(entry))] or entries
    if not entries:
        raise ValueError("the results hold no case with both time and memory")
    paint: Callable[[Axes, Any, dict[str, str]], None] = model_panel if isinstance(run, ModelRun) else panel
    columns = min(3, len(entries))
    rows = math.ceil(len(entries) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.4 * columns, 4.2 * rows + 0.8), squeeze=False, layout="constrained"
    )
    looks = appearances(entries)
    for axis, entry in zip(axes.flat, entries, strict=False):
        paint(axis, entry, looks)
    for axis in axes.flat[len(entries) :]:
        axis.set_visible(False)
    legend: dict[str, Artist] = {}
    for axis in axes.flat:
        legend |= legend_of(axis)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(4, 2 * columns))
    title = "Training steps" if isinstance(run, ModelRun) else "Time and workspace"
    figure.suptitle(f"{title}, {run.head['device']['name']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def points(entry: Entry[Any, Any]) -> list[Any]:
    return [result for result in entry.results if result.samples_ms and result.workspace_bytes is not None]


def appearances(entries: list[Entry[Any, Any]]) -> dict[str, str]:
    """A marker or line style for each contender, the same in all panels."""
    families: dict[str, list[str]] = {}
    for entry in entries:
        for result in entry.results:
            names = families.setdefault(result.family, [])
            if in_curve(result.contender):
                continue
            if result.samples_ms and result.contender not in names:
                names.append(result.contender)
    looks = {result.contender: DOT for entry in entries for result in entry.results if in_curve(result.contender)}
    return looks | {
        name: styles[index % len(styles)]
        for family, names in families.items()
        for styles in [LINES if family == "floor" else MARKERS]
        for index, name in enumerate(names)
    }


def in_curve(contender: str) -> bool:
    """Whether it is flce in a budget with the numerics of the default: a dot on the curve, not a look of its own."""
    return in_budget(contender) is not None and not sums_in_bfloat16(contender)


def legend_of(axis: Axes) -> dict[str, Artist]:
    handles, labels = axis.get_legend_handles_labels()
    return dict(zip(map(str, labels), handles, strict=True))


def panel(axis: Axes, entry: CaseResult, looks: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    place = {result.contender: where(result) for result in points(entry)}
    curve = sorted(spot for name, spot in place.items() if name in CURVE or in_curve(name))
    axis.plot([x for x, _ in curve], [y for _, y in curve], color=COLOURS["ours"], linewidth=1, alpha=0.6)
    for result in entry.results:
        look, colour = looks.get(result.contender, ""), COLOURS[result.family]
        if result.contender in place:
            x, y = place[result.contender]
            title = "flce, in budgets" if in_curve(result.contender) else result.title
            axis.scatter(x, y, color=colour, marker=look, s=42, zorder=3, label=title)
        elif result.family == "floor" and result.median_ms is not None:
            axis.axhline(result.median_ms, color=colour, linestyle=look, linewidth=1.2, label=result.title)

    times = [result.median_ms for result in entry.results if result.median_ms is not None]
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(0, 3 * max(1.0, *(x for x, _ in place.values())))
    axis.set_yscale("log")
    axis.set_ylim(0.8 * min(times), 1.3 * max(times))
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.minorticks_off()
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(ScalarFormatter())
    axis.grid(True, alpha=0.2)
    axis.set_xlabel("workspace, MiB")
    axis.set_ylabel("median time, ms")
    axis.set_title(entry.case.title, fontsize=9)


def model_panel(axis: Axes, entry: ModelCaseResult, looks: dict[str, str]) -> None:
    from matplotlib.ticker import ScalarFormatter

    measured: list[ModelResult] = points(entry)
    speeds = [result.tokens_per_second(entry.case.tokens) or 0.0 for result in measured]
    memory = [(result.peak_bytes or 0) / GIB for result in measured]
    for result, x, y in zip(measured, memory, speeds, strict=True):
        axis.scatter(x, y, color=COLOURS[result.family], marker=looks[result.contender], s=42, label=result.title)
    exhausted = [result.title for result in entry.results if result.status == "oom"]
    if exhausted:
        axis.text(
            0.98, 0.02, f"out of memory: {', '.join(exhausted)}", ha="right", transform=axis.transAxes, fontsize=8
        )
    axis.set_xscale("log")
    axis.set_xlim(min(memory) / 1.3, max(memory) * 1.3)
    axis.set_ylim(0, 1.15 * max(speeds))
    axis.minorticks_off()
    axis.set_xticks(sorted({float(f"{value:.2g}") for value in (min(memory), max(memory))}))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.grid(True, alpha=0.2)
    axis.set_xlabel("peak memory, GiB")
    axis.set_ylabel("tokens/s")
    axis.set_title(entry.case.title, fontsize=9)


def where(result: Result) -> tuple[float, float]:
    assert result.workspace_bytes is not None
    assert result.median_ms is not None
    return result.workspace_bytes / MIB, result.median_ms
