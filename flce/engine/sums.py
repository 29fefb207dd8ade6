"""Sums of dX and dW over tiles: their memory, and when they are rounded. Schedules add tiles to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flce.core.gemm import DIVIDED_SLAB_BYTES, slice_rows
from flce.engine.borrowing import borrow_as, second_half_start
from flce.engine.case import BLOCK_BYTES
from flce.engine.pass_context import PassContext

# Number of classes whose sums are rounded first when sums are rounded in place, see `SumInTwoHalves`.
FIRST_ROUNDED_CLASSES = 256
# The host launches at most this many products for dW of a block of few tokens, see `UnscaledSum`.
MAX_SUB_BLOCKS = 16


def add_to_dx(ctx: PassContext, dlogits: Tensor, tokens: slice, classes: slice) -> None:
    """Add a tile to dX of each term, in `dx_memory`: the result, or a sum that the schedule rounds. dlogits: (rows,
    cols), the gradient of the tile's logits."""
    for k in ctx.dx_terms:
        _add_to_dx_of_term(ctx, k, dlogits, tokens, classes)


def add_to_dw(ctx: PassContext, dlogits: Tensor, tokens: slice, classes: slice, dw_sums: Mapping[int, DwSum]) -> None:
    """Add a tile to dW of each term and to the gradient of the bias. `dw_sums`: sums of dW by term (`build_dw_sums`,
    `block_sum_builder`); empty if no dW is needed."""
    xs = ctx.term_inputs(tokens)
    for k, dw_sum in dw_sums.items():
        dw_sum.add(dlogits, xs[k])
    if ctx.problem.needs.bias:
        ctx.add_column_sums(dlogits, slice_rows(ctx.db_memory(), classes))


def _add_to_dx_of_term(ctx: PassContext, term: int, dlogits: Tensor, tokens: slice, classes: slice) -> None:
    grad, weight = ctx.dx_memory(term), slice_rows(ctx.terms[term].weight, classes)
    has_to_unscale = ctx.dtypes.unscales_sums and grad.dtype == ctx.dtypes.grads
    if ctx.dx_has_selected_rows and not has_to_unscale:
        ctx.matmul(dlogits, weight, out=slice_rows(grad, tokens), accumulate=classes.start > 0)
        return
    product = ctx.new((len(dlogits), grad.shape[1]), ctx.dtypes.sums if has_to_unscale else grad.dtype)
    ctx.matmul(dlogits, weight, out=product)
    _store_dx(ctx, product, grad, tokens, add=classes.start > 0)


def _store_dx(ctx: PassContext, dx: Tensor, grad: Tensor, tokens: slice, add: bool) -> None:
    """Round dX of some tokens into `grad`, the memory of dX. If the tokens are gathered, scatter or add their rows."""
    if ctx.selection.index is None:
        ctx.unscale_and_round(dx, slice_rows(grad, tokens))
    else:
        ctx.scatter_rows(ctx.unscale_and_round_to(dx, grad.dtype), grad, tokens, add)


class DxSum:
    """Sum of dX of a term over blocks of classes, for one chunk at a time. If the dtype of sums is wider than the dtype
    of dX, the sum has separate memory and is rounded after the last block."""

    def __init__(self, ctx: PassContext, term: int, rows: int, cols: int) -> None:
        self._context, self._term, self._max_rows = ctx, term, rows
        self._has_separate_memory = cols < ctx.vocab_size and ctx.dtypes.sums != ctx.problem.dtype
        self._sum: Tensor | None = None

    def add(self, dlogits: Tensor, tokens: slice, classes: slice) -> None:
        """Add a tile. dlogits: (rows, cols)."""
        ctx, weight = self._context, self._context.terms[self._term].weight
        if not self._has_separate_memory:
            _add_to_dx_of_term(ctx, self._term, dlogits, tokens, classes)
            return
        if self._sum is None:
            self._sum = ctx.new((self._max_rows, weight.shape[1]), ctx.dtypes.sums)
        total = self._sum[: len(dlogits)]
        ctx.matmul(dlogits, slice_rows(weight, classes), out=total, accumulate=classes.start > 0)
        if classes.stop == ctx.vocab_size:
            _store_dx(ctx, total, ctx.dx_memory(self._term), tokens, add=False)


class DwSum:
    """Sum of dW of a term over chunks of tokens, for a block of classes, in the memory of the result: new memory, or a
    gradient of `dw_targets`."""

    def __init__(self, ctx: PassContext, term: int, classes: slice, is_started: bool = False) -> None:
        self._context, self._term, self._classes = ctx, term, classes
        self.is_started, self._target = is_started, ctx.problem.dw_targets.get(term)

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Add ``dlogits^T x`` of a chunk. dlogits: (rows, cols), x: (rows, H)."""
        self._context.matmul(dlogits.t(), x, out=self.sums()[0], accumulate=self.is_started)
        self.is_started = True

    def sums(self) -> list[Tensor]:
        """Return the memory of the sums of consecutive classes."""
        return [self._result()]

    def finish(self) -> None:
        """Round sums that have separate memory, after the last chunk. If no tile was added, there are none."""

    def _result(self) -> Tensor:
        memory = self._context.dw_memory(self._term) if self._target is None else self._target
        return slice_rows(memory, self._classes)


class BlockSum(DwSum):
    """Sum of dW of a term for a block of classes, in memory that all blocks share. It is rounded after the last
    chunk."""

    def __init__(self, ctx: PassContext, term: int, classes: slice, memory: Tensor) -> None:
        super().__init__(ctx, term, classes)
        self._sum = memory[: classes.stop - classes.start]

    def sums(self) -> list[Tensor]:
        return [self._sum]

    def finish(self) -> None:
        if self.is_started:
            self._context.unscale_and_round(self._sum, self._result(), add=self._target is not None)


class UnscaledSum(DwSum):
    """dW of a term for a block of classes and all tokens, divided by the gradient scale before it is rounded or added.

    `memory` None: the epilogue of `Backend.unscaled_weight_gradient` divides. Otherwise the vendor's product writes
    float32 sub-blocks of classes to `memory`.
    """

    def __init__(self, ctx: PassContext, term: int, classes: slice, memory: Tensor | None) -> None:
        super().__init__(ctx, term, classes)
        self._memory = memory

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        ctx, (out,) = self._context, self.sums()
        if self._memory is None:
            ctx.backend.unscaled_weight_gradient(out, dlogits, x, ctx.gradient_scale)
            return
        for sub_block in ctx.split_range(slice(0, len(out)), len(self._memory)):
            total = self._memory[: sub_block.stop - sub_block.start]
            ctx.matmul(dlogits[:, sub_block].t(), x, out=total)
            ctx.unscale_and_round(total, out[sub_block], add=self._target is not None)

    @staticmethod
    def allocate(ctx: PassContext, term: int, cols: int) -> Tensor:
        """Allocate memory for a sub-block of blocks of at most `cols` classes, or of wider blocks with borrowed tiles.

        A sub-block has at most half of the bytes of the gradients of a block's logits, or 1 / MAX_SUB_BLOCKS of the
        sums of the block, or DIVIDED_SLAB_BYTES, which `gemm` allocates for some products anyway. With larger
        sub-blocks one block of all classes would exceed some budgets, and the planner would choose several.
        """
        (num_tokens, hidden), size = ctx.terms[term].input.shape, ctx.dtypes.logits_grad.itemsize
        wanted_bytes = max(num_tokens * cols * size // 2, 4 * cols * hidden // MAX_SUB_BLOCKS)
        sub_block_bytes = max(DIVIDED_SLAB_BYTES, min(BLOCK_BYTES, wanted_bytes))
        return ctx.new((max(1, min(cols, sub_block_bytes // (4 * hidden))), hidden), ctx.dtypes.sums)


class SumInTwoHalves(DwSum):
    """Float32 sum of a half-precision dW over chunks, for the classes before `stop`. The sums of the first half of all
    classes fill the memory of dW. The sums of the other classes have separate memory.

    Complete sums are rounded in place, from the first class on. Each sum is read before its memory is overwritten. So
    dW and its sums need twice the memory of dW. With sums in memory of their own they need three times this memory.
    """

    def __init__(self, ctx: PassContext, term: int, stop: int) -> None:
        super().__init__(ctx, term, slice(0, stop))
        self._half, self._stop = second_half_start(ctx.vocab_size), stop
        self._second_half: Tensor | None = None

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        ctx, (first_half, *second_half) = self._context, self.sums()
        ctx.matmul(dlogits[:, : self._half].t(), x, out=first_half, accumulate=self.is_started)
        for total in second_half:
            ctx.matmul(dlogits[:, self._half : self._stop].t(), x, out=total, accumulate=self.is_started)
        self.is_started = True

    def sums(self) -> list[Tensor]:
        grad, half = self._context.dw_memory(self._term), self._half
        hidden = grad.shape[1]
        if self._second_half is None:
            self._second_half = self._context.new((self._stop - half, hidden), torch.float32)
        first_half = borrow_as(grad, (half, hidden), torch.float32)
        return [first_half, self._second_half] if len(self._second_half) else [first_half]

    def finish(self) -> None:
        if not self.is_started:
            return
        ctx, half, (first_half, *second_half) = self._context, self._half, self.sums()
        grad = ctx.dw_memory(self._term)
        # Classes [a, 2a) of the gradient lie where classes [a / 2, a) of the sums were, which are rounded already.
        done, next_done = 0, min(half, FIRST_ROUNDED_CLASSES)
        while done < half:
            sums = first_half[done:next_done]
            if done == 0:
                grad[:next_done].copy_(ctx.unscale_and_round_to(sums, grad.dtype))
            else:
                ctx.unscale_and_round(sums, grad[done:next_done])
            done, next_done = next_done, min(half, 2 * next_done)
        for total in second_half:
            ctx.unscale_and_round(total, grad[half : self._stop])
        self._second_half = None


def build_dw_sums(ctx: PassContext, rows: int, stop: int | None = None) -> dict[int, DwSum]:
    """Return the sums of dW over chunks of `rows` tokens, by term, for the classes before `stop`."""
    stop, dtypes, is_single = ctx.vocab_size if stop is None else stop, ctx.dtypes, ctx.is_single_chunk(rows)
    if ctx.problem.dw_targets or (is_single and dtypes.unscales_sums):
        return block_sum_builder(ctx, rows, stop)(slice(0, stop))
    if not is_single and dtypes.grads == ctx.problem.dtype != dtypes.sums:
        return {k: SumInTwoHalves(ctx, k, stop) for k in ctx.dw_terms}
    return {k: DwSum(ctx, k, slice(0, stop)) for k in ctx.dw_terms}


def finish_sums(dw_sums: Mapping[int, DwSum]) -> None:
    """Round the sums of dW after the last chunk."""
    for dw_sum in dw_sums.values():
        dw_sum.finish()


def block_sum_builder(ctx: PassContext, rows: int, cols: int) -> Callable[[slice], dict[int, DwSum]]:
    """Return a function that returns the sums of dW over chunks of `rows` tokens, by term, for a block of classes.
    Blocks have at most `cols` classes, or more if their tiles are borrowed."""
    memory: dict[int, Tensor] = {}
    is_single = ctx.is_single_chunk(rows)
    is_rounded = ctx.dtypes.sums != ctx.problem.dtype and (not is_single or ctx.dtypes.unscales_sums)

    def build(k: int, block: slice) -> DwSum:
        target = ctx.problem.dw_targets.get(k)
        if target is None and not is_rounded:
            return DwSum(ctx, k, block)
        if target is not None and target.dtype == ctx.problem.accum and not ctx.dtypes.unscales_sums:
            return DwSum(ctx, k, block, is_started=True)  # Products add to the gradient.
        if is_single and ctx.in_registers and target is None:
            return UnscaledSum(ctx, k, block, None)
        if k not in memory:
            hidden = ctx.terms[k].weight.shape[1]
            memory[k] = UnscaledSum.allocate(ctx, k, cols) if is_single else ctx.new((cols, hidden), ctx.dtypes.sums)
        return (UnscaledSum if is_single else BlockSum)(ctx, k, block, memory[k])

    return lambda block: {k: build(k, block) for k in ctx.dw_terms}
