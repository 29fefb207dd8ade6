"""The benchmark of log-probabilities: what its preset measures, its targets need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.logprobs import CONTENDERS, LOGPROBS, RULES, TARGETS, TINY, half_ignored
from benchmarks.targets import MET, MISSED, check_targets, duels
from flce.core.sizes import MIB
from flce.testing.problem import IGNORED
from flce.tools.bench.problem import OperatorProblem
from flce.tools.bench.results import BenchResult, Entry, Run

HEAD: dict[str, Any] = {"device": {"type": "cuda", "name": "made up"}}
OVER_THE_FLOOR = {"floor-forward": 0.25, "ours-forward": 0.25, "ours-skipping": 0.5, "trl": 1.1, "liger": 1.1}


def made_up(slower: float, mib: float) -> Run:
    """Ours as fast as its products, times `slower`; verl's kernel is as fast as the products."""

    def result(name: str, family: str) -> BenchResult:
        times = 10 * OVER_THE_FLOOR.get(name, 1.0) * (slower if family == "ours" else 1.0)
        own = min(mib, int(name[5:-3])) if name.endswith("MiB") else mib
        return BenchResult(name, name, family, samples_ms=[times], workspace_bytes=round(own * MIB))

    results = [[result(c.name, c.family) for c in CONTENDERS] for _ in LOGPROBS.presets["h200"]()]
    cases = [case for case, _ in LOGPROBS.presets["h200"]()]
    return Run("logprobs", HEAD, [Entry(case, found) for case, found in zip(cases, results, strict=True)])


@pytest.mark.parametrize("slower, mib, expected", [(1.0, 512, MET), (1.3, 512, MISSED), (1.0, 600, MISSED)])
def test_every_target_has_a_verdict(slower, mib, expected):
    """By time, and by workspace; what needs no time, or keeps its budget, is met all the same."""
    findings = check_targets([made_up(slower, mib)], TARGETS)
    assert {finding.verdict for finding in findings} <= {MET, MISSED}
    by_call = {finding.cells[""]: finding.verdict for finding in findings}
    assert by_call["logprob, entropy"] == by_call["no gradient"] == expected
    assert by_call["64 MiB budget"] == MET


def test_every_peer_is_compared():
    """With settings that make the entropy too."""
    found = [finding.verdict for finding in duels([made_up(1.05, 300)], RULES, TINY.mode)]
    assert sorted(found) == sorted([MET, MET, MISSED] * len(LOGPROBS.presets["h200"]()))


def test_half_of_the_labels_are_ignored():
    problem = OperatorProblem(TINY, torch.device("cpu"))
    changed = problem.changed(**half_ignored(problem))
    assert (changed.target == IGNORED).sum() == TINY.tokens // 2
    assert not (problem.target == IGNORED).any()
