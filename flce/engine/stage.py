"""What a schedule works with: the tensors of one call, memory for more, and the steps that schedules are made of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce.backends.contract import STATE_SLOTS, Backend, RowInputs, RowOutputs, TargetTerms, Tile, TileCall
from flce.core import gemm
from flce.core.gemm import padded_cols
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, accumulation_dtype
from flce.core.slices import first, last
from flce.engine.arena import Arena
from flce.engine.case import Dtypes
from flce.engine.selection import Selection
from flce.engine.vectors import LossScales


@dataclass
class Stage:
    """One forward or backward pass.

    Sizes: N tokens, of which `num_rows` are worked on; V classes; H the hidden size of a term.

    Attributes:
        problem: the call.
        backend: what is done to tiles.
        arena: where memory comes from.
        dtypes: of what is made.
        in_registers: whether the backend's products keep logits in registers: those that are wanted for statistics, or
            a second time for their gradient.
        selection: which tokens are worked on.
        scales: what losses and gradients are multiplied by.
        normalizer: (slots, rows), written by losses and statistics, read by gradients.
        out: where the results of rows go. None in backward.
        upstream: (rows,) gradient of each row's loss; None: that of all is in `scales`.
    """

    problem: LinearCrossEntropyProblem
    backend: Backend
    arena: Arena
    dtypes: Dtypes
    in_registers: bool
    selection: Selection
    scales: LossScales
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    def __post_init__(self) -> None:
        self.terms: tuple[LinearTerm, ...] = self.problem.terms
        self.vocab_size: int = self.problem.vocab_size
        self.classes = slice(0, self.vocab_size)
        """All of them."""
        needs = self.problem.needs
        self.wanted_inputs = [k for k, needed in enumerate(needs.inputs) if needed]
        """Terms whose dX is asked for."""
        self.wanted_weights = [k for k, needed in enumerate(needs.weights) if needed]
        """Terms whose dW is asked for."""
        self._dx: dict[int, Tensor] = {}
        self._dw: dict[int, Tensor] = {}
        self._db: Tensor | None = None
        self._gathered: tuple[slice, list[Tensor]] | None = None

    # ------------------------------------------------------------------------------------------------- loops

    def whole(self, rows: int) -> bool:
        """Whether a chunk of `rows` tokens has all of them."""
        return rows >= self.problem.num_tokens

    def chunks(self, step: int) -> Iterator[slice]:
        """The tokens that are worked on, at most `step` at a time. If the device has counted them, the host waits for
        their number after the first chunk."""
        start, stop = 0, self.selection.rows_to_begin_with
        while start < stop:
            yield slice(start, min(start + step, stop))
            start, stop = start + max(1, step), self.selection.num_rows

    def blocks(
        self, step: int, start: int = 0, stop: int | None = None, first: Sequence[slice] = ()
    ) -> Iterator[slice]:
        """The classes, at most `step` at a time; the blocks of `first` before the others."""
        yield from first
        stop = self.vocab_size if stop is None else stop
        for begin in range(first[-1].stop if first else start, stop, max(1, step)):
            yield slice(begin, min(begin + step, stop))

    def counted(self, part: slice) -> slice:
        """The rows of `part` that exist, when their number is known."""
        return slice(part.start, max(part.start, min(part.stop, self.selection.num_rows)))

    # ------------------------------------------------------------------------------------------------ memory

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.arena.new(shape, dtype)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x`, or a copy of another dtype."""
        if x.dtype == dtype:
            return x
        out = self.new(*x.shape, dtype=dtype)
        self.copy(x, out)
        return out

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def take_rows(self, x: Tensor, out: Tensor, part: slice) -> None:
        """A part of the selected rows of `x`, (N, H)."""
        assert self.selection.index is not None
        torch.index_select(x, 0, self.selection.index[part], out=out)

    def put_rows(self, x: Tensor, out: Tensor, part: slice, add: bool = False) -> None:
        """`x`, a part of the selected rows, to its places among all rows of `out`, (N, H)."""
        assert self.selection.index is not None
        # To copy takes a fifth of the time. Rows differ, so both are deterministic.
        put = out.index_add_ if add else out.index_copy_
        put(0, self.selection.index[part], x)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """`gemm.matmul`."""
        gemm.matmul(a, b, out, accumulate)

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        """(rows, cols) to (cols,)."""
        # A product, because a sum over rows in another dtype takes memory that is not counted.
        gemm.matmul(x.new_ones(1, x.shape[0]), x, out=out[None], accumulate=True)

    def new_tile(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """(rows, cols), of rows whose stride is aligned: products on others run several times slower."""
        return last(self.new(rows, padded_cols(cols), dtype=dtype), slice(0, cols))

    def logits_and_gradient(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Two tiles, which are one where they have one dtype, or where logits stay in registers."""
        dlogits = self.new_tile(rows, cols, self.dtypes.logits_grad)
        if self.in_registers or self.dtypes.logits == self.dtypes.logits_grad:
            return dlogits, dlogits
        return self.new_tile(rows, cols, self.dtypes.logits), dlogits

    def inputs(self, part: slice) -> list[Tensor]:
        """Some rows of the input of each term, (rows, H). If they are gathered, that of the part before is given
        back."""
        if self._gathered is None or self._gathered[0] != part:
            self._gathered = None
            self._gathered = part, self._gather(part)
        return self._gathered[1]

    def _gather(self, part: slice) -> list[Tensor]:
        inputs = [term.input for term in self.terms]
        if self.selection.index is None:
            return [first(x, part) for x in inputs]
        memory = [self.new(part.stop - part.start, x.shape[1], dtype=x.dtype) for x in inputs]
        for x, out in zip(inputs, memory, strict=True):
            self.take_rows(x, out, part)
        return memory

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

    def gradients(self) -> list[Tensor]:
        """The gradients that are needed, in the order of `Needs.flat`. What no tile was added to is made here."""
        grads = [self.dx_memory(k) for k in self.wanted_inputs]
        grads += [self.dw_memory(k) for k in self.wanted_weights]
        return [*grads, self.db_memory()] if self.problem.needs.bias else grads

    # ------------------------------------------------------------------------------------------- from logits

    def write_logits(self, xs: Sequence[Tensor], cols: slice, out: Tensor) -> None:
        """The sum of all terms for a tile: `xs` are its rows of their inputs, `out` (rows, cols)."""
        for k, (term, x) in enumerate(zip(self.terms, xs, strict=True)):
            self.matmul(x, first(term.weight, cols).t(), out=out, accumulate=k > 0)

    def statistics_and_gradient(self, logits: Tensor, dlogits: Tensor, part: slice) -> None:
        """Losses and gradient for some rows and all classes, in one pass. `dlogits` may be `logits`."""
        call = self._statistics_call(part)
        if self.problem.token_weight_grad:
            call = call._replace(upstream=last(self._weights, part))
        self.backend.loss_and_gradient(logits, dlogits, call)

    def statistics(self, xs: Sequence[Tensor], part: slice, logits: Tensor) -> None:
        """Losses for some rows and all classes. Their logits are made in `logits`, (rows, some classes), a tile after
        the other; or in registers, if `gradient` makes them there."""
        if self.in_registers:
            self.product_statistics(xs[0], part)
            return
        call, state = self._statistics_call(part), None
        if logits.shape[1] < self.vocab_size:
            state = self.new(STATE_SLOTS, len(logits), dtype=self.normalizer.dtype)
        for cols in self.blocks(logits.shape[1]):
            block = logits[:, : cols.stop - cols.start]
            self.write_logits(xs, cols, block)
            self.backend.statistics(block, call._replace(tile=self._tile(cols)), state)

    def product_statistics(self, x: Tensor, part: slice) -> None:
        """The same, of logits that never are in memory."""
        self.backend.product_statistics(x, self.terms[0].weight, self._statistics_call(part))

    def gradient(self, xs: Sequence[Tensor], part: slice, cols: slice, logits: Tensor, dlogits: Tensor) -> None:
        """The gradient of a tile's logits, which are made again. Both: (rows, cols), and may be one."""
        upstream = None if self.upstream is None else last(self.upstream, part)
        normalizer, inputs = last(self.normalizer, part), self._row_inputs(part)
        call = TileCall(inputs, self.problem.spec, self._tile(cols), None, normalizer, upstream)
        if self.in_registers:
            self.backend.product_gradient(xs[0], first(self.terms[0].weight, cols), dlogits, call)
        else:
            self.write_logits(xs, cols, logits)
            self.backend.gradient(logits, dlogits, call)

    # -------------------------------------------------------------------------------- unnormalized exponentials

    def new_factors(self) -> Tensor:
        """(2, rows): what rows of exponentials are multiplied by, and gradients of the targets' logits."""
        return self.new(2, self.selection.most_rows, dtype=torch.float32)

    def exponentials(self, x: Tensor, tiles: Sequence[Tensor], part: slice, factors: Tensor) -> None:
        """Losses and exponentials for some rows and all classes, in tiles of consecutive ones. No logits are in memory.

        The gradient of the logits is ``factors[0] * exponentials``, but in the target's column ``factors[1]``.
        """
        call, count = self._statistics_call(part), self.selection.count
        on_device = None if count is None or part.start > 0 else count.on_device
        self.backend.product_exponentials(x, self.terms[0].weight, tiles, call, last(factors, part), on_device)
        if self.problem.token_weight_grad:
            last(factors, part).mul_(last(self._weights, part))

    def scaled_rows(self, x: Tensor, part: slice, factors: Tensor, out: Tensor) -> Tensor:
        """``factors[0] * x`` in `out`, which may be `x`; 0 for ignored rows."""
        target, ignore_index = last(self.selection.target, part), self.problem.spec.ignore_index
        self.backend.scale_valid_rows(x, out, target, factors[0, part], ignore_index)
        return out

    def finish_input_gradient(self, product: Tensor, part: slice, factors: Tensor) -> None:
        """dX of the head: ``factors[0] * product``, the product of exponentials and weight, and the targets' terms."""
        target, ignore_index = last(self.selection.target, part), self.problem.spec.ignore_index
        index = None if self.selection.index is None else self.selection.index[part]
        out = first(self.dx_memory(0), part) if index is None else self.dx_memory(0)
        weight, factors = self.terms[0].weight, last(factors, part)
        self.backend.combine_rows(product, out, weight, target, factors, ignore_index, index)

    def weight_products(
        self, grads: Sequence[Tensor], tiles: Sequence[Tensor], scaled: Tensor, factors: Tensor
    ) -> None:
        """dW of the head from exponentials of all rows: `grads` are its classes of each tile, the last made first."""
        self.backend.weight_gradient(grads, tiles, scaled, self._target_terms(factors))

    def add_target_terms(self, sums: Sequence[Tensor], factors: Tensor) -> None:
        """Adds the targets' terms to sums of dW, of consecutive classes."""
        self.backend.add_target_terms(sums, self._target_terms(factors))

    def _target_terms(self, factors: Tensor) -> TargetTerms:
        selection, rows = self.selection, slice(0, self.selection.num_rows)
        index = None if selection.index is None else selection.index[rows]
        ignore_index = self.problem.spec.ignore_index
        return TargetTerms(self.terms[0].input, index, last(selection.target, rows), factors[1, rows], ignore_index)

    # ------------------------------------------------------------------------------------------------- others

    def _statistics_call(self, part: slice) -> TileCall:
        """The call that writes statistics of some rows, for all classes. Where the tokens' weights have a gradient,
        which is made of losses without them, it does not know them; gradients get them as they get an upstream one."""
        assert self.out is not None
        inputs = self._row_inputs(part, not self.problem.token_weight_grad)
        return TileCall(inputs, self.problem.spec, self._tile(self.classes), self.out.part(part))

    @functools.cached_property
    def _weights(self) -> Tensor:
        """(rows,) those of tokens, 0 where they are ignored."""
        weight, target = self.selection.token_weight, self.selection.target
        assert weight is not None
        return weight.masked_fill(target == self.problem.spec.ignore_index, 0.0)

    def _row_inputs(self, part: slice, weighted: bool = True) -> RowInputs:
        return self.selection.row_inputs(part, self.scales.of_gradient, weighted)

    def _tile(self, cols: slice) -> Tile:
        size = cols.stop - cols.start
        return Tile(cols.start, size, self.vocab_size, padded_cols(size))
