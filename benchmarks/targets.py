"""What flce promises of its speed and memory on one H200 in bfloat16, and whether runs keep it.

A speed is a multiple of the bare matrix products of the same run, or of another call; medians. `tables` says when a
target counts as met. Workspace has no tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks import reports, verdicts
from benchmarks.verdicts import Check, Verdict
from flce.bench import tables
from flce.bench.cases import MIB
from flce.bench.contenders import BOUNDED, budget_name
from flce.bench.problem import Mode, OperatorCase, Shape
from flce.bench.results import NOBODY, Result, Run
from flce.bench.tables import Table


@dataclass(frozen=True)
class Target:
    """One promise: of time, of workspace, or of both."""

    call: str  # in words, how the operator is called
    shape: Shape
    # Of the time, in multiples of that of `reference`; or how that follows from the time of `reference`.
    limit: float | Callable[[float], float] | None = None
    contender: str = "ours"
    reference: str = "floor"
    mode: Mode = "forward+backward"
    ignored: float = 0.0
    workspace_mib: int | None = None
    workspace_shape: Shape | None = None  # whose workspace is not to be exceeded
    beside: tuple[str, ...] = ()  # who is measured with them, for the reader
    calls: bool = False  # as `call_meter` times them
    figure: str = "median_ms"  # of a result: its time

    @property
    def case(self) -> OperatorCase:
        """The problem on which it is measured."""
        return OperatorCase(*self.shape, mode=self.mode, ignored=self.ignored, calls=self.calls)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, *self.beside, self.contender)


HEADS: list[Shape] = [(8192, 4096, 128256), (4096, 4096, 128256), (8192, 3584, 152064), (8192, 2304, 256000)]
# The logits weigh most beside products of few columns: a pass over them costs a larger part of the time.
NARROW: Shape = (16384, 1024, 151936)
MAIN = HEADS[0]
LONG: list[Shape] = [(16384, 2048, 128256), (131072, 2048, 128256)]


def on_heads(target: Target, narrow: float) -> list[Target]:
    """The same promise for all wide heads, and another limit for the narrow one."""
    return [replace(target, shape=shape) for shape in HEADS] + [replace(target, shape=NARROW, limit=narrow)]


# Of a call with no label ignored. One that keeps the ignored rows multiplies zeros instead, which takes less power and,
# where that is the limit, less time.
HALF_IGNORED = Target(
    "half of the labels ignored", MAIN, 0.54, "ours-skipping", "ours-full", ignored=0.5, beside=("ours-keeping",)
)
VOCAB = Target("vocab, 256 MiB budget", MAIN, 1.10, "ours-vocab", "floor-recomputed", workspace_mib=256)

# Those first that matter most: a run measures them in this order, until its deadline.
TARGETS = [
    Target("default options", MAIN, 1.05),
    Target("default options", HEADS[1], 1.05),
    Target("default options", HEADS[2], 1.06),
    Target("default options", HEADS[3], 1.09),
    Target("default options", NARROW, 1.15),
    Target("logits_dtype=float32", MAIN, 1.12, "ours-float32-logits"),
    *on_heads(VOCAB, narrow=1.20),
    Target("64 MiB budget", MAIN, 1.85, budget_name(64), workspace_mib=64),
    Target("64 MiB budget, bfloat16 sums", MAIN, 1.40, budget_name(64, "bf16"), workspace_mib=64),
    Target("unaligned vocabulary", (8192, 2048, 49153), 1.15, reference="floor-aligned"),
    Target("odd number of tokens", (7777, 2048, 128256), 1.15, reference="floor-aligned"),
    Target("unaligned vocabulary", (16384, 768, 50257), 1.35, reference="floor-aligned"),
    *on_heads(Target("no gradient", MAIN, 1.08, mode="forward", workspace_mib=128), narrow=1.20),
    *on_heads(Target("frozen head", MAIN, 1.07, mode="frozen-head"), narrow=1.20),
    *on_heads(Target('reduction="none"', MAIN, 1.08, mode="reduction-none"), narrow=1.18),
    *[replace(HALF_IGNORED, shape=shape) for shape in HEADS],
    Target("workspace as of fewer tokens", LONG[1], workspace_shape=LONG[0]),
]

SMALL: list[Shape] = [
    (8192, 4096, 32000),
    (8192, 2048, 32000),
    (4096, 4096, 32768),
    (2048, 2048, 128256),
    (512, 2048, 128256),
    (64, 4096, 128256),
    (8192, 576, 49152),
    (2048, 512, 32000),
]
LEAST_HOST_MS = 1.2
LONG_PRODUCTS_MS = 3.9  # 4, less what a GPU that runs cooler needs less


def host_limit(compiled_ms: float) -> float:
    """1.2 ms, or 1.2 times torch.compile, whichever is more."""
    return max(1.2, LEAST_HOST_MS / compiled_ms)


def alone_limit(products_ms: float) -> float:
    return 1.15 if products_ms >= LONG_PRODUCTS_MS else 1.30


def of_calls(shape: Shape) -> list[Target]:
    of = functools.partial(Target, shape=shape, calls=True)
    called = [of("as called", limit=1.0, reference=name) for name in ("torch-compile", "stock")]
    alone = of("alone", limit=alone_limit, figure="alone_ms")
    return [of("host", limit=host_limit, reference="torch-compile", figure="host_ms"), *called, alone]


CALL_TARGETS = [target for shape in SMALL for target in of_calls(shape)]
CALL_TARGETS.append(Target("alone", MAIN, 1.05, calls=True, figure="alone_ms"))  # where launching was never a matter


def target_cases(targets: Iterable[Target] = TARGETS) -> list[OperatorCase]:
    """The cases that the targets need, each with nobody but the contenders that are compared on it."""
    contenders: dict[OperatorCase, list[str]] = {}
    for target in targets:
        contenders.setdefault(target.case, []).extend(target.contenders)
        if target.workspace_shape is not None:
            contenders.setdefault(replace(target, shape=target.workspace_shape).case, []).append(target.contender)
    return [replace(case, contenders=tuple(dict.fromkeys(names))) for case, names in contenders.items()]


def check_targets(runs: Sequence[Run], targets: Sequence[Target] = TARGETS) -> list[Check]:
    """All targets in the median of the runs, also those that the runs have nothing about."""
    return verdicts.middle([[check(run, target) for target in targets] for run in runs])


def check(run: Run, target: Target) -> Check:
    """Its value is the time in multiples of the reference's."""
    ours, reference = find(run, target) or (NOBODY, NOBODY)
    room = None if target.workspace_mib is None else target.workspace_mib * MIB
    if target.workspace_shape is not None:
        other = find(run, replace(target, shape=target.workspace_shape))
        room = None if other is None else other[0].workspace_bytes
    time, base = getattr(ours, target.figure), getattr(reference, target.figure)
    times = time / base if time and base else None
    limit = target.limit if not callable(target.limit) else target.limit(base) if base else None
    bounded = target.workspace_mib is not None or target.workspace_shape is not None
    others = (verdicts.judge(ours.workspace_bytes, room, tolerance=0.0),) if bounded else ()
    cells = {
        "": target.call,
        "tokens x hidden x vocabulary": " x ".join(map(str, target.shape)),
        "ms": tables.milliseconds(time),
        "times": tables.ratio(times, digits=3),
        "limit": tables.NONE if limit is None else f"{limit:.2f} x {target.reference}",
        "MiB": tables.mebibytes(ours.workspace_bytes),
        "limit MiB": tables.mebibytes(room),
    }
    return Check(target, times, limit, others=others, cells=cells)


SAME = ("shape", "dtype", "mode", "ignored", "calls")


def find(run: Run, target: Target) -> tuple[Result, Result] | None:
    """The contender and the reference of a target, of one case: only then did they take turns."""
    wanted = target.case
    for entry in run.cases:
        if all(getattr(entry.case, name) == getattr(wanted, name) for name in SAME):
            results = [entry.by_name(name) for name in target.contenders]
            if all(result.samples_ms for result in results):
                return results[-1], results[0]
    return None


def target_tables(runs: Sequence[Run]) -> list[Table]:
    """One of the device and one of calls; of these two those that the runs have figures of."""
    found = [target_table(runs), target_table(runs, CALL_TARGETS)]
    return [table for table in found if table.rows] or found[:1]


def target_table(runs: Sequence[Run], targets: Sequence[Target] = TARGETS) -> Table:
    """Every target, its figure, and whether it is met; none at all where the runs are about something else."""
    checks, calls = check_targets(runs, targets), targets[0].calls
    if all(check.verdict is Verdict.unmeasured for check in checks):
        return Table("Targets", ["Not one of them was measured."], [])
    entries = [entry for run in runs for entry in run.cases if not entry.case.label and entry.case.calls == calls]
    title = "Targets of calls met" if calls else "Targets met"
    return verdicts.verdict_table(title, checks, [*reports.median_note(runs), tables.spread_note(entries)])


# The allocator counts blocks in whole 512 bytes, and a call has vectors with an entry per token.
PLAN_SHARE, PLAN_BYTES = 0.01, 1 * MIB


def plan_tables(runs: Sequence[Run]) -> list[Table]:
    """The figures of ours whose measured workspace is not the planned one; none where nothing was planned.

    Where ignored labels are skipped, which nobody knows beforehand, a plan is an upper bound. On a CPU PyTorch's
    products take memory of their own, which is no part of a plan.
    """
    entries = [entry for run in runs if run.head["device"]["type"] == "cuda" for entry in run.cases]
    planned = 0
    rows = []
    for case, result in ((entry.case, result) for entry in entries for result in entry.results):
        expected, measured = result.planned_bytes, result.workspace_bytes
        if expected is None or measured is None:
            continue
        planned += 1
        bounded = case.ignored and result.contender.startswith(BOUNDED)
        apart = measured - expected if bounded else abs(measured - expected)
        if apart > PLAN_SHARE * expected + PLAN_BYTES:
            figures = tables.mebibytes(expected), tables.mebibytes(measured)
            rows.append([case.title, result.title, *figures, Verdict.missed.value])
    title = f"Workspace as planned: {planned - len(rows)} of {planned}"
    columns = ["", "call", "planned MiB", "measured MiB", "verdict"] if rows else ["All are."]
    notes = ["within 1% and 1 MiB; where ignored labels are skipped no more than that"]
    return [Table(title, columns, rows, notes, failure=bool(rows))] if planned else []
