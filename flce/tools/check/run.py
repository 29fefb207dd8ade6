"""Running checks: what each found, and what came of all of them."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import flce
from flce.engine.case import dtype_text
from flce.tools.check.figures import ExactnessCheck, Figure, Measurement
from flce.tools.check.inputs import forget
from flce.tools.check.suite import Missing, suite
from flce.tools.machine import BACKENDS, chosen, devices_of_a_kind, threads

# For the checks of a device, and for the quick ones. What is not begun by then is not checked.
SECONDS, QUICK_SECONDS = 240.0, 60.0
Status = Literal["right", "off", "failed"]


@dataclass(frozen=True)
class CheckResult:
    """What a check found."""

    device: str
    backend: str
    title: str
    dtype: str
    status: Status
    """"off": something is further from float64 than allowed, or not the same twice. "failed": an exception."""
    figures: tuple[Figure, ...]
    wrong: tuple[str, ...]
    """What is wrong, a sentence each."""
    plan: str
    seconds: float

    @property
    def worst(self) -> Figure | None:
        """The figure that takes most of what is allowed to it."""
        return max(self.figures, key=lambda figure: figure.share, default=None)

    @property
    def name(self) -> str:
        return f"{self.device}, {self.backend} backend, {self.dtype}, {self.title!r}"


@dataclass(frozen=True)
class CheckReport:
    results: tuple[CheckResult, ...]
    missing: tuple[Missing, ...]
    late: tuple[str, ...] = ()
    """Checks that there was no time for."""

    @property
    def wrong(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.status != "right")

    @property
    def right(self) -> bool:
        """Whether everything that was checked is right, and anything was."""
        return bool(self.results) and not self.wrong

    @property
    def verdict(self) -> str:
        """A sentence or two."""
        number, wrong = len(self.results), len(self.wrong)
        late = f" There was no time for {len(self.late)} further checks." if self.late else ""
        if not number:
            return "Nothing was checked." + late
        if wrong:
            return f"Something is off: {wrong} of {number} checks did not give what they have to.{late}"
        return (
            f"flce is exact here: in {number} checks its results are as close to float64 as those of PyTorch's own "
            f"operators or closer, but for roundings, and the same from run to run.{late}"
        )


@dataclass(frozen=True)
class Task:
    """A check, and where it runs."""

    device: torch.device
    backend: str
    check: ExactnessCheck

    def __str__(self) -> str:
        return f"{self.device} {self.backend} {dtype_text(self.check.dtype)} {self.check.title}"


@dataclass(frozen=True)
class Todo:
    """What there is to check, and what there is not."""

    tasks: tuple[Task, ...]
    missing: tuple[Missing, ...]
    quick: bool


def todo(device: torch.device | None, quick: bool) -> Todo:
    """The checks of a device, or of one of each kind that this machine has."""
    tasks: list[Task] = []
    missing: list[Missing] = []
    where, same = ([device], {}) if device is not None else devices_of_a_kind()
    for one in where:
        for backend in BACKENDS:
            of_both = suite(one, backend, quick)
            tasks += [Task(one, backend, check) for check in of_both.checks]
            missing += of_both.missing
    missing += [Missing(str(other), f"it is as {one}; --device {other} checks it") for other, one in same.items()]
    return Todo(tuple(tasks), tuple(missing), quick)


def run(what: Todo, begun: Callable[[Task], None]) -> CheckReport:
    """Every check in turn. `begun` is called before each."""
    results: list[CheckResult] = []
    late: list[str] = []
    started: dict[torch.device, float] = {}
    seconds = QUICK_SECONDS if what.quick else SECONDS
    # The quick checks are so small that threads which wait for each other take longer than the work: on a busy machine
    # a hundred times as long.
    with threads(1) if what.quick else contextlib.nullcontext():
        for task in what.tasks:
            begun(task)
            now = time.monotonic()
            if now - started.setdefault(task.device, now) > seconds:
                late.append(str(task))
            else:
                results.append(run_one(task))
    forget()
    return CheckReport(tuple(results), what.missing, tuple(late))


def run_one(task: Task) -> CheckResult:
    """An exception is a failed check."""
    began = time.monotonic()
    status: Status = "right"
    try:
        with chosen(task.backend):
            found = task.check.measure()
        wrong = [*(f"{figure}." for figure in found.figures if figure.off), *found.wrong]
        if wrong:
            status = "off"
    except Exception as error:
        found, wrong, status = Measurement(()), [_said(error)], "failed"
    return CheckResult(
        device=str(task.device),
        backend=task.backend,
        title=task.check.title,
        dtype=dtype_text(task.check.dtype),
        status=status,
        figures=found.figures,
        wrong=tuple(wrong),
        plan=found.plan,
        seconds=time.monotonic() - began,
    )


def _said(error: Exception) -> str:
    """Its class and first line, and the last line of flce that it passed."""
    package = Path(flce.__file__).parent
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(package)
    ]
    where = f" (flce/{Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})" if frames else ""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first or 'no message'}{where}"
