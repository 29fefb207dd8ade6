"""A head that tensor parallelism divides by classes: its weight is a DTensor, ``Shard(0)`` on a mesh of one dimension.

`patch.py` gets the local tensors of a call from `divide_head`. The state of lazy logits has the `HeadDivision`, with
which ``lazy/`` computes results of all classes. PyTorch's and Transformers' styles of tensor parallelism give the head
a DTensor, and expect a DTensor of its logits; `HeadDivision.placement` is the placement of this DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flce.core.shard import shard_bounds
from flce.ops.dtensors import from_local, wait_for
from flce.ops.vocabulary_parallel import is_dtensor


@dataclass(frozen=True)
class HeadDivision:
    """Division of the classes of a head over the processes of a mesh. All processes have the same tokens.

    Attributes:
        mesh: the device mesh, of one dimension.
        vocab_size: V.
        placement: placement of the logits if they are a DTensor, ``Shard(-1)`` or ``Replicate()``; None if they are a
            tensor of all classes.
    """

    mesh: Any
    vocab_size: int
    placement: Any = None

    @property
    def group_arguments(self) -> dict[str, Any]:
        return {"process_group": self.mesh.get_group(), "vocab_size": self.vocab_size}

    def merge_classes(self, local: Tensor) -> Tensor:
        """Return the logits with the `placement`, from the logits of each process's classes."""
        from torch.distributed.tensor import Replicate, Shard

        shape = (*local.shape[:-1], self.vocab_size)
        logits: Any = from_local(local, shape, self.mesh, [Shard(local.dim() - 1)])
        if self.placement is None:
            return wait_for(logits.redistribute(placements=[Replicate()]).to_local())
        placed: Tensor = logits.redistribute(placements=[self.placement])
        return placed

    def sum_over_processes(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        shares = DTensor.from_local(local, self.mesh, [Partial()], run_check=False)
        return wait_for(shares.redistribute(placements=[Replicate()]).to_local())

    def sum_gradient(self, hidden: Tensor) -> Tensor:
        """Return the same tensor. Its gradient, from one process's classes, is summed over the processes."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        replicated = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return wait_for(replicated.to_local(grad_placements=[Partial()]))

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this process's classes of a tensor (V, ...) that is equal in all processes, and so is its gradient."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        replicated = DTensor.from_local(full, self.mesh, [Replicate()], run_check=False)
        return wait_for(replicated.redistribute(placements=[Shard(0)]).to_local())

    def local_classes(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return class numbers within this process's slice, 0 for classes of other processes, and a mask of its own."""
        start, stop = shard_bounds(self.vocab_size, self.mesh.size(), self.mesh.get_local_rank())
        is_own = (index >= start) & (index < stop)
        return (index - start).where(is_own, 0), is_own

    def place_result(self, value: Any) -> Any:
        """Return a result of all classes as stock does: a DTensor if the logits are a DTensor."""
        from torch.distributed.tensor import DTensor, Replicate

        if self.placement is None or type(value) is not Tensor:
            return value
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)


def is_divided(weight: Any, bias: Any) -> bool:
    """Return True if weight and bias of a head are divided by classes, in a way that lazy logits support."""
    from torch.distributed.tensor import Shard

    return all(
        is_dtensor(x) and [(type(p), p.is_shard(0)) for p in x.placements] == [(Shard, True)]
        for x in (weight, bias)
        if x is not None
    )


def divide_head(hidden: Any, weight: Any, bias: Any) -> tuple[tuple[Tensor, Tensor, Tensor | None], HeadDivision]:
    """Return hidden states, weight and bias of this process, and the division of the head.

    Args:
        hidden: hidden states, the same in all processes: a plain tensor or a DTensor.
        weight: the weight, for which `is_divided` is True.
        bias: the bias, divided in the same way, or None.
    """
    from torch.distributed.tensor import Replicate, Shard

    if is_dtensor(hidden):
        hidden = wait_for(hidden.redistribute(placements=[Replicate()]).to_local())
    local_bias = None if bias is None else bias.to_local()
    division = HeadDivision(weight.device_mesh, len(weight), Shard(-1))
    return (hidden, weight.to_local(), local_bias), division
