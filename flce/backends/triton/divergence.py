"""Kernels and launches for a divergence of a student from a teacher. `TritonBackend` launches them.

A program has one row of a tile. It reads the logits of both models once, and each thread reads whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flce.backends import contract
from flce.backends.contract import TeacherCall, TileCall
from flce.backends.triton.launch import VECTOR_BYTES, WARP, Launch, build_launch, overlap_options, thread_options
from flce.backends.triton.math import LOG2_E, load_normalizer, load_row_gradient, log1p, logit_gradient, transform
from flce.core.problem import DIVERGENCES, accumulation_dtype

# Warps of a program, and vectors of a thread in a block.
WARPS, PARTS = 8, 2

# A kernel can read only global variables that are constexpr.
_SUM_REFERENCE = tl.constexpr(contract.SUM_REFERENCE)
_CROSS_SUM = tl.constexpr(contract.CROSS_SUM)
_STUDENT_REFERENCE = tl.constexpr(contract.STUDENT_REFERENCE)
_TEACHER_REFERENCE = tl.constexpr(contract.TEACHER_REFERENCE)
_DIVERGENCE = tl.constexpr(contract.DIVERGENCE)
_MEAN_WEIGHT = tl.constexpr(contract.MEAN_WEIGHT)
_DIVERGENCE_FACTOR = tl.constexpr(contract.DIVERGENCE_FACTOR)
_LEAST_LOGPROB = tl.constexpr(contract.LEAST_LOGPROB)
_FORWARD = tl.constexpr(DIVERGENCES.index("forward_kl"))
_JSD = tl.constexpr(DIVERGENCES.index("jsd"))


@triton.jit
def _mixture_logprobs(s, t, beta):
    """Return s - log m and t - log m for the mixture m, see `formulas.mixture_logprobs`."""
    difference = s - t
    share = tl.where(difference >= 0.0, beta, 1.0 - beta)
    shared = -log1p(share * (tl.exp2(-tl.abs(difference) * LOG2_E) - 1.0))
    return shared + tl.minimum(difference, 0.0), shared - tl.maximum(difference, 0.0)


@triton.jit
def _load_both(
    logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, columns, cols, accessible_cols, scale, cap,
    teacher_scale, teacher_cap, ACCUM: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SCALE: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return z of student and teacher for some columns of a row, -inf behind the last class, and dz/da of the
    student."""
    present = columns < cols
    a = tl.load(logits_ptr + columns, mask=columns < accessible_cols, other=0.0, eviction_policy="evict_first")
    b = tl.load(teacher_logits_ptr + columns, mask=columns < accessible_cols, other=0.0, eviction_policy="evict_first")
    z, jacobian = transform(a, bias_ptr, columns, present, scale, cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP)
    t, _teacher_jacobian = transform(
        b, teacher_bias_ptr, columns, present, teacher_scale, teacher_cap, ACCUM, HAS_TEACHER_SCALE, HAS_TEACHER_BIAS,
        HAS_TEACHER_SOFTCAP,
    )  # fmt: skip
    return tl.where(present, z, float("-inf")), tl.where(present, t, float("-inf")), jacobian


@triton.jit(do_not_specialize=["ignore_index", "column_start", "normalizer_stride", "teacher_rows_stride"])
def divergence_sums_kernel(
    logits_ptr,  # (rows, cols) of the student, row stride logits_stride
    teacher_logits_ptr,  # (rows, cols), row stride teacher_logits_stride
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    teacher_bias_ptr,  # (cols,) of this tile
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride; only for "jsd"
    largest_ptr,  # (rows,) see `Backend.divergence_sums`; not for "jsd"
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride, see `TeacherCall.rows`
    logits_stride, teacher_logits_stride, normalizer_stride, teacher_rows_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read, cols or more
    column_start,  # the class of column 0
    ignore_index,
    scale: tl.float64, cap: tl.float64, teacher_scale: tl.float64, teacher_cap: tl.float64, beta: tl.float64,
    ACCUM: tl.constexpr,
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    student_reference = tl.full((), 0.0, ACCUM)
    teacher_reference = tl.full((), 0.0, ACCUM)
    if KIND == _JSD:
        offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, None)
        teacher_offset, teacher_log_sum = load_normalizer(teacher_rows_ptr, teacher_rows_stride, 0, None)
    else:
        largest = tl.load(largest_ptr + row)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        if column_start > 0:
            student_reference = tl.load(teacher_rows_ptr + _STUDENT_REFERENCE * teacher_rows_stride)
            teacher_reference = tl.load(teacher_rows_ptr + _TEACHER_REFERENCE * teacher_rows_stride)
        else:
            first_z, first_t, _first_jacobian = _load_both(
                logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, 0, cols, accessible_cols, scale, cap,
                teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, HAS_TEACHER_SCALE,
                HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
            )  # fmt: skip
            student_reference = tl.where(tl.abs(first_z) < float("inf"), first_z, 0.0)
            teacher_reference = tl.where(tl.abs(first_t) < float("inf"), first_t, 0.0)
    total = tl.zeros((BLOCK,), ACCUM)
    student_total = tl.zeros((BLOCK,), ACCUM)
    for start in range(0, cols, BLOCK):
        z, t, _jacobian = _load_both(
            logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, start + tl.arange(0, BLOCK), cols,
            accessible_cols, scale, cap, teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP,
            HAS_TEACHER_SCALE, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        if KIND == _JSD:
            z = (z - offset) - log_sum
            t = (t - teacher_offset) - teacher_log_sum
            p = tl.exp2(z * LOG2_E)
            q = tl.exp2(t * LOG2_E)
            student_term, teacher_term = _mixture_logprobs(z, t, beta)
            student_term = tl.where(p > 0.0, (1.0 - beta) * p * student_term, 0.0)
            student_total += student_term
            total += student_term + tl.where(q > 0.0, beta * q * teacher_term, 0.0)
        else:
            difference = (t - teacher_reference) - (z - student_reference)
            if KIND == _FORWARD:
                exps = tl.exp2((t - largest) * LOG2_E)
            else:
                exps = tl.exp2((z - largest) * LOG2_E)
                difference = -difference
            # Terms of exponentials of 0 are 0, also if the difference is infinite.
            total += tl.where(exps > 0.0, exps * difference, 0.0)
    if KIND == _JSD:
        valid = tl.load(target_ptr + row) != ignore_index
        divergence_ptr = teacher_rows_ptr + _DIVERGENCE * teacher_rows_stride
        tl.store(divergence_ptr, tl.where(valid, tl.load(divergence_ptr) + tl.sum(total, axis=0), 0.0))
        mean_ptr = teacher_rows_ptr + _MEAN_WEIGHT * teacher_rows_stride
        tl.store(mean_ptr, tl.where(valid, tl.load(mean_ptr) + tl.sum(student_total, axis=0), 0.0))
    else:
        cross_sum = tl.sum(total, axis=0)
        if column_start > 0:
            before = tl.load(teacher_rows_ptr + _SUM_REFERENCE * teacher_rows_stride)
            decay = tl.exp2((before - largest) * LOG2_E)
            carried = decay * tl.load(teacher_rows_ptr + _CROSS_SUM * teacher_rows_stride)
            cross_sum += tl.where(decay > 0.0, carried, 0.0)
        tl.store(teacher_rows_ptr + _SUM_REFERENCE * teacher_rows_stride, largest)
        tl.store(teacher_rows_ptr + _CROSS_SUM * teacher_rows_stride, cross_sum)
        tl.store(teacher_rows_ptr + _STUDENT_REFERENCE * teacher_rows_stride, student_reference)
        tl.store(teacher_rows_ptr + _TEACHER_REFERENCE * teacher_rows_stride, teacher_reference)


@triton.jit(
    do_not_specialize=[
        "ignore_index", "column_start", "normalizer_stride", "teacher_rows_stride", "row_gradient_stride",
    ]
)  # fmt: skip
def divergence_gradient_kernel(
    logits_ptr,  # (rows, cols) of the student, row stride logits_stride
    teacher_logits_ptr,  # (rows, cols), row stride teacher_logits_stride
    grad_ptr,  # (rows, cols), row stride grad_stride; may be logits_ptr, also with NARROWING
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    teacher_bias_ptr,  # (cols,) of this tile
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride
    logits_stride, teacher_logits_stride, grad_stride, normalizer_stride, teacher_rows_stride, row_gradient_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read and written, cols or more
    column_start,  # the class of column 0
    ignore_index,
    scale: tl.float64, cap: tl.float64, teacher_scale: tl.float64, teacher_cap: tl.float64, beta: tl.float64,
    ACCUM: tl.constexpr,
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    NARROWING: tl.constexpr,  # the gradient has fewer bytes than the logits in the same memory
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    teacher_logits_ptr += row * teacher_logits_stride
    grad_ptr += row * grad_stride
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.full((), scale, ACCUM)
    cap = tl.full((), cap, ACCUM)
    teacher_scale = tl.full((), teacher_scale, ACCUM)
    teacher_cap = tl.full((), teacher_cap, ACCUM)
    beta = tl.full((), beta, ACCUM)
    offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, None)
    teacher_offset, teacher_log_sum = load_normalizer(teacher_rows_ptr, teacher_rows_stride, row, None)
    softmax_factor, target_factor, _classes_factor, entropy_factor = load_row_gradient(
        row_gradient_ptr, row_gradient_stride, row, None, True
    )
    divergence_factor = tl.load(row_gradient_ptr + _DIVERGENCE_FACTOR * row_gradient_stride + row)
    target = tl.load(target_ptr + row)
    for start in range(0, cols, BLOCK):  # in ascending order: see NARROWING
        columns = start + tl.arange(0, BLOCK)
        z, t, jacobian = _load_both(
            logits_ptr, teacher_logits_ptr, bias_ptr, teacher_bias_ptr, columns, cols, accessible_cols, scale, cap,
            teacher_scale, teacher_cap, ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, HAS_TEACHER_SCALE, HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        s = (z - offset) - log_sum
        t = (t - teacher_offset) - teacher_log_sum
        p = tl.exp2(s * LOG2_E)
        factor = softmax_factor - entropy_factor * tl.maximum(s, _LEAST_LOGPROB)
        if KIND == _FORWARD:
            term = factor * p - divergence_factor * tl.exp2(t * LOG2_E)
        else:
            weight = s - t
            if KIND == _JSD:
                weight, _teacher_term = _mixture_logprobs(s, t, beta)
                weight *= 1.0 - beta
            term = tl.where(p > 0.0, (factor + divergence_factor * weight) * p, 0.0)
        is_target = columns == target - column_start
        grad = logit_gradient(term, is_target, target_factor, jacobian, HAS_SCALE or HAS_SOFTCAP)
        grad = tl.where((target != ignore_index) & (columns < cols), grad, 0.0)
        if NARROWING:
            tl.debug_barrier()
        tl.store(grad_ptr + columns, grad.to(grad_ptr.dtype.element_ty), mask=columns < accessible_cols)


def divergence_sums(
    logits: Tensor, teacher_logits: Tensor, call: TileCall, teacher: TeacherCall, largest: Tensor | None
) -> Iterator[Launch]:
    yield _launch(divergence_sums_kernel, logits, teacher_logits, call, teacher, {}, largest=largest)


def divergence_gradient(
    logits: Tensor, teacher_logits: Tensor, grad: Tensor, call: TileCall, teacher: TeacherCall
) -> Iterator[Launch]:
    narrowing = {"NARROWING": grad.dtype != logits.dtype and grad.data_ptr() == logits.data_ptr()}
    yield _launch(divergence_gradient_kernel, logits, teacher_logits, call, teacher, narrowing, grad=grad)


def _launch(
    kernel: object,
    logits: Tensor,
    teacher_logits: Tensor,
    call: TileCall,
    teacher: TeacherCall,
    flags: dict[str, bool],
    **others: Tensor | None,
) -> Launch:
    options = {
        "ACCUM": tl.float64 if accumulation_dtype(logits.dtype) == torch.float64 else tl.float32,
        "KIND": DIVERGENCES.index(teacher.kind),
        "HAS_TEACHER_SCALE": teacher.spec.scale != 1.0,
        "HAS_TEACHER_SOFTCAP": teacher.spec.softcap is not None,
        "BLOCK": WARP * WARPS * PARTS * (VECTOR_BYTES // logits.element_size()),
        **flags,
        **thread_options(logits.device, WARPS),
        **overlap_options(logits.device),
    }
    return build_launch(
        kernel, (len(logits),), call, options, logits=logits, teacher_logits=teacher_logits, teacher_rows=teacher.rows,
        teacher_bias=teacher.tile_call(call).inputs.tile_bias(call.tile), teacher_scale=teacher.spec.scale,
        teacher_cap=teacher.spec.cap, beta=teacher.beta, **others,
    )  # fmt: skip
