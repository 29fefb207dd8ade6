"""Allocation of the memory of a pass. A dry run counts it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class Arena:
    """Allocator on a device for all memory of a schedule. Memory is freed with the last view of it."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        allocate = torch.zeros if zero else torch.empty
        return allocate(shape, dtype=dtype, device=self.device)


class CountingArena(Arena):
    """Arena that counts live bytes. A storage is live until its last view is freed."""

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
        """Count temporary memory that one product or one operation of the backend allocates and frees."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)

    def _count_freed(self, size: int) -> None:
        self.live_bytes -= size
