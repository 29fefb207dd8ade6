"""Targets of flce's speed and memory on one H200 in bfloat16, and the verdicts of runs on these targets.

A speed is a multiple of the time of the bare matrix products of the same run, or of another call; medians. The median
of the runs meets a target within 2% of the limit. Workspace has no tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.contenders import BOUNDED, SAMPLED, budget_name, sums_in_bfloat16
from benchmarks.problem import Mode, OperatorCase, Shape, parse_shapes
from benchmarks.runs import NO_RESULT, BenchResult, Entry, Run
from benchmarks.tables import Table
from flce.core.sizes import MIB


@dataclass(frozen=True)
class Target:
    call: str  # the call of the operator, in words
    case: OperatorCase  # the measured case, with any contenders
    # The limit of the time, as a multiple of the time of `reference`; or a function of the time of `reference`.
    limit: float | Callable[[float], float] | None = None
    contender: str = "ours"
    reference: str = "floor"
    workspace_mib: int | None = None
    workspace_tolerance: float = 0.0
    also_measured: tuple[str, ...] = ()  # contenders that are measured in the same case, for the reader
    figure: str = "median_ms"  # the attribute of a result that is its time

    def on(self, shape: Shape, limit: float | None = None, **fields: Any) -> Target:
        """Return the target for another shape, with these fields of the case changed, and with `limit` if given."""
        tokens, hidden, vocab = shape
        case = replace(self.case, tokens=tokens, hidden=hidden, vocab=vocab, **fields)
        return replace(self, case=case, limit=self.limit if limit is None else limit)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender,) if self.limit is None else (self.reference, *self.also_measured, self.contender)


HEADS = parse_shapes("8192x4096x128256 4096x4096x128256 8192x3584x152064 8192x2304x256000")
# With few columns the products are short, and a pass over the logits is a larger part of the time.
NARROW: Shape = (16384, 1024, 151936)
MAIN = HEADS[0]
FIRST = OperatorCase(*MAIN)


def for_heads(target: Target, narrow: float, **fields: Any) -> list[Target]:
    """Return the target for all wide heads, and with the limit `narrow` for the narrow head."""
    return [*(target.on(shape, **fields) for shape in HEADS), target.on(NARROW, narrow, **fields)]


# The reference has no ignored label. A call that keeps the ignored rows multiplies zeros, which needs less power and,
# if power is the limit, less time.
HALF_IGNORED = Target("half of the labels ignored", FIRST, 0.54, BOUNDED, "ours-full", also_measured=("ours-keeping",))
VOCAB = Target("vocab, 256 MiB budget", FIRST, 1.10, "ours-vocab", "floor-recomputed", workspace_mib=256)
DEFAULT = Target("default options", FIRST, 1.05)
UNALIGNED = Target("unaligned vocabulary", FIRST, 1.15, reference="floor-aligned")

# The most important first: a run measures them in this order, until its deadline.
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

SMALL = parse_shapes(
    "8192x4096x32000 8192x2048x32000 4096x4096x32768 2048x2048x128256 512x2048x128256 64x4096x128256 8192x576x49152 "
    "2048x512x32000"
)
LONG_PRODUCTS_MS = 3.9  # 4, less the advantage of a GPU that runs cooler


def call_targets(shape: Shape) -> list[Target]:
    """Return the targets of a call from an idle GPU. The host takes at most 1.2 ms, or 1.2 times torch.compile."""
    case = OperatorCase(*shape, calls=True)
    host = Target("host", case, lambda ms: max(1.2, 1.2 / ms), reference="torch-compile", figure="host_ms")
    called = [Target("as called", case, 1.0, reference=name) for name in ("torch-compile", "stock")]
    alone = Target("alone", case, lambda ms: 1.15 if ms >= LONG_PRODUCTS_MS else 1.30, figure="alone_ms")
    return [host, *called, alone]


CALL_TARGETS = [target for shape in SMALL for target in call_targets(shape)]
CALL_TARGETS.append(Target("alone", replace(FIRST, calls=True), 1.05, figure="alone_ms"))  # launches are cheap here

# Logits that are never rounded, compared with rounded ones and torch.compile. In the last shape they are so many that
# neither way saves memory.
EXACT_SHAPES = parse_shapes(
    "64x4096x128256 256x4096x128256 512x2048x128256 512x4096x128256 1024x4096x128256 2048x2048x128256 4096x4096x32768 "
    "8192x2048x32000 8192x576x49152 2048x512x32000 4096x4096x128256"
)
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


NAMES_OFF = ("ours", budget_name(512), budget_name(64))


def without_products(shape: Shape, *limits: float) -> list[Target]:
    alone = replace(ALONE, reference="floor", also_measured=("ours-rounded",)).on(shape, own_products=False)
    pairs = zip(NAMES_OFF, limits, strict=True)
    return [replace(alone, call=name, contender=name, limit=limit) for name, limit in pairs]


WIDE_AND_SHORTER: list[Shape] = [HEADS[1], (8192, *NARROW[1:])]
FROZEN_OFF = replace(ALONE, call="ours-512MiB", contender=budget_name(512), limit=0.80, reference="floor-training")
FROZEN_OFF = replace(FROZEN_OFF, also_measured=("ours-rounded", "floor", "ours"))
EXACT_TARGETS = [
    *[target for shape in EXACT_SHAPES for target in exact_targets(shape)],
    replace(ALONE, call="workspace", workspace_mib=300).on(EXACT_SHAPES[5]),
    *[ALONE.on(EXACT_SHAPES[n], 1.05, mode="forward") for n in (0, 5, 9, 10)],
    # Calls that fused products cannot compute, or not always. All have products of 4 ms and more.
    ALONE.on(HEADS[1], 1.15, feature="bias"),
    *[ALONE.on(shape, 1.15, feature="label smoothing") for shape in WIDE_AND_SHORTER],
    *[ALONE.on(shape, 1.15, feature="adapter of rank 16") for shape in WIDE_AND_SHORTER],
    *[ALONE.on(shape, 1.15, dtype="float16") for shape in WIDE_AND_SHORTER],
    ALONE.on((4096, 4095, 128256), 1.15),
    *without_products(MAIN, 1.10, 1.55, 1.65),
    *without_products(HEADS[3], 1.15, 1.60, 1.65),
    *without_products(NARROW, 1.34, 1.65, 2.00),
    FROZEN_OFF.on(MAIN, own_products=False, mode="frozen-head"),
]

# The newest kernels of PyTorch, Liger and QuACK: flce is at least as fast.
RIVALS = ("torch-kernel", "torch-kernel-2048", "liger-hopper", "quack", "quack-scaled")
RIVAL_SHAPES = parse_shapes(
    "4096x4096x128256 8192x4096x128256 4096x8192x128256 8192x2304x256000 16384x1024x151936 2048x4096x128256"
)

# Time over budget, with the peers at their workspace.
CURVE_SHAPES = (HEADS[1], MAIN, NARROW)
CURVE_MIB = tuple(2**power for power in range(10))
OTHERS, CCES = "torch-compile stock liger liger-float32-8x trl", "cce cce-flat cce-unfiltered cce-exact"
CURVE_PEERS = (*OTHERS.split(), *RIVALS, *CCES.split())


def curve_case(shape: Shape) -> OperatorCase:
    """Return the case of one curve. Errors are measured on the first shape only."""
    names = ("floor", "ours", *map(budget_name, CURVE_MIB), *CURVE_PEERS)
    return OperatorCase(*shape, contenders=names, errors=shape == CURVE_SHAPES[0], label="curve")


def target_cases(targets: Iterable[Target] = TARGETS) -> list[OperatorCase]:
    """Return the cases of the targets, each with the contenders of its targets: first the floors, then the default."""
    names: dict[OperatorCase, list[str]] = {}
    for target in targets:
        names.setdefault(target.case, []).extend(target.contenders)
    rank = lambda name: (not name.startswith("floor"), name != "ours")  # noqa: E731
    return [replace(case, contenders=tuple(dict.fromkeys(sorted(names[case], key=rank)))) for case in names]


@dataclass(frozen=True)
class Rule:
    """A factor by which the fastest setting of flce, within the workspace of a peer, is faster than the peer."""

    peer: str
    factor: float = 1.1
    least_mib: int = 64  # workspace that flce may use even if the peer uses less
    bfloat16_sums: bool = False  # in flce; float32 otherwise
    settings: tuple[str, ...] = ()  # only these of flce; all, if empty


RULES = [
    *[Rule(name, 1.0) for name in ("torch-compile", *RIVALS)],
    # Liger's default sums the weight gradient in bfloat16.
    Rule("liger", bfloat16_sums=True),
    Rule("liger", 1.0, least_mib=256),
    *map(Rule, ("liger-float32-8x", "cce", "cce-unfiltered", "cce-exact", "trl", "fla", "torch-chunked")),
]
PEERS = tuple(dict.fromkeys(rule.peer for rule in RULES))
PEERS_LABEL = "peers"
SAME_BYTES = 1 * MIB  # two peaks this close count as equal: they differ by a few vectors with an entry for each token

TOLERANCE = 0.02  # the difference between equal calls
VERDICTS = MET, NEARLY, MISSED, UNMEASURED = "met", "met within 2%", "MISSED", "not measured"


class Finding(NamedTuple):
    key: Any  # identifies the target in every run
    value: float | None  # None if it was not measured
    verdict: str
    cells: Mapping[str, str] = {}  # its row of a table, by column


def judge(value: float | None, limit: float | None, tolerance: float = TOLERANCE) -> str:
    if value is None or limit is None:
        return UNMEASURED
    return MET if value <= limit else NEARLY if value <= (1 + tolerance) * limit else MISSED


def median_findings(runs: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Return for each target the median finding of the runs that measured it; of two the worse."""
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
    """Return a table with a row for each target; without rows if no target was measured."""
    verdicts = [finding.verdict for finding in findings]
    if set(verdicts) <= {UNMEASURED}:
        return Table(title, ["Not one of them was measured."], [])
    nearly = verdicts.count(NEARLY)
    met = f"{verdicts.count(MET) + nearly} of {len(verdicts)}" + f" ({nearly} within 2%)" * bool(nearly)
    rows = [[*finding.cells.values(), finding.verdict] for finding in findings]
    several = [f"the median of {len(runs)} runs"] if len(runs) > 1 else []
    all_notes = [*several, *notes, tables.spread_note(entries)]
    return Table(f"{title}: {met}", [*findings[0].cells, "verdict"], rows, all_notes)


def select_entries(runs: Sequence[Run], selects: Callable[[Any], bool] = lambda case: True) -> list[Entry]:
    return [entry for run in runs for entry in run.cases if selects(entry.case)]


def check(run: Run, target: Target) -> Finding:
    """Return the finding of a run. Its value is the time over the time of the reference, of one case of the run."""
    ours, reference = NO_RESULT, NO_RESULT
    for entry in run.cases:
        results = [entry.by_name(name) for name in target.contenders]
        if entry.case.problem == target.case and all(result.samples_ms for result in results):
            ours, reference = results[-1], results[0]
            break
    time, base = getattr(ours, target.figure), getattr(reference, target.figure)
    times = time / base if time and base else None
    limit = target.limit if not callable(target.limit) else target.limit(base) if base else None
    workspace_limit = None if target.workspace_mib is None else target.workspace_mib * MIB
    verdicts = [] if target.limit is None else [judge(times, limit)]
    if workspace_limit is not None:
        verdicts.append(judge(ours.workspace_bytes, workspace_limit, target.workspace_tolerance))
    cells = {
        "": target.call,
        tables.SHAPE: " x ".join(map(str, target.case.shape)),
        "ms": tables.milliseconds(time),
        "times": tables.ratio(times, digits=3),
        "limit": tables.NONE if limit is None else f"{limit:.2f} x {target.reference}",
        "MiB": tables.mebibytes(ours.workspace_bytes),
        "limit MiB": tables.mebibytes(workspace_limit),
    }
    return Finding(target, times, max(verdicts, key=VERDICTS.index), cells)


def check_targets(runs: Sequence[Run], targets: Sequence[Target] = TARGETS) -> list[Finding]:
    return median_findings([[check(run, target) for target in targets] for run in runs])


def target_tables(runs: Sequence[Run]) -> list[Table]:
    groups = {"Targets": TARGETS, "Targets of calls": CALL_TARGETS, "Targets of logits not rounded": EXACT_TARGETS}
    found = []
    for title, targets in groups.items():
        cases = {target.case for target in targets}
        entries = select_entries(runs, lambda case, cases=cases: case.problem in cases)  # type: ignore[misc]
        found.append(verdict_table(f"{title} met", check_targets(runs, targets), runs, entries))
    return found


def duels(runs: Sequence[Run], rules: Sequence[Rule] = RULES, mode: Mode = "forward+backward") -> list[Finding]:
    """Return the findings of every rule on every case of bfloat16 and this mode on which its peer was measured."""
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
    """Return the finding. Its value is the time of flce (infinity without a setting) over the time of the peer."""
    peer, ours = entry.by_name(rule.peer), best(entry, rule)
    share = (ours.median_ms or math.inf) / (peer.median_ms or 0.0)
    cells = {
        tables.SHAPE: " x ".join(map(str, entry.case.shape)),
        "peer": peer.title,
        "ms, MiB": figures(peer),
        "flce": ours.title or tables.NONE,
        "its ms, MiB": figures(ours),
        "times": tables.ratio(peer.median_ms, ours.median_ms),
        "required": f"{rule.factor:.1f}, {rule.least_mib} MiB",
    }
    return Finding((entry.case, rule), share, judge(share, 1 / rule.factor), cells)


def best(entry: Entry, rule: Rule) -> BenchResult:
    """Return the fastest setting of flce that the rule allows, repeats excluded."""
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
    if not result.samples_ms:
        return "no plan" if result.status == "unplanned" else tables.NONE
    workspace = "" if result.workspace_bytes is None else f", {tables.mebibytes(result.workspace_bytes)}"
    return tables.milliseconds(result.median_ms) + workspace


def duel_table(title: str, findings: Sequence[Finding], runs: Sequence[Run], entries: Sequence[Entry]) -> Table:
    notes = [
        "times: of the peer over the fastest setting of flce in the workspace that is allowed",
        "required: the smallest such factor; the larger of the peer's workspace and these MiB is allowed",
    ]
    return verdict_table(f"{title}, met", findings, runs, entries, notes)


def dominance_table(runs: Sequence[Run]) -> Table:
    entries = select_entries(runs, lambda case: case.label == PEERS_LABEL)
    return duel_table("No peer dominates", duels(runs), runs, entries)


# The allocator counts blocks of 512 bytes, and a call has vectors with an entry for each token.
PLAN_SHARE, PLAN_BYTES = 0.01, 1 * MIB


def plan_tables(runs: Sequence[Run]) -> list[Table]:
    """Return a table of the results of flce whose measured workspace differs from the plan; empty without plans.

    If ignored labels are skipped, or gradients are sampled, a plan is an upper bound, because numbers of labels and of
    entries are not known before the call. On a CPU PyTorch's products allocate memory that a plan does not count.
    """
    planned, rows = 0, []
    for entry in (entry for run in runs if run.head["device"]["type"] == "cuda" for entry in run.cases):
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
