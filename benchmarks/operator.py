"""Time, workspace and exactness of forward and backward of the fused linear cross entropy: the command `operator`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks import tables, targets
from benchmarks.benchmark import Benchmark, Plan, plan_cases
from benchmarks.contenders import OperatorContender, budget_name, contender_of_budget, select, sums_in_bfloat16
from benchmarks.measure import BenchMeter, CallMeter, Prepared, ReadyContender, UnplannedError, release
from benchmarks.plots import Panel, Series, draw
from benchmarks.problem import CALLS, FEATURES, OperatorCase, OperatorProblem, Shape, exactness, make_oracle
from benchmarks.real_heads import TEXTS, distribution
from benchmarks.runs import NO_RESULT, BenchResult, Entry, Run
from benchmarks.tables import Columns, Table
from benchmarks.targets import HEADS, MAIN, NARROW, PEERS, PEERS_LABEL, figures, target_cases
from flce.core.sizes import MIB
from flce.ops import linear_operators
from flce.planning import device_kinds

# Seconds for which the device is busy while the host launches a timed call. In training the host is ahead of the
# device, too, so the time of the device is measured.
HEAD_START = 6e-3
FLOORS = ("floor-aligned", "floor")  # times are multiples of the first that applies
OURS = "ours"

TINY = (96, 64, 500)
EXACTNESS = OperatorCase(32768, 1024, 32000, time=False, errors=True)
EXACT = [EXACTNESS, replace(EXACTNESS, dtype="float16", upstream=2.0**16)]  # float16 as with a GradScaler

# 592: half of a MiB less than the float32 sums of a head of 151936 x 1024, the memory of Liger's sums there.
BUDGETS_MIB = (64, 128, 256, 592, 768, 1024, 1536, 2048)
# 60: blocks of 3,584 classes, whose products fill the device more evenly than the products of 3,840 classes.
BFLOAT16_BUDGETS_MIB = (60, 64)
CURVE = ("ours", *map(budget_name, BUDGETS_MIB), *(budget_name(mib, "bf16") for mib in BFLOAT16_BUDGETS_MIB))
IN_GIB = ("ours", *map(budget_name, (256, 512, 1024, 2048)))
REAL_NAMES = ("floor", "ours", budget_name(256), "ours-sampled", "stock", *PEERS)
# Real heads, and the same logits in larger hidden sizes.
REAL_HEADS = [
    OperatorCase(8192, hidden, vocab, contenders=REAL_NAMES, errors=True, head=f"{model} {text}")
    for model, vocab, sizes in (
        ("gemma3", 262144, (640, 2304, 4096)),
        ("smollm2", 49152, (576,)),
        ("trained", 128000, (2048, 4096)),
    )
    for hidden in sizes
    for text in TEXTS
]
SAMPLED_NAMES = ("floor", "ours", "ours-sampled", "stock")
SAMPLED = [
    *(
        OperatorCase(tokens, hidden, 262144, contenders=SAMPLED_NAMES, errors=True, head=f"gemma3 {text}")
        for tokens, hidden in ((8192, 4096), (4096, 4096), (2048, 4096), (8192, 2304), (8192, 1024), (8192, 640))
        for text in TEXTS
    ),
    OperatorCase(8192, 4096, 262144, contenders=SAMPLED_NAMES, mode="frozen-head", head="gemma3 code"),
    OperatorCase(8192, 4096, 262144, contenders=SAMPLED_NAMES, own_products=False, head="gemma3 code"),
    *(
        OperatorCase(8192, 4096, 128256, contenders=SAMPLED_NAMES, errors=True, head=f"zipf {std}")
        for std in ("6", "5", "3.5")
    ),
    *(OperatorCase(8192, 4096, 128000, contenders=SAMPLED_NAMES, errors=True, head=f"trained {t}") for t in TEXTS),
]
SHAPES: list[Shape] = [MAIN, NARROW, HEADS[1], HEADS[3], HEADS[2], (16384, 768, 50257)]


def peer_case(shape: Shape, curve: Sequence[str] = CURVE, peers: Sequence[str] = PEERS) -> OperatorCase:
    """Return the case of a shape with the settings of flce and the peers."""
    names = ("floor", "floor-aligned", *curve, "stock", *peers)
    return OperatorCase(*shape, contenders=names, label=PEERS_LABEL)


def call_case(shape: Shape) -> OperatorCase:
    """Return the case of a shape with the default of flce and all peers, as called."""
    return replace(peer_case(shape, ("ours",)), calls=True, label="")


def tiny() -> Plan:
    """Return the cases of the tests. They take seconds on a CPU."""
    all_modes = [OperatorCase(*TINY, dtype="float32", mode=mode, budget_mib=1, errors=True) for mode in CALLS]
    names = ("ours-full", "ours-keeping", "ours-skipping")
    skipping = OperatorCase(*TINY, ignored=0.5, contenders=names, errors=True)
    curve = ("ours", budget_name(1), budget_name(1, "bf16"))
    featured = replace(all_modes[0], own_products=False, contenders=("floor", "ours", "stock"))
    features = [replace(featured, feature=feature) for feature in FEATURES]
    return plan_cases([*all_modes, skipping, *features, peer_case(TINY, curve), call_case(TINY)], 3, 1.0)


# Targets need a precision of one percent, so they get more rounds than the peers, which need ten percent.
CPU = [OperatorCase(2048, 512, 32000, dtype, budget_mib=32, errors=True) for dtype in ("float32", "bfloat16")]
TARGETS_PLAN = plan_cases(target_cases(), rounds=24, seconds=0.8)
EXACTNESS_PLAN = plan_cases(EXACT, rounds=1, seconds=0.0)
PEER_PLAN = plan_cases([peer_case(shape) for shape in SHAPES], rounds=9, seconds=0.45)
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": tiny,
    "cpu": lambda: plan_cases(CPU, rounds=9, seconds=15.0),
    "targets": lambda: TARGETS_PLAN,
    "peers": lambda: EXACTNESS_PLAN + PEER_PLAN,
    "h200": lambda: TARGETS_PLAN + EXACTNESS_PLAN + PEER_PLAN,
    # Small calls, and a large one. Two minutes of one large GPU.
    "h200-small": lambda: plan_cases(map(call_case, targets.SMALL), 25, 0.5) + plan_cases([call_case(MAIN)], 25, 1.2),
    # Time over budget from 1 MiB on, and the peers at their workspace. Two minutes and a half.
    "h200-curve": lambda: plan_cases(map(targets.curve_case, targets.CURVE_SHAPES), rounds=7, seconds=0.4),
    # The newest kernels of PyTorch, Liger and QuACK, and flce in their workspace. Three minutes.
    "h200-rivals": lambda: plan_cases([peer_case(s, IN_GIB, targets.RIVALS) for s in targets.RIVAL_SHAPES], 9, 0.45),
    # Logits that are never rounded, rounded logits, and no fused products. Three minutes.
    "h200-exact": lambda: plan_cases(target_cases(targets.EXACT_TARGETS), rounds=7, seconds=0.5),
    # Heads of real and of trained models, as they are and in a larger hidden size. Four minutes.
    "real-heads": lambda: plan_cases(REAL_HEADS, rounds=7, seconds=0.4),
    # Gradients from sampled entries, on real heads and on random ones without frequent classes. Five minutes.
    "sampled": lambda: plan_cases(SAMPLED, rounds=7, seconds=0.4),
}


@contextlib.contextmanager
def products(ours: bool) -> Iterator[None]:
    """If not `ours`, plan and call inside as on a device without fused products."""
    with contextlib.ExitStack() as stack:
        for module in () if ours else (linear_operators, device_kinds):
            stack.enter_context(mock.patch.object(module, "has_fused_products", return_value=False))
        yield


def prepare(case: OperatorCase, device: torch.device) -> Prepared:
    """Allocate the operands of the case, and compute its result in float64 if the case measures errors."""
    release()
    problem = OperatorProblem(case, device)
    oracle = make_oracle(problem) if case.errors else None
    meter = (CallMeter if case.calls else BenchMeter)(device, head_start=HEAD_START)
    turn = functools.partial(products, case.own_products)

    def get_ready(contender: OperatorContender, result: BenchResult) -> ReadyContender:
        with turn():
            try:
                result.planned_bytes = contender.planned_bytes(case, device)
            except ValueError as error:
                raise UnplannedError(str(error)) from None
            step = contender.prepare(problem)
            outcome, sample = meter.warm_up(step)
            if contender.family != "floor":  # the buffers of a floor are an artefact of its measurement
                result.workspace_bytes = sample.workspace_bytes
            if oracle is not None:
                result.errors = exactness(outcome, oracle)
            if case.head and contender.family == "floor":
                result.distribution = distribution(problem.input, problem.weight, problem.target)
            if isinstance(meter, CallMeter):
                result.note = meter.capture(step)
        return ReadyContender(step, turn)

    return meter, get_ready


WORKSPACE = "MiB: the peak of memory above the inputs and the returned gradients"
ERRORS = "loss, dX, dW: relative error against float64 (of tensors: norm of the difference over norm)"
NAMES = {"loss": "loss", "input_grad": "dX", "weight_grad": "dW"}


def products_ms(entry: Entry) -> float | None:
    floor = next((r for name in FLOORS if (r := entry.by_name(name)).samples_ms), NO_RESULT)
    return floor.alone_ms or floor.median_ms


def error_columns() -> Columns:
    def show(name: str) -> Callable[[BenchResult], str]:
        return lambda result: tables.relative((result.errors or {}).get(name))

    return {title: show(name) for name, title in NAMES.items()}


def table(entry: Entry, shown: Collection[str] = ()) -> Table:
    """Return the table of time, workspace and errors; with the columns `shown`, or with all."""
    floor_ms, stock = products_ms(entry), entry.by_name("stock")
    columns: Columns = {
        "": lambda r: r.title,
        "median ms": lambda r: tables.milliseconds(r.median_ms),
        "calls": lambda r: str(len(r.samples_ms)) if r.samples_ms else tables.NONE,
        "x products": lambda r: tables.ratio(r.median_ms, floor_ms),
        "x stock": lambda r: tables.ratio(r.median_ms, stock.median_ms),
        "alone ms": lambda r: tables.milliseconds(r.alone_ms),
        "alone x products": lambda r: tables.ratio(r.alone_ms, floor_ms),
        "host ms": lambda r: tables.milliseconds(r.host_ms),
        "MiB": lambda r: tables.mebibytes(r.workspace_bytes),
        "planned MiB": lambda r: tables.mebibytes(r.planned_bytes),
        **error_columns(),
    }
    results = [result for result in entry.results if result.samples_ms or result.errors]
    rows = tables.table_of(entry, results, {name: columns[name] for name in shown or columns})
    found = [result.distribution for result in results if result.distribution]
    described = [", ".join(f"{name} {mean:.3g}" for name, mean in means.items()) for means in found]
    return replace(rows, notes=[*described, WORKSPACE, *[ERRORS] * any(r.errors for r in results), *rows.notes])


def format_times(entry: Entry, result: BenchResult) -> str:
    if result.family == "floor" or result.host_ms is None:
        return tables.milliseconds(result.alone_ms or result.median_ms)
    parts = [tables.ratio(ms, products_ms(entry)) for ms in (result.median_ms, result.alone_ms)]
    return ", ".join([*parts, tables.milliseconds(result.host_ms)])


def target_and_plan_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the tables of targets, peers and plans of which the runs have figures."""
    measured = [table for table in (*targets.target_tables(runs), targets.dominance_table(runs)) if table.rows]
    return measured + targets.plan_tables(runs)


def run_tables(run: Run, brief: bool) -> list[Table]:
    found = target_and_plan_tables([run])
    timed = [entry for entry in run.cases if entry.case.time]
    called, others = ([entry for entry in timed if entry.case.calls is calls] for calls in (True, False))
    title = "As called and alone, of the bare products alone; host ms"
    found += [tables.summary(title, tables.SHAPE, called, format_times)] if called else []
    for label in dict.fromkeys(entry.case.label for entry in others):
        entries = [entry for entry in others if entry.case.label == label]
        if brief or len(entries) > 1:
            title = "Median ms, workspace MiB" + (label and f", {label}")
            found.append(tables.summary(title, tables.SHAPE, entries, lambda entry, result: figures(result)))
    return found + [table(entry) for entry in run.cases if entry.case.errors or not brief]


LEAST_MIB = 0.1  # a smaller workspace is drawn here


def figure(run: Run) -> Any:
    """Draw time against workspace: a curve for flce in all budgets, points for others, lines for the floor."""
    device = run.head["device"]["name"]
    title, scales = (
        f"Time and memory of a loss on one {device}: lower left is better",
        {"xscale": "log", "yscale": "log"},
    )
    found = [entry for entry in run.cases if points(entry)]
    if not found:
        raise ValueError("the results hold no case with both time and memory")
    # Prefer entries with other contenders than flce and its floor.
    entries = [entry for entry in found if any(r.family in ("peer", "stock") for r in points(entry))] or found
    multiples = all(map(products_ms, entries))
    panels = [make_panel(entry, products_ms(entry) or 1.0 if multiples else 1.0) for entry in entries]
    products = "three matrix products" if all(e.case.mode == "forward+backward" for e in entries) else "matrix products"
    y = f"time / {products} alone" if multiples else "time, ms (median)"
    return draw(panels, title, "memory of the call beside inputs and gradients, MiB", y, scales, columns=1)


def points(entry: Entry) -> list[Any]:
    return [result for result in entry.results if result.samples_ms and result.workspace_bytes is not None]


def is_in_curve(contender: str) -> bool:
    """Return True for flce in a budget with the numerics of the default."""
    return contender_of_budget(contender) is not None and not sums_in_bfloat16(contender)


def make_panel(entry: Entry, unit_ms: float) -> Panel:
    place = {r.contender: (max(r.workspace_bytes / MIB, LEAST_MIB), r.median_ms / unit_ms) for r in points(entry)}
    curve = sorted(spot for name, spot in place.items() if name == OURS or is_in_curve(name))
    found = []
    if len(curve) > 1:
        found.append(Series("flce, in budgets", "ours", [x for x, _ in curve], [y for _, y in curve], "-"))
    for result in entry.results:
        name, _, _ = result.title.partition(" (")
        if result.family == "repeat":  # it would cover the first
            continue
        if result.contender in place and not is_in_curve(result.contender):
            x, y = place[result.contender]
            found.append(Series(name, result.family, [x], [y]))
        elif result.family == "floor" and result.median_ms is not None:
            line = "--" if result.contender in FLOORS else ":"
            found.append(Series(name, result.family, [], [result.median_ms / unit_ms], line))
    return Panel(entry.case.title, found)


shape_tables = tables.overview("Median ms, workspace MiB", tables.SHAPE, lambda _, result: figures(result), table)
OPERATOR = Benchmark(
    kind="operator",
    about="Time, workspace and exactness of forward and backward.",
    case_type=OperatorCase,
    sizes="tokens,hidden,vocab",
    presets=PRESETS,
    contenders=lambda case: select(case.contenders),
    prepare=prepare,
    table=table,
    tables=run_tables,
    figure=figure,
    targets=lambda runs, brief: target_and_plan_tables(runs) or targets.target_tables(runs)[:1],
    choices={"mode": CALLS, "feature": FEATURES},
)
