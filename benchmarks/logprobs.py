"""Time and workspace of `flce.linear_logprobs`, the bare products and kernels for reinforcement learning.

A case is a shape, on which all calls and all peers take turns. The differentiable results of a call are added up to one
number for each token. Backward has an upstream gradient for each of these numbers.
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
from benchmarks import contenders, operator
from benchmarks.benchmark import Plan, plan_cases
from benchmarks.cases import Step, StepOutcome, needs_cuda, needs_package, select_contenders
from benchmarks.contenders import BOUNDED, OperatorContender, budget_name, floor, floor_step
from benchmarks.measure import Prepared, ReadyContender
from benchmarks.problem import Mode, OperatorCase, OperatorProblem
from benchmarks.real_heads import TEXTS
from benchmarks.runs import BenchResult
from benchmarks.targets import MAIN, NARROW
from flce.core.sizes import MIB
from flce.ops import linear_logprobs as ops
from flce.ops.linear_operators import plan_for_problem
from flce.planning.plan import ChunkPlan
from flce.testing.problem import IGNORED

MODE: Mode = "reduction-none"  # the same four products, and an upstream gradient of each token
BUDGETS_MIB = (64, 256, 512)
CANDIDATES = 32
EVERYTHING = f"flce, correct, {CANDIDATES} candidates, temperatures"
SEQUENCE = 1024  # tokens, for kernels whose argument is a batch of sequences
ENTROPY_WEIGHT = 0.01

Changes = Callable[[OperatorProblem], dict[str, Any]]
unchanged: Changes = lambda problem: {}  # noqa: E731


def without_gradients(problem: OperatorProblem) -> dict[str, Any]:
    return {"case": replace(problem.case, mode="forward")}


def summed(problem: OperatorProblem) -> dict[str, Any]:
    """Return the case of losses that are one number, whose gradients are computed in forward."""
    return {"case": replace(problem.case, mode="forward+backward")}


def half_ignored(problem: OperatorProblem) -> dict[str, Any]:
    target = problem.target.clone()
    target[::2] = IGNORED
    return {"target": target}


def of_responses(problem: OperatorProblem) -> dict[str, Any]:
    """Return a mask of the last 30 of each 100 tokens."""
    return {"mask": torch.arange(problem.case.tokens, device=problem.input.device) % 100 >= 70}


def candidates_and_temperatures(problem: OperatorProblem) -> dict[str, Any]:
    tokens, vocab, device = problem.case.tokens, problem.case.vocab, problem.input.device
    generator = torch.Generator(device).manual_seed(1)
    candidates = torch.randint(vocab, (tokens, CANDIDATES), device=device, generator=generator)
    return {"candidates": candidates, "temperature": torch.rand(tokens, device=device, generator=generator) + 0.5}


def with_entropy(logprob: Tensor, entropy: Tensor) -> Tensor:
    return torch.add(logprob, entropy, alpha=ENTROPY_WEIGHT)


def our_number(x: Tensor, w: Tensor, y: Tensor, reduction: str, **arguments: Any) -> Tensor:
    out: Any = flce.linear_logprobs(x, w, y, **arguments)
    number: Tensor = out.logprob if out.entropy is None else with_entropy(out.logprob, out.entropy)
    return number if out.candidate_logprob is None else number + out.candidate_logprob.mean(1)


def contender(
    name: str,
    title: str,
    family: str,
    number: Callable[..., Tensor],
    changed: Changes = unchanged,
    arguments: Changes = unchanged,
    **more: Any,
) -> OperatorContender:
    """Return the contender that computes `number` with these arguments, on the problem with these changes."""

    def prepare(problem: OperatorProblem) -> Step:
        call = partial(number, **arguments(problem))
        return contenders.step_on_changed_problem(problem, call, **changed(problem))

    return OperatorContender(name, title, family, prepare, **more)


def ours(
    name: str, title: str, *outputs: str, changed: Changes = unchanged, arguments: Changes = unchanged, **options: Any
) -> OperatorContender:
    number = partial(our_number, outputs=outputs or ("logprob", "entropy"), options=flce.ChunkOptions(**options))
    return contender(name, title, "ours", number, changed, arguments)


def trl_number(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    logprob, entropy, *_ = function.apply(x, w, None, y, 1.0, contenders.TRL_CHUNK, None, 1.0, ("entropy",))
    return with_entropy(logprob, entropy)


def liger_hopper_number(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    module = importlib.import_module(f"{contenders.LIGER_HOPPER}.fused_scaled_cross_entropy_sm90")
    temperature, tiles, with_entropies = 1.0, 1, True
    call = x, w, y, temperature, IGNORED, tiles, with_entropies
    losses, entropy, *_ = module.LigerFusedScaledCrossEntropySM90Function.apply(*call)
    return with_entropy(-losses, entropy)


LIGER, VERL = "liger_kernel.chunked_loss", "verl.utils.kernel"


def liger_step(problem: OperatorProblem, **options: Any) -> Step:
    """Return a step of Liger's GRPO loss, which computes its gradients in forward; without a reference model."""
    torch.compiler.reset()  # with PyTorch 2.11 its compilation failed at the second shape of a run
    loss_class: Any = importlib.import_module(LIGER).LigerFusedLinearGRPOLoss
    loss_of_batch = loss_class(beta=0.0, use_ref_model=False, **options)
    x, w, y = problem.input, problem.weight, problem.target
    batch = -1, math.gcd(len(y), SEQUENCE)
    with torch.no_grad():
        logprob: Any = flce.linear_logprobs(x, w, y, outputs=("logprob",)).logprob
    old, labels, mask = logprob.view(batch), y.view(batch), torch.ones_like(y.view(batch))
    advantages = torch.linspace(-1.0, 1.0, len(labels), device=x.device)

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        states = x.view(*labels.shape, -1)
        result: Tensor = loss_of_batch(states, w, labels, mask, advantages, old_per_token_logps=old)[0]
        return result

    return contenders.step_on_changed_problem(problem, loss, **summed(problem))


def verl_number(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    function = importlib.import_module(f"{VERL}.linear_cross_entropy").linear_cross_entropy
    return with_entropy(*function(x, w, y, 1.0, "none", None))


def needs_verl(device: torch.device) -> str | None:
    """Return why verl's kernel cannot run. Empty modules replace verl's packages, which import Ray and more."""
    with contextlib.suppress(ImportError):
        for name in ("verl", "verl.utils"):
            spec = importlib.util.find_spec(name)
            if spec is not None and name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(spec)
    return needs_package(f"{VERL}.kernels", "verl")(device)


def our_losses(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    out: Any = flce.linear_logprobs(x, w, y, outputs=("logprob",))
    losses: Tensor = -out.logprob
    return losses


def losses_of_logits(x: Tensor, w: Tensor, y: Tensor, reduction: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the losses of tokens from logits that ``F.linear`` computes in a dtype, and float32 after the product."""
    logits = torch.nn.functional.linear(x.to(dtype or x.dtype), w.to(dtype or w.dtype)).float()
    return torch.nn.functional.cross_entropy(logits, y, reduction=reduction)


def linear_step(problem: OperatorProblem, precision: str, dtype: torch.dtype | None = None) -> Step:
    """Return a step with logits of ``F.linear``. `precision` is of ``torch.set_float32_matmul_precision``."""
    solve = contenders.autograd_step(problem, partial(losses_of_logits, dtype=dtype))

    def step() -> StepOutcome:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return solve()
        finally:
            torch.set_float32_matmul_precision(before)

    return step


needs_liger = needs_package(LIGER, "liger-kernel")
CONTENDERS = [
    floor("floor", "four bare products", floor_step, "products"),
    floor("floor-forward", "one bare product", lambda p: floor_step(p.changed(**without_gradients(p))), "products"),
    ours("ours", "flce"),
    ours("ours-logprob", "flce, logprob only", "logprob"),
    ours("ours-all", EVERYTHING, "logprob", "entropy", "correct", arguments=candidates_and_temperatures),
    ours("ours-forward", "flce, no gradient", changed=without_gradients),
    ours(BOUNDED, "flce, half of the labels ignored", changed=half_ignored, skip_ignored=True),
    ours(f"{BOUNDED}-mask", "flce, mask of 30% of the tokens", arguments=of_responses, skip_ignored=True),
    ours(f"{BOUNDED}-none", "flce, none ignored, skip_ignored=True", skip_ignored=True),
    *[ours(budget_name(mib), f"flce, {mib} MiB budget", max_workspace_bytes=mib * MIB) for mib in BUDGETS_MIB],
    contender("trl", "TRL's kernel", "peer", trl_number, unavailable=contenders.needs_trl),
    OperatorContender("liger", "Liger's GRPO loss", "peer", liger_step, unavailable=needs_liger),
    contender(
        "liger-hopper", "Liger's Hopper kernel", "peer", liger_hopper_number, unavailable=contenders.needs_liger_hopper
    ),
    contender("verl", "verl's kernel", "peer", verl_number, unavailable=needs_verl),
]
in_float32 = partial(linear_step, precision="highest", dtype=torch.float32)
in_tf32 = partial(linear_step, precision="high", dtype=torch.float32)
# Log-probabilities of targets, whose errors are measured: flce's, and those of logits in several precisions.
HEADS_IN_FLOAT32 = [
    OperatorContender(
        "ours-compared", "flce, log-probabilities", "ours", lambda p: contenders.autograd_step(p, our_losses)
    ),
    OperatorContender("linear", "F.linear", "peer", partial(linear_step, precision="highest")),
    OperatorContender("linear-float32", "F.linear in float32", "peer", in_float32),
    OperatorContender("linear-tf32", "F.linear in TF32", "peer", in_tf32, unavailable=needs_cuda),
]
# Measured only if a case names them.
NAMED = [ours("ours-sampled", "flce, gradients sampled below 2^-12", sample_below=2.0**-12), *HEADS_IN_FLOAT32]


def contenders_of(case: OperatorCase) -> Sequence[OperatorContender]:
    return select_contenders([*CONTENDERS, *NAMED], case.contenders) if case.contenders else CONTENDERS


def prepare(case: OperatorCase, device: torch.device) -> Prepared:
    meter, get_ready = operator.prepare(case, device)

    def get_ready_and_record_plan(contender: OperatorContender, result: BenchResult) -> ReadyContender:
        """Enter the contender and record the workspace of its plans: one of forward, one of the gradients. The memory
        of the returned gradients is free in forward."""
        plans: list[ChunkPlan] = []

        def record_plan(*call: Any) -> ChunkPlan:
            plans.append(plan_for_problem(*call))
            return plans[-1]

        with mock.patch.object(ops, "plan_for_problem", record_plan):
            ready = get_ready(contender, result)
        if contender.family != "peer":
            returned = [plan.case.returned_bytes for plan in plans]
            peaks = [plan.workspace_bytes + size for plan, size in zip(plans, returned, strict=True)]
            result.planned_bytes = max(peaks) - max(returned) if plans else None
        return ready

    return meter, get_ready_and_record_plan


TINY = OperatorCase(96, 64, 500, dtype="float32", mode=MODE)
HEAD_NAMES = ("floor", "ours", *(contender.name for contender in HEADS_IN_FLOAT32))
FLOAT32_HEAD = replace(TINY, dtype="bfloat16", errors=True, contenders=HEAD_NAMES)
SAMPLED = OperatorCase(8192, 4096, 262144, mode=MODE, contenders=("floor", "ours", "ours-sampled", "trl"))
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: plan_cases([TINY, FLOAT32_HEAD], rounds=2, seconds=1.0),
    # Two to three minutes of one large GPU, most of them for the compilation of kernels.
    "h200": lambda: plan_cases([OperatorCase(*shape, mode=MODE) for shape in (MAIN, NARROW)], rounds=15, seconds=1.5),
    # A head in bfloat16, in float32 and in TF32, and flce, with errors. A minute.
    "float32-head": lambda: plan_cases([FLOAT32_HEAD.on(MAIN)], 9, 1.0),
    # Logits of a real head. A minute.
    "sampled": lambda: plan_cases([replace(SAMPLED, head=f"gemma3 {text}") for text in TEXTS], rounds=9, seconds=1.0),
}

LOGPROBS = replace(
    operator.OPERATOR,
    kind="logprobs",
    about="Time and workspace of log-probabilities and entropies of tokens, with gradients.",
    presets=PRESETS,
    contenders=contenders_of,
    prepare=prepare,
    choices={"mode": (MODE,)},
    defaults=({"mode": MODE},),
)
