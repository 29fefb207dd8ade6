"""Losses and statistics without gradients."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.problem import LogprobSpec
from flce.engine.case import Case, ceil_div
from flce.engine.schedules.schedule import NONE, Schedule, up_to
from flce.engine.stage import Stage


def statistics(c: Case, rows: int, cols: int) -> Statistics:
    """The schedule for statistics alone, beside tiles of this size for gradients."""
    if not c.in_registers:
        return Statistics(*c.statistics_tile(rows, cols, False))
    # The product with an epilogue does not find the largest logits of a row. They take another product.
    top = isinstance(c.spec, LogprobSpec) and c.spec.top_k > 0
    largest = Largest(*c.statistics_tile(rows, cols, False)) if top else None
    return Statistics(c.statistics_tile(rows, cols, True)[0], c.vocab_size, largest)


@dataclass(frozen=True)
class Statistics(Schedule):
    """Logits of some tokens and some classes are in memory at a time; a running state goes from tile to tile. Or they
    stay in registers: a product leaves two numbers for each token and 256 classes."""

    rows: int
    cols: int
    largest: Largest | None = None

    sized_by_tokens = False  # but by logits in memory

    @classmethod
    def sizes(cls, c: Case) -> range:
        return NONE if c.needs.any else up_to(c.chunk_rows * c.vocab_size)

    @classmethod
    def sized(cls, c: Case, size: int) -> Statistics:
        if c.options.strategy == "vocab":
            return statistics(c, c.chunk_rows, max(1, size // c.chunk_rows))
        return statistics(c, max(1, size // c.vocab_size), min(size, c.vocab_size))

    def forward(self, s: Stage) -> None:
        logits = None if s.in_registers else s.new_tile(self.rows, self.cols, s.dtypes.logits)
        for part in s.chunks(self.rows):
            s.statistics(s.inputs(part), part, logits)
        if self.largest is not None:
            self.largest.forward(s)

    def tiles(self, c: Case) -> tuple[int, list[int]]:
        return self.rows, [self.cols] * ceil_div(c.vocab_size, self.cols)


@dataclass(frozen=True)
class Largest(Schedule):
    """The largest logits of each token, from logits in memory, beside statistics that leave none there."""

    rows: int
    cols: int

    def forward(self, s: Stage) -> None:
        logits = s.new_tile(self.rows, self.cols, s.dtypes.logits)
        for part in s.chunks(self.rows):
            for cols in s.blocks(self.cols):
                block = logits[: part.stop - part.start, : cols.stop - cols.start]
                s.write_logits(s.inputs(part), cols, block)
                s.collect(block, part, cols)


@dataclass(frozen=True)
class Deferred(Schedule):
    """Statistics in forward. The gradients follow in backward, when every row's normalizer and upstream are known."""

    statistics: Schedule

    deferred = True

    def forward(self, s: Stage) -> None:
        self.statistics.forward(s)
