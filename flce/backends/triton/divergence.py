"""The kernel of `Backend.divergence` and its launch. `TritonBackend` launches it.

A program has one row of a tile. It reads the logits of both models once, and each thread reads whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends import contract
from flce.backends.contract import Teacher, TileCall
from flce.backends.triton.launch import VECTOR_BYTES, Launch, build_launch, thread_options
from flce.backends.triton.math import (
    LN_2,
    LOG2_E,
    load_normalizer,
    load_row_gradient,
    logit_gradient,
    transform,
    wait_for_previous_kernel,
)
from flce.core.problem import DIVERGENCES, accumulation_dtype

# Vectors of a block, and warps of a program. Statistics have reductions over a block: fewer warps wait for each other.
VECTORS, STATISTICS_WARPS, WARPS = 512, 8, 16

# A kernel can read only global variables that are constexpr.
_STUDENT = tl.constexpr(contract.STUDENT)
_LOG_SUM = tl.constexpr(contract.LOG_SUM)
_DIVERGENCE = tl.constexpr(contract.DIVERGENCE)
_MEAN_WEIGHT = tl.constexpr(contract.MEAN_WEIGHT)
_DIVERGENCE_FACTOR = tl.constexpr(contract.DIVERGENCE_FACTOR)
_LEAST_LOGPROB = tl.constexpr(contract.LEAST_LOGPROB)
_FORWARD, _REVERSE, _JSD = map(tl.constexpr, range(len(DIVERGENCES)))


@triton.jit
def _log_ratios(s, t, beta, KIND: tl.constexpr):
    """Return s and t relative to each other, or for "jsd" relative to the mixture, see `formulas.log_ratios`."""
    difference = s - t
    if KIND == _JSD:
        less = tl.where(difference >= 0.0, beta, 1.0 - beta) * (tl.exp2(-tl.abs(difference) * LOG2_E) - 1.0)
        rest = 1.0 + less
        shared = (rest - 1.0) - less - tl.log2(rest) * LN_2  # -log(1 + less), corrected for the rounding of the rest
        return shared + tl.minimum(difference, 0.0), shared - tl.maximum(difference, 0.0)
    else:
        return difference, -difference


@triton.jit
def _rescale(offset, z):
    """Return the largest z so far, the finite reference of exponentials, and the old offset relative to it."""
    largest = tl.maximum(offset, tl.max(z, axis=0))
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, reference, offset - reference


@triton.jit
def _carry(total, weight_sum, shift, other_shift):
    """Return a sum of terms of a KL relative to new references, see `formulas.merge_divergences`."""
    decay = tl.exp2(shift * LOG2_E)
    return tl.where(decay > 0.0, decay * (total + (shift - other_shift) * weight_sum), 0.0)


@triton.jit(do_not_specialize=["ignore_index", "column_start", "teacher_rows_stride", "row_gradient_stride"])
def divergence_kernel(
    logits_ptr, teacher_logits_ptr,  # (rows, cols)
    grad_ptr,  # (rows, cols); may be logits_ptr; None: no gradient
    target_ptr,  # (rows,) int64
    bias_ptr, teacher_bias_ptr,  # (cols,) of this tile
    teacher_rows_ptr,  # (slots, rows), see `Teacher.rows`
    row_gradient_ptr,  # (slots, rows)
    logits_stride, teacher_logits_stride, grad_stride, teacher_rows_stride, row_gradient_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read and written, cols or more
    column_start,  # the class of column 0
    ignore_index,
    scale: tl.float64, cap: tl.float64, teacher_scale: tl.float64, teacher_cap: tl.float64, beta: tl.float64,
    ACCUM: tl.constexpr,
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    BLOCK: tl.constexpr,
):  # fmt: skip
    STATISTICS: tl.constexpr = KIND != _JSD and grad_ptr is None
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    teacher_logits_ptr += row * teacher_logits_stride
    teacher_rows_ptr += row
    student_rows_ptr = teacher_rows_ptr + _STUDENT * teacher_rows_stride
    divergence_ptr = teacher_rows_ptr + _DIVERGENCE * teacher_rows_stride
    mean_ptr = teacher_rows_ptr + _MEAN_WEIGHT * teacher_rows_stride
    wait_for_previous_kernel(OVERLAP)
    scale, cap, beta = tl.full((), scale, ACCUM), tl.full((), cap, ACCUM), tl.full((), beta, ACCUM)
    teacher_scale, teacher_cap = tl.full((), teacher_scale, ACCUM), tl.full((), teacher_cap, ACCUM)
    offset, log_sum = load_normalizer(student_rows_ptr, teacher_rows_stride, 0, None)
    teacher_offset, teacher_log_sum = load_normalizer(teacher_rows_ptr, teacher_rows_stride, 0, None)
    first = tl.arange(0, BLOCK) == 0  # Sums of earlier tiles are the first of BLOCK sums of this tile.
    if STATISTICS:  # sums of exponentials
        log_sum, teacher_log_sum = tl.where(first, log_sum, 0.0), tl.where(first, teacher_log_sum, 0.0)
    if grad_ptr is not None:
        grad_ptr += row * grad_stride
        target = tl.load(target_ptr + row)
        softmax_factor, target_factor, _classes_factor, entropy_factor = load_row_gradient(
            row_gradient_ptr, row_gradient_stride, row, None, True, False
        )
        divergence_factor = tl.load(row_gradient_ptr + _DIVERGENCE_FACTOR * row_gradient_stride + row)
    else:
        divergence, mean_weight = tl.where(first, tl.load(divergence_ptr), 0.0), tl.where(first, tl.load(mean_ptr), 0.0)
    for start in range(0, cols, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        present, readable = columns < cols, columns < accessible_cols
        a = tl.load(logits_ptr + columns, mask=readable, other=0.0, eviction_policy="evict_first")
        b = tl.load(teacher_logits_ptr + columns, mask=readable, other=0.0, eviction_policy="evict_first")
        s, jacobian = transform(a, bias_ptr, columns, present, scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP)
        t, _teacher_jacobian = transform(
            b, teacher_bias_ptr, columns, present, teacher_scale, teacher_cap, ACCUM, HAS_TEACHER_SCALE,
            HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        s, t = tl.where(present, s, float("-inf")), tl.where(present, t, float("-inf"))
        if STATISTICS:
            offset, reference, shift = _rescale(offset, s)
            teacher_offset, teacher_reference, teacher_shift = _rescale(teacher_offset, t)
            if KIND == _FORWARD:
                divergence = _carry(divergence, teacher_log_sum, teacher_shift, shift)
            else:
                divergence = _carry(divergence, log_sum, shift, teacher_shift)
            s -= reference
            t -= teacher_reference
        else:
            s = (s - offset) - log_sum
            t = (t - teacher_offset) - teacher_log_sum
        p = tl.exp2(s * LOG2_E)
        q = tl.exp2(t * LOG2_E)
        ratio, teacher_ratio = _log_ratios(s, t, beta, KIND)
        if STATISTICS:
            log_sum = log_sum * tl.exp2(shift * LOG2_E) + p
            teacher_log_sum = teacher_log_sum * tl.exp2(teacher_shift * LOG2_E) + q
        if grad_ptr is not None:
            factor = softmax_factor - entropy_factor * tl.maximum(s, _LEAST_LOGPROB)
            if KIND == _FORWARD:
                term = factor * p - divergence_factor * q
            else:
                term = tl.where(p > 0.0, (factor + divergence_factor * (1.0 - beta) * ratio) * p, 0.0)
            is_target = columns == target - column_start
            grad = logit_gradient(
                term, is_target, target_factor, jacobian, HAS_SCALE or HAS_SOFTCAP, 0.0, None, columns, None, False
            )
            grad = tl.where((target != ignore_index) & present, grad, 0.0)
            tl.store(grad_ptr + columns, grad.to(grad_ptr.dtype.element_ty), mask=readable)
        else:  # Classes of probability 0 add 0, also if their ratio is infinite.
            if KIND != _FORWARD:
                student_term = tl.where(p > 0.0, (1.0 - beta) * p * ratio, 0.0)
                divergence += student_term
                mean_weight += student_term
            if KIND != _REVERSE:
                divergence += tl.where(q > 0.0, beta * q * teacher_ratio, 0.0)
    if STATISTICS:
        tl.store(student_rows_ptr, offset)
        tl.store(student_rows_ptr + _LOG_SUM * teacher_rows_stride, tl.sum(log_sum, axis=0))
        tl.store(teacher_rows_ptr, teacher_offset)
        tl.store(teacher_rows_ptr + _LOG_SUM * teacher_rows_stride, tl.sum(teacher_log_sum, axis=0))
    if grad_ptr is None:
        tl.store(divergence_ptr, tl.sum(divergence, axis=0))
        tl.store(mean_ptr, tl.sum(mean_weight, axis=0))


def divergence(
    logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: Teacher, grad: Tensor | None = None
) -> Iterator[Launch]:
    options = {
        "ACCUM": tl.float64 if accumulation_dtype(logits.dtype) == torch.float64 else tl.float32,
        "KIND": DIVERGENCES.index(teacher.kind),
        "HAS_TEACHER_SCALE": teacher.spec.scale != 1.0,
        "HAS_TEACHER_SOFTCAP": teacher.spec.softcap is not None,
        "BLOCK": VECTORS * (VECTOR_BYTES // logits.element_size()),
        **thread_options(logits.device, STATISTICS_WARPS if grad is None and teacher.kind != "jsd" else WARPS),
    }
    yield build_launch(
        divergence_kernel, (len(logits),), call, options, logits=logits, teacher_logits=teacher_logits, grad=grad,
        teacher_rows=teacher.rows, teacher_bias=teacher.tile_call(call).inputs.tile_bias(call.tile),
        teacher_scale=teacher.spec.scale, teacher_cap=teacher.spec.cap, beta=teacher.beta,
    )  # fmt: skip
