"""Schedules that multiply exponentials, instead of the gradient of the logits, with W and x.

With e = exp(z - m), and 0 in the target's column, for a reference m of each row, the gradient of row i's logits is
f_i e_i, plus t_i in the target's column. The factors f and t are known when the row is complete. So products with e are
computed first, and

    dX_i = f_i (e_i W) + t_i W[y_i]        dW = e^T (f x) + sum over i of t_i x_i in row y_i

Each logit is computed once. Logits stay in registers if fused products can write exponentials. Otherwise one block of
logits is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce.backends.contract import (
    EXP_REFERENCE,
    EXPONENTIAL_SLOTS,
    LEAST_JACOBIAN_FACTOR,
    MAX,
    SOFTMAX,
    SUM,
    TARGET,
    TARGET_JACOBIAN,
    TargetTerms,
)
from flce.core.gemm import offset_slice, slice_columns, slice_rows
from flce.engine.borrowing import BLOCK_MULTIPLE, BlockLayout, TilePlacement, borrow, place_tiles, second_half_start
from flce.engine.case import BLOCK_BYTES, ROW_MULTIPLE, Case
from flce.engine.pass_context import GradientTile, PassContext
from flce.engine.schedules.gradients import block_rows, compute_blocks
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
# An `ignore_index` that no target has.
NO_IGNORE_INDEX = -(2**31)


class Exponentials:
    """Exponentials of the logits of a pass, and their factors. The gradient of the logits is ``factors[0] *
    exponentials`` (0 in the target's column), and ``factors[1]`` in the target's column."""

    def __init__(self, context: PassContext, logits_per_block: int = 0) -> None:
        """`logits_per_block`: number of logits in memory at a time, if they do not stay in registers."""
        self._context, self._logits_per_block = context, logits_per_block
        self.factors = context.new((2, context.selection.max_num_rows), torch.float32)

    def compute(self, tiles: Sequence[Tensor], tokens: slice) -> None:
        """Compute losses and exponentials of some tokens and all classes. `tiles`: memory for consecutive classes; one
        tile if logits do not stay in registers."""
        ctx, factors = self._context, slice_columns(self.factors, tokens)
        xs = ctx.term_inputs(tokens)
        if ctx.in_registers:
            call, device_count = ctx.rows.statistics_call(tokens, scaled=False), ctx.selection.num_rows_on_device
            count = None if device_count is None or tokens.start > 0 else device_count.value
            weight, scales = ctx.terms[0].weight, ctx.rows.scales
            ctx.backend.fused_exponentials(xs[0], weight, tiles, call, factors, count, lambda: scales.for_gradient)
        else:
            self._compute_in_blocks(xs, tiles[0], tokens)
        # One collective for all tokens, because the blocks of other processes may have other sizes.
        ctx.rows.merge_factors(tokens, factors)

    def _compute_in_blocks(self, xs: Sequence[Tensor], tile: Tensor, tokens: slice) -> None:
        ctx, previous_tokens = self._context, None
        memory = GradientTile(tile, logits_per_block=self._logits_per_block)
        for block_tokens, classes, logits, exps in ctx.compute_logit_blocks(xs, tokens, ctx.all_classes, memory):
            block_factors = slice_columns(self.factors, block_tokens)
            if block_tokens != previous_tokens:
                previous_tokens, call = block_tokens, ctx.rows.statistics_call(block_tokens)
                state = ctx.new((EXPONENTIAL_SLOTS, len(logits)), ctx.normalizer.dtype)
            call = call._replace(tile=ctx.rows.tile_classes(classes))
            ctx.backend.exponentials(logits, exps, call, state, block_factors)
            if ctx.rows.is_shard and classes.stop == ctx.vocab_size:
                ctx.rows.keep_state(block_tokens, state)
                block_factors[SOFTMAX] = self._shard_factor(state)
                block_factors[TARGET] = state[TARGET_JACOBIAN]

    def _shard_factor(self, state: Tensor) -> Tensor:
        """Return the factors of the exponentials of a shard, (rows,). Factor * exponential is the derivative of the
        shard's log-sum-exp with respect to a logit, before scale and softcap."""
        spec, reference = self._context.problem.spec, state[EXP_REFERENCE]
        # With softcap kernels store exp(z - reference) * dz/da / (scale * cap), see `contract.LEAST_JACOBIAN_FACTOR`.
        jacobian_factor = spec.scale * spec.cap
        if spec.softcap is not None and abs(jacobian_factor) <= LEAST_JACOBIAN_FACTOR:
            jacobian_factor = 1.0
        reference_minus_largest = reference.where(reference != -torch.inf, 0.0) - state[MAX]
        return reference_minus_largest.exp() / state[SUM] * jacobian_factor

    def scale_rows(self, x: Tensor, tokens: slice, out: Tensor) -> Tensor:
        """Write ``factors[0] * x`` to `out`, which may be `x`. Return `out`."""
        # The factor of an ignored row is 0. The row is read, so that a NaN in it reaches dW, as in all other schedules.
        self._combine_rows(x, tokens, out, None, None, NO_IGNORE_INDEX)
        return out

    def _combine_rows(
        self, x: Tensor, tokens: slice, out: Tensor, weight: Tensor | None, index: Tensor | None, ignore_index: int
    ) -> None:
        ctx = self._context
        target = slice_columns(ctx.rows.target, tokens)
        ctx.backend.combine_rows(x, out, weight, target, slice_columns(self.factors, tokens), ignore_index, index)

    def finish_input_gradient(self, term: int, product: Tensor, tokens: slice) -> None:
        """Write dX of a term: ``factors[0] * product`` plus the targets' terms. `product`: exponentials times
        weight."""
        ctx = self._context
        index = None if ctx.selection.index is None else ctx.selection.index[tokens]
        out = slice_rows(ctx.dx_memory(term), tokens) if index is None else ctx.dx_memory(term)
        self._combine_rows(product, tokens, out, ctx.terms[term].weight, index, ctx.rows.spec.ignore_index)
        if index is None:
            ctx.rows.start_dx_sum(term, out)

    def compute_weight_gradient(
        self, term: int, tiles: Sequence[Tensor], scaled: Tensor, residual: Tensor | None = None
    ) -> None:
        """Compute dW of a term from exponentials of all rows and classes.

        Args:
            tiles: exponentials of consecutive classes; one tile if logits do not stay in registers.
            residual: (rows, H) memory for what rounding removes from dW of classes that are targets, at most one class
                for each row; None: new memory.
        """
        ctx = self._context
        grad = ctx.dw_memory(term)
        if ctx.in_registers:
            residual = ctx.new(scaled.shape, grad.dtype) if residual is None else residual
            ctx.backend.weight_gradient(grad, tiles, scaled, residual, self._target_terms(term))
            return
        ctx.matmul(tiles[0].t(), scaled, out=grad)
        self.add_target_terms(term, [grad])

    def add_target_terms(self, term: int, sums: Sequence[Tensor]) -> None:
        """Add the targets' terms to sums of dW of consecutive classes."""
        # With fewer than 16 classes the first half is empty, see `borrowing.second_half_start`.
        self._context.backend.add_target_terms([half for half in sums if len(half)], self._target_terms(term))

    def add_bias_gradient(self, exps: Tensor, tokens: slice) -> None:
        """Add ``factors[0] @ exps`` to the gradient of the bias of the first classes. exps: (rows, classes)."""
        ctx, factor = self._context, self.factors[0, tokens]
        first, second = ctx.multiply_vector(factor, exps)
        ctx.db_memory()[: exps.shape[1]].add_(first).add_(second)

    def add_target_bias_terms(self, stop: int) -> None:
        """Add the targets' terms to the gradient of the bias of the classes before `stop`."""
        terms = self._target_terms(0)
        ones = terms.x.new_ones(len(terms.x), 1)
        self._context.backend.add_target_terms([self._context.db_memory()[:stop, None]], replace(terms, x=ones))

    def _target_terms(self, linear_term: int) -> TargetTerms:
        ctx, tokens = self._context, slice(0, self._context.selection.num_rows)
        index = None if ctx.selection.index is None else ctx.selection.index[tokens]
        target, factor = slice_columns(ctx.rows.target, tokens), self.factors[TARGET, tokens]
        return TargetTerms(ctx.terms[linear_term].input, index, target, factor, ctx.rows.spec.ignore_index)


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
        if first_recomputed == 0:  # a shard of few classes
            super().forward(ctx)
            return
        self._run_chunks(ctx, first_recomputed)
        ctx.release_inputs()  # Gathered rows were scaled in their memory.
        compute_blocks(ctx, self.layout, first_recomputed, ctx.vocab_size, with_dx=False)

    def describe(self, c: Case) -> str:
        return f"{super().describe(c)}, the last {c.vocab_size - second_half_start(c.vocab_size)} of them recomputed"


@dataclass(frozen=True)
class Borrowed(Schedule):
    """Products of all tokens at once, with tiles of classes. All tiles except the first are borrowed from dW, which is
    written from the last tile to the first. Three products. Size 1 has the most borrowed tiles."""

    num_borrowed: int
    """Number of borrowed tiles. In a small shard there may be room for none."""
    multiprocessors: int = 1

    sized_by_tokens = False

    @classmethod
    def sizes(cls, c: Case) -> range:
        at_once = 0 < c.num_tokens <= (c.options.chunk_rows or c.num_tokens)
        possible = c.needs.weights[0] and not c.needs.bias and not c.skip_ignored and c.supports_fused_products
        if not (at_once and possible and Unnormalized.sizes(c)):
            return NO_SIZES
        return range(1, 1 + len(cls._possible(c)))

    @classmethod
    def from_size(cls, c: Case, size: int) -> Borrowed:
        return cls._possible(c)[size - 1]

    @classmethod
    def _possible(cls, c: Case) -> list[Borrowed]:
        """Return the schedules of all numbers of borrowed tiles. With few classes or very many tokens no tile can be
        borrowed."""
        schedules = [cls(count, max(1, c.device.multiprocessors)) for count in BORROWED_TILE_COUNTS]
        sizes = c.num_tokens, c.hidden_sizes[0], c.vocab_size
        return [schedule for schedule in schedules if len(schedule.place_tiles(*sizes)) > 1]

    def place_tiles(self, rows: int, hidden: int, vocab_size: int) -> tuple[TilePlacement, ...]:
        return place_tiles(rows, hidden, vocab_size, self.num_borrowed, self.multiprocessors)

    def forward(self, ctx: PassContext) -> None:
        rows = ctx.problem.num_tokens
        (chunk,) = ctx.chunks(rows)
        (x,), weight, dW = ctx.term_inputs(chunk), ctx.terms[0].weight, ctx.dw_memory()
        separate, *borrowed = places = self.place_tiles(rows, x.shape[1], ctx.vocab_size)
        tiles = [ctx.new_tile(rows, separate.stop - separate.start, ctx.dtypes.logits_grad)]
        tiles += [borrow(dW[place.borrowed_class :], rows, place.stop - place.start) for place in borrowed]
        exponentials = Exponentials(ctx)
        exponentials.compute(tiles, chunk)
        scaled = residual = None
        if ctx.problem.needs.inputs[0]:
            product = ctx.new((rows, x.shape[1]), torch.float32)
            for tile, place in zip(tiles, places, strict=True):
                ctx.matmul(tile, weight[place.classes], out=product, accumulate=place.start > 0)
            exponentials.finish_input_gradient(0, product, chunk)
            # dX is written: the memory of the float32 product now holds two half-precision tensors.
            scaled, residual = product.view(x.dtype).view(2, *x.shape)
        scaled = exponentials.scale_rows(x, chunk, ctx.new(x.shape, x.dtype) if scaled is None else scaled)
        exponentials.compute_weight_gradient(0, tiles, scaled, residual)

    def describe(self, c: Case) -> str:
        cols = self.place_tiles(c.num_tokens, c.hidden_sizes[0], c.vocab_size)[0].stop
        return f"all {c.num_tokens} tokens at once, a tile of {cols} classes and {self.num_borrowed} borrowed"
