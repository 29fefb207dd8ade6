"""The placement of tiles and sums in the memory of dW before dW is written. Schedules and `sums.py` call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import PRODUCT_BLOCK
from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols

# Classes of a block are a multiple of this, the widest block of a result in a vendor's product.
BLOCK_MULTIPLE = 256
# Classes whose float32 sum is copied first when sums are rounded in place, see `sums.HalvedSum`.
COMPACTION_ROWS = 256


def borrow(memory: Tensor, rows: int, cols: int) -> Tensor:
    """Return a tile, (rows, cols), at the beginning of contiguous `memory`."""
    row_stride = padded_cols(cols)
    return memory.view(-1)[: rows * row_stride].view(-1, row_stride)[:, :cols]


def borrow_as(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of another dtype at the beginning of contiguous `memory`."""
    size = math.prod(shape) * dtype.itemsize // memory.dtype.itemsize
    return memory.view(-1)[:size].view(dtype).view(shape)


class ExponentialTile(NamedTuple):
    """Exponentials of all tokens and some classes."""

    start: int
    stop: int
    borrowed_class: int | None
    """The class whose dW will be where the tile begins; None: the tile is in separate memory."""

    @property
    def classes(self) -> slice:
        return slice(self.start, self.stop)


def exponential_tiles(rows: int, hidden: int, vocab_size: int, count: int) -> tuple[ExponentialTile, ...]:
    """Return tiles of all classes: one in separate memory, then `count` borrowed tiles. One tile if no class can be
    borrowed for.

    dW of the last tile is computed first, then dW of the tile before, and so on. So a tile may be stored in the memory
    of dW of all classes before its own classes. The k borrowed tiles have equally many classes, as many as possible.
    With r = N / H a tile of c classes needs the memory of dW of r c classes, rounded up. If r >= 1, the borrowed tiles
    lie next to each other, and only the classes of the last tile lie behind them: c + k (r c + 1) <= V. If r < 1, each
    tile lies directly before its own classes: k c + r c + 1 <= V.
    """
    max_cols = (vocab_size - count) * hidden // max(count * hidden + rows, hidden + count * rows)
    if max_cols < PRODUCT_BLOCK:
        return (ExponentialTile(0, vocab_size, None),)
    cols = max_cols // PRODUCT_BLOCK * PRODUCT_BLOCK
    tiles = []
    stop = borrowed_class = vocab_size
    for _ in range(count):
        start = -(-(stop - cols) // PRODUCT_BLOCK) * PRODUCT_BLOCK
        borrowed_class = min(start, borrowed_class) + -rows * padded_cols(stop - start) // hidden
        tiles.append(ExponentialTile(start, stop, borrowed_class))
        stop = start
    return (ExponentialTile(0, stop, None), *reversed(tiles))


@dataclass(frozen=True)
class BorrowedBlocks:
    """Blocks of classes whose dW is written one after the other. A tile may be stored in the memory of dW behind its
    own classes.

    Attributes:
        rows: tokens of a tile: all tokens.
        cols: classes of a block whose tile is in separate memory.
        hidden: H of the head; 0: no tile is borrowed.
        max_cols: maximum number of classes of a borrowed tile.
    """

    rows: int
    cols: int
    hidden: int = 0
    max_cols: int = 0

    def blocks(self, start: int, stop: int) -> list[slice]:
        """Return the leading blocks of these classes whose tiles are borrowed. They have more than `cols` classes."""
        blocks = []
        while start < stop:
            # A tile of rows * width entries must fit into the (stop - start - width) * H entries behind its own
            # classes.
            available_cols = (stop - start) * self.hidden // (max(1, self.rows) + self.hidden)
            width = min(available_cols, self.max_cols) // BLOCK_MULTIPLE * BLOCK_MULTIPLE
            if width <= self.cols:
                break
            blocks.append(slice(start, start + width))
            start += width
        return blocks

    def block_widths(self, vocab_size: int) -> list[int]:
        """Return the number of classes of each block."""
        widths = [block.stop - block.start for block in self.blocks(0, vocab_size)]
        num_full, rest = divmod(vocab_size - sum(widths), self.cols)
        return widths + [self.cols] * num_full + [rest] * (rest > 0)


def first_lending_class(tokens: int, vocab_size: int, sums: torch.dtype, dtype: torch.dtype) -> int:
    """Return the first of the last classes whose dW has enough memory for a sum of dX."""
    classes = -(-tokens * sums.itemsize // dtype.itemsize)
    return max(0, vocab_size - classes) // COLUMN_MULTIPLE * COLUMN_MULTIPLE


def second_half_start(vocab_size: int) -> int:
    """Return the first class whose dW is summed in separate memory, see `sums.HalvedSum`."""
    return vocab_size // 2 // ALIGNMENT * ALIGNMENT
