"""Time and workspace of `flce.linear_divergence`, the bare products, and kernels for distillation.

The teacher has the sizes of the student. A KL needs six products. TRL computes "jsd" with eight: two of them repeat the
logits of both models. flce computes "jsd" with six, unless its budget is small. Liger's loss is one number, and its
gradients are computed in forward, with four products.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

import flce
from benchmarks import contenders, logprobs
from benchmarks.benchmark import Plan, plan_cases
from benchmarks.cases import Step, needs_package, select_contenders
from benchmarks.contenders import OperatorContender, budget_name, floor, floor_step
from benchmarks.logprobs import MODE, TINY, Changes, contender, summed, unchanged, without_gradients
from benchmarks.problem import LOGITS, OperatorCase, OperatorProblem
from benchmarks.targets import MAIN, NARROW

BETAS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}  # as TRL and Liger name the divergences
IN_256_MIB = flce.ChunkOptions(max_workspace_bytes="256MiB")


def teacher_of(problem: OperatorProblem) -> dict[str, Any]:
    """Return the hidden states and the head of the teacher, the same for all contenders: the student's, backwards."""
    made = vars(problem).setdefault("teacher", [])
    if not made:
        made += [t.detach().flip(0) for t in (problem.input, problem.weight)]
    return {"teacher": made}


def our_number(x: Tensor, w: Tensor, y: Tensor, reduction: str, teacher: Any, beta: float, **arguments: Any) -> Tensor:
    out: Any = flce.linear_divergence(x, w, *teacher, target=y, kind="jsd", beta=beta, **arguments)
    divergence: Tensor = out.divergence
    return divergence


def trl_number(x: Tensor, w: Tensor, y: Tensor, reduction: str, teacher: Any, beta: float) -> Tensor:
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    head, theirs, options = (x, w, None), (*teacher, None), (1.0, 1.0, None, 1.0, None)
    divergence, _entropy = function.apply(*head, *theirs, beta, *options)
    return divergence


LIGER = "liger_kernel.ops.fused_linear_jsd"


def liger_number(x: Tensor, w: Tensor, y: Tensor, reduction: str, teacher: Any, beta: float) -> Tensor:
    return importlib.import_module(LIGER).LigerFusedLinearJSDFunction.apply(x, w, *teacher, y, beta)


def ours(name: str, title: str, kind: str, changed: Changes = unchanged, **arguments: Any) -> OperatorContender:
    number = partial(our_number, beta=BETAS[kind], **arguments)
    return contender(name, title, "ours", number, changed, teacher_of)


def trl(name: str, title: str, kind: str) -> OperatorContender:
    number = partial(trl_number, beta=BETAS[kind])
    return contender(name, title, "peer", number, arguments=teacher_of, unavailable=contenders.needs_trl)


def products(name: str, title: str, again: int, forward: bool = False) -> OperatorContender:
    def step(problem: OperatorProblem) -> Step:
        problem = problem.changed(**without_gradients(problem)) if forward else problem
        return floor_step(problem, (LOGITS,) * again)

    return floor(name, title, step, "products")


needs_liger = needs_package(LIGER, "liger-kernel")
liger = partial(liger_number, beta=BETAS["jsd"])
CONTENDERS = [
    products("floor", "six bare products", 2),
    products("floor-jsd", "eight bare products", 4),
    products("floor-forward", "two bare products", 1, forward=True),
    ours("ours", "flce, forward KL", "forward"),
    ours("ours-reverse", "flce, reverse KL", "reverse"),
    ours("ours-jsd", "flce, jsd", "jsd"),
    ours("ours-entropy", "flce, jsd, entropy", "jsd", outputs=("divergence", "entropy")),
    ours("ours-forward", "flce, forward KL, no gradient", "forward", changed=without_gradients),
    ours(budget_name(256), "flce, forward KL, 256 MiB budget", "forward", options=IN_256_MIB),
    trl("trl", "TRL's kernel, forward KL", "forward"),
    trl("trl-jsd", "TRL's kernel, jsd", "jsd"),
    contender("liger-jsd", "Liger's fused linear JSD, jsd", "peer", liger, summed, teacher_of, unavailable=needs_liger),
]


PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: plan_cases([TINY], rounds=2, seconds=1.0),
    "h200": lambda: plan_cases([OperatorCase(*shape, mode=MODE) for shape in (MAIN, NARROW)], rounds=9, seconds=1.5),
}
DIVERGENCE = replace(
    logprobs.LOGPROBS,
    kind="divergence",
    about="Time and workspace of divergences of a student from a teacher, with gradients.",
    presets=PRESETS,
    contenders=lambda case: select_contenders(CONTENDERS, case.contenders),
)
