"""The picture of a run of the operator: time against workspace, a panel for each case, with one legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.contenders import contender_of_budget
from benchmarks.operator import FLOORS, OURS, products_ms
from benchmarks.runs import BenchResult, Entry, Run
from flce.core.sizes import MIB

COLOURS = {"ours": "#c0392b", "stock": "#2c3e50", "floor": "#7f8c8d"}
PEERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#f39c12")  # one for each peer
MARKERS = "sDv^<>PX*hp"
LEAST_MIB = 0.1  # a smaller workspace is drawn here


def figure(run: Run) -> Any:
    """Return a `Figure` of Matplotlib: a curve for flce in all budgets, points for others, and lines for the floors.

    Raises:
        ValueError: the run has no case with both time and memory.
    """
    from matplotlib import ticker
    from matplotlib.figure import Figure

    found = [entry for entry in run.cases if points(entry)]
    if not found:
        raise ValueError("the results hold no case with both time and memory")
    # Prefer entries with other contenders than flce and its floor.
    entries = [entry for entry in found if any(r.family in ("peer", "stock") for r in points(entry))] or found
    multiples = all(map(products_ms, entries))
    products = "three matrix products" if all(e.case.mode == "forward+backward" for e in entries) else "matrix products"
    drawn = Figure(figsize=(7.8, 3.4 * len(entries) + 0.8), layout="constrained")
    drawn.suptitle(f"Time and memory of a loss on one {run.head['device']['name']}: lower left is better")
    timed = [result for entry in entries for result in entry.results if result.samples_ms]
    others = [result for result in timed if contender_of_budget(result.contender) is None]
    names = list(dict.fromkeys(map(short_title, others)))
    legend: dict[Any, Any] = {}
    for axes, entry in zip(drawn.subplots(len(entries), squeeze=False).flat, entries, strict=True):
        draw_panel(axes, entry, (products_ms(entry) or 1.0) if multiples else 1.0, names)
        axes.set(xlabel="memory of the call beside inputs and gradients, MiB", xscale="log", yscale="log")
        axes.set_ylabel(f"time / {products} alone" if multiples else "time, ms (median)")
        axes.set_title(entry.case.title, fontsize=9)
        axes.grid(True, alpha=0.2)
        for lines, subs in ((axes.xaxis, [1]), (axes.yaxis, [1, 1.5, 2, 3, 5])):
            lines.set_major_locator(ticker.LogLocator(subs=subs))
            lines.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
            lines.set_minor_formatter(ticker.NullFormatter())
        legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    drawn.legend(legend.values(), legend, loc="outside right center")
    return drawn


def points(entry: Entry) -> list[Any]:
    return [result for result in entry.results if result.samples_ms and result.workspace_bytes is not None]


def short_title(result: BenchResult) -> str:
    title, _, _ = result.title.partition(" (")
    return title


def draw_panel(axes: Any, entry: Entry, unit_ms: float, names: Sequence[str]) -> None:
    """Draw one case. The colour and the marker of a name of `names` are the same in all panels."""
    place = {r.contender: (max(r.workspace_bytes / MIB, LEAST_MIB), r.median_ms / unit_ms) for r in points(entry)}
    curve = sorted(spot for name, spot in place.items() if name == OURS or contender_of_budget(name) is not None)
    if len(curve) > 1:
        axes.plot(*zip(*curve, strict=True), "o-", color=COLOURS["ours"], label="flce, in budgets")
    for result in entry.results:
        if result.family == "repeat" or short_title(result) not in names:  # a repeat would cover the first
            continue
        index = names.index(short_title(result))
        look = {"color": COLOURS.get(result.family, PEERS[index % len(PEERS)]), "label": names[index]}
        if result.contender in place:
            axes.plot(*place[result.contender], MARKERS[index % len(MARKERS)], markersize=7, **look)
        elif result.family == "floor" and result.median_ms is not None:
            line = "--" if result.contender in FLOORS else ":"
            axes.axhline(result.median_ms / unit_ms, linestyle=line, linewidth=1.2, **look)
