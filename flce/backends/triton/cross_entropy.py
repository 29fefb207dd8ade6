"""The cross-entropy kernel: one program per row of a tile of logits.

Two passes over the row, each behind a compile-time flag:

1. STATISTICS: online softmax (running maximum and sum in float32) and whatever else was asked for, merged
   with the state of the tiles before (LOAD_STATE) and kept for those that follow (STORE_STATE), or, at the
   last tile, turned into losses and statistics of the row (FINISH);
2. GRADIENT: the gradient with respect to the logits, written over them or to another buffer.

With ``z = softcap * tanh(logit_scale * (a + bias) / softcap) / temperature``, p = softmax(z), class weights w,
smoothing e, target y, row scales A (cross entropy) and B (z-loss, coefficient c):

    loss   = (1 - e) w_y (lse - z_y) + e / V * sum_k w_k (lse - z_k)          (torch.nn.functional.cross_entropy)
    z-loss = c lse^2
    d/dz_k = p_k [A ((1 - e) w_y + e / V * sum_j w_j) + 2 B c lse] - A (1 - e) w_y [k = y] - A e / V w_k
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends import contract
from flce.backends.triton.math import softmax_update, tanh_and_derivative

# A kernel can read no globals but constexpr ones.
_MAX = tl.constexpr(contract.MAX)
_SUM = tl.constexpr(contract.SUM)
_TARGET_LOGIT = tl.constexpr(contract.TARGET_LOGIT)
_ENTROPY_SUM = tl.constexpr(contract.ENTROPY_SUM)
_REFERENCE = tl.constexpr(contract.REFERENCE)
_SMOOTH_SUM = tl.constexpr(contract.SMOOTH_SUM)
_ARGMAX = tl.constexpr(contract.ARGMAX)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _transform(
    logits_ptr,
    bias_ptr,
    columns,
    present,  # which of the columns are classes of this tile, in a row that counts
    readable,  # which of the columns are there to be read, so that accesses are whole vectors
    scale,
    cap,
    ACCUM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """z and dz/da of some columns of a row. Columns that are not present have z = -inf.

    Without softcap ``z = scale * a``; with it ``z = cap * tanh(scale * a)``.
    """
    a = tl.load(logits_ptr + columns, mask=readable, other=0.0, eviction_policy=EVICTION).to(ACCUM)
    if HAS_BIAS:
        a += tl.load(bias_ptr + columns, mask=present, other=0.0).to(ACCUM)
    if HAS_SOFTCAP:
        tanh, derivative = tanh_and_derivative(a * scale)
        z = tanh * cap
        jacobian = derivative * (scale * cap)
    else:
        z = a
        if HAS_SCALE:
            z = a * scale
        jacobian = scale
    return tl.where(present, z, float("-inf")), jacobian


@triton.jit(do_not_specialize=["ignore_index", "column_start", "state_stride", "normalizer_stride"])
def cross_entropy_kernel(
    logits_ptr,  # (rows, cols), row stride logits_stride
    grad_ptr,  # (rows, cols), row stride grad_stride; may be logits_ptr
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    upstream_ptr,  # (rows,)
    constants_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    state_ptr,  # (7, rows), row stride state_stride
    loss_ptr,  # (rows,)
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (2, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    entropy_ptr,  # (rows,)
    argmax_ptr,  # (rows,) int64
    logits_stride,
    grad_stride,
    state_stride,
    normalizer_stride,
    cols,  # classes in this tile
    room,  # columns of a row that may be read and written, cols or more
    column_start,  # the first of them
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    ACCUM: tl.constexpr,
    STATISTICS: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    FINISH: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_UPSTREAM: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit, because row * stride passes 2^31 at 16,744 rows of 128,256 classes.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    # Annotated as float64 above: Python floats would arrive rounded to float32 even for float64 logits.
    scale = tl.full((), scale, ACCUM)
    cap = tl.full((), cap, ACCUM)
    label_smoothing = tl.full((), label_smoothing, ACCUM)
    z_loss = tl.full((), z_loss, ACCUM)

    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    target_here = (target >= column_start) & (target < column_start + cols)
    # In 32 bits, because every column is compared with it; -1 is none of them.
    target_column = tl.where(target_here, target - column_start, -1).to(tl.int32)
    weight_sum = tl.load(constants_ptr + 2).to(ACCUM)
    target_weight = tl.full((), 1.0, ACCUM)
    if HAS_CLASS_WEIGHT:
        target_weight = tl.load(class_weight_ptr + target, mask=in_range, other=1.0).to(ACCUM)
    row_weight = tl.full((), 1.0, ACCUM)
    if HAS_TOKEN_WEIGHT:
        row_weight = tl.load(token_weight_ptr + row).to(ACCUM)
    active_cols = tl.where(valid, cols, 0)  # an ignored row is not read

    if STATISTICS:
        row_max = tl.full((), float("-inf"), ACCUM)
        row_sum = tl.full((), 0.0, ACCUM)
        entropy_sum = tl.full((), 0.0, ACCUM)
        smooth_sum = tl.full((), 0.0, ACCUM)
        reference = tl.full((), 0.0, ACCUM)
        argmax = tl.full((), 0, tl.int64)
        target_logit = tl.full((), 0.0, ACCUM)
        state_ptr += row
        if LOAD_STATE:
            row_max = tl.load(state_ptr + _MAX * state_stride)
            row_sum = tl.load(state_ptr + _SUM * state_stride)
            target_logit = tl.load(state_ptr + _TARGET_LOGIT * state_stride)
            if WANT_ENTROPY:
                entropy_sum = tl.load(state_ptr + _ENTROPY_SUM * state_stride)
            if HAS_SMOOTHING:
                reference = tl.load(state_ptr + _REFERENCE * state_stride)
                smooth_sum = tl.load(state_ptr + _SMOOTH_SUM * state_stride)
            if WANT_ARGMAX:
                argmax = tl.load(state_ptr + _ARGMAX * state_stride).to(tl.int64)
        elif HAS_SMOOTHING:
            # Sums of logits are taken relative to one of the same row, so that a large common offset does
            # not cancel their digits away.
            first, _first_jacobian = _transform(
                logits_ptr, bias_ptr, tl.full((), 0, tl.int32), valid, valid, scale, cap,
                ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, "",
            )  # fmt: skip
            reference = tl.where(tl.abs(first) < float("inf"), first, 0.0)

        own_target = target_here & valid
        own_target_logit, _target_jacobian = _transform(
            logits_ptr, bias_ptr, target_column, own_target, own_target, scale, cap,
            ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, "",
        )  # fmt: skip
        target_logit = tl.where(own_target, own_target_logit, target_logit)

        for start in range(0, active_cols, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < cols
            # Kept in the cache for the second pass, which reads it for the last time.
            z, _jacobian = _transform(
                logits_ptr, bias_ptr, columns, mask, columns < room, scale, cap,
                ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, "evict_last" if GRADIENT else "",
            )  # fmt: skip
            if WANT_ARGMAX:
                block_max, block_argmax = tl.max(z, axis=0, return_indices=True)
                # Strictly larger: the lowest index wins a tie.
                argmax = tl.where(block_max > row_max, column_start + start + block_argmax, argmax).to(tl.int64)
            if HAS_SMOOTHING:
                relative = tl.where(mask, z - reference, 0.0)
                if HAS_CLASS_WEIGHT:
                    relative *= tl.load(class_weight_ptr + column_start + columns, mask=mask, other=0.0).to(ACCUM)
                smooth_sum += tl.sum(relative, axis=0)
            old_max = row_max
            old_sum = row_sum
            row_max, row_sum, exps, zero, decay = softmax_update(row_max, row_sum, z)
            if WANT_ENTROPY:
                # sum exp(z - m) (z - m), where the terms of z = -inf are 0
                carried = tl.where(old_sum > 0, decay * (entropy_sum + (old_max - zero) * old_sum), 0.0)
                entropy_sum = carried + tl.sum(tl.where(z == float("-inf"), 0.0, exps * (z - zero)), axis=0)

        if STORE_STATE:
            tl.store(state_ptr + _MAX * state_stride, row_max)
            tl.store(state_ptr + _SUM * state_stride, row_sum)
            tl.store(state_ptr + _TARGET_LOGIT * state_stride, target_logit)
            if WANT_ENTROPY:
                tl.store(state_ptr + _ENTROPY_SUM * state_stride, entropy_sum)
            if HAS_SMOOTHING:
                tl.store(state_ptr + _REFERENCE * state_stride, reference)
                tl.store(state_ptr + _SMOOTH_SUM * state_stride, smooth_sum)
            if WANT_ARGMAX:
                # Exact: an index below 2^24 is a float32.
                tl.store(state_ptr + _ARGMAX * state_stride, argmax.to(ACCUM))

        if FINISH:
            log_sum = tl.log(tl.where(valid, row_sum, 1.0))
            row_max = tl.where(valid, row_max, 0.0)
            # (m - z_y) first, then log_sum: exact where all logits share a large offset.
            nll = tl.where(in_range, log_sum + (row_max - target_logit), float("nan"))
            loss = nll * target_weight
            if HAS_SMOOTHING:
                smooth = weight_sum * (log_sum + (row_max - reference)) - smooth_sum
                loss = (1.0 - label_smoothing) * loss + (label_smoothing / vocab_size) * smooth
            tl.store(loss_ptr + row, tl.where(valid, loss * row_weight, 0.0))
            tl.store(normalizer_ptr + row, row_max)
            tl.store(normalizer_ptr + normalizer_stride + row, log_sum)
            if HAS_Z_LOSS:
                lse = row_max + log_sum
                tl.store(z_loss_ptr + row, tl.where(valid, z_loss * lse * lse * row_weight, 0.0))
            if WANT_LOGPROB:
                tl.store(logprob_ptr + row, tl.where(valid, -nll, 0.0))
            if WANT_ENTROPY:
                tl.store(entropy_ptr + row, tl.where(valid, log_sum - entropy_sum / row_sum, 0.0))
            if WANT_ARGMAX:
                tl.store(argmax_ptr + row, tl.where(valid, argmax, -1))
    else:
        row_max = tl.load(normalizer_ptr + row)
        log_sum = tl.load(normalizer_ptr + normalizer_stride + row)

    if GRADIENT:
        row_scale = tl.where(in_range, row_weight, float("nan"))  # wrong targets make NaN, not nonsense
        if HAS_UPSTREAM:
            row_scale *= tl.load(upstream_ptr + row).to(ACCUM)
        # An ignored row has no logits, z = -inf, and no scale: its gradient is 0, whatever the constants are.
        ce = tl.where(valid, row_scale * tl.load(constants_ptr).to(ACCUM), 0.0)
        one_hot = ce * (1.0 - label_smoothing) * target_weight
        softmax = one_hot
        uniform = ce * (label_smoothing / vocab_size)
        if HAS_SMOOTHING:
            softmax += uniform * weight_sum
        if HAS_Z_LOSS:
            z_scale = tl.where(valid, row_scale * tl.load(constants_ptr + 1).to(ACCUM), 0.0)
            softmax += z_scale * 2.0 * z_loss * (row_max + log_sum)

        for start in range(0, cols, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < cols
            z, jacobian = _transform(
                logits_ptr, bias_ptr, columns, columns < active_cols, columns < room, scale, cap,
                ACCUM, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP, "evict_first",
            )  # fmt: skip
            # exp((z - m) - log_sum), its second subtraction and the change of base in one operation
            p = tl.exp2((z - row_max) * LOG2_E - log_sum * LOG2_E)
            grad = softmax * p - tl.where(columns == target_column, one_hot, 0.0)
            if HAS_SMOOTHING:
                if HAS_CLASS_WEIGHT:
                    grad -= uniform * tl.load(class_weight_ptr + column_start + columns, mask=mask, other=0.0).to(ACCUM)
                else:
                    grad -= uniform
            if HAS_SCALE or HAS_SOFTCAP:
                grad *= jacobian
            grad = grad.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + columns, grad, mask=columns < room, eviction_policy="evict_first")
