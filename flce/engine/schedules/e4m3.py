"""Schedules whose products for dX and dW have E4M3 operands (`ChunkOptions.grad_dtype`), see `engine/e4m3.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flce.backends.contract import QuantizedTile
from flce.engine.case import ROW_MULTIPLE, Case, ceil_div
from flce.engine.e4m3 import ChunkSizes, compute_gradients
from flce.engine.exponentials import Exponentials
from flce.engine.pass_context import PassContext
from flce.engine.schedules.schedule import NO_SIZES, Schedule, sizes_up_to
from flce.engine.schedules.statistics import Deferred, statistics_schedule

# The maximum number of tokens of a group, and columns of a block of a vendor's product with E4M3 operands.
GROUP_ROWS, BLOCK_COLS = 4096, 128
# Number of tokens of a tile whose gradient of the logits is in memory before it is rounded.
TILE_ROWS = 1024


def chunk_sizes(c: Case, rows: int) -> ChunkSizes:
    """Return the sizes for chunks of `rows`. Groups are equal, and the blocks of their dX, ROW_MULTIPLE x BLOCK_COLS,
    nearly fill whole waves, one block for each multiprocessor."""
    wave_rows = max(1, c.device.multiprocessors // ceil_div(c.hidden_sizes[0], BLOCK_COLS)) * ROW_MULTIPLE
    num_groups = ceil_div(rows, max(1, GROUP_ROWS // wave_rows) * wave_rows)
    group_rows = min(rows, ceil_div(ceil_div(rows, num_groups), ROW_MULTIPLE) * ROW_MULTIPLE)
    return ChunkSizes(rows, group_rows, min(group_rows, TILE_ROWS))


@dataclass(frozen=True)
class E4M3Schedule(Schedule):
    """Base of these schedules. A size is the number of tokens of a chunk."""

    chunks: ChunkSizes

    multiplies_e4m3 = True

    @classmethod
    def sizes(cls, c: Case) -> range:
        is_deferred = c.must_defer or not (c.can_multiply_exponentials and c.supports_fused_products)
        supported = c.multiplies_e4m3 and c.needs.any and cls.deferred == is_deferred
        return sizes_up_to(c.num_tokens) if supported else NO_SIZES

    def tile_sizes(self, c: Case) -> tuple[int, list[int]]:
        return self.chunks.rows, [c.vocab_size]

    def for_shard(self, c: Case) -> Schedule:
        return self  # dX is summed over processes after each group.


@dataclass(frozen=True)
class E4M3Exponentials(E4M3Schedule):
    """Loop over groups: exponentials, rounded in registers, and dX; dW after the groups of a chunk. Three products, two
    of them with E4M3 operands."""

    @classmethod
    def from_size(cls, c: Case, size: int) -> E4M3Exponentials:
        chunks = chunk_sizes(c, size)
        return cls(replace(chunks, tile_rows=chunks.group_rows))

    def forward(self, ctx: PassContext) -> None:
        compute = Exponentials(ctx).compute
        compute_gradients(ctx, self.chunks, lambda tokens, out: compute([], tokens, out))


@dataclass(frozen=True)
class E4M3DeferredChunks(Deferred, E4M3Schedule):
    """Loop over tiles whose logits are computed twice: for an upstream gradient of each token, and if exponentials
    cannot be multiplied, as on a CPU. Four products, two of them with E4M3 operands."""

    @classmethod
    def from_size(cls, c: Case, size: int) -> E4M3DeferredChunks:
        chunks = chunk_sizes(c, size)
        return cls(chunks, statistics_schedule(c, chunks.tile_rows, c.vocab_size))

    def backward(self, ctx: PassContext) -> None:
        tile = ctx.new_gradient_tile(self.chunks.tile_rows, ctx.vocab_size)

        def compute_tile(tokens: slice, out: QuantizedTile) -> None:
            ctx.backend.quantize_tile(ctx.compute_gradient(tokens, ctx.all_classes, tile), out)

        compute_gradients(ctx, self.chunks, compute_tile)
