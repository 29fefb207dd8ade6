"""Some classes at a time. The logits are made twice, in forward and in backward."""

from __future__ import annotations

from dataclasses import dataclass

from flce.borrowing import BorrowedBlocks, borrow, borrow_as
from flce.schedules.statistics import Deferred
from flce.stage import Stage
from flce.sums import ChunkSum, add_bias, add_input, block_sums


@dataclass(frozen=True)
class Blocks(Deferred):
    """Four products: the blocks of classes one after the other, and all tokens for each.

    dW of a block is made at once. dX is summed over blocks, for all tokens, in float32. Tiles are borrowed from dW
    where that makes them larger.
    """

    rows: int
    cols: int
    borrowed: BorrowedBlocks

    def backward(self, s: Stage) -> None:
        self._sweep(s)
        for k in s.wanted_inputs:
            s.set_input_gradient(k, s.input_gradient(k).to(s.problem.dtype))

    def _sweep(self, s: Stage) -> None:
        for k in s.wanted_inputs:
            s.new_input_gradient(k, s.dtypes.sums)
        make_blocks(s, self.rows, self.cols, self.borrowed, 0, s.vocab_size)


@dataclass(frozen=True)
class BlocksAroundSum(Deferred):
    """The same with the float32 sum of dX in the memory of dW of the last classes. Their logits are made three times:
    for dX, which is then rounded to memory of its own, and for dW."""

    rows: int
    cols: int
    borrowed: BorrowedBlocks
    start: int
    """The first of the classes whose dW lends its memory."""

    def backward(self, s: Stage) -> None:
        x, dW = s.terms[0].input, s.weight_gradient()
        total = borrow_as(dW[self.start :], x.shape, s.dtypes.sums)
        s.set_input_gradient(0, total)
        make_blocks(s, self.rows, self.cols, self.borrowed, 0, self.start)
        not_borrowed = BorrowedBlocks(self.rows, self.cols)
        make_blocks(s, self.rows, self.cols, not_borrowed, self.start, s.vocab_size, weights=False)
        s.set_input_gradient(0, total.to(s.problem.dtype, copy=True))
        make_blocks(s, self.rows, self.cols, self.borrowed, self.start, s.vocab_size, inputs=False)


@dataclass(frozen=True)
class ChunksOfBlocks(Deferred):
    """dX of some tokens at a time, summed over blocks of classes in float32. For a frozen head: three products."""

    rows: int
    cols: int

    def backward(self, s: Stage) -> None:
        logits, dlogits = s.logits_and_gradient(self.rows, self.cols)
        sums = {k: ChunkSum(s, k, self.rows, self.cols) for k in s.wanted_inputs}
        for rows in s.chunks(self.rows):
            for cols in s.blocks(self.cols):
                area = slice(0, rows.stop - rows.start), slice(0, cols.stop - cols.start)
                s.gradient(s.inputs(rows), rows, cols, logits[area], dlogits[area])
                for total in sums.values():
                    total.add(dlogits[area], rows, cols)


@dataclass(frozen=True)
class Apart(Deferred):
    """Five products, for the least memory: dX in chunks of tokens, and dW in blocks of classes afterwards."""

    inputs: ChunksOfBlocks
    rows: int
    cols: int
    borrowed: BorrowedBlocks

    def backward(self, s: Stage) -> None:
        self.inputs.backward(s)
        make_blocks(s, self.rows, self.cols, self.borrowed, 0, s.vocab_size, inputs=False)


def make_blocks(
    s: Stage,
    rows_step: int,
    cols_step: int,
    borrowed: BorrowedBlocks,
    start: int,
    stop: int,
    inputs: bool = True,
    weights: bool = True,
) -> None:
    """dW of the classes from `start` to `stop`, and what these add to dX."""
    memory = s.logits_and_gradient(rows_step, cols_step)
    sums_of = block_sums(s, rows_step, cols_step) if weights else lambda cols: {}
    for cols, is_borrowed in borrowed.of(start, stop):
        width = cols.stop - cols.start
        logits, dlogits = (tile[:, :width] for tile in memory)
        sums = sums_of(cols)
        for rows in s.chunks(rows_step):
            size = rows.stop - rows.start
            if is_borrowed:
                logits = dlogits = borrow(s.weight_gradient()[cols.stop :], size, width)
            dz = dlogits[:size]
            s.gradient(s.inputs(rows), rows, cols, logits[:size], dz)
            for k in s.wanted_inputs if inputs else ():
                add_input(s, k, dz, rows, cols)
            for k, total in sums.items():
                total.add(dz, s.inputs(rows)[k])
            if weights:
                add_bias(s, dz, cols)
        for total in sums.values():
            total.finish()
    s.release_inputs()
