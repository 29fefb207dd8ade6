"""GB/s over the number of columns: a panel for each task and dtype, a line for each contender."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import RowRun
from benchmarks.row_report import TaskRun, task_runs
from benchmarks.row_targets import OURS, ROOF, of_task
from benchmarks.rows import ON_CHIP_BYTES, TASKS, RowCase

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

LOOKS = {  # colour, marker
    OURS: ("#c0392b", "o"),
    "eager": ("#2c3e50", "s"),
    "torch-compile": ("#8e44ad", "D"),
    "liger": ("#2980b9", "^"),
    ROOF: ("#7f8c8d", ""),
}


def draw(run: RowRun, path: Path) -> None:
    """The caller has chosen a backend of matplotlib."""
    from matplotlib import pyplot

    found = [part for part in task_runs(run) if any(result.samples_ms for e in part.entries for result in e.results)]
    if not found:
        raise ValueError("the results hold no figures")
    tasks = [task for task in TASKS if any(part.task == task for part in found)]
    dtypes = list(dict.fromkeys(part.dtype for part in found))
    figure, axes = pyplot.subplots(
        len(tasks),
        len(dtypes),
        figsize=(6.0 * len(dtypes), 2.8 * len(tasks) + 0.8),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    panels = {(part.task, part.dtype): part for part in found}
    legend: dict[str, Artist] = {}
    for row, task in enumerate(tasks):
        for column, dtype in enumerate(dtypes):
            axis = axes[row, column]
            if (task, dtype) in panels:
                panel(axis, panels[task, dtype])
                handles, labels = axis.get_legend_handles_labels()
                legend |= dict(zip(map(str, labels), handles, strict=True))
            else:
                axis.set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend))
    figure.suptitle(f"Bandwidth of the fewest bytes possible, {run.head['device']['name']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def panel(axis: Axes, found: TaskRun) -> None:
    for name, title in found.titles.items():
        results = [(entry.case.columns, of_task(entry, found.task).get(name)) for entry in found.entries]
        points = [
            (columns, result.gigabytes_per_second)
            for columns, result in results
            if result is not None and result.gigabytes_per_second is not None
        ]
        colour, marker = LOOKS.get(name, ("#27ae60", "v"))
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            # Who was measured at few sizes says nothing of those between.
            linestyle="--" if name == ROOF else "-" if len(points) == len(found.entries) else ":",
            label=title,
        )
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.2)
    itemsize = RowCase(1, 1, found.dtype).row_bytes
    axis.axvline(ON_CHIP_BYTES / itemsize, color="#bdc3c7", linewidth=0.8)
    axis.set_title(f"{found.task.title}, {found.dtype}", fontsize=9)
    axis.set_xlabel("columns")
    axis.set_ylabel("GB/s")
