"""Pictures: panels in a grid, in which what has one name looks the same in all of them. Names are in one legend, or
beside the points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.runs import Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"ours": "#c0392b", "repeat": "#e67e22", "stock": "#2c3e50", "floor": "#7f8c8d"}
# Of peers, one for each.
PEERS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#f39c12")
MARKERS = "osDv^<>PX*hp"


@dataclass(frozen=True)
class Series:
    """Points, joined by a line of this style if there is one. Without `x` it is a level, without `y` a place."""

    label: str
    family: str
    x: Sequence[float]
    y: Sequence[float]
    line: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    series: list[Series]
    remark: str = ""


def points(entry: Entry) -> list[Any]:
    """The results that have both time and memory."""
    return [result for result in entry.results if result.samples_ms and result.workspace_bytes is not None]


def compared(entries: Sequence[Entry]) -> list[Entry]:
    """What to draw: where flce stands beside its floor alone there is little to see."""
    found = [entry for entry in entries if points(entry)]
    if not found:
        raise ValueError("the results hold no case with both time and memory")
    return [entry for entry in found if any(r.family in ("peer", "stock") for r in points(entry))] or found


WIDE, NAMED_WIDE = 5.4, 7.0  # inches of a panel
DISTANCES = (7, 14, 22, 32, 44, 60, 80)  # in points, of a name from what it names


def draw(
    panels: Sequence[Panel],
    title: str,
    x: str,
    y: str,
    scales: dict[str, Any],
    columns: int = 3,
    ticks: Sequence[Sequence[float]] | None = None,
) -> Figure:
    """With these labels of the axes; `scales` are what matplotlib takes for an axis: xscale, yscale, ylim ...

    With ticks, of x and of y, names stand beside the points, as readers of a narrow column want it; else in a legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    size = (WIDE * columns, 4.0 * rows + 0.8) if ticks is None else (NAMED_WIDE * columns, 3.2 * rows + 0.4)
    how: dict[str, Any] = {} if ticks is None else {"sharex": True, "sharey": True}
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **how)
    markers: dict[str, str] = {}
    peers: dict[str, str] = {}
    legend: dict[Any, Any] = {}
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for one in panel.series:
            colour = COLOURS.get(one.family) or peers.setdefault(one.label, PEERS[len(peers) % len(PEERS)])
            look: dict[str, Any] = {"color": colour, "label": one.label, "linestyle": one.line or "none"}
            if not one.x:
                axis.axhline(one.y[0], linewidth=1.2, **look)
            elif not one.y:
                axis.axvline(one.x[0], linewidth=0.8, **look)
            else:
                marker = markers.setdefault(one.label, MARKERS[len(markers) % len(MARKERS)])
                axis.plot(one.x, one.y, marker=marker, markersize=7, linewidth=1.5, **look)
        axis.set(xlabel=x, ylabel=y, **scales)
        axis.set_title(panel.title, fontsize=9)
        axis.text(0.98, 0.02, panel.remark, ha="right", transform=axis.transAxes, fontsize=8)
        axis.grid(True, alpha=0.2)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.suptitle(title)
    if ticks is None:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns + 1)
        return figure
    for axis in axes.flat:
        axis.label_outer()
        axis.minorticks_off()
        for limits, places, put in (
            (axis.get_xlim(), ticks[0], axis.set_xticks),
            (axis.get_ylim(), ticks[1], axis.set_yticks),
        ):
            shown = [place for place in places if limits[0] <= place <= limits[1]]
            put(shown, [f"{place:,g}" for place in shown])
    figure.draw_without_rendering()  # where everything is depends on the ticks
    for axis in axes.flat[: len(panels)]:
        name_points(axis)
    return figure


def name_points(axis: Any) -> None:
    """Writes the name of each series near its middle point, in the nearest place where nothing is, joined to it."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    lines = axis.get_lines()
    paths = [[tuple(point) for point in line.get_transform().transform(line.get_xydata())] for line in lines]
    taken = [point for path in paths for point in (*path, *between(path))]
    boxes: list[Bbox] = []
    frame, scale = axis.get_window_extent(), axis.figure.dpi / 72  # pixels of a point
    for line, path in zip(lines, paths, strict=True):
        if line.get_marker() == "None":
            continue  # a level
        colour, middle = line.get_color(), len(path) // 2
        joined = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkB": 3}
        how: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 9}
        text = axis.annotate(
            line.get_label(), line.get_xydata()[middle], (0, 0), color=colour, arrowprops=joined, **how
        )
        size = Text.get_window_extent(text)
        for distance, turn in itertools.product(DISTANCES, range(16)):
            across = math.cos(turn * math.pi / 8) * (distance * scale + size.width / 2)
            up = math.sin(turn * math.pi / 8) * (distance * scale + size.height / 2)
            corner = path[middle][0] + across - size.width / 2, path[middle][1] + up - size.height / 2
            box = Bbox.from_bounds(*corner, size.width, size.height)
            free = box.padded(3 * scale)
            within = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            if within and not free.count_overlaps(boxes) and not any(free.contains(*point) for point in taken):
                break
        text.set_position((across / scale, up / scale))
        boxes.append(box)


def between(path: Sequence[tuple[float, float]], steps: int = 64) -> list[tuple[float, float]]:
    """Points on the lines from one to the next."""
    pairs, shares = itertools.pairwise(path), [step / steps for step in range(1, steps)]
    return [(a + (c - a) * s, b + (d - b) * s) for (a, b), (c, d) in pairs for s in shares]
