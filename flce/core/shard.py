"""`Shard`: the classes of one process, if a head is divided over a process group; and the collectives of the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core import private


@dataclass(frozen=True)
class Shard:
    """Classes of one process of `group`: consecutive classes from `start` on, of `vocab_size` classes in all."""

    group: str  # name
    start: int
    vocab_size: int
    sequence_parallel: bool = False
    """True if each process has a share of the tokens, whose gradients are summed outside of the call."""

    @property
    def process_group(self) -> Any:
        return private.resolve_process_group(self.group)

    @property
    def rank(self) -> int:
        return int(self.process_group.rank())

    @property
    def is_empty(self) -> bool:
        """True if this process has no class. It then computes one class of zeros instead."""
        return self.start >= self.vocab_size

    @property
    def max_local_vocab_size(self) -> int:
        """Number of classes of the process with the most classes."""
        return shard_bounds(self.vocab_size, self.process_group.size(), 0)[1]

    def local_vocab_sizes(self, like: Tensor) -> Tensor:
        """Return the number of classes of each process, (processes,). Computed on the device: no copy from the host."""
        step = self.max_local_vocab_size
        starts = torch.arange(self.process_group.size(), device=like.device) * step
        return (self.vocab_size - starts).clamp(0, step).to(like.dtype)

    def sums_by_process(self, x: Tensor) -> Tensor:
        """Return the sums of the shards of a vector (V,), (processes,)."""
        count, step = self.process_group.size(), self.max_local_vocab_size
        return torch.nn.functional.pad(x, (0, count * step - len(x))).view(count, step).sum(1)

    def gather_full(self, x: Tensor) -> Tensor:
        """Return the full vector (V,), of which `x`, (V_local,), is the shard of this process. One collective."""
        padded = torch.nn.functional.pad(x, (0, self.max_local_vocab_size - len(x)))
        return all_gather(padded, self.process_group).view(-1)[: self.vocab_size]


def shard_bounds(vocab_size: int, shards: int, index: int) -> tuple[int, int]:
    """Return the first class of a shard and the class after its last, as `torch.chunk` and DTensor divide classes."""
    step = -(-vocab_size // shards)
    return min(index * step, vocab_size), min((index + 1) * step, vocab_size)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """Return the tensors `x` of all processes of the group, (processes, *x.shape). One collective."""
    result = x.new_empty((group.size(), *x.shape))
    # PyTorch versions with the newer name deprecate the older name.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(result.view(-1), x.contiguous().view(-1), group=group)
    return result
