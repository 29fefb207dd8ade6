"""Kernels and launches for a divergence of a student from a teacher. `TritonBackend` launches them.

A program has one row of a tile (`divergence_gradient_kernel`: a part of a row) and reads the logits of both models
once. As in `cross_entropy.py`, each thread has separate maxima and sums over the row (a lane), which are merged once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flce.backends import contract
from flce.backends.contract import TeacherCall, TileCall
from flce.backends.triton.launch import VECTOR_BYTES, WARP, Launch, build_launch, overlap_options, thread_options
from flce.backends.triton.math import (
    LOG2_E,
    lane_sum,
    load_normalizer,
    load_row_gradient,
    log1p,
    logit_gradient,
    softmax_merge,
    softmax_update,
    transform,
)
from flce.core.problem import DIVERGENCES, accumulation_dtype

# Warps of a program, and vectors of a thread in a block.
STATISTICS_WARPS, STATISTICS_PARTS = 8, 2
GRADIENT_WARPS, GRADIENT_PARTS = 8, 2

# A kernel can read only global variables that are constexpr.
_MAX = tl.constexpr(contract.MAX)
_SUM = tl.constexpr(contract.SUM)
_TARGET_LOGIT = tl.constexpr(contract.TARGET_LOGIT)
_ENTROPY_SUM = tl.constexpr(contract.ENTROPY_SUM)
_TEACHER_MAX = tl.constexpr(contract.TEACHER_MAX)
_TEACHER_SUM = tl.constexpr(contract.TEACHER_SUM)
_CROSS_SUM = tl.constexpr(contract.CROSS_SUM)
_STUDENT_REFERENCE = tl.constexpr(contract.STUDENT_REFERENCE)
_TEACHER_REFERENCE = tl.constexpr(contract.TEACHER_REFERENCE)
_OFFSET = tl.constexpr(contract.OFFSET)
_LOG_SUM = tl.constexpr(contract.LOG_SUM)
_DIVERGENCE = tl.constexpr(contract.DIVERGENCE)
_MEAN_WEIGHT = tl.constexpr(contract.MEAN_WEIGHT)
_DIVERGENCE_FACTOR = tl.constexpr(contract.DIVERGENCE_FACTOR)
_LEAST_LOGPROB = tl.constexpr(contract.LEAST_LOGPROB)
_FORWARD = tl.constexpr(DIVERGENCES.index("forward_kl"))
_REVERSE = tl.constexpr(DIVERGENCES.index("reverse_kl"))
_JSD = tl.constexpr(DIVERGENCES.index("jsd"))


@triton.jit
def _reference(z):
    """Return the first logit of a row, or 0 if it is not finite."""
    return tl.where(tl.abs(z) < float("inf"), z, 0.0)


@triton.jit
def _add_weighted(total, decay, exps, x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Add ``exps * x`` to the weighted sum of each lane. Terms of exponentials of 0 are 0, also if x is infinite."""
    terms = tl.where(exps > 0.0, exps * x, 0.0)
    return tl.where(decay > 0.0, total * decay, 0.0) + lane_sum(terms, LANES, VECTOR)


@triton.jit
def _merge_weighted(total, largest, row_max):
    """Return the weighted sum of a row from the sums of its lanes."""
    zero = tl.where(row_max == float("-inf"), 0.0, row_max)
    factor = tl.exp2((largest - zero) * LOG2_E)
    return tl.sum(tl.where(factor > 0.0, total * factor, 0.0), axis=0)


@triton.jit
def _mixture_logprobs(s, t, beta):
    """Return s - log m and t - log m for the mixture m, see `formulas.mixture_logprobs`."""
    difference = s - t
    share = tl.where(difference >= 0.0, beta, 1.0 - beta)
    shared = -log1p(share * (tl.exp2(-tl.abs(difference) * LOG2_E) - 1.0))
    return shared + tl.minimum(difference, 0.0), shared - tl.maximum(difference, 0.0)


@triton.jit
def _logprobs(
    logits_ptr,
    teacher_logits_ptr,
    bias_ptr,
    teacher_bias_ptr,
    columns,
    readable,  # True for columns that are in memory
    present,  # True for columns that are classes
    scale,
    cap,
    teacher_scale,
    teacher_cap,
    ACCUM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
):
    """Return z of student and teacher for some columns of a row, -inf for columns that are not classes, and dz/da of
    the student."""
    z, jacobian = transform(
        tl.load(logits_ptr + columns, mask=readable, other=0.0, eviction_policy="evict_first"),
        bias_ptr, columns, present, scale, cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
    )  # fmt: skip
    t, _teacher_jacobian = transform(
        tl.load(teacher_logits_ptr + columns, mask=readable, other=0.0, eviction_policy="evict_first"),
        teacher_bias_ptr, columns, present, teacher_scale, teacher_cap,
        ACCUM, HAS_TEACHER_SCALE, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
    )  # fmt: skip
    return tl.where(present, z, float("-inf")), tl.where(present, t, float("-inf")), jacobian


@triton.jit(
    do_not_specialize=[
        "ignore_index", "column_start", "state_stride", "normalizer_stride", "teacher_rows_stride", "vocab_size",
    ]
)  # fmt: skip
def divergence_statistics_kernel(
    logits_ptr,  # (rows, cols) of the student, row stride logits_stride
    teacher_logits_ptr,  # (rows, cols), row stride teacher_logits_stride
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    teacher_bias_ptr,  # (cols,) of this tile
    state_ptr,  # (9, rows), row stride state_stride
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    entropy_ptr,  # (rows,)
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride, output
    logits_stride,
    teacher_logits_stride,
    state_stride,
    normalizer_stride,
    teacher_rows_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read, cols or more
    column_start,  # the class of column 0
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    teacher_scale: tl.float64,
    teacher_cap: tl.float64,
    ACCUM: tl.constexpr,
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    LOAD_STATE: tl.constexpr,
    FINISH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Merge the statistics of a tile of both models with the state of earlier tiles. FINISH: write the results."""
    offsets = tl.arange(0, PARTS)[:, None] * (LANES * VECTOR) + tl.arange(0, LANES * VECTOR)[None, :]
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    teacher_logits_ptr += row * teacher_logits_stride
    state_ptr += row
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.full((), scale, ACCUM)
    cap = tl.full((), cap, ACCUM)
    teacher_scale = tl.full((), teacher_scale, ACCUM)
    teacher_cap = tl.full((), teacher_cap, ACCUM)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    target_in_tile = (target >= column_start) & (target < column_start + cols) & valid
    first_lane = tl.arange(0, LANES) == 0
    largest = tl.full((LANES,), float("-inf"), ACCUM)
    total = tl.zeros((LANES,), ACCUM)
    target_logit = tl.full((), 0.0, ACCUM)
    entropy_sum, cross_sum, teacher_largest, teacher_total = total, total, largest, total
    if LOAD_STATE:
        largest = tl.where(first_lane, tl.load(state_ptr + _MAX * state_stride), largest)
        total = tl.where(first_lane, tl.load(state_ptr + _SUM * state_stride), total)
        target_logit = tl.load(state_ptr + _TARGET_LOGIT * state_stride)
        teacher_largest = tl.where(first_lane, tl.load(state_ptr + _TEACHER_MAX * state_stride), teacher_largest)
        teacher_total = tl.where(first_lane, tl.load(state_ptr + _TEACHER_SUM * state_stride), teacher_total)
        if WANT_ENTROPY:
            entropy_sum = tl.where(first_lane, tl.load(state_ptr + _ENTROPY_SUM * state_stride), entropy_sum)
        if KIND != _JSD:
            cross_sum = tl.where(first_lane, tl.load(state_ptr + _CROSS_SUM * state_stride), cross_sum)
        reference = tl.load(state_ptr + _STUDENT_REFERENCE * state_stride)
        teacher_reference = tl.load(state_ptr + _TEACHER_REFERENCE * state_stride)
    else:
        first_z, first_t, _first_jacobian = _logprobs(
            logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, 0, True, True,
            scale, cap, teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
            HAS_TEACHER_SCALE, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        reference, teacher_reference = _reference(first_z), _reference(first_t)
    if WANT_LOGPROB:
        target_column = tl.where(target_in_tile, target - column_start, 0)
        target_z, _target_jacobian = transform(
            tl.load(logits_ptr + target_column), bias_ptr, target_column, target_in_tile,
            scale, cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        target_logit = tl.where(target_in_tile, target_z, target_logit)

    for start in range(0, cols, PARTS * LANES * VECTOR):
        columns = start + offsets
        z, t, _jacobian = _logprobs(
            logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, columns, columns < accessible_cols,
            columns < cols, scale, cap, teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
            HAS_TEACHER_SCALE, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        largest, total, exps, _zero, decay = softmax_update(largest, total, z, LANES, VECTOR)
        teacher_largest, teacher_total, teacher_exps, _zero, teacher_decay = softmax_update(
            teacher_largest, teacher_total, t, LANES, VECTOR
        )
        z -= reference
        t -= teacher_reference
        if WANT_ENTROPY:
            entropy_sum = _add_weighted(entropy_sum, decay, exps, z, LANES, VECTOR)
        if KIND == _FORWARD:
            cross_sum = _add_weighted(cross_sum, teacher_decay, teacher_exps, t - z, LANES, VECTOR)
        if KIND == _REVERSE:
            cross_sum = _add_weighted(cross_sum, decay, exps, z - t, LANES, VECTOR)

    row_max, row_sum = tl.reduce((largest, total), 0, softmax_merge)
    teacher_max, teacher_sum = tl.reduce((teacher_largest, teacher_total), 0, softmax_merge)
    row_cross = tl.full((), 0.0, ACCUM)
    if KIND == _FORWARD:
        row_cross = _merge_weighted(cross_sum, teacher_largest, teacher_max)
    if KIND == _REVERSE:
        row_cross = _merge_weighted(cross_sum, largest, row_max)
    if WANT_ENTROPY:
        row_entropy = _merge_weighted(entropy_sum, largest, row_max)
    if FINISH:
        log_sum = tl.log(tl.where(valid, row_sum, 1.0))
        teacher_log_sum = tl.log(tl.where(valid, teacher_sum, 1.0))
        lse = (row_max - reference) + log_sum
        teacher_lse = (teacher_max - teacher_reference) + teacher_log_sum
        normalizer_ptr += row
        tl.store(normalizer_ptr + _OFFSET * normalizer_stride, tl.where(valid, row_max, 0.0))
        tl.store(normalizer_ptr + _LOG_SUM * normalizer_stride, tl.where(valid, log_sum, 0.0))
        if WANT_LOGPROB:
            in_range = (target >= 0) & (target < vocab_size)
            logprob = tl.where(in_range, (target_logit - row_max) - log_sum, float("nan"))
            tl.store(logprob_ptr + row, tl.where(valid, logprob, 0.0))
        if WANT_ENTROPY:
            tl.store(entropy_ptr + row, tl.where(valid, lse - row_entropy / row_sum, 0.0))
        teacher_rows_ptr += row
        tl.store(teacher_rows_ptr + _OFFSET * teacher_rows_stride, tl.where(valid, teacher_max, 0.0))
        tl.store(teacher_rows_ptr + _LOG_SUM * teacher_rows_stride, tl.where(valid, teacher_log_sum, 0.0))
        divergence = tl.full((), 0.0, ACCUM)
        if KIND == _FORWARD:
            divergence = (row_cross / teacher_sum - teacher_lse) + lse
        if KIND == _REVERSE:
            divergence = (row_cross / row_sum - lse) + teacher_lse
        tl.store(teacher_rows_ptr + _DIVERGENCE * teacher_rows_stride, tl.where(valid, divergence, 0.0))
    else:
        tl.store(state_ptr + _MAX * state_stride, row_max)
        tl.store(state_ptr + _SUM * state_stride, row_sum)
        tl.store(state_ptr + _TARGET_LOGIT * state_stride, target_logit)
        if WANT_ENTROPY:
            tl.store(state_ptr + _ENTROPY_SUM * state_stride, row_entropy)
        tl.store(state_ptr + _TEACHER_MAX * state_stride, teacher_max)
        tl.store(state_ptr + _TEACHER_SUM * state_stride, teacher_sum)
        tl.store(state_ptr + _CROSS_SUM * state_stride, row_cross)
        tl.store(state_ptr + _STUDENT_REFERENCE * state_stride, reference)
        tl.store(state_ptr + _TEACHER_REFERENCE * state_stride, teacher_reference)


@triton.jit(
    do_not_specialize=[
        "ignore_index",
        "normalizer_stride",
        "teacher_rows_stride",
        "row_gradient_stride",
        "column_start",
    ]
)
def divergence_gradient_kernel(
    logits_ptr,  # (rows, cols) of the student, row stride logits_stride
    teacher_logits_ptr,  # (rows, cols), row stride teacher_logits_stride
    grad_ptr,  # (rows, cols), row stride grad_stride; may be logits_ptr
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    teacher_bias_ptr,  # (cols,) of this tile
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride
    logits_stride,
    teacher_logits_stride,
    grad_stride,
    normalizer_stride,
    teacher_rows_stride,
    row_gradient_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read and written, cols or more
    column_start,  # the class of column 0
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    teacher_scale: tl.float64,
    teacher_cap: tl.float64,
    beta: tl.float64,
    ACCUM: tl.constexpr,
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    SUMS: tl.constexpr,  # instead of the gradient, add the terms of "jsd" to teacher_rows; a program has a whole row
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    BLOCK: tl.constexpr,
):
    """Write the gradient of a part of a row, or sum the terms of "jsd", from the normalizers of all classes."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    teacher_logits_ptr += row * teacher_logits_stride
    teacher_rows_ptr += row
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.full((), scale, ACCUM)
    cap = tl.full((), cap, ACCUM)
    teacher_scale = tl.full((), teacher_scale, ACCUM)
    teacher_cap = tl.full((), teacher_cap, ACCUM)
    beta = tl.full((), beta, ACCUM)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, None)
    teacher_offset, teacher_log_sum = load_normalizer(teacher_rows_ptr, teacher_rows_stride, 0, None)
    if SUMS:
        divergence = tl.zeros((BLOCK,), ACCUM)
        student_sum = tl.zeros((BLOCK,), ACCUM)
        first, stop = 0, cols
    else:
        softmax_factor, target_factor, _classes_factor, entropy_factor = load_row_gradient(
            row_gradient_ptr, row_gradient_stride, row, None, True
        )
        divergence_factor = tl.load(row_gradient_ptr + _DIVERGENCE_FACTOR * row_gradient_stride + row)
        first = tl.program_id(1) * BLOCK
        stop = first + 1
    for start in range(first, stop, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        readable = columns < accessible_cols
        s, t, jacobian = _logprobs(
            logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, columns, readable, columns < cols,
            scale, cap, teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
            HAS_TEACHER_SCALE, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        s = (s - offset) - log_sum
        t = (t - teacher_offset) - teacher_log_sum
        p = tl.exp2(s * LOG2_E)
        if SUMS or KIND == _FORWARD:
            q = tl.exp2(t * LOG2_E)
        if SUMS:
            student_term, teacher_term = _mixture_logprobs(s, t, beta)
            student_term = tl.where(p > 0.0, (1.0 - beta) * p * student_term, 0.0)
            student_sum += student_term
            divergence += student_term + tl.where(q > 0.0, beta * q * teacher_term, 0.0)
        else:
            factor = softmax_factor - entropy_factor * tl.maximum(s, _LEAST_LOGPROB)
            if KIND == _FORWARD:
                term = factor * p - divergence_factor * q
            else:
                weight = s - t
                if KIND == _JSD:
                    weight, _teacher_term = _mixture_logprobs(s, t, beta)
                    weight *= 1.0 - beta
                term = tl.where(p > 0.0, (factor + divergence_factor * weight) * p, 0.0)
            grad = logit_gradient(
                term, columns == target - column_start, target_factor, jacobian, HAS_SCALE or HAS_SOFTCAP
            )
            grad = tl.where(valid & (columns < cols), grad, 0.0)
            tl.store(
                grad_ptr + row * grad_stride + columns, grad.to(grad_ptr.dtype.element_ty), mask=readable,
            )  # fmt: skip
    if SUMS:
        divergence_ptr = teacher_rows_ptr + _DIVERGENCE * teacher_rows_stride
        tl.store(divergence_ptr, tl.where(valid, tl.load(divergence_ptr) + tl.sum(divergence, axis=0), 0.0))
        mean_ptr = teacher_rows_ptr + _MEAN_WEIGHT * teacher_rows_stride
        tl.store(mean_ptr, tl.where(valid, tl.load(mean_ptr) + tl.sum(student_sum, axis=0), 0.0))


def _arguments(
    logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: TeacherCall
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the arguments that all launches share."""
    spec = teacher.spec
    options = {
        "ACCUM": tl.float64 if accumulation_dtype(logits.dtype) == torch.float64 else tl.float32,
        "KIND": DIVERGENCES.index(teacher.kind),
        "HAS_TEACHER_SCALE": spec.scale != 1.0,
        "HAS_TEACHER_SOFTCAP": spec.softcap is not None,
        **overlap_options(logits.device),
    }
    arguments = {
        "logits": logits,
        "teacher_logits": teacher_logits,
        "teacher_bias": teacher.tile_call(call).inputs.tile_bias(call.tile),
        "teacher_rows": teacher.rows,
        "teacher_scale": spec.scale,
        "teacher_cap": spec.cap,
    }
    return options, arguments


def divergence_statistics(
    logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: TeacherCall, state: Tensor | None
) -> Iterator[Launch]:
    options, arguments = _arguments(logits, teacher_logits, call, teacher)
    options |= {
        "LOAD_STATE": not call.tile.is_first,
        "FINISH": call.tile.is_last,
        "PARTS": STATISTICS_PARTS,
        "LANES": WARP * STATISTICS_WARPS,
        "VECTOR": VECTOR_BYTES // logits.element_size(),
        **thread_options(logits.device, STATISTICS_WARPS),
    }
    yield build_launch(divergence_statistics_kernel, (len(logits),), call, options, state=state, **arguments)


def divergence_sums(logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: TeacherCall) -> Iterator[Launch]:
    yield _gradient_launch((len(logits),), logits, teacher_logits, None, call, teacher)


def divergence_gradient(
    logits: Tensor, teacher_logits: Tensor, grad: Tensor, call: TileCall, teacher: TeacherCall
) -> Iterator[Launch]:
    grid = len(logits), triton.cdiv(call.tile.accessible_cols, _gradient_block(logits))
    yield _gradient_launch(grid, logits, teacher_logits, grad, call, teacher)


def _gradient_block(logits: Tensor) -> int:
    return WARP * GRADIENT_WARPS * GRADIENT_PARTS * (VECTOR_BYTES // logits.element_size())


def _gradient_launch(
    grid: tuple[int, ...],
    logits: Tensor,
    teacher_logits: Tensor,
    grad: Tensor | None,
    call: TileCall,
    teacher: TeacherCall,
) -> Launch:
    options, arguments = _arguments(logits, teacher_logits, call, teacher)
    options |= {"SUMS": grad is None, "BLOCK": _gradient_block(logits), **thread_options(logits.device, GRADIENT_WARPS)}
    return build_launch(divergence_gradient_kernel, grid, call, options, grad=grad, beta=teacher.beta, **arguments)
