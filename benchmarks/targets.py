"""Targets of flce's speed and memory on one H200 in bfloat16, and the verdicts of runs on these targets.

A speed is a multiple of the time of the bare matrix products of the same run, or of another call; medians. A time meets
a target within 2% of the limit. Workspace has no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks import tables
from benchmarks.contenders import BOUNDED, SAMPLED, budget_name
from benchmarks.problem import OperatorCase, Shape, parse_shapes
from benchmarks.runs import NO_RESULT, Run
from benchmarks.tables import Table
from flce.core.sizes import MIB


@dataclass(frozen=True)
class Target:
    call: str  # the call of the operator, in words
    case: OperatorCase  # the measured case, with any contenders
    limit: float | None = None  # of the time, as a multiple of the time of `reference`
    contender: str = "ours"
    reference: str = "floor"
    workspace_mib: int | None = None

    def on(self, shape: Shape, limit: float | None = None, **fields: Any) -> Target:
        """Return the target for another shape, with these fields of the case changed, and with `limit` if given."""
        return replace(self, case=self.case.on(shape, **fields), limit=self.limit if limit is None else limit)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, self.contender)


HEADS = parse_shapes("8192x4096x128256 4096x4096x128256 8192x3584x152064 8192x2304x256000")
# With few columns the products are short, and a pass over the logits is a larger part of the time.
NARROW: Shape = (16384, 1024, 151936)
MAIN = HEADS[0]
FIRST = OperatorCase(*MAIN)


def for_heads(target: Target, narrow: float, **fields: Any) -> list[Target]:
    """Return the target for all wide heads, and with the limit `narrow` for the narrow head."""
    return [*(target.on(shape, **fields) for shape in HEADS), target.on(NARROW, narrow, **fields)]


# The reference has no ignored label. A call that keeps the ignored rows would multiply zeros, which needs less power
# and, if power is the limit, less time.
HALF_IGNORED = Target("half of the labels ignored", FIRST, 0.54, BOUNDED, "ours-full")
VOCAB = Target("vocab, 256 MiB budget", FIRST, 1.10, "ours-vocab", "floor-recomputed", workspace_mib=256)
DEFAULT = Target("default options", FIRST, 1.05)
UNALIGNED = Target("unaligned vocabulary", FIRST, 1.15, reference="floor-aligned")

# The most important first: a run measures them in this order, until its deadline.
TARGETS = [
    *(DEFAULT.on(shape, limit) for shape, limit in zip([*HEADS, NARROW], (1.05, 1.05, 1.06, 1.09, 1.15), strict=True)),
    *for_heads(VOCAB, narrow=1.20),
    Target("64 MiB budget", FIRST, 1.85, budget_name(64), workspace_mib=64),
    Target("64 MiB budget, bfloat16 sums", FIRST, 1.40, "ours-bf16-64MiB", workspace_mib=64),
    UNALIGNED.on((8192, 2048, 49153)),
    replace(UNALIGNED, call="odd number of tokens").on((7777, 2048, 128256)),
    UNALIGNED.on((16384, 768, 50257), 1.35),
    *for_heads(Target("no gradient", FIRST, 1.08, workspace_mib=128), narrow=1.20, mode="forward"),
    *for_heads(Target("frozen head", FIRST, 1.07), narrow=1.20, mode="frozen-head"),
    *for_heads(Target('reduction="none"', FIRST, 1.08), narrow=1.18, mode="reduction-none"),
    *[HALF_IGNORED.on(shape, ignored=0.5) for shape in HEADS],
    Target("workspace as of 16,384 tokens", OperatorCase(131072, 2048, 128256), workspace_mib=4137),
]


def target_cases() -> list[OperatorCase]:
    """Return the cases of the targets, each with the contenders of its targets: first the floors, then the default."""
    names: dict[OperatorCase, list[str]] = {}
    for target in TARGETS:
        names.setdefault(target.case, []).extend(target.contenders)
    rank = lambda name: (not name.startswith("floor"), name != "ours")  # noqa: E731
    return [replace(case, contenders=tuple(dict.fromkeys(sorted(names[case], key=rank)))) for case in names]


TOLERANCE = 0.02  # the difference between equal calls
VERDICTS = MET, NEARLY, MISSED, UNMEASURED = "met", "met within 2%", "MISSED", "not measured"


def judge(value: float | None, limit: float | None, tolerance: float = TOLERANCE) -> str:
    if value is None or limit is None:
        return UNMEASURED
    return MET if value <= limit else NEARLY if value <= (1 + tolerance) * limit else MISSED


def check(run: Run, target: Target) -> dict[str, str]:
    """Return the row of a table, by column: the figures of a target, of one case of the run, and the verdict."""
    ours, reference = NO_RESULT, NO_RESULT
    for entry in run.cases:
        results = [entry.by_name(name) for name in target.contenders]
        if entry.case.problem == target.case and all(result.samples_ms for result in results):
            ours, reference = results[-1], results[0]
            break
    time, base = ours.median_ms, reference.median_ms
    times = time / base if time and base else None
    workspace_limit = None if target.workspace_mib is None else target.workspace_mib * MIB
    verdicts = [] if target.limit is None else [judge(times, target.limit)]
    if workspace_limit is not None:
        verdicts.append(judge(ours.workspace_bytes, workspace_limit, tolerance=0.0))
    return {
        "": target.call,
        tables.SHAPE: " x ".join(map(str, target.case.shape)),
        "ms": tables.milliseconds(time),
        "times": tables.ratio(times, digits=3),
        "limit": tables.NONE if target.limit is None else f"{target.limit:.2f} x {target.reference}",
        "MiB": tables.mebibytes(ours.workspace_bytes),
        "limit MiB": tables.mebibytes(workspace_limit),
        "verdict": max(verdicts, key=VERDICTS.index),
    }


def target_table(run: Run) -> Table:
    """Return a table with a row for each target that was measured."""
    found = [check(run, target) for target in TARGETS]
    measured = [row for row in found if row["verdict"] != UNMEASURED]
    met = sum(row["verdict"] in (MET, NEARLY) for row in measured)
    title = f"Targets met: {met} of {len(measured)}"
    title += f"; {len(found) - len(measured)} more were not measured" * (len(measured) < len(found))
    return Table(title, list(found[0]), [list(row.values()) for row in measured], [tables.spread_note(run.cases)])


# The allocator counts blocks of 512 bytes, and a call has vectors with an entry for each token.
PLAN_SHARE, PLAN_BYTES = 0.01, 1 * MIB


def plan_tables(run: Run) -> list[Table]:
    """Return a table of the results of flce whose measured workspace differs from the plan; empty without plans.

    If ignored labels are skipped, or gradients are sampled, a plan is an upper bound, because numbers of labels and of
    entries are not known before the call. On a CPU PyTorch's products allocate memory that a plan does not count.
    """
    planned, rows = 0, []
    for entry in run.cases if run.head["device"]["type"] == "cuda" else ():
        for result in entry.results:
            expected, measured = result.planned_bytes, result.workspace_bytes
            if expected is None or measured is None:
                continue
            planned += 1
            bounded = result.contender.startswith((BOUNDED, SAMPLED))
            excess = measured - expected if bounded else abs(measured - expected)
            if excess > PLAN_SHARE * expected + PLAN_BYTES:
                both = tables.mebibytes(expected), tables.mebibytes(measured)
                rows.append([entry.case.title, result.title, *both, MISSED])
    title = f"Workspace as planned: {planned - len(rows)} of {planned}"
    columns = ["", "call", "planned MiB", "measured MiB", "verdict"] if rows else ["All are."]
    notes = ["within 1% and 1 MiB; at most the plan, within 1% and 1 MiB, if labels are skipped or gradients sampled"]
    return [Table(title, columns, rows, notes, failure=bool(rows))] if planned else []
