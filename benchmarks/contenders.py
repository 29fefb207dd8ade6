"""Contenders on the fused linear cross entropy: the bare products, flce, PyTorch and other libraries.

To add one, write a loss (x, w, y, reduction) and a line in `CONTENDERS`. Libraries are called as their documentation
or their own trainer calls them. Any workspace budget of flce is a contender, too (`contender_of_budget`).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flce
from benchmarks import cases
from benchmarks.cases import Contender, Step, StepOutcome, needs_cuda, needs_package, select_contenders
from benchmarks.problem import FEATURES, INPUT_GRAD, LOGITS, WEIGHT_GRAD, OperatorCase, OperatorProblem
from flce.core.sizes import MIB
from flce.testing.problem import IGNORED

LossFunction = Callable[[Tensor, Tensor, Tensor, str], Tensor]


@dataclass(frozen=True)
class OperatorContender(Contender):
    prepare: Callable[[OperatorProblem], Step]
    # The workspace of flce from `flce.plan`.
    planned_bytes: Callable[[OperatorCase, torch.device], int | None] = field(default=lambda *a: None, kw_only=True)


# Conditions of contenders that are measured only on some cases.
CONDITIONS: dict[str, cases.Condition] = {
    "": lambda case, device: True,
    "half precision": lambda case, device: case.dtype in ("float16", "bfloat16"),
    "bfloat16": lambda case, device: case.dtype == "bfloat16",  # float16 sums are not allowed
    "ignored": lambda case, device: case.ignored > 0,
    "reduced": lambda case, device: case.call.reduction != "none",  # some peers have no losses for each token
    # Most CPUs only emulate half precision, so bare products are not a floor there.
    "products": lambda case, device: device.type == "cuda" or not CONDITIONS["half precision"](case, device),
    "training": lambda case, device: case.mode == "forward+backward" and CONDITIONS["products"](case, device),
    "unaligned": lambda case, device: device.type == "cuda" and case.aligned() != case,
}


def autograd_step(problem: OperatorProblem, loss_function: LossFunction) -> Callable[[], StepOutcome]:
    """Return a step of forward, and of backward if the case has gradients. It leaves no gradient on the operands."""
    x, w, y, call = problem.input, problem.weight, problem.target, problem.case.call
    others = [t for t in (problem.more["linear_bias"], *sum(problem.adapters, ())) if t is not None]

    def step() -> StepOutcome:
        try:
            with torch.set_grad_enabled(call.input_grad):
                loss = loss_function(x, w, y, call.reduction)
            if call.input_grad:
                loss.backward(None if loss.dim() == 0 else problem.upstream.to(loss.dtype))
            return StepOutcome(loss.detach(), x.grad, w.grad, tuple(t.grad for t in others))
        finally:
            for leaf in (x, w, *others):
                leaf.grad = None

    return step


def library_loss(module: str, function: str, **options: Any) -> LossFunction:
    """Return the loss of a library whose function has the arguments (input, weight, target, reduction=...)."""

    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        call = getattr(importlib.import_module(module), function)
        result: Tensor = call(x, w, y, reduction=reduction, **options)
        return result

    return loss


def floor_step(problem: OperatorProblem, again: Sequence[str] = ()) -> Step:
    """Return a step of the products that every call needs, and of the products `again` a second time.

    The products have the operands of the problem and of its adapters, preallocated results, and the layouts of flce.
    The gradient of the logits is the true one, because the speed of a matrix product depends on its data.
    """
    needed = (*again, *problem.case.call.products)
    terms = [(x.detach(), w.detach()) for x, w in ((problem.input, problem.weight), *problem.adapters)]
    operands: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
        LOGITS: lambda x, w: (x, w.t(), x.new_empty(len(x), len(w))),
        INPUT_GRAD: lambda x, w: (problem.logits_gradient, w, torch.empty_like(x)),
        WEIGHT_GRAD: lambda x, w: (problem.logits_gradient.t(), x, torch.empty_like(w)),
    }
    ready = {product: [operands[product](x, w) for x, w in terms] for product in set(needed)}

    def step() -> None:
        for product in needed:
            for a, b, out in ready[product]:
                torch.mm(a, b, out=out)

    return step


def aligned_floor_step(problem: OperatorProblem) -> Step:
    return floor_step(OperatorProblem(problem.case.aligned(), problem.input.device))


logits_twice = functools.partial(floor_step, again=(LOGITS,))
our_loss = functools.partial(library_loss, "flce", "fused_linear_cross_entropy")


def ours(name: str, title: str, only: str = "", **options: Any) -> OperatorContender:
    """Return flce with these options of `flce.ChunkOptions`. An option that is a function is called with the case."""

    def chunking(case: OperatorCase) -> flce.ChunkOptions:
        return flce.ChunkOptions(**{k: value(case) if callable(value) else value for k, value in options.items()})

    def planned(case: OperatorCase, device: torch.device) -> int:
        call, feature = case.call, dict(FEATURES[case.feature])
        arguments: dict[str, Any] = {"reduction": call.reduction, "device": device, "options": chunking(case)}
        arguments |= {"input_grad": call.input_grad, "weight_grad": call.weight_grad}
        arguments |= {"bias_grad": feature.pop("bias", False), **feature}
        tokens, hidden, classes = case.shape
        return flce.plan(tokens, hidden, classes, case.torch_dtype, **arguments).workspace_bytes

    def prepare(problem: OperatorProblem) -> Step:
        return autograd_step(problem, our_loss(options=chunking(problem.case), **problem.more))

    return OperatorContender(name, title, "ours", prepare, applies=CONDITIONS[only], planned_bytes=planned)


def step_on_changed_problem(problem: OperatorProblem, loss: LossFunction, **changed: Any) -> Step:
    """Return a step on another problem. Its time and workspace count, its results are not compared."""
    solve = autograd_step(problem.changed(**changed), loss)

    def step() -> StepOutcome:
        _, *gradients, others = solve()
        return StepOutcome(None, others=(*gradients, *others))

    return step


def ours_full(problem: OperatorProblem) -> Step:
    return step_on_changed_problem(problem, our_loss(**problem.more), target=problem.full_target)


def contender_of_budget(name: str) -> OperatorContender | None:
    """Return the contender of a name such as ours-256MiB."""
    match = re.fullmatch(r"ours-([1-9]\d*)MiB", name)
    return match and ours(name, f"flce, {match[1]} MiB budget", max_workspace_bytes=int(match[1]) * MIB)


def budget_name(mib: int) -> str:
    return f"ours-{mib}MiB"


def stock_loss(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    reduction: str,
    linear_bias: Tensor | None = None,
    adapters: Sequence[tuple[Tensor, Tensor]] = (),
    label_smoothing: float = 0.0,
) -> Tensor:
    logits = F.linear(x, w, linear_bias)
    for low, up in adapters:
        logits = logits + F.linear(low, up)
    return F.cross_entropy(logits.float(), y, reduction=reduction, label_smoothing=label_smoothing)


def stock_step(problem: OperatorProblem) -> Step:
    return autograd_step(problem, functools.partial(stock_loss, **problem.more))


def compiled_step(problem: OperatorProblem) -> Step:
    torch.compiler.reset()
    return autograd_step(problem, functools.partial(torch.compile(stock_loss, dynamic=False), **problem.more))


def torch_loss(**options: Any) -> LossFunction:
    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        chosen = getattr(torch.nn, "LinearCrossEntropyOptions")(**options)  # noqa: B009 - not in every version
        result: Tensor = getattr(F, "linear_cross_entropy")(x, w, y, reduction=reduction, options=chosen)  # noqa: B009
        return result

    return loss


def needs_torch_kernel(device: torch.device) -> str | None:
    """Return why PyTorch's CuTe kernel cannot run. Without nvidia-cutlass-dsl, PyTorch runs other code."""
    kernel, language = "torch._native.ops.linear_cross_entropy", "nvidia-cutlass-dsl"
    return needs_package(kernel, "'torch>=2.15'")(device) or needs_package("cutlass", language)(device)


TRL_CHUNK = 32768  # classes; TRL's trainers pass this size


def trl_loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Compute the loss with the head of TRL's trainers, without the statistics that they log."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    valid = y != IGNORED
    temperature, softcap, logit_scale, outputs = 1.0, None, 1.0, ()
    logprob, *_ = function.apply(x, w, None, y.clamp(min=0), temperature, TRL_CHUNK, softcap, logit_scale, outputs)
    losses: Tensor = -logprob.masked_fill(~valid, 0.0)
    return losses if reduction == "none" else losses.sum() / valid.sum()


LIGER_HOPPER = "liger_kernel.ops.cutedsl.ops"


def liger_hopper_loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    module = importlib.import_module(f"{LIGER_HOPPER}.fused_linear_cross_entropy_sm90")
    result = module.LigerFusedLinearCrossEntropySM90Function.apply(x, w, y, IGNORED, reduction)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


# Packages that TRL's trainers import and a GPU machine may lack. The measured code does not use them.
TRL_UNUSED = ("datasets", "datasets.fingerprint", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.types")
# The backward pass of the kernel imports `trl.trainer.utils`.
needs_trl = needs_package("trl.trainer.utils", "trl", stands_in=TRL_UNUSED)


def peer(name: str, title: str, needs: cases.Unavailable, loss: LossFunction, only: str = "") -> OperatorContender:
    """Return a peer. It is measured on cases without features: not all peers have them, and their arguments differ."""
    prepare = functools.partial(autograd_step, loss_function=loss)

    def applies(case: OperatorCase, device: torch.device) -> bool:
        return not case.feature and CONDITIONS[only](case, device)

    return OperatorContender(name, title, "peer", prepare, unavailable=needs, applies=applies)


def floor(name: str, title: str, step: Callable[[OperatorProblem], Step], only: str) -> OperatorContender:
    return OperatorContender(name, title, "floor", step, applies=CONDITIONS[only])


LIGER = "liger_kernel.transformers.functional"
CCE, CCE_PRESETS, QUACK = "cut_cross_entropy", "cut_cross_entropy.cce_utils", "quack.linear_cross_entropy"
needs_liger = needs_package(LIGER, "liger-kernel")
needs_liger_hopper = needs_package(LIGER_HOPPER, "'liger-kernel[cutedsl]'")
needs_cce, needs_presets = (needs_package(module, "cut-cross-entropy") for module in (CCE, CCE_PRESETS))
needs_torch_chunked = needs_package("torch.nn.modules.linear_cross_entropy_options", "'torch>=2.13'", cuda=False)
needs_quack = needs_package(QUACK, "quack-kernels")
liger = functools.partial(library_loss, LIGER, "liger_fused_linear_cross_entropy")
cce = functools.partial(library_loss, CCE, "linear_cross_entropy")
float32_sums: dict[str, Any] = {"accum_dtype": torch.float32, "chunk_mem_const": 8}
quack = functools.partial(library_loss, QUACK, "chunked_linear_cross_entropy")
one_chunk: dict[str, Any] = {"acc_dtype": torch.float32, "acc_policy": "compact", "chunking_method": None}
torch_2048 = torch_loss(**one_chunk, batch_chunk_size=2048)
quack_untuned = quack(chunk_size=4096, use_scaled_exp=False, tuned=False)
quack_scaled = quack(chunk_size=8192, use_scaled_exp=True)

# The newest kernels of PyTorch, Liger and QuACK; and all peers that are measured beside flce.
RIVALS = ("torch-kernel", "torch-kernel-2048", "liger-hopper", "quack", "quack-scaled")
PEERS = (
    *("torch-compile", "torch-chunked", "liger", "liger-float32-8x", "trl"),
    *("cce", "cce-unfiltered", "cce-exact", *RIVALS),
)

C = OperatorContender
BOUNDED, SAMPLED = "ours-skipping", "ours-sampled"  # their plans are upper bounds
bfloat16_sums: dict[str, Any] = {"max_workspace_bytes": 64 * MIB, "accum_dtype": torch.bfloat16}
vocab: dict[str, Any] = {"strategy": "vocab", "max_workspace_bytes": lambda case: case.budget_mib * MIB}

CONTENDERS = [
    floor("floor", "bare products", floor_step, "products"),
    floor("floor-aligned", "bare products, next aligned shape", aligned_floor_step, "unaligned"),
    # With a small workspace a call has to compute the logits twice.
    floor("floor-recomputed", "bare products, logits twice", logits_twice, "training"),
    ours("ours", "flce"),
    ours("ours-vocab", "flce, strategy vocab in a budget", **vocab),
    ours("ours-rounded", "flce, rounded logits", "half precision", logits_dtype=lambda case: case.torch_dtype),
    ours(BOUNDED, "flce, skip_ignored=True", "ignored", skip_ignored=True),
    C("ours-full", "flce, no label ignored", "ours", ours_full, applies=CONDITIONS["ignored"]),
    C("stock", "stock (F.linear + F.cross_entropy)", "stock", stock_step),
    C("torch-compile", "stock, torch.compile", "peer", compiled_step, unavailable=needs_cuda),
    peer("torch-chunked", "PyTorch chunked (F.linear_cross_entropy)", needs_torch_chunked, torch_loss()),
    # PyTorch uses its CuTe kernel with these options: float32 logits, bfloat16 sums over chunks.
    peer("torch-kernel", "PyTorch's kernel, one chunk", needs_torch_kernel, torch_loss(**one_chunk), "half precision"),
    peer("torch-kernel-2048", "PyTorch's kernel, 2,048 tokens", needs_torch_kernel, torch_2048, "half precision"),
    peer("liger", "Liger, default", needs_liger, liger()),
    peer("liger-float32-8x", "Liger, float32 sums, 8x chunk", needs_liger, liger(**float32_sums)),
    peer("liger-hopper", "Liger, Hopper kernel", needs_liger_hopper, liger_hopper_loss, "bfloat16"),
    peer("cce", "Cut Cross-Entropy, default", needs_cce, cce()),
    peer("cce-unfiltered", "CCE, no gradient filter", needs_cce, cce(filter_eps=None)),
    peer("cce-exact", "CCE, its exact preset", needs_presets, cce(impl="cce_exact")),
    peer("trl", "TRL's fused head", needs_trl, trl_loss),
    peer("quack", "QuACK, chunked", needs_quack, quack_untuned, "reduced"),
    peer("quack-scaled", "QuACK, scaled exponentials", needs_quack, quack_scaled, "reduced"),
]


def cce_flat(problem: OperatorProblem) -> Step:
    """Return a step of CCE on logits of standard deviation 1.

    CCE skips blocks of 128 x 128 logits whose gradients are all below 2.4e-4 (bfloat16). With standard deviation 4 it
    skips no block, with 1 about half of the blocks, so its time depends on the data.
    """
    hidden = problem.input.detach() / problem.case.logits_std
    return step_on_changed_problem(problem, cce(), input=hidden.requires_grad_(problem.case.call.input_grad))


# Measured only if a case names them.
NAMED = [
    C("cce-flat", "CCE, logits of std 1", "peer", cce_flat, unavailable=needs_cce),
    ours("ours-bf16-64MiB", "flce, 64 MiB budget, bfloat16 sums", "bfloat16", **bfloat16_sums),
    ours(SAMPLED, "flce, gradients sampled below 2^-12", sample_below=2.0**-12),
]


def select(names: Sequence[str] | None) -> Sequence[OperatorContender]:
    """Return the contenders of these names, budgets included, in the order of the names; by default `CONTENDERS`."""
    budgets = [contender for name in names or () if (contender := contender_of_budget(name)) is not None]
    return select_contenders([*CONTENDERS, *NAMED, *budgets], names) if names else CONTENDERS
