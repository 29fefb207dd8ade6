"""Which classes a process has where a head is divided over a group, and what all processes tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.core import private


@dataclass(frozen=True)
class HeadSplit:
    """How a head is divided, as far as a plan depends on it."""

    num_processes: int
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Shard:
    """The classes that a process of `group` has: of `vocab_size` those from `start` on, one for each column."""

    group: str  # name
    start: int
    vocab_size: int
    sequence_parallel: bool = False
    """Whether each process has some of the tokens outside of a call, and sums the gradients of these there."""

    @property
    def process_group(self) -> Any:
        return private.resolve_process_group(self.group)

    @property
    def split(self) -> HeadSplit:
        """The same for all processes of the group."""
        return HeadSplit(self.process_group.size(), self.sequence_parallel)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return int(self.process_group.rank())

    @property
    def is_empty(self) -> bool:
        """Whether this process has no class. One without logits then stands for its slice."""
        return self.start >= self.vocab_size

    @property
    def max_local_vocab_size(self) -> int:
        """Classes of the process that has most."""
        return shard_bounds(self.vocab_size, self.process_group.size(), 0)[1]

    def local_vocab_sizes(self, like: Tensor) -> Tensor:
        """(processes,) how many classes each has. Made on the device: a copy would wait for it."""
        step = self.max_local_vocab_size
        starts = torch.arange(self.process_group.size(), device=like.device) * step
        return (self.vocab_size - starts).clamp(0, step).to(like.dtype)

    def sums_by_process(self, x: Tensor) -> Tensor:
        """(processes,) the sum of what each has of a vector, (V,)."""
        count, step = self.process_group.size(), self.max_local_vocab_size
        return torch.nn.functional.pad(x, (0, count * step - len(x))).view(count, step).sum(1)

    def gather_full(self, x: Tensor) -> Tensor:
        """(V,) of which `x` is what this process has, (V_local,). One collective."""
        padded = torch.nn.functional.pad(x, (0, self.max_local_vocab_size - len(x)))
        return all_gather(padded, self.process_group).view(-1)[: self.vocab_size]


def shard_bounds(vocab_size: int, shards: int, index: int) -> tuple[int, int]:
    """First class and the one after the last of a shard, as `torch.chunk` and DTensor divide them."""
    step = -(-vocab_size // shards)
    return min(index * step, vocab_size), min((index + 1) * step, vocab_size)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """What all processes of the group have in place of `x`, (processes, *x.shape). One collective."""
    result = x.new_empty((group.size(), *x.shape))
    # The older name is deprecated where there is a newer one.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(result.view(-1), x.contiguous().view(-1), group=group)
    return result
