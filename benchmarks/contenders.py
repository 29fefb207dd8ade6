"""Who is measured. Each contender turns a problem into a step: a call that does the work once.

To add one, write a function `(Problem) -> Step` (most are a loss function given to `autograd_step`) and list
it in `CONTENDERS`. Optional packages are imported inside; a contender that cannot run here says why. Any workspace
budget of ours is a contender too, see `in_budget`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.cases import MIB, Case, Mode, Product
from benchmarks.peers import fla_loss, quack_loss, trl_loss
from benchmarks.problem import Problem, make_problem


class Outcome(NamedTuple):
    """What one call returned."""

    loss: torch.Tensor | None
    input_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None


Step = Callable[[], Outcome]
LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]


def anywhere(device: torch.device) -> str | None:
    return None


def every(case: Case, device: torch.device) -> bool:
    return True


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    family: str  # "floor", "ours", "stock" or "peer"
    prepare: Callable[[Problem], Step]
    unavailable: Callable[[torch.device], str | None] = anywhere  # why it cannot run on this device, if so
    applies: Callable[[Case, torch.device], bool] = every  # False where it would mean nothing, or repeat another
    workspace_counts: bool = True  # False where the buffers are an artefact of how it is measured


def autograd_step(problem: Problem, loss_function: LossFunction) -> Step:
    """Forward, and backward unless the case is without gradients; leaves nothing behind on the operands."""
    x, w, y, case = problem.input, problem.weight, problem.target, problem.case

    def forward() -> Outcome:
        with torch.no_grad():
            return Outcome(loss_function(x, w, y, problem.reduction))

    def forward_backward() -> Outcome:
        loss = loss_function(x, w, y, problem.reduction)
        plain = case.upstream == 1 and problem.reduction != "none"
        loss.backward(None if plain else problem.upstream.to(loss.dtype))
        outcome = Outcome(loss.detach(), x.grad, w.grad)
        x.grad = w.grad = None
        return outcome

    return forward_backward if case.mode.call.input_grad else forward


# --- the floor: the matrix products alone ---


def prepare_products(problem: Problem, products: Iterable[Product]) -> Step:
    """Bare products on the operands of the problem, into memory made beforehand, in the layouts that flce has.

    The gradient of the logits is the true one, since the speed of a matrix product depends on its data.
    """
    x, w = problem.input.detach(), problem.weight.detach()
    calls: dict[Product, Callable[[], torch.Tensor]] = {}
    for product in set(products):
        if product is Product.logits:
            calls[product] = functools.partial(torch.mm, x, w.t(), out=x.new_empty(len(x), len(w)))
        elif product is Product.input_grad:
            calls[product] = functools.partial(torch.mm, problem.logits_gradient, w, out=torch.empty_like(x))
        else:
            calls[product] = functools.partial(torch.mm, problem.logits_gradient.t(), x, out=torch.empty_like(w))

    def step() -> Outcome:
        for product in products:
            calls[product]()
        return Outcome(None)

    return step


def prepare_floor(problem: Problem) -> Step:
    """What the call cannot do without."""
    return prepare_products(problem, problem.case.mode.call.products)


def prepare_recomputed_floor(problem: Problem) -> Step:
    """The same, and the logits a second time: what a call with a small workspace cannot do without."""
    return prepare_products(problem, (Product.logits, *problem.case.mode.call.products))


def prepare_aligned_floor(problem: Problem) -> Step:
    return prepare_floor(make_problem(problem.case.aligned(), problem.device))


def floor_applies(case: Case, device: torch.device) -> bool:
    """Most CPUs only emulate half precision: bare products in it are no floor there."""
    return device.type == "cuda" or not half_precision(case, device)


def recomputed_floor_applies(case: Case, device: torch.device) -> bool:
    return case.mode is Mode.forward_backward and floor_applies(case, device)


def aligned_floor_applies(case: Case, device: torch.device) -> bool:
    return device.type == "cuda" and case.aligned() != case


# --- flce ---


def prepare_ours(**options: Any) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        import flce

        chunk_options = flce.ChunkOptions(**options) if options else None

        def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
            result = flce.fused_linear_cross_entropy(x, w, y, reduction=reduction, options=chunk_options)
            assert isinstance(result, torch.Tensor)
            return result

        return autograd_step(problem, loss)

    return prepare


def prepare_ours_full(problem: Problem) -> Step:
    """For its time only: the results are those of another problem."""
    solve = prepare_ours()(replace(problem, target=problem.full_target))

    def step() -> Outcome:
        solve()
        return Outcome(None)

    return step


def prepare_ours_vocab(problem: Problem) -> Step:
    budget = problem.case.budget_mib * MIB
    return prepare_ours(strategy="vocab", max_workspace_bytes=budget)(problem)


def half_precision(case: Case, device: torch.device) -> bool:
    return case.torch_dtype in (torch.float16, torch.bfloat16)


def brain_float(case: Case, device: torch.device) -> bool:
    """Of half precision only bfloat16 sums are allowed."""
    return case.torch_dtype is torch.bfloat16


def some_ignored(case: Case, device: torch.device) -> bool:
    return case.ignored > 0


BUDGET = re.compile(r"ours(?P<sums>-bf16)?-(?P<mib>[1-9]\d*)MiB")


def in_budget(name: str) -> Contender | None:
    """The contender that a name such as ours-256MiB stands for; with bfloat16 sums: ours-bf16-64MiB."""
    match = BUDGET.fullmatch(name)
    if match is None:
        return None
    title, applies = f"flce, {match['mib']} MiB budget", every
    options: dict[str, Any] = {"max_workspace_bytes": int(match["mib"]) * MIB}
    if match["sums"]:
        title, applies = f"{title}, bfloat16 sums", brain_float
        options["accum_dtype"] = torch.bfloat16
    return Contender(name, title, "ours", prepare_ours(**options), ours_unavailable, applies)


def budget_name(mib: int, bfloat16_sums: bool = False) -> str:
    """What `in_budget` understands."""
    return f"ours{'-bf16' if bfloat16_sums else ''}-{mib}MiB"


def sums_in_bfloat16(contender: str) -> bool:
    match = BUDGET.fullmatch(contender)
    return match is not None and match["sums"] is not None


# --- PyTorch ---


def stock_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, reduction=reduction)


def prepare_compiled(problem: Problem) -> Step:
    torch.compiler.reset()
    return autograd_step(problem, torch.compile(stock_loss, dynamic=False))


def prepare_torch_chunked(problem: Problem) -> Step:
    options = getattr(torch.nn, "LinearCrossEntropyOptions")()  # noqa: B009 - not in every version
    function = getattr(F, "linear_cross_entropy")  # noqa: B009

    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        result: torch.Tensor = function(x, w, y, reduction=reduction, options=options)
        return result

    return autograd_step(problem, loss)


def torch_chunked_unavailable(device: torch.device) -> str | None:
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"PyTorch {torch.__version__} has no torch.nn.LinearCrossEntropyOptions (2.13 has)"


# --- peers ---


def prepare_loss(loss: LossFunction) -> Callable[[Problem], Step]:
    return functools.partial(autograd_step, loss_function=loss)


def prepare_peer(module: str, function: str, **options: Any) -> Callable[[Problem], Step]:
    """For peers whose function takes (input, weight, target, reduction=...)."""

    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        call = getattr(importlib.import_module(module), function)
        result: torch.Tensor = call(x, w, y, reduction=reduction, **options)
        return result

    return prepare_loss(loss)


prepare_liger = functools.partial(
    prepare_peer, "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
)
prepare_cce = functools.partial(prepare_peer, "cut_cross_entropy", "linear_cross_entropy")


def reduced(case: Case, device: torch.device) -> bool:
    """Some peers have no per-token losses."""
    return case.mode.call.reduction != "none"


def needs_package(module: str, distribution: str, cuda: bool = True) -> Callable[[torch.device], str | None]:
    """Says why a contender from an optional package cannot run here."""

    def unavailable(device: torch.device) -> str | None:
        try:
            importlib.import_module(module)
        except ImportError as error:
            # A package of ours that is not there, and one that is broken here, are different news.
            top = module.partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and (error.name or top).partition(".")[0] == top:
                return f"not installed (pip install {distribution})"
            return f"cannot be imported: {type(error).__name__}: {error}"
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
        return needs_cuda(device) if cuda else None

    return unavailable


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


liger_unavailable = needs_package("liger_kernel.transformers.functional", "liger-kernel")
cce_unavailable = needs_package("cut_cross_entropy", "cut-cross-entropy")
fla_unavailable = needs_package("fla.modules.fused_linear_cross_entropy", "fla-core")
quack_unavailable = needs_package("quack.linear_cross_entropy", "quack-kernels")


def trl_unavailable(device: torch.device) -> str | None:
    """In backward its kernel asks TRL's utilities, which import much: last, and only where it is of use."""
    return needs_cuda(device) or needs_package("trl.trainer.utils", "trl")(device)


def cce_exact_unavailable(device: torch.device) -> str | None:
    reason = cce_unavailable(device)
    if reason is None and importlib.util.find_spec("cut_cross_entropy.cce_utils") is None:
        return "this version of cut-cross-entropy has no presets"
    return reason


ours_unavailable = needs_package("flce", ".", cuda=False)

CONTENDERS = [
    Contender("floor", "bare GEMMs", "floor", prepare_floor, applies=floor_applies, workspace_counts=False),
    Contender(
        "floor-aligned",
        "bare GEMMs, next aligned shape",
        "floor",
        prepare_aligned_floor,
        applies=aligned_floor_applies,
        workspace_counts=False,
    ),
    Contender(
        "floor-recomputed",
        "bare GEMMs, logits twice",
        "floor",
        prepare_recomputed_floor,
        applies=recomputed_floor_applies,
        workspace_counts=False,
    ),
    Contender("ours", "flce", "ours", prepare_ours(), ours_unavailable),
    Contender("ours-vocab", "flce, strategy vocab in a budget", "ours", prepare_ours_vocab, ours_unavailable),
    Contender(
        "ours-float32-logits",
        "flce, float32 logits",
        "ours",
        prepare_ours(logits_dtype=torch.float32),
        ours_unavailable,
        half_precision,
    ),
    Contender(
        "ours-skipping",
        "flce, skip_ignored=True",
        "ours",
        prepare_ours(skip_ignored=True),
        ours_unavailable,
        some_ignored,
    ),
    Contender(
        "ours-full",
        "flce, no label ignored",
        "ours",
        prepare_ours_full,
        ours_unavailable,
        some_ignored,
    ),
    Contender(
        "ours-keeping",
        "flce, skip_ignored=False",
        "ours",
        prepare_ours(skip_ignored=False),
        ours_unavailable,
        some_ignored,
    ),
    Contender("stock", "stock (F.linear + F.cross_entropy)", "stock", prepare_loss(stock_loss)),
    Contender("torch-compile", "stock, torch.compile", "peer", prepare_compiled, needs_cuda),
    Contender(
        "torch-chunked",
        "PyTorch chunked (F.linear_cross_entropy)",
        "peer",
        prepare_torch_chunked,
        torch_chunked_unavailable,
    ),
    Contender("liger", "Liger, default", "peer", prepare_liger(), liger_unavailable),
    Contender(
        "liger-float32-8x",
        "Liger, float32 sums, 8x chunk",
        "peer",
        prepare_liger(accum_dtype=torch.float32, chunk_mem_const=8),
        liger_unavailable,
    ),
    Contender("cce", "Cut Cross-Entropy, default", "peer", prepare_cce(), cce_unavailable),
    Contender("cce-unfiltered", "CCE, no gradient filter", "peer", prepare_cce(filter_eps=None), cce_unavailable),
    Contender("cce-exact", "CCE, its exact preset", "peer", prepare_cce(impl="cce_exact"), cce_exact_unavailable),
    Contender("trl", "TRL's fused head", "peer", prepare_loss(trl_loss), trl_unavailable),
    Contender("fla", "flash-linear-attention", "peer", prepare_loss(fla_loss), fla_unavailable, reduced),
    Contender("quack", "QuACK, chunked", "peer", prepare_loss(quack_loss), quack_unavailable, reduced),
]


def select(names: Iterable[str] | None) -> list[Contender]:
    """The contenders of these names, in their order; all that are listed by default."""
    if not names:
        return CONTENDERS
    known = {contender.name: contender for contender in CONTENDERS}
    found = {name: known.get(name) or in_budget(name) for name in names}
    unknown = sorted(name for name, contender in found.items() if contender is None)
    if unknown:
        raise ValueError(
            f"unknown contender {', '.join(unknown)}; there are: {', '.join(sorted(known))}, "
            f"and budgets such as {budget_name(256)} and {budget_name(64, bfloat16_sums=True)}"
        )
    return [contender for contender in found.values() if contender is not None]
