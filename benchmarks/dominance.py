"""Whether flce has, for every peer, a setting that is faster at no more workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import verdicts
from benchmarks.verdicts import Check
from flce.bench import tables
from flce.bench.cases import MIB
from flce.bench.contenders import budget_name, sums_in_bfloat16
from flce.bench.problem import OperatorCase, Shape
from flce.bench.results import NOBODY, Result, Run
from flce.bench.tables import Table

# Peaks this close are the same: they differ by a few vectors with an entry per token.
SAME_BYTES = 1 * MIB


@dataclass(frozen=True)
class Rule:
    """What is to be true of a peer: one of our settings is so many times as fast."""

    peer: str
    factor: float = 1.1
    least_mib: int = 64  # workspace that we may take even where the peer takes less
    bfloat16_sums: bool = False  # in ours; float32 otherwise


RULES = [
    Rule("torch-compile", 1.0),
    Rule("quack", 1.0),
    # Liger's default sums the weight gradient in bfloat16.
    Rule("liger", bfloat16_sums=True),
    Rule("liger", 1.0, least_mib=256),
    *map(Rule, ("liger-float32-8x", "cce", "cce-unfiltered", "cce-exact", "trl", "fla", "torch-chunked")),
]

PEERS = tuple(dict.fromkeys(rule.peer for rule in RULES))
# 592: half of a MiB less than the float32 sums of a head of 151936 x 1024, what Liger's take there.
BUDGETS_MIB = (64, 128, 256, 592, 768, 1024, 1536, 2048)
# 60: blocks of 3,584 classes, whose products fill the device more evenly than those of 3,840.
BFLOAT16_BUDGETS_MIB = (60, 64)
CURVE = (
    "ours",
    *(budget_name(mib) for mib in BUDGETS_MIB),
    *(budget_name(mib, "bf16") for mib in BFLOAT16_BUDGETS_MIB),
)
SHAPES: list[Shape] = [
    (8192, 4096, 128256),
    (16384, 1024, 151936),
    (4096, 4096, 128256),
    (8192, 2304, 256000),
    (8192, 3584, 152064),
    (16384, 768, 50257),
]
PEERS_LABEL = "peers"


def peer_case(shape: Shape, curve: Sequence[str] = CURVE) -> OperatorCase:
    """A problem with our settings and everybody else."""
    names = ("floor", "floor-aligned", *curve, "stock", *PEERS)
    return OperatorCase(*shape, contenders=names, label=PEERS_LABEL)


def duels(runs: Sequence[Run], rules: Sequence[Rule] = RULES) -> list[Check]:
    """Every rule on every case of bfloat16 training on which its peer was measured, in the median of the runs.

    The value is the time of the peer over ours.
    """
    return verdicts.middle([duels_of(run, rules) for run in runs])


def duels_of(run: Run, rules: Sequence[Rule]) -> list[Check]:
    found = []
    for entry in run.cases:
        if entry.case.mode != "forward+backward" or entry.case.dtype != "bfloat16" or entry.case.calls:
            continue
        for rule in rules:
            peer = entry.by_name(rule.peer)
            if peer.median_ms is None or peer.workspace_bytes is None:
                continue
            ours = best(entry.results, rule, peer.workspace_bytes)
            # Without a setting of ours the peer is not beaten.
            times = peer.median_ms / ours.median_ms if ours.median_ms else 0.0
            cells = {
                "tokens x hidden x vocabulary": " x ".join(map(str, entry.case.shape)),
                "peer": peer.title,
                "ms, MiB": figures(peer),
                "flce": ours.title or tables.NONE,
                "its ms, MiB": figures(ours),
                "times": tables.ratio(times or None),
                "wanted": f"{rule.factor:.1f}, {rule.least_mib} MiB",
            }
            found.append(Check((entry.case, rule), times, rule.factor, at_least=True, cells=cells))
    return found


def best(results: Sequence[Result], rule: Rule, workspace_bytes: int) -> Result:
    """Not the repeat of one: the better of two figures of one setting is not its figure."""
    limit = max(workspace_bytes + SAME_BYTES, rule.least_mib * MIB)
    settings = [
        result
        for result in results
        if result.family == "ours"
        and result.samples_ms
        and sums_in_bfloat16(result.contender) == rule.bfloat16_sums
        and result.workspace_bytes is not None
        and result.workspace_bytes <= limit
    ]
    return min(settings, key=lambda result: result.median_ms or 0.0, default=NOBODY)


def figures(result: Result) -> str:
    """Time and workspace."""
    if not result.samples_ms:
        return tables.NONE
    workspace = "" if result.workspace_bytes is None else f", {tables.mebibytes(result.workspace_bytes)}"
    return tables.milliseconds(result.median_ms) + workspace


def dominance_table(runs: Sequence[Run]) -> Table:
    """Every peer on every shape, beside the fastest of our settings that takes no more workspace."""
    notes = [
        "times: of the peer over that of the fastest setting of flce in the workspace that is allowed",
        "wanted: how much that is to be, in the workspace of the peer or the MiB given, whichever is more",
        tables.spread_note([entry for run in runs for entry in run.cases if entry.case.label == PEERS_LABEL]),
    ]
    return verdicts.verdict_table("No peer dominates, met", duels(runs), notes)
