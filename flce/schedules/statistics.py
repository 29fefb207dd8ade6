"""Losses and statistics without gradients."""

from __future__ import annotations

from dataclasses import dataclass

from flce.schedules.schedule import Schedule
from flce.stage import Stage


@dataclass(frozen=True)
class Statistics(Schedule):
    """Logits of some tokens and some classes are in memory at a time; a running state goes from tile to tile."""

    rows: int
    cols: int

    def forward(self, s: Stage) -> None:
        logits = s.tile(self.rows, self.cols, s.dtypes.logits)
        for rows in s.chunks(self.rows):
            s.statistics(s.inputs(rows), rows, logits[: rows.stop - rows.start])


@dataclass(frozen=True)
class ProductStatistics(Schedule):
    """Logits stay in registers: a product leaves two numbers for each token and 256 classes."""

    rows: int

    def forward(self, s: Stage) -> None:
        for rows in s.chunks(self.rows):
            s.product_statistics(s.inputs(rows)[0], rows)


@dataclass(frozen=True)
class Deferred(Schedule):
    """Statistics in forward. The gradients follow in backward, when every row's normalizer and upstream are known."""

    statistics: Statistics | ProductStatistics

    deferred = True

    def forward(self, s: Stage) -> None:
        self.statistics.forward(s)
