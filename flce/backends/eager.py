"""The PyTorch backend: the contract in plain PyTorch, for CPU, MPS and other devices without Triton.

It processes a tile in slabs of a few rows, so that temporary memory does not grow with the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flce.backends import formulas, sampling
from flce.backends.contract import (
    ARGMAX,
    CLASSES,
    DIVERGENCE,
    DIVERGENCE_FACTOR,
    ENTROPY,
    ENTROPY_SUM,
    LEAST_LOGPROB,
    LOG_SUM,
    LOGIT_SUM,
    MAX,
    OFFSET,
    REFERENCE,
    SMOOTH_SUM,
    SOFTMAX,
    STUDENT,
    SUM,
    TARGET,
    TARGET_LOGIT,
    TEACHER,
    WORD_CLASSES,
    GradientCall,
    Marks,
    Samples,
    StatisticsCall,
    Teacher,
    TileCall,
)
from flce.backends.formulas import Targets, is_class, write_state_results
from flce.core.problem import LossSpec, accumulation_dtype

# Bytes of a slab. Small compared to a chunk of logits. Large enough that the synchronization of threads after every
# operator (on a CPU) and the launches (on an accelerator) take little time.
CPU_SLAB_BYTES = 8 << 20
ACCELERATOR_SLAB_BYTES = 64 << 20
# Elements that are scaled at once if scaling needs temporary memory, at most two float32 vectors of this length.
SCALE_SLAB = 1 << 17
SCALING_BYTES = 2 * 4 * SCALE_SLAB
# Numbers of each row of a slab that are allocated at once while results are computed from the statistics.
ROW_NUMBERS = 24
# Bytes of a reduction of few rows on an accelerator, whose blocks store numbers and positions: 16 for each block, of
# which each of up to 400 multiprocessors has four, and one for each row.
REDUCTION_BYTES = 32 << 10


def slab_rows(device_type: str, rows: int, cols: int, itemsize: int) -> int:
    budget = CPU_SLAB_BYTES if device_type == "cpu" else ACCELERATOR_SLAB_BYTES
    return max(1, min(rows, budget // max(1, cols * itemsize)))


def temporary_bytes(
    spec: LossSpec, tile: Tensor, device_type: str, grad: Tensor | None = None, keep_logits: bool = False
) -> int:
    """Return an upper bound of the temporary memory of a pass over a tile, (rows, cols): the slabs that are alive at
    once, and numbers of their rows. `keep_logits`: see `TileClasses`."""
    accum = accumulation_dtype(tile.dtype)
    rows, cols = tile.shape
    narrower = grad is not None and grad.dtype.itemsize < tile.dtype.itemsize
    slabs = (
        tile.dtype != accum or narrower or keep_logits,
        spec.softcap is not None,
        spec.label_smoothing != 0.0 or "entropy" in spec.stats,
    )
    in_slab = slab_rows(device_type, rows, cols, accum.itemsize) * (sum(slabs) * cols + ROW_NUMBERS) * accum.itemsize
    return in_slab + REDUCTION_BYTES * (device_type != "cpu")


class TorchBackend:
    name = "torch"

    def statistics(self, logits: Tensor, call: StatisticsCall, state: Tensor | None) -> None:
        for rows in _slabs(logits):
            slab = call.select_rows(rows)
            z = _transform(logits[rows], slab, want_jacobian=False)[0]
            targets = Targets.from_call(slab)
            merged = _merge(z, slab, targets, None if state is None else state[:, rows])[0]
            if call.tile.is_last:
                write_state_results(merged, slab, targets)
            elif state is not None:
                for slot, value in merged.items():
                    state[slot, rows] = value
            del z  # before the next slab is allocated

    def row_gradient(self, call: GradientCall) -> None:
        call.row_gradient.copy_(formulas.row_gradient(call))

    def gradient(self, logits: Tensor, grad: Tensor, call: GradientCall) -> None:
        for rows in _slabs(logits):
            slab = call.select_rows(rows)
            z, jacobian = _transform(logits[rows], slab, want_jacobian=True)
            row_max, log_sum = slab.normalizer[OFFSET], slab.normalizer[LOG_SUM]
            z.sub_(row_max[:, None])
            targets, factors = Targets.from_call(slab), slab.row_gradient
            if slab.has_entropy_gradient:
                term = _softmax_term_with_entropy(z.sub_(log_sum[:, None]), factors)
            else:
                term = _softmax_term(z.exp_(), log_sum, factors)
            _gradient(term, jacobian, slab, factors, targets, grad[rows])
            del z, term, jacobian  # before the next slab is allocated

    def loss_and_gradient(self, logits: Tensor, grad: Tensor, call: StatisticsCall) -> None:
        for rows in _slabs(logits):
            slab = call.select_rows(rows)
            z, jacobian = _transform(logits[rows], slab, want_jacobian=True)
            targets = Targets.from_call(slab)
            merged, exps = _merge(z, slab, targets, None)
            results, factors = write_state_results(merged, slab, targets)
            assert factors is not None
            term = _softmax_term(exps, results.log_sum, factors)
            _gradient(term, jacobian, slab, factors, targets, grad[rows])
            del z, exps, term, jacobian  # before the next slab is allocated

    def divergence(
        self, logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: Teacher, grad: Tensor | None = None
    ) -> None:
        for selected in _slabs(logits):
            slab, model = call.select_rows(selected), teacher.select_rows(selected)
            merging = grad is None and teacher.kind != "jsd"
            s, jacobian = _transform(logits[selected], slab, grad is not None)
            t = _transform(teacher_logits[selected], model.tile_call(slab), False)[0]
            rows = torch.zeros_like(model.rows) if merging else model.rows
            for x, slot in ((s, STUDENT), (t, TEACHER)):
                offset = x.amax(1) if merging else rows[slot + OFFSET]
                x.sub_(torch.where(offset > -torch.inf, offset, 0.0)[:, None])
                if merging:
                    rows[slot + OFFSET], rows[slot + LOG_SUM] = offset, x.exp().sum(1)
                else:
                    x.sub_(rows[slot + LOG_SUM][:, None])
            if grad is None:
                student_sum, teacher_sum = formulas.divergence_terms(s, t, model.kind, model.beta)
                rows[DIVERGENCE:] += torch.stack((student_sum + teacher_sum, student_sum))
                if merging:
                    model.rows.copy_(formulas.merge_divergences(torch.stack((model.rows, rows)), teacher.kind))
                continue
            assert isinstance(slab, GradientCall)
            factors = slab.row_gradient
            factor = factors[DIVERGENCE_FACTOR][:, None]
            if teacher.kind == "forward_kl":
                added = t.exp_().mul_(-factor)
            else:
                p, ratio = s.exp(), formulas.log_ratios(s, t, teacher.kind, teacher.beta)[0]
                added = ratio.mul_(p).mul_(factor * (1.0 - teacher.beta)).masked_fill_(p == 0.0, 0.0)
            term = _softmax_term_with_entropy(s, factors).add_(added)
            _gradient(term, jacobian, slab, factors, Targets.from_call(slab), grad[selected])

    def _unavailable(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the PyTorch backend has no exponentials and no fused products")

    exponentials = fused_statistics = fused_gradient = fused_exponentials = _unavailable
    combine_rows = weight_gradient = unscaled_weight_gradient = add_target_terms = _unavailable

    def mark_entries(self, logits: Tensor, call: StatisticsCall, marks: Marks) -> None:
        words = marks.words[:, : -(-call.tile.cols // WORD_CLASSES)]
        classes = torch.arange(call.tile.cols, device=logits.device) + marks.first_class
        for part in _slabs(logits, sampling.MARK_BYTES * call.tile.cols):
            slab = call._replace(tile=call.tile._replace(keep_logits=True)).select_rows(part)
            z = _transform(logits[part], slab, want_jacobian=False)[0].to(torch.float32)
            ratio = z.sub_(marks.threshold[part, None]).exp_()
            words[part] = sampling.pack_marks(sampling.uniform(marks.seeds[part, None], classes) < ratio)

    def list_entries(self, words: Tensor, omitted: Tensor, out: Samples) -> None:
        for rows in _slabs(words, sampling.LIST_BYTES * WORD_CLASSES * words.shape[1]):
            sampling.list_entries(words[rows], omitted, out.select_rows(rows))

    sampled_gradient = staticmethod(sampling.sampled_gradient)
    sampled_weight_gradient = staticmethod(sampling.sampled_weight_gradient)

    def row_products(self, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> None:
        for rows in _slabs(ids, 2 * ids.shape[1] * x.shape[1] * out.element_size()):
            weights = weight[ids[rows].clamp(0, len(weight) - 1)].to(out.dtype)
            products = torch.einsum("nkh,nh->nk", weights, x[rows].to(out.dtype))
            out[rows] += products.masked_fill_(~is_class(ids[rows], len(weight)), 0.0)

    def sum_equal(self, ids: Tensor, values: Tensor, out: Tensor) -> None:
        for rows in _slabs(ids, ids.shape[1] ** 2 * values.element_size()):
            equal = ids[rows, :, None] == ids[rows, None, :]
            out[rows] = torch.einsum("nkj,nj->nk", equal.to(values.dtype), values[rows])

    def write_entries(self, tile: Tensor, ids: Tensor, values: Tensor, start: int) -> None:
        column = ids - start
        row, entry = ((column >= 0) & (column < tile.shape[1])).nonzero(as_tuple=True)
        tile[row, column[row, entry]] = values[row, entry].to(tile.dtype)

    loss_scales = staticmethod(formulas.loss_scales)
    reduce = staticmethod(formulas.reduce)

    def scale_(self, xs: Sequence[Tensor], factor: Tensor) -> None:
        # On a CPU the factor can be read without cost. On other devices the host would have to wait.
        if factor.device.type != "cpu" or factor.item() != 1.0:
            for x in xs:
                self._scale_into(x, x, factor)

    def scale_rows_(self, x: Tensor, factor: Tensor, target: Tensor, ignore_index: int) -> None:
        if x.device.type == "cpu" and bool((factor == 1.0).all()):
            return
        per_row = torch.where(target == ignore_index, 1.0, factor)
        for rows in _slabs(x):
            slab, column = x[rows], per_row[rows, None]
            if x.dtype == factor.dtype:
                slab.mul_(column)
            else:
                slab.copy_(slab.to(factor.dtype).mul_(column))

    def scale_cast(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        self._scale_into(out, x, factor)
        return out

    def softmax(self, x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        function = torch.log_softmax if log else torch.softmax
        # If `dtype` has fewer bits or a smaller range, PyTorch rounds the input instead of the result.
        return function(x, -1, dtype=torch.promote_types(dtype, x.dtype)).to(dtype)

    def softmax_backward(self, grad: Tensor, y: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        function = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
        wide = torch.promote_types(dtype, y.dtype)
        return function(grad.to(wide), y.to(wide), -1, wide).to(dtype)

    def _scale_into(self, out: Tensor, x: Tensor, factor: Tensor) -> None:
        if x.device.type != "cpu" or not math.isfinite(factor.item()):
            # If all tokens are ignored, the gradient is 0 and must stay 0 for an infinite factor.
            factor = torch.where(x.any(), factor, 1.0)
        if x.dtype == out.dtype == factor.dtype:
            torch.mul(x, factor, out=out)
            return
        source, target = (t.view(-1) for t in (x, out))
        for start in range(0, source.numel(), SCALE_SLAB):
            slab = slice(start, start + SCALE_SLAB)
            # The product is computed in float32: `x * factor` would first round the factor to the dtype of x.
            target[slab] = source[slab].to(factor.dtype) * factor


def divergence_bytes(tile: Tensor, device_type: str) -> int:
    """Return an upper bound of the temporary memory of an operation on a tile of student and teacher, (rows, cols)."""
    itemsize, (rows, cols) = accumulation_dtype(tile.dtype).itemsize, tile.shape
    return 9 * slab_rows(device_type, rows, cols, itemsize) * cols * itemsize


def _slabs(x: Tensor, row_bytes: int | None = None) -> Iterator[slice]:
    """Yield slices of the rows of `x`, each for a slab. `row_bytes`: the memory of a row; by default of a row of `x` in
    the accumulation dtype."""
    if row_bytes is None:
        row_bytes = x.shape[1] * max(torch.float32.itemsize, x.element_size())
    step = slab_rows(x.device.type, len(x), row_bytes, 1)
    for start in range(0, len(x), step):
        yield slice(start, start + step)


def _transform(logits: Tensor, call: TileCall, want_jacobian: bool) -> tuple[Tensor, Tensor | float]:
    """Return z = softcap(logit_scale * (logits + bias)) / temperature and dz/dlogits, (rows, cols). `logits` may be
    overwritten."""
    spec = call.spec
    # As `accumulation_dtype`, which would cost a call.
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=call.tile.keep_logits)
    bias = call.inputs.bias
    if bias is not None:
        z = z.add_(bias[call.tile.columns])
    factor = None if call.inputs.inverse_temperature is None else call.inputs.inverse_temperature[:, None]
    scale = spec.scale
    jacobian: Tensor | float = scale
    if spec.softcap is None:
        z = z if scale == 1.0 else z.mul_(scale)
    else:
        z = z.mul_(scale).tanh_()
        if want_jacobian:
            jacobian = torch.addcmul(z.new_ones(()), z, z, value=-1.0).mul_(spec.logit_scale / spec.temperature)
        z = z.mul_(spec.cap)
    return (z, jacobian) if factor is None else (z.mul_(factor), factor * jacobian)


def _merge(z: Tensor, call: StatisticsCall, targets: Targets, state: Tensor | None) -> tuple[dict[int, Tensor], Tensor]:
    """Merge the statistics of this tile with the statistics of earlier tiles. Return the used slots of the state, and
    exp(z - max), which overwrites `z`.

    Online softmax as in Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    The exponentials are relative to the merged maximum.
    """
    spec, tile, class_weight = call.spec, call.tile, call.inputs.class_weight
    merged: dict[int, Tensor] = {}
    before = None if state is None or tile.is_first else state
    if "argmax" in spec.stats or "correct" in spec.stats:
        tile_max, tile_argmax = z.max(dim=1)
        merged[ARGMAX] = tile_argmax + tile.start
        if before is not None:  # strictly larger: the lowest index wins a tie
            merged[ARGMAX] = torch.where(tile_max > before[MAX], merged[ARGMAX], before[ARGMAX])
    else:
        tile_max = z.amax(dim=1)
    row_max = tile_max if before is None else torch.maximum(tile_max, before[MAX])
    merged[MAX] = row_max

    target_logit = z.gather(1, targets.column)[:, 0]
    if targets.in_tile is not None:
        outside = 0.0 if before is None else before[TARGET_LOGIT]
        target_logit = torch.where(targets.in_tile, target_logit, outside)
    merged[TARGET_LOGIT] = target_logit

    if spec.label_smoothing:
        # Relative to a logit of the same row, so that a large common offset cancels no digits.
        reference = z[:, 0].nan_to_num(0.0, 0.0, 0.0) if before is None else before[REFERENCE]
        merged[REFERENCE] = reference
        relative = z - reference[:, None]
        if class_weight is not None:
            relative.mul_(class_weight[tile.columns])
        merged[SMOOTH_SUM] = relative.sum(1)
        del relative
        if before is not None:
            merged[SMOOTH_SUM] += before[SMOOTH_SUM]

    if "mean_logit" in spec.stats:
        merged[LOGIT_SUM] = z.sum(1)
    # If all logits so far are -inf, exponentials are relative to 0: -inf - -inf would be NaN.
    safe_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    z.sub_(safe_max[:, None])
    relative = z.clone() if "entropy" in spec.stats else z
    exps = z.exp_()
    merged[SUM] = exps.sum(1)
    if "entropy" in spec.stats:
        # exp(z) z is 0 where z is -inf
        merged[ENTROPY_SUM] = relative.mul_(exps).nan_to_num_(0.0).sum(1)
    if before is not None:
        shift = torch.where(before[MAX] == -torch.inf, 0.0, before[MAX] - safe_max)
        decay = torch.where(before[MAX] == -torch.inf, 0.0, shift.exp())
        merged[SUM] += decay * before[SUM]
        if "entropy" in spec.stats:
            merged[ENTROPY_SUM] += decay * (before[ENTROPY_SUM] + shift * before[SUM])
        if "mean_logit" in spec.stats:
            merged[LOGIT_SUM] += before[LOGIT_SUM]
    return merged, exps


def _softmax_term(exps: Tensor, log_sum: Tensor, row_gradient: Tensor) -> Tensor:
    """Compute the softmax term of the gradient from exp(z - m), where m + log_sum is the log-sum-exp. Overwrite
    `exps`."""
    return exps.mul_((row_gradient[SOFTMAX] * (-log_sum).exp())[:, None])


def _softmax_term_with_entropy(logprob: Tensor, row_gradient: Tensor) -> Tensor:
    """Compute the softmax term and the entropy term of the gradient from log-probabilities, which are overwritten."""
    logprob.clamp_(min=LEAST_LOGPROB)
    probability = logprob.exp()
    return logprob.mul_(-row_gradient[ENTROPY][:, None]).add_(row_gradient[SOFTMAX][:, None]).mul_(probability)


def _gradient(
    g: Tensor, jacobian: Tensor | float, call: TileCall, factors: Tensor, targets: Targets, grad: Tensor
) -> None:
    """Write the gradient from its softmax term, which is overwritten, and the row gradient `factors`."""
    at_target = -factors[TARGET]
    if targets.in_tile is not None:
        at_target = torch.where(targets.in_tile, at_target, 0.0)
    g.scatter_add_(1, targets.column, at_target[:, None])
    if call.spec.label_smoothing:
        weight, classes_factor = call.inputs.class_weight, factors[CLASSES][:, None]
        if weight is None:
            g.sub_(classes_factor)
        else:
            g.addcmul_(classes_factor, weight[call.tile.columns].to(g.dtype), value=-1.0)
    if isinstance(jacobian, Tensor) or jacobian != 1.0:
        g.mul_(jacobian)
    if targets.valid is not None:
        g.masked_fill_(~targets.valid[:, None], 0.0)
    if g.dtype != grad.dtype and g.data_ptr() == grad.data_ptr():
        g = g.to(grad.dtype)  # It overwrites the logits, in fewer bytes.
    if g.data_ptr() != grad.data_ptr():
        grad.copy_(g.view(grad.shape))
