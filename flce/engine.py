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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce import rows as vectors
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowOutputs, Tile
from flce.chunk_plan import ChunkPlan, Sweep
from flce.gemm import matmul, padded_cols
from flce.gradient_sums import GradientSums
from flce.problem import LinearCrossEntropyProblem
from flce.selection import Selection


@dataclass(frozen=True)
class ForwardResult:
    rows: RowOutputs  # of all N rows, but the losses: () or (N,)
    grads: list[Tensor]  # of the loss, times grad_unit; empty if the plan defers them
    grad_unit: Tensor | None  # () what the upstream gradient must be divided by; None: 1


def forward(problem: LinearCrossEntropyProblem, plan: ChunkPlan) -> ForwardResult:
    vectors.check_targets(problem)
    with_gradients = problem.needs.any and not plan.deferred
    late = plan.late_normalization and problem.num_tokens > 0 and _operands_fuse(problem)
    if late:
        get_backend(problem.device).prepare(problem, plan.skip_ignored)
    # Before the selection, which may wait for the device.
    constants = vectors.constants(problem) if with_gradients else vectors.statistics_constants(problem)
    selection = Selection.of(problem, plan, late)
    rows = vectors.allocate(problem, selection.most_rows)
    unit, grads = None, []
    if with_gradients:
        assert constants is not None
        unit = vectors.grad_unit(problem, constants) if plan.grad_dtype == torch.float16 else None
        scaled = vectors.scaled(constants, unit)
        sums = GradientSums(problem, plan, selection)
        (_losses_and_late_gradients if late else _losses_and_gradients)(problem, plan, selection, scaled, rows, sums)
        for sweep in plan.sweeps[1:]:
            _gradients(problem, plan, sweep, selection, scaled, rows.normalizer, None, sums)
        grads = sums.result()
    else:
        _statistics(problem, plan, selection, constants, rows)
    results, _ = vectors.reduce(problem, selection.scatter(rows), constants)
    return ForwardResult(results, grads, unit)


def backward(problem: LinearCrossEntropyProblem, plan: ChunkPlan, normalizer: Tensor, upstream: Tensor) -> list[Tensor]:
    """The gradients, from recomputed logits.

    Args:
        normalizer: (NORMALIZER_SLOTS, N), as `forward` left it.
        upstream: gradient of the loss; () or, for ``reduction="none"``, (N,).
    """
    constants = vectors.constants(problem)
    selection = Selection.of(problem, plan, False)
    accum = constants.dtype
    per_row = None
    if upstream.dim() == 0:
        constants = vectors.scaled(constants, upstream.to(accum))
    else:
        per_row = selection.take(upstream.to(accum))
    normalizer = selection.take(normalizer, dim=1)
    grads = GradientSums(problem, plan, selection)
    for sweep in plan.sweeps:
        _gradients(problem, plan, sweep, selection, constants, normalizer, per_row, grads)
        grads.round(sweep)  # here, where the tile's memory has been given back
    return grads.result()


def _losses_and_gradients(
    p: LinearCrossEntropyProblem,
    plan: ChunkPlan,
    selection: Selection,
    constants: Tensor,
    out: RowOutputs,
    grads: GradientSums,
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
    selection: Selection,
    constants: Tensor,
    out: RowOutputs,
    grads: GradientSums,
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


def _whole_rows(plan: ChunkPlan, buffer: _TileBuffer, grads: GradientSums, rows: slice) -> list[Tensor]:
    """Memory for rows of all classes, (rows, V): one tile in the buffer, and, where the plan says so, others behind it
    in the memory of the weight gradient."""
    return [
        buffer.tile(rows, t.columns, None if t.place is None else grads.unwritten(t.place))[1]
        for t in plan.exponential_tiles
    ]


def _statistics(
    p: LinearCrossEntropyProblem, plan: ChunkPlan, selection: Selection, constants: Tensor | None, out: RowOutputs
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
    selection: Selection,
    constants: Tensor,
    normalizer: Tensor,  # (NORMALIZER_SLOTS, rows)
    upstream: Tensor | None,  # (rows,)
    grads: GradientSums,
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


def _pieces(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, max(1, step)):
        yield slice(start, min(start + step, size))
