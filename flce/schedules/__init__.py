"""The schedules. The planner chooses among those of this list."""

from __future__ import annotations

from flce.schedules.blocks import Apart, Blocks, BlocksAroundSum, ChunksOfBlocks
from flce.schedules.chunks import Chunks, DeferredChunks
from flce.schedules.schedule import Schedule
from flce.schedules.statistics import Statistics
from flce.schedules.unnormalized import Borrowed, Recomputed, Unnormalized

SCHEDULES: tuple[type[Schedule], ...] = (
    Statistics,
    Chunks,
    Unnormalized,
    Borrowed,
    Recomputed,
    DeferredChunks,
    Blocks,
    BlocksAroundSum,
    ChunksOfBlocks,
    Apart,
)

__all__ = ["SCHEDULES", "Schedule"]
