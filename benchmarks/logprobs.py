"""`flce.linear_logprobs`: time and workspace, beside the bare products and kernels for reinforcement learning.

A case is a shape, on which all calls and all peers take turns. The results of a call that have gradients are added up
to one number of each token, and the gradients are those of these numbers for an upstream gradient of each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flce
from benchmarks import operator, tables
from benchmarks.benchmark import Benchmark, Plan, planned
from benchmarks.cases import Step, needs_package, select_contenders
from benchmarks.contenders import (
    BOUNDED,
    CONDITIONS,
    TRL_CHUNK,
    LossFunction,
    OperatorContender,
    budget_name,
    floor_step,
    needs_trl,
    step_on_changed_problem,
)
from benchmarks.measure import Entrant, Prepared
from benchmarks.problem import Mode, OperatorCase, OperatorProblem, Shape
from benchmarks.runs import BenchResult, Run
from benchmarks.tables import Table
from benchmarks.targets import (
    MAIN,
    NARROW,
    TOLERANCE,
    Rule,
    Target,
    check_targets,
    duel_table,
    duels,
    entries_of,
    figures,
    plan_tables,
    verdict_table,
)
from flce.core.sizes import MIB
from flce.ops import linear_logprobs as ops
from flce.ops.linear_call import plan_for_problem
from flce.planning.plan import ChunkPlan
from flce.testing.problem import IGNORED

MODE: Mode = "reduction-none"  # the same four products, and an upstream gradient of each token
BUDGETS_MIB = (64, 256, 512)
CANDIDATES = 32
SEQUENCE = 1024  # tokens, of those who take a batch of sequences
ENTROPY_WEIGHT = 0.01

Changes = Callable[[OperatorProblem], dict[str, Any]]


# --- contenders ---


def unchanged(problem: OperatorProblem) -> dict[str, Any]:
    return {}


def without_gradients(problem: OperatorProblem) -> dict[str, Any]:
    return {"case": replace(problem.case, mode="forward")}


def half_ignored(problem: OperatorProblem) -> dict[str, Any]:
    """Every other label."""
    target = problem.target.clone()
    target[::2] = IGNORED
    return {"target": target}


def candidates_and_temperatures(problem: OperatorProblem) -> dict[str, Any]:
    """Arguments of the call."""
    tokens, vocab, device = problem.case.tokens, problem.case.vocab, problem.input.device
    generator = torch.Generator(device).manual_seed(1)
    candidates = torch.randint(vocab, (tokens, CANDIDATES), device=device, generator=generator)
    return {
        "candidates": candidates,
        "temperature": torch.rand(tokens, device=device, generator=generator) + 0.5,
    }


def with_entropy(logprob: Tensor, entropy: Tensor) -> Tensor:
    return torch.add(logprob, entropy, alpha=ENTROPY_WEIGHT)


def our_number(x: Tensor, w: Tensor, y: Tensor, reduction: str, **arguments: Any) -> Tensor:
    out: Any = flce.linear_logprobs(x, w, y, **arguments)
    number: Tensor = out.logprob if out.entropy is None else with_entropy(out.logprob, out.entropy)
    return number if out.candidate_logprob is None else number + out.candidate_logprob.mean(1)


def ours(
    name: str,
    title: str,
    *outputs: str,
    changed: Changes = unchanged,
    arguments: Changes = unchanged,
    **options: Any,
) -> OperatorContender:
    def prepare(problem: OperatorProblem) -> Step:
        how: dict[str, Any] = {"outputs": outputs or ("logprob", "entropy"), "options": flce.ChunkOptions(**options)}
        return step_on_changed_problem(problem, partial(our_number, **how, **arguments(problem)), **changed(problem))

    return OperatorContender(name, title, "ours", prepare)


def forward_floor_step(problem: OperatorProblem) -> Step:
    return floor_step(problem.changed(**without_gradients(problem)))


def peer(name: str, title: str, unavailable: Any, number: LossFunction) -> OperatorContender:
    return OperatorContender(
        name, title, "peer", partial(step_on_changed_problem, loss=number), unavailable=unavailable
    )


def trl_number(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    logprob, entropy, *_ = function.apply(x, w, None, y, 1.0, TRL_CHUNK, None, 1.0, ("entropy",))
    return with_entropy(logprob, entropy)


LIGER, VERL = "liger_kernel.chunked_loss", "verl.utils.kernel"


def liger_step(problem: OperatorProblem, **options: Any) -> Step:
    """Liger's makes its gradients in forward, for the loss that it is: without a divergence from a reference."""
    torch.compiler.reset()  # with PyTorch 2.11 compiling it failed at the second shape of a run
    make: Any = importlib.import_module(LIGER).LigerFusedLinearGRPOLoss
    of_batch = make(beta=0.0, use_ref_model=False, **options)
    x, w, y = problem.input, problem.weight, problem.target
    batch = -1, math.gcd(len(y), SEQUENCE)
    with torch.no_grad():
        logprob: Any = flce.linear_logprobs(x, w, y, outputs=("logprob",)).logprob
    old, labels, mask = logprob.view(batch), y.view(batch), torch.ones_like(y.view(batch))
    advantages = torch.linspace(-1.0, 1.0, len(labels), device=x.device)

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        found: Tensor = of_batch(x.view(*labels.shape, -1), w, labels, mask, advantages, old_per_token_logps=old)[0]
        return found

    return step_on_changed_problem(problem, loss, case=replace(problem.case, mode="forward+backward"))


def verl_number(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    function = importlib.import_module(f"{VERL}.linear_cross_entropy").linear_cross_entropy
    return with_entropy(*function(x, w, y, 1.0, "none", None))


def needs_verl(device: torch.device) -> str | None:
    """Its packages import Ray and more, of which its kernel needs nothing: empty ones are in their place."""
    with contextlib.suppress(ImportError):
        for name in ("verl", "verl.utils"):
            spec = importlib.util.find_spec(name)
            if spec is not None and name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(spec)
    return needs_package(f"{VERL}.kernels", "verl")(device)


C = OperatorContender
CONTENDERS = [
    C("floor", "four bare products", "floor", floor_step, applies=CONDITIONS["products"]),
    C("floor-forward", "one bare product", "floor", forward_floor_step, applies=CONDITIONS["products"]),
    ours("ours", "flce"),
    ours("ours-logprob", "flce, logprob only", "logprob"),
    ours(
        "ours-all",
        f"flce, correct, {CANDIDATES} candidates, temperatures",
        *("logprob", "entropy", "correct"),
        arguments=candidates_and_temperatures,
    ),
    ours("ours-forward", "flce, no gradient", changed=without_gradients),
    ours(BOUNDED, "flce, half of the labels ignored", changed=half_ignored, skip_ignored=True),
    ours(f"{BOUNDED}-none", "flce, none ignored, skip_ignored=True", skip_ignored=True),
    *[ours(budget_name(mib), f"flce, {mib} MiB budget", max_workspace_bytes=mib * MIB) for mib in BUDGETS_MIB],
    peer("trl", "TRL's kernel", needs_trl, trl_number),
    C("liger", "Liger's GRPO loss", "peer", liger_step, unavailable=needs_package(LIGER, "liger-kernel")),
    peer("verl", "verl's kernel", needs_verl, verl_number),
]


def prepare(case: OperatorCase, device: torch.device) -> Prepared:
    meter, enter = operator.prepare(case, device)

    def enter_noting(contender: OperatorContender, result: BenchResult) -> Entrant:
        """The plans of a call are those that it asks for: one of forward, and one of the gradients."""
        plans: list[ChunkPlan] = []

        def noted(*call: Any) -> ChunkPlan:
            plans.append(plan_for_problem(*call))
            return plans[-1]

        with mock.patch.object(ops, "plan_for_problem", noted):
            entrant = enter(contender, result)
        if contender.family != "peer":
            result.planned_bytes = max((plan.workspace_bytes for plan in plans), default=None)
        return entrant

    return meter, enter_noting


# --- what is promised ---


def promised(shape: Shape, logprob: float, usual: float, all_of_it: float, forward: float) -> list[Target]:
    """Forward and backward over four products, forward alone over its one; of workspace, too, 2% are tolerated."""
    case = OperatorCase(*shape, mode=MODE)
    of = Target("logprob, entropy", case, usual, workspace_mib=512, workspace_tolerance=TOLERANCE)
    of_budgets = [
        replace(of, call=f"{mib} MiB budget", limit=None, contender=budget_name(mib), workspace_mib=mib)
        for mib in BUDGETS_MIB
    ]
    return [
        replace(of, call="logprob", limit=logprob, contender="ours-logprob"),
        of,
        replace(of, call="correct, candidates, temperatures too", limit=all_of_it, contender="ours-all"),
        replace(of, call="no gradient", limit=forward, contender="ours-forward", reference="floor-forward"),
        replace(of, call="half of the labels ignored", limit=0.55, contender=BOUNDED, reference=f"{BOUNDED}-none"),
        *of_budgets,
    ]


TARGETS = [*promised(MAIN, 1.05, 1.07, 1.10, 1.06), *promised(NARROW, 1.09, 1.14, 1.18, 1.15)]
SETTINGS = ("ours", *map(budget_name, BUDGETS_MIB))  # that do as much as the peers
RULES = [Rule(name, 1.0, least_mib=512, settings=SETTINGS) for name in ("trl", "liger", "verl")]


def target_tables(runs: Sequence[Run], brief: bool) -> list[Table]:
    entries = entries_of(runs)
    calls = verdict_table("Targets of log-probabilities met", check_targets(runs, TARGETS), runs, entries)
    return [calls, duel_table("Faster than peers", duels(runs, RULES, MODE), runs, entries), *plan_tables(runs)]


# --- presets and tables ---

TINY = OperatorCase(96, 64, 500, dtype="float32", mode=MODE)
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: planned([TINY], rounds=2, seconds=1.0),
    # Two to three minutes of one large GPU, most of them to build kernels.
    "h200": lambda: planned([OperatorCase(*shape, mode=MODE) for shape in (MAIN, NARROW)], rounds=15, seconds=1.5),
}


LOGPROBS = Benchmark(
    kind="logprobs",
    about="Time and workspace of log-probabilities and entropies of tokens, with gradients.",
    noun="log-probabilities",
    case_type=OperatorCase,
    sizes="tokens,hidden,vocab",
    presets=PRESETS,
    contenders=lambda case: select_contenders(CONTENDERS, case.contenders) if case.contenders else CONTENDERS,
    prepare=prepare,
    table=operator.table,
    tables=tables.overview(
        "Median ms, workspace MiB", "tokens x hidden x vocabulary", lambda _, result: figures(result), operator.table
    ),
    figure=operator.figure,
    targets=target_tables,
    choices={"mode": (MODE,)},
    defaults=({"mode": MODE},),
)
