"""Schedules that multiply exponentials, instead of the gradient of the logits, with W and x.

With e = exp(z - m), and 0 in the target's column, for a reference m of each row, the gradient of row i's logits is
f_i e_i, plus t_i in the target's column. The factors f and t are known when the row is complete. So products with e are
computed first, and

    dX_i = f_i (e_i W) + t_i W[y_i]        dW = e^T (f x) + sum over i of t_i x_i in row y_i

Each logit is computed once. Logits stay in registers if fused products can write exponentials. Otherwise one block of
logits is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flce.core.slices import offset_slice, slice_rows
from flce.engine.borrowing import (
    BLOCK_MULTIPLE,
    BlockLayout,
    TilePlacement,
    borrow,
    place_tiles,
    second_half_start,
)
from flce.engine.case import BLOCK_BYTES, ROW_MULTIPLE, Case
from flce.engine.exponentials import Exponentials
from flce.engine.pass_context import PassContext
from flce.engine.schedules.blocks import block_rows, compute_blocks
from flce.engine.schedules.schedule import NO_SIZES, Schedule, sizes_up_to
from flce.engine.sums import build_dw_sums

# Numbers of tiles that `Borrowed` stores in the memory of dW. More borrowed tiles need less separate memory and more
# time.
#
# | borrowed tiles | exponentials in separate memory, 4096 x 4096 x 128256 |
# |----------------|-------------------------------------------------------|
# | 7              | 1/8                                                   |
# | 3              | 1/4                                                   |
# | 1              | 1/2                                                   |
BORROWED_TILE_COUNTS = (7, 3, 1)


@dataclass(frozen=True)
class Unnormalized(Schedule):
    """Loop over chunks: exponentials, dX and dW. Three products."""

    rows: int

    can_count_on_device = True

    @classmethod
    def sizes(cls, c: Case) -> range:
        return (
            sizes_up_to(c.num_tokens) if c.can_multiply_exponentials and c.needs.any and not c.must_defer else NO_SIZES
        )

    @classmethod
    def from_size(cls, c: Case, size: int) -> Unnormalized:
        return Unnormalized(size)

    def forward(self, ctx: PassContext) -> None:
        self._run_chunks(ctx, ctx.vocab_size)

    def _run_chunks(self, ctx: PassContext, stop: int) -> None:
        """Compute losses, dX, and dW of the classes before `stop`."""
        tile, _, logits_per_block = ctx.new_exponentials_tile(self.rows, ctx.vocab_size)
        exponentials = Exponentials(ctx, logits_per_block)
        dw_sums = build_dw_sums(ctx, self.rows, stop)
        for chunk in ctx.chunks(self.rows):
            xs = ctx.term_inputs(chunk)
            exponentials.compute([slice_rows(tile, slice(0, len(xs[0])))], chunk)
            # If the host does not know the number of rows yet, it waits here, while the device is busy.
            chunk = slice(chunk.start, max(chunk.start, min(chunk.stop, ctx.selection.num_rows)))
            valid_rows = slice(0, chunk.stop - chunk.start)
            if valid_rows.stop == 0:
                break
            exps, xs = slice_rows(tile, valid_rows), [slice_rows(x, valid_rows) for x in xs]
            for k, dw_sum in dw_sums.items():
                scaled = exponentials.scale_rows(xs[k], chunk, self._scaling_memory(ctx, k, xs[k], chunk))
                if ctx.is_single_chunk(self.rows):
                    exponentials.compute_weight_gradient(k, [exps], scaled)
                else:
                    dw_sum.add(exps, scaled)
                del scaled
            if ctx.problem.needs.bias:
                exponentials.add_bias_gradient(exps[:, :stop], chunk)
            for k in ctx.dx_terms:
                self._add_dx(ctx, exponentials, k, exps, chunk)
            del xs  # Gathered rows are freed before the next chunk is gathered.
        for k, dw_sum in dw_sums.items():
            if dw_sum.is_started:  # A single chunk has no sum: dW is complete.
                exponentials.add_target_terms(k, dw_sum.sums())
            dw_sum.finish()
        if ctx.problem.needs.bias:
            exponentials.add_target_bias_terms(stop)

    def for_shard(self, c: Case) -> Unnormalized:
        return type(self).from_size(c, self.rows) if self.rows in self.sizes(c) else Unnormalized(self.rows)

    def _add_dx(self, ctx: PassContext, exponentials: Exponentials, term: int, exps: Tensor, chunk: slice) -> None:
        """Compute dX of a term. If logits were in memory, the float32 product has at most the size of a block of
        logits."""
        weight = ctx.terms[term].weight
        step = len(exps) if ctx.in_registers else max(ROW_MULTIPLE, BLOCK_BYTES // (4 * weight.shape[1]))
        for tokens in ctx.split_range(chunk, step):
            product = ctx.new((tokens.stop - tokens.start, weight.shape[1]), torch.float32)
            ctx.matmul(exps[offset_slice(tokens, -chunk.start)], weight, out=product)
            exponentials.finish_input_gradient(term, product, tokens)
            del product

    def _scaling_memory(self, ctx: PassContext, term: int, x: Tensor, chunk: slice) -> Tensor:
        """Return memory for scaled rows of x: x itself if it is gathered; else the memory of dX, or new memory."""
        if ctx.selection.index is not None:
            return x
        return slice_rows(ctx.dx_memory(term), chunk) if term in ctx.dx_terms else ctx.new(x.shape, x.dtype)


@dataclass(frozen=True)
class Recomputed(Unnormalized):
    """Loop over chunks as in `Unnormalized`, and then over blocks of the second half of the classes, whose dW is not
    summed over chunks, because its sums do not fit into the memory of dW: their logits are recomputed for all tokens,
    when every row's normalizer is known. Three products, and a fourth for these classes."""

    layout: BlockLayout
    """The blocks of these classes."""

    @classmethod
    def sizes(cls, c: Case) -> range:
        dtypes = c.dtypes(False)
        has_first_half = second_half_start(c.vocab_size) > 0
        has_sum_in_two_halves = has_first_half and c.needs.weights[0] and dtypes.grads == c.dtype != dtypes.sums
        # One chunk needs no sum.
        return super().sizes(c)[:-1] if has_sum_in_two_halves else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> Recomputed:
        # The tile of a block, with the sum of its dW, has the size of the tile of a chunk.
        rows, row_entries = block_rows(c, size)
        cols = size * c.vocab_size // row_entries // BLOCK_MULTIPLE * BLOCK_MULTIPLE
        cols = max(BLOCK_MULTIPLE, min(c.vocab_size - second_half_start(c.vocab_size), cols))
        return Recomputed(size, BlockLayout(rows, cols))

    def forward(self, ctx: PassContext) -> None:
        first_recomputed = second_half_start(ctx.vocab_size)
        self._run_chunks(ctx, first_recomputed)
        ctx.release_inputs()  # Gathered rows were scaled in their memory.
        compute_blocks(ctx, self.layout, first_recomputed, ctx.vocab_size, with_dx=False)

    def describe(self, c: Case) -> str:
        return f"{super().describe(c)}, the last {c.vocab_size - second_half_start(c.vocab_size)} of them recomputed"


@dataclass(frozen=True)
class Borrowed(Schedule):
    """Products of all tokens at once, with tiles of classes. All tiles except the first are borrowed from dW, which is
    written from the last tile to the first. Three products. Size 1 has the most borrowed tiles."""

    tiles: tuple[TilePlacement, ...]

    sized_by_tokens = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        at_once = 0 < c.num_tokens <= (c.options.chunk_rows or c.num_tokens)
        possible = c.needs.weights[0] and not c.needs.bias and not c.skip_ignored and c.supports_fused_products
        if not (at_once and possible and Unnormalized.sizes(c)):
            return NO_SIZES
        return range(1, 1 + len(_possible_placements(c)))

    @classmethod
    def from_size(cls, c: Case, size: int) -> Borrowed:
        return Borrowed(_possible_placements(c)[size - 1])

    def forward(self, ctx: PassContext) -> None:
        rows = ctx.problem.num_tokens
        (chunk,) = ctx.chunks(rows)
        (x,), weight, dW = ctx.term_inputs(chunk), ctx.terms[0].weight, ctx.dw_memory()
        separate, *borrowed = self.tiles
        tiles = [ctx.new_tile(rows, separate.stop - separate.start, ctx.dtypes.logits_grad)]
        tiles += [borrow(dW[place.borrowed_class :], rows, place.stop - place.start) for place in borrowed]
        exponentials = Exponentials(ctx)
        exponentials.compute(tiles, chunk)
        scaled = residual = None
        if ctx.problem.needs.inputs[0]:
            product = ctx.new((rows, x.shape[1]), torch.float32)
            for tile, place in zip(tiles, self.tiles, strict=True):
                ctx.matmul(tile, weight[place.classes], out=product, accumulate=place.start > 0)
            exponentials.finish_input_gradient(0, product, chunk)
            # dX is written: the memory of the float32 product now holds two half-precision tensors.
            scaled, residual = product.view(x.dtype).view(2, *x.shape)
        scaled = exponentials.scale_rows(x, chunk, ctx.new(x.shape, x.dtype) if scaled is None else scaled)
        exponentials.compute_weight_gradient(0, tiles, scaled, residual)

    def for_shard(self, c: Case) -> Schedule:
        schedules = [self.from_size(c, size) for size in self.sizes(c)]
        return min(
            schedules,
            key=lambda other: abs(len(other.tiles) - len(self.tiles)),
            default=Unnormalized(c.num_tokens),
        )

    def describe(self, c: Case) -> str:
        cols, num_borrowed = self.tiles[0].stop, len(self.tiles) - 1
        return f"all {c.num_tokens} tokens at once, a tile of {cols} classes and {num_borrowed} borrowed"


def _possible_placements(c: Case) -> list[tuple[TilePlacement, ...]]:
    """Return the tiles for each number of borrowed tiles. With few classes or very many tokens no tile can be
    borrowed."""
    shape, processors = (c.num_tokens, c.hidden_sizes[0], c.vocab_size), max(1, c.device.multiprocessors)
    placements = [place_tiles(*shape, count, processors) for count in BORROWED_TILE_COUNTS]
    return [tiles for tiles in placements if len(tiles) > 1]
