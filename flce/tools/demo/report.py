"""What the two runs came to: a table for the terminal, facts for JSON, and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from flce.core.sizes import MIB
from flce.memory.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flce.memory.profile import MemoryProfile

STOCK, PATCHED = COLOURS[:2]


@dataclass(frozen=True)
class TrainingRun:
    """What one run of the training leaves behind."""

    model: str  # in words
    losses: list[float]
    seconds: list[float]  # of each step
    peak_bytes: int  # of a step, above the loaded model
    memory: MemoryProfile  # of that step

    @property
    def step_seconds(self) -> float:
        """The median: it passes over the first steps, which are slow, and over what else the machine did."""
        return statistics.median(self.seconds)

    def facts(self) -> dict[str, Any]:
        return {
            "losses": [_number(loss) for loss in self.losses],
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "step_peak_bytes": self.memory.peak,
        }


@dataclass(frozen=True)
class TrainingComparison:
    """Both runs, and whether their curves are the same.

    The mean difference decides: in bfloat16 every rounding that falls otherwise grows from step to step, and a single
    steep step shows it many times over, as it does between two stock runs.
    """

    title: str  # what was trained, in words
    stock: TrainingRun
    patched: TrainingRun
    tolerance: float

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.stock.losses, self.patched.losses, strict=True)]

    @property
    def mean_difference(self) -> float:
        return statistics.mean(self.differences)

    @property
    def agree(self) -> bool:
        return self.mean_difference <= self.tolerance  # False for NaN

    def facts(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "agree": self.agree,
            "mean_difference": _number(self.mean_difference),
            "max_difference": _number(max(self.differences)),
            "tolerance": self.tolerance,
            "stock": self.stock.facts(),
            "patched": self.patched.facts(),
        }


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def show(
    console: Console, comparison: TrainingComparison, print_table: Callable[[Console, Table], None] = Console.print
) -> None:
    """Prints the table, with ``print_table``, and the verdict."""
    stock, patched, difference = comparison.stock, comparison.patched, comparison.mean_difference
    runs = stock, patched
    memory, speed = patched.peak_bytes / stock.peak_bytes, patched.step_seconds / stock.step_seconds
    rows = [
        ("final loss", *(f"{run.losses[-1]:.5f}" for run in runs), ""),
        ("mean |difference| of the curves", "", "", f"{difference:.1e}"),
        ("max |difference| of the curves", "", "", f"{max(comparison.differences):.1e}"),
        ("peak memory, MiB", *(f"{run.peak_bytes / MIB:,.0f}" for run in runs), f"{memory:.0%}"),
        ("time per step, ms", *(f"{run.step_seconds * 1e3:,.0f}" for run in runs), f"{speed:.0%}"),
    ]
    heads = "stock", "patched", "patched\n/ stock"
    table = Table("", *(Column(name, justify="right", no_wrap=True) for name in heads))
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{comparison.title}[/]")
    print_table(console, table)
    console.print(
        "[dim]Peak memory: above the loaded model, so activations, gradients and optimizer state are in it. "
        "Time per step: the median.[/]\n"
    )
    steps = "1 step" if len(stock.losses) == 1 else f"{len(stock.losses)} steps"
    if comparison.agree:
        console.print(f"[green]The loss curves agree[/] to {difference:.1e} on average over {steps}.")
    else:
        console.print(
            f"[red]The loss curves differ[/] by {difference:.1e} on average over {steps}, "
            f"more than {comparison.tolerance:.0e}. (Over thousands of steps rounding alone can do that.)"
        )


def draw(file: Path, comparison: TrainingComparison) -> None:
    from matplotlib.figure import Figure

    stock, patched = comparison.stock, comparison.patched
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(comparison.title, fontsize=10)
    curves, memory, speed = figure.subplots(1, 3, width_ratios=[3, 1, 1])
    steps = range(1, len(stock.losses) + 1)
    curves.plot(steps, stock.losses, color=STOCK, linewidth=5, alpha=0.6, label="stock")
    curves.plot(steps, patched.losses, color=PATCHED, linewidth=1.5, linestyle="--", label="patched")
    curves.set(
        title=f"Loss: the curves differ by {comparison.mean_difference:.1e} on average",
        xlabel="step",
        ylabel="cross-entropy",
    )
    curves.legend(frameon=False)
    bars(memory, "Peak memory, MiB", stock.peak_bytes / MIB, patched.peak_bytes / MIB)
    bars(speed, "Time per step, ms", stock.step_seconds * 1e3, patched.step_seconds * 1e3)
    for axes in (curves, memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def bars(axes: Axes, title: str, stock: float, patched: float) -> None:
    drawn = axes.bar(["stock", "patched"], [stock, patched], color=[STOCK, PATCHED], width=0.6)
    axes.bar_label(drawn, fmt="{:,.0f}", padding=2)
    axes.margins(y=0.12)
    axes.set_title(title)
