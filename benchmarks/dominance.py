"""Whether flce has, for every peer, a setting that is faster at no more workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import MIB, Case, Mode
from benchmarks.contenders import budget_name, sums_in_bfloat16
from benchmarks.results import Result, Run

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
    Rule("liger-float32-8x"),
    Rule("cce"),
    Rule("cce-unfiltered"),
    Rule("cce-exact"),
    Rule("trl"),
    Rule("fla"),
    Rule("torch-chunked"),
]

PEERS = tuple(dict.fromkeys(rule.peer for rule in RULES))
# 592: half of a MiB less than the float32 sums of a head of 151936 x 1024, what Liger's take there.
BUDGETS_MIB = (64, 128, 256, 592, 768, 1024, 1536, 2048)
# 60: blocks of 3,584 classes, whose products fill the device more evenly than those of 3,840.
BFLOAT16_BUDGETS_MIB = (60, 64)
CURVE = (
    "ours",
    *(budget_name(mib) for mib in BUDGETS_MIB),
    *(budget_name(mib, bfloat16_sums=True) for mib in BFLOAT16_BUDGETS_MIB),
)
SHAPES = [
    (8192, 4096, 128256),
    (16384, 1024, 151936),
    (4096, 4096, 128256),
    (8192, 2304, 256000),
    (8192, 3584, 152064),
    (16384, 768, 50257),
]
PEERS_LABEL = "peers"


def peer_case(case: Case, curve: Sequence[str] = CURVE) -> Case:
    """The problem of `case` with our settings and everybody else."""
    names = ("floor", "floor-aligned", *curve, "stock", *PEERS)
    return Case(*case.shape, dtype=case.dtype, contenders=names, label=PEERS_LABEL)


@dataclass(frozen=True)
class Duel:
    """A peer on one case, and the fastest of our settings that may be compared with it."""

    case: Case
    rule: Rule
    peer: Result
    ours: Result | None  # None: no setting in that workspace was measured

    @property
    def times(self) -> float | None:
        if self.ours is None or self.ours.median_ms is None or self.peer.median_ms is None:
            return None
        return self.peer.median_ms / self.ours.median_ms

    @property
    def met(self) -> bool:
        return self.times is not None and self.times >= self.rule.factor


def duels(run: Run, rules: Sequence[Rule] = RULES) -> list[Duel]:
    """Every rule on every case of bfloat16 training on which its peer was measured."""
    found = []
    for entry in run.cases:
        if entry.case.mode is not Mode.forward_backward or entry.case.dtype != "bfloat16":
            continue
        for rule in rules:
            peer = entry.by_name(rule.peer)
            if peer is not None and peer.samples_ms and peer.workspace_bytes is not None:
                found.append(Duel(entry.case, rule, peer, best(entry.results, rule, peer.workspace_bytes)))
    return found


def best(results: Sequence[Result], rule: Rule, workspace_bytes: int) -> Result | None:
    limit = max(workspace_bytes + SAME_BYTES, rule.least_mib * MIB)
    settings = [
        (result.median_ms, index)
        for index, result in enumerate(results)
        if result.family == "ours"
        and result.median_ms is not None
        and sums_in_bfloat16(result.contender) == rule.bfloat16_sums
        and result.workspace_bytes is not None
        and result.workspace_bytes <= limit
    ]
    return results[min(settings)[1]] if settings else None
