"""Losses and softmaxes of whole rows that are in memory: cases, operands, contenders, and the fewest bytes to move.

Counted is what no implementation can do without, in entries of the rows x columns matrix; targets, losses and what is
one number a row are left out.

* cross_entropy, forward: every logit is read.
* cross_entropy, backward: every logit is read, every entry of the gradient is written.
* cross_entropy, in-place forward+backward: every logit is read, and the gradient written over it.
* softmax and log_softmax, forward: the input is read, the output written.
* softmax and log_softmax, backward: the output and its gradient are read, the gradient of the input is written.
* copy: the input is read, as many entries are written.

To add a contender, write a function (RowCase) -> RowFunction and a line in `CONTENDERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import DTYPES, MIB, Case
from benchmarks.contenders import Contender, needs_cuda, needs_flce, needs_package
from benchmarks.results import Bandwidth
from benchmarks.row_calls import Calls

ON_CHIP_BYTES = 128 * 1024  # of a row: half of the registers of a multiprocessor (256 KiB), so that two rows fit
CPU_CACHE_BYTES = 8 * MIB  # PyTorch does not tell that of a CPU
CACHES = 4  # the inputs of one timed region are more than this many times the cache
# On a GPU as many calls are timed as one that they take a tenth of a millisecond or more, beside which the
# microseconds between an event and the first of them count little.
REGION_BYTES = 512 * MIB
ENOUGH_CALLS = 256
MOST_CALLS = 1024  # whatever the cache


class Operation(str, Enum):
    cross_entropy = "cross_entropy"
    softmax = "softmax"
    log_softmax = "log_softmax"


class Direction(str, Enum):
    forward = "forward"  # without gradients
    backward = "backward"  # by itself: the forward pass has been made before
    in_place = "in-place forward+backward"  # the gradient in the memory of the logits, for those that can


# What there is to do, and the entries read or written for each entry of the input.
TASKS = {
    (Operation.cross_entropy, Direction.forward): 1,
    (Operation.cross_entropy, Direction.backward): 2,
    (Operation.cross_entropy, Direction.in_place): 2,
    (Operation.softmax, Direction.forward): 2,
    (Operation.softmax, Direction.backward): 3,
    (Operation.log_softmax, Direction.forward): 2,
    (Operation.log_softmax, Direction.backward): 3,
}
COPY_ENTRIES = 2


@dataclass(frozen=True)
class RowCase(Case):
    """A matrix of rows, and what is done with it."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    operation: Operation = Operation.cross_entropy
    direction: Direction = Direction.forward
    compiled: bool = False  # also by torch.compile, which takes seconds to compile each task
    calls: int | None = None  # in one timed region; None: so many that the cache cannot hold their inputs

    def __post_init__(self) -> None:
        object.__setattr__(self, "operation", Operation(self.operation))
        object.__setattr__(self, "direction", Direction(self.direction))

    @property
    def task(self) -> str:
        return f"{self.operation.value} {self.direction.value}"

    @property
    def title(self) -> str:
        return f"{self.task}, {self.dtype}, {self.rows} x {self.columns}"

    @property
    def row_bytes(self) -> int:
        return self.columns * DTYPES[self.dtype].itemsize

    @property
    def on_chip(self) -> bool:
        """Whether a row is read once because it fits on chip."""
        return self.row_bytes <= ON_CHIP_BYTES

    def bytes(self, entries: int) -> int:
        return self.rows * self.row_bytes * entries

    def calls_for(self, cache_bytes: int, region_bytes: int = 0) -> int:
        """The calls of one timed region, each on an input of its own: beyond the cache, and long enough."""
        beyond = CACHES * cache_bytes // self.bytes(1) + 1
        enough = min(ENOUGH_CALLS, region_bytes // self.bytes(1))
        return self.calls or min(MOST_CALLS, max(beyond, enough))


@dataclass
class RowResult(Bandwidth):
    method: str = ""  # how they were timed, see `row_calls.Method`
    note: str | None = None  # why they were not captured


@dataclass(frozen=True)
class RowProblem:
    """The operands of the calls of one timed region, in turn."""

    case: RowCase
    x: Tensor  # (calls, rows, columns); may be overwritten
    spare: Tensor  # the same numbers: what `x` is restored from, and the gradients that arrive at softmaxes
    target: Tensor

    def restore(self) -> None:
        self.x.copy_(self.spare)


def make_rows(case: RowCase, device: torch.device, calls: int | None = None, seed: int = 0) -> RowProblem:
    """Random logits of standard deviation 4, random targets."""
    generator = torch.Generator(device).manual_seed(seed)
    cache, region = CPU_CACHE_BYTES, 0
    if device.type == "cuda":
        cache, region = torch.cuda.get_device_properties(device).L2_cache_size, REGION_BYTES
    spare = torch.empty(
        calls or case.calls_for(cache, region), case.rows, case.columns, dtype=DTYPES[case.dtype], device=device
    )
    spare.normal_(0.0, 4.0, generator=generator)
    target = torch.randint(case.columns, (case.rows,), device=device, generator=generator)
    return RowProblem(case, spare.clone(), spare, target)


# --- contenders ---

RowFunction = Callable[[Tensor, Tensor], Tensor]  # of the input and the targets, which softmaxes have no use for


@dataclass(frozen=True)
class RowContender(Contender):
    function: Callable[[RowCase], RowFunction]
    applies: Callable[[RowCase], bool] = field(default=lambda case: True, kw_only=True)
    overwrites: bool = field(default=False, kw_only=True)  # its in-place forward+backward needs new logits every call
    roof: bool = field(default=False, kw_only=True)  # the same call whatever the task
    builds: bool = field(default=False, kw_only=True)  # its first call compiles kernels: worth doing ahead

    def bytes(self, case: RowCase) -> int:
        """The fewest that a call moves."""
        return case.bytes(COPY_ENTRIES if self.roof else TASKS[case.operation, case.direction])


class Produced(torch.autograd.Function):
    """Logits as a layer makes them: not a leaf, whose value nobody may overwrite. Costs nothing and saves nothing."""

    @staticmethod
    def forward(ctx: Any, layer: Tensor, logits: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.arrived.append(grad)
        return None, None, None


def make_calls(contender: RowContender, problem: RowProblem) -> Calls:
    """Call i works on input i. What it needs of the forward pass is made before; its result is returned."""
    direction, function, count = problem.case.direction, contender.function(problem.case), len(problem.x)
    overwrites = contender.overwrites and direction is Direction.in_place
    layer = torch.ones((), device=problem.x.device, requires_grad=True)

    def forward(index: int, ready: Any = None) -> Tensor:
        with torch.no_grad():
            return function(problem.x[index], problem.target)

    def ahead(index: int) -> tuple[Tensor, Tensor, Tensor]:
        x = problem.x[index].detach().requires_grad_()
        out = function(x, problem.target)
        # In memory of its own: what arrives is read from there, not from the cache.
        return x, out, torch.ones_like(out) if out.dim() == 0 else problem.spare[index]

    def backward(index: int, ready: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, out, upstream = ready
        (grad,) = torch.autograd.grad(out, x, upstream)
        return grad

    def both(index: int, ready: Any = None) -> Tensor:
        x = problem.x[index].detach()
        if not overwrites:
            (grad,) = torch.autograd.grad(function(x.requires_grad_(), problem.target), x)
            return grad
        arrived: list[Tensor] = []
        function(Produced.apply(layer, x, arrived), problem.target).backward()
        return arrived[0]

    if contender.roof or direction is Direction.forward:
        return Calls(count, forward)
    if direction is Direction.backward:
        return Calls(count, backward, ahead)
    return Calls(count, both, restore=problem.restore if overwrites else None)


def copy(case: RowCase) -> RowFunction:
    """A kernel that reads and writes every element, at the speed of a copy.

    What is captured of ``copy_`` is not a kernel but a "memcpy node", which on an H200 is as fast, but for 512 MiB and
    multiples of it: 2.8 TB/s instead of 4.3.
    """
    return lambda x, target: torch.neg(x)


def ours(case: RowCase) -> RowFunction:
    flce: Any = importlib.import_module("flce")
    if case.operation is Operation.cross_entropy:
        return lambda x, target: flce.cross_entropy(x, target, inplace=case.direction is Direction.in_place)
    function = getattr(flce, case.operation.value)
    return lambda x, target: function(x, dim=-1)


def eager(case: RowCase) -> RowFunction:
    if case.operation is Operation.cross_entropy:
        return lambda x, target: F.cross_entropy(x, target)
    function = getattr(F, case.operation.value)
    return lambda x, target: function(x, dim=-1)


def compiled(case: RowCase) -> RowFunction:
    """For these columns alone, as fast as it can be: with symbolic sizes its kernels are slower."""
    torch.compiler.reset()  # or the limit of recompilations is reached after a few shapes, and eager code runs
    return torch.compile(eager(case), dynamic=False)


def liger(case: RowCase) -> RowFunction:
    if case.operation is Operation.softmax:
        softmax: Any = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        return lambda x, target: softmax.apply(x)
    cross_entropy: Any = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    return lambda x, target: cross_entropy.apply(x, target, None)[0]


def liger_has(case: RowCase) -> bool:
    """It has no log_softmax. Its cross entropy makes the gradient in forward: there is no backward by itself."""
    if case.operation is Operation.cross_entropy:
        return case.direction is not Direction.backward
    return case.operation is Operation.softmax


needs_liger = needs_package("liger_kernel.ops.cross_entropy", "liger-kernel")
COPY, OURS, COMPILED, C = "copy", "ours", "torch-compile", RowContender
CONTENDERS = [
    C(COPY, "copy", "floor", copy, roof=True),
    C(OURS, "flce", "ours", ours, unavailable=needs_flce, overwrites=True, builds=True),
    C("eager", "eager", "stock", eager),
    C(
        COMPILED,
        "torch.compile",
        "peer",
        compiled,
        unavailable=needs_cuda,
        applies=lambda case: case.compiled,
        builds=True,
    ),
    C("liger", "Liger", "peer", liger, unavailable=needs_liger, applies=liger_has, overwrites=True, builds=True),
]


def row_contenders(case: RowCase) -> list[RowContender]:
    return [contender for contender in CONTENDERS if contender.applies(case)]
