"""Who is measured on rows: flce, eager PyTorch, torch.compile, Liger, and as the roof what moves as much as a copy.

To add one, write a function (Task) -> RowFunction and a line in `CONTENDERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import Contender, needs_cuda, needs_flce, needs_package
from benchmarks.row_calls import Calls
from benchmarks.row_problem import COPY_ENTRIES, Direction, Operation, RowCase, RowProblem, Task

RowFunction = Callable[[Tensor, Tensor], Tensor]  # of the input and the targets, which softmaxes have no use for


@dataclass(frozen=True)
class RowContender(Contender):
    function: Callable[[Task], RowFunction]
    applies: Callable[[RowCase, Task], bool] = field(default=lambda case, task: True, kw_only=True)
    overwrites: bool = field(default=False, kw_only=True)  # its in-place forward+backward needs new logits every call
    roof: bool = field(default=False, kw_only=True)  # the same call whatever the task
    builds: bool = field(default=False, kw_only=True)  # its first call compiles kernels: worth doing ahead

    def bytes(self, case: RowCase, task: Task) -> int:
        """The fewest that a call moves; see `rows`."""
        return case.bytes(COPY_ENTRIES if self.roof else task.entries)


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


def make_calls(contender: RowContender, problem: RowProblem, task: Task) -> Calls:
    """Call i works on input i. What it needs of the forward pass is made before; its result is returned."""
    function = contender.function(task)
    overwrites = contender.overwrites and task.direction is Direction.in_place
    layer = torch.ones((), device=problem.x.device, requires_grad=True)

    def forward(index: int, ready: Any = None) -> Tensor:
        with torch.no_grad():
            return function(problem.x[index], problem.target)

    def ahead(index: int) -> tuple[Tensor, Tensor, Tensor]:
        x = problem.x[index].detach().requires_grad_()
        out = function(x, problem.target)
        # In memory of its own: what arrives is read from there, not from the cache.
        upstream = torch.ones_like(out) if out.dim() == 0 else problem.spare[index]
        return x, out, upstream

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

    if contender.roof or task.direction is Direction.forward:
        return Calls(problem.calls, forward)
    if task.direction is Direction.backward:
        return Calls(problem.calls, backward, ahead)
    return Calls(problem.calls, both, restore=problem.restore if overwrites else None)


def copy(task: Task) -> RowFunction:
    """A kernel that reads and writes every element, at the speed of a copy.

    What is captured of ``copy_`` is not a kernel but a "memcpy node", which on an H200 is as fast, but for 512 MiB and
    multiples of it: 2.8 TB/s instead of 4.3.
    """
    return lambda x, target: torch.neg(x)


def ours(task: Task) -> RowFunction:
    flce: Any = importlib.import_module("flce")
    if task.operation is Operation.cross_entropy:
        in_place = task.direction is Direction.in_place
        return lambda x, target: flce.cross_entropy(x, target, inplace=in_place)
    function = getattr(flce, task.operation.value)
    return lambda x, target: function(x, dim=-1)


def eager(task: Task) -> RowFunction:
    if task.operation is Operation.cross_entropy:
        return lambda x, target: F.cross_entropy(x, target)
    function = getattr(F, task.operation.value)
    return lambda x, target: function(x, dim=-1)


def compiled(task: Task) -> RowFunction:
    """For these columns alone, as fast as it can be: with symbolic sizes its kernels are slower."""
    torch.compiler.reset()  # or the limit of recompilations is reached after a few shapes, and eager code runs
    return torch.compile(eager(task), dynamic=False)


def liger(task: Task) -> RowFunction:
    if task.operation is Operation.softmax:
        softmax = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        return lambda x, target: softmax.apply(x)
    cross_entropy = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def loss(x: Tensor, target: Tensor) -> Tensor:
        result: Tensor = cross_entropy.apply(x, target, None)[0]
        return result

    return loss


def asked_for(case: RowCase, task: Task) -> bool:
    return case.compiled


def liger_has(case: RowCase, task: Task) -> bool:
    """It has no log_softmax. Its cross entropy makes the gradient in forward: there is no backward by itself."""
    if task.operation is Operation.cross_entropy:
        return task.direction is not Direction.backward
    return task.operation is Operation.softmax


needs_liger = needs_package("liger_kernel.ops.cross_entropy", "liger-kernel")

COPY, OURS = "copy", "ours"
CONTENDERS = [
    RowContender(COPY, "copy", "floor", copy, roof=True),
    RowContender(OURS, "flce", "ours", ours, unavailable=needs_flce, overwrites=True, builds=True),
    RowContender("eager", "eager", "stock", eager),
    RowContender(
        "torch-compile", "torch.compile", "peer", compiled, unavailable=needs_cuda, applies=asked_for, builds=True
    ),
    RowContender(
        "liger", "Liger", "peer", liger, unavailable=needs_liger, applies=liger_has, overwrites=True, builds=True
    ),
]


def row_contenders(case: RowCase, task: Task) -> list[RowContender]:
    return [contender for contender in CONTENDERS if contender.applies(case, task)]
