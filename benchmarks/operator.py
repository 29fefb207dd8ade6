"""Time, workspace and exactness of forward and backward of the fused linear cross entropy: the command `operator`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from unittest import mock

import torch

from benchmarks import tables
from benchmarks.benchmark import Benchmark, Plan, plan_cases
from benchmarks.contenders import PEERS, RIVALS, OperatorContender, budget_name, select
from benchmarks.measure import BenchMeter, CallMeter, Prepared, ReadyContender, UnplannedError, release
from benchmarks.problem import (
    CALLS,
    FEATURES,
    OperatorCase,
    OperatorProblem,
    Shape,
    exactness,
    make_oracle,
    parse_shapes,
)
from benchmarks.real_heads import TEXTS, distribution
from benchmarks.runs import NO_RESULT, BenchResult, Entry, Run
from benchmarks.tables import Columns, Table
from benchmarks.targets import HEADS, MAIN, NARROW, plan_tables, target_cases, target_table
from flce.ops import linear_operators
from flce.planning import plan as planning

# Seconds for which the device is busy while the host launches a timed call. In training the host is ahead of the
# device, too, so the time of the device is measured.
HEAD_START = 6e-3
FLOORS = ("floor-aligned", "floor")  # times are multiples of the first that applies
OURS = "ours"

TINY = (96, 64, 500)
SMALL = parse_shapes(
    "8192x4096x32000 8192x2048x32000 4096x4096x32768 2048x2048x128256 512x2048x128256 64x4096x128256 8192x576x49152 "
    "2048x512x32000"
)
CURVE_SHAPES = (HEADS[1], MAIN, NARROW)
CURVE = ("floor", "ours", *(budget_name(2**power) for power in range(10)), "stock", *PEERS, "cce-flat")
RIVAL_SHAPES = parse_shapes(
    "4096x4096x128256 8192x4096x128256 4096x8192x128256 8192x2304x256000 16384x1024x151936 2048x4096x128256"
)
IN_GIB = ("floor", "ours", *map(budget_name, (256, 512, 1024, 2048)), "stock", *RIVALS)
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
GEMMA = OperatorCase(8192, 4096, 262144, contenders=SAMPLED_NAMES, errors=True, head="gemma3 code")
ZIPF = OperatorCase(8192, 4096, 128256, contenders=SAMPLED_NAMES, errors=True)
SAMPLED = [
    *(
        replace(GEMMA, tokens=tokens, hidden=hidden, head=f"gemma3 {text}")
        for tokens, hidden in ((8192, 4096), (4096, 4096), (2048, 4096), (8192, 2304), (8192, 1024), (8192, 640))
        for text in TEXTS
    ),
    replace(GEMMA, mode="frozen-head", errors=False),
    replace(GEMMA, own_products=False, errors=False),
    *(replace(ZIPF, head=f"zipf {std}") for std in ("6", "5", "3.5")),
    *(replace(ZIPF, vocab=128000, head=f"trained {text}") for text in TEXTS),
]


def call_case(shape: Shape) -> OperatorCase:
    """Return the case of a shape with the default of flce and all peers, as called."""
    return OperatorCase(*shape, contenders=("floor", "floor-aligned", "ours", "stock", *PEERS), calls=True)


def exact_cases() -> list[OperatorCase]:
    """Return cases of logits that are never rounded, beside rounded logits and torch.compile."""
    case = OperatorCase(*MAIN, contenders=("floor", "ours", "ours-rounded"), calls=True)
    # In the last shape the logits are so many that neither way saves memory.
    shapes = parse_shapes(
        "64x4096x128256 256x4096x128256 512x2048x128256 512x4096x128256 1024x4096x128256 2048x2048x128256 "
        "4096x4096x32768 8192x2048x32000 8192x576x49152 2048x512x32000 4096x4096x128256"
    )
    compiled = (*(case.contenders or ()), "torch-compile")
    in_budgets = (*(case.contenders or ()), budget_name(512), budget_name(64))
    # Calls that fused products cannot compute, or not always.
    wide_and_shorter: list[Shape] = [HEADS[1], (8192, *NARROW[1:])]
    return [
        *(case.on(shape, contenders=compiled) for shape in shapes),
        *(case.on(shapes[index], mode="forward") for index in (0, 5, 9, 10)),
        case.on(HEADS[1], feature="bias"),
        *(case.on(shape, feature="label smoothing") for shape in wide_and_shorter),
        *(case.on(shape, feature="adapter of rank 16") for shape in wide_and_shorter),
        *(case.on(shape, dtype="float16") for shape in wide_and_shorter),
        case.on((4096, 4095, 128256)),
        *(case.on(shape, contenders=in_budgets, own_products=False) for shape in (MAIN, HEADS[3], NARROW)),
        replace(case, contenders=in_budgets[:-1], own_products=False, mode="frozen-head"),
    ]


def tiny() -> Plan:
    """Return the cases of the tests. They take seconds on a CPU."""
    all_modes = [OperatorCase(*TINY, dtype="float32", mode=mode, budget_mib=1, errors=True) for mode in CALLS]
    skipping = OperatorCase(*TINY, ignored=0.5, contenders=("ours-full", "ours-skipping"), errors=True)
    in_budgets = OperatorCase(*TINY, contenders=("floor", "ours", budget_name(1), "stock", *PEERS))
    featured = replace(all_modes[0], own_products=False, contenders=("floor", "ours", "stock"))
    features = [replace(featured, feature=feature) for feature in FEATURES]
    return plan_cases([*all_modes, skipping, *features, in_budgets, call_case(TINY)], 3, 1.0)


CPU = [OperatorCase(2048, 512, 32000, dtype, budget_mib=32, errors=True) for dtype in ("float32", "bfloat16")]
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": tiny,
    "cpu": lambda: plan_cases(CPU, rounds=9, seconds=15.0),
    # Targets need a precision of one percent, so they get more rounds than the peers, which need ten percent.
    "targets": lambda: plan_cases(target_cases(), rounds=24, seconds=0.8),
    # Small calls, and a large one. Two minutes of one large GPU.
    "h200-small": lambda: plan_cases(map(call_case, SMALL), 25, 0.5) + plan_cases([call_case(MAIN)], 25, 1.2),
    # Time over budget from 1 MiB on, and the peers at their workspace; errors of the first. Two minutes and a half.
    "h200-curve": lambda: plan_cases(
        [OperatorCase(*shape, contenders=CURVE, errors=shape == CURVE_SHAPES[0]) for shape in CURVE_SHAPES], 7, 0.4
    ),
    # The newest kernels of PyTorch, Liger and QuACK, and flce in their workspace. Three minutes.
    "h200-rivals": lambda: plan_cases([OperatorCase(*s, contenders=IN_GIB) for s in RIVAL_SHAPES], 9, 0.45),
    # Logits that are never rounded, rounded logits, and no fused products. Three minutes.
    "h200-exact": lambda: plan_cases(exact_cases(), rounds=7, seconds=0.5),
    # Heads of real and of trained models, as they are and in a larger hidden size. Four minutes.
    "real-heads": lambda: plan_cases(REAL_HEADS, rounds=7, seconds=0.4),
    # Gradients from sampled entries, on real heads and on random ones without frequent classes. Five minutes.
    "sampled": lambda: plan_cases(SAMPLED, rounds=7, seconds=0.4),
}


@contextlib.contextmanager
def products(ours: bool) -> Iterator[None]:
    """If not `ours`, plan and call inside as on a device without fused products."""
    with contextlib.ExitStack() as stack:
        for module in () if ours else (linear_operators, planning):
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


def figures(_: Entry, result: BenchResult) -> str:
    if not result.samples_ms:
        return "no plan" if result.status == "unplanned" else tables.NONE
    workspace = "" if result.workspace_bytes is None else f", {tables.mebibytes(result.workspace_bytes)}"
    return tables.milliseconds(result.median_ms) + workspace


def run_tables(run: Run, brief: bool) -> list[Table]:
    targets = target_table(run)
    found = [*([targets] if targets.rows else []), *plan_tables(run)]
    called, others = ([entry for entry in run.cases if entry.case.calls is calls] for calls in (True, False))
    title = "As called and alone, of the bare products alone; host ms"
    found += [tables.summary(title, tables.SHAPE, called, format_times)] if called else []
    if others and (brief or len(others) > 1):
        found.append(tables.summary("Median ms, workspace MiB", tables.SHAPE, others, figures))
    return found + [table(entry) for entry in run.cases if entry.case.errors or not brief]


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
    choices={"mode": CALLS, "feature": FEATURES},
)
