"""Some tokens and all classes at a time."""

from __future__ import annotations

from dataclasses import dataclass

from flce.core.slices import first
from flce.engine.case import Case
from flce.engine.schedules.schedule import NONE, Schedule, up_to
from flce.engine.schedules.statistics import Deferred, statistics
from flce.engine.stage import Stage
from flce.engine.sums import add_tile, finish, weight_sums


@dataclass(frozen=True)
class Chunks(Schedule):
    """Three products: logits of a chunk, and its share of dX and dW. Losses and gradients are made in one pass."""

    rows: int

    in_registers = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        if not c.needs.any or c.spec.reduction == "none":
            return NONE
        least = c.unnormalized_rows  # from there on those are faster
        return up_to(c.num_tokens) if least is None or c.few_logits else range(1, least)

    @classmethod
    def sized(cls, c: Case, size: int) -> Chunks:
        return Chunks(size)

    def forward(self, s: Stage) -> None:
        logits, dlogits = s.logits_and_gradient(self.rows, s.vocab_size)
        sums = weight_sums(s, self.rows)
        for part in s.chunks(self.rows):
            z, dz = (first(tile, slice(0, part.stop - part.start)) for tile in (logits, dlogits))
            s.write_logits(s.inputs(part), s.classes, z)
            s.statistics_and_gradient(z, dz, part)
            add_tile(s, dz, part, s.classes, sums)
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
        logits, dlogits = s.logits_and_gradient(self.rows, s.vocab_size)
        sums = weight_sums(s, self.rows)
        for part in s.chunks(self.rows):
            z, dz = (first(tile, slice(0, part.stop - part.start)) for tile in (logits, dlogits))
            s.gradient(s.inputs(part), part, s.classes, z, dz)
            add_tile(s, dz, part, s.classes, sums)
        finish(sums)
