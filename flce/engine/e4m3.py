"""dX and dW from tiles that are rounded to E4M3, an 8-bit float. The schedules of `schedules/e4m3.py` call it.

A tile has the gradient of the logits for some tokens and all classes, in E4M3, except its large entries: their share of
the sum of their row exceeds 1 / `contract.LARGE_SHARE`. Large entries and, if the tile was computed from exponentials,
the target's entry are added to the products in float32, with operands that are not rounded. With E, W8 and X8 in E4M3,
and the large entries L:

    dX = r * (E W8) * c_W + L W        r: (tokens,) scales of rows, with factors; c_W, c_X: (H,) scales of columns
    dW = (E^T X8) * c_X + L^T x        X8 = r * x / c_X
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flce.backends.contract import E4M3, ENTRY_SLOTS, Entries, QuantizedTile
from flce.core.gemm import e4m3_scale, padded_cols
from flce.core.slices import offset_slice, slice_columns, slice_rows
from flce.engine.borrowing import borrow_as
from flce.engine.case import BLOCK_BYTES
from flce.engine.pass_context import PassContext
from flce.engine.sums import DwSum, build_dw_sums, finish_sums


@dataclass(frozen=True)
class ChunkSizes:
    """Numbers of tokens of a chunk, of a group of its tiles, and of a tile. A group is in memory for dX, a chunk is in
    memory transposed for dW."""

    rows: int
    group_rows: int
    tile_rows: int


def compute_gradients(ctx: PassContext, sizes: ChunkSizes, compute: Callable[[slice, QuantizedTile], None]) -> None:
    """Compute dX and dW of the head."""
    dw_sums = build_dw_sums(ctx, sizes.rows)
    gradients = _Gradients(ctx, sizes, dw_sums.get(0))
    for chunk in ctx.chunks(sizes.rows):
        for group in ctx.split_range(chunk, sizes.group_rows):
            for tokens in ctx.split_range(group, sizes.tile_rows):
                compute(tokens, gradients.tile(chunk, group, tokens))
            gradients.finish_group(chunk, group)
        gradients.finish_chunk(chunk)
    finish_sums(dw_sums)


class _Gradients:
    """Operands and sums of `compute_gradients`."""

    def __init__(self, ctx: PassContext, sizes: ChunkSizes, dw_sum: DwSum | None) -> None:
        self._context, self._dw_sum, self._is_single, rows = ctx, dw_sum, ctx.is_single_chunk(sizes.rows), sizes.rows
        self._weight: Tensor | None = None
        self._weight_scales = ctx.new((ctx.terms[0].weight.shape[1],), torch.float32)
        self._group = ctx.new((sizes.group_rows, padded_cols(ctx.vocab_size)), E4M3)
        self._transposed = None if dw_sum is None else ctx.new((ctx.vocab_size, padded_cols(rows)), E4M3)
        self._classes = ctx.new((rows, ENTRY_SLOTS), torch.int32)
        self._values = ctx.new((rows, ENTRY_SLOTS), torch.float32)
        self._row_scales = ctx.new((rows,), torch.float32)

    def tile(self, chunk: slice, group: slice, tokens: slice) -> QuantizedTile:
        """Return the memory of a tile."""
        rows, stop = offset_slice(tokens, -chunk.start), tokens.stop - chunk.start
        if tokens.stop == chunk.stop:
            stop = padded_cols(stop)  # The padding is filled with zeros.
        matrix = slice_rows(self._group, offset_slice(tokens, -group.start))
        transposed = None if self._transposed is None else slice_columns(self._transposed, slice(rows.start, stop))
        return QuantizedTile(matrix, transposed, slice_rows(self._row_scales, rows), self._entries(rows))

    def _entries(self, rows: slice) -> Entries:
        """Return the entries of some tokens of the chunk."""
        return Entries(None, slice_rows(self._classes, rows), slice_rows(self._values, rows))

    def finish_group(self, chunk: slice, tokens: slice) -> None:
        """Compute dX of a group of tiles."""
        if not self._context.dx_terms:
            return
        ctx, rows = self._context, offset_slice(tokens, -chunk.start)
        quantized = slice_rows(self._group, slice(0, rows.stop - rows.start))
        slice_columns(quantized, slice(ctx.vocab_size, quantized.shape[1])).view(torch.uint8).zero_()
        product = ctx.new((len(quantized), len(self._weight_scales)), torch.float32)
        ctx.matmul(quantized, self._quantized_weight().t(), out=product)
        index = None if ctx.selection.index is None else ctx.selection.index[tokens]
        out = slice_rows(ctx.dx_memory(0), tokens) if index is None else ctx.dx_memory(0)
        scales, weight = slice_rows(self._row_scales, rows), ctx.terms[0].weight
        ctx.backend.add_entries(product, scales, self._weight_scales, self._entries(rows), weight, out, index)
        if index is None:
            ctx.rows.start_dx_sum(0, out)

    def _quantized_weight(self) -> Tensor:
        """Return the transposed weight in E4M3, (H, V padded). It is in the memory of dW if there is one chunk, because
        dW is then written after dX is complete."""
        if self._weight is None:
            ctx, weight = self._context, self._context.terms[0].weight
            shape = weight.shape[1], padded_cols(len(weight))
            can_borrow = self._dw_sum is not None and self._is_single and shape[1] <= 2 * len(weight)
            self._weight = borrow_as(ctx.dw_memory(), shape, E4M3) if can_borrow else ctx.new(shape, E4M3)
            ctx.backend.quantize_transposed(weight, None, None, self._weight, self._weight_scales)
        return self._weight

    def finish_chunk(self, chunk: slice) -> None:
        """Add dW of a chunk."""
        if self._dw_sum is None or self._transposed is None:
            return
        ctx, rows, x = self._context, slice(0, chunk.stop - chunk.start), self._context.terms[0].input
        hidden, inner, num_entries = x.shape[1], padded_cols(rows.stop), rows.stop * ENTRY_SLOTS
        index = None if ctx.selection.index is None else ctx.selection.index[chunk]
        x = slice_rows(x, chunk) if index is None else x
        scaled, scales = ctx.new((hidden, inner), E4M3), ctx.new((hidden,), torch.float32)
        ctx.backend.quantize_transposed(x, index, self._row_scales[rows], scaled, scales)
        scales.mul_(1.0 / e4m3_scale(inner))
        bounds = ctx.new((ctx.vocab_size + 1,), torch.int32)
        numbers, values = (ctx.new((num_entries,), dtype) for dtype in (torch.int64, torch.float32))
        ctx.backend.sort_entries(self._entries(rows), index, Entries(bounds, numbers, values))
        sums, is_started = self._dw_sum.start()
        # The group is not needed anymore. One chunk has its products in the memory of dW.
        first_class, memory = 0, self._group
        if memory.numel() < BLOCK_BYTES and not self._is_single:
            memory = ctx.new((min(BLOCK_BYTES, 2 * hidden * ctx.vocab_size),), torch.uint8)
        for total in sums:
            memory = total if self._is_single else memory
            for block in ctx.split_range(slice(0, len(total)), memory.nbytes // (2 * hidden)):
                classes = offset_slice(block, first_class)
                # 8 times as precise as the result, so that it may cancel with entries.
                product = borrow_as(memory, (block.stop - block.start, hidden), torch.float16)
                ctx.matmul(self._transposed[classes, :inner], scaled.t(), out=product)
                entries = Entries(bounds[classes.start : classes.stop + 1], numbers, values)
                out = slice_rows(total, block)
                ctx.backend.add_entries(product, None, scales, entries, x, out, None, is_started)
            first_class += len(total)
