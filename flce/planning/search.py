"""The choice of a schedule and its size for a case. `flce.plan` and the linear losses call it.

* **Without a budget** the plan follows a rule: see `defaults`. If it needs more than `MEMORY_SHARE` of the device's
  memory, this is a soft limit: see `_limit_softly`. Chunks with E4M3 operands may be smaller, see `_limit_e4m3`.
* **With a budget** that the default exceeds, the plan is the fastest of all schedules and sizes within the budget
  (`_fastest`). Memory and time of a plan are counted: see `dry_run`.

Every call of one shape and options has the same plan on devices of one kind.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from flce.core.gemm import ALIGNMENT
from flce.core.sizes import MIB
from flce.engine.case import Case
from flce.engine.schedules import SCHEDULES, Schedule
from flce.planning.cost_model import least_seconds
from flce.planning.defaults import default_plan
from flce.planning.plan import MEMORY_SHARE, ChunkPlan, plan_for_size, smallest_near

# Without a budget, plans that need more than MEMORY_SHARE of the device's memory are used only if the others take more
# than MAX_SLOWDOWN times as long as the fastest plan within MAX_MEMORY_SHARE. Pages say 1.5: the search may find a plan
# that is 1% slower than the fastest.
MAX_MEMORY_SHARE, MAX_SLOWDOWN = 1 / 8, 1.48
# CUDA's caching allocator returns blocks that are up to 1 MiB larger than requested. The bytes that it counts as
# allocated should be within the budget, too.
ALLOCATOR_SLACK = {"cuda": 2 << 20}


class BudgetError(ValueError):
    """Every plan of a case exceeds the budget."""

    def __init__(self, c: Case, least: int) -> None:
        options, self.least = c.options, least
        super().__init__(
            f"max_workspace_bytes={options.max_workspace_bytes} is too small for {c} with strategy="
            f"{options.strategy!r} and chunk_rows={options.chunk_rows}: the least is {least} bytes: "
            f"give at least {self.least_text!r}"
        )

    @property
    def least_text(self) -> str:
        """The least budget as an argument, rounded up: ``1.25MiB``."""
        return f"{math.ceil(100 * self.least / MIB) / 100:.2f}MiB"


@functools.lru_cache(maxsize=64)
def plan_for_shard(plan: ChunkPlan, vocab_size: int) -> ChunkPlan:
    """Return the plan of a process with fewer classes than the process that `plan` is for. Both call the same
    collectives. The workspace may exceed the budget without an error: the returned gradients are smaller, so that more
    of the same memory counts as workspace."""
    c = replace(plan.case, vocab_size=vocab_size)
    schedule = plan.schedule.for_shard(c)
    if schedule is not None:
        return ChunkPlan(c, plan.strategy, schedule)
    return _best_or_smallest_plan(replace(c, options=replace(c.options, strategy=plan.strategy)))  # type: ignore[arg-type]


def make_plan(c: Case) -> ChunkPlan:
    """Search the plan of a case, without a cache. Raise BudgetError if every plan exceeds the budget."""
    c.check()
    plan, budget = _best_or_smallest_plan(c), c.options.max_workspace_bytes
    if budget is not None and plan.workspace_bytes > int(budget):
        raise BudgetError(c, plan.workspace_bytes)
    return plan


plan_for_case = functools.lru_cache(maxsize=1024)(make_plan)


def _best_or_smallest_plan(c: Case) -> ChunkPlan:
    """Return the best plan of a case, or the smallest if every plan exceeds the budget."""
    default, budget = default_plan(c), c.options.max_workspace_bytes
    if budget is not None:
        # Users choose blocks of classes to save memory. With a budget they can be larger than the default.
        allowed = None if c.options.strategy == "vocab" else default
        return _default_or_fastest(c, allowed, int(budget)) or _smallest_plan(c)
    default = _limit_e4m3(default)
    return default if c.device.memory is None else _limit_softly(default, c.device.memory)


def _limit_softly(default: ChunkPlan, memory: int) -> ChunkPlan:
    """Return the default plan if it needs at most `MEMORY_SHARE` of the memory, or the fastest such plan. If it takes
    more than `MAX_SLOWDOWN` times as long as the fastest plan within `MAX_MEMORY_SHARE`, return the smallest plan that
    does not."""
    c, budget = default.case, int(memory * MAX_MEMORY_SHARE)
    plan = _default_or_fastest(c, default, int(memory * MEMORY_SHARE))
    if plan is default and type(plan.schedule).multiplies_e4m3:  # requested, also if a small call takes longer
        return plan
    fastest = _fastest(c, budget, math.inf if plan is None else plan.seconds / MAX_SLOWDOWN)
    if fastest is None and plan is not None:
        return plan
    # If every plan exceeds the budget, the smallest may have tiles of one token.
    fastest = fastest or _fastest(c, budget + _smallest_plan(c).workspace_bytes)
    assert fastest is not None
    return _smallest_within(fastest, MAX_SLOWDOWN * fastest.seconds)


def _default_or_fastest(c: Case, default: ChunkPlan | None, budget: int) -> ChunkPlan | None:
    """Return `default`, or the fastest plan if it exceeds the budget; None if every plan exceeds it."""
    for limit in (budget - ALLOCATOR_SLACK.get(c.device_type, 0), budget):
        if default is not None and default.workspace_bytes <= limit:
            return default
        fastest = _fastest(c, limit)
        if fastest is not None:
            return fastest
    return None


def _limit_e4m3(plan: ChunkPlan) -> ChunkPlan:
    """Return a plan with at most 1.5 times the workspace of bfloat16 operands, or 1 GiB more, by smaller chunks with
    E4M3 operands. Return `plan` if there is none, or if gradients are deferred: E4M3 operands alone may need more."""
    c, kind = plan.case, type(plan.schedule)
    if not kind.multiplies_e4m3 or kind.deferred or c.options.chunk_rows is not None:
        return plan
    without = plan_for_case(replace(c, options=replace(c.options, grad_dtype=None))).workspace_bytes
    limit = int(max(1.5 * without, without + (1 << 30)))
    return plan if plan.workspace_bytes <= limit else _best_plan_of_schedule(c, kind, kind.sizes(c), limit) or plan


def _allowed_schedules(c: Case) -> Iterator[tuple[type[Schedule], range]]:
    """Yield the schedules that support a case, with their sizes."""
    for kind in SCHEDULES:
        if c.needs.any and c.spec.reduction == "none" and not kind.deferred:
            continue
        sizes, rows = kind.sizes(c), c.chunk_rows
        if c.options.chunk_rows is not None and kind.strategy == "tokens" and kind.sized_by_tokens:
            sizes = range(max(rows, sizes.start), min(rows + 1, sizes.stop))
        if sizes and (c.options.strategy in ("auto", kind.strategy) or not c.needs.any):
            yield kind, sizes


def _fastest(c: Case, budget: int, seconds: float = math.inf) -> ChunkPlan | None:
    """Return the fastest of all plans within the budget; None if every plan exceeds it or takes `seconds` or more."""
    best = None
    for kind, sizes in _allowed_schedules(c):
        # A schedule is skipped if its products or its largest size are slower than the best plan so far.
        if least_seconds(c, kind.deferred) < seconds and plan_for_size(c, kind, sizes[-1]).seconds < seconds:
            plan = _best_plan_of_schedule(c, kind, sizes, budget)
            if plan is not None and plan.seconds < seconds:
                best, seconds = plan, plan.seconds
    return best


def _smallest_within(fastest: ChunkPlan, seconds: float) -> ChunkPlan:
    """Return the plan with the least workspace that takes at most `seconds`."""
    c, plans = fastest.case, [fastest]
    for kind, sizes in _allowed_schedules(c):
        steps = sizes[kind.multiples[0] - 1 :: kind.multiples[0]] or sizes
        plan_for = functools.partial(plan_for_size, c, kind)
        first = bisect.bisect_left(steps, -seconds, key=lambda size: -plan_for(size).seconds)
        plans += [plan_for(size) for size in steps[first : first + 1]]
    return min(plans, key=lambda plan: plan.workspace_bytes)


def _best_plan_of_schedule(c: Case, kind: type[Schedule], sizes: range, budget: int) -> ChunkPlan | None:
    """Return the best plan of one schedule: of the largest size within the budget, or of some smaller sizes."""
    size = _largest_size(lambda size: plan_for_size(c, kind, size).workspace_bytes, sizes, budget)
    if size is None:
        return None
    candidates = [size, *(size // multiple * multiple for multiple in kind.multiples)]
    if kind.sized_by_tokens:
        candidates += [c.equal_chunk_rows(size) for size in candidates]
    plans = [plan_for_size(c, kind, size) for size in dict.fromkeys(candidates) if size in sizes]
    return smallest_near([plan for plan in plans if plan.workspace_bytes <= budget], 1.005)


def _largest_size(bytes_of: Callable[[int], int], sizes: range, budget: int) -> int | None:
    """Return the largest size, or nearly the largest, with ``bytes_of(size) <= budget``; None if there is none.

    Bytes are nearly an affine function of the size: the next size is usually where the line through the last two points
    reaches the budget.
    """
    low, high = sizes[0] - 1, sizes[-1]  # The largest size that fits, and the smallest that does not.
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
        # The distance to the size whose bytes equal the budget.
        more = (budget - bytes_) / slope if slope > 0 else 0.0
        if low == size and 0 < more < max(1, low / 64):
            break
        last, size = (size, bytes_), size + math.floor(more) if low < size + more < high else (low + high) // 2
    return low if low in sizes else None


def _smallest_plan(c: Case) -> ChunkPlan:
    """Return the plan with the least workspace.

    It is not always the smallest size: a single tile needs no sums over tiles, an aligned tile no float32 copy.
    """
    plans = [
        plan_for_size(c, kind, size)
        for kind, sizes in _allowed_schedules(c)
        for size in {sizes[0], sizes[-1], ALIGNMENT}
        if size in sizes
    ]
    return min([*plans, default_plan(c)], key=lambda plan: plan.workspace_bytes)
