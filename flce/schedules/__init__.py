"""The schedules, and which one a plan is."""

from __future__ import annotations

import functools

from flce.chunk_plan import ChunkPlan
from flce.schedules.blocks import Apart, Blocks, BlocksAroundSum, ChunksOfBlocks
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
        return BlocksAroundSum(statistics, first.rows, first.cols, first.borrowed, plan.input_sum_start)
    if not last.weights:
        return ChunksOfBlocks(statistics, first.rows, first.cols)
    if plan.input_tile is not None:
        chunks = ChunksOfBlocks(statistics, first.rows, first.cols)
        return Apart(statistics, chunks, last.rows, last.cols, last.borrowed)
    return Blocks(statistics, first.rows, first.cols, first.borrowed)


def _at_once(plan: ChunkPlan) -> Schedule:
    """Of those that make gradients in forward."""
    if not plan.late_normalization:
        return Chunks(plan.chunk_rows)
    if plan.lent_tiles:
        return Borrowed(plan.exponential_tiles) if len(plan.exponential_tiles) > 1 else Unnormalized(plan.chunk_rows)
    if plan.remade_cols:
        return Recomputed(plan.chunk_rows, plan.remade_cols, plan.sweeps[1].cols)
    return Unnormalized(plan.chunk_rows)


def _statistics(plan: ChunkPlan) -> Statistics | ProductStatistics:
    return ProductStatistics(plan.product_rows) if plan.fused_product else Statistics(*plan.statistics_tile)
