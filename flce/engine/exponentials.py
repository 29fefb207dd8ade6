"""The steps of a pass that computes gradients from exponentials: see `schedules/unnormalized.py`, which calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from flce.core.slices import slice_columns, slice_rows
from flce.engine.pass_context import GradientTile, PassContext

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
