"""The choice of a schedule and its size for a case. `flce.plan` and the linear losses call it.

* **Without a budget** the plan follows a rule: see `default_plan`. If it needs more than `MEMORY_SHARE` of the device's
  memory, this is a soft limit: see `_limit_softly`.
* **With a budget** that the default exceeds, the plan is the fastest of all schedules and sizes within the budget
  (`_fastest`). Memory and time of a plan are counted: see `dry_run`.

Every call of one shape and options has the same plan on devices of one kind.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator

from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols
from flce.core.problem import LogprobSpec
from flce.core.sizes import MIB
from flce.engine.case import BLOCK_BYTES, ROW_MULTIPLE, STATISTICS_ROWS, Case, ceil_div
from flce.engine.schedules.gradients import (
    Blocks,
    BlocksAroundSum,
    Chunks,
    ChunksOfBlocks,
    DeferredChunks,
    SeparatePasses,
)
from flce.engine.schedules.sampled import Sampled, default_rows
from flce.engine.schedules.schedule import Schedule, Statistics
from flce.engine.schedules.unnormalized import Borrowed, Recomputed, Unnormalized
from flce.planning.dry_run import rates
from flce.planning.plan import MEMORY_SHARE, ChunkPlan, fastest_near, plan_for_size, smallest_near

SCHEDULES: tuple[type[Schedule], ...] = (
    Statistics,
    Sampled,
    Chunks,
    Unnormalized,
    Borrowed,
    Recomputed,
    DeferredChunks,
    Blocks,
    BlocksAroundSum,
    ChunksOfBlocks,
    SeparatePasses,
)
# Without a budget, plans that need more than MEMORY_SHARE of the device's memory are used only if the others take more
# than MAX_SLOWDOWN times as long as the fastest plan within MAX_MEMORY_SHARE. Pages say 1.5: the search may find a plan
# that is 1% slower than the fastest.
MAX_MEMORY_SHARE, MAX_SLOWDOWN = 1 / 8, 1.48
# CUDA's caching allocator returns blocks that are up to 1 MiB larger than requested. The bytes that it counts as
# allocated should be within the budget, too.
ALLOCATOR_SLACK = {"cuda": 2 << 20}
# Maximum time of the smallest plan, in multiples of the time of the fastest.
NEARLY_AS_FAST = 1.03
# Maximum workspace for results of tokens, or `TOKEN_GROWTH` times the least workspace if that is more: for many tokens
# the float32 sum of dX alone has more bytes, and each block of classes reads and writes this sum. Of these plans the
# smallest within TOKEN_SLOWDOWN is chosen. We measured that larger blocks are not faster: 16384 x 1024 x 151936 takes
# 1.17 times its products with 1057 MiB, and 1.12 times with 352 MiB (H200).
PER_TOKEN_BYTES = 512 << 20
TOKEN_GROWTH = 1.5
TOKEN_SLOWDOWN = 1.005
# Candidates for the number of classes of a block.
CANDIDATE_BLOCK_COLS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768, 65536)
# Maximum N / H with which exponentials are borrowed. With more tokens borrowing saves little memory. Where it saves
# memory, it does not take more time:
#
# | times the bare products | borrowed | not borrowed |
# |-------------------------|----------|--------------|
# | 8192 x 4096 x 128256    | 1.02     | 1.03         |
# | 4096 x 4096 x 128256    | 1.05     | 1.05         |
# | 2048 x 4096 x 128256    | 1.07     | 1.13         |
# | 8192 x 3584 x 152064    | 1.02     | 1.04         |
MAX_BORROWED_RATIO = 4
# A chunk of a frozen head has enough tokens that multiplying takes at least this share of the time to read the weight.
READ_SHARE = 0.9


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
    return default if c.device.memory is None else _limit_softly(default, c.device.memory)


def _limit_softly(default: ChunkPlan, memory: int) -> ChunkPlan:
    """Return the default plan if it needs at most `MEMORY_SHARE` of the memory, or the fastest such plan. If it takes
    more than `MAX_SLOWDOWN` times as long as the fastest plan within `MAX_MEMORY_SHARE`, return the smallest plan that
    does not."""
    c, budget = default.case, int(memory * MAX_MEMORY_SHARE)
    plan = _default_or_fastest(c, default, int(memory * MEMORY_SHARE))
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


def _allowed_schedules(c: Case) -> Iterator[tuple[type[Schedule], range]]:
    """Yield the schedules that support a case, with their sizes."""
    for kind in SCHEDULES:
        if c.needs.any and (c.must_defer or c.samples) and not kind.deferred:
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
        # A schedule is skipped if its largest size is slower than the best plan so far.
        if plan_for_size(c, kind, sizes[-1]).seconds < seconds:
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


# ---------------------------------------------------------------------------------------------------------
# Plans without a budget


def default_plan(c: Case) -> ChunkPlan:
    """Return the plan for a case without a budget.

    * If all logits have at most `DefaultBytes.one_chunk` bytes, all tokens are one chunk: then no gradient is summed
      over chunks. Otherwise chunks have at most `DefaultBytes.chunk` bytes, so that the workspace does not grow with
      the number of tokens. With at most `MAX_BORROWED_RATIO` * H tokens in one chunk, exponentials are borrowed from
      dW.
    * If no gradient of a weight is summed, large chunks are hardly faster. A frozen head has chunks of `_frozen_rows`.
      ``reduction="none"`` chooses the smallest blocks of classes that are nearly as fast as the fastest plan, and then
      the fastest plan of this size. Results of tokens have at most `PER_TOKEN_BYTES`.
    * ``strategy="vocab"`` has blocks of a quarter of `DefaultBytes.chunk`.
    """
    strategy = c.options.strategy
    if not c.needs.any:
        entries = (c.options.chunk_rows or _default_rows(c)) * c.vocab_size
        if strategy == "vocab":
            entries = c.chunk_rows * _default_cols(c)
        return plan_for_size(c, Statistics, min(entries, Statistics.sizes(c)[-1]))
    if strategy == "vocab":
        return plan_for_size(c, Blocks, _default_cols(c))
    if c.samples:
        return plan_for_size(c, Sampled, default_rows(c))
    rows = c.options.chunk_rows
    has_default_rows = rows is None and c.num_tokens > 0 and c.device_type != "cpu"
    if has_default_rows and not c.needs.weights[0]:
        return _plan_for_chunks(c, min(c.num_tokens, _frozen_rows(c)))
    plan = _plan_for_chunks(c, c.equal_chunk_rows(rows or _default_rows(c)))
    has_blocks = has_default_rows or (c.adds_dw and rows is None and c.num_tokens > 0)
    if has_blocks and plan.deferred and strategy == "auto":
        # Logits are computed twice by any deferred schedule. Blocks of classes sum no gradient of a weight. They sum
        # dX, which needs more memory if there are very many tokens.
        blocks = [plan_for_size(c, Blocks, cols) for cols in CANDIDATE_BLOCK_COLS if cols < c.vocab_size]
        plans = [plan, *(other for other in blocks if other.workspace_bytes <= plan.workspace_bytes)]
        if not isinstance(c.spec, LogprobSpec):
            return fastest_near(smallest_near(plans, NEARLY_AS_FAST), plans)
        limit = max(PER_TOKEN_BYTES, TOKEN_GROWTH * min(other.workspace_bytes for other in plans))
        return smallest_near([other for other in plans if other.workspace_bytes <= limit], TOKEN_SLOWDOWN)
    at_once = isinstance(plan.schedule, Unnormalized) and plan.schedule.rows >= c.num_tokens
    if not (at_once and Borrowed.sizes(c)) or c.num_tokens > MAX_BORROWED_RATIO * c.hidden_sizes[0]:
        return plan
    # The float32 gradient of the inputs needs memory, too, so that borrowing may not save any.
    borrowing = (plan_for_size(c, Borrowed, size) for size in reversed(Borrowed.sizes(c)))
    return next((other for other in borrowing if other.workspace_bytes < plan.workspace_bytes), plan)


def _plan_for_chunks(c: Case, rows: int) -> ChunkPlan:
    """Return the plan for chunks of `rows` tokens."""
    few, dtypes = c.has_few_logits and rows >= c.num_tokens, c.dtypes(False)
    kinds = (Chunks,) if few else (Unnormalized, Chunks)
    plan = next(plan_for_size(c, kind, rows) for kind in (*kinds, DeferredChunks) if rows in kind.sizes(c))
    if few or c.backend == "triton" or not dtypes.has_wider_logits or c.options.chunk_rows is not None:
        return plan
    # Float32 logits of a full chunk need twice the memory of their gradient. Chunks of fewer rows, with sums of dW, may
    # need less.
    extra = rows * padded_cols(c.vocab_size) * (dtypes.logits.itemsize - dtypes.logits_grad.itemsize)
    fewer = [c.equal_chunk_rows(max(ROW_MULTIPLE, rows // parts)) for parts in (2, 4)]
    plans = [plan, *(plan_for_size(c, type(plan.schedule), size) for size in fewer)]
    small = (other for other in plans if other.workspace_bytes <= plan.workspace_bytes - extra + BLOCK_BYTES)
    return next(small, min(plans, key=lambda other: other.workspace_bytes))


def _default_rows(c: Case) -> int:
    """Return the number of tokens of a chunk with all classes."""
    if not c.needs.any and c.defaults.statistics is not None:
        return STATISTICS_ROWS
    per_row = padded_cols(c.vocab_size) * _entry_bytes(c)
    if c.dtype.itemsize >= 4:
        limit = c.defaults.chunk_without_sum
    elif c.num_tokens * per_row <= c.defaults.one_chunk:
        limit = c.defaults.one_chunk
    else:
        limit = c.defaults.chunk
    return max(ROW_MULTIPLE, limit // per_row // ROW_MULTIPLE * ROW_MULTIPLE)


def _entry_bytes(c: Case) -> int:
    """Return the bytes of a chunk for each token and class."""
    dtypes = c.dtypes(False)
    gradient = c.must_defer or c.backend == "triton"
    return (dtypes.logits_grad if c.needs.any and gradient else dtypes.logits).itemsize


def _default_cols(c: Case) -> int:
    """Return the number of classes of a block with all tokens. A block has a quarter of the bytes of a chunk, because
    users choose `vocab` to save memory. With smaller chunks it is not wider: its dW is summed over chunks."""
    cols = c.default_chunk_entries // 4 // max(1, c.num_tokens)
    return min(c.vocab_size, max(COLUMN_MULTIPLE, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE))


def _frozen_rows(c: Case) -> int:
    """Return the number of tokens of a chunk for a frozen head. The blocks of its dX fill nearly one wave, one block
    for each multiprocessor; or several waves, if multiplying takes less time than reading the weight."""
    # Measured on an H200, in multiples of the time of all tokens at once:
    #
    # | H                 | 4096  | 3584  | 2304  | 1024  |
    # |-------------------|-------|-------|-------|-------|
    # | these rows        | 1.015 | 1.024 | 1.017 | 0.999 |
    # | half of them      | 1.09  | 1.03  | 1.09  | 1.03  |
    # | other numbers     | 1.02 to 1.14, in no order     |
    limit = c.defaults.chunk if c.dtype.itemsize < 4 else c.defaults.chunk_without_sum
    device_rates = rates(c.device)
    tall, wide = device_rates.block_shape
    rows = max(1, int(0.97 * c.device.multiprocessors) // ceil_div(c.hidden_sizes[0], wide)) * tall
    flops = device_rates.half_flops if c.dtype.itemsize < 4 else device_rates.wide_flops
    rows *= ceil_div(int(READ_SHARE * flops / device_rates.operand_bandwidth * c.dtype.itemsize / 2), rows)
    most = limit // (padded_cols(c.vocab_size) * _entry_bytes(c))
    return max(ROW_MULTIPLE, min(rows, most) // ROW_MULTIPLE * ROW_MULTIPLE)
