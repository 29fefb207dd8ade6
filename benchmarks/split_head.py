"""Time of a call with a head that is divided over processes, over the three bare products of one process's shard.

    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks split-head --preset h200
    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks split-head --preset last-stage

The time includes the links. "last-stage" is the head of a training step of Megatron: losses of tokens, and a gradient
of the weight that is added to its float32 `main_grad`. The heads are one of Zipf's law and that of Gemma 3 270M (see
`benchmarks/real_heads.py`); the floor is the four products.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from benchmarks import operator
from benchmarks.benchmark import Plan, plan_cases
from benchmarks.cases import BenchCase, Contender, StepOutcome, check_processes, count_processes, needs_package
from benchmarks.measure import BenchMeter, Prepared, ReadyContender
from benchmarks.real_heads import TEXTS, real_head
from benchmarks.runs import BenchResult
from benchmarks.tables import SHAPE, overview
from flce.core import shard
from flce.core.shard import shard_bounds
from flce.tools.machine import DTYPES

HEAD_START = 0.03  # seconds; the host launches a call in less
INTO_MAIN_GRAD: dict[str, Any] = {"gradient_accumulation_fusion": True}


@dataclass(frozen=True)
class SplitCase(BenchCase):
    tokens: int
    hidden: int
    vocab: int
    processes: int
    sequence_parallel: bool = False  # each process has a share of the tokens
    head: str = ""  # of `real_head`, for a training step of Megatron
    dtype: str = "bfloat16"

    @property
    def title(self) -> str:
        more = ", sequence parallel" * self.sequence_parallel
        more += f", last stage, {self.head}" if self.head else ""
        return f"{self.tokens} x {self.hidden} x {self.vocab}, {self.dtype}, {self.processes} processes{more}"


class Operands:
    def __init__(self, case: SplitCase, device: torch.device) -> None:
        self.case, self.group = case, dist.group.WORLD
        rank, draw = dist.get_rank(), torch.Generator(device).manual_seed(1)
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[case.dtype], "generator": draw}
        self.start, self.stop = shard_bounds(case.vocab, case.processes, rank)
        self.states = torch.randn(case.tokens, case.hidden, **options)
        shares = case.processes if case.sequence_parallel else 1
        self.x = self.states.chunk(shares)[rank % shares].detach().clone().requires_grad_()
        draw.manual_seed(2 + rank)
        self.weight = torch.randn(self.stop - self.start, case.hidden, **options)
        self.weight = self.weight.mul_(4.0 * case.hidden**-0.5).requires_grad_()
        draw.manual_seed(1)
        self.target = torch.randint(case.vocab, (case.tokens,), device=device, generator=draw)
        self.logits = self.states.new_empty(case.tokens, self.stop - self.start)
        if case.head:
            x, weight, self.target = real_head(case.head, (case.tokens, case.hidden, case.vocab), device)
            self.x.data.copy_(x)
            self.weight.data.copy_(weight[self.start : self.stop])
            vars(self.weight)["main_grad"] = torch.zeros_like(self.weight, dtype=torch.float32)

    def run_backward(self, loss: Any, sums_input: bool = True) -> StepOutcome:
        """Run backward, and sum the gradient of the input over the processes if the loss does not sum it."""
        loss.backward()
        dx, dw = self.x.grad, self.weight.grad
        self.x.grad = self.weight.grad = None
        if not sums_input:
            dist.all_reduce(dx, group=self.group)
        return StepOutcome(loss.detach(), dx, dw)


@dataclass(frozen=True)
class SplitContender(Contender):
    step: Callable[[Operands], object]


def products(operands: Operands) -> tuple[Tensor, Tensor]:
    """Compute logits, dX and dW of the shard."""
    torch.mm(operands.states, operands.weight.detach().t(), out=operands.logits)
    return operands.logits @ operands.weight.detach(), operands.logits.t() @ operands.states


def one_after_the_other(operands: Operands) -> object:
    """Compute the products, a gather of three numbers for each token, and the sum of dX."""
    dx, dw = products(operands)
    shard.all_gather(torch.zeros(3, len(dx), device=dx.device), operands.group)
    dist.all_reduce(dx, group=operands.group)
    return dx, dw


def ours(operands: Operands) -> StepOutcome:
    case, call = operands.case, (operands.x, operands.weight, operands.target)
    group: dict[str, Any] = {"process_group": operands.group, "sequence_parallel": case.sequence_parallel}
    return operands.run_backward(flce.fused_linear_cross_entropy(*call, vocab_size=case.vocab, **group))


def of_logits(operands: Operands) -> StepOutcome:
    """Compute a bare product, the vocabulary-parallel loss of its logits, and the sum of dX."""
    options: dict[str, Any] = {"process_group": operands.group, "vocab_size": operands.case.vocab, "inplace": True}
    logits = F.linear(operands.x, operands.weight)
    return operands.run_backward(flce.cross_entropy(logits, operands.target, **options), sums_input=False)


LIGER_LOGITS = "liger_kernel.transformers.vocab_parallel_cross_entropy"


def liger_of_logits(operands: Operands) -> StepOutcome:
    loss = importlib.import_module(LIGER_LOGITS).LigerVocabParallelCrossEntropy()
    logits = F.linear(operands.x, operands.weight)[:, None]
    return operands.run_backward(loss(logits, operands.target[:, None], operands.group).mean(), sums_input=False)


def liger_fused(operands: Operands) -> StepOutcome:
    library = importlib.import_module("liger_kernel.transformers.functional")
    arguments = operands.x, operands.weight, operands.target, operands.group
    loss = library.liger_fused_linear_scaled_cross_entropy_tp(*arguments)
    return operands.run_backward(loss.mean())


def cce_fused(operands: Operands) -> StepOutcome:
    library = importlib.import_module("cut_cross_entropy")
    options = library.VocabParallelOptions(operands.start, operands.stop, operands.group)
    arguments = operands.x, operands.weight, operands.target
    return operands.run_backward(library.linear_cross_entropy(*arguments, vocab_parallel_options=options))


MEGATRON = "megatron.core"


def of_megatron(operands: Operands) -> StepOutcome:
    """Compute the loss of Megatron's logits, and add the gradient of the weight to its `main_grad`."""
    state = importlib.import_module(f"{MEGATRON}.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(operands.case.processes)
    losses = importlib.import_module(f"{MEGATRON}.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    logits = F.linear(operands.x, operands.weight)[:, None]
    return add_to_main_grad(operands, losses(logits, operands.target[:, None]).mean(), sums_input=False)


def last_stage(operands: Operands, **options: Any) -> StepOutcome:
    """Compute losses of tokens, whose mean has gradients, as in a training step of `flce.megatron`."""
    losses = flce.fused_linear_cross_entropy(
        operands.x, operands.weight, operands.target, reduction="none", vocab_size=operands.case.vocab,
        process_group=operands.group, options=flce.ChunkOptions(**options),
    )  # fmt: skip
    assert isinstance(losses, Tensor)
    return add_to_main_grad(operands, losses.mean())


def add_to_main_grad(operands: Operands, loss: Tensor, sums_input: bool = True) -> StepOutcome:
    """Run backward. Without `gradient_accumulation_fusion`, add the gradient of the weight to `main_grad`."""
    main_grad = vars(operands.weight)["main_grad"]
    vars(operands.weight)["grad_added_to_main_grad"] = False
    outcome = operands.run_backward(loss, sums_input)
    if not vars(operands.weight)["grad_added_to_main_grad"]:
        main_grad.add_(outcome.weight_grad)
    return StepOutcome(outcome.loss, outcome.input_grad, None)  # So the workspace has the gradient of the weight.


def four_products(operands: Operands) -> object:
    torch.mm(operands.states, operands.weight.detach().t(), out=operands.logits)
    return products(operands)


C = SplitContender
whole_step: dict[str, Any] = {"applies": lambda case, device: not case.head}
staged: dict[str, Any] = {"applies": lambda case, device: bool(case.head)}
# The others do not support sequence parallelism.
all_tokens: dict[str, Any] = {"applies": lambda case, device: not (case.sequence_parallel or case.head)}
needs_liger = needs_package(LIGER_LOGITS, "liger-kernel")
needs_fused = needs_package("liger_kernel.ops.fused_linear_scaled_cross_entropy", "liger-kernel")
needs_megatron = needs_package(f"{MEGATRON}.tensor_parallel.cross_entropy", "megatron-core")
needs_cce = needs_package("cut_cross_entropy.vocab_parallel", "its repository's cut-cross-entropy")  # 25.1.1 has none
CONTENDERS = [
    C("floor", "three bare products", "floor", products, **whole_step),
    C("floor-of-tokens", "four bare products", "floor", four_products, **staged),
    C("megatron", "Megatron's loss of logits", "peer", of_megatron, unavailable=needs_megatron, **staged),
    C("ours-of-tokens", "flce, then a sum", "ours", last_stage, **staged),
    C("ours-main-grad", "flce, into main_grad", "ours", partial(last_stage, **INTO_MAIN_GRAD), **staged),
    C(
        "ours-sampled",
        "flce, sampled below 2^-12, into main_grad",
        "ours",
        partial(last_stage, sample_below=2.0**-12, **INTO_MAIN_GRAD),
        **staged,
    ),
    C("floor-one-by-one", "products, gather and sum one after the other", "floor", one_after_the_other, **whole_step),
    C("ours", "flce", "ours", ours, **whole_step),
    C("ours-logits", "logits in memory", "ours", of_logits, **all_tokens),
    C("liger-logits", "Liger, logits in memory", "peer", liger_of_logits, unavailable=needs_liger, **all_tokens),
    C("liger", "Liger, fused", "peer", liger_fused, unavailable=needs_fused, **all_tokens),
    C("cce", "Cut Cross-Entropy", "peer", cce_fused, unavailable=needs_cce, **all_tokens),
]


def prepare(case: SplitCase, device: torch.device) -> Prepared:
    operands, number = Operands(case, device), torch.zeros(1, device=device)
    meter = BenchMeter(device, lambda: dist.all_reduce(number), HEAD_START)

    def get_ready(contender: SplitContender, result: BenchResult) -> ReadyContender:
        outcome, sample = meter.warm_up(lambda: contender.step(operands))
        if isinstance(outcome, StepOutcome) and outcome.loss is not None:
            if not all(bool(t.isfinite().all()) for t in outcome[:3] if t is not None):
                raise ArithmeticError("a result is not finite")
            result.loss, result.workspace_bytes = float(outcome.loss), sample.workspace_bytes
        return ReadyContender(lambda: contender.step(operands))

    return meter, get_ready


SHAPES = [(8192, 8192, 128256), (16384, 4096, 128256), (8192, 4096, 128256)]
SEQUENCE_PARALLEL = SplitCase(65536, 8192, 128256, 0, True)
LAST_STAGE = SplitCase(8192, 4096, 128256, 0, head="zipf 6")
LAST_STAGES = [LAST_STAGE, *(replace(LAST_STAGE, vocab=262144, head=f"gemma3 {text}") for text in TEXTS)]
STAGE_TINY = replace(LAST_STAGE, tokens=64, hidden=32, vocab=1000)
TINY = [*(SplitCase(64, 32, 1000, 0, several, dtype="float32") for several in (False, True)), STAGE_TINY]


def of_all_processes(cases: list[SplitCase], rounds: int = 9, seconds: float = 10.0) -> Plan:
    """Return the cases of the process group."""
    return plan_cases([replace(case, processes=count_processes()) for case in cases], rounds, seconds)


def contenders(case: SplitCase) -> list[SplitContender]:
    check_processes()
    return CONTENDERS


PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: of_all_processes(TINY, rounds=2, seconds=1.0),
    "h200": lambda: of_all_processes([*(SplitCase(*shape, 0) for shape in SHAPES), SEQUENCE_PARALLEL]),
    "last-stage": lambda: of_all_processes(LAST_STAGES),
}

SPLIT_HEAD = replace(
    operator.OPERATOR,
    kind="split-head",
    about="Time and workspace of a head that is divided over processes.",
    case_type=SplitCase,
    sizes="tokens,hidden,vocab,processes",
    presets=PRESETS,
    contenders=contenders,
    prepare=prepare,
    tables=overview("Median ms, workspace MiB", SHAPE, operator.figures, operator.table),
    choices={},
    defaults=({},),
)
