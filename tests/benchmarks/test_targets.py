"""Tests of verdicts on targets and peers, with made-up and with measured figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from benchmarks.benchmark import save
from benchmarks.cases import Effort
from benchmarks.cli import app
from benchmarks.contenders import budget_name, select
from benchmarks.operator import OPERATOR, PRESETS, call_case, peer_case
from benchmarks.problem import OperatorCase
from benchmarks.runs import BenchResult, Entry, Run
from benchmarks.tables import shortfalls
from benchmarks.targets import (
    CALL_TARGETS,
    CURVE_MIB,
    CURVE_PEERS,
    EXACT_TARGETS,
    MAIN,
    MET,
    MISSED,
    NEARLY,
    TARGETS,
    UNMEASURED,
    Rule,
    Target,
    check_targets,
    duels,
    plan_tables,
)
from flce.core.sizes import MIB
from tests.benchmarks.made_up import HEAD


def measured(contender: str, milliseconds: float, mib: float | None = None, family: str = "ours") -> BenchResult:
    """Return a result with the same time as called, alone and of the host."""
    size, times = None if mib is None else round(mib * MIB), [milliseconds]
    every: dict[str, Any] = {"samples_ms": times, "alone_samples_ms": times, "host_samples_ms": times}
    return BenchResult(contender, contender, family, workspace_bytes=size, **every)


def run_of(*entries: Entry) -> Run:
    return Run("operator", HEAD, list(entries))


def verdict(target: Target, *runs: Run) -> str:
    (finding,) = check_targets(runs, [target])
    return finding.verdict


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
        (TIME, 10.0, 10.7, None, NEARLY),
        (TIME, 10.0, 10.72, None, MISSED),
        (TIME, None, 10.5, None, UNMEASURED),
        (TIME, 10.0, None, None, UNMEASURED),
        (BOTH, 10.0, 11.0, 256, MET),
        (BOTH, 10.0, 11.0, 256.1, MISSED),
        (BOTH, 10.0, 12.0, 256, MISSED),
        (BOTH, 10.0, 11.0, None, UNMEASURED),
        (ROOM, None, 99.0, 100, MET),
        (ROOM, None, 1.0, 101, MISSED),
        # The host: 1.2 ms, or 1.2 times torch.compile's; alone: by the time of the products.
        (SOON, 0.5, 1.19, None, MET),
        (SOON, 0.5, 1.23, None, MISSED),
        (SOON, 2.0, 2.39, None, MET),
        (SOON, 2.0, 2.5, None, MISSED),
        (ALONE, 4.05, 4.65, None, MET),
        (ALONE, 3.91, 4.69, None, MISSED),
        (ALONE, 3.89, 5.05, None, MET),
        (ALONE, 3.89, 5.13, None, NEARLY),
    ],
)
def test_a_target(target, reference, milliseconds, mib, expected):
    results = [] if reference is None else [measured(target.reference, reference, family="floor")]
    results += [] if milliseconds is None else [measured("ours", milliseconds, mib)]
    assert verdict(target, run_of(Entry(target.case, results))) == expected


@pytest.mark.parametrize("other", [{"mode": "frozen-head"}, {"ignored": 0.5}, {"dtype": "float16"}, {"calls": True}])
def test_a_target_is_of_one_problem(other):
    """Both figures belong to one case: the floor of another case may come from a cooler device."""
    entry = Entry(OperatorCase(*MAIN, **other), [measured("floor", 10.0), measured("ours", 10.0)])
    assert verdict(TIME, run_of(entry)) == UNMEASURED
    alone = Entry(OperatorCase(*MAIN, label="alone"), [measured("ours", 10.0)])
    whole = Entry(OperatorCase(*MAIN), [measured("floor", 10.0), measured("ours", 20.0)])
    (finding,) = check_targets([run_of(alone, entry, whole)], [TIME])
    assert finding.value == 2.0


@pytest.mark.parametrize(
    "preset, targets", [("targets", TARGETS), ("h200-small", CALL_TARGETS), ("h200-exact", EXACT_TARGETS)]
)
def test_the_preset_measures_all_targets(preset, targets):
    """All figures of a target are in one case, and all names are known."""
    cases = [case for case, _ in PRESETS[preset]()]
    for case in cases:
        select(case.contenders)
    run = run_of(*[Entry(case, [measured(name, 1.0, 1.0) for name in case.contenders or ()]) for case in cases])
    assert UNMEASURED not in {finding.verdict for finding in check_targets([run], targets)}
    assert cases[0].shape == targets[0].case.shape
    assert len(check_targets([run], targets)) == len(targets)


def peers_run(*results: BenchResult) -> Run:
    return run_of(Entry(peer_case(MAIN), list(results)))


def test_a_peer_is_compared_with_the_fastest_setting_in_its_workspace():
    run = peers_run(
        measured("ours", 10.0, 2000),
        measured("ours-64MiB", 20.0, 64),
        measured("ours-256MiB", 15.0, 256),
        measured("ours-bf16-64MiB", 12.0, 64),
        measured("liger-float32-8x", 16.5, 300, "peer"),
        measured("cce", 20.0, 1, "peer"),
        measured("fla", 10.9, 2000, "peer"),
    )
    found = {duel.key[1].peer: duel for duel in duels([run])}
    chosen = {name: duel.cells["flce"] for name, duel in found.items()}
    assert chosen == {"liger-float32-8x": "ours-256MiB", "cce": "ours-64MiB", "fla": "ours"}
    verdicts = {name: duel.verdict for name, duel in found.items()}
    assert verdicts == {"liger-float32-8x": MET, "cce": MISSED, "fla": NEARLY}
    assert found["fla"].value == pytest.approx(1 / 1.09)


def test_equal_workspaces_may_differ_by_vectors():
    run = peers_run(measured("ours", 10.0, 1002.1), measured("torch-compile", 10.0, 1002.0, "peer"))
    (duel,) = duels([run])
    assert duel.verdict is MET


def test_bfloat16_sums_meet_bfloat16_sums_alone():
    liger = measured("liger", 50.0, 31, "peer")
    run = peers_run(liger, measured("ours-256MiB", 49.0, 256), measured("ours-bf16-64MiB", 40.0, 64))
    small, large = duels([run])
    assert (small.cells["flce"], small.verdict) == ("ours-bf16-64MiB", MET)
    assert (large.cells["flce"], large.verdict) == ("ours-256MiB", MET)
    (duel,) = duels([peers_run(liger, measured("ours", 1.0, 2000))], [Rule("liger")])
    assert (duel.cells["flce"], duel.cells["times"], duel.verdict) == ("-", "-", MISSED)


def test_the_curve_is_drawn_with_every_name_in_the_legend():
    """A budget without a plan has a note and is not a shortfall."""
    case, *_ = (case for case, _ in PRESETS["h200-curve"]())
    figures = [measured("floor", 10.0, family="floor"), measured("ours", 10.3, 566)]
    figures += [measured(budget_name(mib), 19 - mib / 64, mib) for mib in CURVE_MIB[1:]]
    figures += [measured(name, 14.0 + index / 9, 2000 + 9 * index, "peer") for index, name in enumerate(CURVE_PEERS)]
    least = BenchResult(budget_name(1), "", "ours", "unplanned", "max_workspace_bytes is too small")
    run = run_of(Entry(case, [*figures, least]))
    assert shortfalls(run) == []
    assert "has no plan: max_workspace_bytes is too small" in OPERATOR.table(run.cases[0]).markdown()
    assert OPERATOR.figure is not None
    picture = OPERATOR.figure(run)
    assert {*case.contenders} == {result.contender for result in run.cases[0].results}
    (legend,) = picture.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == sorted(["flce, in budgets", "ours", "floor", *CURVE_PEERS])


def test_targets_of_calls_and_of_the_device_are_separate():
    """Each target reads its own one of two cases of a problem, and rules read the case of the device."""
    results = [measured("floor", 10.0), measured("ours", 10.4, 1), measured("cce", 20.0, 1, "peer")]
    called, device = run_of(Entry(call_case(MAIN), results)), run_of(Entry(OperatorCase(*MAIN), results))
    titles = [f"Targets met: 1 of {len(TARGETS)}", f"Targets of calls met: 1 of {len(CALL_TARGETS)}"]
    for runs, expected in (
        ([called], titles[1:]),
        ([device], titles[:1]),
        ([device, called], titles),
        ([], ["Targets met"]),
    ):
        assert OPERATOR.targets is not None
        shown = [table.title for table in OPERATOR.targets(runs, False)]
        assert [title for title in shown if title.startswith("Targets")] == expected
        assert any(title.startswith("No peer dominates") for title in shown) == (device in runs)


def test_the_median_of_three_runs_counts(tmp_path: Path):
    """One or two of three runs miss the limit by more than 2%."""

    def run(milliseconds: float) -> Run:
        floor = measured("floor", 10.0, family="floor")
        return run_of(Entry(OperatorCase(*MAIN), [floor, measured("ours", milliseconds)]))

    assert verdict(TIME, run(10.4), run(10.5), run(20.0)) == MET
    assert verdict(TIME, run(10.4), run(10.6), run(20.0)) == NEARLY
    assert verdict(TIME, run(10.4), run(20.0)) == MISSED
    assert verdict(TIME, run_of(), run(10.4)) == MET
    files = [tmp_path / f"{index}.json" for index in range(3)]
    for file, milliseconds in zip(files, (10.4, 10.6, 20.0), strict=True):
        save(run(milliseconds), file)
    done = CliRunner().invoke(app, ["table", *map(str, files), "--targets"])
    assert "met within 2%" in done.output
    assert "the median of 3 runs" in done.output


@pytest.mark.parametrize(
    "planned, mib, name, kept",
    [
        (100, 101.9, "ours", True),
        (100, 98.1, "ours", True),
        (100, 102.1, "ours", False),
        (100, 97.9, "ours", False),
        (4000, 4040.5, "ours-again", True),
        (4000, 4041.5, "ours-again", False),
        (100, 50, "ours-skipping", True),  # a plan does not know how many labels are ignored
        (100, 102.1, "ours-skipping", False),
        (100, 50, "ours-keeping", False),
    ],
)
def test_the_workspace_is_the_planned_one(planned, mib, name, kept, tmp_path):
    """The tolerance is 1% and 1 MiB; each other result is a row, and the command fails."""
    result = measured(name, 10.0, mib)
    result.planned_bytes = planned * MIB
    run = run_of(Entry(OperatorCase(*MAIN, ignored=0.5), [result, measured("stock", 20.0, 9999, "stock")]))
    (table,) = plan_tables([run])
    assert (table.failure, len(table.rows)) == (not kept, 0 if kept else 1)
    assert table.title == f"Workspace as planned: {int(kept)} of 1"
    save(run, tmp_path / "run.json")
    done = CliRunner().invoke(app, ["table", str(tmp_path / "run.json"), "--targets"])
    assert done.exit_code == (0 if kept else 1)
    assert ("MISSED" in done.output) == (not kept)
    run.head = HEAD | {"device": {"type": "cpu", "name": "made up"}}
    assert plan_tables([run]) == []


def test_the_plan_is_recorded():
    """The plan has the budget, the mode and the options of the measured call."""
    import flce

    case = OperatorCase(2000, 32, 500, dtype="float32", mode="frozen-head")
    names = ("ours", "ours-1MiB", "ours-vocab", "stock")
    entry = OPERATOR.measure(case, torch.device("cpu"), Effort(1, 1.0), select(names))
    options = [
        {},
        {"max_workspace_bytes": MIB},
        {"max_workspace_bytes": case.budget_mib * MIB, "strategy": "vocab"},
    ]
    expected = [
        flce.plan(
            2000,
            32,
            500,
            torch.float32,
            device="cpu",
            weight_grad=False,
            options=flce.ChunkOptions(**each),  # type: ignore[arg-type]
        ).workspace_bytes
        for each in options
    ]
    assert [result.planned_bytes for result in entry.results] == [*expected, None, expected[0]]
    assert len(set(expected)) > 2
