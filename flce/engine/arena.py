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
        self.live_bytes = self.peak_bytes = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        tensor = super().new(shape, dtype, zero)
        storage = tensor.untyped_storage()
        self.live_bytes += storage.nbytes()
        self.count_temporary(0)
        weakref.finalize(storage, self._count_freed, storage.nbytes()).atexit = False
        return tensor

    def count_temporary(self, size: int) -> None:
        """What a leaf takes and gives back."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)

    def _count_freed(self, size: int) -> None:
        self.live_bytes -= size
