"""Pictures of memory profiles, for `MemoryProfile.plot`. Matplotlib is imported when a picture is drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flce.core.sizes import GIB, MIB, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIB = 1 << 10
UNITS = {GIB: "GiB", MIB: "MiB", KIB: "KiB"}
Samples = Sequence[tuple[float, int]]  # seconds since the start, and the bytes that are allocated from this time on
# Colour-blind readers can distinguish these colours.
COLOURS = ("#d08a2e", "#1f5fa8", "#3a9a7a", "#a8508a", "#6b6b6b")


def draw(profiles: Mapping[str, Samples], path: str | os.PathLike[str], title: str) -> None:
    """Draw the profiles side by side: see `MemoryProfile.plot_side_by_side`."""
    if not profiles:
        raise ValueError("profiles must have at least one profile, got none: give a dictionary of names and profiles")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a picture needs Matplotlib, which is not installed: pip install matplotlib") from None

    # The letters are legible in a picture of 900 pixels, the width of a README.
    figure = Figure(figsize=(max(6.5, 4.5 * len(profiles)), 3.8), dpi=200, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=9)  # small: a title may be long
    panels = figure.subplots(1, len(profiles), sharex=True, sharey=True, squeeze=False)[0]
    sizes = [allocated for samples in profiles.values() for _, allocated in samples]
    peak, lowest = max(sizes), min(sizes)
    unit = next((size for size in UNITS if peak >= size), KIB)
    for number, (axes, (name, samples)) in enumerate(zip(panels, profiles.items(), strict=True)):
        _draw_panel(axes, samples, unit, COLOURS[number % len(COLOURS)])
        axes.set_title(name, fontsize=12)
    panels[0].set_ylabel(f"allocated since the start, {UNITS[unit]}", fontsize=11)
    headroom = 0.16 * max(peak - lowest, 1)  # for the label above the peak
    panels[0].set_ylim((lowest - headroom if lowest < 0 else 0) / unit, (peak + headroom) / unit)
    panels[0].margins(x=0.01)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _draw_panel(axes: Axes, samples: Samples, unit: int, colour: str) -> None:
    milliseconds = [1e3 * seconds for seconds, _ in samples]
    allocated = [size / unit for _, size in samples]
    axes.fill_between(milliseconds, allocated, step="post", color=colour, alpha=0.3, linewidth=0)
    axes.step(milliseconds, allocated, where="post", color=colour, linewidth=1.4)
    seconds, most = max(samples, key=lambda sample: sample[1])
    at, peak = 1e3 * seconds, most / unit
    axes.axhline(peak, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.plot([at], [peak], "o", color=colour, markersize=6, clip_on=False, zorder=3)
    late = at > milliseconds[-1] / 2
    axes.annotate(
        f"peak {size_text(most)}",
        (at, peak),
        xytext=(-2 if late else 2, 7),
        textcoords="offset points",
        horizontalalignment="right" if late else "left",
        fontsize=12,
        fontweight="bold",
        color=colour,
    )
    axes.set_xlabel("time, ms", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
