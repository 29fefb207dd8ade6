"""Memory for what a call makes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class Arena:
    """Memory on a device. Whatever a schedule allocates comes from here; it is given back with the last view of it."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        allocate = torch.zeros if zero else torch.empty
        return allocate(shape, dtype=dtype, device=self.device)


class CountingArena(Arena):
    """Counts the bytes that are alive: a storage, and with it any view of it, from its allocation to its end."""

    def __init__(self, device: torch.device | str = "meta") -> None:
        super().__init__(device)
        self.alive = self.peak = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        made = super().new(shape, dtype, zero)
        storage = made.untyped_storage()
        self.alive += storage.nbytes()
        self.for_a_moment(0)
        weakref.finalize(storage, self._end, storage.nbytes()).atexit = False
        return made

    def for_a_moment(self, size: int) -> None:
        """What a leaf takes and gives back."""
        self.peak = max(self.peak, self.alive + size)

    def _end(self, size: int) -> None:
        self.alive -= size
