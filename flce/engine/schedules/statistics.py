"""Schedules for losses and statistics without gradients, and the base class of deferred schedules."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.problem import LogprobSpec
from flce.engine.case import Case
from flce.engine.pass_context import PassContext
from flce.engine.schedules.schedule import NO_SIZES, Schedule, sizes_up_to


def statistics_schedule(c: Case, rows: int, cols: int) -> Statistics:
    """Return the schedule for statistics. `rows`, `cols`: see `Case.statistics_tile_size`."""
    if not c.supports_fused_products:
        return Statistics(*c.statistics_tile_size(rows, cols, False))
    # The fused product does not compute the largest logits of a row. They need another product.
    has_top_k = isinstance(c.spec, LogprobSpec) and c.spec.top_k > 0
    top_k = TopKLogits(*c.statistics_tile_size(rows, cols, False)) if has_top_k else None
    return Statistics(c.statistics_tile_size(rows, cols, True)[0], c.vocab_size, top_k)


@dataclass(frozen=True)
class Statistics(Schedule):
    """Loop over chunks and blocks for statistics. One product. A running state of each row is updated after each tile.
    Or logits stay in registers: a fused product writes two or more numbers for each row and 256 classes."""

    rows: int
    cols: int
    top_k: TopKLogits | None = None

    sized_by_tokens = False  # A size is a number of logits in memory.

    @classmethod
    def sizes(cls, c: Case) -> range:
        return NO_SIZES if c.needs.any else sizes_up_to(c.chunk_rows * c.vocab_size)

    @classmethod
    def from_size(cls, c: Case, size: int) -> Statistics:
        if c.options.strategy == "vocab":
            return statistics_schedule(c, c.chunk_rows, max(1, size // c.chunk_rows))
        return statistics_schedule(c, max(1, size // c.vocab_size), min(size, c.vocab_size))

    def forward(self, ctx: PassContext) -> None:
        logits = None if ctx.in_registers else ctx.new_tile(self.rows, self.cols, ctx.dtypes.logits)
        for chunk in ctx.chunks(self.rows):
            ctx.compute_statistics(chunk, logits)
        if self.top_k is not None:
            self.top_k.forward(ctx)


@dataclass(frozen=True)
class TopKLogits:
    """Loop over chunks and blocks for the largest logits of each token. It follows statistics in registers, which
    cannot compute them."""

    rows: int
    cols: int

    def forward(self, ctx: PassContext) -> None:
        logits = ctx.new_tile(self.rows, self.cols, ctx.dtypes.logits)
        for chunk in ctx.chunks(self.rows):
            for block in ctx.split_range(ctx.all_classes, self.cols):
                tile = logits[: chunk.stop - chunk.start, : block.stop - block.start]
                ctx.write_logits(ctx.term_inputs(chunk), block, tile)
                ctx.collect_top_k(tile, chunk, block)


@dataclass(frozen=True)
class Deferred(Schedule):
    """Base of schedules with statistics in forward and gradients in backward, where every row's normalizer and upstream
    gradient are known."""

    statistics: Schedule

    deferred = True

    def forward(self, ctx: PassContext) -> None:
        self.statistics.forward(ctx)
