"""The algorithm: loops over tiles of logits, of which at most one exists at a time.

For every tile of `chunk_rows` tokens and `block_cols` classes

1. ``logits = sum of x W^T over the terms`` into a buffer that all tiles share, or into memory of the weight gradient
   that is not written yet; or, on some devices, into registers only (`ChunkPlan.fused_product`), together with 2;
2. the backend turns them into row statistics and losses, and into their own gradient;
3. for each term ``dx (+)= dlogits W`` and ``dW (+)= dlogits^T x``.

`forward` does all three in one go where the loss is reduced and a tile holds all classes (on some devices with
exponentials in the place of dlogits, which are normalized after 3: `ChunkPlan.late_normalization`), and then, if some
classes have had no part in 3, makes their tiles again (`ChunkPlan.remade_cols`); otherwise it stops at the statistics
and `backward` makes the tiles again, now knowing every row's normalizer and upstream gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce import row_vectors
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, TargetTerms, Tile
from flce.gemm import matmul, padded_cols
from flce.planning import COMPACTION_ROWS, ChunkPlan, Sweep, halfway, input_in_freed_memory, input_piece
from flce.problem import LinearCrossEntropyProblem, accumulation_dtype

# Gathering the rows that are not ignored pays if at least this share of them is dropped.
MIN_IGNORED_SHARE = 1 / 16


@dataclass(frozen=True)
class ForwardResult:
    loss: Tensor  # () or (N,)
    z_loss: Tensor | None  # like loss
    rows: RowOutputs  # of all N rows
    grads: list[Tensor]  # of the loss, times grad_unit; empty if the plan defers them
    grad_unit: Tensor | None  # () what the upstream gradient must be divided by; None: 1


def forward(problem: LinearCrossEntropyProblem, plan: ChunkPlan) -> ForwardResult:
    row_vectors.check_targets(problem)
    with_gradients = problem.needs.any and not plan.deferred
    late = plan.late_normalization and problem.num_tokens > 0 and _operands_fuse(problem)
    if late:
        get_backend(problem.device).prepare(problem, plan.skip_ignored)
    # Before the selection, which may wait for the device.
    constants = row_vectors.constants(problem) if with_gradients else row_vectors.statistics_constants(problem)
    selection = _Selection.of(problem, plan, late)
    rows = row_vectors.allocate(problem, selection.most_rows)
    unit, grads = None, []
    if with_gradients:
        assert constants is not None
        unit = row_vectors.grad_unit(problem, constants) if plan.grad_dtype == torch.float16 else None
        scaled = row_vectors.scaled(constants, unit)
        sums = _GradientSums(problem, plan, selection)
        (_losses_and_late_gradients if late else _losses_and_gradients)(problem, plan, selection, scaled, rows, sums)
        for sweep in plan.sweeps[1:]:
            _gradients(problem, plan, sweep, selection, scaled, rows.normalizer, None, sums)
        grads = sums.result()
    else:
        _statistics(problem, plan, selection, constants, rows)
    rows = selection.scatter(rows)
    loss, z_loss, _ = row_vectors.reduce(problem, rows, constants)
    return ForwardResult(loss, z_loss, rows, grads, unit)


def backward(problem: LinearCrossEntropyProblem, plan: ChunkPlan, normalizer: Tensor, upstream: Tensor) -> list[Tensor]:
    """The gradients, from recomputed logits.

    Args:
        normalizer: (2, N), as `forward` left it.
        upstream: gradient of the loss; () or, for ``reduction="none"``, (N,).
    """
    constants = row_vectors.constants(problem)
    selection = _Selection.of(problem, plan, False)
    accum = constants.dtype
    per_row = None
    if upstream.dim() == 0:
        constants = row_vectors.scaled(constants, upstream.to(accum))
    else:
        per_row = selection.take(upstream.to(accum))
    normalizer = selection.take(normalizer, dim=1)
    grads = _GradientSums(problem, plan, selection)
    for sweep in plan.sweeps:
        _gradients(problem, plan, sweep, selection, constants, normalizer, per_row, grads)
        grads.round(sweep)  # here, where the tile's memory has been given back
    return grads.result()


def _losses_and_gradients(
    p: LinearCrossEntropyProblem,
    plan: ChunkPlan,
    selection: _Selection,
    constants: Tensor,
    out: RowOutputs,
    grads: _GradientSums,
) -> None:
    """The first of the plan's sweeps, in which losses are made as well."""
    backend = get_backend(p.device)
    sweep = plan.sweeps[0]
    # Where the plan has no room for logits, because they were not to be in memory, they have little. That takes many
    # small products, for operands that lie where few do.
    step = plan.unfused_rows or sweep.rows
    few = _TileBuffer(p, plan, step, sweep.cols)
    buffer = few if plan.unfused_rows is None else _TileBuffer(p, plan, sweep.rows, plan.own_cols, logits=False)
    grads.start(sweep)
    cols = slice(0, plan.vocab_size)
    for rows in _pieces(selection.num_rows, sweep.rows):
        xs = selection.inputs(rows)
        tiles = _whole_rows(plan, buffer, grads, rows)
        for part in _pieces(rows.stop - rows.start, step):
            of_part = slice(rows.start + part.start, rows.start + part.stop)
            logits, dlogits, tile = few.tile(part, cols)
            _write_logits(p, [x[part] for x in xs], cols, logits)
            inputs = selection.row_inputs(of_part, constants)
            backend.loss_and_gradient(logits, dlogits, inputs, p.spec, tile, out.rows(of_part))
            if few is not buffer:
                for piece, t in zip(tiles, plan.exponential_tiles, strict=True):
                    piece[part] = dlogits[:, t.columns]
        if plan.late_normalization:
            grads.add_whole_rows(tiles, buffer.behind(rows), xs[0], rows, None)
        else:
            grads.add(tiles[0], xs, rows, cols)
        del xs  # gathered rows, before the next are


def _losses_and_late_gradients(
    p: LinearCrossEntropyProblem,
    plan: ChunkPlan,
    selection: _Selection,
    constants: Tensor,
    out: RowOutputs,
    grads: _GradientSums,
) -> None:
    """The same, with exponentials in the place of the gradient of the logits: normalized after the products."""
    backend, weight = get_backend(p.device), p.terms[0].weight
    sweep = plan.sweeps[0]
    buffer = _TileBuffer(p, plan, sweep.rows, plan.own_cols, logits=False)
    grads.start(sweep)
    # (2, rows) what rows of exponentials are multiplied by, and gradients of the targets' logits
    factors = out.loss.new_empty(2, selection.most_rows)
    count = selection.count
    start, stop = 0, selection.most_rows
    while start < stop:
        rows = slice(start, min(start + sweep.rows, stop))
        (x,) = selection.inputs(rows)
        exps = _whole_rows(plan, buffer, grads, rows)
        inputs = selection.row_inputs(rows, constants)
        on_device = None if count is None or start > 0 else count.on_device
        backend.product_exponentials(x, weight, exps, inputs, p.spec, out.rows(rows), factors[:, rows], on_device)
        # If the host does not know yet how many rows there are, it waits now, when the device has something to do.
        stop = selection.num_rows
        rows = slice(start, min(rows.stop, stop))
        size = rows.stop - rows.start
        if size > 0:
            grads.add_whole_rows([tile[:size] for tile in exps], buffer.behind(rows), x[:size], rows, factors)
        del x  # gathered rows, before the next are
        start = rows.stop


def _whole_rows(plan: ChunkPlan, buffer: _TileBuffer, grads: _GradientSums, rows: slice) -> list[Tensor]:
    """Memory for rows of all classes, (rows, V): one tile in the buffer, and, where the plan says so, others behind it
    in the memory of the weight gradient."""
    return [
        buffer.tile(rows, t.columns, None if t.place is None else grads.unwritten(t.place))[1]
        for t in plan.exponential_tiles
    ]


def _statistics(
    p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: _Selection, constants: Tensor | None, out: RowOutputs
) -> None:
    backend = get_backend(p.device)
    if plan.fused_product and _operands_fuse(p):
        for rows in _pieces(selection.num_rows, plan.product_rows):
            (x,) = selection.inputs(rows)
            inputs = selection.row_inputs(rows, constants)
            backend.product_statistics(x, p.terms[0].weight, inputs, p.spec, out.rows(rows))
            del x
        return
    chunk_rows, block_cols = plan.statistics_tile
    buffer = _TileBuffer(p, plan, chunk_rows, block_cols, gradient=False)
    for rows in _pieces(selection.num_rows, chunk_rows):
        xs = selection.inputs(rows)
        inputs = selection.row_inputs(rows, constants)
        state = None
        if block_cols < plan.vocab_size:
            state = out.loss.new_empty(STATE_SLOTS, rows.stop - rows.start)
        for cols in _pieces(plan.vocab_size, block_cols):
            logits, _, tile = buffer.tile(rows, cols)
            _write_logits(p, xs, cols, logits)
            backend.statistics(logits, inputs, p.spec, tile, state, out.rows(rows))
        del xs


def _gradients(
    p: LinearCrossEntropyProblem,
    plan: ChunkPlan,
    sweep: Sweep,
    selection: _Selection,
    constants: Tensor,
    normalizer: Tensor,  # (2, rows)
    upstream: Tensor | None,  # (rows,)
    grads: _GradientSums,
) -> None:
    backend = get_backend(p.device)
    buffer = _TileBuffer(p, plan, sweep.rows, sweep.cols)
    grads.start(sweep)
    fused = plan.fused_product and _operands_fuse(p)
    xs: list[Tensor] = []
    rows_of_xs = None
    for rows, cols, lent in _tiles(selection.num_rows, sweep):
        if rows != rows_of_xs:
            xs = []  # gathered rows, before the next are
            xs, rows_of_xs = selection.inputs(rows), rows
        logits, dlogits, tile = buffer.tile(rows, cols, grads.unwritten(cols.stop) if lent else None)
        up = None if upstream is None else upstream[rows]
        inputs = selection.row_inputs(rows, constants)
        if fused:
            weight = p.terms[0].weight[cols]
            backend.product_gradient(xs[0], weight, dlogits, inputs, p.spec, tile, normalizer[:, rows], up)
        else:
            _write_logits(p, xs, cols, logits)
            backend.gradient(logits, dlogits, inputs, p.spec, tile, normalizer[:, rows], up)
        grads.add(dlogits, xs, rows, cols)


def _tiles(num_rows: int, sweep: Sweep) -> Iterator[tuple[slice, slice, bool]]:
    """Tokens, classes, and whether they are in lent memory; in the order in which the sweep completes its sums."""
    if sweep.weights:
        yield from ((rows, cols, lent) for cols, lent in sweep.blocks() for rows in _pieces(num_rows, sweep.rows))
    else:
        yield from ((rows, cols, lent) for rows in _pieces(num_rows, sweep.rows) for cols, lent in sweep.blocks())


def _operands_fuse(p: LinearCrossEntropyProblem) -> bool:
    """The same in forward and backward, for both to have the same logits; but for operands that a hook on saved tensors
    moves from an address that is no multiple of 16 bytes to one that is."""
    term = p.terms[0]
    return get_backend(p.device).can_fuse_product(term.input, term.weight)


def _write_logits(p: LinearCrossEntropyProblem, xs: Sequence[Tensor], cols: slice, out: Tensor) -> None:
    """The sum of all terms for a tile: `xs` are its rows of their inputs, `out` (rows, cols)."""
    for k, (term, x) in enumerate(zip(p.terms, xs, strict=True)):
        matmul(x, term.weight[cols].t(), out=out, accumulate=k > 0)


class _TileBuffer:
    """The memory of one tile, shared by all."""

    def __init__(
        self,
        p: LinearCrossEntropyProblem,
        plan: ChunkPlan,
        rows: int,
        cols: int,
        gradient: bool = True,
        logits: bool = True,
    ) -> None:
        # An aligned row stride: matrix products on unaligned rows run several times slower.
        self._vocab_size, width = plan.vocab_size, padded_cols(cols)
        apart = gradient and logits and not plan.in_place
        grad_dtype = plan.grad_dtype if gradient else plan.logits_dtype
        self.grad = torch.empty((rows, width), dtype=grad_dtype, device=p.device)
        self.logits = self.grad
        if apart:
            self.logits = torch.empty((rows, width), dtype=plan.logits_dtype, device=p.device)

    def tile(self, rows: slice, cols: slice, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tile]:
        """Logits and their gradient, which may be the same memory, (rows, cols) each; and what they are.

        `memory`: where to make both, instead of the buffer, contiguous.
        """
        size = cols.stop - cols.start
        area = slice(0, rows.stop - rows.start), slice(0, size)
        tile = Tile(cols.start, size, self._vocab_size, padded_cols(size))
        if memory is None:
            return self.logits[area], self.grad[area], tile
        lent = memory.view(-1)[: area[0].stop * tile.room].view(-1, tile.room)[area]
        return lent, lent, tile

    def behind(self, rows: slice) -> Tensor:
        """The memory of the gradient that a tile of these rows and all classes does not use."""
        return self.grad[rows.stop - rows.start :]


class _GradientSums:
    """All gradients while they are summed over tiles, in one sweep after the other."""

    def __init__(self, p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: _Selection) -> None:
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
        """`add` for `_whole_rows` of a plan with `ChunkPlan.late_normalization`. They are what
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

    def __init__(self, number: int, p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: _Selection) -> None:
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
        """See `_GradientSums.add_whole_rows`. The weight's first: what it takes is in the memory of the input's."""
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
        """Sums in float32, of the first half of the classes in the memory of `grad`, see `planning.halfway`."""
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


class _Count:
    """A number on the device, which is on its way to the host while the device goes on."""

    def __init__(self, count: Tensor) -> None:
        self.on_device = count
        self._on_host, self._arrived = count, None
        if count.is_cuda:
            self._on_host = torch.empty((), dtype=count.dtype, pin_memory=True)
            self._on_host.copy_(count, non_blocking=True)
            self._arrived = torch.cuda.current_stream(count.device).record_event()

    def wait(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._on_host)


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


@dataclass(frozen=True)
class _Selection:
    """The rows that are worked on: all of them, or those that are not ignored."""

    problem: LinearCrossEntropyProblem
    index: Tensor | None  # (rows,) into the N rows; None: all of them
    # If the host does not know it yet: how many of `index`, which then has all N rows, are worked on. They come first.
    count: _Count | None = None

    @staticmethod
    def of(p: LinearCrossEntropyProblem, plan: ChunkPlan, counted_later: bool) -> _Selection:
        if not plan.skip_ignored or p.num_tokens == 0:
            return _Selection(p, None)
        valid = p.target != p.spec.ignore_index
        if counted_later:
            numbers = torch.arange(p.num_tokens, device=p.device)
            before = valid.cumsum(0)
            count = before[-1].clone()  # a kernel is built for addresses that are aligned
            place = torch.where(valid, before - 1, count + numbers - before)
            return _Selection(p, torch.empty_like(place).scatter_(0, place, numbers), _Count(count))
        # The host needs the number of rows, and the device has nothing to do meanwhile. What it then waits for should
        # be as little as possible, so vectors and gradients are made after the first logits.
        index = valid.nonzero()[:, 0]
        enough = index.numel() <= (1.0 - MIN_IGNORED_SHARE) * valid.numel()
        return _Selection(p, index if enough else None)

    @property
    def most_rows(self) -> int:
        """Of which there may be something to keep."""
        return self.problem.num_tokens if self.index is None else self.index.numel()

    @functools.cached_property
    def num_rows(self) -> int:
        return self.most_rows if self.count is None else self.count.wait()

    @functools.cached_property
    def target(self) -> Tensor:
        """(rows,)"""
        return self.take(self.problem.target)

    @functools.cached_property
    def token_weight(self) -> Tensor | None:
        """(rows,)"""
        weight = self.problem.token_weight
        return None if weight is None else self.take(weight)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.index is None else x.index_select(dim, self.index)

    def inputs(self, rows: slice) -> list[Tensor]:
        """Of each term, (rows, H_k)."""
        if self.index is None:
            return [term.input[rows] for term in self.problem.terms]
        return [term.input.index_select(0, self.index[rows]) for term in self.problem.terms]

    def row_inputs(self, rows: slice, constants: Tensor | None) -> RowInputs:
        p = self.problem
        weight = None if self.token_weight is None else self.token_weight[rows]
        return RowInputs(self.target[rows], weight, p.class_weight, p.linear_bias, constants)

    def scatter(self, out: RowOutputs) -> RowOutputs:
        """Results of the selected rows at their places among all N, with those of ignored rows elsewhere."""
        if self.index is None:
            return out
        index, n = self.index[: self.num_rows], self.problem.num_tokens
        out = out.rows(slice(0, self.num_rows))

        def put(values: Tensor, fill: float = 0) -> Tensor:
            full = values.new_full((*values.shape[:-1], n), fill)
            return full.index_copy_(-1, index, values)

        def put_optional(values: Tensor | None, fill: float = 0) -> Tensor | None:
            return None if values is None else put(values, fill)

        return RowOutputs(
            put(out.loss),
            put_optional(out.z_loss),
            put(out.normalizer),
            put_optional(out.logprob),
            put_optional(out.entropy),
            put_optional(out.argmax, -1),
        )


def _pieces(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, max(1, step)):
        yield slice(start, min(start + step, size))
