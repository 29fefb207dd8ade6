"""What flce promises of its speed and memory on one H200 in bfloat16, and what runs say of it.

A speed is a multiple of the bare matrix products of the same run, or of another call; medians. A promise is kept by the
median of the runs, within 2% of the limit. Workspace has no tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.contenders import BOUNDED, budget_name, sums_in_bfloat16
from benchmarks.problem import Mode, OperatorCase, Shape
from benchmarks.runs import NO_RESULT, BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.core.sizes import MIB

# --- what is promised of calls ---


@dataclass(frozen=True)
class Target:
    """One promise: of time, of workspace, or of both."""

    call: str  # in words, how the operator is called
    case: OperatorCase  # on which it is measured, whoever takes part in it
    # A bound of the time, in multiples of that of `reference`; or how that follows from the time of `reference`.
    limit: float | Callable[[float], float] | None = None
    contender: str = "ours"
    reference: str = "floor"
    workspace_mib: int | None = None
    workspace_tolerance: float = 0.0
    also_measured: tuple[str, ...] = ()  # who is measured with them, for the reader
    figure: str = "median_ms"  # of a result: its time

    def on(self, shape: Shape, limit: float | None = None, **fields: Any) -> Target:
        """The same of another shape, with these fields of the case changed; of another limit, if there is one."""
        tokens, hidden, vocab = shape
        case = replace(self.case, tokens=tokens, hidden=hidden, vocab=vocab, **fields)
        return replace(self, case=case, limit=self.limit if limit is None else limit)

    def matches(self, case: OperatorCase) -> bool:
        return case.problem == self.case

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, *self.also_measured, self.contender)


HEADS: list[Shape] = [(8192, 4096, 128256), (4096, 4096, 128256), (8192, 3584, 152064), (8192, 2304, 256000)]
# The logits weigh most beside products of few columns: a pass over them costs a larger part of the time.
NARROW: Shape = (16384, 1024, 151936)
MAIN = HEADS[0]
FIRST = OperatorCase(*MAIN)


def for_heads(target: Target, narrow: float, **fields: Any) -> list[Target]:
    """The same promise for all wide heads, and another limit for the narrow one."""
    return [*(target.on(shape, **fields) for shape in HEADS), target.on(NARROW, narrow, **fields)]


# Beside a call with no label ignored. One that keeps the ignored rows multiplies zeros instead, which takes less power
# and, where that is the limit, less time.
HALF_IGNORED = Target(
    "half of the labels ignored", FIRST, 0.54, "ours-skipping", "ours-full", also_measured=("ours-keeping",)
)
VOCAB = Target("vocab, 256 MiB budget", FIRST, 1.10, "ours-vocab", "floor-recomputed", workspace_mib=256)
DEFAULT = Target("default options", FIRST, 1.05)
UNALIGNED = Target("unaligned vocabulary", FIRST, 1.15, reference="floor-aligned")

# Those first that matter most: a run measures them in this order, until its deadline.
TARGETS = [
    *(DEFAULT.on(shape, limit) for shape, limit in zip([*HEADS, NARROW], (1.05, 1.05, 1.06, 1.09, 1.15), strict=True)),
    *for_heads(VOCAB, narrow=1.20),
    Target("64 MiB budget", FIRST, 1.85, budget_name(64), workspace_mib=64),
    Target("64 MiB budget, bfloat16 sums", FIRST, 1.40, budget_name(64, "bf16"), workspace_mib=64),
    UNALIGNED.on((8192, 2048, 49153)),
    replace(UNALIGNED, call="odd number of tokens").on((7777, 2048, 128256)),
    UNALIGNED.on((16384, 768, 50257), 1.35),
    *for_heads(Target("no gradient", FIRST, 1.08, workspace_mib=128), narrow=1.20, mode="forward"),
    *for_heads(Target("frozen head", FIRST, 1.07), narrow=1.20, mode="frozen-head"),
    *for_heads(Target('reduction="none"', FIRST, 1.08), narrow=1.18, mode="reduction-none"),
    *[HALF_IGNORED.on(shape, ignored=0.5) for shape in HEADS],
    Target("workspace as of 16,384 tokens", OperatorCase(131072, 2048, 128256), workspace_mib=4137),
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


def call_targets(shape: Shape) -> list[Target]:
    """The host at most 1.2 ms or 1.2 times torch.compile's; none faster as called; alone beside the bare products."""
    case = OperatorCase(*shape, calls=True)
    host = Target("host", case, lambda ms: max(1.2, LEAST_HOST_MS / ms), reference="torch-compile", figure="host_ms")
    called = [Target("as called", case, 1.0, reference=name) for name in ("torch-compile", "stock")]
    alone = Target("alone", case, lambda ms: 1.15 if ms >= LONG_PRODUCTS_MS else 1.30, figure="alone_ms")
    return [host, *called, alone]


CALL_TARGETS = [target for shape in SMALL for target in call_targets(shape)]
CALL_TARGETS.append(
    Target("alone", replace(FIRST, calls=True), 1.05, figure="alone_ms")
)  # where launching was never a matter

# --- logits that are never rounded, beside rounded ones and torch.compile ---

# The last is one of many logits, where neither way has to spare memory.
EXACT_SHAPES: list[Shape] = [
    (64, 4096, 128256),
    (256, 4096, 128256),
    (512, 2048, 128256),
    (512, 4096, 128256),
    (1024, 4096, 128256),
    (2048, 2048, 128256),
    (4096, 4096, 32768),
    (8192, 2048, 32000),
    (8192, 576, 49152),
    (2048, 512, 32000),
    HEADS[1],
]
LONG_PRODUCTS = 5e11  # N H V from which the three products take 4 ms
MANY_LOGITS = 2**28
EXACT = replace(FIRST, calls=True, label="exact")
ALONE = Target("alone", EXACT, reference="ours-rounded", figure="alone_ms", also_measured=("floor",))


def exact_targets(shape: Shape) -> list[Target]:
    tokens, hidden, vocab = shape
    many = 1.02 if tokens * vocab > MANY_LOGITS else 1.05
    alone = ALONE.on(shape, many if tokens * hidden * vocab >= LONG_PRODUCTS else 1.15)
    compiled = replace(alone, reference="torch-compile", limit=1.05 if tokens <= 64 else 1.0)
    return [alone, compiled, replace(compiled, call="as called", limit=1.1, figure="median_ms")]


def without_products(shape: Shape, limits: Mapping[str, float]) -> list[Target]:
    of = replace(ALONE, reference="floor", also_measured=("ours-rounded",)).on(shape, own_products=False)
    return [replace(of, call=name, contender=name, limit=limit) for name, limit in limits.items()]


NAMES_OFF = ("ours", budget_name(512), budget_name(64))
SHORTER: Shape = (8192, *NARROW[1:])
EXACT_TARGETS = [
    *[target for shape in EXACT_SHAPES for target in exact_targets(shape)],
    replace(ALONE, call="workspace", workspace_mib=300).on(EXACT_SHAPES[5]),
    *[ALONE.on(EXACT_SHAPES[n], 1.05, mode="forward") for n in (0, 5, 9, 10)],
    # Calls that our own products cannot make, or not always. All have products of 4 ms and more.
    ALONE.on(HEADS[1], 1.15, feature="bias"),
    *[
        ALONE.on(shape, 1.15, feature=what)
        for what in ("label smoothing", "adapter of rank 16")
        for shape in (HEADS[1], SHORTER)
    ],
    *[ALONE.on(shape, 1.15, dtype="float16") for shape in (HEADS[1], SHORTER)],
    ALONE.on((4096, 4095, 128256), 1.15),
    *without_products(MAIN, dict(zip(NAMES_OFF, (1.10, 1.55, 1.65), strict=True))),
    *without_products(HEADS[3], dict(zip(NAMES_OFF, (1.15, 1.60, 1.65), strict=True))),
    *without_products(NARROW, dict(zip(NAMES_OFF, (1.34, 1.65, 2.00), strict=True))),
    *[
        replace(target, reference="floor-training", also_measured=("ours-rounded", "floor", "ours")).on(
            MAIN, mode="frozen-head"
        )
        for target in without_products(MAIN, {budget_name(512): 0.80})
    ],
]


# --- time over budget, beside peers at theirs ---

CURVE_SHAPES = (HEADS[1], MAIN, NARROW)
CURVE_MIB = tuple(2**power for power in range(10))
CURVE_PEERS = (
    *("torch-compile", "stock", "liger", "liger-float32-8x", "trl", "quack"),
    *("cce", "cce-flat", "cce-unfiltered", "cce-exact"),
)


def curve_case(shape: Shape) -> OperatorCase:
    """Errors, where they are asked for, are those of the first shape."""
    names = ("floor", "ours", *map(budget_name, CURVE_MIB), *CURVE_PEERS)
    return OperatorCase(*shape, contenders=names, errors=shape == CURVE_SHAPES[0], label="curve")


def target_cases(targets: Iterable[Target] = TARGETS) -> list[OperatorCase]:
    """The cases that the targets need, each with only the contenders that are compared on it."""
    contenders: dict[OperatorCase, list[str]] = {}
    for target in targets:
        contenders.setdefault(target.case, []).extend(target.contenders)
    # First the floors, then our default.
    ranked = {
        case: sorted(names, key=lambda n: (not n.startswith("floor"), n != "ours"))
        for case, names in contenders.items()
    }
    return [replace(case, contenders=tuple(dict.fromkeys(names))) for case, names in ranked.items()]


# --- what is promised beside peers ---


@dataclass(frozen=True)
class Rule:
    """Beside a peer: the fastest of our settings in its workspace is so much faster."""

    peer: str
    factor: float = 1.1
    least_mib: int = 64  # workspace that we may take even where the peer takes less
    bfloat16_sums: bool = False  # in ours; float32 otherwise
    settings: tuple[str, ...] = ()  # only these of ours; all, if empty


RULES = [
    Rule("torch-compile", 1.0),
    Rule("quack", 1.0),
    # Liger's default sums the weight gradient in bfloat16.
    Rule("liger", bfloat16_sums=True),
    Rule("liger", 1.0, least_mib=256),
    *map(Rule, ("liger-float32-8x", "cce", "cce-unfiltered", "cce-exact", "trl", "fla", "torch-chunked")),
]
PEERS = tuple(dict.fromkeys(rule.peer for rule in RULES))
PEERS_LABEL = "peers"
SAME_BYTES = 1 * MIB  # peaks this close are the same: they differ by a few vectors with an entry per token


# --- whether it is kept ---

TOLERANCE = 0.02  # equal calls differ by as much
VERDICTS = MET, NEARLY, MISSED, UNMEASURED = "met", "met within 2%", "MISSED", "not measured"


class Finding(NamedTuple):
    """A promise, and the figure that was measured of it; None where nothing was."""

    key: Any  # which promise it is: the same in every run
    value: float | None
    verdict: str
    cells: Mapping[str, str] = {}  # what its line of a table says, by column


def judge(value: float | None, limit: float | None, tolerance: float = TOLERANCE) -> str:
    if value is None or limit is None:
        return UNMEASURED
    return MET if value <= limit else NEARLY if value <= (1 + tolerance) * limit else MISSED


def median_findings(runs: Iterable[Iterable[Finding]]) -> list[Finding]:
    """For every promise the finding that is the median of the runs that measured it; of two the worse."""
    groups: dict[Any, list[Finding]] = {}
    for finding in (finding for findings in runs for finding in findings):
        groups.setdefault(finding.key, []).append(finding)
    found = []
    for group in groups.values():
        measured = sorted((f for f in group if f.value is not None), key=lambda finding: finding.value or 0.0)
        found.append(measured[len(measured) // 2] if measured else group[0])
    return found


def verdict_table(
    title: str, findings: Sequence[Finding], runs: Sequence[Run], entries: Sequence[Entry], notes: Sequence[str] = ()
) -> Table:
    """A line for each promise; no line where not one was measured. The title says how many are kept, the last note how
    far equal calls of these entries differ."""
    verdicts = [finding.verdict for finding in findings]
    if set(verdicts) <= {UNMEASURED}:
        return Table(title, ["Not one of them was measured."], [])
    nearly = verdicts.count(NEARLY)
    kept = f"{verdicts.count(MET) + nearly} of {len(verdicts)}" + f" ({nearly} within 2%)" * bool(nearly)
    rows = [[*finding.cells.values(), finding.verdict] for finding in findings]
    several = [f"the median of {len(runs)} runs"] if len(runs) > 1 else []
    all_notes = [*several, *notes, tables.spread_note(entries)]
    return Table(f"{title}: {kept}", [*findings[0].cells, "verdict"], rows, all_notes)


def entries_of(runs: Sequence[Run], wanted: Callable[[Any], bool] = lambda case: True) -> list[Entry]:
    """The measured cases of all runs that are wanted."""
    return [entry for run in runs for entry in run.cases if wanted(entry.case)]


def check(run: Run, target: Target) -> Finding:
    """Its value is the time in multiples of the reference's."""
    ours, reference = find(run, target)
    time, base = getattr(ours, target.figure), getattr(reference, target.figure)
    times = time / base if time and base else None
    limit = target.limit if not callable(target.limit) else target.limit(base) if base else None
    workspace_limit = None if target.workspace_mib is None else target.workspace_mib * MIB
    verdicts = [] if target.limit is None else [judge(times, limit)]
    verdicts += (
        [] if workspace_limit is None else [judge(ours.workspace_bytes, workspace_limit, target.workspace_tolerance)]
    )
    cells = {
        "": target.call,
        "tokens x hidden x vocabulary": " x ".join(map(str, target.case.shape)),
        "ms": tables.milliseconds(time),
        "times": tables.ratio(times, digits=3),
        "limit": tables.NONE if limit is None else f"{limit:.2f} x {target.reference}",
        "MiB": tables.mebibytes(ours.workspace_bytes),
        "limit MiB": tables.mebibytes(workspace_limit),
    }
    return Finding(target, times, max(verdicts, key=VERDICTS.index), cells)


def find(run: Run, target: Target) -> tuple[BenchResult, BenchResult]:
    """The contender and the reference of a target, of one case: only then did they take turns."""
    for entry in entries_of([run], target.matches):
        results = [entry.by_name(name) for name in target.contenders]
        if all(result.samples_ms for result in results):
            return results[-1], results[0]
    return NO_RESULT, NO_RESULT


def check_targets(runs: Sequence[Run], targets: Sequence[Target] = TARGETS) -> list[Finding]:
    """All targets, also those that the runs have nothing about."""
    return median_findings([[check(run, target) for target in targets] for run in runs])


def target_tables(runs: Sequence[Run]) -> list[Table]:
    """One of the device, one of calls, and one of logits that are not rounded."""
    groups = {"Targets": TARGETS, "Targets of calls": CALL_TARGETS, "Targets of logits not rounded": EXACT_TARGETS}
    found = []
    for title, targets in groups.items():
        cases = {target.case for target in targets}
        entries = entries_of(runs, lambda case, cases=cases: case.problem in cases)  # type: ignore[misc]
        found.append(verdict_table(f"{title} met", check_targets(runs, targets), runs, entries))
    return found


def duels(runs: Sequence[Run], rules: Sequence[Rule] = RULES, mode: Mode = "forward+backward") -> list[Finding]:
    """Every rule on every case of bfloat16, in this mode, on which its peer was measured."""
    return median_findings(
        [
            duel(entry, rule)
            for entry in run.cases
            if (entry.case.mode, entry.case.dtype, entry.case.calls) == (mode, "bfloat16", False)
            for rule in rules
            if entry.by_name(rule.peer).samples_ms and entry.by_name(rule.peer).workspace_bytes is not None
        ]
        for run in runs
    )


def duel(entry: Entry, rule: Rule) -> Finding:
    """The value is our time over the peer's: infinite without a setting of ours."""
    peer, ours = entry.by_name(rule.peer), best(entry, rule)
    share = (ours.median_ms or math.inf) / (peer.median_ms or 0.0)
    cells = {
        "tokens x hidden x vocabulary": " x ".join(map(str, entry.case.shape)),
        "peer": peer.title,
        "ms, MiB": figures(peer),
        "flce": ours.title or tables.NONE,
        "its ms, MiB": figures(ours),
        "times": tables.ratio(peer.median_ms, ours.median_ms),
        "wanted": f"{rule.factor:.1f}, {rule.least_mib} MiB",
    }
    return Finding((entry.case, rule), share, judge(share, 1 / rule.factor), cells)


def best(entry: Entry, rule: Rule) -> BenchResult:
    """Not the repeat of one: the better of two figures of one setting is not its figure."""
    limit = max((entry.by_name(rule.peer).workspace_bytes or 0) + SAME_BYTES, rule.least_mib * MIB)
    settings = [
        result
        for result in entry.results
        if result.family == "ours"
        and result.samples_ms
        and (not rule.settings or result.contender in rule.settings)
        and sums_in_bfloat16(result.contender) == rule.bfloat16_sums
        and result.workspace_bytes is not None
        and result.workspace_bytes <= limit
    ]
    return min(settings, key=lambda result: result.median_ms or 0.0, default=NO_RESULT)


def figures(result: BenchResult) -> str:
    """Time and workspace."""
    if not result.samples_ms:
        return "no plan" if result.status == "unplanned" else tables.NONE
    workspace = "" if result.workspace_bytes is None else f", {tables.mebibytes(result.workspace_bytes)}"
    return tables.milliseconds(result.median_ms) + workspace


def duel_table(title: str, findings: Sequence[Finding], runs: Sequence[Run], entries: Sequence[Entry]) -> Table:
    """Every peer on every shape, beside the fastest of our settings that takes no more workspace."""
    notes = [
        "times: of the peer over that of the fastest setting of flce in the workspace that is allowed",
        "wanted: how much that is to be, in the workspace of the peer or the MiB given, whichever is more",
    ]
    return verdict_table(f"{title}, met", findings, runs, entries, notes)


def dominance_table(runs: Sequence[Run]) -> Table:
    entries = entries_of(runs, lambda case: case.label == PEERS_LABEL)
    return duel_table("No peer dominates", duels(runs), runs, entries)


# --- whether a workspace is as planned ---

# The allocator counts blocks in whole 512 bytes, and a call has vectors with an entry per token.
PLAN_SHARE, PLAN_BYTES = 0.01, 1 * MIB


def plan_tables(runs: Sequence[Run]) -> list[Table]:
    """The figures of ours whose measured workspace is not the planned one; none where nothing was planned.

    Where ignored labels are skipped, which nothing tells beforehand, a plan is an upper bound. On a CPU PyTorch's
    products take memory of their own, which is no part of a plan.
    """
    planned, rows = 0, []
    for entry in (entry for run in runs if run.head["device"]["type"] == "cuda" for entry in run.cases):
        for result in entry.results:
            expected, measured = result.planned_bytes, result.workspace_bytes
            if expected is None or measured is None:
                continue
            planned += 1
            bounded = result.contender.startswith(BOUNDED)
            apart = measured - expected if bounded else abs(measured - expected)
            if apart > PLAN_SHARE * expected + PLAN_BYTES:
                both = tables.mebibytes(expected), tables.mebibytes(measured)
                rows.append([entry.case.title, result.title, *both, MISSED])
    title = f"Workspace as planned: {planned - len(rows)} of {planned}"
    columns = ["", "call", "planned MiB", "measured MiB", "verdict"] if rows else ["All are."]
    notes = ["within 1% and 1 MiB; where ignored labels are skipped no more than that"]
    return [Table(title, columns, rows, notes, failure=bool(rows))] if planned else []
