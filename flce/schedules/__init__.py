"""The schedules, and which one a plan is."""

from __future__ import annotations

import functools

from flce.chunk_plan import ChunkPlan, Sweep
from flce.schedules.blocks import Apart, Blocks, BlocksAroundSum, ChunksOfBlocks
from flce.schedules.borrowing import BorrowedBlocks, exponential_tiles
from flce.schedules.chunks import Chunks, DeferredChunks
from flce.schedules.schedule import Schedule
from flce.schedules.statistics import ProductStatistics, Statistics
from flce.schedules.unnormalized import Borrowed, Recomputed, Unnormalized


@functools.lru_cache(maxsize=1024)
def schedule_of(plan: ChunkPlan) -> Schedule:
    if not plan.needs.any:
        return _statistics(plan)
    if not plan.deferred:
        return _at_once(plan)
    statistics, first, last = _statistics(plan), plan.sweeps[0], plan.sweeps[-1]
    if plan.block_cols >= plan.vocab_size and plan.input_tile is None:
        return DeferredChunks(statistics, first.rows)
    if plan.lent_input_sum:
        return BlocksAroundSum(statistics, first.rows, first.cols, _borrowed(first), plan.input_sum_start)
    if not last.weights:
        return ChunksOfBlocks(statistics, first.rows, first.cols)
    if plan.input_tile is not None:
        chunks = ChunksOfBlocks(statistics, first.rows, first.cols)
        return Apart(statistics, chunks, last.rows, last.cols, _borrowed(last))
    return Blocks(statistics, first.rows, first.cols, _borrowed(first))


def _at_once(plan: ChunkPlan) -> Schedule:
    """Of those that make gradients in forward."""
    if not plan.late_normalization:
        return Chunks(plan.chunk_rows)
    if plan.lent_tiles:
        tiles = exponential_tiles(plan.num_tokens, plan.hidden_sizes[0], plan.vocab_size, plan.lent_tiles)
        return Borrowed(tiles) if len(tiles) > 1 else Unnormalized(plan.chunk_rows)
    if plan.remade_cols:
        return Recomputed(plan.chunk_rows, plan.remade_cols, plan.sweeps[1].cols)
    return Unnormalized(plan.chunk_rows)


def _statistics(plan: ChunkPlan) -> Statistics | ProductStatistics:
    in_memory = Statistics(*plan.statistics_tile)
    return ProductStatistics(plan.product_rows, in_memory) if plan.fused_product else in_memory


def _borrowed(sweep: Sweep) -> BorrowedBlocks:
    return BorrowedBlocks(sweep.rows, sweep.cols, sweep.lent_cols, sweep.most_cols)
