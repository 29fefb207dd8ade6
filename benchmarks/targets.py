"""What flce promises of its speed and memory on one H200 in bfloat16, and whether runs keep it.

A speed is a multiple of the bare matrix products of the same run, or of another call of ours; medians. `verdicts` says
when a target counts as met. Workspace has no tolerance.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import MIB
from benchmarks.operator_contenders import budget_name
from benchmarks.operator_problem import Mode, OperatorCase, Shape
from benchmarks.results import Result
from benchmarks.tables import AnyRun, Columns, Table, mebibytes, milliseconds, spread_note, tabulate
from benchmarks.verdicts import Check, Verdict, judge, middle, tally, worst


@dataclass(frozen=True)
class Target:
    """One promise: of time, of workspace, or of both."""

    call: str  # in words, how the operator is called
    shape: Shape
    limit: float | None = None  # of the time, in multiples of that of `reference`
    contender: str = "ours"
    reference: str = "floor"
    mode: Mode = Mode.forward_backward
    ignored: float = 0.0
    workspace_mib: int | None = None
    workspace_shape: Shape | None = None  # whose workspace is not to be exceeded
    beside: tuple[str, ...] = ()  # who is measured with them, for the reader

    @property
    def case(self) -> OperatorCase:
        """The problem on which it is measured."""
        return OperatorCase(*self.shape, mode=self.mode, ignored=self.ignored)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, *self.beside, self.contender)


@dataclass(frozen=True, kw_only=True)
class TargetCheck(Check):
    """`value` is the time in multiples of the reference's."""

    target: Target
    milliseconds: float | None = None
    workspace_bytes: int | None = None
    workspace_limit: int | None = None  # bytes

    @property
    def measured(self) -> bool:
        return self.milliseconds is not None

    @property
    def key(self) -> Hashable:
        return self.target

    @property
    def verdict(self) -> Verdict:
        parts = [] if self.target.limit is None else [super().verdict]
        if self.target.workspace_mib is not None or self.target.workspace_shape is not None:
            parts.append(judge(self.workspace_bytes, self.workspace_limit, tolerance=0.0))
        return Verdict.unmeasured if Verdict.unmeasured in parts else worst(parts)


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

# Those first that matter most: a run measures them in this order, until its deadline.
TARGETS = [
    Target("default options", MAIN, 1.05),
    Target("default options", HEADS[1], 1.05),
    Target("default options", HEADS[2], 1.06),
    Target("default options", HEADS[3], 1.09),
    Target("default options", NARROW, 1.15),
    Target("logits_dtype=float32", MAIN, 1.12, "ours-float32-logits"),
    *on_heads(
        Target("vocab, 256 MiB budget", MAIN, 1.10, "ours-vocab", "floor-recomputed", workspace_mib=256), narrow=1.20
    ),
    Target("64 MiB budget", MAIN, 1.85, budget_name(64), workspace_mib=64),
    Target("64 MiB budget, bfloat16 sums", MAIN, 1.40, budget_name(64, bfloat16_sums=True), workspace_mib=64),
    Target("unaligned vocabulary", (8192, 2048, 49153), 1.15, reference="floor-aligned"),
    Target("odd number of tokens", (7777, 2048, 128256), 1.15, reference="floor-aligned"),
    Target("unaligned vocabulary", (16384, 768, 50257), 1.35, reference="floor-aligned"),
    *on_heads(Target("no gradient", MAIN, 1.08, mode=Mode.forward, workspace_mib=128), narrow=1.20),
    *on_heads(Target("frozen head", MAIN, 1.07, mode=Mode.frozen), narrow=1.20),
    *on_heads(Target('reduction="none"', MAIN, 1.08, mode=Mode.none), narrow=1.18),
    *[replace(HALF_IGNORED, shape=shape) for shape in HEADS],
    Target("workspace as of fewer tokens", LONG[1], workspace_shape=LONG[0]),
]


def target_cases(targets: Iterable[Target] = TARGETS) -> list[OperatorCase]:
    """The cases that the targets need, each with nobody but the contenders that are compared on it."""
    contenders: dict[OperatorCase, list[str]] = {}
    for target in targets:
        contenders.setdefault(target.case, []).extend(target.contenders)
        if target.workspace_shape is not None:
            contenders.setdefault(replace(target, shape=target.workspace_shape).case, []).append(target.contender)
    return [replace(case, contenders=tuple(dict.fromkeys(names))) for case, names in contenders.items()]


def check_targets(runs: Sequence[AnyRun], targets: Sequence[Target] = TARGETS) -> list[TargetCheck]:
    """All targets in the median of the runs, also those that the runs have nothing about."""
    return middle([[check(run, target) for target in targets] for run in runs])


def check(run: AnyRun, target: Target) -> TargetCheck:
    ours, reference = find(run, target)
    limit = None if target.workspace_mib is None else target.workspace_mib * MIB
    if target.workspace_shape is not None:
        other, _ = find(run, replace(target, shape=target.workspace_shape))
        limit = None if other is None else other.workspace_bytes
    empty = TargetCheck(value=None, limit=target.limit, target=target, workspace_limit=limit)
    if ours is None or reference is None:
        return empty
    times = ours.median_ms / reference.median_ms if ours.median_ms and reference.median_ms else None
    return replace(empty, value=times, milliseconds=ours.median_ms, workspace_bytes=ours.workspace_bytes)


def find(run: AnyRun, target: Target) -> tuple[Result | None, Result | None]:
    """The contender and the reference of a target, of one case: only then did they take turns."""
    wanted = target.case
    for entry in run.cases:
        if all(getattr(entry.case, name) == getattr(wanted, name) for name in ("shape", "dtype", "mode", "ignored")):
            results = [entry.by_name(name) for name in target.contenders]
            if all(result is not None and result.samples_ms for result in results):
                return results[-1], results[0]
    return None, None


def target_table(runs: Sequence[AnyRun], targets: Sequence[Target] = TARGETS) -> Table:
    """Every target, its figure, and whether it is met; none at all where the runs are about something else."""
    checks = check_targets(runs, targets)
    if not any(check.measured for check in checks):
        return Table("Targets", ["Not one of them was measured."], [], [])
    columns: Columns[TargetCheck] = {
        "": lambda c: c.target.call,
        "tokens x hidden x vocabulary": lambda c: " x ".join(map(str, c.target.shape)),
        "ms": lambda c: milliseconds(c.milliseconds),
        "times": lambda c: "-" if c.value is None else f"{c.value:.3f}",
        "limit": lambda c: "-" if c.target.limit is None else f"{c.target.limit:.2f} x {c.target.reference}",
        "MiB": lambda c: mebibytes(c.workspace_bytes),
        "limit MiB": lambda c: mebibytes(c.workspace_limit),
        "verdict": lambda c: c.verdict.value,
    }
    notes = [f"the median of {len(runs)} runs"] if len(runs) > 1 else []
    notes.append(spread_note([entry for run in runs for entry in run.cases if not entry.case.label]))
    return tabulate(f"Targets met: {tally(check.verdict for check in checks)}", checks, columns, notes)
