"""Tests of verdicts on targets and plans, with made-up figures."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks import targets
from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.contenders import select
from benchmarks.operator import PRESETS
from benchmarks.problem import OperatorCase
from benchmarks.runs import Entry
from benchmarks.targets import MAIN, MET, MISSED, NEARLY, TARGETS, UNMEASURED, Target
from flce.core.sizes import MIB
from tests.benchmarks.made_up import HEAD, measured, run_of

FIRST = OperatorCase(*MAIN)
TIME = Target("default", FIRST, 1.05)
BOTH = Target("vocab", FIRST, 1.1, "ours", workspace_mib=256)
ROOM = Target("long", FIRST, workspace_mib=100)


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
        (TIME, 10.0, 10.6, None, NEARLY),
    ],
)
def test_a_target(target, reference, milliseconds, mib, expected):
    results = [] if reference is None else [measured(target.reference, reference, family="floor")]
    results.append(measured("ours", milliseconds, mib))
    assert targets.check(run_of(Entry(target.case, results)), target)["verdict"] == expected
    others = [OperatorCase(*MAIN, **{name: value}) for name, value in (("ignored", 0.5), ("dtype", "float16"))]  # type: ignore[arg-type]
    run = run_of(*(Entry(case, results) for case in others))
    assert targets.check(run, target)["verdict"] == UNMEASURED  # a target is of one problem


def test_the_preset_measures_all_targets():
    """All figures of a target are in one case, and all names are known."""
    entries = [
        Entry(case, [measured(contender.name, 1.0, 1.0) for contender in select(case.contenders)])
        for case, _ in PRESETS["targets"]()
    ]
    table = targets.target_table(run_of(*entries))
    assert len(table.rows) == len(TARGETS)
    assert table.title == f"Targets met: {len(TARGETS) - 4} of {len(TARGETS)}"  # four are half of a reference's time


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
    (table,) = targets.plan_tables(run)
    assert (len(table.rows), table.title) == (1 - kept, f"Workspace as planned: {int(kept)} of 1")
    save(run, tmp_path / "run.json")
    assert CliRunner().invoke(app, ["table", str(tmp_path / "run.json"), "--brief"]).exit_code == (not kept)
    run.head = HEAD | {"device": {"type": "cpu", "name": "made up"}}
    assert targets.plan_tables(run) == []
