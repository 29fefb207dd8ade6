"""What a call will do: a schedule of some size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

from flce.engine.case import Case, dtype_text
from flce.engine.passes import Plan
from flce.engine.schedules import Schedule
from flce.planning.collectives import Collective
from flce.planning.dry_run import PlanCosts, count_costs


class ChunkPlan(Plan):
    """What a call will do. Made by `flce.plan`; ``str(plan)`` is a summary."""

    device_kind: str | None = None
    """The device that it was made for, in words; None: that of the call."""

    def made_for(self, device_kind: str) -> ChunkPlan:
        """The same plan, whose summary names a device."""
        named = copy.copy(self)
        vars(named)["device_kind"] = device_kind  # which no pass depends on
        return named

    @functools.cached_property
    def _costs(self) -> PlanCosts:
        return count_costs(self)

    @property
    def workspace_bytes(self) -> int:
        """Peak bytes above the inputs and the returned gradients, over forward and backward."""
        return self._costs.workspace_bytes

    @property
    def retained_workspace_bytes(self) -> int:
        """The same for a backward with ``retain_graph=True``, which leaves gradients that forward made with the graph,
        and returns copies of them."""
        return self._costs.retained_workspace_bytes

    @property
    def flops(self) -> int:
        """Work of the matrix products of forward and backward."""
        return self._costs.flops

    @property
    def seconds(self) -> float:
        """An estimate for the device, with nothing else to do, and without `collectives`."""
        return self._costs.seconds

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the processes of a divided head tell each other, over forward and backward."""
        return self._costs.collectives

    def __str__(self) -> str:
        c = self.case
        one = 2 * c.num_tokens * sum(c.hidden_sizes) * c.vocab_size  # flops of a product
        logits = "in registers" if self.in_registers else f"in memory in {dtype_text(self.dtypes.logits)}"
        profile = f", profile {c.device.profile}" if c.device.profile else ""
        return (
            f"{c} on {self.device_kind or c.device_type} ({c.backend} backend{profile}): strategy '{self.strategy}', "
            f"{type(self.schedule).__name__}: {self.schedule.describe(c)}; logits {logits}; "
            f"{self.flops / one if one else 0:.3g} matrix products ({self.flops / 1e12:.3g} TFLOP); "
            f"workspace {self.workspace_bytes / 2**20:.1f} MiB" + "".join(f"; {each}" for each in self.collectives)
        )


def plan_for_size(c: Case, kind: type[Schedule], size: int) -> ChunkPlan:
    """The plan of a call with a schedule of some size."""
    without = "vocab" if c.options.strategy == "vocab" else "tokens"
    return _cached_plan(c, kind.strategy if c.needs.any else without, kind.from_size(c, size))


_cached_plan = functools.lru_cache(maxsize=4096)(ChunkPlan)  # each is counted once in a search


def fastest_near(chosen: ChunkPlan, plans: Sequence[ChunkPlan]) -> ChunkPlan:
    """The fastest of the plans that take about the workspace of one of them."""
    limit = 1.01 * chosen.workspace_bytes
    return min((plan for plan in plans if plan.workspace_bytes <= limit), key=lambda plan: plan.seconds)


def smallest_near(plans: Sequence[ChunkPlan], within: float) -> ChunkPlan:
    """The smallest of the plans that take at most `within` times as long as the fastest."""
    limit = within * min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= limit), key=lambda plan: plan.workspace_bytes)
