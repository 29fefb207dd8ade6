"""Some tokens and all classes at a time, with exponentials in the place of the gradient of the logits.

With e = exp(z - m) for a reference m of each row, the gradient of row i's logits is f_i e_i but in the target's column,
where it is t_i. The factors f and t are known when the row is complete. So products with e come first, and

    dX_i = f_i (e_i W) + t_i W[y_i]        dW = e^T (f x) + sum over i of t_i x_i in row y_i

No logits are in memory, and each is made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flce.borrowing import BorrowedBlocks, ExponentialTile, borrow, borrow_as
from flce.gemm import matmul
from flce.schedules.blocks import make_blocks
from flce.schedules.schedule import Schedule
from flce.stage import Stage
from flce.sums import weight_sums


@dataclass(frozen=True)
class Unnormalized(Schedule):
    """Three products."""

    rows: int

    counts_on_device = True

    def forward(self, s: Stage) -> None:
        self._chunks(s, s.vocab_size)

    def _chunks(self, s: Stage, stop: int) -> None:
        """dW is made of the classes before `stop` only."""
        memory, factors = s.tile(self.rows, s.vocab_size, s.dtypes.logits_grad), s.new_factors()
        total = weight_sums(s, self.rows, stop).get(0)
        at_once = s.whole(self.rows)
        for rows in s.chunks(self.rows):
            (x,) = s.inputs(rows)
            s.exponentials(x, [memory[: len(x)]], rows, factors)
            # If the host does not know yet how many rows there are, it waits now, when the device has something to do.
            rows = s.counted(rows)
            size = rows.stop - rows.start
            if size == 0:
                break
            exps, x = memory[:size], x[:size]
            if total is not None:
                scaled = s.scaled_rows(x, rows, factors, self._room(s, x, rows))
                if at_once:
                    s.weight_products([s.weight_gradient()], [exps], scaled, factors)
                else:
                    total.add(exps, scaled)
                del scaled
            if s.problem.needs.inputs[0]:
                product = s.new(size, x.shape[1], dtype=torch.float32)
                matmul(exps, s.terms[0].weight, out=product)
                s.finish_input_gradient(product, rows, factors)
                del product
            del x  # gathered rows, before the next are
        if total is not None:
            total.finish(lambda sums: s.add_to_targets(sums, factors))

    def _room(self, s: Stage, x: Tensor, rows: slice) -> Tensor:
        """Where x may be scaled: itself, if it is gathered; where its gradient will be; else memory of its own."""
        if s.selection.index is not None:
            return x
        return s.input_gradient(0)[rows] if s.problem.needs.inputs[0] else torch.empty_like(x)


@dataclass(frozen=True)
class Recomputed(Unnormalized):
    """Three products, and for the last classes a fourth: their dW is not summed over chunks. Their logits are made once
    more, of all tokens at once, when every row's normalizer is known."""

    classes: int
    cols: int
    """Of those classes at a time."""

    def forward(self, s: Stage) -> None:
        first = s.vocab_size - self.classes
        self._chunks(s, first)
        tokens = s.problem.num_tokens
        make_blocks(s, tokens, self.cols, BorrowedBlocks(tokens, self.cols), first, s.vocab_size, inputs=False)


@dataclass(frozen=True)
class Borrowed(Schedule):
    """All tokens at once, three products. All tiles but the first lie in the memory of dW, which is written from its
    last class backwards."""

    tiles: tuple[ExponentialTile, ...]

    def forward(self, s: Stage) -> None:
        (rows,) = s.chunks(s.problem.num_tokens)
        (x,), size = s.inputs(rows), s.problem.num_tokens
        weight, dW = s.terms[0].weight, s.weight_gradient()
        own, *others = self.tiles
        tiles = [s.tile(size, own.stop - own.start, s.dtypes.logits_grad)]
        tiles += [borrow(dW[t.place :], size, t.stop - t.start) for t in others]
        factors = s.new_factors()
        s.exponentials(x, tiles, rows, factors)
        scaled = None
        if s.problem.needs.inputs[0]:
            product = s.new(size, x.shape[1], dtype=torch.float32)
            for tile, t in zip(tiles, self.tiles, strict=True):
                matmul(tile, weight[t.classes], out=product, accumulate=t.start > 0)
            s.finish_input_gradient(product, rows, factors)
            scaled = borrow_as(product, x.shape, x.dtype)
        scaled = s.scaled_rows(x, rows, factors, torch.empty_like(x) if scaled is None else scaled)
        s.weight_products([dW[t.classes] for t in self.tiles], tiles, scaled, factors)
