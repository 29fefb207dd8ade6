"""Pictures: panels in a grid with one legend, and how a contender looks in all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.results import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"ours": "#c0392b", "repeat": "#e67e22", "stock": "#2c3e50", "peer": "#2980b9", "floor": "#7f8c8d"}
MARKERS = "osDv^<>PX*hp"
LINES = ("--", ":", "-.")
COLUMNS = 3

Panel = Callable[["Axes"], None]


def draw(
    panels: Sequence[Sequence[Panel | None]], title: str, size: tuple[float, float], share: bool = False
) -> Figure:
    """Rows of panels of this size, in inches; None leaves a place empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, columns = len(panels), max(len(row) for row in panels)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(size[0] * columns, size[1] * rows + 0.8),
        squeeze=False,
        sharey="row" if share else False,
        layout="constrained",
    )
    legend: dict[Any, Any] = {}
    for line, row in zip(axes, panels, strict=True):
        for axis, paint in zip(line, [*row, *[None] * (columns - len(row))], strict=True):
            if paint is None:
                axis.set_visible(False)
                continue
            paint(axis)
            axis.grid(True, alpha=0.2)
            handles, labels = axis.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(5, 2 * columns))
    figure.suptitle(title)
    return figure


def points(entry: Entry[Any, Any]) -> list[Any]:
    """The results that have both time and memory."""
    return [result for result in entry.results if result.samples_ms and result.workspace_bytes is not None]


def draw_entries(
    entries: Sequence[Entry[Any, Any]],
    paint: Callable[[Entry[Any, Any], dict[str, str], Axes], None],
    title: str,
    plain: Callable[[str], bool] = lambda contender: False,
) -> Figure:
    """A panel for each case. Where flce stands beside its floor alone there is little to see, and none is drawn."""
    found = [entry for entry in entries if points(entry)]
    if not found:
        raise ValueError("the results hold no case with both time and memory")
    found = [entry for entry in found if any(r.family in ("peer", "stock") for r in points(entry))] or found
    styles = looks(found, {r.contender for entry in found for r in entry.results if plain(r.contender)})

    def panel(entry: Entry[Any, Any]) -> Panel:
        def painted(axis: Axes) -> None:
            paint(entry, styles, axis)
            axis.set_title(entry.case.title, fontsize=9)

        return painted

    panels = [panel(entry) for entry in found]
    return draw([panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)], title, (5.4, 4.2))


def looks(entries: Sequence[Entry[Any, Any]], plain: Collection[str]) -> dict[str, str]:
    """A marker or line style for each contender, the same in all panels; a dot for those that are `plain`."""
    names: dict[str, dict[str, None]] = {}
    for result in (result for entry in entries for result in entry.results):
        if result.samples_ms and result.contender not in plain:
            names.setdefault(result.family, {})[result.contender] = None
    return dict.fromkeys(plain, ".") | {
        name: styles[index % len(styles)]
        for family, members in names.items()
        for styles in [LINES if family == "floor" else MARKERS]
        for index, name in enumerate(members)
    }
