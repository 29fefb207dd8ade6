"""Schedules whose tiles have some tokens and all classes."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.slices import slice_rows
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.schedules.schedule import NO_SIZES, Deferred, Schedule, sizes_up_to, statistics_schedule
from flce.engine.sums import add_to_dw, add_to_dx, build_dw_sums, finish_sums


@dataclass(frozen=True)
class Chunks(Schedule):
    """Loop over chunks: logits, dX and dW. Three products. Losses and gradients are computed in one pass over all
    logits of a chunk."""

    rows: int

    uses_fused_products = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if c.needs.any and not c.must_defer else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> Chunks:
        return cls(size)

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
