"""The search: draw calls, compare their results with bounds, shrink a call that fails, and write it as one line.

A call is a dict of literals: the arguments that differ from `Kind.defaults`. Its line, such as ``operator(vocab=3)``,
runs again with ``python -m tests.search --again 'LINE'``. Calls that failed are lines of tests/regressions.txt.
"""

from __future__ import annotations

import ast
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]
REGRESSIONS = Path(__file__).resolve().parents[1] / "regressions.txt"
# Intervals of error / bound, from 0 to 1, in which `Errors` counts.
STEPS = 1000
SHRINKING_SECONDS = 60.0
SAME_KERNELS = 40  # calls on a GPU
MOST_FAILURES = 30  # a run with more has one cause


class Mismatch(AssertionError):
    """A result that differs from the expected result. `what`: the name of the result."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(f"{what}: {text}")
        self.what = what


class Refused(Exception):
    """The call is not possible, for example because no plan fits the budget."""


@dataclass
class Errors:
    """Errors divided by their bounds, counted for each name of a result."""

    counts: dict[str, Tensor] = field(default_factory=dict)

    def compare(self, what: str, got: Tensor | None, expected: Tensor, bound: Tensor, largest: float = 0.0) -> None:
        """Compare a result with the oracle's, element by element, and count its errors.

        Args:
            largest: the largest number of the result's dtype; larger expected numbers may be infinite. 0: none.
        """
        if got is None:
            raise Mismatch(what, "is missing")
        if got.shape != expected.shape:
            raise Mismatch(what, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        if not expected.numel():
            return
        got, expected, bound = (t.detach().double().flatten() for t in (got, expected, bound.expand(expected.shape)))
        if largest:
            beyond = expected.abs() + bound >= largest
            got, expected, bound = got[~beyond], expected[~beyond], bound[~beyond]
        finite = expected.isfinite()
        same = (got.isnan() == expected.isnan()) & ((got == expected) | ~expected.isinf()) & (got.isfinite() == finite)
        error = torch.where(finite, (got - expected).abs(), torch.where(same, 0.0, torch.inf))
        bound = torch.where(finite & ~bound.isnan(), bound, 0.0)
        wrong = ~(error <= bound) & ~(same & ~finite)
        if wrong.any():
            worst = int(torch.where(wrong, error - bound, -torch.inf).argmax())
            numbers = f"{float(got[worst])!r}, expected {float(expected[worst])!r}"
            text = f"{numbers}: error {float(error[worst]):.3e}, bound {float(bound[worst]):.3e}"
            raise Mismatch(what, f"{text}; {int(wrong.sum())} of {len(wrong)} elements")
        ratios = (error / bound)[finite & (bound > 0)].clamp(max=1.0)
        counts = torch.histc(ratios, STEPS, 0.0, 1.0).cpu() if len(ratios) else torch.zeros(STEPS, dtype=ratios.dtype)
        self.counts[what] = self.counts.get(what, 0) + counts

    def table(self) -> Iterator[str]:
        """Yield for each result the number of elements, and error / bound: the 99.9th percentile and the maximum."""
        for what, counts in sorted(self.counts.items()):
            if counts.sum():
                share = counts.cumsum(0) / counts.sum()
                percentile = float((share < 0.999).sum() + 1) / STEPS
                largest = float(counts.nonzero().max() + 1) / STEPS
                yield f"{what:40} {int(counts.sum()):>12} {percentile:8.3f} {largest:8.3f}"


@dataclass(frozen=True)
class Kind:
    """A kind of calls that the search draws.

    Attributes:
        defaults: the value of each argument; a call has the arguments that differ.
        draw: returns a random call for a device, "cpu" or "cuda". The second of the two generators draws the arguments
            that decide which kernels are compiled. On a GPU it has one state for SAME_KERNELS calls.
        check: runs a call on a device and compares all results, with `Errors.compare`. Raises Mismatch for a wrong
            result, Refused for a call that is not possible; any other exception is a failure, too.
        simpler: yields calls that are simpler than a call.
        share: how often the kind is drawn, relative to others.
    """

    name: str
    defaults: Mapping[str, Any]
    draw: Callable[[random.Random, random.Random, str], Call]
    check: Callable[[Call, str, Errors], None]
    simpler: Callable[[Call, Mapping[str, Any]], Iterator[Call]] | None = None
    share: float = 1.0

    def run(self, call: Call, device: str, errors: Errors) -> Mismatch | None:
        """Return the failure of a call, or None."""
        try:
            self.check({**self.defaults, **call}, device, errors)
        except Mismatch as failure:
            return failure
        except (Refused, KeyboardInterrupt):
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{str(error)[-300:]} ({Path(place.filename).name}:{place.lineno})"
            return Mismatch(type(error).__name__, text)
        return None

    def line(self, call: Call) -> str:
        given = {name: value for name, value in call.items() if value != self.defaults[name]}
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def shrink(self, call: Call, failure: Mismatch, device: str) -> tuple[Call, Mismatch]:
        """Return a simpler call with a failure of the same result."""
        end, improved = time.monotonic() + SHRINKING_SECONDS, True
        while improved and time.monotonic() < end:
            improved = False
            for other in (self.simpler or simpler_arguments)(call, self.defaults):
                if time.monotonic() > end:
                    break
                try:
                    found = self.run(other, device, Errors())
                except Refused:
                    continue
                if found is not None and found.what == failure.what:
                    call, failure, improved = other, found, True
                    break
        return call, failure


def simpler_arguments(call: Call, defaults: Mapping[str, Any]) -> Iterator[Call]:
    """Yield calls in which one argument has its default, or a smaller number."""
    for name, value in call.items():
        if value == defaults[name]:
            continue
        yield {other: call[other] for other in call if other != name}
        if isinstance(value, str | bool) or value is None:
            continue
        if isinstance(value, int):
            smaller: list[Any] = [value // 2, value - 1] if value > 1 else []
        elif isinstance(value, tuple):
            smaller = [value[:k] + value[k + 1 :] for k in range(len(value))]
            numbers = [k for k, x in enumerate(value) if isinstance(x, int) and x > 1]
            smaller += [(*value[:k], x, *value[k + 1 :]) for k in numbers for x in (value[k] // 2, value[k] - 1)]
        else:
            smaller = []
        yield from ({**call, name: x} for x in smaller if x != value)


def parse(line: str) -> tuple[str, Call]:
    """Return the kind and the call of a line."""
    node = ast.parse(line.strip(), mode="eval").body
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(f"expected KIND(argument=value, ...), got {line!r}")
    return node.func.id, {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}


def regressions() -> list[tuple[str, str]]:
    """Return the device and the call of each line of tests/regressions.txt."""
    lines = [line for line in REGRESSIONS.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def keep(device: str, line: str, failure: Mismatch) -> None:
    """Add a call that failed to tests/regressions.txt."""
    if (device, line) not in regressions():
        with REGRESSIONS.open("a") as file:
            file.write(f"# {str(failure).splitlines()[0]}\n{device} {line}\n")


@dataclass
class Search:
    """A run of the search."""

    kinds: Mapping[str, Kind]
    device: str
    errors: Errors = field(default_factory=Errors)
    calls: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def try_call(self, kind: Kind, call: Call) -> Mismatch | None:
        try:
            failure = kind.run(call, self.device, self.errors)
        except Refused:
            self.refused += 1
            return None
        self.calls += 1
        return failure

    def run(self, seed: int, seconds: float = float("inf"), count: int | None = None) -> None:
        """Draw calls for some seconds, or a number of calls. Print failures, and keep them."""
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end and number != count and len(self.failures) < MOST_FAILURES:
            rng = compiled = random.Random(f"{seed}.{number}")
            if self.device == "cuda":
                compiled = random.Random(f"{seed} {number // SAME_KERNELS}")
            number += 1
            (kind,) = compiled.choices(list(self.kinds.values()), [each.share for each in self.kinds.values()])
            call = {k: v for k, v in kind.draw(rng, compiled, self.device).items() if v != kind.defaults[k]}
            failure = self.try_call(kind, call)
            if failure is None:
                continue
            if self.device == "cuda":  # Calls with the same kernels would fail, too.
                number += -number % SAME_KERNELS
            call, failure = kind.shrink(call, failure, self.device)
            line = kind.line(call)
            self.failures.append(line)
            keep(self.device, line, failure)
            print(f"{failure}\n    python -m tests.search --device {self.device} --again {line!r}", flush=True)
