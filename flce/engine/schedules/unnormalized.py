"""Schedules that multiply exponentials, instead of the gradient of the logits, with W and x.

With e = exp(z - m) for a reference m of each row, the gradient of row i's logits is f_i e_i, and in the target's column
t_i. The factors f and t are known when the row is complete. So products with e are computed first, and

    dX_i = f_i (e_i W) + t_i W[y_i]        dW = e^T (f x) + sum over i of t_i x_i in row y_i

Each logit is computed once. Logits stay in registers if fused products can write exponentials. Otherwise one block of
logits is in memory at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flce.core.slices import slice_rows
from flce.engine.borrowing import (
    BLOCK_MULTIPLE,
    BorrowedBlocks,
    ExponentialTile,
    borrow,
    borrow_as,
    exponential_tiles,
    second_half_start,
)
from flce.engine.case import BLOCK_BYTES, ROW_MULTIPLE, Case
from flce.engine.exponentials import Exponentials
from flce.engine.pass_context import PassContext
from flce.engine.schedules.blocks import compute_blocks
from flce.engine.schedules.schedule import NO_SIZES, Schedule, sizes_up_to
from flce.engine.sums import build_weight_sums

# Numbers of tiles that `Borrowed` stores in the memory of dW. More borrowed tiles need less separate memory and more
# time.
#
# | borrowed tiles | share in separate memory, 4096 x 4096 x 128256     |
# |----------------|----------------------------------------------------|
# | 1              | 1/2                                                |
# | 3              | 1/4                                                |
# | 7              | 1/8                                                |
BORROWED_TILE_COUNTS = (1, 3, 7)


@dataclass(frozen=True)
class Unnormalized(Schedule):
    """Three products: the exponentials of a chunk, and its share of dX and dW."""

    rows: int

    can_count_on_device = True

    @classmethod
    def sizes(cls, c: Case) -> range:
        return (
            sizes_up_to(c.num_tokens)
            if c.has_unnormalized_products and c.needs.any and c.spec.reduction != "none"
            else NO_SIZES
        )

    @classmethod
    def from_size(cls, c: Case, size: int) -> Unnormalized:
        return Unnormalized(size)

    def forward(self, ctx: PassContext) -> None:
        self._run_chunks(ctx, ctx.vocab_size)

    def _run_chunks(self, ctx: PassContext, stop: int) -> None:
        """Compute losses, dX, and dW of the classes before `stop`."""
        memory, exponentials = ctx.new_gradient_tile(self.rows, ctx.vocab_size), Exponentials(ctx)
        sums = build_weight_sums(ctx, self.rows, stop)
        for chunk in ctx.chunks(self.rows):
            xs = ctx.term_inputs(chunk)
            exponentials.compute(xs, [slice_rows(memory, slice(0, len(xs[0])))], chunk)
            # If the host does not know the number of rows yet, it waits here, while the device is busy.
            chunk = slice(chunk.start, max(chunk.start, min(chunk.stop, ctx.selection.num_rows)))
            valid_rows = slice(0, chunk.stop - chunk.start)
            if valid_rows.stop == 0:
                break
            exps, xs = slice_rows(memory, valid_rows), [slice_rows(x, valid_rows) for x in xs]
            for k, total in sums.items():
                scaled = exponentials.scale_rows(xs[k], chunk, self._scaling_memory(ctx, k, xs[k], chunk))
                if ctx.is_single_chunk(self.rows):
                    exponentials.compute_weight_gradient(k, [ctx.dw_memory(k)], [exps], scaled)
                else:
                    total.add(exps, scaled)
                del scaled
            if ctx.problem.needs.bias:
                exponentials.add_bias_gradient(exps[:, :stop], chunk)
            for k in ctx.dx_terms:
                self._add_dx(ctx, exponentials, k, exps, chunk)
            del xs  # Gathered rows are freed before the next chunk is gathered.
        for k, total in sums.items():
            total.finish(functools.partial(exponentials.add_target_terms, k))
        if ctx.problem.needs.bias:
            exponentials.add_target_bias_terms(stop)

    def for_shard(self, c: Case) -> Unnormalized:
        return type(self).from_size(c, self.rows) if self.rows in self.sizes(c) else Unnormalized(self.rows)

    def _add_dx(self, ctx: PassContext, exponentials: Exponentials, term: int, exps: Tensor, chunk: slice) -> None:
        """Compute dX of a term. If logits were in memory, the float32 product has at most the size of a block of
        logits."""
        weight = ctx.terms[term].weight
        step = len(exps) if ctx.in_registers else max(ROW_MULTIPLE, BLOCK_BYTES // (4 * weight.shape[1]))
        for piece in ctx.pieces(chunk.start, chunk.stop, step):
            product = ctx.new(piece.stop - piece.start, weight.shape[1], dtype=torch.float32)
            ctx.matmul(exps[piece.start - chunk.start : piece.stop - chunk.start], weight, out=product)
            exponentials.finish_input_gradient(term, product, piece)
            del product

    def _scaling_memory(self, ctx: PassContext, term: int, x: Tensor, chunk: slice) -> Tensor:
        """Return memory for scaled rows of x: x itself if it is gathered; else the memory of dX, or new memory."""
        if ctx.selection.index is not None:
            return x
        return slice_rows(ctx.dx_memory(term), chunk) if term in ctx.dx_terms else ctx.new(*x.shape, dtype=x.dtype)


@dataclass(frozen=True)
class Recomputed(Unnormalized):
    """Three products, and a fourth for the last classes, whose dW is not summed over chunks: when every row's
    normalizer is known, their logits are recomputed, block by block for all tokens."""

    num_recomputed: int
    cols: int
    """Recomputed classes of a block."""

    @classmethod
    def sizes(cls, c: Case) -> range:
        dtypes = c.dtypes(False)
        half = second_half_start(c.vocab_size) > 0
        sums_are_halved = half and c.needs.weights[0] and dtypes.weight_grad == c.dtype != dtypes.sums
        return super().sizes(c)[:-1] if sums_are_halved and not c.skip_ignored else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> Recomputed:
        """Return the schedule that recomputes the second half of the classes, whose sums do not fit into the memory of
        dW."""
        classes = c.vocab_size - second_half_start(c.vocab_size)
        # The tile of a block has the size of the tile of a chunk.
        cols = size * c.vocab_size // c.num_tokens // BLOCK_MULTIPLE * BLOCK_MULTIPLE
        return Recomputed(size, classes, max(BLOCK_MULTIPLE, min(classes, cols)))

    def forward(self, ctx: PassContext) -> None:
        first_recomputed = ctx.vocab_size - self.num_recomputed
        self._run_chunks(ctx, first_recomputed)
        tokens = ctx.problem.num_tokens
        compute_blocks(
            ctx, tokens, self.cols, BorrowedBlocks(tokens, self.cols), first_recomputed, ctx.vocab_size, with_dx=False
        )

    def describe(self, c: Case) -> str:
        return f"{super().describe(c)}, the last {self.num_recomputed} of them recomputed"


@dataclass(frozen=True)
class Borrowed(Schedule):
    """Three products for all tokens at once. All tiles except the first are borrowed from dW, which is written from the
    last tile to the first."""

    exponentials: tuple[ExponentialTile, ...]

    sized_by_tokens = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        at_once = 0 < c.num_tokens <= (c.options.chunk_rows or c.num_tokens)
        possible = c.needs.weights[0] and not c.needs.bias and not c.skip_ignored and c.in_registers
        if not (at_once and possible and Unnormalized.sizes(c)):
            return NO_SIZES
        # With few classes or very many tokens no tile can be borrowed.
        return range(1, 1 + len([k for k in BORROWED_TILE_COUNTS if len(_exponential_tiles(c, k)) > 1]))

    @classmethod
    def from_size(cls, c: Case, size: int) -> Borrowed:
        return Borrowed(
            _exponential_tiles(c, [k for k in BORROWED_TILE_COUNTS if len(_exponential_tiles(c, k)) > 1][-size])
        )

    def forward(self, ctx: PassContext) -> None:
        (chunk,) = ctx.chunks(ctx.problem.num_tokens)
        (x,), size = ctx.term_inputs(chunk), ctx.problem.num_tokens
        weight, dW = ctx.terms[0].weight, ctx.dw_memory()
        own, *others = self.exponentials
        tiles = [ctx.new_tile(size, own.stop - own.start, ctx.dtypes.logits_grad)]
        tiles += [borrow(dW[t.borrowed_class :], size, t.stop - t.start) for t in others]
        exponentials = Exponentials(ctx)
        exponentials.compute([x], tiles, chunk)
        scaled = None
        if ctx.problem.needs.inputs[0]:
            product = ctx.new(size, x.shape[1], dtype=torch.float32)
            for tile, t in zip(tiles, self.exponentials, strict=True):
                ctx.matmul(tile, weight[t.classes], out=product, accumulate=t.start > 0)
            exponentials.finish_input_gradient(0, product, chunk)
            scaled = borrow_as(product, x.shape, x.dtype)
        scaled = exponentials.scale_rows(x, chunk, ctx.new(*x.shape, dtype=x.dtype) if scaled is None else scaled)
        exponentials.compute_weight_gradient(0, [dW[t.classes] for t in self.exponentials], tiles, scaled)

    def for_shard(self, c: Case) -> Schedule:
        count = len(self.exponentials)
        candidates = [self.from_size(c, size) for size in self.sizes(c)]
        return min(
            candidates, key=lambda other: abs(len(other.exponentials) - count), default=Unnormalized(c.num_tokens)
        )

    def describe(self, c: Case) -> str:
        own, others = self.exponentials[0].stop, len(self.exponentials) - 1
        return f"all {c.num_tokens} tokens at once, a tile of {own} classes and {others} borrowed"


def _exponential_tiles(c: Case, count: int) -> tuple[ExponentialTile, ...]:
    return exponential_tiles(c.num_tokens, c.hidden_sizes[0], c.vocab_size, count)
