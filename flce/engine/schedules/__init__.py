"""The schedules. `planning/search.py` chooses one of `SCHEDULES`."""

from __future__ import annotations

from flce.engine.schedules.gradients import (
    Blocks,
    BlocksAroundSum,
    Chunks,
    ChunksOfBlocks,
    DeferredChunks,
    SeparatePasses,
)
from flce.engine.schedules.sampled import Sampled
from flce.engine.schedules.schedule import Schedule, Statistics
from flce.engine.schedules.unnormalized import Borrowed, Recomputed, Unnormalized

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

__all__ = ["SCHEDULES", "Schedule"]
