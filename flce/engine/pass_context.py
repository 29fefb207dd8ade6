"""The context of one forward or backward pass: tensors, memory and the steps that schedules call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import (
    ENTRIES_PER_TOKEN,
    LOGPROB,
    STATE_SLOTS,
    Backend,
    GradientCall,
    Marks,
    Samples,
    Teacher,
    TileCall,
)
from flce.backends.formulas import finish_divergence
from flce.backends.sampling import row_seeds
from flce.core import gemm
from flce.core.gemm import COLUMN_MULTIPLE, offset_slice, padded_cols, slice_columns, slice_rows
from flce.core.log import find_caller, sampled_passes
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, accumulation_dtype
from flce.engine.case import BLOCK_ROWS, Dtypes
from flce.engine.rows import DeviceInt, Rows, Selection
from flce.engine.vectors import Arena, TopK


class CandidateGrads(NamedTuple):
    """Gradients of the logits of candidates: classes that a caller of `linear_logprobs` names for each token. Equal ids
    of a row have equal values."""

    ids: Tensor  # (rows, K)
    values: Tensor  # (rows, K)
    terms: Tensor | None  # (rows, K) the share of each candidate's own upstream gradient; only for sampled gradients


class GradientTile(NamedTuple):
    """Memory for the gradients of the logits of tiles, or for their exponentials."""

    memory: Tensor
    """(rows, cols) of the largest tile."""
    overlaps_logits: bool = False
    """True: gradients overwrite the logits of their tile, which have more bytes (`Dtypes.can_overlap`)."""
    logits_per_block: int = 0
    """Number of logits that are computed at a time, beside the tile; 0: all, in the memory of the tile."""


@dataclass
class PassContext:
    """Tensors, buffers and steps of one forward or backward pass.

    Sizes: N tokens, of which `selection.num_rows` are selected; V classes; H the hidden size of a term. In the methods
    of this package `tokens` and `chunk` are slices of the selected tokens, `classes` and `block` slices of the classes.
    `rows` and `cols` are numbers of tokens and classes.

    Attributes:
        rows: the problem, its selected tokens, their normalizer and results.
        backend: the operations on tiles.
        arena: allocator.
        dtypes: dtypes of tiles, sums and gradients.
        in_registers: see `Plan.in_registers`.
        gradient_scale: () number by which sums of gradients are divided when they are rounded, see
            `Dtypes.unscales_sums`; None: 1.
        row_gradient: (slots, rows) factors, see `GradientCall.row_gradient`; None: computed from the loss.
        candidate_grads: complete gradients of candidates' logits, which overwrite the gradients of these logits.
        top_k: the largest logits of each row, collected in the statistics pass.
        teacher: the teacher of a divergence.
        has_mixture: True if the terms of "jsd" were summed with the statistics, because a tile has all classes.
        samples_memory: `samples` of `schedules/sampled.py`: written by forward, read by backward.
    """

    rows: Rows
    backend: Backend
    arena: Arena
    dtypes: Dtypes
    in_registers: bool
    gradient_scale: Tensor | None = None
    row_gradient: Tensor | None = None
    candidate_grads: CandidateGrads | None = None
    top_k: TopK | None = None
    teacher: Teacher | None = None
    has_mixture: bool = False
    samples_memory: Tensor | None = None

    def __post_init__(self) -> None:
        self.new = self.arena.new
        self.problem: LinearCrossEntropyProblem = self.rows.problem  # type: ignore[assignment]
        self.selection: Selection = self.rows.selection
        """The selected tokens."""
        self.normalizer: Tensor = self.rows.gradient_normalizer
        """(slots, rows), of all classes."""
        self.terms: tuple[LinearTerm, ...] = self.problem.terms
        self._inputs = [term.input for term in (*self.terms, *(self.teacher.terms if self.teacher else ()))]
        self.vocab_size: int = self.problem.local_vocab_size
        """Number of classes of this process."""
        self.all_classes = slice(0, self.vocab_size)
        needs = self.problem.needs
        self.dx_terms = [k for k, needed in enumerate(needs.inputs) if needed]
        """Terms whose dX is needed."""
        self.dw_terms = [k for k, needed in enumerate(needs.weights) if needed]
        """Terms whose dW is needed."""
        self.dx_has_selected_rows = self.selection.index is None
        """False if a tile of gathered rows is added to rows of a dX of all rows."""
        self._dx: dict[int, Tensor] = {}
        self._dw: dict[int, Tensor] = {}
        self._db: Tensor | None = None
        self._gathered: tuple[slice, list[Tensor]] | None = None
        self._chunk_row_gradient: tuple[slice, Tensor] | None = None

    # ------------------------------------------------------------------------------------------------- loops

    def is_single_chunk(self, rows: int) -> bool:
        """Return True if a chunk of `rows` tokens has all tokens."""
        return rows >= self.problem.num_tokens

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the selected tokens, at most `rows` at a time. If their number is counted on the device, the host waits
        for it after the first chunk."""
        start, stop = 0, self.selection.num_rows_without_waiting
        while start < stop:
            yield slice(start, min(start + rows, stop))
            start, stop = start + max(1, rows), self.selection.num_rows

    def borrowed_blocks(self, blocks: Sequence[slice]) -> Iterator[slice]:
        """Yield the blocks of classes whose tiles are borrowed."""
        yield from blocks

    def split_range(self, range_: slice, step: int) -> Iterator[slice]:
        """Yield consecutive slices of a range of tokens or classes, at most `step` long."""
        for start in range(range_.start, range_.stop, max(1, step)):
            yield slice(start, min(start + step, range_.stop))

    # ------------------------------------------------------------------------------------------------ memory

    def unscale_and_round_to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a sum of gradients in `dtype`, divided by the gradient scale; `x` itself if it has this dtype."""
        if x.dtype == dtype:
            return x
        out = self.new(x.shape, dtype)
        self.unscale_and_round(x, out)
        return out

    def unscale_and_round(self, x: Tensor, out: Tensor, add: bool = False) -> None:
        """Write or add a sum of gradients to memory of another dtype, divided by the gradient scale. If it is added, it
        may be overwritten."""
        if add:
            out.add_(x if self.gradient_scale is None else x.mul_(self._inverse_gradient_scale))
        elif self.gradient_scale is None:
            out.copy_(x)
        else:
            torch.mul(x, self._inverse_gradient_scale, out=out)

    @functools.cached_property
    def _inverse_gradient_scale(self) -> Tensor:
        assert self.gradient_scale is not None
        return 1.0 / self.gradient_scale

    def take_rows(self, x: Tensor, out: Tensor, tokens: slice) -> None:
        """Write some of the selected rows of `x`, (N, H), to `out`."""
        assert self.selection.index is not None
        torch.index_select(x, 0, self.selection.index[tokens], out=out)

    def scatter_rows(self, x: Tensor, out: Tensor, tokens: slice, add: bool = False) -> None:
        """Write or add `x`, some of the selected rows, to these rows of `out`, (N, H)."""
        assert self.selection.index is not None
        # Copying takes a fifth of the time of adding. Indices are distinct, so both are deterministic.
        put = out.index_add_ if add else out.index_copy_
        put(0, self.selection.index[tokens], x)

    matmul = staticmethod(gemm.matmul)

    def multiply_vector(self, vector: Tensor, matrix: Tensor) -> Tensor:
        """Return two rows, (2, cols), whose sum is ``vector @ matrix``: the vector is the sum of two numbers of the
        matrix's dtype, which is precise enough."""
        peak = None
        if matrix.dtype == torch.float16:  # It has few numbers below 1e-5: the largest becomes 1.
            peak = vector.abs().amax().clamp_(min=1e-30)
            vector = vector / peak
        rounded = vector.to(matrix.dtype)
        product = self.new((2, matrix.shape[1]), vector.dtype)
        self.matmul(torch.stack((rounded, (vector - rounded).to(matrix.dtype))), matrix, out=product)
        return product if peak is None else product.mul_(peak)

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        """Add the sums over rows of `x`, (rows, cols), to `out`, (cols,)."""
        # A product, because a sum over rows in another dtype allocates memory that is not counted.
        gemm.matmul(x.new_ones(1, x.shape[0]), x, out=out[None], accumulate=True)

    def new_tile(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Allocate (rows, cols) with an aligned row stride: other strides make products several times slower."""
        return slice_columns(self.new((rows, padded_cols(cols)), dtype), slice(0, cols))

    def new_overlapping_tiles(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Allocate one memory for a tile of logits and the tile of their gradient. Rows of both begin at the same
        addresses, also if gradients have fewer bytes."""
        logits = self.new((rows, padded_cols(cols)), self.dtypes.logits)
        return logits[:, :cols], logits.view(self.dtypes.logits_grad)[:, :cols]

    def new_gradient_tile(self, rows: int, cols: int) -> GradientTile:
        """Allocate a tile for gradients of logits. If logits have more bytes, a small tile has the size of its logits,
        which their gradients overwrite. A larger tile has blocks, see `new_exponentials_tile`."""
        if not self.in_registers and self.dtypes.can_overlap(rows, cols):
            return GradientTile(self.new_overlapping_tiles(rows, cols)[1], overlaps_logits=True)
        return self.new_exponentials_tile(rows, cols)

    def new_exponentials_tile(self, rows: int, cols: int) -> GradientTile:
        """Allocate a tile for exponentials. If logits have more bytes, they are computed in blocks beside the tile."""
        has_blocks = self.dtypes.has_wider_logits and not self.in_registers
        logits_per_block = self.dtypes.logits_per_block(rows, cols) if has_blocks else 0
        return GradientTile(self.new_tile(rows, cols, self.dtypes.logits_grad), logits_per_block=logits_per_block)

    def term_inputs(self, tokens: slice) -> list[Tensor]:
        """Return some rows of the input of each term, (rows, H), then of each term of the teacher. If they are
        gathered, the rows of the previous call are freed."""
        if self._gathered is None or self._gathered[0] != tokens:
            self._gathered = None
            xs = [slice_rows(x, tokens) for x in self._inputs]
            if self.selection.index is not None:
                xs = [self.new(x.shape, x.dtype) for x in xs]
                for x, out in zip(self._inputs, xs, strict=True):
                    self.take_rows(x, out, tokens)
            self._gathered = tokens, xs
        return self._gathered[1]

    def release_inputs(self) -> None:
        """Free the memory of gathered rows."""
        self._gathered = None

    def dx_memory(self, term: int) -> Tensor:
        """Return the memory of dX of a term, (N, H), or of its sum (`start_dx_sums`). The memory is allocated at first
        use, after the first logits were launched."""
        if term not in self._dx:
            # Dropped rows must be zero: no tile writes them.
            zero = self.selection.index is not None or self.selection.num_rows == 0
            self._dx[term] = self.new(self.terms[term].input.shape, self.dtypes.grads, zero)
        return self._dx[term]

    def start_dx_sums(self, memory: Tensor | None = None) -> None:
        """Allocate a sum of dX of each term, (selected rows, H), for a loop over blocks of classes. `memory`: given for
        the sum of the only term."""
        # Adding each block to gathered rows of (N, H) took 0.26 ms a block, 13 ms of a call of 48 ms (16384 of 32768
        # rows, H = 2048, V = 128256, H100).
        self.dx_has_selected_rows = True
        for k in self.dx_terms:
            shape = self.selection.num_rows, self.terms[k].input.shape[1]
            self._dx[k] = self.new(shape, self.dtypes.sums, zero=shape[0] == 0) if memory is None else memory

    def finish_dx_sums(self) -> None:
        """Round the sums of `start_dx_sums`. If rows are gathered, copy them to dX of all rows."""
        for k in self.dx_terms:
            self._dx[k] = self.unscale_and_round_to(self._dx[k], self.problem.dtype)
            if self.selection.index is not None:
                selected, shape = self._dx[k], self.terms[k].input.shape
                self._dx[k] = self.new(shape, selected.dtype, zero=True)
                self.scatter_rows(selected, self._dx[k], slice(0, len(selected)))

    def dw_memory(self, term: int = 0) -> Tensor:
        """Return the memory of dW of a term, (V, H). It is allocated at first use."""
        if term not in self._dw:
            zero = self.selection.num_rows == 0
            self._dw[term] = self.new(self.terms[term].weight.shape, self.dtypes.grads, zero)
        return self._dw[term]

    def db_memory(self) -> Tensor:
        """Return the memory of the gradient of the bias, (V,)."""
        if self._db is None:
            self._db = self.new((self.vocab_size,), self.problem.accum, zero=True)
        return self._db

    def finish_gradients(self) -> list[Tensor]:
        """Return the needed gradients in the order of `Needs.flat`, or the gradients to which they were added. If there
        was no tile, they are allocated here."""
        dx, targets = [self.dx_memory(k) for k in self.dx_terms], self.problem.dw_targets
        dw = [targets[k] if k in targets else self.dw_memory(k) for k in self.dw_terms]
        for k, grad in zip(self.dx_terms, dx, strict=True):
            self.rows.finish_dx_sum(k, grad)
        if not self.problem.needs.bias:
            return [*dx, *dw]
        db = self.db_memory()
        return [*dx, *dw, db if self.gradient_scale is None else db.div_(self.gradient_scale)]

    # ------------------------------------------------------------------------------------------- from logits

    def write_logits(
        self, xs: Sequence[Tensor], classes: slice, out: Tensor, terms: Sequence[LinearTerm] | None = None
    ) -> None:
        """Write the sum of `terms`, by default all, for a tile to `out`, (rows, cols). `xs`: the tile's rows of their
        inputs; inputs behind them are not read."""
        for k, (term, x) in enumerate(zip(terms or self.terms, xs, strict=False)):
            self.matmul(x, slice_rows(term.weight, classes).t(), out=out, accumulate=k > 0)

    def compute_logit_blocks(
        self, xs: Sequence[Tensor], tokens: slice, classes: slice, tile: GradientTile
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Compute the logits of some tokens and classes in blocks (`case.BLOCK_BYTES`). Yield the tokens and classes of
        each block, its logits, and its memory in `tile`, whose memory has the size of these tokens and classes."""
        memory, overlaps_logits, logits_per_block = tile
        if not logits_per_block:
            logits = self._logits_under(memory) if overlaps_logits else memory
            self.write_logits(xs, classes, logits)
            yield tokens, classes, logits, memory
            return
        block = self.new((logits_per_block,), self.dtypes.logits)
        # `cols`, the classes of a block, is divisible by COLUMN_MULTIPLE. Blocks of fewer rows have more classes, and
        # blocks of a narrow tile more rows.
        max_rows, rows_of_tile = logits_per_block // COLUMN_MULTIPLE, logits_per_block // memory.stride(0)
        rows = min(max(BLOCK_ROWS, rows_of_tile), tokens.stop - tokens.start, max_rows)
        cols = max_rows // rows * COLUMN_MULTIPLE
        for block_tokens in self.split_range(tokens, rows):
            tile_rows = offset_slice(block_tokens, -tokens.start)
            block_inputs = [slice_rows(x, tile_rows) for x in xs]
            for block_classes in self.split_range(classes, cols):
                size = block_classes.stop - block_classes.start
                row_stride = padded_cols(size)
                logits = block[: len(block_inputs[0]) * row_stride].view(-1, row_stride)[:, :size]
                self.write_logits(block_inputs, block_classes, logits)
                grad = memory[tile_rows, offset_slice(block_classes, -classes.start)]
                yield block_tokens, block_classes, logits, grad

    def _logits_under(self, tile: Tensor) -> Tensor:
        """Return the logits in the memory of a tile of gradients, whose row stride has room for them."""
        (rows, cols), (row_stride, _) = tile.shape, tile.stride()
        logits_cols = cols * self.dtypes.logits.itemsize // self.dtypes.logits_grad.itemsize
        return tile.as_strided((rows, logits_cols), (row_stride, 1), tile.storage_offset()).view(self.dtypes.logits)

    def compute_statistics_and_gradient(self, logits: Tensor, dlogits: Tensor, tokens: slice) -> None:
        """Compute losses and the gradient of logits for some rows and all classes, in one pass. `dlogits` may be
        `logits`."""
        call = self.rows.statistics_call(tokens)
        if not self.rows.is_shard:
            self.backend.loss_and_gradient(logits, dlogits, call)
            return
        state = self.new((STATE_SLOTS, len(logits)), self.normalizer.dtype)
        self.backend.statistics(logits, call._replace(tile=call.tile._replace(keep_logits=True)), state)
        self.rows.keep_state(tokens, state)
        self.rows.merge_results(tokens)
        self.backend.gradient(logits, dlogits, self._gradient_call(tokens, tokens, self.all_classes))

    def compute_statistics(self, tokens: slice, logits: Tensor | None, marks: Marks | None = None) -> None:
        """Compute losses and statistics for some rows and all classes, and `marks` if they are given. Logits are
        computed in the memory of `logits`, (at least as many rows, some columns), one block after the other; or in
        registers."""
        call, xs, state, teacher = self.rows.statistics_call(tokens), self.term_inputs(tokens), None, self.teacher
        if self.in_registers:
            self.backend.fused_statistics(xs[0], self.terms[0].weight, call, marks)
            return
        assert logits is not None
        rows = tokens.stop - tokens.start
        needs_statistics = teacher is None or (self.problem.spec.stats and teacher.kind != "jsd")  # "jsd" repeats none
        if needs_statistics and (logits.shape[1] < self.vocab_size or self.rows.is_shard):
            state = self.new((STATE_SLOTS, rows), self.normalizer.dtype)
        for block in self.split_range(self.all_classes, logits.shape[1]):
            block_logits = logits[:rows, : block.stop - block.start]
            self.write_logits(xs, block, block_logits)
            self.collect_top_k(block_logits, tokens, block)
            tile = self.rows.tile_classes(block)._replace(keep_logits=teacher is not None)
            if marks is not None:
                self.backend.mark_entries(block_logits, call._replace(tile=tile), marks.select_classes(block.start))
            if needs_statistics:
                self.backend.statistics(block_logits, call._replace(tile=tile), state)
            if teacher is not None:
                self._compare(block_logits, xs, tokens, call._replace(tile=tile))
        self.rows.keep_state(tokens, state)

    def _compare(
        self, logits: Tensor, xs: Sequence[Tensor], tokens: slice, call: TileCall, grad: Tensor | None = None
    ) -> None:
        """Compute the teacher's logits of a tile from its rows of all inputs, and run `Backend.divergence`."""
        assert self.teacher is not None
        dtype = accumulation_dtype(self.teacher.terms[0].weight.dtype)
        teacher_logits = self.new_tile(len(logits), call.tile.cols, dtype)
        self.write_logits(xs[len(self.terms) :], call.tile.columns, teacher_logits, self.teacher.terms)
        teacher = self.teacher.select_rows(tokens)
        self.backend.divergence(logits, teacher_logits, call, teacher, grad)
        has_rows = call.tile.cols == self.vocab_size and not self.rows.is_shard
        self.has_mixture = has_rows and teacher.kind != self.problem.spec.divergence  # type: ignore[attr-defined]
        if self.has_mixture:  # The statistics for "jsd" are complete.
            finish_divergence(teacher.rows, "jsd")
            self.backend.divergence(logits, teacher_logits, call, teacher._replace(kind="jsd"))

    def compute_gradient(self, tokens: slice, classes: slice, tile: GradientTile) -> Tensor:
        """Recompute the logits of some tokens and classes and write their gradient to `tile`. Return the gradient,
        (rows, cols)."""
        xs, size = self.term_inputs(tokens), slice(0, classes.stop - classes.start)
        dlogits = slice_columns(slice_rows(tile.memory, slice(0, tokens.stop - tokens.start)), size)
        if self.in_registers:
            weight = slice_rows(self.terms[0].weight, classes)
            self.backend.fused_gradient(xs[0], weight, dlogits, self._gradient_call(tokens, tokens, classes))
        else:
            blocks = self.compute_logit_blocks(xs, tokens, classes, tile._replace(memory=dlogits))
            for block_tokens, block_classes, logits, grad in blocks:
                call = self._gradient_call(tokens, block_tokens, block_classes)
                if self.teacher is None:
                    self.backend.gradient(logits, grad, call)
                else:
                    block_xs = [slice_rows(x, offset_slice(block_tokens, -tokens.start)) for x in xs]
                    self._compare(logits, block_xs, block_tokens, call, grad)
        if self.candidate_grads is not None:
            self.backend.write_entries(
                dlogits, self.candidate_grads.ids[tokens], self.candidate_grads.values[tokens], classes.start
            )
        return dlogits

    def collect_top_k(self, logits: Tensor, tokens: slice, classes: slice) -> None:
        """Merge logits, (rows, cols), into the largest logits of their rows, if these are requested."""
        if self.top_k is not None:
            bias = self.problem.linear_bias
            self.top_k.add(logits, None if bias is None else slice_columns(bias, classes), tokens, classes)

    # ------------------------------------------------------------------------------------------------- others

    def gradient_call(self, chunk: slice) -> GradientCall:
        """Return the call that computes gradients of the tokens of a chunk and all classes."""
        return self._gradient_call(chunk, chunk, self.all_classes)

    @property
    def samples(self) -> Samples:
        assert self.samples_memory is not None
        return Samples.from_memory(self.samples_memory, self.problem.num_tokens, self.vocab_size)

    def count_entries(self) -> Callable[[], int | None]:
        """Begin to count the entries of `samples`. The result waits for the device and returns their number: None if
        there are more than the list has room for, or if a sum of exponentials is not finite. All processes of a divided
        head then compute dense gradients."""
        samples, rows = self.samples, self.selection.num_rows
        count = samples.bounds[rows]
        failed = (count > len(samples.classes)) | ~self.normalizer[:LOGPROB, :rows].isfinite().all()
        failures = self.rows.sum_over_processes(failed.to(torch.int64))
        number = DeviceInt(count.masked_fill(failures > 0, -1))

        def wait() -> int | None:
            num_entries = number.wait()
            _count_sampled_pass("dense" if num_entries < 0 else "sampled")
            return None if num_entries < 0 else num_entries

        return wait

    def draw_seeds(self, bounds: Tensor, tokens: slice, seeds: Tensor) -> None:
        """Write the seeds of the random numbers of some rows, whose sums of exponentials have these `bounds`."""
        index = self.selection.index
        positions = torch.arange(tokens.start, tokens.stop, device=seeds.device) if index is None else index[tokens]
        seeds.copy_(row_seeds(self.term_inputs(tokens)[0], positions, bounds))

    def write_largest(self, x: Tensor, out: Tensor) -> None:
        """Write the indices of the largest numbers of `x`, as many as `out` has, to `out`."""
        torch.topk(x, len(out), sorted=False, out=(x.new_empty(len(out)), out))

    def sort_entries(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return classes of entries in ascending order, and their positions before."""
        return torch.sort(classes, stable=True)

    def _gradient_call(self, chunk: slice, tokens: slice, classes: slice) -> GradientCall:
        """Return the call that computes gradients of some tokens of a chunk and some classes from the normalizer."""
        row_gradient, first_row = self.row_gradient, 0
        if row_gradient is None:
            row_gradient, first_row = self._compute_row_gradient(chunk), chunk.start
        inputs = self.rows.tile_inputs(tokens)
        if not self.rows.spec.label_smoothing:  # Only label smoothing still reads class weights.
            inputs = inputs._replace(class_weight=None)
        return GradientCall(
            inputs,
            self.rows.spec,
            self.rows.tile_classes(classes),
            slice_columns(self.normalizer, tokens),
            slice_columns(row_gradient, offset_slice(tokens, -first_row)),
        )

    def _compute_row_gradient(self, chunk: slice) -> Tensor:
        """Return `GradientCall.row_gradient` of the loss of a chunk. It is computed once for each chunk."""
        if self._chunk_row_gradient is None or self._chunk_row_gradient[0] != chunk:
            self._chunk_row_gradient = None
            self._chunk_row_gradient = chunk, self.rows.compute_row_gradient(chunk)
        return self._chunk_row_gradient[1]


def _count_sampled_pass(kind: str) -> None:
    """Count a backward pass in `sampled_passes`. Warn if most passes are dense."""
    sampled_passes[kind] += 1
    if kind == "dense" and 2 * sampled_passes["dense"] > sampled_passes.total():
        find_caller().warn(
            f"gradients are not sampled: a token needs more than {ENTRIES_PER_TOKEN} entries on average, or a sum of "
            "exponentials or a hidden state is not finite. This is so in most calls until now, and dense gradients "
            "take longer than without sample_below. flce.report(model) counts them",
            RuntimeWarning,
        )
