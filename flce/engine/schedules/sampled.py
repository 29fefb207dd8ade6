"""A schedule that computes gradients from sampled entries (`ChunkOptions.sample_below`), see `engine/sampling.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flce.backends.contract import ENTRIES_PER_TOKEN, FUSED_PRODUCT_BLOCK, WORD_CLASSES, Marks, Samples, num_frequent
from flce.core.slices import slice_columns
from flce.engine.case import ROW_MULTIPLE, Case, ceil_div, equal_rows
from flce.engine.pass_context import PassContext
from flce.engine.sampling import BOUND_MARGIN, FrequentClasses, SampledGradients, choose_frequent, local_targets
from flce.engine.schedules.blocks import Blocks
from flce.engine.schedules.schedule import NO_SIZES, Deferred, Schedule, Statistics, sizes_up_to, statistics_schedule

# Classes of a block if there are too many entries.
DENSE_COLS = 4096
# Maximum bytes of the marks of a chunk.
MAX_MARK_BYTES = 128 << 20


def row_mark_bytes(vocab_size: int) -> int:
    """Return the bytes of the marks of a token."""
    return 4 * ceil_div(vocab_size, WORD_CLASSES)


def default_rows(c: Case) -> int:
    """Return the number of tokens of a chunk without a budget."""
    rows = MAX_MARK_BYTES // row_mark_bytes(c.vocab_size)
    return max(1, min(c.chunk_rows, max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)))


@dataclass(frozen=True)
class Sampled(Deferred):
    """Loop over chunks for statistics and a list of entries, and again for gradients. One product, and gathers of rows
    of x and W. If the list is full, or a sum of exponentials is not finite, backward computes dense gradients."""

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
        omitted = choose_frequent(ctx, target, samples.frequent)
        frequent = FrequentClasses(ctx, samples.frequent, target)
        # Products write the words of whole blocks.
        row_words = ceil_div(size, FUSED_PRODUCT_BLOCK) * FUSED_PRODUCT_BLOCK // WORD_CLASSES
        for chunk in ctx.chunks(self.rows):
            (x, *_), index, of_rows = ctx.term_inputs(chunk), ctx.selection.index, samples.select_rows(chunk)
            targets, threshold = slice_columns(target, chunk), frequent.compute_bound(chunk)
            index = None if index is None else index[chunk]
            ctx.backend.set_thresholds(x, targets, index, chunk.start, logarithm, threshold, of_rows.seeds)
            words = ctx.new((len(targets), row_words), torch.int32)
            ctx.compute_statistics(chunk, logits, Marks(threshold, of_rows.seeds, ctx.rows.first_class, words))
            ctx.backend.list_entries(words[:, : len(omitted)], omitted, targets, of_rows)
            del words  # before the next ones are allocated
        if self.statistics.top_k is not None:
            self.statistics.top_k.forward(ctx)

    def describe(self, c: Case) -> str:
        """Return the chunks, and the capacity of the list."""
        return f"{super().describe(c)}, at most {ENTRIES_PER_TOKEN} entries a token"

    def backward(self, ctx: PassContext) -> None:
        if ctx.problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.fallback.backward(ctx)
            return
        # Marks need no memory here: a chunk has more tokens. All chunks have about the same number.
        hidden_sizes = sum(ctx.terms[k].input.shape[1] for k in ctx.dx_terms)
        of_frequent = num_frequent(ctx.vocab_size) * ctx.dtypes.logits_grad.itemsize
        row_bytes = of_frequent + hidden_sizes * ctx.normalizer.element_size()
        rows = self.rows * row_mark_bytes(ctx.vocab_size) // (row_bytes * ROW_MULTIPLE) * ROW_MULTIPLE
        rows = equal_rows(ctx.selection.num_rows, max(self.rows, rows))
        wait_for_number, gradients = ctx.count_entries(), SampledGradients(ctx, rows, self.sample_below)
        for chunk in ctx.chunks(rows):
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
