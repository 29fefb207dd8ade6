"""Some tokens and all classes at a time."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.slices import first
from flce.engine.case import Case
from flce.engine.exponentials import Exponentials
from flce.engine.schedules.schedule import NONE, Schedule, up_to
from flce.engine.schedules.statistics import Deferred, statistics
from flce.engine.stage import Stage
from flce.engine.sums import add_tile, finish, weight_sums


@dataclass(frozen=True)
class Chunks(Schedule):
    """Three products: logits of a chunk, and its share of dX and dW. Losses and gradients are made in one pass, over
    all logits of a chunk."""

    rows: int

    in_registers = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        return up_to(c.num_tokens) if c.needs.any and c.spec.reduction != "none" else NONE

    @classmethod
    def sized(cls, c: Case, size: int) -> Chunks:
        return cls(size)

    def forward(self, s: Stage) -> None:
        logits, dlogits = s.logits_and_gradient(self.rows, s.vocab_size)
        sums = weight_sums(s, self.rows)
        for part in s.chunks(self.rows):
            z, dz = (first(tile, slice(0, part.stop - part.start)) for tile in (logits, dlogits))
            s.write_logits(s.inputs(part), s.classes, z)
            s.statistics_and_gradient(z, dz, part)
            add_tile(s, dz, part, s.classes, sums)
        finish(sums)

    def of_slice(self, c: Case) -> Chunks:
        return self


@dataclass(frozen=True)
class NormalizedChunks(Chunks):
    """The same, with logits in memory a block at a time. What is kept of a block are exponentials, which become the
    gradient when the row is complete."""

    @classmethod
    def sizes(cls, c: Case) -> range:
        return super().sizes(c) if c.in_blocks and not c.unnormalized else NONE

    def forward(self, s: Stage) -> None:
        tile, e = s.gradient_tile(self.rows, s.vocab_size), Exponentials(s)
        sums = weight_sums(s, self.rows)
        for part in s.chunks(self.rows):
            dlogits = first(tile, slice(0, part.stop - part.start))
            e.make(s.inputs(part), [dlogits], part)
            e.to_gradient(dlogits, part)
            add_tile(s, dlogits, part, s.classes, sums)
        finish(sums)


@dataclass(frozen=True)
class DeferredChunks(Deferred):
    """Four products: the logits are made twice. For an upstream gradient of each token."""

    rows: int

    @classmethod
    def sizes(cls, c: Case) -> range:
        return up_to(c.num_tokens) if c.needs.any and c.spec.reduction == "none" else NONE

    @classmethod
    def sized(cls, c: Case, size: int) -> DeferredChunks:
        return DeferredChunks(statistics(c, size, c.vocab_size), size)

    def backward(self, s: Stage) -> None:
        tile = s.gradient_tile(self.rows, s.vocab_size, again=s.whole(self.rows))
        sums = weight_sums(s, self.rows)
        for part in s.chunks(self.rows):
            dlogits = first(tile, slice(0, part.stop - part.start))
            s.gradient(s.inputs(part), part, s.classes, dlogits)
            add_tile(s, dlogits, part, s.classes, sums)
        finish(sums)
