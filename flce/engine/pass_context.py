"""What a schedule works with: the tensors of one call, memory for more, and the steps that schedules are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import STATE_SLOTS, Backend, RowInputs, RowOutputs, Tile, TileCall
from flce.core import gemm
from flce.core.gemm import COLUMN_MULTIPLE, padded_cols
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, accumulation_dtype
from flce.core.slices import slice_columns, slice_rows
from flce.engine.arena import Arena
from flce.engine.case import BLOCK_ROWS, Dtypes
from flce.engine.selection import Selection
from flce.engine.shards import FullVocab
from flce.engine.top_k import TopK


class CandidateGrads(NamedTuple):
    """Gradients of some logits of each row. Equal ids of a row have equal values."""

    ids: Tensor  # (rows, K)
    values: Tensor  # (rows, K)


@dataclass
class PassContext:
    """One forward or backward pass.

    Sizes: N tokens, of which `num_rows` are worked on; V classes; H the hidden size of a term.

    Attributes:
        vocab: the classes that are worked on, and what is known of all: problem, tokens, normalizer and results.
        backend: what is done to tiles.
        arena: where memory comes from.
        dtypes: of what is made.
        in_registers: whether the backend's products keep logits in registers: those that are wanted for statistics, or
            a second time for their gradient.
        gradient_scale: () what gradients of logits are too large by, see `Dtypes.has_gradient_scale`; None: 1.
        row_gradient: (slots, rows), see `TileCall.row_gradient`; None: that of the loss.
        candidate_grads: gradients of some logits of each row, which are written over what the others are made of.
        top_k: the largest logits of each row, which are collected while statistics are made.
    """

    vocab: FullVocab
    backend: Backend
    arena: Arena
    dtypes: Dtypes
    in_registers: bool
    gradient_scale: Tensor | None = None
    row_gradient: Tensor | None = None
    candidate_grads: CandidateGrads | None = None
    top_k: TopK | None = None

    def __post_init__(self) -> None:
        self.problem: LinearCrossEntropyProblem = self.vocab.problem
        self.selection: Selection = self.vocab.selection
        """Which tokens are worked on."""
        self.normalizer: Tensor = self.vocab.gradient_normalizer
        """(slots, rows), of all classes."""
        self.out: RowOutputs | None = self.vocab.local_out
        """Where statistics of the classes go. None in backward."""
        self.terms: tuple[LinearTerm, ...] = self.problem.terms
        self.vocab_size: int = self.problem.vocab_size
        self.all_classes = slice(0, self.vocab_size)
        """All of them."""
        needs = self.problem.needs
        self.dx_terms = [k for k, needed in enumerate(needs.inputs) if needed]
        """Terms whose dX is asked for."""
        self.dw_terms = [k for k, needed in enumerate(needs.weights) if needed]
        """Terms whose dW is asked for."""
        self._dx: dict[int, Tensor] = {}
        self._dw: dict[int, Tensor] = {}
        self._db: Tensor | None = None
        self._gathered: tuple[slice, list[Tensor]] | None = None
        self._chunk_row_gradient: tuple[slice, Tensor] | None = None
        self._logits_per_block = 0

    # ------------------------------------------------------------------------------------------------- loops

    def is_single_chunk(self, rows: int) -> bool:
        """Whether a chunk of `rows` tokens has all of them."""
        return rows >= self.problem.num_tokens

    def chunks(self, step: int) -> Iterator[slice]:
        """The tokens that are worked on, at most `step` at a time. If the device has counted them, the host waits for
        their number after the first chunk."""
        start, stop = 0, self.selection.upper_bound_rows
        while start < stop:
            yield slice(start, min(start + step, stop))
            start, stop = start + max(1, step), self.selection.num_rows

    def blocks(
        self, step: int, start: int = 0, stop: int | None = None, leading_blocks: Sequence[slice] = ()
    ) -> Iterator[slice]:
        """The classes, at most `step` at a time; the blocks of `leading_blocks` before the others."""
        yield from leading_blocks
        yield from self.pieces(
            leading_blocks[-1].stop if leading_blocks else start, self.vocab_size if stop is None else stop, step
        )

    def pieces(self, start: int, stop: int, step: int) -> Iterator[slice]:
        """From `start` to `stop`, at most `step` at a time."""
        for begin in range(start, stop, max(1, step)):
            yield slice(begin, min(begin + step, stop))

    # ------------------------------------------------------------------------------------------------ memory

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.arena.new(shape, dtype)

    def round_to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum of gradients, or a copy of another dtype that is divided by the gradient scale."""
        if x.dtype == dtype:
            return x
        out = self.new(*x.shape, dtype=dtype)
        self.round(x, out)
        return out

    def round(self, x: Tensor, out: Tensor) -> None:
        """Write a sum of gradients to memory of another dtype, divided by the gradient scale."""
        if self.gradient_scale is None:
            out.copy_(x)
        else:
            torch.mul(x, self._one_over_unit, out=out)

    @functools.cached_property
    def _one_over_unit(self) -> Tensor:
        assert self.gradient_scale is not None
        return 1.0 / self.gradient_scale

    def has_to_unscale(self, memory: Tensor) -> bool:
        """Return whether gradients have to be divided by the gradient scale before they are in this memory."""
        return self.dtypes.has_gradient_scale and memory.dtype == self.dtypes.weight_grad

    def take_rows(self, x: Tensor, out: Tensor, part: slice) -> None:
        """A part of the selected rows of `x`, (N, H)."""
        assert self.selection.index is not None
        torch.index_select(x, 0, self.selection.index[part], out=out)

    def scatter_rows(self, x: Tensor, out: Tensor, part: slice, add: bool = False) -> None:
        """`x`, a part of the selected rows, to its places among all rows of `out`, (N, H)."""
        assert self.selection.index is not None
        # To copy takes a fifth of the time. Rows differ, so both are deterministic.
        put = out.index_add_ if add else out.index_copy_
        put(0, self.selection.index[part], x)

    matmul = staticmethod(gemm.matmul)

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        """(rows, cols) to (cols,)."""
        # A product, because a sum over rows in another dtype takes memory that is not counted.
        gemm.matmul(x.new_ones(1, x.shape[0]), x, out=out[None], accumulate=True)

    def new_tile(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """(rows, cols), of rows whose stride is aligned: products on others run several times slower."""
        return slice_columns(self.new(rows, padded_cols(cols), dtype=dtype), slice(0, cols))

    def new_overlapping_tiles(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Two tiles in one memory. Each row of a gradient that takes fewer bytes lies where that of logits begins."""
        logits = self.new(rows, padded_cols(cols), dtype=self.dtypes.logits)
        return logits[:, :cols], logits.view(self.dtypes.logits_grad)[:, :cols]

    def new_gradient_tile(self, rows: int, cols: int, is_recomputed: bool = False) -> Tensor:
        """A tile of gradients of logits, or of exponentials. Logits of another dtype are made beside it, in a block
        whose size depends on that of the tile. `is_recomputed`: statistics of such a tile were made before."""
        if self.dtypes.has_wider_logits and not self.in_registers:
            self._logits_per_block = self.dtypes.logits_per_block(rows, cols, is_recomputed)
        return self.new_tile(rows, cols, self.dtypes.logits_grad)

    def term_inputs(self, part: slice) -> list[Tensor]:
        """Some rows of the input of each term, (rows, H). If they are gathered, that of the part before is given
        back."""
        if self._gathered is None or self._gathered[0] != part:
            self._gathered = None
            xs = [slice_rows(term.input, part) for term in self.terms]
            if self.selection.index is not None:
                xs = [self.new(*x.shape, dtype=x.dtype) for x in xs]
                for term, out in zip(self.terms, xs, strict=True):
                    self.take_rows(term.input, out, part)
            self._gathered = part, xs
        return self._gathered[1]

    def release_inputs(self) -> None:
        """Gives the memory of gathered rows back."""
        self._gathered = None

    def dx_memory(self, term: int, dtype: torch.dtype | None = None) -> Tensor:
        """(N, H): where dX of a term is summed. Allocated at first use: by then the device has the first logits to
        make. `dtype`: another one than that of the result."""
        if term not in self._dx:
            # What no tile writes must be zero: dropped rows.
            zero = self.selection.index is not None or self.selection.num_rows == 0
            self._dx[term] = self.arena.new(self.terms[term].input.shape, dtype or self.dtypes.input_grad, zero)
        return self._dx[term]

    def set_dx_memory(self, term: int, memory: Tensor) -> None:
        self._dx[term] = memory

    def dw_memory(self, term: int = 0) -> Tensor:
        """(V, H): where dW of a term is summed. Allocated at first use."""
        if term not in self._dw:
            zero = self.selection.num_rows == 0  # all rows are dropped
            self._dw[term] = self.arena.new(self.terms[term].weight.shape, self.dtypes.weight_grad, zero)
        return self._dw[term]

    def db_memory(self) -> Tensor:
        """(V,): where the gradient of the bias is summed."""
        if self._db is None:
            self._db = self.arena.new((self.vocab_size,), accumulation_dtype(self.problem.dtype), zero=True)
        return self._db

    def finish_gradients(self) -> list[Tensor]:
        """The gradients that are needed, in the order of `Needs.flat`. What no tile was added to is made here."""
        grads = [self.dx_memory(k) for k in self.dx_terms]
        for k, grad in zip(self.dx_terms, grads, strict=True):
            self.vocab.finish_dx_sum(k, grad)
        grads += [self.dw_memory(k) for k in self.dw_terms]
        if not self.problem.needs.bias:
            return grads
        return [*grads, self.db_memory() if self.gradient_scale is None else self.db_memory().div_(self.gradient_scale)]

    # ------------------------------------------------------------------------------------------- from logits

    def write_logits(self, xs: Sequence[Tensor], cols: slice, out: Tensor) -> None:
        """The sum of all terms for a tile: `xs` are its rows of their inputs, `out` (rows, cols)."""
        for k, (term, x) in enumerate(zip(self.terms, xs, strict=True)):
            self.matmul(x, slice_rows(term.weight, cols).t(), out=out, accumulate=k > 0)

    def compute_logit_blocks(
        self, xs: Sequence[Tensor], part: slice, cols: slice, tile: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Logits of some rows and classes: a piece of the rows and of the classes, its logits, and its part of the tile
        of gradients, whose memory logits of the same dtype have."""
        if not self._logits_per_block:
            self.write_logits(xs, cols, tile)
            yield part, cols, tile, tile
            return
        memory = self.new(self._logits_per_block, dtype=self.dtypes.logits)
        # Aligned rows, and of a few rows more classes.
        max_stripes = self._logits_per_block // COLUMN_MULTIPLE
        step = min(BLOCK_ROWS, part.stop - part.start, max_stripes)
        width = max_stripes // step * COLUMN_MULTIPLE
        for piece in self.pieces(part.start, part.stop, step):
            tile_rows = slice(piece.start - part.start, piece.stop - part.start)
            piece_inputs = [slice_rows(x, tile_rows) for x in xs]
            for block_cols in self.pieces(cols.start, cols.stop, width):
                size = block_cols.stop - block_cols.start
                row_stride = padded_cols(size)
                block = memory[: len(piece_inputs[0]) * row_stride].view(-1, row_stride)[:, :size]
                self.write_logits(piece_inputs, block_cols, block)
                yield (
                    piece,
                    block_cols,
                    block,
                    tile[tile_rows, block_cols.start - cols.start : block_cols.stop - cols.start],
                )

    def compute_statistics_and_gradient(self, logits: Tensor, dlogits: Tensor, part: slice) -> None:
        """Losses and gradient for some rows and all classes, in one pass. `dlogits` may be `logits`."""
        if not self.vocab.is_sharded:
            self.backend.loss_and_gradient(logits, dlogits, self.statistics_call(part, with_gradient=True))
            return
        call = self.statistics_call(part)
        self.backend.statistics(logits, call._replace(tile=call.tile._replace(keep_logits=True)), None)
        self.vocab.merge_results(part)
        self.backend.gradient(logits, dlogits, self._gradient_call(part, part, self.all_classes))

    def compute_statistics(self, xs: Sequence[Tensor], part: slice, logits: Tensor | None) -> None:
        """Losses for some rows and all classes. Their logits are made in `logits`, (rows or more, some classes), a tile
        after the other; or in registers, if `gradient` makes them there."""
        call, state = self.statistics_call(part), None
        if self.in_registers:
            self.backend.product_statistics(xs[0], self.terms[0].weight, call)
            return
        assert logits is not None
        rows = part.stop - part.start
        if logits.shape[1] < self.vocab_size:
            state = self.new(STATE_SLOTS, rows, dtype=self.normalizer.dtype)
        for cols in self.blocks(logits.shape[1]):
            block = logits[:rows, : cols.stop - cols.start]
            self.write_logits(xs, cols, block)
            self.collect_top_k(block, part, cols)
            self.backend.statistics(block, call._replace(tile=self.tile(cols)), state)

    def compute_gradient(self, xs: Sequence[Tensor], part: slice, cols: slice, dlogits: Tensor) -> None:
        """The gradient of a tile's logits, which are made again. dlogits: (rows, cols)."""
        if self.in_registers:
            self.backend.product_gradient(
                xs[0], slice_rows(self.terms[0].weight, cols), dlogits, self._gradient_call(part, part, cols)
            )
        else:
            for piece, block_cols, logits, grad in self.compute_logit_blocks(xs, part, cols, dlogits):
                self.backend.gradient(logits, grad, self._gradient_call(part, piece, block_cols))
        if self.candidate_grads is not None:
            self.backend.write_entries(
                dlogits, self.candidate_grads.ids[part], self.candidate_grads.values[part], cols.start
            )

    def collect_top_k(self, logits: Tensor, part: slice, cols: slice) -> None:
        """The largest of some logits, (rows, cols), if they are asked for."""
        if self.top_k is not None:
            bias = self.problem.linear_bias
            self.top_k.add(logits, None if bias is None else slice_columns(bias, cols), part, cols)

    # ------------------------------------------------------------------------------------------------- others

    def statistics_call(self, part: slice, with_gradient: bool = False) -> TileCall:
        """The call that writes statistics of some rows, for all classes. Where the tokens' weights have a gradient,
        which is made of losses without them, it does not know them; gradients get them as they get an upstream one.
        `with_gradient`: it makes gradients, too."""
        assert self.out is not None
        weighted = not self.problem.token_weight_grad
        upstream = slice_columns(self.token_weights, part) if with_gradient and not weighted else None
        inputs, out = self._row_inputs(part, weighted), self.out.select_rows(part)
        return TileCall(inputs, self.problem.spec, self.tile(self.all_classes), out, upstream=upstream)

    def _gradient_call(self, chunk: slice, part: slice, cols: slice) -> TileCall:
        """The call that makes gradients of some rows of a chunk and some classes, from what statistics left."""
        inputs, row_gradient = self._row_inputs(part, scaled=False), self.row_gradient
        if row_gradient is not None:
            row_gradient = slice_columns(row_gradient, part)
        else:
            row_gradient = slice_columns(
                self._compute_row_gradient(chunk), slice(part.start - chunk.start, part.stop - chunk.start)
            )
        spec, normalizer = self.problem.spec, slice_columns(self.normalizer, part)
        return TileCall(inputs, spec, self.tile(cols), None, normalizer, row_gradient=row_gradient)

    def _compute_row_gradient(self, chunk: slice) -> Tensor:
        """`TileCall.row_gradient` of the loss of a chunk."""
        if self._chunk_row_gradient is None or self._chunk_row_gradient[0] != chunk:
            self._chunk_row_gradient = None
            self._chunk_row_gradient = chunk, self.vocab.compute_row_gradient(chunk)
        return self._chunk_row_gradient[1]

    @functools.cached_property
    def token_weights(self) -> Tensor:
        """(rows,) those of tokens, 0 where they are ignored."""
        weight, target = self.selection.token_weight, self.selection.target
        assert weight is not None
        return weight.masked_fill(target == self.problem.spec.ignore_index, 0.0)

    def _row_inputs(self, part: slice, weighted: bool = True, scaled: bool = True) -> RowInputs:
        """`scaled`: with all that losses are multiplied by, which is in a row's gradient."""
        scales = self.vocab.local_scales.for_gradient() if scaled else None
        inputs = self.selection.row_inputs(part, scales, weighted and scaled)
        return inputs if scaled or self.problem.spec.label_smoothing else inputs._replace(class_weight=None)

    def tile(self, cols: slice) -> Tile:
        size = cols.stop - cols.start
        return Tile(cols.start, size, self.vocab_size, padded_cols(size))
