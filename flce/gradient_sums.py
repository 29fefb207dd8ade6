"""The gradients while they are summed over tiles: where each sum is, in which dtype, and when it is rounded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flce.backends import get_backend
from flce.backends.contract import TargetTerms
from flce.chunk_plan import COMPACTION_ROWS, ChunkPlan, Sweep, halfway, input_in_freed_memory, input_piece
from flce.gemm import matmul
from flce.problem import LinearCrossEntropyProblem, accumulation_dtype
from flce.selection import Selection


class GradientSums:
    """All gradients while they are summed over tiles, in one sweep after the other."""

    def __init__(self, p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: Selection) -> None:
        self._terms = [_TermGradients(k, p, plan, selection) for k in range(len(p.terms))]
        self._plan, self._sweep = plan, plan.sweeps[0]
        self._bias = None
        if p.needs.bias:
            self._bias = torch.zeros(p.vocab_size, dtype=accumulation_dtype(p.dtype), device=p.device)

    def start(self, sweep: Sweep) -> None:
        self._sweep = sweep
        for term in self._terms:
            term.start(sweep)

    def unwritten(self, start: int) -> Tensor:
        """The memory of the gradient of the head's weight from a class on."""
        weight = self._terms[0].weight
        assert weight is not None
        return weight[start:]

    def add(self, dlogits: Tensor, xs: Sequence[Tensor], rows: slice, cols: slice) -> None:
        for term, x in zip(self._terms, xs, strict=True):
            term.add(dlogits, x, rows, cols)
        if self._bias is not None and self._sweep.weights:
            # A product, because a sum over rows in another dtype takes memory that the plan knows nothing of.
            ones = dlogits.new_ones(1, dlogits.shape[0])
            matmul(ones, dlogits, out=self._bias[None, cols], accumulate=True)

    def add_whole_rows(
        self, tiles: Sequence[Tensor], behind: Tensor, x: Tensor, rows: slice, factors: Tensor | None
    ) -> None:
        """`add` for `engine._whole_rows` of a plan with `ChunkPlan.late_normalization`. They are what
        `Backend.product_exponentials` left, or, without `factors`, the gradient of the logits."""
        if len(tiles) > 1:
            self._terms[0].add_lent_rows(tiles, x, factors)
        else:
            self._terms[0].add_whole_rows(tiles[0], behind, x, rows, factors)

    def round(self, sweep: Sweep) -> None:
        """Gradients that the sweep has completed, to the dtype in which they are returned."""
        if sweep.stop == self._plan.vocab_size:
            for term in self._terms:
                term.round(self._plan.dtype)

    def result(self) -> list[Tensor]:
        """In the order of `Needs.flat`."""
        grads = (*(term.input for term in self._terms), *(term.weight for term in self._terms), self._bias)
        return [grad for grad in grads if grad is not None]


class _TermGradients:
    """The gradients of one term while they are summed over tiles; None for those that are not needed.

    They are allocated when first asked for: by then the device has the logits of the first tile to make.
    """

    def __init__(self, number: int, p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: Selection) -> None:
        self._term, self._plan, self._selection = p.terms[number], plan, selection
        self._needs_input, self._needs_weight = p.needs.inputs[number], p.needs.weights[number]
        self._lent_input = number == 0 and plan.lent_input_sum
        self._sweep = plan.sweeps[0]
        # (chunk, H_k) and (block, H_k): the sums that are made apart.
        self._input_sum: Tensor | None = None
        self._weight_sum: Tensor | None = None

    def start(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._input_sum = self._weight_sum = None  # given back, before the next

    @functools.cached_property
    def input(self) -> Tensor | None:
        """(N, H_k)"""
        if not self._needs_input:
            return None
        x, selection, dtype = self._term.input, self._selection, self._sweep.input_dtype
        if self._lent_input:
            assert self.weight is not None
            size = x.numel() * dtype.itemsize // self.weight.dtype.itemsize
            return self.weight[self._plan.input_sum_start :].view(-1)[:size].view(dtype).view(x.shape)
        # What no tile writes must be zero: dropped rows.
        allocate = torch.empty if selection.index is None and selection.num_rows > 0 else torch.zeros
        return allocate(x.shape, dtype=dtype, device=x.device)

    @functools.cached_property
    def weight(self) -> Tensor | None:
        """(V, H_k)"""
        if not self._needs_weight:
            return None
        weight = self._term.weight
        allocate = torch.empty if self._selection.num_rows > 0 else torch.zeros  # if all rows are dropped
        return allocate(weight.shape, dtype=self._sweep.weight_dtype, device=weight.device)

    def add(self, dlogits: Tensor, x: Tensor, rows: slice, cols: slice) -> None:
        """The share of a tile: `dlogits` (rows, cols), `x` its rows of the term's input."""
        sweep = self._sweep
        if sweep.inputs and self.input is not None:
            if self._input_sum is None and sweep.input_sum is not None:
                self._input_sum = x.new_empty((sweep.rows, x.shape[1]), dtype=sweep.input_sum)
            self._add_input(self.input, dlogits, rows, cols)
        if sweep.weights and self.weight is not None:
            self._add_weight(self.weight, dlogits, x, rows, cols)

    def add_whole_rows(
        self,
        tile: Tensor,  # (rows, V)
        behind: Tensor,  # memory that the tile leaves
        x: Tensor,  # (rows, H); may be written over if it is gathered rows
        rows: slice,
        factors: Tensor | None,  # (2, all rows)
    ) -> None:
        """See `GradientSums.add_whole_rows`. The weight's first: what it takes is in the memory of the input's."""
        backend, selection, weight = get_backend(x.device), self._selection, self._term.weight
        target, ignore = selection.target[rows], selection.problem.spec.ignore_index
        index = None if selection.index is None else selection.index[rows]
        if self.weight is not None and factors is not None:
            if index is not None:
                scaled = x
            elif self.input is not None:
                scaled = self.input[rows]
            else:
                scaled = torch.empty_like(x)
            backend.combine_rows(x, None, scaled, target, factors[:, rows], ignore, None)
            if rows.start == 0 and rows.stop == selection.num_rows:
                backend.weight_gradient([self.weight], [tile], scaled, self._target_terms(factors))
            else:
                self._add_weight(
                    self.weight,
                    tile,
                    scaled,
                    rows,
                    slice(0, len(weight)),
                    lambda sums: backend.add_to_targets(sums, self._target_terms(factors)),
                )
        elif self.weight is not None:
            self._add_weight(self.weight, tile, x, rows, slice(0, len(weight)))
        if self.input is None:
            return
        out = self.input[rows] if index is None else self.input
        of_rows = tile.new_ones(2, len(x), dtype=torch.float32) if factors is None else factors[:, rows]
        of_targets = None if factors is None else weight
        for part, total in _in_freed_memory(tile, behind, out if index is None else x, self._sweep.rows):
            matmul(tile[part], weight, out=total)
            result, places = (out[part], None) if index is None else (out, index[part])
            backend.combine_rows(total, of_targets, result, target[part], of_rows[:, part], ignore, places)

    def add_lent_rows(self, tiles: Sequence[Tensor], x: Tensor, factors: Tensor | None) -> None:
        """The same for tiles of all rows, (N, some classes) each, of which all but the first are in the memory of the
        gradient of the weight: that comes last, and of it the last classes first. `factors`: (2, N)."""
        backend, weight, target = get_backend(x.device), self._term.weight, self._selection.target
        size, hidden = x.shape
        ignore = self._selection.problem.spec.ignore_index
        columns = [tile.columns for tile in self._plan.exponential_tiles]
        scaled = None
        if self.input is not None:
            total = x.new_empty(size, hidden, dtype=torch.float32)
            for tile, cols in zip(tiles, columns, strict=True):
                matmul(tile, weight[cols], out=total, accumulate=cols.start > 0)
            of_rows = total.new_ones(2, size) if factors is None else factors
            backend.combine_rows(total, None if factors is None else weight, self.input, target, of_rows, ignore, None)
            scaled = total.view(-1).view(x.dtype)[: x.numel()].view(x.shape)
        assert self.weight is not None
        grads = [self.weight[cols] for cols in columns]
        if factors is None:
            for grad, tile in zip(reversed(grads), reversed(tiles), strict=True):
                matmul(tile.t(), x, out=grad)
        else:
            scaled = torch.empty_like(x) if scaled is None else scaled
            backend.combine_rows(x, None, scaled, target, factors, ignore, None)
            backend.weight_gradient(grads, tiles, scaled, self._target_terms(factors))

    def _target_terms(self, factors: Tensor) -> TargetTerms:
        """Of all rows that are worked on. `factors`: (2, rows), of which the second are the targets' own."""
        selection, rows = self._selection, slice(0, self._selection.num_rows)
        index = None if selection.index is None else selection.index[rows]
        ignore_index = selection.problem.spec.ignore_index
        return TargetTerms(self._term.input, index, selection.target[rows], factors[1, rows], ignore_index)

    def _add_weight(
        self,
        grad: Tensor,
        dlogits: Tensor,
        x: Tensor,
        rows: slice,
        cols: slice,
        complete: Callable[[Sequence[Tensor]], None] | None = None,  # called with the sums before they are rounded
    ) -> None:
        sweep, last = self._sweep, rows.stop == self._selection.num_rows
        if sweep.weight_halves:
            self._add_halves(grad, dlogits, x, rows.start == 0, last, complete)
            return
        if self._weight_sum is None and sweep.weight_sum is not None:
            self._weight_sum = x.new_empty((sweep.cols, x.shape[1]), dtype=sweep.weight_sum)
        total = grad[cols] if self._weight_sum is None else self._weight_sum[: cols.stop - cols.start]
        matmul(dlogits.t(), x, out=total, accumulate=rows.start > 0)
        if last and complete is not None:
            complete([total])
        if self._weight_sum is not None and last:
            grad[cols] = total

    def _add_halves(
        self,
        grad: Tensor,
        dlogits: Tensor,
        x: Tensor,
        first: bool,
        last: bool,
        complete: Callable[[Sequence[Tensor]], None] | None,
    ) -> None:
        """Sums in float32, of the first half of the classes in the memory of `grad`, see `chunk_plan.halfway`."""
        half, stop, hidden = halfway(len(grad)), self._sweep.weight_stop, grad.shape[1]
        if first:
            self._weight_sum = grad.new_empty((stop - half, hidden), dtype=torch.float32)
        behind = self._weight_sum
        assert behind is not None
        before = grad.view(-1)[: 2 * half * hidden].view(torch.float32).view(half, hidden)
        matmul(dlogits[:, :half].t(), x, out=before, accumulate=not first)
        if half < stop:
            matmul(dlogits[:, half:stop].t(), x, out=behind, accumulate=not first)
        if not last:
            return
        if complete is not None:
            complete([before, behind] if half < stop else [before])
        # Rows [a, 2a) of the gradient lie where rows [a / 2, a) of the sums did, which are done with.
        done, next_done = 0, min(half, COMPACTION_ROWS)
        while done < half:
            piece = before[done:next_done]
            grad[done:next_done] = piece.to(grad.dtype) if done == 0 else piece
            done, next_done = next_done, min(half, 2 * next_done)
        grad[half:stop] = behind
        self._weight_sum = None

    def round(self, dtype: torch.dtype) -> None:
        """What the sweep has made."""
        self._input_sum = self._weight_sum = None
        if self._sweep.inputs and self.input is not None:
            # A copy of what is in lent memory in any case: that is written over next.
            self.input = self.input.to(dtype, copy=self._lent_input)
        if self._sweep.weights and self.weight is not None:
            self.weight = self.weight.to(dtype)

    def _add_input(self, grad: Tensor, dlogits: Tensor, rows: slice, cols: slice) -> None:
        weight, index = self._term.weight[cols], self._selection.index
        if self._input_sum is not None:
            total = self._input_sum[: rows.stop - rows.start]
            matmul(dlogits, weight, out=total, accumulate=cols.start > 0)
            if cols.stop < len(self._term.weight):
                return
            if index is None:
                grad[rows] = total
            else:
                grad.index_copy_(0, index[rows], total.to(grad.dtype))
        elif index is None:
            matmul(dlogits, weight, out=grad[rows], accumulate=cols.start > 0)
        else:
            part = grad.new_empty(rows.stop - rows.start, grad.shape[1])
            matmul(dlogits, weight, out=part)
            # To copy takes a fifth of the time. Rows differ, so both are deterministic.
            put = grad.index_copy_ if cols.start == 0 else grad.index_add_
            put(0, index[rows], part)


def _in_freed_memory(tile: Tensor, behind: Tensor, spare: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the rows of `tile`, (rows, V), and for each float32 memory, (piece, H), for its product with the head.

    The two sums of dX have to meet before they are rounded, as those of dW have. If rows are few, or there is room
    `behind` the tile, that is where they do. Otherwise there is `spare`, (rows, H) in half precision: the memory of the
    result, or what comes before it. In its last two thirds is room for the first third of the rows, or fewer. Their
    part of the tile is then done with, and has room for more. `chunk_rows`: of the chunks before, which may be longer
    than the last. The plan has decided by them whether rows are few.
    """
    (size, hidden), room = spare.shape, tile.stride(0)
    memory = behind
    if behind.numel() < 2 * size * hidden and not input_in_freed_memory(chunk_rows, hidden, tile.shape[1]):
        memory = spare.new_empty(2 * size, hidden)
    if memory.numel() >= 2 * size * hidden:
        yield slice(0, size), memory.view(-1).view(torch.float32)[: size * hidden].view(size, hidden)
        return
    start, stop = 0, _aligned(min(size // 3, input_piece(hidden)))
    memory = spare[size - 2 * stop :]
    while start < size:
        piece = slice(start, stop)
        yield piece, memory.view(-1).view(torch.float32)[: (stop - start) * hidden].view(-1, hidden)
        memory = tile.as_strided((stop, room), (room, 1))
        start, stop = stop, min(size, stop + _aligned(stop * room // (2 * hidden)))


def _aligned(rows: int) -> int:
    """Vectors that are cut there begin where kernels want them to, at multiples of 16 bytes."""
    return max(16, rows // 16 * 16)
