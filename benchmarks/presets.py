"""Lists of cases, those first that matter most, and how long to measure them."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from benchmarks.cases import Case, Effort, Mode
from benchmarks.contenders import budget_name
from benchmarks.dominance import PEERS_LABEL, SHAPES, peer_case
from benchmarks.targets import target_cases


class Preset(str, Enum):
    tiny = "tiny"  # seconds on a CPU; for the tests
    cpu = "cpu"  # the shape that flce promises not to lose on a CPU
    targets = "targets"  # everything that flce promises of its speed on one H200
    peers = "peers"  # our settings and the peers, on one large GPU
    h200 = "h200"  # the last two


def preset_cases(preset: Preset, errors: bool) -> list[Case]:
    """The cases of a preset; `errors` adds the comparison with the float64 oracle."""
    if preset is Preset.tiny:
        return tiny_cases(errors)
    if preset is Preset.cpu:
        return [Case(2048, 512, 32000, dtype=dtype, budget_mib=32, errors=errors) for dtype in ("float32", "bfloat16")]
    cases = target_cases() if preset is not Preset.peers else []
    if errors:
        exactness = Case(32768, 1024, 32000, time=False, errors=True)
        cases += [exactness, replace(exactness, dtype="float16", upstream=2.0**16)]
    if preset is not Preset.targets:
        cases += [peer_case(Case(*shape)) for shape in SHAPES]
    return cases


def tiny_cases(errors: bool) -> list[Case]:
    shape = (96, 64, 500)
    whole = [
        Case(*shape, dtype=dtype, mode=mode, budget_mib=1, errors=errors)
        for dtype in ("float32", "bfloat16")
        for mode in Mode
    ]
    skipping = Case(*shape, ignored=0.5, contenders=("ours-full", "ours-keeping", "ours-skipping"), errors=errors)
    curve = ("ours", budget_name(1), budget_name(1, bfloat16_sums=True))
    return [*whole, skipping, peer_case(Case(*shape), curve)]


def preset_effort(preset: Preset, case: Case) -> Effort:
    if preset is Preset.tiny:
        return Effort(rounds=3, seconds=1.0)
    if preset is Preset.cpu:
        return Effort(rounds=9, seconds=15.0)
    # Targets are a matter of one percent, peers of ten.
    return Effort(rounds=9, seconds=0.45) if case.label == PEERS_LABEL else Effort(rounds=24, seconds=0.8)
