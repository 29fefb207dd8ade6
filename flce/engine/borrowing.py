"""The placement of tiles and sums in the memory of dW before dW is written. Schedules and `sums.py` call it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import FUSED_PRODUCT_BLOCK, FUSED_PRODUCT_ROWS
from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols
from flce.engine.case import ceil_div

# The number of classes of a block is divisible by this, the widest block of a result in a vendor's product.
BLOCK_MULTIPLE = 256


def borrow(memory: Tensor, rows: int, cols: int, entry_size: int = 1) -> Tensor:
    """Return a tile, (rows, cols), at the beginning of contiguous `memory`. The row stride is padded and multiplied by
    `entry_size`."""
    row_stride = padded_cols(cols) * entry_size
    return memory.view(-1)[: rows * row_stride].view(-1, row_stride)[:, :cols]


def borrow_as(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of another dtype at the beginning of contiguous `memory`."""
    size = math.prod(shape) * dtype.itemsize // memory.dtype.itemsize
    return memory.view(-1)[:size].view(dtype).view(shape)


class TilePlacement(NamedTuple):
    """The place of a tile of exponentials, of all tokens and some classes."""

    start: int
    stop: int
    """The classes of the tile."""
    borrowed_class: int | None
    """The class whose dW will be where the tile begins; None: the tile is in separate memory."""

    @property
    def classes(self) -> slice:
        return slice(self.start, self.stop)


@functools.lru_cache(maxsize=256)
def place_tiles(
    rows: int, hidden: int, vocab_size: int, count: int, multiprocessors: int = 1
) -> tuple[TilePlacement, ...]:
    """Return the places of the tiles of all classes: of one tile in separate memory, then of `count` borrowed tiles. If
    the memory of dW is too small for these, one tile in separate memory has all classes.

    dW of the last tile is computed first, then dW of the tile before, and so on. So a tile may be stored in the memory
    of dW of all classes before its own classes. The k borrowed tiles have equally many classes, as many as possible.
    With r = N / H a tile of c classes needs the memory of dW of r c classes, rounded up. If r >= 1, the borrowed tiles
    lie next to each other, and only the classes of the last tile lie behind them: c + k (r c + 1) <= V. If r < 1, each
    tile lies directly before its own classes: k c + r c + 1 <= V. The code reserves k classes for rounding in both
    cases. Tiles have a few classes less than possible if their products then have fewer waves of product blocks.
    """
    max_cols = (vocab_size - count) * hidden // max(count * hidden + rows, hidden + count * rows)
    if max_cols < FUSED_PRODUCT_BLOCK:
        return (TilePlacement(0, vocab_size, None),)
    num_block_columns, block_rows = ceil_div(vocab_size, FUSED_PRODUCT_BLOCK), ceil_div(rows, FUSED_PRODUCT_ROWS)
    most = max_cols // FUSED_PRODUCT_BLOCK
    block_columns = _block_columns_of_borrowed_tile(num_block_columns, most, count, block_rows, multiprocessors)
    cols = block_columns * FUSED_PRODUCT_BLOCK
    tiles = []
    stop = borrowed_class = vocab_size
    for _ in range(count):
        start = ceil_div(stop - cols, FUSED_PRODUCT_BLOCK) * FUSED_PRODUCT_BLOCK
        borrowed_class = min(start, borrowed_class) - ceil_div(rows * padded_cols(stop - start), hidden)
        tiles.append(TilePlacement(start, stop, borrowed_class))
        stop = start
    return (TilePlacement(0, stop, None), *reversed(tiles))


def _block_columns_of_borrowed_tile(
    num_block_columns: int, max_columns: int, count: int, block_rows: int, multiprocessors: int
) -> int:
    """Return the number of columns of product blocks in each borrowed tile: `max_columns`, or fewer if this saves 1%
    of the waves of all tiles. The tile in separate memory becomes at most 3% larger."""

    def count_waves(borrowed: int) -> int:
        separate = num_block_columns - count * borrowed
        waves = [ceil_div(n * block_rows, multiprocessors) for n in (borrowed, separate)]
        return count * waves[0] + waves[1]

    max_reduction = (num_block_columns - count * max_columns) // (32 * count)
    best = min(range(max_columns, max(0, max_columns - max_reduction - 1), -1), key=count_waves)
    return best if count_waves(best) <= 0.99 * count_waves(max_columns) else max_columns


@dataclass(frozen=True)
class BlockLayout:
    """Division of classes into blocks, whose dW is written one after the other. The tile of a block may be stored in
    the memory of dW behind the block's classes. The tiles of the last blocks share separate memory.

    Attributes:
        rows: tokens of a tile. If tiles are borrowed, all tokens.
        cols: classes of a block whose tile is in separate memory.
        hidden: H of the head; 0: no tile is borrowed.
        max_borrowed_cols: maximum number of classes of a borrowed tile.
        entry_size: memory of an entry of a borrowed tile, in entries of dW. 2: gradients overwrite float32 logits.
    """

    rows: int
    cols: int
    hidden: int = 0
    max_borrowed_cols: int = 0
    entry_size: int = 1

    def borrowed_blocks(self, start: int, stop: int) -> list[slice]:
        """Return the first blocks of these classes, whose tiles are borrowed. They have more than `cols` classes."""
        blocks = []
        while start < stop:
            # A tile of rows * width entries must fit in the (stop - start - width) * H entries behind its classes.
            available_cols = (stop - start) * self.hidden // (max(1, self.rows) * self.entry_size + self.hidden)
            width = min(available_cols, self.max_borrowed_cols) // BLOCK_MULTIPLE * BLOCK_MULTIPLE
            if width <= self.cols:
                break
            blocks.append(slice(start, start + width))
            start += width
        return blocks

    def block_widths(self, vocab_size: int) -> list[int]:
        """Return the number of classes of each block."""
        widths = [block.stop - block.start for block in self.borrowed_blocks(0, vocab_size)]
        num_full, rest = divmod(vocab_size - sum(widths), self.cols)
        return widths + [self.cols] * num_full + [rest] * (rest > 0)


def dx_sum_start(num_tokens: int, vocab_size: int, sum_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Return the class where a sum of dX begins that is stored at the end of the memory of dW."""
    num_classes = ceil_div(num_tokens * sum_dtype.itemsize, dtype.itemsize)
    return max(0, vocab_size - num_classes) // COLUMN_MULTIPLE * COLUMN_MULTIPLE


def second_half_start(vocab_size: int) -> int:
    """Return the first class whose dW is summed in separate memory, see `sums.SumInTwoHalves`."""
    return vocab_size // 2 // ALIGNMENT * ALIGNMENT
