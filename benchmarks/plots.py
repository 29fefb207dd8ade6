"""Pictures: a grid of panels with one legend. A series has the same colour and marker in all panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {"ours": "#c0392b", "repeat": "#e67e22", "stock": "#2c3e50", "floor": "#7f8c8d"}
PEERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#f39c12")  # one for each peer
MARKERS = "osDv^<>PX*hp"


@dataclass(frozen=True)
class Series:
    """Points, joined by a line of style `line`. Without `x` it is a horizontal line."""

    label: str
    family: str
    x: Sequence[float]
    y: Sequence[float]
    line: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    series: list[Series]


def draw(panels: Sequence[Panel], title: str, x: str, y: str, scales: dict[str, Any], columns: int = 3) -> Any:
    """Return the figure. `x` and `y` label the axes; `scales` are arguments of `Axes.set`: xscale, yscale, ylim ..."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    size = 5.4 * columns + 2.4 * (columns == 1), 3.4 * rows + 0.8  # inches; one column has its legend beside it
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    markers: dict[str, str] = {}
    peers: dict[str, str] = {}
    legend: dict[Any, Any] = {}
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for series in panel.series:
            colour = COLOURS.get(series.family) or peers.setdefault(series.label, PEERS[len(peers) % len(PEERS)])
            look: dict[str, Any] = {"color": colour, "label": series.label, "linestyle": series.line or "none"}
            if not series.x:
                axis.axhline(series.y[0], linewidth=1.2, **look)
            else:
                marker = markers.setdefault(series.label, MARKERS[len(markers) % len(MARKERS)])
                axis.plot(series.x, series.y, marker=marker, markersize=7, linewidth=1.5, **look)
        axis.set(xlabel=x, ylabel=y, **scales)
        for name, lines in (("xscale", axis.xaxis), ("yscale", axis.yaxis)):
            if scales.get(name) == "log":
                lines.set_major_locator(ticker.LogLocator(subs=[1, 1.5, 2, 3, 5] if name == "yscale" else [1]))
                lines.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
                lines.set_minor_formatter(ticker.NullFormatter())
        axis.set_title(panel.title, fontsize=9)
        axis.grid(True, alpha=0.2)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.suptitle(title)
    handles, labels = list(legend.values()), list(legend)
    if columns == 1:
        figure.legend(handles, labels, loc="outside right center")
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns + 1)
    return figure
