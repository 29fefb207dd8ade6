"""Tests of verdicts on targets and peers, with made-up figures."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import logprobs, targets
from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.contenders import select
from benchmarks.operator import PRESETS, peer_case
from benchmarks.problem import OperatorCase
from benchmarks.runs import Entry
from benchmarks.targets import CALL_TARGETS, MAIN, MET, MISSED, NEARLY, TARGETS, UNMEASURED, Rule, Target
from flce.core.sizes import MIB
from tests.benchmarks.made_up import HEAD, measured, run_of

FIRST = OperatorCase(*MAIN)
TIME = Target("default", FIRST, 1.05)
BOTH = Target("vocab", FIRST, 1.1, "ours", workspace_mib=256)
ROOM = Target("long", FIRST, workspace_mib=100)
SOON = next(target for target in CALL_TARGETS if target.call == "host")
ALONE = next(target for target in CALL_TARGETS if target.call == "alone")


@pytest.mark.parametrize(
    "target, reference, milliseconds, mib, expected",
    [
        (TIME, 10.0, 10.5, None, MET),
        (TIME, 10.0, 10.72, None, MISSED),
        (TIME, None, 10.5, None, UNMEASURED),
        (BOTH, 10.0, 11.0, 256, MET),
        (BOTH, 10.0, 11.0, 256.1, MISSED),
        (BOTH, 10.0, 11.0, None, UNMEASURED),
        (ROOM, None, 99.0, 100, MET),
        # The host: 1.2 ms, or 1.2 times torch.compile's; alone: by the time of the products.
        (SOON, 0.5, 1.23, None, MISSED),
        (SOON, 2.0, 2.39, None, MET),
        (ALONE, 3.91, 4.69, None, MISSED),
        (ALONE, 3.89, 5.05, None, MET),
    ],
)
def test_a_target(target, reference, milliseconds, mib, expected):
    results = [] if reference is None else [measured(target.reference, reference, family="floor")]
    results.append(measured("ours", milliseconds, mib))
    (finding,) = targets.check_targets([run_of(Entry(target.case, results))], [target])
    assert finding.verdict == expected
    others = [OperatorCase(*MAIN, **{name: value}) for name, value in (("ignored", 0.5), ("dtype", "float16"))]  # type: ignore[arg-type]
    (finding,) = targets.check_targets([run_of(*(Entry(case, results) for case in others))], [target])
    assert finding.verdict == UNMEASURED  # a target is of one problem


@pytest.mark.parametrize(
    "presets, preset, expected",
    [
        (PRESETS, "targets", TARGETS),
        (PRESETS, "h200-small", CALL_TARGETS),
        (PRESETS, "h200-exact", targets.EXACT_TARGETS),
        (logprobs.PRESETS, "h200", logprobs.TARGETS),
    ],
)
def test_the_preset_measures_all_targets(presets, preset, expected):
    """All figures of a target are in one case, and all names are known."""
    contenders = logprobs.LOGPROBS.contenders if presets is logprobs.PRESETS else lambda case: select(case.contenders)
    entries = [
        Entry(case, [measured(contender.name, 1.0, 1.0) for contender in contenders(case)])
        for case, _ in presets[preset]()
    ]
    assert UNMEASURED not in {finding.verdict for finding in targets.check_targets([run_of(*entries)], expected)}


def test_a_peer_is_compared_with_the_fastest_setting_in_its_workspace():
    """bfloat16 sums are compared with bfloat16 sums only. Equal workspaces may differ by vectors."""
    ours = [("ours", 10.0, 2000), ("ours-64MiB", 20.0, 64), ("ours-256MiB", 15.0, 256), ("ours-bf16-64MiB", 12.0, 64)]
    peers = [("liger-float32-8x", 16.5, 300), ("cce", 20.0, 1), ("fla", 10.9, 1999.9), ("liger", 13.3, 31)]
    results = [measured(*each) for each in ours] + [measured(*each, family="peer") for each in peers]
    rules = [*map(Rule, ("liger-float32-8x", "cce", "fla")), Rule("liger", bfloat16_sums=True), Rule("liger", 1.0, 256)]
    found = targets.duels([run_of(Entry(peer_case(MAIN), results))], rules)
    chosen = ["ours-256MiB", "ours-64MiB", "ours", "ours-bf16-64MiB", "ours-256MiB"]
    assert [duel.cells["flce"] for duel in found] == chosen
    assert [duel.verdict for duel in found] == [MET, MISSED, NEARLY, MET, MISSED]
    (duel,) = targets.duels([run_of(Entry(peer_case(MAIN), [results[0], results[-1]]))], [Rule("liger")])
    assert (duel.cells["flce"], duel.cells["times"], duel.verdict) == ("-", "-", MISSED)


@pytest.mark.parametrize(
    "planned, mib, name, kept",
    [
        (100, 101.9, "ours", True),
        (100, 102.1, "ours", False),
        (4000, 4040.5, "ours-again", True),
        (4000, 4041.5, "ours-again", False),
        (100, 50, "ours-skipping", True),  # a plan does not know how many labels are ignored
    ],
)
def test_the_workspace_is_the_planned_one(planned, mib, name, kept, tmp_path):
    """The tolerance is 1% and 1 MiB; each other result is a row, and the command fails."""
    run = run_of(Entry(FIRST, [measured(name, 10.0, mib, planned_bytes=planned * MIB), measured("stock", 20.0, 9999)]))
    (table,) = targets.plan_tables([run])
    assert (len(table.rows), table.title) == (1 - kept, f"Workspace as planned: {int(kept)} of 1")
    save(run, tmp_path / "run.json")
    assert CliRunner().invoke(app, ["table", str(tmp_path / "run.json"), "--targets"]).exit_code == (not kept)
    run.head = HEAD | {"device": {"type": "cpu", "name": "made up"}}
    assert targets.plan_tables([run]) == []
