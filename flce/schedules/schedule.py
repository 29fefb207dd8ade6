"""What a schedule is."""

from __future__ import annotations

from typing import ClassVar

from flce.stage import Stage


class Schedule:
    """One way through the tiles of logits: a frozen dataclass of sizes, and the loops.

    Attributes:
        deferred: whether gradients are made in backward, from logits that are made again.
        counts_on_device: whether the first chunk can be begun before the host knows how many tokens there are.
    """

    deferred: ClassVar[bool] = False
    counts_on_device: ClassVar[bool] = False

    def forward(self, s: Stage) -> None:
        """Losses and, unless `deferred`, gradients."""
        raise NotImplementedError

    def backward(self, s: Stage) -> None:
        """Gradients, if `deferred`."""
        raise NotImplementedError
