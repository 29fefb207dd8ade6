"""The steps of a pass that computes gradients from sampled entries: see `schedules/sampled.py`, which calls them.

Most probabilities of a token are nearly zero. With s = `ChunkOptions.sample_below`, an entry of the gradient of the
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
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce.backends.contract import (
    CLASSES,
    FUSED_PRODUCT_BLOCK,
    MAX,
    NORMALIZER_SLOTS,
    STATE_SLOTS,
    SUM,
    WORD_CLASSES,
    GradientCall,
    Marks,
    RowInputs,
    RowOutputs,
    SampledEntries,
    Samples,
    StatisticsCall,
    TileClasses,
    log_sum_exp,
    num_frequent,
)
from flce.backends.formulas import is_class
from flce.backends.sampling import IGNORED, NO_TARGET
from flce.core.gemm import padded_cols
from flce.core.problem import LinearTerm, LossSpec
from flce.core.slices import slice_columns, slice_rows
from flce.engine.case import ceil_div
from flce.engine.pass_context import PassContext

# The logarithm of a lower bound is smaller by this, so that rounding does not make it larger than the sum.
BOUND_MARGIN = 2.0**-10
# Number of sizes of the memory for values of entries.
ENTRY_SIZES = 16
# The number of the bias among the terms.
BIAS = -1


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
    """

    def __init__(self, ctx: PassContext, ids: Tensor, target: Tensor) -> None:
        """target: of `local_targets`."""
        self._context, self.ids = ctx, ids
        self.place = ctx.new((ctx.vocab_size + 2,), torch.int64).fill_(NO_TARGET)
        self.place[IGNORED].fill_(IGNORED)  # An assignment copies from the host, and waits for the device.
        self.place[ids] = torch.arange(len(ids), device=ids.device)
        self.terms: list[LinearTerm] = []
        for x, weight in ctx.terms:
            gathered = ctx.new((len(ids), weight.shape[1]), weight.dtype)
            self.terms.append(LinearTerm(x, torch.index_select(weight, 0, ids, out=gathered)))
        bias = ctx.problem.linear_bias
        self._bias = None if bias is None else bias[ids]
        self._tile = TileClasses(0, len(ids), len(ids), padded_cols(len(ids)), is_shard=True)
        self.target = self.place[target]

    def _inputs(self, inputs: RowInputs, spec: LossSpec, target: Tensor) -> tuple[RowInputs, LossSpec, TileClasses]:
        """Return the first fields of a call for these classes. target: some rows of the targets' columns."""
        inputs = inputs._replace(target=target, bias=self._bias, class_weight=None, token_weight=None)
        return inputs, replace(spec, ignore_index=IGNORED, stats=(), z_loss=0.0, label_smoothing=0.0), self._tile

    def compute_bound(self, xs: Sequence[Tensor], tokens: slice) -> Tensor:
        """Return the log-sum-exp of these classes of all processes for some rows, float32."""
        ctx, target = self._context, slice_columns(self.target, tokens)
        normalizer = ctx.new((NORMALIZER_SLOTS, len(target)), ctx.normalizer.dtype)
        out = RowOutputs(normalizer[0], None, normalizer, None, None, None, None, None)
        call = StatisticsCall(*self._inputs(ctx.rows.tile_inputs(tokens), ctx.rows.spec, target), out)
        if ctx.in_registers:
            ctx.backend.fused_statistics(xs[0], self.terms[0].weight, call)
            bound = log_sum_exp(normalizer)
        else:
            state = ctx.new((STATE_SLOTS, len(target)), normalizer.dtype)
            ctx.backend.statistics(self._logits(xs), call, state)
            bound = state[MAX] + state[SUM].log()
        return ctx.rows.max_over_processes(bound.to(torch.float32))

    def write_gradient(self, xs: Sequence[Tensor], tokens: slice, call: GradientCall, out: Tensor) -> None:
        """Write the gradient of the logits of some rows, (rows, K); 0 at targets and candidates. `call`: for all
        classes."""
        ctx, target = self._context, slice_columns(self.target, tokens)
        call = GradientCall(*self._inputs(call.inputs, call.spec, target), call.normalizer, call.row_gradient)
        if ctx.in_registers:
            ctx.backend.fused_gradient(xs[0], self.terms[0].weight, out, call)
        else:
            ctx.backend.gradient(self._logits(xs), out, call)
        exact = target[:, None]
        if ctx.candidate_grads is not None:
            exact = torch.cat((exact, self.place[local_classes(ctx, ctx.candidate_grads.ids[tokens])]), 1)
        ctx.backend.write_entries(out, exact, torch.zeros_like(exact, dtype=torch.float32), 0)

    def candidate_values(self, tokens: slice) -> Tensor:
        """Return what `PassContext.candidate_grads` add to the gradients of some rows, (rows, K). Entries and targets
        have the share of the softmax; for candidates that are frequent `write_gradient` left it out."""
        ctx, grads = self._context, self._context.candidate_grads
        assert grads is not None
        assert grads.terms is not None
        ids, values, terms = (t[tokens] for t in (grads.ids, grads.values, grads.terms))
        count = torch.ones_like(values)
        ctx.backend.sum_equal(ids, torch.ones_like(values), count)
        is_frequent = self.place[local_classes(ctx, ids)] >= 0
        is_left_out = is_frequent & (ids != slice_columns(ctx.rows.target, tokens)[:, None])
        return torch.where(is_left_out, values / count, terms)

    def _logits(self, xs: Sequence[Tensor]) -> Tensor:
        logits = self._context.new_tile(len(xs[0]), len(self.ids), self._context.dtypes.logits)
        self._context.write_logits(xs, self._tile.columns, logits, self.terms)
        return logits


def choose_frequent(ctx: PassContext, target: Tensor, out: Tensor) -> None:
    """Write the frequent classes of this process to `out`, (K,): targets, and the classes with the largest logits of
    the mean hidden state. If there are more targets, those with the largest logits. target: of `local_targets`."""
    bias = ctx.problem.linear_bias
    logits = ctx.new_tile(1, ctx.vocab_size + 2, ctx.normalizer.dtype)  # behind the classes for other targets
    z = logits[:, : ctx.vocab_size]
    # Hidden states of ignored tokens may be NaN or infinite.
    means = [term.input.mean(0, keepdim=True).nan_to_num(0.0, 0.0, 0.0) for term in ctx.terms]
    ctx.write_logits(means, ctx.all_classes, z)
    if bias is not None:
        z += bias
    if ctx.rows.spec.scale < 0.0:
        z.neg_()
    ctx.backend.choose_frequent(logits[0], target, out)


class Sampler:
    """Forward: marks entries while statistics are computed, and lists them in `samples`, views of `memory`."""

    def __init__(self, ctx: PassContext, sample_below: float) -> None:
        self._context, self._sample_below = ctx, sample_below
        n = ctx.problem.num_tokens
        self.memory = ctx.new((sum(Samples.sizes(n, ctx.vocab_size)),), torch.int32)
        self.samples = Samples.from_memory(self.memory, n, ctx.vocab_size)
        self.samples.bounds.zero_()
        self._target = local_targets(ctx)
        choose_frequent(ctx, self._target, self.samples.frequent)
        self._frequent = FrequentClasses(ctx, self.samples.frequent, self._target)
        # Products write the words of whole blocks.
        num_words = ceil_div(ctx.vocab_size, FUSED_PRODUCT_BLOCK) * FUSED_PRODUCT_BLOCK // WORD_CLASSES
        self._omitted = ctx.new((num_words,), torch.int32)
        ctx.backend.mark_frequent(self._frequent.place[: ctx.vocab_size], self._omitted)

    def compute(self, tokens: slice, logits: Tensor | None) -> None:
        """Compute the statistics of some rows, see `PassContext.compute_statistics`, and list their entries."""
        ctx, xs, index = self._context, self._context.term_inputs(tokens), self._context.selection.index
        target, samples = slice_columns(self._target, tokens), self.samples.select_rows(tokens)
        threshold = self._frequent.compute_bound(xs, tokens)
        index = None if index is None else index[tokens]
        logarithm = math.log(self._sample_below) - BOUND_MARGIN
        ctx.backend.set_thresholds(xs[0], target, index, tokens.start, logarithm, threshold, samples.seeds)
        words = ctx.new((len(target), len(self._omitted)), torch.int32)
        ctx.compute_statistics(tokens, logits, Marks(threshold, samples.seeds, ctx.rows.first_class, words))
        ctx.backend.list_entries(words, self._omitted, target, samples)


class SampledGradients:
    """Backward: computes gradients from `PassContext.samples`. For each chunk of rows `add_frequent`, then
    `add_entries`; at the end `finish`."""

    def __init__(self, ctx: PassContext, rows: int, sample_below: float) -> None:
        self._context, self._samples, self._sample_below = ctx, ctx.samples, sample_below
        self._frequent = frequent = FrequentClasses(ctx, self._samples.frequent, local_targets(ctx))
        self._tile = ctx.new_tile(rows, len(frequent.ids), ctx.dtypes.logits_grad)
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
        if ctx.problem.spec.label_smoothing:
            given = ctx.rows.class_weight
            weight = ctx.new((ctx.vocab_size,), accum).fill_(1.0) if given is None else given.to(accum)
            self._class_weight = weight
            self._weighted_rows = {k: ctx.multiply_vector(weight, ctx.terms[k].weight).sum(0) for k in ctx.dx_terms}
            self._sums_of_rows = {k: ctx.new((size,), accum, zero=True) for k, size in hidden_sizes.items()}
        self.allocate_entries(0)

    @staticmethod
    def row_bytes(ctx: PassContext) -> int:
        """Return the bytes of a row of a chunk."""
        hidden_sizes = sum(ctx.terms[k].input.shape[1] for k in ctx.dx_terms)
        of_frequent = num_frequent(ctx.vocab_size) * ctx.dtypes.logits_grad.itemsize
        return of_frequent + hidden_sizes * ctx.normalizer.element_size()

    def allocate_entries(self, num_entries: int) -> None:
        """Allocate memory for values of the list's entries, and behind them of all candidates."""
        ctx, accum = self._context, self._context.normalizer.dtype
        # Few different sizes: launches of kernels are prepared once for a size.
        step = ceil_div(len(self._samples.classes), ENTRY_SIZES)
        num_entries = ceil_div(num_entries, step) * step if step else 0
        size = num_entries + (0 if ctx.candidate_grads is None else ctx.candidate_grads.ids.numel())
        self._entries = SampledEntries(
            ctx.new((size,), torch.int32), ctx.new((size,), accum), ctx.new((size,), torch.int32), num_entries,
            ctx.rows.first_class, self._sample_below,
        )  # fmt: skip
        self._entries.classes.fill_(ctx.vocab_size)
        # With adapters the logits of the entries are a sum over the terms.
        self._logits = ctx.new((num_entries,), accum, zero=True) if len(ctx.terms) > 1 else None

    def add_frequent(self, tokens: slice) -> None:
        """Compute the share of frequent classes in dX of some rows, and add the rows to their share of dW."""
        ctx, xs, frequent = self._context, self._context.term_inputs(tokens), self._frequent
        call, dlogits = ctx.gradient_call(tokens), slice_rows(self._tile, slice(0, len(xs[0])))
        frequent.write_gradient(xs, tokens, call, dlogits)
        smoothing = self._smoothing_factors(call)
        for k, dense_dw in self._dense_dw.items():
            x = dlogits.new_ones(len(dlogits), 1) if k == BIAS else xs[k]
            ctx.matmul(dlogits.t(), x, out=dense_dw, accumulate=tokens.start > 0)
            if smoothing is not None:
                self._sums_of_rows[k] += ctx.multiply_vector(smoothing, x).sum(0)
        for k in ctx.dx_terms:
            self._dense_dx[k] = ctx.new(xs[k].shape, ctx.normalizer.dtype)
            ctx.matmul(dlogits, frequent.terms[k].weight, out=self._dense_dx[k])
            if smoothing is not None:
                self._dense_dx[k].addr_(smoothing, self._weighted_rows[k], alpha=-1.0)

    def add_entries(self, tokens: slice) -> None:
        """Write dX of some rows, and the values of their entries."""
        ctx, xs = self._context, self._context.term_inputs(tokens)
        samples, index = self._samples.select_rows(tokens), ctx.selection.index
        candidates = None if ctx.candidate_grads is None else self._add_candidates(tokens)
        if self._logits is not None:
            for x, term in zip(xs, ctx.terms, strict=True):
                ctx.backend.sampled_logits(x, term.weight, samples, self._logits)
        for k, (x, term) in enumerate(zip(xs, ctx.terms, strict=True)):
            grad: Tensor | None = None
            if k in ctx.dx_terms:
                grad = slice_rows(ctx.dx_memory(k), tokens) if index is None else ctx.dx_memory(k)
            if k == 0 or grad is not None:
                ctx.backend.sampled_gradient(
                    x, term.weight, ctx.gradient_call(tokens), samples, tokens.start, self._entries,
                    logits=self._logits, dense=self._dense_dx.pop(k, None), grad=grad,
                    index=None if index is None else index[tokens], gradient_scale=ctx.gradient_scale,
                    candidates=candidates,
                )  # fmt: skip

    def _add_candidates(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Write the entries of candidates of some rows. Return their classes and values, (rows, K)."""
        ctx, entries, index = self._context, self._entries, self._context.selection.index
        assert ctx.candidate_grads is not None
        ids, values = ctx.candidate_grads.ids[tokens], self._frequent.candidate_values(tokens)
        rows = torch.arange(tokens.start, tokens.stop, device=ids.device) if index is None else index[tokens]
        classes = torch.where(is_class(ids, ctx.vocab_size), ids, ctx.vocab_size)
        for out, value in ((entries.rows, rows[:, None]), (entries.values, values), (entries.classes, classes)):
            out[entries.num_listed :].view_as(ctx.candidate_grads.ids)[tokens] = value
        return ids, values

    def _smoothing_factors(self, call: GradientCall) -> Tensor | None:
        """Return f of each row, see `_class_weight`; None without label smoothing."""
        if self._class_weight is None:
            return None
        inverse, factors = call.inputs.inverse_temperature, call.row_gradient[CLASSES] * call.spec.scale
        return factors if inverse is None else factors * inverse

    def finish(self) -> None:
        """Compute dW and the gradient of the bias."""
        ctx, entries = self._context, self._entries
        del self._tile, self._samples
        self._frequent.terms.clear()
        if not self._dense_dw:
            return
        classes, order = ctx.sort_entries(entries.classes)
        numbers = torch.arange(ctx.vocab_size + 1, out=ctx.new((ctx.vocab_size + 1,), torch.int32))
        bounds = torch.searchsorted(classes, numbers, out=ctx.new(numbers.shape, torch.int64))
        del classes, numbers
        for k, dense in self._dense_dw.items():
            x, grad, scale = ctx.terms[k].input, None, ctx.gradient_scale
            if k == BIAS:
                x, grad, scale = dense.new_ones(len(x), 1), ctx.db_memory()[:, None], None
            added = None if self._class_weight is None else (self._class_weight, self._sums_of_rows[k])
            ctx.backend.sampled_weight_gradient(
                x, entries, order, bounds, self._frequent.ids, self._frequent.place, dense,
                ctx.dw_memory(k) if grad is None else grad, scale, added,
            )  # fmt: skip
