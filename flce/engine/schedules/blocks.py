"""Schedules whose tiles have some classes. The logits are computed twice, in forward and in backward."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE
from flce.engine.borrowing import BLOCK_MULTIPLE, BorrowedBlocks, borrow, borrow_as, first_lending_class
from flce.engine.case import Case, ceil_div
from flce.engine.pass_context import PassContext
from flce.engine.schedules.chunks import DeferredChunks
from flce.engine.schedules.schedule import NO_SIZES, sizes_up_to
from flce.engine.schedules.statistics import Deferred, statistics_schedule
from flce.engine.sums import InputSum, add_tile, block_sum_builder, finish_sums


@dataclass(frozen=True)
class Blocks(Deferred):
    """Four products: for each block of classes all tokens.

    dW of a block is complete after the block. dX of all tokens is summed over blocks in float32. Tiles are borrowed
    from dW if borrowed tiles are larger.
    """

    rows: int
    cols: int
    borrowed: BorrowedBlocks

    strategy = "vocab"
    sized_by_tokens = False
    multiples = (COLUMN_MULTIPLE, BLOCK_MULTIPLE)

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.vocab_size) if c.needs.any else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> Blocks | DeferredChunks:
        rows = c.chunk_rows
        statistics = statistics_schedule(c, rows, size)
        if size >= c.vocab_size:
            return DeferredChunks(statistics, rows)
        return cls(statistics, rows, size, _borrowed_blocks(c, rows, size))

    def backward(self, ctx: PassContext) -> None:
        for k in ctx.dx_terms:
            ctx.dx_memory(k, ctx.dtypes.sums)
        compute_blocks(ctx, self.rows, self.cols, self.borrowed, 0, ctx.vocab_size)
        for k in ctx.dx_terms:
            ctx.set_dx_memory(k, ctx.round_to(ctx.dx_memory(k), ctx.problem.dtype))

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.rows, self.borrowed.block_widths(c.vocab_size)


@dataclass(frozen=True)
class BlocksAroundSum(Blocks):
    """`Blocks` with the float32 sum of dX in the memory of dW of the last classes. The logits of the last classes are
    computed three times: for statistics, for dX, which is then rounded to separate memory, and for dW."""

    start: int
    """The first of the last classes."""

    @classmethod
    def sizes(cls, c: Case) -> range:
        sums = c.dtypes(True).sums
        possible = (
            c.needs.inputs[0]
            and c.can_borrow
            and len(c.hidden_sizes) == 1
            and sums != c.dtype
            and not c.skip_ignored  # Rows of the sum would have to be scattered.
            and 0 < c.num_tokens <= c.chunk_rows
        )
        # Recomputing the logits of the last classes costs less than half a product if they are less than half of all
        # classes. `SeparatePasses` costs a full product.
        start = first_lending_class(c.num_tokens, c.vocab_size, sums, c.dtype)
        return range(1, c.vocab_size) if possible and 2 * start >= c.vocab_size else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> BlocksAroundSum:
        start = first_lending_class(c.num_tokens, c.vocab_size, c.dtypes(True).sums, c.dtype)
        rows = c.chunk_rows
        return cls(statistics_schedule(c, rows, size), rows, size, _borrowed_blocks(c, rows, size), start)

    def backward(self, ctx: PassContext) -> None:
        x, dW = ctx.terms[0].input, ctx.dw_memory()
        total = borrow_as(dW[self.start :], x.shape, ctx.dtypes.sums)
        ctx.set_dx_memory(0, total)
        compute_blocks(ctx, self.rows, self.cols, self.borrowed, 0, self.start)
        not_borrowed = BorrowedBlocks(self.rows, self.cols)
        compute_blocks(ctx, self.rows, self.cols, not_borrowed, self.start, ctx.vocab_size, with_dw=False)
        ctx.set_dx_memory(0, ctx.round_to(total, ctx.problem.dtype))
        compute_blocks(ctx, self.rows, self.cols, self.borrowed, self.start, ctx.vocab_size, with_dx=False)


@dataclass(frozen=True)
class ChunksOfBlocks(Deferred):
    """Three products for a frozen head: for each chunk all blocks of classes. dX of a chunk is summed over blocks in
    float32."""

    rows: int
    cols: int

    strategy = "vocab"

    @classmethod
    def sizes(cls, c: Case) -> range:
        frozen = any(c.needs.inputs) and not any(c.needs.weights) and not c.needs.bias
        return sizes_up_to(c.num_tokens) if frozen else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> ChunksOfBlocks:
        # The sum, R x H in float32, and the tile, R x C, have about the same size.
        cols = max(COLUMN_MULTIPLE, 2 * c.hidden_sizes[0] // COLUMN_MULTIPLE * COLUMN_MULTIPLE)
        cols = min(c.vocab_size, cols if size > 1 else ALIGNMENT)
        return ChunksOfBlocks(statistics_schedule(c, size, cols), size, cols)

    def backward(self, ctx: PassContext) -> None:
        tile = ctx.new_gradient_tile(self.rows, self.cols)
        sums = [InputSum(ctx, k, self.rows, self.cols) for k in ctx.dx_terms]
        for chunk in ctx.chunks(self.rows):
            for block in ctx.blocks(self.cols):
                dlogits = tile[: chunk.stop - chunk.start, : block.stop - block.start]
                ctx.compute_gradient(ctx.term_inputs(chunk), chunk, block, dlogits)
                for total in sums:
                    total.add(dlogits, chunk, block)

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.rows, [self.cols] * ceil_div(c.vocab_size, self.cols)


@dataclass(frozen=True)
class SeparatePasses(Deferred):
    """Five products, for the least memory: first dX in chunks of tokens, then dW in blocks of classes."""

    dx_schedule: ChunksOfBlocks
    rows: int
    cols: int
    borrowed: BorrowedBlocks

    strategy = "vocab"

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if any(c.needs.inputs) and (any(c.needs.weights) or c.needs.bias) else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> SeparatePasses:
        dx_schedule = ChunksOfBlocks.from_size(c, size)
        rows = c.chunk_rows
        # A tile for dW has about the size of the sum and the tile for dX.
        cols = min(c.vocab_size, 4 * c.hidden_sizes[0] * size // max(1, c.num_tokens))
        cols = max(1, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE or cols) if size > 1 else 1
        return SeparatePasses(
            statistics_schedule(c, rows, cols), dx_schedule, rows, cols, _borrowed_blocks(c, rows, cols)
        )

    def backward(self, ctx: PassContext) -> None:
        self.dx_schedule.backward(ctx)
        compute_blocks(ctx, self.rows, self.cols, self.borrowed, 0, ctx.vocab_size, with_dx=False)

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.rows, self.borrowed.block_widths(c.vocab_size)

    def describe(self, c: Case) -> str:
        return f"{super().describe(c)} for dW, {self.dx_schedule.describe(c)} for dX"


def _borrowed_blocks(c: Case, rows: int, cols: int) -> BorrowedBlocks:
    can_borrow = c.can_borrow and rows >= c.num_tokens and cols < c.vocab_size
    return BorrowedBlocks(rows, cols, c.hidden_sizes[0] if can_borrow else 0, c.logits_per_chunk // rows)


def compute_blocks(
    ctx: PassContext,
    chunk_rows: int,
    block_cols: int,
    borrowed: BorrowedBlocks,
    start: int,
    stop: int,
    with_dx: bool = True,
    with_dw: bool = True,
) -> None:
    """Compute dW of the classes from `start` to `stop`, and add their share to dX."""
    separate_tile = ctx.new_gradient_tile(chunk_rows, block_cols)
    build_sums = block_sum_builder(ctx, chunk_rows, block_cols) if with_dw else lambda cols: None
    for block in ctx.blocks(block_cols, start, stop, leading_blocks=borrowed.blocks(start, stop)):
        width = block.stop - block.start
        tile, sums = separate_tile[:, :width], build_sums(block)
        for chunk in ctx.chunks(chunk_rows):
            size = chunk.stop - chunk.start
            if width > block_cols:  # The tile of this block is borrowed.
                tile = borrow(ctx.dw_memory()[block.stop :], size, width)
            dlogits = tile[:size]
            ctx.compute_gradient(ctx.term_inputs(chunk), chunk, block, dlogits)
            add_tile(ctx, dlogits, chunk, block, sums, with_dx)
        finish_sums(sums or {})
    ctx.release_inputs()
