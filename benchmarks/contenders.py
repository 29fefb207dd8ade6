"""Who is measured. Each contender turns a problem into a step: a call that does the work once.

To add one, write a function `(Problem) -> Step` (most are a loss function given to `autograd_step`) and list
it in `CONTENDERS`. Optional packages are imported inside; a contender that cannot run here says why.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.cases import MIB, Case, Mode
from benchmarks.problem import IGNORE_INDEX, Problem, make_problem, row_chunks


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

    return forward if case.mode is Mode.forward else forward_backward


# --- the floor: the matrix products alone ---


def prepare_floor(problem: Problem) -> Step:
    """The products that the case cannot do without, on the same operands, as one would write them.

    The gradient of the logits is made beforehand from the same problem, since the speed of a matrix product
    depends on its data. A per-token upstream gradient takes the logits twice.
    """
    x, w = problem.input.detach(), problem.weight.detach()
    mode = problem.case.mode
    if mode is Mode.forward:

        def forward() -> Outcome:
            x @ w.T
            return Outcome(None)

        return forward

    dlogits = logits_gradient(problem)

    def forward_backward() -> Outcome:
        x @ w.T
        if mode is Mode.none:
            x @ w.T
        dx = dlogits @ w
        return Outcome(None, dx, None if mode is Mode.frozen else dlogits.T @ x)

    return forward_backward


def logits_gradient(problem: Problem) -> torch.Tensor:
    """softmax - onehot, in the dtype of the problem."""
    x, w, y = problem.input.detach(), problem.weight.detach(), problem.target
    gradient = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    for rows in row_chunks(len(x), 4 * len(w), x.device):
        probabilities = torch.softmax((x[rows] @ w.T).float(), dim=-1)
        labels = y[rows].clamp(min=0)
        probabilities[torch.arange(len(labels), device=x.device), labels] -= 1
        gradient[rows] = probabilities.masked_fill_((y[rows] == IGNORE_INDEX)[:, None], 0)
    return gradient


def prepare_aligned_floor(problem: Problem) -> Step:
    return prepare_floor(make_problem(problem.case.aligned(), problem.device))


def floor_applies(case: Case, device: torch.device) -> bool:
    """Most CPUs only emulate half precision: bare products in it are no floor there."""
    return device.type == "cuda" or not half_precision(case, device)


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


def prepare_ours_vocab(problem: Problem) -> Step:
    budget = problem.case.budget_mib * MIB
    return prepare_ours(strategy="vocab", max_workspace_bytes=budget)(problem)


def half_precision(case: Case, device: torch.device) -> bool:
    return case.torch_dtype in (torch.float16, torch.bfloat16)


# --- PyTorch ---


def stock_loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y, reduction=reduction)


def prepare_stock(problem: Problem) -> Step:
    return autograd_step(problem, stock_loss)


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


def prepare_peer(module: str, function: str, **options: Any) -> Callable[[Problem], Step]:
    """For peers whose function takes (input, weight, target, reduction=...)."""

    def prepare(problem: Problem) -> Step:
        call = getattr(importlib.import_module(module), function)

        def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
            result: torch.Tensor = call(x, w, y, reduction=reduction, **options)
            return result

        return autograd_step(problem, loss)

    return prepare


prepare_liger = functools.partial(
    prepare_peer, "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
)
prepare_cce = functools.partial(prepare_peer, "cut_cross_entropy", "linear_cross_entropy")


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
    Contender("stock", "stock (F.linear + F.cross_entropy)", "stock", prepare_stock),
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
]


def select(names: list[str] | None) -> list[Contender]:
    """The contenders of these names, in the order of the list above; all of them by default."""
    if not names:
        return CONTENDERS
    known = {contender.name for contender in CONTENDERS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"unknown contender {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [contender for contender in CONTENDERS if contender.name in names]
