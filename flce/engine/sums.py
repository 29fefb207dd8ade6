"""Sums of dX and dW over tiles: their memory, and when they are rounded. Schedules add tiles to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flce.core.gemm import DIVIDED_PIECE_BYTES
from flce.core.slices import slice_rows
from flce.engine.borrowing import COMPACTION_ROWS, borrow_as, second_half_start
from flce.engine.case import BLOCK_BYTES
from flce.engine.pass_context import PassContext


def add_tile(
    s: PassContext,
    dlogits: Tensor,
    part: slice,
    cols: slice,
    dw_sums: Mapping[int, WeightSum] | None,
    with_dx: bool = True,
) -> None:
    """Add the share of a tile to all requested gradients: dX, dW and the gradient of the bias.

    Args:
        dlogits: (rows, cols) gradient of the tile's logits.
        dw_sums: sums of dW by term (`build_weight_sums`, `block_sum_builder`); None: add to dX only.
        with_dx: True to add to dX, which is summed in the memory of the result. `InputSum` sums it elsewhere.
    """
    totals = dw_sums or {}
    for k, x in enumerate(s.term_inputs(part)):
        if with_dx and k in s.dx_terms:
            _add_dx(s, k, dlogits, part, cols)
        if k in totals:
            totals[k].add(dlogits, x)
    if dw_sums is not None and s.problem.needs.bias:
        s.add_column_sums(dlogits, slice_rows(s.db_memory(), cols))


def _add_dx(s: PassContext, term: int, dlogits: Tensor, part: slice, cols: slice) -> None:
    grad, weight = s.dx_memory(term), slice_rows(s.terms[term].weight, cols)
    if s.selection.index is None and not s.has_to_unscale(grad):
        s.matmul(dlogits, weight, out=slice_rows(grad, part), accumulate=cols.start > 0)
        return
    share = s.new(len(dlogits), grad.shape[1], dtype=s.dtypes.sums if s.has_to_unscale(grad) else grad.dtype)
    s.matmul(dlogits, weight, out=share)
    _store_dx(s, share, grad, part, add=cols.start > 0)


def _store_dx(s: PassContext, share: Tensor, grad: Tensor, part: slice, add: bool) -> None:
    """Round dX of some tokens into the memory of dX. If rows are gathered, scatter or add them."""
    if s.selection.index is None:
        s.round(share, slice_rows(grad, part))
    else:
        s.scatter_rows(s.round_to(share, grad.dtype), grad, part, add)


class InputSum:
    """Sum of dX of a term over blocks of classes, for some tokens. If the result has fewer bits than sums, the sum has
    separate memory and is rounded after the last block."""

    def __init__(self, s: PassContext, term: int, rows: int, cols: int) -> None:
        self._context, self._term, self._max_rows = s, term, rows
        self._has_separate_memory = cols < s.vocab_size and s.dtypes.sums != s.problem.dtype
        self._sum: Tensor | None = None

    def add(self, dlogits: Tensor, part: slice, cols: slice) -> None:
        """Add the share of a tile. dlogits: (rows, cols)."""
        s, weight = self._context, self._context.terms[self._term].weight
        if not self._has_separate_memory:
            _add_dx(s, self._term, dlogits, part, cols)
            return
        if self._sum is None:
            self._sum = s.new(self._max_rows, weight.shape[1], dtype=s.dtypes.sums)
        total = self._sum[: len(dlogits)]
        s.matmul(dlogits, slice_rows(weight, cols), out=total, accumulate=cols.start > 0)
        if cols.stop == s.vocab_size:
            _store_dx(s, total, s.dx_memory(self._term), part, add=False)


class WeightSum:
    """Sum of dW of a term over chunks of tokens, for a block of classes, in the memory of the result."""

    def __init__(self, s: PassContext, term: int, cols: slice) -> None:
        self._context, self._term, self._cols = s, term, cols
        self._is_started = False

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Add the share of a chunk. dlogits: (rows, classes), x: (rows, H)."""
        self._context.matmul(dlogits.t(), x, out=self._sums()[0], accumulate=self._is_started)
        self._is_started = True

    def finish(self, before_rounding: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Round the sums after the last chunk. `before_rounding` is called before with the sums, of consecutive
        classes."""
        if self._is_started:
            if before_rounding is not None:
                before_rounding(self._sums())
            self._round()

    def _sums(self) -> list[Tensor]:
        return [slice_rows(self._context.dw_memory(self._term), self._cols)]

    def _round(self) -> None:
        pass


class BlockSum(WeightSum):
    """Sum of dW of a term for a block of classes, in memory that all blocks share. It is rounded after the last
    chunk."""

    def __init__(self, s: PassContext, term: int, cols: slice, memory: Tensor) -> None:
        super().__init__(s, term, cols)
        self._sum = memory[: cols.stop - cols.start]

    def _sums(self) -> list[Tensor]:
        return [self._sum]

    def _round(self) -> None:
        self._context.round(self._sum, self._context.dw_memory(self._term)[self._cols])


class DividedSum(WeightSum):
    """dW of a term for a block of classes and all tokens, divided by the gradient scale in the fused product before it
    is rounded."""

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        s, (out,) = self._context, self._sums()
        s.backend.divided_weight_gradient(out, dlogits, x, s.gradient_scale)


class PieceSum(WeightSum):
    """dW of a term for a block of classes and all tokens, in float32. The vendor's product does not divide by the
    gradient scale, so each piece of the classes is divided and rounded separately."""

    def __init__(self, s: PassContext, term: int, cols: slice, memory: Tensor) -> None:
        super().__init__(s, term, cols)
        self._memory = memory

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        s, (out,) = self._context, self._sums()
        for piece in s.pieces(0, len(out), len(self._memory)):
            total = self._memory[: piece.stop - piece.start]
            s.matmul(dlogits[:, piece].t(), x, out=total)
            s.round(total, out[piece])

    @staticmethod
    def allocate(s: PassContext, term: int, cols: int) -> Tensor:
        """Allocate memory for pieces of blocks of at most `cols` classes, or of wider blocks with borrowed tiles.

        A piece has at most half of the bytes of the gradients of a block's logits. If it had more, blocks would be
        chosen for a budget that is large enough for the logits of all classes. The logits of blocks are computed twice,
        by products of other shapes.
        """
        (tokens, hidden), size = s.terms[term].input.shape, s.dtypes.logits_grad.itemsize
        piece_bytes = max(DIVIDED_PIECE_BYTES, min(BLOCK_BYTES, tokens * cols * size // 2))
        return s.new(max(1, min(cols, piece_bytes // (4 * hidden))), hidden, dtype=s.dtypes.sums)


class HalvedSum(WeightSum):
    """Float32 sum of a half-precision dW over chunks, for the classes before `stop`. The sums of the first half of all
    classes fill the memory of dW. The sums of the other classes have separate memory.

    Complete sums are rounded in place, from the first class on. Each sum is read before its memory is overwritten. So a
    gradient that is summed in float32 needs twice its own memory, instead of three times with a cast.
    """

    def __init__(self, s: PassContext, term: int, stop: int) -> None:
        super().__init__(s, term, slice(0, stop))
        self._half, self._stop = second_half_start(s.vocab_size), stop
        self._second_half: Tensor | None = None

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        s, (first_half, *second_half) = self._context, self._sums()
        s.matmul(dlogits[:, : self._half].t(), x, out=first_half, accumulate=self._is_started)
        for total in second_half:
            s.matmul(dlogits[:, self._half : self._stop].t(), x, out=total, accumulate=self._is_started)
        self._is_started = True

    def _sums(self) -> list[Tensor]:
        grad, half = self._context.dw_memory(self._term), self._half
        hidden = grad.shape[1]
        if self._second_half is None:
            self._second_half = self._context.new(self._stop - half, hidden, dtype=torch.float32)
        first_half = borrow_as(grad, (half, hidden), torch.float32)
        return [first_half, self._second_half] if len(self._second_half) else [first_half]

    def _round(self) -> None:
        s, half, (first_half, *second_half) = self._context, self._half, self._sums()
        grad = s.dw_memory(self._term)
        # Rows [a, 2a) of the gradient lie where rows [a / 2, a) of the sums were, which are rounded already.
        done, next_done = 0, min(half, COMPACTION_ROWS)
        while done < half:
            piece = first_half[done:next_done]
            if done == 0:
                grad[:next_done].copy_(s.round_to(piece, grad.dtype))
            else:
                s.round(piece, grad[done:next_done])
            done, next_done = next_done, min(half, 2 * next_done)
        for total in second_half:
            s.round(total, grad[half : self._stop])
        self._second_half = None


def build_weight_sums(s: PassContext, rows: int, stop: int | None = None) -> dict[int, WeightSum]:
    """Return the sums of dW over chunks of `rows` tokens, by term, for the classes before `stop`."""
    stop, dtypes, is_single = s.vocab_size if stop is None else stop, s.dtypes, s.is_single_chunk(rows)
    if is_single and dtypes.has_gradient_scale:
        return block_sum_builder(s, rows, stop)(slice(0, stop))
    if not is_single and dtypes.weight_grad == s.problem.dtype != dtypes.sums:
        return {k: HalvedSum(s, k, stop) for k in s.dw_terms}
    return {k: WeightSum(s, k, slice(0, stop)) for k in s.dw_terms}


def finish_sums(dw_sums: Mapping[int, WeightSum]) -> None:
    """Round the sums of dW after the last chunk."""
    for total in dw_sums.values():
        total.finish()


def block_sum_builder(s: PassContext, rows: int, cols: int) -> Callable[[slice], dict[int, WeightSum]]:
    """Return a function that returns the sums of dW over chunks of `rows` tokens, by term, for a block of classes.
    Blocks have at most `cols` classes, or more if their tiles are borrowed."""
    memory: dict[int, Tensor] = {}

    def build(block: slice) -> dict[int, WeightSum]:
        return {k: build_for_term(k, block) for k in s.dw_terms}

    def build_for_term(k: int, block: slice) -> WeightSum:
        is_single = s.is_single_chunk(rows)
        if s.dtypes.sums == s.problem.dtype or (is_single and not s.dtypes.has_gradient_scale):
            return WeightSum(s, k, block)
        if is_single and s.in_registers:
            return DividedSum(s, k, block)
        if k not in memory:
            hidden = s.terms[k].weight.shape[1]
            memory[k] = PieceSum.allocate(s, k, cols) if is_single else s.new(cols, hidden, dtype=s.dtypes.sums)
        return (PieceSum if is_single else BlockSum)(s, k, block, memory[k])

    return build
