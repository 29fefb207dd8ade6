"""`force` replaces the planner's choice of a schedule. Tests use it to run a particular schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flce.engine.borrowing import BlockLayout
from flce.engine.case import Case
from flce.engine.schedules.gradients import Blocks
from flce.engine.schedules.schedule import Schedule, Statistics
from flce.engine.schedules.unnormalized import Borrowed, Unnormalized
from flce.ops import linear_operators
from flce.planning.plan import ChunkPlan
from flce.planning.search import make_plan
from tests import helpers


class _ForcedPlanner:
    """A replacement of `plan_for_case`."""

    def __init__(self, choose: Callable[[Case], Schedule | None], before: Callable[..., ChunkPlan]) -> None:
        self._choose, self._before = choose, before
        self.plans: list[ChunkPlan] = before.plans if isinstance(before, _ForcedPlanner) else []

    def plan(self, c: Case) -> ChunkPlan:
        schedule = self._choose(c)
        if schedule is not None:
            return ChunkPlan(c, schedule.strategy, schedule)
        return self._before.plan(c) if isinstance(self._before, _ForcedPlanner) else make_plan(c)

    def __call__(self, c: Case) -> ChunkPlan:
        self.plans.append(self.plan(c))
        return self.plans[-1]


def force(monkeypatch: pytest.MonkeyPatch, choose: Callable[[Case], Schedule | None]) -> list[ChunkPlan]:
    """Replace the schedule of each call, and of `plan_for`, by the result of `choose`. If it is None, the previous
    `force` or the planner decides.

    Return the list of plans of all calls from the first `force` on, one for each forward and each backward.
    """
    planner = _ForcedPlanner(choose, vars(linear_operators)["plan_for_case"])
    monkeypatch.setattr(linear_operators, "plan_for_case", planner)
    monkeypatch.setattr(helpers, "make_plan", planner.plan)
    return planner.plans


def unnormalized(c: Case) -> Schedule | None:
    """Return `Unnormalized` with all tokens, or with the requested `chunk_rows`; None if the case does not allow it."""
    if c.options.strategy == "vocab" or not Unnormalized.sizes(c):
        return None
    return Unnormalized(max(1, min(c.num_tokens, c.options.chunk_rows or c.num_tokens)))


def blocks_of_16(rows: int) -> Blocks:
    """Return a schedule of all `rows` and blocks of 16 classes."""
    return Blocks(Statistics(rows, 16), BlockLayout(rows, 16))


def borrowed(count: int) -> Callable[[Case], Schedule | None]:
    """Return a function for `force` that chooses `Borrowed` with `count` borrowed tiles if the case allows it."""

    def choose(c: Case) -> Schedule | None:
        is_possible = Unnormalized.sizes(c) and c.supports_fused_products and c.needs.weights[0] and not c.needs.bias
        if not is_possible or c.options.strategy == "vocab" or c.skip_ignored or c.options.chunk_rows:
            return unnormalized(c)
        schedule = Borrowed(count)
        tiles = schedule.place_tiles(c.num_tokens, c.hidden_sizes[0], c.vocab_size)
        assert len(tiles) == count + 1, "this problem is too small for the test"
        return schedule

    return choose
