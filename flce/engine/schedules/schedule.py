"""The base classes of schedules, and the schedule of losses and statistics without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flce.core.problem import LogprobSpec
from flce.engine.case import Case, ceil_div
from flce.engine.pass_context import PassContext

# The sizes of a schedule that does not support a case.
NO_SIZES = range(0)


def sizes_up_to(size: int) -> range:
    """Return the range of sizes from 1 to `size`, or to 1 if `size` is 0."""
    return range(1, max(1, size) + 1)


class Schedule:
    """A loop over the tiles of logits: a frozen dataclass of sizes with the methods `forward` and `backward`.

    The planner chooses one of several sizes: usually tokens of a chunk or classes of a block. A larger size needs more
    memory and should be faster. All processes of a divided head run the schedule of the process with most classes, so
    that they call the same collectives: what depends on the number of classes is computed from the context.

    Attributes:
        strategy: "tokens" or "vocab", as users choose it. With "vocab" gradients are deferred.
        deferred: True if gradients are computed in backward from recomputed logits. A schedule that is not deferred
            cannot be used with ``reduction="none"``, because the upstream gradient of each token is not known in
            forward.
        can_count_on_device: True if the first chunk can be launched before the host knows the number of selected
            tokens.
        uses_fused_products: True if logits stay in registers where `Case.supports_fused_products`. False for a schedule
            that computes losses and gradients of a tile in one pass over its logits.
        samples: True if gradients are computed from sampled entries, without products of all logits.
        sized_by_tokens: True if a size is a number of tokens. `ChunkOptions.chunk_rows` then sets the size. Any other
            schedule must apply `Case.chunk_rows` itself.
        multiples: numbers. A size that is divisible by one of them may be faster than a slightly larger size.
    """

    strategy: ClassVar[str] = "tokens"
    deferred: ClassVar[bool] = False
    can_count_on_device: ClassVar[bool] = False
    uses_fused_products: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    sized_by_tokens: ClassVar[bool] = True
    multiples: ClassVar[tuple[int, ...]] = (16, 128, 256)

    @classmethod
    def sizes(cls, c: Case) -> range:
        """Return the possible sizes in increasing order; `NO_SIZES` if the schedule does not support the case."""
        raise NotImplementedError

    @classmethod
    def from_size(cls, c: Case, size: int) -> Schedule:
        """Return the schedule of one of these sizes. By default the size is the only field."""
        return cls(size)  # type: ignore[call-arg]

    def forward(self, ctx: PassContext) -> None:
        """Compute losses and, unless `deferred`, gradients."""
        raise NotImplementedError

    def backward(self, ctx: PassContext) -> None:
        """Compute the gradients, if `deferred`."""
        raise NotImplementedError

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        """Return the number of tokens of a chunk and the number of classes of each block."""
        cols = getattr(self, "cols", c.vocab_size)
        return getattr(self, "rows", c.num_tokens), [cols] * ceil_div(c.vocab_size, cols)

    def describe(self, c: Case) -> str:
        rows, widths = self.tile_sizes(c)
        chunks, blocks = ceil_div(c.num_tokens, max(1, rows)), len(widths)
        text = f"{chunks} chunks of {rows} tokens" if chunks > 1 else f"all {c.num_tokens} tokens at once"
        if blocks == 1:
            return f"{text}, all classes"
        sizes = f"{widths[0]}" if len(set(widths[:-1])) == 1 else f"{max(widths)} to {widths[-2]}"
        return f"{text}, {blocks} blocks of {sizes} classes"


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
