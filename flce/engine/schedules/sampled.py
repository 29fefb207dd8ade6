"""A schedule that computes gradients from sampled entries (`ChunkOptions.sample_below`), and its steps.

Most probabilities of a token are nearly zero. With s = `sample_below`, an entry of the gradient of the
logits whose probability p is below s is kept with probability p / s, as 1 / (p / s) times its gradient, and left out
otherwise. All other entries, and the target's, are kept as they are. So the expected gradients are the exact ones.

* Forward needs the threshold of a row before its sum of exponentials is known. A lower bound, the sum over *frequent*
  classes, keeps more entries than requested. Each entry has one random number u: it is listed if u < p / s' for the
  bound's s', and backward keeps it if u < p / s. The result does not depend on the bound.
* Gradients of frequent classes are dense: a product with their rows of W.
* Random numbers are a hash of the token's position in the call, of its hidden state, of its bound, and of the class.
  Equal calls draw equal numbers, and no generator is touched.

Left out: terms of divergences, which no vectors can express (`Case.dense_reason`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flce.backends.contract import (
    CLASSES,
    ENTRIES_PER_TOKEN,
    FUSED_PRODUCT_BLOCK,
    LOGPROB,
    TARGET,
    WORD_CLASSES,
    ExactEntries,
    GradientCall,
    Marks,
    RowOutputs,
    SampledEntries,
    Samples,
    log_sum_exp,
)
from flce.backends.formulas import softmax_factor_with_entropy, softmax_minus_target
from flce.backends.sampling import IGNORED, NO_TARGET, pack_marks
from flce.core.gemm import slice_columns
from flce.core.problem import LinearTerm
from flce.engine.case import ROW_MULTIPLE, Case, ceil_div
from flce.engine.pass_context import CandidateGrads, GradientTile, PassContext
from flce.engine.rows import Rows, Selection
from flce.engine.schedules.gradients import Blocks
from flce.engine.schedules.schedule import NO_SIZES, Deferred, Schedule, Statistics, sizes_up_to, statistics_schedule

# The logarithm of a lower bound is smaller by this, so that rounding does not make it larger than the sum.
BOUND_MARGIN = 2.0**-10
# Is added to the logits of targets, so that they are frequent classes.
TARGET_SCORE = 2.0**20
# Number of sizes of the memory for values of entries.
ENTRY_SIZES = 16
# The number of the bias among the terms.
BIAS = -1
# Classes of a block if there are too many entries.
DENSE_COLS = 4096
# Maximum bytes of the marks of a chunk.
MAX_MARK_BYTES = 128 << 20


def local_classes(ctx: PassContext, ids: Tensor) -> Tensor:
    """Return the ids; NO_TARGET for ids that are not a class of this process."""
    return ids.clamp(min=NO_TARGET).masked_fill_(ids >= ctx.vocab_size, NO_TARGET)


def local_targets(ctx: PassContext) -> Tensor:
    """Return the target of each row, (rows,) int64; NO_TARGET if it is not a class of this process, or IGNORED."""
    target = ctx.rows.target
    return local_classes(ctx, target).masked_fill_(target == ctx.rows.spec.ignore_index, IGNORED)


class FrequentClasses:
    """The frequent classes of this process as a head of their own, with gathered rows of the weights.

    Attributes:
        ids: (K,) int64 the classes.
        place: (V + 2,) int64 the column of each class, or NO_TARGET. Behind them IGNORED and NO_TARGET, so that these
            numbers, as indices, have themselves as columns.
        weights: (K, H) of each term.
    """

    def __init__(self, ctx: PassContext, ids: Tensor, target: Tensor) -> None:
        """target: of `local_targets`."""
        self._context, self.ids = ctx, ids
        self.place = ctx.new((ctx.vocab_size + 2,), torch.int64).fill_(NO_TARGET)
        self.place[IGNORED].fill_(IGNORED)  # An assignment copies from the host, and waits for the device.
        self.place[ids] = torch.arange(len(ids), device=ids.device)
        self.weights: list[Tensor] = []
        for _, weight in ctx.terms:
            gathered = ctx.new((len(ids), weight.shape[1]), weight.dtype)
            self.weights.append(torch.index_select(weight, 0, ids, out=gathered))
        bias = ctx.problem.linear_bias
        self._bias = None if bias is None else bias[ids]
        self._target = self.place[target]

    def _chunk_context(self, tokens: slice, **more: Any) -> PassContext:
        """Return the context of some rows and these classes alone. In forward it has a normalizer of its own."""
        ctx, rows = self._context, self._context.rows
        spec = replace(rows.spec, ignore_index=IGNORED, stats=(), z_loss=0.0, label_smoothing=0.0)
        problem = replace(
            ctx.problem, terms=tuple(map(LinearTerm, ctx.term_inputs(tokens), self.weights)),
            target=slice_columns(self._target, tokens), linear_bias=self._bias, class_weight=None, token_weight=None,
            spec=spec, inverse_temperature=rows.tile_inputs(tokens).inverse_temperature, shard=None,
        )  # fmt: skip
        normalizer, out = slice_columns(ctx.normalizer, tokens), None
        if rows.out is not None:
            out = RowOutputs.allocate(spec, normalizer.dtype, (problem.num_tokens,), ctx.new)
            normalizer = out.normalizer
        of_chunk = Rows(Selection(problem, None), rows.scales, ctx.arena, normalizer, out)
        return replace(ctx, rows=of_chunk, top_k=None, **more)

    def compute_bound(self, tokens: slice) -> Tensor:
        """Return the log-sum-exp of these classes of all processes for some rows, float32."""
        ctx = self._chunk_context(tokens)
        rows, cols = ctx.problem.num_tokens, ctx.vocab_size
        ctx.compute_statistics(
            slice(0, rows), None if ctx.in_registers else ctx.new_tile(rows, cols, ctx.dtypes.logits)
        )
        return self._context.rows.max_over_processes(log_sum_exp(ctx.normalizer).to(torch.float32))

    def compute_gradient(self, tokens: slice, tile: GradientTile) -> Tensor:
        """Return the gradient of the logits of some rows, (rows, K); 0 at targets and candidates."""
        ctx = self._context
        exact = slice_columns(self._target, tokens)[:, None]
        if ctx.candidate_grads is not None:
            exact = torch.cat((exact, self.place[local_classes(ctx, ctx.candidate_grads.ids[tokens])]), 1)
        zeros = CandidateGrads(exact, torch.zeros_like(exact, dtype=torch.float32), None)
        of_chunk = self._chunk_context(
            tokens, row_gradient=ctx.gradient_call(tokens).row_gradient, candidate_grads=zeros
        )
        return of_chunk.compute_gradient(slice(0, len(exact)), of_chunk.all_classes, tile)


def choose_frequent(ctx: PassContext, means: list[Tensor], target: Tensor, out: Tensor) -> Tensor:
    """Write the frequent classes of this process to `out`, (K,): targets, and the classes with the largest logits of
    the mean hidden state. If there are more targets, those with the largest logits. means: (1, H) of each term; target:
    of `local_targets`.

    Return the bits of the frequent classes, (words,) int32."""
    bias = ctx.problem.linear_bias
    logits = ctx.new_tile(1, ctx.vocab_size + 2, ctx.normalizer.dtype)  # behind the classes for other targets
    z = logits[:, : ctx.vocab_size]
    ctx.write_logits([mean.nan_to_num(0.0, 0.0, 0.0) for mean in means], ctx.all_classes, z)
    if bias is not None:
        z += bias
    if ctx.rows.spec.scale < 0.0:
        z.neg_()
    logits[0, target] += TARGET_SCORE
    ctx.write_largest(z[0], out)
    words = ctx.new((ceil_div(ctx.vocab_size, WORD_CLASSES),), torch.int32)
    return words.copy_(pack_marks(ctx.new((ctx.vocab_size,), torch.bool, zero=True).index_fill_(0, out, True)))


class SampledGradients:
    """Backward: computes gradients from `PassContext.samples`. For each chunk of rows `add_frequent`, then
    `add_entries`; at the end `finish`."""

    def __init__(self, ctx: PassContext, rows: int, sample_below: float) -> None:
        self._context, self._samples, self._sample_below = ctx, ctx.samples, sample_below
        self._target = local_targets(ctx)
        self._frequent = frequent = FrequentClasses(ctx, self._samples.frequent, self._target)
        self._tile = ctx.new_gradient_tile(rows, len(frequent.ids))
        accum = ctx.normalizer.dtype
        # By term. The bias is a term whose input is 1.
        hidden_sizes = {k: ctx.terms[k].weight.shape[1] for k in ctx.dw_terms}
        if ctx.problem.needs.bias:
            hidden_sizes[BIAS] = 1
        is_empty = ctx.selection.num_rows == 0
        self._dense_dw = {k: ctx.new((len(frequent.ids), size), accum, is_empty) for k, size in hidden_sizes.items()}
        # By term: the share of frequent classes in dX of a chunk.
        self._dense_dx: dict[int, Tensor] = {}
        # With label smoothing the gradient of each class k of row i has the term -f_i w_k.
        self._class_weight: Tensor | None = None
        self._sums_of_rows: dict[int, Tensor] = {}
        if ctx.problem.spec.label_smoothing:
            given = ctx.rows.class_weight
            weight = ctx.new((ctx.vocab_size,), accum).fill_(1.0) if given is None else given.to(accum)
            self._class_weight = weight
            self._weighted_rows = {k: ctx.multiply_vector(weight, ctx.terms[k].weight).sum(0) for k in ctx.dx_terms}
            self._sums_of_rows = {k: ctx.new((size,), accum, zero=True) for k, size in hidden_sizes.items()}
        self.allocate_entries(0)

    def allocate_entries(self, num_entries: int) -> None:
        """Allocate memory for values of the list's entries, and behind them of all targets and candidates."""
        ctx, accum = self._context, self._context.normalizer.dtype
        # Few different sizes: launches of kernels are prepared once for a size.
        step = ceil_div(len(self._samples.classes), ENTRY_SIZES)
        self._num_listed = num_entries = ceil_div(num_entries, step) * step if step else 0
        num_exact = 1 if ctx.candidate_grads is None else 1 + ctx.candidate_grads.ids.shape[1]
        size = num_entries + num_exact * ctx.selection.num_rows
        # With adapters the logits of the entries are a sum over the terms.
        logits = ctx.new((num_entries,), accum, zero=True) if len(ctx.terms) > 1 else None
        self._entries = SampledEntries(
            ctx.new((size,), torch.int32), ctx.new((size,), accum), ctx.new((size,), torch.int32), logits,
            ctx.rows.first_class, self._sample_below,
        )  # fmt: skip
        self._entries.classes.fill_(ctx.vocab_size)

    def add_frequent(self, tokens: slice) -> None:
        """Compute the share of frequent classes in dX of some rows, and add the rows to their share of dW. And the
        entries of targets and candidates, so that the device has work while the host waits for the number of others."""
        ctx, xs, frequent = self._context, self._context.term_inputs(tokens), self._frequent
        call, dlogits, smoothing = ctx.gradient_call(tokens), frequent.compute_gradient(tokens, self._tile), None
        if self._class_weight is not None:
            inverse, smoothing = call.inputs.inverse_temperature, call.row_gradient[CLASSES] * call.spec.scale
            smoothing = smoothing if inverse is None else smoothing * inverse
        for k, dense_dw in self._dense_dw.items():
            x = dlogits.new_ones(len(dlogits), 1) if k == BIAS else xs[k]
            ctx.matmul(dlogits.t(), x, out=dense_dw, accumulate=tokens.start > 0)
            if smoothing is not None:
                self._sums_of_rows[k] += ctx.multiply_vector(smoothing, x).sum(0)
        for k in ctx.dx_terms:
            self._dense_dx[k] = ctx.new(xs[k].shape, ctx.normalizer.dtype)
            ctx.matmul(dlogits, frequent.weights[k], out=self._dense_dx[k])
            if smoothing is not None:
                self._dense_dx[k].addr_(smoothing, self._weighted_rows[k], alpha=-1.0)
        self._exact = self._exact_entries(call, tokens)

    def add_entries(self, tokens: slice) -> None:
        """Write dX of some rows, and the values of their entries."""
        ctx, xs = self._context, self._context.term_inputs(tokens)
        rows = ctx.gradient_call(tokens), self._samples.select_rows(tokens), self._exact, self._entries
        if self._entries.logits is not None:
            for x, term in zip(xs, ctx.terms, strict=True):
                ctx.backend.sampled_gradient(x, term.weight, *rows, None, None, None, True)
        for k, (x, term) in enumerate(zip(xs, ctx.terms, strict=True)):
            grad = ctx.dx_memory(k) if k in ctx.dx_terms else None
            if k == 0 or grad is not None:
                dense = self._dense_dx.pop(k, None)
                ctx.backend.sampled_gradient(x, term.weight, *rows, dense, grad, ctx.gradient_scale, False)
        for memory, exact in zip(self._entries[:3], self._exact, strict=True):
            memory[self._num_listed :].unflatten(0, (-1, self._exact.values.shape[1]))[tokens] = exact
        del self._exact

    def _exact_entries(self, call: GradientCall, tokens: slice) -> ExactEntries:
        """Return the entries of targets and candidates of some rows. Targets have their whole gradient: kernels omit
        them from the list. The share of the softmax of a candidate is in the list; if it is frequent
        `FrequentClasses.compute_gradient` left it out."""
        ctx, index, grads = self._context, self._context.selection.index, self._context.candidate_grads
        logprob, factors, inverse = call.normalizer[LOGPROB], call.row_gradient, call.inputs.inverse_temperature
        ids, z = slice_columns(self._target, tokens)[:, None], torch.zeros_like(logprob)[:, None]
        if call.spec.softcap is not None:  # Log-probabilities are rounded more than z near the cap.
            for x, term in zip(ctx.term_inputs(tokens), ctx.terms, strict=True):
                ctx.backend.row_products(x, term.weight, ids, z)
            z = z if call.inputs.bias is None else z + call.inputs.bias[ids.clamp(min=0)]
            z = call.spec.transform(z, inverse)
        of_target = softmax_minus_target(softmax_factor_with_entropy(factors, logprob), factors[TARGET], logprob)
        values = of_target[:, None] * call.spec.jacobian(z, inverse)
        if grads is not None:
            assert grads.terms is not None
            candidates, value, terms = (t[tokens] for t in (grads.ids, grads.values, grads.terms))
            count = torch.ones_like(value)
            ctx.backend.sum_equal(candidates, torch.ones_like(value), count)
            candidates = local_classes(ctx, candidates)
            is_left_out = (self._frequent.place[candidates] >= 0) & (candidates != ids)
            values = torch.cat((values, torch.where(is_left_out, value / count, terms)), 1)
            ids = torch.cat((ids, candidates), 1)
        rows = torch.arange(tokens.start, tokens.stop, device=ids.device) if index is None else index[tokens]
        return ExactEntries(rows[:, None], values, ids.masked_fill(ids < 0, ctx.vocab_size))

    def finish(self) -> None:
        """Compute dW and the gradient of the bias."""
        ctx, entries = self._context, self._entries
        del self._tile, self._samples
        self._frequent.weights.clear()
        if not self._dense_dw:
            return
        targets = ctx.problem.dw_targets
        classes, order = ctx.sort_entries(entries.classes)
        numbers = torch.arange(ctx.vocab_size + 1, out=ctx.new((ctx.vocab_size + 1,), torch.int32))
        bounds = torch.searchsorted(classes, numbers, out=ctx.new(numbers.shape, torch.int64))
        del classes, numbers
        for k, dense in self._dense_dw.items():
            if k == BIAS:
                x, grad, scale = dense.new_ones(ctx.problem.num_tokens, 1), ctx.db_memory()[:, None], None
            else:
                x, scale = ctx.terms[k].input, ctx.gradient_scale
                grad = targets[k] if k in targets else ctx.dw_memory(k).zero_()
            ctx.backend.sampled_weight_gradient(
                x, entries, order, bounds, self._frequent.place, dense, grad, scale, self._class_weight,
                self._sums_of_rows.get(k),
            )  # fmt: skip


def default_rows(c: Case) -> int:
    """Return the number of tokens of a chunk without a budget."""
    rows = MAX_MARK_BYTES // (4 * ceil_div(c.vocab_size, WORD_CLASSES))
    return max(1, min(c.chunk_rows, max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)))


@dataclass(frozen=True)
class Sampled(Deferred):
    """Loop over chunks for statistics and a list of entries, and again for gradients. One product, and gathers of rows
    of x and W. If the list is full, or a number is not finite, backward computes dense gradients."""

    rows: int
    sample_below: float
    fallback: Schedule

    samples = True

    @classmethod
    def sizes(cls, c: Case) -> range:
        return sizes_up_to(c.num_tokens) if c.samples and c.needs.any else NO_SIZES

    @classmethod
    def from_size(cls, c: Case, size: int) -> Sampled:
        below = c.options.sample_below
        assert below is not None
        dense = replace(c, options=replace(c.options, sample_below=None))
        fallback = Blocks.from_size(dense, min(c.vocab_size, DENSE_COLS))
        return cls(statistics_schedule(c, size, c.vocab_size), size, below, fallback)

    def forward(self, ctx: PassContext) -> None:
        assert isinstance(self.statistics, Statistics)
        logits = None if ctx.in_registers else ctx.new_tile(self.rows, self.statistics.cols, ctx.dtypes.logits)
        n, size, target = ctx.problem.num_tokens, ctx.vocab_size, local_targets(ctx)
        ctx.samples_memory = ctx.new((sum(Samples.sizes(n, size)),), torch.int32)
        samples, logarithm = ctx.samples, math.log(self.sample_below) - BOUND_MARGIN
        samples.bounds.zero_()
        means = [term.input.mean(0, keepdim=True) for term in ctx.terms]
        omitted = choose_frequent(ctx, means, target, samples.frequent)
        frequent = FrequentClasses(ctx, samples.frequent, target)
        # Products write the words of whole blocks.
        row_words = ceil_div(size, FUSED_PRODUCT_BLOCK) * FUSED_PRODUCT_BLOCK // WORD_CLASSES
        for chunk in ctx.chunks(self.rows):
            of_rows, targets = samples.select_rows(chunk), slice_columns(target, chunk)
            threshold = frequent.compute_bound(chunk)
            ctx.draw_seeds(threshold, chunk, of_rows.seeds)
            threshold.add_(logarithm).masked_fill_(targets == IGNORED, torch.inf)
            words = ctx.new((len(targets), row_words), torch.int32)
            ctx.compute_statistics(chunk, logits, Marks(threshold, of_rows.seeds, ctx.rows.first_class, words))
            ctx.backend.list_entries(words[:, : len(omitted)], omitted, of_rows)
            del words  # before the next ones are allocated
        if ctx.dw_terms and ctx.selection.index is None:  # dW of an ignored row that is not finite is NaN, as if dense.
            is_finite = torch.cat(means, 1).isfinite().all()
            samples.bounds[-1].masked_fill_(~is_finite, len(samples.classes) + 1)
        if self.statistics.top_k is not None:
            self.statistics.top_k.forward(ctx)

    def describe(self, c: Case) -> str:
        """Return the chunks, and the capacity of the list."""
        return f"{super().describe(c)}, at most {ENTRIES_PER_TOKEN} entries a token"

    def backward(self, ctx: PassContext) -> None:
        if ctx.problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.fallback.backward(ctx)
            return
        wait_for_number, gradients = ctx.count_entries(), SampledGradients(ctx, self.rows, self.sample_below)
        for chunk in ctx.chunks(self.rows):
            gradients.add_frequent(chunk)
            if chunk.start == 0:  # The first products run while the host waits for the number.
                num_entries = wait_for_number()
                if num_entries is None:
                    del gradients
                    self.fallback.backward(ctx)
                    return
                gradients.allocate_entries(num_entries)
            gradients.add_entries(chunk)
        for k in ctx.dx_terms:
            ctx.rows.start_dx_sum(k, ctx.dx_memory(k))  # while dW is computed
        gradients.finish()
