"""What a run says of the targets and of the peers, on made-up figures and on measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from benchmarks.benchmark import save
from benchmarks.cli import app
from benchmarks.dominance import BUDGETS_MIB, CURVE, PEERS, SHAPES, Rule, dominance_table, duels, peer_case
from benchmarks.operator import OPERATOR, PRESETS
from benchmarks.targets import (
    HEADS,
    LONG,
    MAIN,
    TARGETS,
    Target,
    check_targets,
    plan_tables,
    target_cases,
    target_table,
)
from benchmarks.verdicts import Verdict, judge, worst
from flce.bench.cases import MIB, Effort
from flce.bench.contenders import select
from flce.bench.problem import OperatorCase
from flce.bench.results import Entry, Result, Run

HEAD: dict[str, Any] = {
    "date": "2026-11-21T00:00:00Z",
    "command": "python -m benchmarks operator",
    "commit": None,
    "versions": {},
    "device": {"type": "cuda", "name": "made up"},
}


def measured(contender: str, milliseconds: float, mib: float | None = None, family: str = "ours") -> Result:
    size = None if mib is None else round(mib * MIB)
    return Result(contender, contender, family, samples_ms=[milliseconds], workspace_bytes=size)


def run_of(*entries: Entry) -> Run:
    return Run("operator", HEAD, list(entries))


def met(run: Run, target: Target) -> Verdict:
    (check,) = check_targets([run], [target])
    return check.verdict


def test_a_target_of_time():
    target = Target("default", MAIN, 1.05)
    case = OperatorCase(*MAIN)
    floor = measured("floor", 10.0, family="floor")
    assert met(run_of(Entry(case, [floor, measured("ours", 10.5)])), target) is Verdict.met
    assert met(run_of(Entry(case, [floor, measured("ours", 10.7)])), target) is Verdict.nearly
    assert met(run_of(Entry(case, [floor, measured("ours", 10.72)])), target) is Verdict.missed
    assert met(run_of(Entry(case, [measured("ours", 10.5)])), target) is Verdict.unmeasured
    assert met(run_of(), target) is Verdict.unmeasured


def test_time_is_compared_within_a_case():
    """A floor of another case, which may have been measured on a cooler device, says nothing."""
    target = Target("default", MAIN, 1.05)
    alone = Entry(OperatorCase(*MAIN, label="alone"), [measured("ours", 10.0)])
    other = Entry(OperatorCase(*MAIN), [measured("floor", 10.0), measured("ours", 20.0)])
    (check,) = check_targets([run_of(alone, other)], [target])
    assert check.value == 2.0


@pytest.mark.parametrize("other", [{"mode": "frozen-head"}, {"ignored": 0.5}, {"dtype": "float16"}])
def test_a_target_is_of_one_problem(other):
    target = Target("default", MAIN, 1.05)
    entry = Entry(OperatorCase(*MAIN, **other), [measured("floor", 10.0), measured("ours", 10.0)])
    assert met(run_of(entry), target) is Verdict.unmeasured


def test_a_target_of_time_and_workspace():
    target = Target("vocab", MAIN, 1.1, "ours-vocab", "floor-recomputed", workspace_mib=256)
    floor = measured("floor-recomputed", 10.0, family="floor")

    def with_ours(milliseconds: float, mib: float) -> Run:
        return run_of(Entry(OperatorCase(*MAIN), [floor, measured("ours-vocab", milliseconds, mib)]))

    assert met(with_ours(11.0, 256), target) is Verdict.met
    assert met(with_ours(11.0, 256.1), target) is Verdict.missed
    assert met(with_ours(12.0, 256), target) is Verdict.missed


def test_a_target_of_the_workspace_of_another_shape():
    target = Target("long", LONG[1], workspace_shape=LONG[0])
    short, long = (Entry(OperatorCase(*shape), [measured("ours", 1.0, 100)]) for shape in LONG)
    assert met(run_of(short, long), target) is Verdict.met
    long.results[0].workspace_bytes = 101 * MIB
    assert met(run_of(short, long), target) is Verdict.missed
    assert met(run_of(long), target) is Verdict.unmeasured
    assert target_cases([target]) == [OperatorCase(*shape, contenders=("ours",)) for shape in (LONG[1], LONG[0])]


def test_the_preset_measures_all_targets():
    """Every figure that a target needs is in one case; the first cases are those of the first targets."""
    cases = target_cases()
    run = run_of(*[Entry(case, [measured(name, 1.0, 1.0) for name in case.contenders or ()]) for case in cases])
    assert [check.key for check in check_targets([run]) if check.verdict is Verdict.unmeasured] == []
    assert len(cases) == len({(case.shape, case.mode, case.ignored) for case in cases})
    assert cases[0].shape == MAIN
    assert cases[0].contenders is not None
    assert {"floor", "ours", "ours-64MiB", "ours-bf16-64MiB"} <= set(cases[0].contenders)
    for case, _ in PRESETS["h200"]():
        select(case.contenders)  # all names are known
    assert {case.shape for case in cases} >= {*HEADS, *LONG}


def test_a_target_is_measured():
    """From the list of cases to the verdict, on a small problem."""
    shape = (64, 16, 300)
    targets = [
        Target("default", shape, 1e6, reference="stock"),
        Target("half", shape, 1e6, "ours-skipping", "ours-full", ignored=0.5),
        Target("impossible", shape, 0.0, reference="stock", mode="frozen-head", workspace_mib=1),
    ]
    run = run_of(*[OPERATOR.measure(case, torch.device("cpu"), Effort(1, 1.0)) for case in target_cases(targets)])
    verdicts = [Verdict.met, Verdict.met, Verdict.missed]
    assert [check.verdict for check in check_targets([run], targets)] == verdicts
    rows = target_table([run], targets).rows
    assert [row[-1] for row in rows] == ["met", "met", "MISSED"]


def peers_run(*results: Result) -> Run:
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
    assert verdicts == {"liger-float32-8x": Verdict.met, "cce": Verdict.missed, "fla": Verdict.nearly}
    assert found["fla"].value == pytest.approx(1.09)


def test_equal_workspaces_may_differ_by_vectors():
    run = peers_run(measured("ours", 10.0, 1002.1), measured("torch-compile", 10.0, 1002.0, "peer"))
    (duel,) = duels([run])
    assert duel.verdict is Verdict.met


def test_bfloat16_sums_meet_bfloat16_sums_alone():
    liger = measured("liger", 50.0, 31, "peer")
    run = peers_run(liger, measured("ours-256MiB", 49.0, 256), measured("ours-bf16-64MiB", 40.0, 64))
    small, large = duels([run])
    assert (small.cells["flce"], small.verdict) == ("ours-bf16-64MiB", Verdict.met)
    assert (large.cells["flce"], large.verdict) == ("ours-256MiB", Verdict.met)
    (duel,) = duels([peers_run(liger, measured("ours", 1.0, 2000))], [Rule("liger")])
    assert (duel.cells["flce"], duel.cells["times"], duel.verdict) == ("-", "-", Verdict.missed)


def test_every_peer_is_in_the_preset():
    cases = [case for case, _ in PRESETS["peers"]() if case.time]
    assert [case.shape for case in cases] == SHAPES
    for case in cases:
        assert case.contenders is not None
        assert {*PEERS, *CURVE} <= set(case.contenders)
    assert min(BUDGETS_MIB) == 64


def test_the_tables_are_a_command(tmp_path: Path):
    file = tmp_path / "run.json"
    run = peers_run(measured("ours", 10.0, 100), measured("cce", 20.0, 200, "peer"))
    run.cases.append(Entry(OperatorCase(*MAIN), [measured("floor", 10.0, family="floor"), measured("ours", 10.4)]))
    save(run, file)
    both = CliRunner().invoke(app, ["table", str(file), "--targets", "--dominance"])
    assert both.exit_code == 0, both.output
    assert f"Targets met: 1 of {len(TARGETS)}" in both.output
    assert "No peer dominates, met: 1 of 1" in both.output
    assert "median ms" not in both.output
    one = CliRunner().invoke(app, ["table", str(file), "--dominance"])
    assert "Targets" not in one.output
    assert "not measured" in target_table([run]).markdown()
    assert "2.00" in dominance_table([run]).markdown()
    whole = CliRunner().invoke(app, ["table", str(file)])
    assert "Targets" in whole.output
    assert "median ms" in whole.output


def test_a_picture_of_the_peers(tmp_path: Path):
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "run.json", tmp_path / "run.png"
    run = peers_run(
        measured("floor", 9.0, family="floor"),
        measured("ours", 10.0, 2000),
        measured("ours-64MiB", 20.0, 64),
        measured("ours-bf16-64MiB", 15.0, 64),
        measured("cce", 20.0, 1, "peer"),
    )
    run.cases.append(Entry(OperatorCase(*MAIN), [measured("floor", 10.0, family="floor"), measured("ours", 10.4, 1)]))
    save(run, file)
    done = CliRunner().invoke(app, ["plot", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_median_of_three_runs_counts(tmp_path: Path):
    """Two runs of three miss the limit by more than 2%, or one does; the workspace has no tolerance."""
    target = Target("default", MAIN, 1.05, workspace_mib=64)

    def run(milliseconds: float, mib: float = 64) -> Run:
        floor = measured("floor", 10.0, family="floor")
        return run_of(Entry(OperatorCase(*MAIN), [floor, measured("ours", milliseconds, mib)]))

    def verdict(*runs: Run) -> Verdict:
        (check,) = check_targets(runs, [target])
        return check.verdict

    assert verdict(run(10.4), run(10.5), run(20.0)) is Verdict.met
    assert verdict(run(10.4), run(10.6), run(20.0)) is Verdict.nearly
    assert verdict(run(10.4), run(20.0), run(20.0)) is Verdict.missed
    assert verdict(run(10.4), run(20.0)) is Verdict.missed
    assert verdict(run_of(), run(10.4)) is Verdict.met
    assert verdict(run(10.4, 64.1)) is Verdict.missed
    files = [tmp_path / f"{index}.json" for index in range(3)]
    for file, milliseconds in zip(files, (10.4, 10.6, 20.0), strict=True):
        save(run(milliseconds), file)
    done = CliRunner().invoke(app, ["table", *map(str, files), "--targets"])
    assert "met within 2%" in done.output
    assert "the median of 3 runs" in done.output
    assert worst([]) is judge(None, 1.0) is Verdict.unmeasured
    assert judge(0.84, 0.85, at_least=True) is Verdict.nearly


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
    """Within 1% and 1 MiB; each that is not is a line, and the command fails."""
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
    """Of the call that is measured: of its budget, its mode and its options."""
    import flce

    case = OperatorCase(2000, 32, 500, dtype="float32", mode="frozen-head")
    names = ("ours", "ours-whole", "ours-1MiB", "ours-vocab-1MiB", "ours-vocab", "stock")
    entry = OPERATOR.measure(case, torch.device("cpu"), Effort(1, 1.0), select(names))
    options = [
        {},
        {"chunk_rows": 2000},
        {"max_workspace_bytes": MIB},
        {"max_workspace_bytes": MIB, "strategy": "vocab"},
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


def test_plans_in_budgets_have_a_preset():
    """Beside each what it could be: one chunk, or blocks of classes."""
    cases = [case for case, _ in PRESETS["h200-budgets"]()]
    for case in cases:
        names = [contender.name for contender in select(case.contenders)]
        assert len(names) % 2 == 0
        for chosen, other in zip(names[::2], names[1::2], strict=True):
            assert other == ("ours-whole" if chosen == "ours" else chosen.replace("ours-", "ours-vocab-"))
    assert {case.label for case in cases} == {"one chunk", "budgets", "long"}
    assert {case.mode for case in cases if case.label == "budgets"} == {"frozen-head"}
    assert len(cases) == len(set(cases)) == 6 + 4 + 4
