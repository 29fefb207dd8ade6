"""Exponentials in the place of gradients of logits: what a pass makes of them, see `schedules/unnormalized.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flce.backends.contract import (
    BASE,
    EXPONENTIAL_SCALE,
    EXPONENTIAL_SLOTS,
    LEAST_UNIT,
    LOG_SUM,
    OFFSET,
    TargetTerms,
)
from flce.core.slices import first, last
from flce.engine.stage import Stage


class Exponentials:
    """Exponentials of the logits of a pass. The gradient of the logits is ``factors[0] * exponentials``, but in the
    target's column ``factors[1]``."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        slots = 3 if stage.problem.spec.label_smoothing else 2
        self.factors = stage.new(slots, stage.selection.most_rows, dtype=torch.float32)
        """(2, rows): what rows of exponentials are multiplied by, and gradients of the targets' logits. With label
        smoothing (3, rows), see `Backend.exponentials`."""

    def make(self, xs: Sequence[Tensor], tiles: Sequence[Tensor], part: slice) -> None:
        """Losses and exponentials for some rows and all classes, in tiles of consecutive ones: one, where logits do not
        stay in registers."""
        s, factors = self._stage, self.factors
        if s.in_registers:
            call, count = s.statistics_call(part), s.selection.count
            on_device = None if count is None or part.start > 0 else count.on_device
            s.backend.product_exponentials(xs[0], s.terms[0].weight, tiles, call, last(factors, part), on_device)
            if s.problem.token_weight_grad:
                last(factors, part).mul_(last(s.weights, part))
        else:
            self._make_in_blocks(xs, tiles[0], part)
        s.split.complete_factors(part, last(factors, part))  # once for all rows: other processes may have other blocks

    def _make_in_blocks(self, xs: Sequence[Tensor], tile: Tensor, part: slice) -> None:
        s, known = self._stage, None
        for rows, cols, logits, exps in s.make_logits(xs, part, s.classes, tile):
            of_rows = last(self.factors, rows)
            if rows != known:  # the next rows
                known, call = rows, s.statistics_call(rows, with_gradient=True)
                state = s.new(EXPONENTIAL_SLOTS, len(logits), dtype=s.normalizer.dtype)
            s.backend.exponentials(logits, exps, call._replace(tile=s.tile(cols)), state, of_rows)
            if s.split.divided and cols.stop == s.vocab_size:
                of_rows[0] = self._alone(state[BASE], rows, exps.dtype)

    def _alone(self, base: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """(rows,) what makes `Backend.exponentials` relative to a base the derivative of the log-sum-exp of the slice's
        logits, as a product left them."""
        assert self._stage.out is not None
        spec, normalizer = self._stage.problem.spec, last(self._stage.out.normalizer, rows)
        unit = spec.scale * spec.cap
        unit = 1.0 if spec.softcap is not None and abs(unit) <= LEAST_UNIT else unit
        relative = torch.where(base == -torch.inf, 0.0, base) - normalizer[OFFSET]
        return (relative - normalizer[LOG_SUM]).exp() * (unit / EXPONENTIAL_SCALE[dtype])

    def to_gradient(self, exps: Tensor, part: slice) -> None:
        """The gradient of the logits of some rows and all classes, in the place of exponentials."""
        s = self._stage
        s.backend.gradient_of_exponentials(exps, last(self.factors, part), s.statistics_call(part))

    def scaled_rows(self, x: Tensor, part: slice, out: Tensor) -> Tensor:
        """``factors[0] * x`` in `out`, which may be `x`; 0 for ignored rows."""
        self._combine_rows(x, part, out, None, None)
        return out

    def _combine_rows(self, x: Tensor, part: slice, out: Tensor, weight: Tensor | None, index: Tensor | None) -> None:
        s = self._stage
        target, ignore_index = last(s.selection.target, part), s.problem.spec.ignore_index
        s.backend.combine_rows(x, out, weight, target, last(self.factors, part), ignore_index, index)

    def finish_input_gradient(self, term: int, product: Tensor, part: slice) -> None:
        """dX of a term: ``factors[0] * product``, the product of exponentials and weight, and the targets' terms."""
        s = self._stage
        index = None if s.selection.index is None else s.selection.index[part]
        out = first(s.dx_memory(term), part) if index is None else s.dx_memory(term)
        self._combine_rows(product, part, out, s.terms[term].weight, index)
        if index is None:
            s.split.begin_sum(term, out)

    def weight_products(self, term: int, grads: Sequence[Tensor], tiles: Sequence[Tensor], scaled: Tensor) -> None:
        """dW of a term from exponentials of all rows: `grads` are its classes of each tile, the last made first."""
        if self._stage.in_registers:
            self._stage.backend.weight_gradient(grads, tiles, scaled, self._target_terms(term))
            return
        for grad, tile in zip(grads, tiles, strict=True):
            self._stage.matmul(tile.t(), scaled, out=grad)
        self.add_target_terms(term, grads)

    def add_target_terms(self, term: int, sums: Sequence[Tensor]) -> None:
        """Adds the targets' terms to sums of dW, of consecutive classes."""
        # Of fewer than 16 classes the first half is none, see `borrowing.halfway`, and a launch of nothing is dropped.
        self._stage.backend.add_target_terms([part for part in sums if len(part)], self._target_terms(term))

    def add_bias(self, exps: Tensor, part: slice) -> None:
        """``factors[0] @ exps`` to the gradient of the bias of the first classes: exps (rows, classes)."""
        s, factor = self._stage, self.factors[0, part]
        # Two numbers of half precision have the digits of the factor.
        coarse = factor.to(exps.dtype)
        pieces = torch.stack((coarse, (factor - coarse).to(exps.dtype)))
        sums = s.new(len(pieces), exps.shape[1], dtype=torch.float32)
        s.matmul(pieces, exps, out=sums)
        s.db_memory()[: exps.shape[1]].add_(sums[0]).add_(sums[1])

    def add_bias_of_targets(self, stop: int) -> None:
        """The targets' terms to the gradient of the bias of the classes before `stop`."""
        terms = self._target_terms(0)
        ones = terms.x.new_ones(len(terms.x), 1)
        self._stage.backend.add_target_terms([self._stage.db_memory()[:stop, None]], replace(terms, x=ones))

    def _target_terms(self, term: int) -> TargetTerms:
        s, rows = self._stage, slice(0, self._stage.selection.num_rows)
        index = None if s.selection.index is None else s.selection.index[rows]
        target, factor = last(s.selection.target, rows), self.factors[1, rows]
        return TargetTerms(s.terms[term].input, index, target, factor, s.problem.spec.ignore_index)
