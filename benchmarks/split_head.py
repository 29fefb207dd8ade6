"""A head that is divided over processes: time of a call over the three bare products of a process's own slice.

    python -m benchmarks split-head --preset h200                       # on one GPU: a rank's share
    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks split-head --preset h200

Alone it is the first of 2, 4 and 8 processes whose collectives return at once (PyTorch's "fake" backend): what the
operator itself adds. Started by torch.distributed.run it is what all take together, links included, and peers take part
that are installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce
from benchmarks import operator, tables
from benchmarks.benchmark import Plan, planned
from benchmarks.cases import BenchCase, Contender, StepOutcome, needs_package
from benchmarks.measure import BenchMeter, Entrant, Prepared, nothing
from benchmarks.runs import BenchResult
from benchmarks.targets import figures
from flce.core import shard
from flce.core.shard import shard_bounds
from flce.tools.machine import DTYPES

HEAD_START = 0.03  # seconds; the host launches a call in less


@dataclass(frozen=True)
class SplitCase(BenchCase):
    """One shape in one group of processes."""

    tokens: int
    hidden: int
    vocab: int
    processes: int
    sequence_parallel: bool = False  # whether each process has a share of the tokens
    alone: bool = False  # whether the other processes are not there
    dtype: str = "bfloat16"

    @property
    def title(self) -> str:
        how = ", sequence parallel" * self.sequence_parallel + ", one alone" * self.alone
        return f"{self.tokens} x {self.hidden} x {self.vocab}, {self.dtype}, {self.processes} processes{how}"


class Operands:
    """What this process has."""

    def __init__(self, case: SplitCase, device: torch.device) -> None:
        self.case, self.group = case, dist.group.WORLD
        rank, draw = dist.get_rank(), torch.Generator(device).manual_seed(1)
        how: dict[str, Any] = {"device": device, "dtype": DTYPES[case.dtype], "generator": draw}
        self.start, self.stop = shard_bounds(case.vocab, case.processes, rank)
        self.whole = torch.randn(case.tokens, case.hidden, **how)
        shares = case.processes if case.sequence_parallel else 1
        self.x = self.whole.chunk(shares)[rank % shares].detach().clone().requires_grad_()
        draw.manual_seed(2 + rank)
        self.weight = torch.randn(self.stop - self.start, case.hidden, **how)
        self.weight = self.weight.mul_(4.0 * case.hidden**-0.5).requires_grad_()
        draw.manual_seed(1)
        self.target = torch.randint(case.vocab, (case.tokens,), device=device, generator=draw)
        self.logits = self.whole.new_empty(case.tokens, self.stop - self.start)

    def solved(self, loss: Any, sums_input: bool = True) -> StepOutcome:
        """Backward; the gradient of the input is summed over the processes if the loss does not do it."""
        loss.backward()
        dx, dw = self.x.grad, self.weight.grad
        self.x.grad = self.weight.grad = None
        if not sums_input:
            dist.all_reduce(dx, group=self.group)
        return StepOutcome(loss.detach(), dx, dw)


# --- contenders ---


@dataclass(frozen=True)
class SplitContender(Contender):
    step: Callable[[Operands], object]


def products(made: Operands) -> tuple[Tensor, Tensor]:
    """Logits, dX and dW of the slice."""
    torch.mm(made.whole, made.weight.detach().t(), out=made.logits)
    return made.logits @ made.weight.detach(), made.logits.t() @ made.whole


def one_after_the_other(made: Operands) -> object:
    """The products, a gather of three numbers for each token, and the sum of dX."""
    dx, dw = products(made)
    shard.all_gather(torch.zeros(3, len(dx), device=dx.device), made.group)
    dist.all_reduce(dx, group=made.group)
    return dx, dw


def ours(made: Operands, target: Tensor | None = None) -> StepOutcome:
    how: dict[str, Any] = {"process_group": made.group, "sequence_parallel": made.case.sequence_parallel}
    target = made.target if target is None else target
    loss = flce.fused_linear_cross_entropy(made.x, made.weight, target, vocab_size=made.case.vocab, **how)
    return made.solved(loss)


def in_slice(made: Operands, slices: int = 0) -> StepOutcome:
    """All targets in this process's slice, or in one so many slices further."""
    width = max(1, made.stop - made.start)
    return ours(made, (made.target % width + made.start + slices * width) % made.case.vocab)


def of_logits(made: Operands) -> StepOutcome:
    """A bare product, the vocabulary-parallel loss of its logits, and the sum of dX."""
    how: dict[str, Any] = {"process_group": made.group, "vocab_size": made.case.vocab, "inplace": True}
    logits = F.linear(made.x, made.weight)
    return made.solved(flce.cross_entropy(logits, made.target, **how), sums_input=False)


LIGER_LOGITS = "liger_kernel.transformers.vocab_parallel_cross_entropy"


def liger_of_logits(made: Operands) -> StepOutcome:
    loss = importlib.import_module(LIGER_LOGITS).LigerVocabParallelCrossEntropy()
    logits = F.linear(made.x, made.weight)[:, None]
    return made.solved(loss(logits, made.target[:, None], made.group).mean(), sums_input=False)


def liger_fused(made: Operands) -> StepOutcome:
    library = importlib.import_module("liger_kernel.transformers.functional")
    loss = library.liger_fused_linear_scaled_cross_entropy_tp(made.x, made.weight, made.target, made.group)
    return made.solved(loss.mean())


def cce_fused(made: Operands) -> StepOutcome:
    library = importlib.import_module("cut_cross_entropy")
    options = library.VocabParallelOptions(made.start, made.stop, made.group)
    return made.solved(library.linear_cross_entropy(made.x, made.weight, made.target, vocab_parallel_options=options))


C = SplitContender
alone: dict[str, Any] = {"applies": lambda case, device: case.alone}
linked: dict[str, Any] = {"applies": lambda case, device: not case.alone}
# The others do not know sequence parallelism.
all_tokens: dict[str, Any] = {"applies": lambda case, device: not case.alone and not case.sequence_parallel}
needs_liger = needs_package(LIGER_LOGITS, "liger-kernel")
needs_fused = needs_package("liger_kernel.ops.fused_linear_scaled_cross_entropy", "liger-kernel")
needs_cce = needs_package("cut_cross_entropy.vocab_parallel", "its repository's cut-cross-entropy")  # 25.1.1 has none
CONTENDERS = [
    C("floor", "three bare products", "floor", products),
    C("ours-inside", "flce, all targets in the slice", "ours", in_slice, **alone),
    C("ours-outside", "flce, no target in the slice", "ours", lambda made: in_slice(made, 1), **alone),
    C("floor-one-by-one", "products, gather and sum one after the other", "floor", one_after_the_other, **linked),
    C("ours", "flce", "ours", ours, **linked),
    C("ours-logits", "logits in memory", "ours", of_logits, **all_tokens),
    C("liger-logits", "Liger, logits in memory", "peer", liger_of_logits, unavailable=needs_liger, **all_tokens),
    C("liger", "Liger, fused", "peer", liger_fused, unavailable=needs_fused, **all_tokens),
    C("cce", "Cut Cross-Entropy", "peer", cce_fused, unavailable=needs_cce, **all_tokens),
]


def copied(x: Tensor, group: Any) -> Tensor:
    """In place of a gather: what this process has, from all."""
    return x.expand(group.size(), *x.shape).contiguous()


def prepare(case: SplitCase, device: torch.device) -> Prepared:
    if case.alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.processes)
    made, number = Operands(case, device), torch.zeros(1, device=device)
    meter = BenchMeter(device, nothing if case.alone else lambda: dist.all_reduce(number), HEAD_START)

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if case.alone:
                stack.enter_context(mock.patch("flce.engine.shards.all_gather", copied))
                # Nobody is there to agree with.
                stack.enter_context(mock.patch("flce.ops.split_head.can_read_values", return_value=False))
            yield

    def enter(contender: SplitContender, result: BenchResult) -> Entrant:
        with turn():
            outcome, sample = meter.warm_up(lambda: contender.step(made))
        if isinstance(outcome, StepOutcome):
            found = [t for t in outcome[:3] if t is not None]
            if not all(bool(t.isfinite().all()) for t in found):
                raise ArithmeticError("a result is not finite")
            result.loss, result.workspace_bytes = float(found[0]), sample.workspace_bytes
        return Entrant(lambda: contender.step(made), turn)

    return meter, enter


# --- presets ---

SHAPES = [(8192, 8192, 128256), (16384, 4096, 128256), (8192, 4096, 128256)]
SEQUENCE_PARALLEL = SplitCase(65536, 8192, 128256, 0, True)
TINY = [SplitCase(64, 32, 1000, 0, several, dtype="float32") for several in (False, True)]


def cases(large: bool) -> list[SplitCase]:
    """For the processes that there are, or for one of 2, 4 and 8."""
    here = dist.is_initialized()
    found = [SplitCase(*shape, 0) for shape in SHAPES] + [SEQUENCE_PARALLEL] * here if large else TINY
    counts = [dist.get_world_size()] if here else (2, 4, 8)
    return [replace(case, processes=count, alone=not here) for count in counts for case in found]


PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: planned(cases(large=False), rounds=2, seconds=1.0),
    "h200": lambda: planned(cases(large=True), rounds=9, seconds=10.0),
}

SPLIT_HEAD = replace(
    operator.OPERATOR,
    kind="split-head",
    about="Time and workspace of a head that is divided over processes.",
    noun="divided heads",
    case_type=SplitCase,
    sizes="tokens,hidden,vocab,processes",
    presets=PRESETS,
    contenders=lambda case: CONTENDERS,
    prepare=prepare,
    tables=tables.overview(
        "Median ms, workspace MiB", "tokens x hidden x vocabulary", lambda _, result: figures(result), operator.table
    ),
    figure=None,
    targets=None,
    choices={},
    defaults=({"alone": True},),
)
