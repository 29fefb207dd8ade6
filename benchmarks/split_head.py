"""A head that is divided over processes: time of a call over the three bare products of a process's own slice.

    python -m benchmarks.split_head --out results/split-head.json                       # on one GPU: a rank's share
    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.split_head --out results/split-head-8.json

Alone it is the first of 2, 4 and 8 processes whose collectives return at once (PyTorch's "fake" backend): what the
operator itself adds. Started by torch.distributed.run it is what all take together, links included, and peers take part
that are installed. Contenders take turns, in the same order in all processes; times are medians, of the device alone.
"""

from __future__ import annotations

import functools
import importlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

import flce
from benchmarks.cases import Unavailable, needs_package
from benchmarks.measure import BenchMeter
from benchmarks.runs import described_run
from flce.core import shard
from flce.core.shard import bounds

# Tokens, H, V, and whether each process has a share of the tokens.
SHAPES = [
    (8192, 8192, 128256, False),
    (16384, 4096, 128256, False),
    (8192, 4096, 128256, False),
]
SEQUENCE_PARALLEL = (65536, 8192, 128256, True)
TINY = [(64, 32, 1000, False), (64, 32, 1000, True)]
SHARES = (2, 4, 8)
ROUNDS, TINY_ROUNDS = 9, 2
HEAD_START = 0.03  # seconds; the host launches a call in less
PRODUCTS = "three bare products"
# Modules of the peers.
LIGER_LOGITS = "liger_kernel.transformers.vocab_parallel_cross_entropy"
LIGER_FUSED = "liger_kernel.transformers.functional"
CCE_FUSED = "cut_cross_entropy"

Step = Callable[[], object]


@dataclass
class Measured:
    """One shape in one group of processes: milliseconds, MiB of workspace and loss of each contender, and why others
    are not measured."""

    tokens: int
    hidden: int
    vocab: int
    processes: int
    sequence_parallel: bool
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    workspace_mib: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    finite: bool = True

    def rows(self) -> list[str]:
        floor = statistics.median(self.milliseconds[PRODUCTS])
        how = ", sequence parallel" if self.sequence_parallel else ""
        shape = f"{self.tokens} x {self.hidden} x {self.vocab}, {self.processes} processes{how}"
        return [
            f"| {shape} | {name} | {statistics.median(times):.2f} | {statistics.median(times) / floor:.3f} | "
            f"{self.workspace_mib.get(name, 0.0):.0f} |"
            for name, times in self.milliseconds.items()
        ]


class Operands:
    """What this process has."""

    def __init__(self, case: Measured, device: torch.device, group: Any) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator(device).manual_seed(1)
        self.case, self.group = case, group
        self.start, self.stop = bounds(case.vocab, case.processes, group.rank())
        size = self.stop - self.start
        self.whole = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype, generator=draw)
        shares = case.processes if case.sequence_parallel else 1
        self.x = self.whole.chunk(shares)[group.rank() % shares].detach().clone().requires_grad_()
        draw.manual_seed(2 + group.rank())
        self.weight = torch.randn(size, case.hidden, device=device, dtype=dtype, generator=draw)
        self.weight = self.weight.mul_(4.0 * case.hidden**-0.5).requires_grad_()
        draw.manual_seed(1)
        self.target = torch.randint(case.vocab, (case.tokens,), device=device, generator=draw)
        self.logits = self.whole.new_empty(case.tokens, size)

    def products(self) -> object:
        """Logits, dX and dW of the slice."""
        torch.mm(self.whole, self.weight.detach().t(), out=self.logits)
        return self.logits @ self.weight.detach(), self.logits.t() @ self.whole

    def one_after_the_other(self) -> object:
        """The products, a gather of three numbers for each token, and the sum of dX."""
        made = self.products()
        assert isinstance(made, tuple)
        numbers = torch.zeros(3, self.case.tokens, device=self.whole.device)
        shard.gather(numbers, self.group)
        dist.all_reduce(made[0], group=self.group)
        return made

    def grads(self) -> tuple[Tensor | None, Tensor | None]:
        found = self.x.grad, self.weight.grad
        self.x.grad = self.weight.grad = None
        return found

    def ours(self, target: Tensor) -> object:
        loss: Any = flce.fused_linear_cross_entropy(
            self.x,
            self.weight,
            target,
            process_group=self.group,
            vocab_size=self.case.vocab,
            sequence_parallel=self.case.sequence_parallel,
        )
        loss.backward()
        return (loss.detach(), *self.grads())

    def logits_in_memory(self, loss_of: Callable[[Operands, Tensor], Any]) -> object:
        """A bare product, the vocabulary-parallel loss of its logits, and the sum of dX."""
        loss = loss_of(self, F.linear(self.x, self.weight))
        loss.backward()
        dx, dw = self.grads()
        assert dx is not None
        dist.all_reduce(dx, group=self.group)
        return loss.detach(), dx, dw

    def fused(self, loss_of: Callable[[Operands], Any]) -> object:
        """A peer's loss of input and weight, which sums dX itself."""
        loss = loss_of(self)
        loss.backward()
        return (loss.detach(), *self.grads())


def loss_of_logits(made: Operands, logits: Tensor) -> Any:
    return flce.cross_entropy(logits, made.target, inplace=True, process_group=made.group, vocab_size=made.case.vocab)


def liger_of_logits(made: Operands, logits: Tensor) -> Any:
    library = importlib.import_module(LIGER_LOGITS)
    return library.LigerVocabParallelCrossEntropy()(logits[:, None], made.target[:, None], made.group).mean()


def liger_fused(made: Operands) -> Any:
    library = importlib.import_module(LIGER_FUSED)
    return library.liger_fused_linear_scaled_cross_entropy_tp(made.x, made.weight, made.target, made.group).mean()


def cce_fused(made: Operands) -> Any:
    library = importlib.import_module(CCE_FUSED)
    options = library.VocabParallelOptions(made.start, made.stop, made.group)
    return library.linear_cross_entropy(made.x, made.weight, made.target, vocab_parallel_options=options)


@dataclass(frozen=True)
class Peer:
    """Another library's loss of a divided head."""

    name: str
    unavailable: Unavailable
    step: Callable[[Operands], object]


PEERS = [
    Peer(
        "Liger, logits in memory",
        needs_package(LIGER_LOGITS, "liger-kernel"),
        lambda made: made.logits_in_memory(liger_of_logits),
    ),
    Peer(
        "Liger, fused",
        needs_package("liger_kernel.ops.fused_linear_scaled_cross_entropy", "liger-kernel"),
        lambda made: made.fused(liger_fused),
    ),
    Peer(
        "Cut Cross-Entropy",
        needs_package("cut_cross_entropy.vocab_parallel", "its repository's cut-cross-entropy"),  # 25.1.1 has none
        lambda made: made.fused(cce_fused),
    ),
]


def contenders(made: Operands, alone: bool) -> dict[str, Step]:
    steps: dict[str, Step] = {PRODUCTS: made.products}
    if alone:
        width = max(1, made.stop - made.start)
        here = made.target % width + made.start
        steps["flce, all targets in the slice"] = functools.partial(made.ours, here)
        elsewhere = (here + width) % made.case.vocab
        steps["flce, no target in the slice"] = functools.partial(made.ours, elsewhere)
        return steps
    steps["products, gather and sum one after the other"] = made.one_after_the_other
    steps["flce"] = functools.partial(made.ours, made.target)
    if not made.case.sequence_parallel:  # which the others do not know
        steps["logits in memory"] = functools.partial(made.logits_in_memory, loss_of_logits)
        for peer in PEERS:
            if (why := peer.unavailable(made.x.device)) is None:
                steps[peer.name] = functools.partial(peer.step, made)
            else:
                made.case.missing[peer.name] = why
    return steps


def measure(case: Measured, device: torch.device, group: Any, alone: bool, rounds: int) -> None:
    made = Operands(case, device, group)
    steps = contenders(made, alone)
    number = torch.zeros(1, device=device)
    meter = BenchMeter(device, (lambda: None) if alone else lambda: dist.all_reduce(number), HEAD_START)
    for name, step in steps.items():
        outcome, sample = meter.warm_up(step)
        if name != PRODUCTS:
            assert isinstance(outcome, tuple)
            case.finite &= all(bool(t.isfinite().all()) for t in outcome if t is not None)
            if outcome[0].dim() == 0:
                case.losses[name] = float(outcome[0])
            returned = sum(t.numel() * t.element_size() for t in outcome if t is not None)
            case.workspace_mib[name] = ((sample.workspace_bytes or 0) - returned) / 2**20
        del outcome
    for _ in range(rounds):
        for name, step in steps.items():
            case.milliseconds.setdefault(name, []).append(meter.sample(step).milliseconds)


def copied(x: Tensor, group: Any) -> Tensor:
    """In place of a gather: what this process has, from all."""
    return x.expand(group.size(), *x.shape).contiguous()


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/split-head.json"),
    tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes, where there is no GPU.")] = False,
) -> None:
    """Time and workspace of a head that is divided over processes."""
    alone = not dist.is_torchelastic_launched()
    cuda = torch.cuda.is_available()
    rounds = TINY_ROUNDS if tiny else ROUNDS
    cases = []
    for processes in SHARES if alone else (None,):
        if processes is not None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        else:
            dist.init_process_group("nccl" if cuda else "gloo")
        rank, count = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda", 0 if alone else rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        for tokens, hidden, vocab, sequence in TINY if tiny else [*SHAPES, *([] if alone else [SEQUENCE_PARALLEL])]:
            case = Measured(tokens, hidden, vocab, count, sequence)
            with mock.patch("flce.engine.shards.gather", copied) if alone else mock.MagicMock():
                measure(case, device, dist.group.WORLD, alone, rounds)
            cases.append(case)
            if rank == 0:
                print("\n".join(case.rows()), "" if case.finite else "NOT FINITE", flush=True)
                print("".join(f"Not measured: {name}: {why}\n" for name, why in case.missing.items()), end="")
        dist.destroy_process_group()
    if alone or rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        start = "python" if alone else f"python -m torch.distributed.run --nproc-per-node {count}"
        described = described_run(device, f"{start} -m benchmarks.split_head", [])
        out.write_text(json.dumps({"run": described, "cases": [asdict(case) for case in cases]}, indent=1))


if __name__ == "__main__":
    typer.run(main)
