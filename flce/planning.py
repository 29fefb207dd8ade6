"""Which schedule a call takes, and of which size.

* **Without a budget** a rule says so (`_default`): chunks of tokens, of absolute sizes, so that the workspace does not
  grow with their number. All tokens are one chunk where that is not too large: then no gradient is summed over chunks.
  Where none is summed in any case, chunks or blocks are small.
* **With a budget** that the default does not keep, the plan is the fastest that keeps it, of all schedules and sizes
  (`_fastest`). What a plan takes in memory and time is counted: see `counting`.
* Without a budget the workspace is at most `MEMORY_SHARE` of the device's memory, which is then the budget.

Every call of one shape and options has the same plan on devices of one kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from flce import cost
from flce.backends import backend_name, has_product, total_memory
from flce.case import ROW_MULTIPLE, STATISTICS_ROWS, Case, ceil_div
from flce.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols
from flce.options import ChunkOptions
from flce.plans import ChunkPlan
from flce.problem import LossSpec, Needs
from flce.scalars import INT64_MAX, integer
from flce.schedules import SCHEDULES, Schedule
from flce.schedules.blocks import Blocks
from flce.schedules.chunks import Chunks, DeferredChunks
from flce.schedules.statistics import Statistics
from flce.schedules.unnormalized import Borrowed, Unnormalized

MEMORY_SHARE = 1 / 24
# Of the fastest plan's time, what a plan without a budget may take to be the smallest.
WITHIN = 1.03
# Classes of a block among which that is chosen.
LADDER_COLS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768, 65536)
# CUDA's caching allocator hands out blocks that are up to 1 MiB larger than asked for. What it counts as allocated is
# to keep the budget too.
ALLOCATOR_SLACK = {"cuda": 2 << 20}
# Tokens for each entry of a row of the head, at most, with which exponentials are borrowed without a budget. It takes
# no more time where it takes less memory, in times the bare products 1.02 for 1.03 (8192 x 4096 x 128256), 1.05 and
# 1.05 (4096 tokens), 1.07 for 1.13 (2048), 1.02 for 1.04 (8192 x 3584 x 152064). With more there is little to borrow.
BORROWED_RATIO = 4
# Tokens from which on the strategy is that for so many.
MOST_TOKENS = 1 << 20


def plan(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cuda",
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    stats: tuple[str, ...] = (),
    input_grad: bool = True,
    weight_grad: bool = True,
    bias_grad: bool = False,
    adapter_ranks: Sequence[int] = (),
    options: ChunkOptions | None = None,
) -> ChunkPlan:
    """What `fused_linear_cross_entropy` will do for a shape, and the bytes it will take.

    Args:
        num_tokens: N, the tokens of `input` over all leading dimensions.
        hidden_size: H.
        vocab_size: V.
        dtype: of `input` and `linear_weight`, after autocast.
        device: where the tensors will be; only its type matters.
        reduction, label_smoothing, softcap, z_loss, stats: as in `fused_linear_cross_entropy`.
        input_grad, weight_grad, bias_grad: which gradients will be asked for (``False`` for a frozen head).
        adapter_ranks: the rank r of each of `adapters`; gradients of both of its tensors are assumed to be asked for.
        options: as in `fused_linear_cross_entropy`.

    Returns:
        A `ChunkPlan`; ``.workspace_bytes`` is the peak of memory above the inputs and the returned
        gradients, from the beginning of forward to the end of backward.

    Raises:
        ValueError: no plan keeps ``options.max_workspace_bytes`` (the message names the least that works),
            or an argument has an impossible value.
        TypeError: an argument has the wrong type.
    """
    if not isinstance(adapter_ranks, (tuple, list)):
        raise TypeError(f"adapter_ranks must be a sequence of ints, got {type(adapter_ranks).__name__}")
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    sizes |= {f"adapter_ranks[{k}]": rank for k, rank in enumerate(adapter_ranks)}
    sizes = {name: integer(name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value < (0 if name == "num_tokens" else 1):
            raise ValueError(f"{name} must be positive, got {value}")
    num_tokens, hidden_size, vocab_size, *ranks = sizes.values()
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")
    device = torch.device(device)
    of_adapters = (True,) * len(ranks)
    case = Case(
        num_tokens=num_tokens,
        hidden_sizes=(hidden_size, *ranks),
        vocab_size=vocab_size,
        dtype=dtype,
        device_type=device.type,
        backend=backend_name(device),
        has_product=has_product(device),
        memory=total_memory(device),
        spec=LossSpec(reduction, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, stats=stats),
        needs=Needs((input_grad, *of_adapters), (weight_grad, *of_adapters), bias_grad),
        options=options or ChunkOptions(),
    )
    return make_plan(case)


@functools.lru_cache(maxsize=1024)
def make_plan(c: Case) -> ChunkPlan:
    """`plan` for callers that have checked their arguments."""
    strategy = _strategy(c)
    default, budget = _default(c, strategy), _budget(c)
    if budget is None:
        return default
    slack = ALLOCATOR_SLACK.get(c.device_type, 0)
    if default.workspace_bytes <= budget - slack and strategy != "vocab":
        return default
    for allowed in dict.fromkeys((strategy, c.options.strategy)):
        for room in (budget - slack, budget):
            fastest = _fastest(c, allowed, room)
            if fastest is not None:
                return fastest
    least = min(_smallest(c), default, key=lambda plan: plan.workspace_bytes)
    if c.options.max_workspace_bytes is None:
        return least
    raise ValueError(
        f"max_workspace_bytes={budget} is too small for {c} with strategy={c.options.strategy!r} and "
        f"chunk_rows={c.options.chunk_rows}: the least is {least.workspace_bytes} bytes"
    )


def is_deferred(c: Case) -> bool:
    """Whether the plan of a call makes gradients in backward: all that its outputs depend on, but for dtypes."""
    if not is_open(c):
        return c.needs.any and (c.spec.reduction == "none" or c.options.strategy == "vocab")
    try:
        return make_plan(c).deferred
    except ValueError:  # no plan keeps the budget: a call says so
        return False


def same_tokens(c: Case) -> tuple[int, int]:
    """The least and the most tokens with which `is_deferred` is the same, all between them included."""
    if not is_open(c):
        return 0, INT64_MAX

    def deferred(tokens: int) -> bool | None:
        try:
            return make_plan(replace(c, num_tokens=tokens)).deferred
        except ValueError:
            return None  # each number of tokens that is represented decides by itself

    low = high = _representative(c.num_tokens)
    this = deferred(high)
    if this is None:
        return c.num_tokens, c.num_tokens
    while high < MOST_TOKENS and deferred(_representative(high + 1)) == this:
        high = _representative(high + 1)
    while low > 0 and deferred(low) == this:
        low = _before(low)
    return low + 1 if low else 0, high if high < MOST_TOKENS else INT64_MAX


def is_open(c: Case) -> bool:
    """Whether gradients may be made in forward or in backward."""
    return c.needs.any and c.spec.reduction != "none" and c.options.strategy == "auto" and _budget(c) is not None


def _budget(c: Case) -> int | None:
    if c.options.max_workspace_bytes is not None:
        return c.options.max_workspace_bytes
    return None if c.memory is None else int(c.memory * MEMORY_SHARE)


def _strategy(c: Case) -> str:
    """That of a call with a few more tokens, so that a traced graph is good for a range of them."""
    tokens = _representative(c.num_tokens)
    if not is_open(c) or tokens == c.num_tokens:
        return c.options.strategy
    try:
        return make_plan(replace(c, num_tokens=tokens)).strategy
    except ValueError:
        return c.options.strategy


def _representative(tokens: int) -> int:
    """The next number of three binary digits; of very many tokens `MOST_TOKENS`, or as many."""
    step = 1 << max(0, tokens.bit_length() - 3)
    return tokens if tokens > MOST_TOKENS else ceil_div(tokens, step) * step


def _before(tokens: int) -> int:
    """The representative before this one."""
    return tokens - (1 << max(0, (tokens - 1).bit_length() - 3))


# ------------------------------------------------------------------------------------------------- without a budget


def _default(c: Case, strategy: str) -> ChunkPlan:
    if not c.needs.any:
        entries = (c.options.chunk_rows or _default_rows(c)) * c.vocab_size
        if strategy == "vocab":
            entries = c.chunk_rows * _default_cols(c)
        return _plan(c, Statistics, min(entries, Statistics.sizes(c)[-1]))
    if strategy == "vocab":
        return _plan(c, Blocks, _default_cols(c))
    rows, chosen = c.options.chunk_rows, c.options.chunk_rows is None and c.num_tokens > 0 and c.device_type != "cpu"
    if chosen and not c.needs.weights[0]:
        return _chunks(c, min(c.num_tokens, _frozen_rows(c)))
    plan = _chunks(c, c.equal_rows(rows or _default_rows(c)))
    if chosen and plan.deferred and strategy == "auto":
        # Logits are made twice in any case, and blocks of classes sum no gradient of a weight. They sum that of inputs,
        # which takes more where tokens are very many.
        blocks = [_plan(c, Blocks, cols) for cols in LADDER_COLS if cols < c.vocab_size]
        plans = [plan, *(other for other in blocks if other.workspace_bytes <= plan.workspace_bytes)]
        return _smallest_near(plans, WITHIN)
    if Borrowed.sizes(c) and getattr(plan.schedule, "rows", 0) >= c.num_tokens <= BORROWED_RATIO * c.hidden_sizes[0]:
        borrowing = [_plan(c, Borrowed, size) for size in reversed(Borrowed.sizes(c))]
        # The float32 gradient of the inputs takes memory, too.
        return next((other for other in borrowing if other.workspace_bytes < plan.workspace_bytes), plan)
    return plan


def _chunks(c: Case, rows: int) -> ChunkPlan:
    """Of so many tokens."""
    kinds = (Chunks, Unnormalized, DeferredChunks)
    return next(_plan(c, kind, rows) for kind in kinds if rows in kind.sizes(c))


def _default_rows(c: Case) -> int:
    """Of a chunk with all classes."""
    if not c.needs.any and c.defaults.statistics is not None:
        return STATISTICS_ROWS
    per_row = padded_cols(c.vocab_size) * _entry_bytes(c)
    if c.dtype.itemsize >= 4:
        limit = c.defaults.no_sum
    elif c.num_tokens * per_row <= c.defaults.one_chunk:
        limit = c.defaults.one_chunk
    else:
        limit = c.defaults.chunk
    return max(ROW_MULTIPLE, limit // per_row // ROW_MULTIPLE * ROW_MULTIPLE)


def _entry_bytes(c: Case) -> int:
    """Of a logit and its gradient, which may share their memory."""
    dtypes = c.dtypes(False)
    if not c.needs.any:
        return dtypes.logits.itemsize
    in_registers = c.unnormalized_rows is not None or (c.products and c.spec.reduction == "none")
    one = in_registers or dtypes.logits == dtypes.logits_grad
    return dtypes.logits_grad.itemsize + (0 if one else dtypes.logits.itemsize)


def _default_cols(c: Case) -> int:
    """Of a block with all tokens. It takes a quarter of what a chunk would: `vocab` is for saving memory. With fewer
    tokens it is no wider: its weight gradient has to be summed over them."""
    cols = c.chunk_entries(c.defaults.chunk) // 4 // max(1, c.num_tokens)
    return min(c.vocab_size, max(COLUMN_MULTIPLE, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE))


def _frozen_rows(c: Case) -> int:
    """Of a chunk whose gradient of the input is nearly one wave of blocks, one for each multiprocessor.

    On an H200 that is at most 2.4% slower than all tokens at once: 1.015, 1.024, 1.017 and 0.999 for H = 4096, 3584,
    2304 and 1024. With half of these rows: 1.09, 1.03, 1.09 and 1.03; with others between 1.02 and 1.14, in no order.
    """
    device = cost.device_of(c.device_type)
    limit = c.defaults.chunk if c.dtype.itemsize < 4 else c.defaults.no_sum
    tall, wide = device.block
    rows = max(1, int(0.97 * device.multiprocessors) // ceil_div(c.hidden_sizes[0], wide)) * tall
    most = limit // (padded_cols(c.vocab_size) * _entry_bytes(c))
    return max(ROW_MULTIPLE, min(rows, most) // ROW_MULTIPLE * ROW_MULTIPLE)


def _smallest_near(plans: Sequence[ChunkPlan], within: float) -> ChunkPlan:
    """The smallest of those that take no longer than so many times the fastest."""
    limit = within * min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= limit), key=lambda plan: plan.workspace_bytes)


# ---------------------------------------------------------------------------------------------------- with a budget


def _plan(c: Case, kind: type[Schedule], size: int) -> ChunkPlan:
    without = "vocab" if c.options.strategy == "vocab" else "tokens"
    return _plan_of(c, kind.strategy if c.needs.any else without, kind.sized(c, size))


_plan_of = functools.lru_cache(maxsize=4096)(ChunkPlan)  # each is counted once


def _kinds(c: Case, strategy: str) -> Iterator[tuple[type[Schedule], range]]:
    """Schedules for a call, and their sizes."""
    for kind in SCHEDULES:
        sizes, rows = kind.sizes(c), c.options.chunk_rows
        if rows is not None and kind.strategy == "tokens" and kind.sized_by_tokens:
            sizes = range(max(rows, sizes.start), min(rows + 1, sizes.stop))
        if sizes and (strategy in ("auto", kind.strategy) or not c.needs.any):
            yield kind, sizes


def _fastest(c: Case, strategy: str, budget: int) -> ChunkPlan | None:
    """Of all plans that keep the budget; None if none does."""
    best = None
    for kind, sizes in _kinds(c, strategy):
        # Not worth a search if it is slower even with all the memory that it could use.
        if best is None or _plan(c, kind, sizes[-1]).seconds < best.seconds:
            best = min([best, *_largest(c, kind, sizes, budget)], key=_seconds)
    return best


def _seconds(plan: ChunkPlan | None) -> float:
    return plan.seconds if plan else math.inf


def _largest(c: Case, kind: type[Schedule], sizes: range, budget: int) -> list[ChunkPlan | None]:
    """Of a schedule: the best of the largest plan that keeps the budget and of those of some sizes below."""
    size = _largest_size(lambda size: _plan(c, kind, size).workspace_bytes, sizes, budget)
    if size is None:
        return [None]
    below = [size, *(size // multiple * multiple for multiple in kind.multiples)]
    if kind.sized_by_tokens:
        below += [c.equal_rows(size) for size in below]
    plans = [_plan(c, kind, size) for size in dict.fromkeys(below) if size in sizes]
    return [_smallest_near([plan for plan in plans if plan.workspace_bytes <= budget], 1.005)]


def _largest_size(taken: Callable[[int], int], sizes: range, budget: int) -> int | None:
    """The largest size, or nearly so, with ``taken(size) <= budget``; None if there is none.

    What is taken is nearly affine in the size: most tries are where the line through the last two meets the budget.
    """
    low, high = sizes[0] - 1, sizes[-1]  # the largest size known to fit, and the smallest known not to
    bytes_high = taken(high)
    if bytes_high <= budget:
        return high
    last, size = (high, bytes_high), max(sizes[0], 128)
    while high - low > max(1, low // 64):
        size = min(max(size, low + 1), high - 1)
        if size // ALIGNMENT * ALIGNMENT > low:
            size = size // ALIGNMENT * ALIGNMENT
        bytes_ = taken(size)
        low, high = (size, high) if bytes_ <= budget else (low, size)
        slope = (bytes_ - last[1]) / (size - last[0])
        # How many more, or less, would fit.
        more = (budget - bytes_) / slope if slope > 0 else 0.0
        if low == size and 0 < more < max(1, low / 64):
            break
        last, size = (size, bytes_), size + math.floor(more) if low < size + more < high else (low + high) // 2
    return low if low in sizes else None


def _smallest(c: Case) -> ChunkPlan:
    """The plan with the least workspace.

    Not always that of the smallest size: a single tile needs no sums over tiles, an aligned one no float32 copy.
    """
    plans = [
        _plan(c, kind, size)
        for kind, sizes in _kinds(c, c.options.strategy)
        for size in {sizes[0], sizes[-1], ALIGNMENT}
        if size in sizes
    ]
    return min(plans, key=lambda plan: plan.workspace_bytes)
