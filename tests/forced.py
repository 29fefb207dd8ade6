"""Calls by a schedule that a test names, whatever the planner would choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flce.engine.borrowing import exponential_tiles
from flce.engine.case import Case
from flce.engine.schedules import Schedule
from flce.engine.schedules.unnormalized import Borrowed, Unnormalized
from flce.ops import linear_call
from flce.planning.plan import ChunkPlan
from flce.planning.search import make_plan
from tests import helpers


class _ForcedPlanner:
    """Stands for `plan_for_case`."""

    def __init__(self, make: Callable[[Case], Schedule | None], before: Callable[..., ChunkPlan]) -> None:
        self._make, self._before = make, before
        self.plans: list[ChunkPlan] = before.plans if isinstance(before, _ForcedPlanner) else []

    def plan(self, c: Case) -> ChunkPlan:
        schedule = self._make(c)
        if schedule is not None:
            return ChunkPlan(c, schedule.strategy, schedule)
        return self._before.plan(c) if isinstance(self._before, _ForcedPlanner) else make_plan(c)

    def __call__(self, c: Case) -> ChunkPlan:
        self.plans.append(self.plan(c))
        return self.plans[-1]


def force(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], Schedule | None]) -> list[ChunkPlan]:
    """Every call takes the schedule that `make` names; where that is None that of the last `force`, or the planner's.
    `plan_for` knows of it.

    Returns the plans that calls take from the first `force` on, one for each forward and each backward.
    """
    choice = _ForcedPlanner(make, vars(linear_call)["plan_for_case"])
    monkeypatch.setattr(linear_call, "plan_for_case", choice)
    monkeypatch.setattr(helpers, "make_plan", choice.plan)
    return choice.plans


def unnormalized(c: Case) -> Schedule | None:
    """All tokens at once, or as many as were asked for; None where that is for no head."""
    if c.options.strategy == "vocab" or not Unnormalized.sizes(c):
        return None
    return Unnormalized(max(1, min(c.num_tokens, c.options.chunk_rows or c.num_tokens)))


def borrowed(count: int) -> Callable[[Case], Schedule | None]:
    """So many tiles in the memory of the weight gradient, where that is possible and there is as much of it."""

    def make(c: Case) -> Schedule | None:
        possible = Unnormalized.sizes(c) and c.in_registers and c.needs.weights[0] and not c.needs.bias
        if not possible or c.options.strategy == "vocab" or c.skip_ignored or c.options.chunk_rows:
            return unnormalized(c)
        tiles = exponential_tiles(c.num_tokens, c.hidden_sizes[0], c.vocab_size, count)
        assert len(tiles) == count + 1, "this problem is too small for the test"
        return Borrowed(tiles)

    return make
