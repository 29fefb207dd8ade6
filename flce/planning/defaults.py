"""The plan of a call without a budget. `search.py` calls `default_plan`.

* If all logits have at most `DefaultBytes.one_chunk` bytes, all tokens are one chunk: then no gradient is summed over
  chunks. Otherwise chunks have at most `DefaultBytes.chunk` bytes, so that the workspace does not grow with the number
  of tokens. With at most `MAX_BORROWED_RATIO` * H tokens in one chunk, exponentials are borrowed from dW.
* If no gradient of a weight is summed, large chunks are hardly faster. A frozen head has chunks of `_frozen_rows`.
  ``reduction="none"`` chooses the smallest blocks of classes that are nearly as fast as the fastest plan, and then the
  fastest plan of this size. Results of tokens have at most `PER_TOKEN_BYTES`.
* ``strategy="vocab"`` has blocks of a quarter of `DefaultBytes.chunk`.
"""

from __future__ import annotations

from flce.core.gemm import COLUMN_MULTIPLE, padded_cols
from flce.core.problem import LogprobSpec
from flce.engine.case import BLOCK_BYTES, ROW_MULTIPLE, STATISTICS_ROWS, Case, ceil_div
from flce.engine.schedules.blocks import Blocks
from flce.engine.schedules.chunks import Chunks, DeferredChunks
from flce.engine.schedules.e4m3 import E4M3DeferredChunks, E4M3Exponentials
from flce.engine.schedules.statistics import Statistics
from flce.engine.schedules.unnormalized import Borrowed, Unnormalized
from flce.planning import cost_model
from flce.planning.plan import ChunkPlan, fastest_near, plan_for_size, smallest_near

# Maximum time of the smallest plan, in multiples of the time of the fastest.
MAX_SLOWDOWN = 1.03
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


def default_plan(c: Case) -> ChunkPlan:
    """Return the plan for a case without a budget."""
    strategy = c.options.strategy
    if not c.needs.any:
        entries = (c.options.chunk_rows or _default_rows(c)) * c.vocab_size
        if strategy == "vocab":
            entries = c.chunk_rows * _default_cols(c)
        return plan_for_size(c, Statistics, min(entries, Statistics.sizes(c)[-1]))
    if strategy == "vocab":
        return plan_for_size(c, Blocks, _default_cols(c))
    rows = c.options.chunk_rows
    has_default_rows = rows is None and c.num_tokens > 0 and c.device_type != "cpu"
    if has_default_rows and not c.needs.weights[0] and not c.multiplies_e4m3:
        return _plan_for_chunks(c, min(c.num_tokens, _frozen_rows(c)))
    plan = _plan_for_chunks(c, c.equal_chunk_rows(rows or _default_rows(c)))
    if has_default_rows and plan.deferred and strategy == "auto" and not c.multiplies_e4m3:
        # Logits are computed twice by any deferred schedule. Blocks of classes sum no gradient of a weight. They sum
        # dX, which needs more memory if there are very many tokens.
        blocks = [plan_for_size(c, Blocks, cols) for cols in CANDIDATE_BLOCK_COLS if cols < c.vocab_size]
        plans = [plan, *(other for other in blocks if other.workspace_bytes <= plan.workspace_bytes)]
        if not isinstance(c.spec, LogprobSpec):
            return fastest_near(smallest_near(plans, MAX_SLOWDOWN), plans)
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
    if c.multiplies_e4m3:
        return plan_for_size(c, E4M3Exponentials if E4M3Exponentials.sizes(c) else E4M3DeferredChunks, rows)
    few, dtypes = c.has_few_logits and rows >= c.num_tokens, c.dtypes(False)
    kinds = (Chunks,) if few else (Unnormalized, Chunks)
    plan = next(plan_for_size(c, kind, rows) for kind in (*kinds, DeferredChunks) if rows in kind.sizes(c))
    if few or c.backend == "triton" or not dtypes.has_wider_logits or c.options.chunk_rows is not None:
        return plan
    # Float32 logits of a full chunk need twice the memory of their gradient. Chunks of fewer rows, with sums of dW, may
    # need less.
    extra = rows * padded_cols(c.vocab_size) * (dtypes.logits.itemsize - dtypes.logits_grad.itemsize)
    fewer = [c.equal_chunk_rows(max(ROW_MULTIPLE, rows // parts)) for parts in (2, 4)]
    plans = [plan, *(plan_for_size(c, Chunks, size) for size in fewer)]
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
    if c.multiplies_e4m3:
        return 1
    dtypes = c.dtypes(False)
    gradient = c.spec.reduction == "none" or c.backend == "triton"
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
    rates = cost_model.rates(c.device)
    tall, wide = rates.block_shape
    rows = max(1, int(0.97 * c.device.multiprocessors) // ceil_div(c.hidden_sizes[0], wide)) * tall
    flops = rates.half_flops if c.dtype.itemsize < 4 else rates.wide_flops
    rows *= ceil_div(int(READ_SHARE * flops / rates.operand_bandwidth * c.dtype.itemsize / 2), rows)
    most = limit // (padded_cols(c.vocab_size) * _entry_bytes(c))
    return max(ROW_MULTIPLE, min(rows, most) // ROW_MULTIPLE * ROW_MULTIPLE)
