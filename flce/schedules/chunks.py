"""Some tokens and all classes at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flce.case import Case
from flce.schedules.schedule import NONE, Schedule, up_to
from flce.schedules.statistics import Deferred, statistics
from flce.slices import first
from flce.stage import Stage
from flce.sums import WeightSum, add_bias, add_input, weight_sums


@dataclass(frozen=True)
class Chunks(Schedule):
    """Three products: logits of a chunk, and its share of dX and dW. Losses and gradients are made in one pass."""

    rows: int

    products = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        if not c.needs.any or c.spec.reduction == "none":
            return NONE
        least = c.unnormalized_rows  # from there on those are faster
        return up_to(c.num_tokens) if least is None or c.few_logits else range(1, least)

    @classmethod
    def sized(cls, c: Case, size: int) -> Schedule:
        return Chunks(size)

    def forward(self, s: Stage) -> None:
        logits, dlogits = s.logits_and_gradient(self.rows, s.vocab_size)
        sums = weight_sums(s, self.rows)
        for rows in s.chunks(self.rows):
            z, dz = (first(tile, slice(0, rows.stop - rows.start)) for tile in (logits, dlogits))
            s.write_logits(s.inputs(rows), s.classes, z)
            s.statistics_and_gradient(z, dz, rows)
            _add(s, dz, rows, sums)
        _finish(sums)


@dataclass(frozen=True)
class DeferredChunks(Deferred):
    """Four products: the logits are made twice. For an upstream gradient of each token."""

    rows: int

    @classmethod
    def sizes(cls, c: Case) -> range:
        return up_to(c.num_tokens) if c.needs.any and c.spec.reduction == "none" else NONE

    @classmethod
    def sized(cls, c: Case, size: int) -> Schedule:
        return DeferredChunks(statistics(c, size, c.vocab_size), size)

    def backward(self, s: Stage) -> None:
        logits, dlogits = s.logits_and_gradient(self.rows, s.vocab_size)
        sums = weight_sums(s, self.rows)
        for rows in s.chunks(self.rows):
            z, dz = (first(tile, slice(0, rows.stop - rows.start)) for tile in (logits, dlogits))
            s.gradient(s.inputs(rows), rows, s.classes, z, dz)
            _add(s, dz, rows, sums)
        _finish(sums)


def _add(s: Stage, dlogits: Tensor, rows: slice, sums: Mapping[int, WeightSum]) -> None:
    for k, x in enumerate(s.inputs(rows)):
        if k in s.wanted_inputs:
            add_input(s, k, dlogits, rows, s.classes)
        if k in sums:
            sums[k].add(dlogits, x)
    add_bias(s, dlogits, s.classes)


def _finish(sums: Mapping[int, WeightSum]) -> None:
    for total in sums.values():
        total.finish()
