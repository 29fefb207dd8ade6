"""Schedules that multiply the gradient of the logits with W and x. If tiles have a block of classes, the logits are
computed twice, in forward and in backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, slice_rows
from flce.engine.borrowing import BLOCK_MULTIPLE, BlockLayout, borrow, borrow_as, dx_sum_start
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.schedules.schedule import NO_SIZES, Deferred, Schedule, sizes_up_to, statistics_schedule
from flce.engine.sums import DxSum, add_to_dw, add_to_dx, block_sum_builder, build_dw_sums, finish_sums


@dataclass(frozen=True)
class Chunks(Schedule):
    """Loop over chunks: logits, dX and dW. Three products. Losses and gradients are computed in one pass over all
    logits of a chunk."""

    rows: int

    uses_fused_products = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if c.needs.any and not c.must_defer else NO_SIZES

    def forward(self, ctx: PassContext) -> None:
        logits, dlogits = ctx.new_overlapping_tiles(self.rows, ctx.vocab_size)
        dw_sums = build_dw_sums(ctx, self.rows)
        for chunk in ctx.chunks(self.rows):
            tile_rows = slice(0, chunk.stop - chunk.start)
            tile_logits, tile_dlogits = slice_rows(logits, tile_rows), slice_rows(dlogits, tile_rows)
            ctx.write_logits(ctx.term_inputs(chunk), ctx.all_classes, tile_logits)
            ctx.compute_statistics_and_gradient(tile_logits, tile_dlogits, chunk)
            add_to_dx(ctx, tile_dlogits, chunk, ctx.all_classes)
            add_to_dw(ctx, tile_dlogits, chunk, ctx.all_classes, dw_sums)
        finish_sums(dw_sums)


@dataclass(frozen=True)
class DeferredChunks(Deferred):
    """Loop over chunks whose logits are computed twice, for an upstream gradient of each token. Four products.
    `Blocks.from_size` returns it, too, if a block has all classes."""

    rows: int

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if c.needs.any and c.must_defer else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> DeferredChunks:
        return DeferredChunks(statistics_schedule(c, size, c.vocab_size), size)

    def backward(self, ctx: PassContext) -> None:
        tile = ctx.new_gradient_tile(self.rows, ctx.vocab_size)
        dw_sums = build_dw_sums(ctx, self.rows)
        for chunk in ctx.chunks(self.rows):
            dlogits = ctx.compute_gradient(chunk, ctx.all_classes, tile)
            add_to_dx(ctx, dlogits, chunk, ctx.all_classes)
            add_to_dw(ctx, dlogits, chunk, ctx.all_classes, dw_sums)
        finish_sums(dw_sums)


@dataclass(frozen=True)
class Blocks(Deferred):
    """Loop over blocks of classes, each with all tokens. Four products.

    dW of a block is complete after the block. dX of all tokens is summed over blocks in float32. The first
    blocks are as wide as the memory of dW behind them allows, and their tiles are borrowed from it. When such a block
    would have no more than `layout.cols` classes, the others have `layout.cols`, and share a separate tile.
    """

    layout: BlockLayout

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
        return cls(statistics, _block_layout(c, size))

    def backward(self, ctx: PassContext) -> None:
        ctx.start_dx_sums()
        compute_blocks(ctx, self.layout, 0, ctx.vocab_size)
        ctx.finish_dx_sums()

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.layout.rows, self.layout.block_widths(c.vocab_size)


@dataclass(frozen=True)
class BlocksAroundSum(Blocks):
    """`Blocks` with the float32 sum of dX in the memory of dW of the last classes. The logits of the last classes are
    computed three times: for statistics, for dX, which is then rounded to separate memory, and for dW."""

    @classmethod
    def sizes(cls, c: Case) -> range:
        sum_dtype = c.dtypes(True).sums
        possible = (
            c.needs.inputs[0]
            and c.can_borrow
            and len(c.hidden_sizes) == 1
            and sum_dtype != c.dtype
            and not c.skip_ignored  # Rows of the sum would have to be scattered.
            and 0 < c.num_tokens <= c.chunk_rows
        )
        # Recomputing the logits of the last classes costs less than half a product if they are less than half of all
        # classes. `SeparatePasses` costs a full product.
        start = dx_sum_start(c.num_tokens, c.vocab_size, sum_dtype, c.dtype)
        return range(1, c.vocab_size) if possible and 2 * start >= c.vocab_size else NO_SIZES

    def backward(self, ctx: PassContext) -> None:
        x, dtypes = ctx.terms[0].input, ctx.dtypes
        start = dx_sum_start(len(x), ctx.vocab_size, dtypes.sums, x.dtype)
        if 2 * start < ctx.vocab_size:  # a shard of fewer classes, with too little memory
            super().backward(ctx)
            return
        ctx.start_dx_sums(borrow_as(ctx.dw_memory()[start:], x.shape, dtypes.sums))
        compute_blocks(ctx, self.layout, 0, start)
        without_borrowing = BlockLayout(self.layout.rows, self.layout.cols)
        compute_blocks(ctx, without_borrowing, start, ctx.vocab_size, with_dw=False)
        ctx.finish_dx_sums()
        compute_blocks(ctx, self.layout, start, ctx.vocab_size, with_dx=False)


@dataclass(frozen=True)
class ChunksOfBlocks(Deferred):
    """Loop over chunks, and in each chunk over blocks of classes, for a frozen head. Three products. dX of a chunk is
    summed over blocks in float32."""

    rows: int
    cols: int

    strategy = "vocab"

    @classmethod
    def sizes(cls, c: Case) -> range:
        frozen = any(c.needs.inputs) and not any(c.needs.weights) and not c.needs.bias
        return sizes_up_to(c.chunk_rows) if frozen else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> ChunksOfBlocks:
        # The sum, R x H in float32, and the tile, R x C, have about the same size.
        cols = max(COLUMN_MULTIPLE, 2 * c.hidden_sizes[0] // COLUMN_MULTIPLE * COLUMN_MULTIPLE)
        cols = min(c.vocab_size, cols if size > 1 else ALIGNMENT)
        # The tile for statistics may be as large as the tile and the sum together.
        return ChunksOfBlocks(statistics_schedule(c, size, min(c.vocab_size, cols + cols // 2)), size, cols)

    def backward(self, ctx: PassContext) -> None:
        tile = ctx.new_gradient_tile(self.rows, self.cols)
        dx_sums = [DxSum(ctx, k, self.rows, self.cols) for k in ctx.dx_terms]
        for chunk in ctx.chunks(self.rows):
            for block in ctx.split_range(ctx.all_classes, self.cols):
                dlogits = ctx.compute_gradient(chunk, block, tile)
                for dx_sum in dx_sums:
                    dx_sum.add(dlogits, chunk, block)


@dataclass(frozen=True)
class SeparatePasses(Deferred):
    """Two loops, for the least memory: first dX in chunks of tokens, then dW in blocks of classes. Five products."""

    dx_schedule: ChunksOfBlocks
    layout: BlockLayout

    strategy = "vocab"

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if any(c.needs.inputs) and (any(c.needs.weights) or c.needs.bias) else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> SeparatePasses:
        dx_schedule = ChunksOfBlocks.from_size(c, min(size, c.chunk_rows))
        # A tile for dW has about as many bytes as the sum and the tile for dX together.
        rows, class_entries = block_rows(c, size)
        cols = min(c.vocab_size, 4 * c.hidden_sizes[0] * size // class_entries)
        cols = max(1, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE or cols) if size > 1 else 1
        return SeparatePasses(statistics_schedule(c, c.chunk_rows, cols), dx_schedule, _block_layout(c, cols, rows))

    def backward(self, ctx: PassContext) -> None:
        self.dx_schedule.backward(ctx)
        compute_blocks(ctx, self.layout, 0, ctx.vocab_size, with_dx=False)

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.layout.rows, self.layout.block_widths(c.vocab_size)

    def describe(self, c: Case) -> str:
        return f"{super().describe(c)} for dW, {self.dx_schedule.describe(c)} for dX"


def block_rows(c: Case, chunk_rows: int) -> tuple[int, int]:
    """Return the number of tokens of a block's tile, and the entries of the tile and of sums of dW for each class.

    A tile has all tokens of the call, whose dW needs no sum, or those of `ChunkOptions.chunk_rows`. If ignored tokens
    are dropped, hidden states are copied, so a tile has only `chunk_rows` tokens."""
    rows = min(chunk_rows, c.chunk_rows) if c.skip_ignored else c.chunk_rows
    return rows, max(1, c.num_tokens if rows == c.chunk_rows else rows + 2 * c.hidden_sizes[0])


def _block_layout(c: Case, cols: int, rows: int | None = None) -> BlockLayout:
    """Return the layout of blocks of `cols` classes, and of more classes where the tile is borrowed."""
    rows, dtypes = rows or c.chunk_rows, c.dtypes(True)
    can_borrow = c.can_borrow and rows >= c.num_tokens and cols < c.vocab_size
    overlaps_logits = not c.supports_fused_products and dtypes.can_overlap(rows, cols)
    entry_size = dtypes.logits.itemsize // dtypes.logits_grad.itemsize if overlaps_logits else 1
    max_borrowed_cols = c.default_chunk_entries // rows // entry_size
    return BlockLayout(rows, cols, c.hidden_sizes[0] if can_borrow else 0, max_borrowed_cols, entry_size)


def compute_blocks(
    ctx: PassContext, layout: BlockLayout, start: int, stop: int, with_dx: bool = True, with_dw: bool = True
) -> None:
    """Compute dW and the gradient of the bias of the classes from `start` to `stop`, and add these classes to dX."""
    separate_tile = ctx.new_gradient_tile(layout.rows, layout.cols)
    sums_of_block = block_sum_builder(ctx, layout.rows, layout.cols)
    borrowed = layout.borrowed_blocks(start, stop)
    others = ctx.split_range(slice(borrowed[-1].stop if borrowed else start, stop), layout.cols)
    for block in itertools.chain(ctx.borrowed_blocks(borrowed), others):
        cols, dw_sums = block.stop - block.start, sums_of_block(block) if with_dw else {}
        for chunk in ctx.chunks(layout.rows):
            tile = separate_tile
            if cols > layout.cols:  # The tile of this block is borrowed.
                rows, behind = chunk.stop - chunk.start, ctx.dw_memory()[block.stop :]
                tile = tile._replace(memory=borrow(behind, rows, cols, layout.entry_size))
            dlogits = ctx.compute_gradient(chunk, block, tile)
            if with_dx:
                add_to_dx(ctx, dlogits, chunk, block)
            if with_dw:
                add_to_dw(ctx, dlogits, chunk, block, dw_sums)
        finish_sums(dw_sums)
    ctx.release_inputs()
