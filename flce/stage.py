"""What a schedule works with: the tensors of one call, memory for more, and the steps that schedules are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flce import gemm
from flce.arena import Arena
from flce.backends.contract import STATE_SLOTS, Backend, RowInputs, RowOutputs, TargetTerms, Tile, TileCall
from flce.case import Dtypes
from flce.gemm import padded_cols
from flce.problem import LinearCrossEntropyProblem, LinearTerm, accumulation_dtype
from flce.selection import Selection
from flce.slices import first, last
from flce.vectors import LossScales


@dataclass
class Stage:
    """One forward or backward pass.

    Sizes: N tokens, of which `num_rows` are worked on; V classes; H the hidden size of a term.

    Attributes:
        problem: the call.
        backend: what is done to tiles.
        dtypes: of what is made.
        arena: where memory comes from.
        selection: which tokens are worked on.
        constants: what losses and gradients are multiplied by. None where there are no values.
        normalizer: (slots, rows), written by losses and statistics, read by gradients.
        out: where the results of rows go. None in backward.
        upstream: (rows,) gradient of each row's loss; None: that of all is in `constants`.
        products: whether the backend's products keep logits in registers: those that are wanted for statistics, or a
            second time for their gradient.
    """

    problem: LinearCrossEntropyProblem
    backend: Backend
    dtypes: Dtypes
    arena: Arena
    selection: Selection
    constants: LossScales | None
    normalizer: Tensor
    out: RowOutputs | None
    upstream: Tensor | None
    products: bool

    def __post_init__(self) -> None:
        self.terms: tuple[LinearTerm, ...] = self.problem.terms
        self.vocab_size: int = self.problem.vocab_size
        self.classes = slice(0, self.vocab_size)
        """All of them."""
        self._inputs: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._bias: Tensor | None = None
        self._gathered: tuple[slice, list[Tensor]] | None = None

    # ------------------------------------------------------------------------------------------------- loops

    @property
    def wanted_inputs(self) -> list[int]:
        """Terms whose dX is asked for."""
        return [k for k, needed in enumerate(self.problem.needs.inputs) if needed]

    @property
    def wanted_weights(self) -> list[int]:
        """Terms whose dW is asked for."""
        return [k for k, needed in enumerate(self.problem.needs.weights) if needed]

    def whole(self, rows: int) -> bool:
        """Whether a chunk of so many rows has all tokens."""
        return rows >= self.problem.num_tokens

    def chunks(self, step: int) -> Iterator[slice]:
        """The rows, some at a time. If the device has counted them, the host waits for their number after the first."""
        start, stop = 0, self.selection.rows_to_begin_with
        while start < stop:
            yield slice(start, min(start + step, stop))
            start, stop = start + max(1, step), self.selection.num_rows

    def blocks(
        self, step: int, start: int = 0, stop: int | None = None, first: Sequence[slice] = ()
    ) -> Iterator[slice]:
        """The classes, some at a time; those of `first` before the others."""
        yield from first
        stop = self.vocab_size if stop is None else stop
        for begin in range(first[-1].stop if first else start, stop, max(1, step)):
            yield slice(begin, min(begin + step, stop))

    def counted(self, rows: slice) -> slice:
        """Those of `rows` that exist, when their number is known."""
        return slice(rows.start, max(rows.start, min(rows.stop, self.selection.num_rows)))

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

    def take_rows(self, x: Tensor, out: Tensor, rows: slice) -> None:
        """Some of the selected rows of `x`, (N, H)."""
        assert self.selection.index is not None
        torch.index_select(x, 0, self.selection.index[rows], out=out)

    def put_rows(self, x: Tensor, out: Tensor, rows: slice, add: bool = False) -> None:
        """`x` to its places among all rows of `out`, (N, H), where some of the rows are selected."""
        assert self.selection.index is not None
        # To copy takes a fifth of the time. Rows differ, so both are deterministic.
        put = out.index_add_ if add else out.index_copy_
        put(0, self.selection.index[rows], x)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """As `gemm.matmul`."""
        gemm.matmul(a, b, out, accumulate)

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        """(rows, cols) to (cols,)."""
        # A product, because a sum over rows in another dtype takes memory that nobody counts.
        gemm.matmul(x.new_ones(1, x.shape[0]), x, out=out[None], accumulate=True)

    def tile(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """(rows, cols), of rows whose stride is aligned: products on others run several times slower."""
        return last(self.new(rows, padded_cols(cols), dtype=dtype), slice(0, cols))

    def logits_and_gradient(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Two tiles, which are one where they have one dtype, or where logits stay in registers."""
        dlogits = self.tile(rows, cols, self.dtypes.logits_grad)
        if self.products or self.dtypes.logits == self.dtypes.logits_grad:
            return dlogits, dlogits
        return self.tile(rows, cols, self.dtypes.logits), dlogits

    def inputs(self, rows: slice) -> list[Tensor]:
        """Of each term, (rows, H). The rows before, if they were gathered, are given back."""
        if self._gathered is None or self._gathered[0] != rows:
            self._gathered = None
            self._gathered = rows, self._gather(rows)
        return self._gathered[1]

    def _gather(self, rows: slice) -> list[Tensor]:
        inputs = [term.input for term in self.terms]
        if self.selection.index is None:
            return [first(x, rows) for x in inputs]
        memory = [self.new(rows.stop - rows.start, x.shape[1], dtype=x.dtype) for x in inputs]
        for x, out in zip(inputs, memory, strict=True):
            self.take_rows(x, out, rows)
        return memory

    def release_inputs(self) -> None:
        """Gathered rows are given back."""
        self._gathered = None

    def input_gradient(self, term: int) -> Tensor:
        """(N, H) of a term, allocated when first asked for: by then the device has the first logits to make."""
        if term not in self._inputs:
            self.new_input_gradient(term, self.dtypes.input_grad)
        return self._inputs[term]

    def new_input_gradient(self, term: int, dtype: torch.dtype) -> None:
        # What no tile writes must be zero: dropped rows.
        zero = self.selection.index is not None or self.selection.num_rows == 0
        self._inputs[term] = self.arena.new(self.terms[term].input.shape, dtype, zero)

    def weight_gradient(self, term: int = 0) -> Tensor:
        """(V, H) of a term, likewise."""
        if term not in self._weights:
            zero = self.selection.num_rows == 0  # all rows are dropped
            self._weights[term] = self.arena.new(self.terms[term].weight.shape, self.dtypes.weight_grad, zero)
        return self._weights[term]

    def set_input_gradient(self, term: int, grad: Tensor) -> None:
        self._inputs[term] = grad

    def gradients(self) -> list[Tensor]:
        """Those that are needed, in the order of `Needs.flat`. What no schedule has touched is made here."""
        grads = [self.input_gradient(k) for k in self.wanted_inputs]
        grads += [self.weight_gradient(k) for k in self.wanted_weights]
        return [*grads, self.bias_gradient()] if self.problem.needs.bias else grads

    def bias_gradient(self) -> Tensor:
        """(V,)"""
        if self._bias is None:
            self._bias = self.arena.new((self.vocab_size,), accumulation_dtype(self.problem.dtype), zero=True)
        return self._bias

    # ------------------------------------------------------------------------------------------- from logits

    def write_logits(self, xs: Sequence[Tensor], cols: slice, out: Tensor) -> None:
        """The sum of all terms for a tile: `xs` are its rows of their inputs, `out` (rows, cols)."""
        for k, (term, x) in enumerate(zip(self.terms, xs, strict=True)):
            self.matmul(x, first(term.weight, cols).t(), out=out, accumulate=k > 0)

    def statistics_and_gradient(self, logits: Tensor, dlogits: Tensor, part: slice) -> None:
        """Losses and gradient for some rows and all classes, in one pass. `dlogits` may be `logits`."""
        self.backend.loss_and_gradient(logits, dlogits, self._statistics_call(part))

    def statistics(self, xs: Sequence[Tensor], part: slice, logits: Tensor) -> None:
        """Losses for some rows and all classes. Their logits are made in `logits`, (rows, some classes), a tile after
        the other; or in registers, if `gradient` makes them there."""
        if self.products:
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
        if self.products:
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

    def scaled_rows(self, x: Tensor, part: slice, factors: Tensor, out: Tensor) -> Tensor:
        """``factors[0] * x`` in `out`, which may be `x`; 0 for ignored rows."""
        target, ignore_index = last(self.selection.target, part), self.problem.spec.ignore_index
        self.backend.scale_valid_rows(x, out, target, factors[0, part], ignore_index)
        return out

    def finish_input_gradient(self, product: Tensor, part: slice, factors: Tensor) -> None:
        """dX of the head: ``factors[0] * product``, the product of exponentials and weight, and the targets' terms."""
        target, ignore_index = last(self.selection.target, part), self.problem.spec.ignore_index
        index = None if self.selection.index is None else self.selection.index[part]
        out = first(self.input_gradient(0), part) if index is None else self.input_gradient(0)
        weight, factors = self.terms[0].weight, last(factors, part)
        self.backend.combine_rows(product, weight, out, target, factors, ignore_index, index)

    def weight_products(
        self, grads: Sequence[Tensor], tiles: Sequence[Tensor], scaled: Tensor, factors: Tensor
    ) -> None:
        """dW of the head from exponentials of all rows: `grads` are its classes of each tile, the last made first."""
        self.backend.weight_gradient(grads, tiles, scaled, self._target_terms(factors))

    def add_to_targets(self, sums: Sequence[Tensor], factors: Tensor) -> None:
        """The targets' terms, to sums of dW of consecutive classes."""
        self.backend.add_target_terms(sums, self._target_terms(factors))

    def _target_terms(self, factors: Tensor) -> TargetTerms:
        selection, rows = self.selection, slice(0, self.selection.num_rows)
        index = None if selection.index is None else selection.index[rows]
        ignore_index = self.problem.spec.ignore_index
        return TargetTerms(self.terms[0].input, index, last(selection.target, rows), factors[1, rows], ignore_index)

    # ------------------------------------------------------------------------------------------------- others

    def _statistics_call(self, part: slice) -> TileCall:
        """The call that writes statistics of some rows, for all classes."""
        assert self.out is not None
        return TileCall(self._row_inputs(part), self.problem.spec, self._tile(self.classes), self.out.part(part))

    def _row_inputs(self, part: slice) -> RowInputs:
        return self.selection.row_inputs(part, None if self.constants is None else self.constants.of_gradient)

    def _tile(self, cols: slice) -> Tile:
        size = cols.stop - cols.start
        return Tile(cols.start, size, self.vocab_size, padded_cols(size))
