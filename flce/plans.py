"""What a call will do: a schedule of some size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from flce.case import Case, Dtypes, dtype_text
from flce.counting import Count, count
from flce.schedules import Schedule


@dataclass(frozen=True)
class ChunkPlan:
    """What a call will do. Made by `flce.plan`; ``str(plan)`` is a summary."""

    case: Case
    strategy: str
    """"tokens" or "vocab"."""
    schedule: Schedule

    @property
    def deferred(self) -> bool:
        """Whether gradients are made in backward rather than in forward."""
        return self.schedule.deferred

    @functools.cached_property
    def dtypes(self) -> Dtypes:
        return self.case.dtypes(self.deferred)

    @property
    def products(self) -> bool:
        """Whether logits stay in registers where they are wanted for statistics or a second time."""
        return self.case.products and self.schedule.products

    @functools.cached_property
    def _count(self) -> Count:
        return count(self.case, self.schedule)

    @property
    def workspace_bytes(self) -> int:
        """Peak bytes above the inputs and the returned gradients, over forward and backward."""
        return self._count.workspace_bytes

    @property
    def flops(self) -> int:
        """Flops of the matrix products of forward and backward."""
        return self._count.flops

    @property
    def seconds(self) -> float:
        """An estimate for the device, with nothing else to do."""
        return self._count.seconds

    def __str__(self) -> str:
        c = self.case
        one = 2 * c.num_tokens * sum(c.hidden_sizes) * c.vocab_size  # flops of a product
        logits = "not in memory" if self.products else f"in {dtype_text(self.dtypes.logits)}"
        return (
            f"{c} on {c.device_type} ({c.backend} backend): strategy '{self.strategy}', "
            f"{type(self.schedule).__name__}: {self.schedule.describe(c)}; logits {logits}; "
            f"{self.flops / one if one else 0:.3g} matrix products ({self.flops / 1e12:.3g} TFLOP); "
            f"workspace {self.workspace_bytes / 2**20:.1f} MiB"
        )


def plan_of(c: Case, kind: type[Schedule], size: int) -> ChunkPlan:
    """A call with a schedule of some size."""
    without = "vocab" if c.options.strategy == "vocab" else "tokens"
    return _known(c, kind.strategy if c.needs.any else without, kind.sized(c, size))


_known = functools.lru_cache(maxsize=4096)(ChunkPlan)  # each is counted once in a search


def smallest_near(plans: Sequence[ChunkPlan], within: float) -> ChunkPlan:
    """The smallest of the plans that take at most `within` times as long as the fastest."""
    limit = within * min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= limit), key=lambda plan: plan.workspace_bytes)
