"""Where tiles and sums lie in the memory of dW that is not written yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import PRODUCT_BLOCK
from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols

# Classes of a block are a multiple of this, the widest piece of a result that a vendor's product makes at a time.
BLOCK_MULTIPLE = 256
# Classes whose float32 sum is copied first when sums are rounded to where they lie, see `sums.HalvedSum`.
COMPACTION_ROWS = 256


def borrow(memory: Tensor, rows: int, cols: int) -> Tensor:
    """A tile, (rows, cols), at the beginning of contiguous `memory`."""
    row_stride = padded_cols(cols)
    return memory.view(-1)[: rows * row_stride].view(-1, row_stride)[:, :cols]


def borrow_as(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without gaps, of another dtype, at the beginning of contiguous `memory`."""
    size = math.prod(shape) * dtype.itemsize // memory.dtype.itemsize
    return memory.view(-1)[:size].view(dtype).view(shape)


class ExponentialTile(NamedTuple):
    """Exponentials of all tokens and some classes."""

    start: int
    stop: int
    borrowed_class: int | None
    """The class whose weight gradient will be where they begin; None: in memory of their own."""

    @property
    def classes(self) -> slice:
        return slice(self.start, self.stop)


def exponential_tiles(rows: int, hidden: int, vocab_size: int, count: int) -> tuple[ExponentialTile, ...]:
    """The tiles of all classes, of which `count` are borrowed. The first has memory of its own.

    dW of the last tile is made first, and so on. So a tile may be in the memory of dW of all classes before its own.
    There are k equal ones, as large as fits: with r = N / H a tile of c classes takes the memory of r c, rounded up. If
    r is 1 or more they lie next to each other and the last's own classes are all that is behind them,
    c + k (r c + 1) <= V; if it is less, each lies before its own classes, k c + r c + 1 <= V.
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
    """Blocks of classes whose dW is written one after the other: a tile may be in the memory behind its own classes.

    Attributes:
        rows: tokens of a tile, which are all.
        cols: classes of a block that has memory of its own.
        hidden: H of the head; 0: nothing may be borrowed.
        max_cols: classes of a borrowed tile.
    """

    rows: int
    cols: int
    hidden: int = 0
    max_cols: int = 0

    def blocks(self, start: int, stop: int) -> list[slice]:
        """The blocks of these classes, from the first on, whose tiles are borrowed. They are wider than `cols`."""
        blocks = []
        while start < stop:
            # rows * cols entries of a tile in the (stop - start - cols) * H behind its own classes
            available_cols = (stop - start) * self.hidden // (max(1, self.rows) + self.hidden)
            width = min(available_cols, self.max_cols) // BLOCK_MULTIPLE * BLOCK_MULTIPLE
            if width <= self.cols:
                break
            blocks.append(slice(start, start + width))
            start += width
        return blocks

    def block_widths(self, vocab_size: int) -> list[int]:
        """The number of classes of each block."""
        widths = [block.stop - block.start for block in self.blocks(0, vocab_size)]
        num_full, rest = divmod(vocab_size - sum(widths), self.cols)
        return widths + [self.cols] * num_full + [rest] * (rest > 0)


def first_lending_class(tokens: int, vocab_size: int, sums: torch.dtype, dtype: torch.dtype) -> int:
    """The first of the classes, the last, whose dW has room for a sum of dX."""
    classes = -(-tokens * sums.itemsize // dtype.itemsize)
    return max(0, vocab_size - classes) // COLUMN_MULTIPLE * COLUMN_MULTIPLE


def second_half_start(vocab_size: int) -> int:
    """The first of the classes whose weight gradient is summed in memory of its own, see `sums.HalvedSum`."""
    return vocab_size // 2 // ALIGNMENT * ALIGNMENT
