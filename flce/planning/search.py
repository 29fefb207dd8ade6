"""Which schedule a call takes, and of which size.

* **Without a budget** a rule says so: see `defaults`.
* **With a budget** that the default does not keep, the plan is the fastest that keeps it, of all schedules and sizes
  (`_fastest`). What a plan takes in memory and time is counted: see `dry_run`.
* Without a budget the workspace is at most `MEMORY_SHARE` of the device's memory, which is then the budget.

Every call of one shape and options has the same plan on devices of one kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from flce.core.gemm import ALIGNMENT
from flce.engine.case import Case
from flce.engine.schedules import SCHEDULES, Schedule
from flce.planning.defaults import default_plan
from flce.planning.plan import ChunkPlan, plan_for_size, smallest_near

MEMORY_SHARE = 1 / 24
# CUDA's caching allocator hands out blocks that are up to 1 MiB larger than asked for. What it counts as allocated is
# to keep the budget too.
ALLOCATOR_SLACK = {"cuda": 2 << 20}


class BudgetError(ValueError):
    """No plan of a case keeps its budget."""

    def __init__(self, c: Case, least: int) -> None:
        options, self.least = c.options, least
        super().__init__(
            f"max_workspace_bytes={options.max_workspace_bytes} is too small for {c} with "
            f"strategy={options.strategy!r} and chunk_rows={options.chunk_rows}: the least is {least} bytes"
        )


@functools.lru_cache(maxsize=64)
def plan_for_shard(plan: ChunkPlan, vocab_size: int) -> ChunkPlan:
    """The plan of a process that has fewer classes than the one that `plan` is for. It meets the others as that does.
    Smaller gradients are returned, so that more of the same memory may count as workspace: that is no error."""
    c = replace(plan.case, vocab_size=vocab_size)
    schedule = plan.schedule.for_shard(c)
    if schedule is not None:
        return ChunkPlan(c, plan.strategy, schedule)
    c = replace(c, options=replace(c.options, strategy=plan.strategy))  # type: ignore[arg-type]
    return _default_or_fastest(c) or _smallest_plan(c)


def make_plan(c: Case) -> ChunkPlan:
    """The plan of a case, searched anew."""
    c.check()
    plan = _default_or_fastest(c)
    if plan is not None:
        return plan
    least = _smallest_plan(c)
    if c.options.max_workspace_bytes is None:
        return least
    raise BudgetError(c, least.workspace_bytes)


plan_for_case = functools.lru_cache(maxsize=1024)(make_plan)


def _default_or_fastest(c: Case) -> ChunkPlan | None:
    """The plan of a case; None: there is none that keeps the budget."""
    default, budget = default_plan(c), c.options.max_workspace_bytes
    # Blocks of classes are for saving memory: a budget says how much there is of it.
    searched = budget is not None and c.options.strategy == "vocab"
    if budget is None:
        if c.device.memory is None:
            return default
        budget = int(c.device.memory * MEMORY_SHARE)
    most = int(budget)
    for limit in (most - ALLOCATOR_SLACK.get(c.device_type, 0), most):
        if default.workspace_bytes <= limit and not searched:
            return default
        fastest = _fastest(c, limit)
        if fastest is not None:
            return fastest
    return None


def _allowed_schedules(c: Case) -> Iterator[tuple[type[Schedule], range]]:
    """Schedules for a call, and their sizes."""
    for kind in SCHEDULES:
        if c.needs.any and c.spec.reduction == "none" and not kind.deferred:
            continue
        sizes, rows = kind.sizes(c), c.chunk_rows
        if c.options.chunk_rows is not None and kind.strategy == "tokens" and kind.sized_by_tokens:
            sizes = range(max(rows, sizes.start), min(rows + 1, sizes.stop))
        if sizes and (c.options.strategy in ("auto", kind.strategy) or not c.needs.any):
            yield kind, sizes


def _fastest(c: Case, budget: int) -> ChunkPlan | None:
    """The fastest of all plans that keep the budget; None if none does."""
    best = None
    for kind, sizes in _allowed_schedules(c):
        # Not worth a search if it is slower even with all the memory that it could use.
        if best is None or plan_for_size(c, kind, sizes[-1]).seconds < best.seconds:
            plan = _largest_plans(c, kind, sizes, budget)
            if best is None or (plan is not None and plan.seconds < best.seconds):
                best = plan
    return best


def _largest_plans(c: Case, kind: type[Schedule], sizes: range, budget: int) -> ChunkPlan | None:
    """The best plan of one schedule: of the largest size that keeps the budget, or of some sizes below."""
    size = _largest_size(lambda size: plan_for_size(c, kind, size).workspace_bytes, sizes, budget)
    if size is None:
        return None
    below = [size, *(size // multiple * multiple for multiple in kind.multiples)]
    if kind.sized_by_tokens:
        below += [c.equal_chunk_rows(size) for size in below]
    plans = [plan_for_size(c, kind, size) for size in dict.fromkeys(below) if size in sizes]
    return smallest_near([plan for plan in plans if plan.workspace_bytes <= budget], 1.005)


def _largest_size(bytes_of: Callable[[int], int], sizes: range, budget: int) -> int | None:
    """The largest size, or nearly so, with ``bytes_of(size) <= budget``; None if there is none.

    What is taken is nearly affine in the size: most tries are where the line through the last two meets the budget.
    """
    low, high = sizes[0] - 1, sizes[-1]  # the largest size known to fit, and the smallest known not to
    bytes_high = bytes_of(high)
    if bytes_high <= budget:
        return high
    last, size = (high, bytes_high), max(sizes[0], 128)
    while high - low > max(1, low // 64):
        size = min(max(size, low + 1), high - 1)
        if size // ALIGNMENT * ALIGNMENT > low:
            size = size // ALIGNMENT * ALIGNMENT
        bytes_ = bytes_of(size)
        low, high = (size, high) if bytes_ <= budget else (low, size)
        slope = (bytes_ - last[1]) / (size - last[0])
        # The number of sizes that this one is below the budget, or above it.
        more = (budget - bytes_) / slope if slope > 0 else 0.0
        if low == size and 0 < more < max(1, low / 64):
            break
        last, size = (size, bytes_), size + math.floor(more) if low < size + more < high else (low + high) // 2
    return low if low in sizes else None


def _smallest_plan(c: Case) -> ChunkPlan:
    """The plan with the least workspace.

    Not always that of the smallest size: a single tile needs no sums over tiles, an aligned one no float32 copy.
    """
    plans = [
        plan_for_size(c, kind, size)
        for kind, sizes in _allowed_schedules(c)
        for size in {sizes[0], sizes[-1], ALIGNMENT}
        if size in sizes
    ]
    return min([*plans, default_plan(c)], key=lambda plan: plan.workspace_bytes)
