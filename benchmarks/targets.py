"""What flce promises of its speed and memory on one H200 in bfloat16, and whether a run keeps it.

A speed is a multiple of the bare matrix products of the same run, or of another call of ours; medians.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import MIB, Case, Mode
from benchmarks.contenders import budget_name
from benchmarks.results import CaseResult, Result, Run

Shape = tuple[int, int, int]  # tokens, hidden size, vocabulary


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
    def case(self) -> Case:
        """The problem on which it is measured."""
        return Case(*self.shape, mode=self.mode, ignored=self.ignored)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, *self.beside, self.contender)


@dataclass(frozen=True)
class Check:
    """A target, and what was measured of it; None where nothing was."""

    target: Target
    milliseconds: float | None
    times: float | None
    workspace_bytes: int | None
    workspace_limit: int | None  # bytes

    @property
    def met(self) -> bool | None:
        """None without the figures."""
        parts: list[tuple[float | None, float | None]] = []
        if self.target.limit is not None:
            parts.append((self.times, self.target.limit))
        if self.target.workspace_mib is not None or self.target.workspace_shape is not None:
            parts.append((self.workspace_bytes, self.workspace_limit))
        if any(figure is None or limit is None for figure, limit in parts):
            return None
        return all(figure <= limit for figure, limit in parts if figure is not None and limit is not None)


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


def target_cases(targets: Iterable[Target] = TARGETS) -> list[Case]:
    """The cases that the targets need, each with nobody but the contenders that are compared on it."""
    contenders: dict[Case, list[str]] = {}
    for target in targets:
        contenders.setdefault(target.case, []).extend(target.contenders)
        if target.workspace_shape is not None:
            contenders.setdefault(replace(target, shape=target.workspace_shape).case, []).append(target.contender)
    return [replace(case, contenders=tuple(dict.fromkeys(names))) for case, names in contenders.items()]


def check_targets(run: Run, targets: Sequence[Target] = TARGETS) -> list[Check]:
    """All targets, also those that the run has nothing about."""
    return [check(run, target) for target in targets]


def check(run: Run, target: Target) -> Check:
    ours, reference = find(run, target)
    limit = None if target.workspace_mib is None else target.workspace_mib * MIB
    if target.workspace_shape is not None:
        other, _ = find(run, replace(target, shape=target.workspace_shape))
        limit = None if other is None else other.workspace_bytes
    if ours is None:
        return Check(target, None, None, None, limit)
    times = None
    if ours.median_ms and reference is not None and reference.median_ms:
        times = ours.median_ms / reference.median_ms
    return Check(target, ours.median_ms, times, ours.workspace_bytes, limit)


def find(run: Run, target: Target) -> tuple[Result | None, Result | None]:
    """The contender and the reference of a target, of one case: only then did they take turns."""
    for entry in run.cases:
        if matches(entry, target):
            results = [entry.by_name(name) for name in target.contenders]
            if all(result is not None and result.samples_ms for result in results):
                return results[-1], results[0]
    return None, None


def matches(entry: CaseResult, target: Target) -> bool:
    case, wanted = entry.case, target.case
    return (case.shape, case.dtype, case.mode, case.ignored) == (
        wanted.shape,
        wanted.dtype,
        wanted.mode,
        wanted.ignored,
    )
