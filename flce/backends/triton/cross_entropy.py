"""The cross-entropy kernel: one program for each row of a tile of logits. `TritonBackend` launches it.

The cross-entropy kernel has two passes over the row, each behind a compile-time flag:

1. STATISTICS: online softmax (running maximum and sum in float32) and the requested statistics. The pass merges them
   with the state of the earlier tiles (LOAD_STATE), and stores them for the later tiles (STORE_STATE) or, at the last
   tile, computes the losses and statistics of the row (FINISH);
2. GRADIENT: the gradient with respect to the logits, written over the logits or to another buffer. Over float32 logits
   it may be written in half precision (NARROWING), each row to the first half of its memory.

A tile with only some of the classes cannot run both passes, because the gradient needs the sum of all exponentials.
Such a tile can write EXPONENTIALS instead of the gradient: exp(z - b) dz/da. The *reference* b of a row is its largest
logit in the first tile. The last tile writes the row's factors (`Backend.exponentials`). If a later logit is beyond the
range of the exponentials' dtype, the reference is raised, and the row's exponentials of earlier tiles are scaled down.

With ``z = softcap * tanh(logit_scale * (a + bias) / softcap) / temperature``, p = softmax(z), class weights w,
smoothing e, target y, row scales A (cross entropy) and B (z-loss, coefficient c):

    loss   = (1 - e) w_y (lse - z_y) + e / V * sum_k w_k (lse - z_k)          (torch.nn.functional.cross_entropy)
    z-loss = c lse^2
    d/dz_k = p_k [A ((1 - e) w_y + e / V * sum_j w_j) + 2 B c lse] - A (1 - e) w_y [k = y] - A e / V w_k

Three choices bring the kernel near the speed of memory:

* The second pass should find its row in the caches. Therefore few rows are in flight at a time (the launch sizes limit
  them), and the second pass reads the blocks of its row backwards.
* Each thread has a separate maximum and sum over the whole row (a *lane*). The lanes are merged once, at the end of the
  row. Within the passes no thread waits for another, and a block computes one exponential for each thread in addition
  to the exponentials of its columns.
* Exceptions are handled only where they occur: only the last block has columns behind the last class, so only the last
  block has masks; the target's own term is added after the rest of the row has been written.

A block has (PARTS, LANES * VECTOR) columns. Lane l has the VECTOR columns from l * VECTOR on of each part. Threads load
these columns as whole vectors, next to the vectors of their neighbours.

Rows of a user's logits begin at any address, and the next row follows directly. Such a row (HEAD_BYTES > 0) has
*edges*: the head has the columns before the first multiple of HEAD_BYTES in memory, the tail has the columns behind the
last whole vector. Blocks have the columns between head and tail. Each lane has at most one column of the edges: the
statistics of the lane begin with this column, and its gradient is written before the gradient of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends import contract
from flce.backends.triton.math import (
    LOG2_E,
    address_head,
    broadcast_lanes,
    finish_row,
    lane_min,
    lane_sum,
    load_columns,
    load_normalizer,
    load_row_gradient,
    load_scale,
    load_scales,
    load_weights,
    logit_gradient,
    softmax_merge,
    softmax_term,
    softmax_update,
    transform,
    wait_for_previous_kernel,
)

# A kernel can read only global variables that are constexpr.
_MAX = tl.constexpr(contract.MAX)
_SUM = tl.constexpr(contract.SUM)
_TARGET_LOGIT = tl.constexpr(contract.TARGET_LOGIT)
_ENTROPY_SUM = tl.constexpr(contract.ENTROPY_SUM)
_REFERENCE = tl.constexpr(contract.REFERENCE)
_SMOOTH_SUM = tl.constexpr(contract.SMOOTH_SUM)
_ARGMAX = tl.constexpr(contract.ARGMAX)
_LOGIT_SUM = tl.constexpr(contract.LOGIT_SUM)
_EXP_REFERENCE = tl.constexpr(contract.EXP_REFERENCE)
_EXPONENTIAL_HEADROOM = tl.constexpr(contract.EXPONENTIAL_HEADROOM)
_LEAST_JACOBIAN_FACTOR = tl.constexpr(contract.LEAST_JACOBIAN_FACTOR)
_TARGET_JACOBIAN = tl.constexpr(contract.TARGET_JACOBIAN)
_SOFTMAX = tl.constexpr(contract.SOFTMAX)
_TARGET = tl.constexpr(contract.TARGET)
_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def _merge(
    z,  # (PARTS, LANES * VECTOR)
    columns,
    mask,  # True for columns that are classes; None: all are
    column_start,  # the class of column 0
    class_weight_ptr,
    reference,
    # from here to `logit_sum`: statistics of each lane, (LANES,)
    largest,
    total,
    entropy_sum,
    smooth_sum,
    argmax,
    logit_sum,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_MEAN_LOGIT: tl.constexpr,
    HAS_LABEL_SMOOTHING: tl.constexpr,
    WANT_ARGMAX: tl.constexpr,
    ASCENDING: tl.constexpr,  # all columns of the block are higher than the earlier columns of a lane
):
    """Merge a block into the statistics of each lane. Return them, and exp(z - m) with the lane's new maximum m."""
    if HAS_LABEL_SMOOTHING:
        relative = z - reference
        if mask is not None:
            relative = tl.where(mask, relative, 0.0)
        if class_weight_ptr is not None:
            relative *= load_columns(class_weight_ptr + columns, mask, "").to(z.dtype)
        smooth_sum += lane_sum(relative, LANES, VECTOR)
    if WANT_MEAN_LOGIT:
        logit_sum += lane_sum(z if mask is None else tl.where(mask, z, 0.0), LANES, VECTOR)
    old_largest = largest
    old_total = total
    largest, total, exps, zero, decay = softmax_update(largest, total, z, LANES, VECTOR)
    if WANT_ARGMAX:
        # The lowest column wins a tie. If the maximum of a lane did not grow, the column of an earlier block stays.
        at_maximum = z == broadcast_lanes(largest, LANES, VECTOR)
        found = lane_min(tl.where(at_maximum, columns, _NO_COLUMN), LANES, VECTOR)
        if ASCENDING:
            argmax = tl.where(largest > old_largest, column_start + found, argmax)
        else:
            # 64 bits: if the block has no logit at the maximum, the sum exceeds 32 bits.
            lowest = column_start + found.to(tl.int64)
            argmax = tl.where(largest > old_largest, lowest, tl.minimum(argmax, lowest))
    if WANT_ENTROPY:
        # sum exp(z - m) (z - m); the terms of z = -inf are 0
        carried = tl.where(old_total > 0, decay * (entropy_sum + (old_largest - zero) * old_total), 0.0)
        terms = tl.where(z == float("-inf"), 0.0, exps * (z - broadcast_lanes(zero, LANES, VECTOR)))
        entropy_sum = carried + lane_sum(terms, LANES, VECTOR)
    return largest, total, entropy_sum, smooth_sum, argmax, logit_sum, exps


@triton.jit(
    do_not_specialize=[
        "ignore_index", "column_start", "state_stride", "factors_stride", "normalizer_stride", "upstream_stride",
        "row_gradient_stride",
    ]
)  # fmt: skip
def cross_entropy_kernel(
    logits_ptr,  # (rows, cols), row stride logits_stride
    grad_ptr,  # likewise, row stride grad_stride; may be logits_ptr; None: only statistics
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of this tile
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    inverse_temperature_ptr,  # (rows,)
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride; None: STATISTICS
    upstream_ptr,  # (rows,), stride upstream_stride: 0 if all rows share one value
    scales_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    state_ptr,  # (8, rows), row stride state_stride; 10 with EXPONENTIALS
    factors_ptr,  # the row gradient of EXPONENTIALS, row stride factors_stride: output; None: no exponentials
    loss_ptr,  # (rows,)
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    entropy_ptr,  # (rows,)
    argmax_ptr,  # (rows,) int64
    mean_logit_ptr,  # (rows,)
    logits_stride,
    grad_stride,
    state_stride,
    factors_stride,
    normalizer_stride,
    upstream_stride,
    row_gradient_stride,
    cols,  # classes in this tile
    accessible_cols,  # columns of a row that may be read and written, cols or more
    column_start,  # the class of column 0
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    ACCUM: tl.constexpr,
    LOAD_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    FINISH: tl.constexpr,
    NARROWING: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    HAS_LABEL_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,  # 0: the first vector begins with the row; else at the next multiple of these bytes
    ONE_BLOCK: tl.constexpr,  # BLOCK >= cols
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    STATISTICS: tl.constexpr = row_gradient_ptr is None
    GRADIENT: tl.constexpr = grad_ptr is not None
    EXPONENTIALS: tl.constexpr = factors_ptr is not None
    WANT_ENTROPY: tl.constexpr = entropy_ptr is not None
    WANT_ARGMAX: tl.constexpr = argmax_ptr is not None
    WANT_MEAN_LOGIT: tl.constexpr = mean_logit_ptr is not None
    EDGES: tl.constexpr = HEAD_BYTES > 0
    # This flag describes the values that are written, gradients or exponentials.
    HAS_JACOBIAN: tl.constexpr = HAS_SOFTCAP or (HAS_SCALE and not EXPONENTIALS)
    BLOCK: tl.constexpr = PARTS * LANES * VECTOR
    offsets = tl.arange(0, PARTS)[:, None] * (LANES * VECTOR) + tl.arange(0, LANES * VECTOR)[None, :]
    # 64-bit, because row * stride exceeds 2^31 at 16,744 rows of 128,256 classes.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    if GRADIENT:
        grad_ptr += row * grad_stride
    tile_weight_ptr = class_weight_ptr
    if class_weight_ptr is not None:
        tile_weight_ptr += column_start
    wait_for_previous_kernel(OVERLAP)
    tl.static_assert(not (EDGES and (EXPONENTIALS or NARROWING)))
    if EDGES:
        # The statistics of a lane begin with an edge, or those of the first lane with a state, not with both.
        tl.static_assert(not (STATISTICS and LOAD_STATE))
        # From here on column 0 is the first one behind the head: the row is [-head, stop), vectors [0, vector_stop).
        head = tl.minimum(address_head(logits_ptr, HEAD_BYTES), cols)
        stop = cols - head
        vector_stop = stop // VECTOR * VECTOR
        logits_ptr = tl.multiple_of(logits_ptr + head, 16)
        if GRADIENT:
            grad_ptr = tl.multiple_of(grad_ptr + head, 16)
        if bias_ptr is not None:
            bias_ptr += head
        if class_weight_ptr is not None:
            tile_weight_ptr += head
        edge = tl.arange(0, LANES)
        edge_columns = tl.where(edge < head, edge, edge + vector_stop) - head
        edge_a = tl.load(logits_ptr + edge_columns, mask=edge_columns < stop, other=0.0)
        readable_stop = vector_stop
    else:
        readable_stop = accessible_cols
    if ONE_BLOCK:
        # Load before any instruction waits for the target.
        one_a = tl.load(logits_ptr + offsets, mask=offsets < readable_stop, other=0.0)
    # The parameters are annotated as float64: otherwise Python floats are rounded to float32 even for float64 logits.
    label_smoothing = tl.full((), label_smoothing, ACCUM)
    z_loss = tl.full((), z_loss, ACCUM)
    scale, cap = load_scale(scale, cap, inverse_temperature_ptr, row, None, HAS_SOFTCAP, ACCUM)

    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    target_in_tile = (target >= column_start) & (target < column_start + cols) & valid
    target_column = tl.where(target_in_tile, target - column_start, 0)
    if EDGES:
        target_column -= head
        column_start += head
        cols = vector_stop
    # Load early: no instruction waits for these values yet.
    if FINISH:
        ce_scale = tl.full((), 0.0, ACCUM)
        z_loss_scale = tl.full((), 0.0, ACCUM)
        weight_sum = tl.full((), vocab_size, ACCUM)
        if GRADIENT:
            ce_scale, z_loss_scale, weight_sum = load_scales(scales_ptr, ACCUM)
        elif HAS_LABEL_SMOOTHING and class_weight_ptr is not None:
            weight_sum = tl.load(scales_ptr + 2).to(ACCUM)
        row_weight, row_scale, target_weight = load_weights(
            row, None, target, in_range, class_weight_ptr, token_weight_ptr, upstream_ptr, upstream_stride, ACCUM
        )
    elif GRADIENT and not STATISTICS:
        row_max, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, None)
        softmax_factor, target_factor, classes_factor, entropy_factor = load_row_gradient(
            row_gradient_ptr, row_gradient_stride, row, None, HAS_ENTROPY_GRADIENT, HAS_LABEL_SMOOTHING
        )
    target_z, target_jacobian = transform(
        tl.load(logits_ptr + target_column, mask=target_in_tile, other=0.0), bias_ptr, target_column, target_in_tile,
        scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP,
    )  # fmt: skip

    # Only the last block may have columns that are not classes: it is masked, all other blocks are full. An ignored row
    # has no full blocks, and no classes in the last block.
    if ONE_BLOCK:
        last = 0
        full = 0
    else:
        last = (cols - 1) // BLOCK * BLOCK  # 0 if cols is 0: division truncates
        full = tl.where(valid, last, 0)
    last_columns = last + offsets
    present = last_columns < tl.where(valid, cols, 0)
    # Columns behind the classes are read and written too, so that all accesses are whole vectors.
    readable = last_columns < readable_stop
    if EDGES:
        edge_present = edge_columns < tl.where(valid, stop, -head)
        edge_z, edge_jacobian = transform(
            edge_a, bias_ptr, edge_columns, edge_present, scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP
        )
        edge_z = tl.where(edge_present, edge_z, float("-inf"))

    if STATISTICS:
        lanes = tl.arange(0, LANES)
        largest = tl.full((LANES,), float("-inf"), ACCUM)
        total = tl.full((LANES,), 0.0, ACCUM)
        entropy_sum = tl.full((LANES,), 0.0, ACCUM)
        smooth_sum = tl.full((LANES,), 0.0, ACCUM)
        argmax = tl.full((LANES,), 0, tl.int64)
        logit_sum = tl.full((LANES,), 0.0, ACCUM)
        reference = tl.full((), 0.0, ACCUM)
        target_logit = tl.where(target_in_tile, target_z, 0.0)
        if state_ptr is not None:
            state_ptr += row
        if LOAD_STATE:
            # The statistics of the first lane begin with the state of the earlier tiles.
            first = lanes == 0
            largest = tl.where(first, tl.load(state_ptr + _MAX * state_stride), largest)
            total = tl.where(first, tl.load(state_ptr + _SUM * state_stride), total)
            target_logit = tl.where(target_in_tile, target_z, tl.load(state_ptr + _TARGET_LOGIT * state_stride))
            if WANT_ENTROPY:
                entropy_sum = tl.where(first, tl.load(state_ptr + _ENTROPY_SUM * state_stride), entropy_sum)
            if HAS_LABEL_SMOOTHING:
                reference = tl.load(state_ptr + _REFERENCE * state_stride)
                smooth_sum = tl.where(first, tl.load(state_ptr + _SMOOTH_SUM * state_stride), smooth_sum)
            if WANT_ARGMAX:
                argmax = tl.where(first, tl.load(state_ptr + _ARGMAX * state_stride).to(tl.int64), argmax)
            if WANT_MEAN_LOGIT:
                logit_sum = tl.where(first, tl.load(state_ptr + _LOGIT_SUM * state_stride), logit_sum)
        elif HAS_LABEL_SMOOTHING:
            # Sums of logits are relative to one logit of the row, so that a large common offset does not cancel their
            # digits.
            first_column = tl.full((), 0, tl.int32)
            if EDGES:
                first_column -= head
            first_z, _first_jacobian = transform(
                tl.load(logits_ptr + first_column, mask=valid, other=0.0), bias_ptr, first_column, valid,
                scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP,
            )  # fmt: skip
            reference = tl.where(tl.abs(first_z) < float("inf"), first_z, 0.0)

        if EDGES:
            # The result of `_merge` for one column of each lane: exp(z - m) is 1, or NaN, and its logarithm is 0.
            largest = tl.maximum(largest, edge_z)
            total = tl.exp2((edge_z - tl.where(largest == float("-inf"), 0.0, largest)) * LOG2_E)
            if HAS_LABEL_SMOOTHING:
                smooth_sum = tl.where(edge_present, edge_z - reference, 0.0)
                if class_weight_ptr is not None:
                    smooth_sum *= tl.load(tile_weight_ptr + edge_columns, mask=edge_present, other=0.0).to(ACCUM)
            if WANT_ARGMAX:
                argmax = tl.where(largest > float("-inf"), column_start + edge_columns, argmax)
            if WANT_MEAN_LOGIT:
                logit_sum = tl.where(edge_present, edge_z, 0.0)
        if not ONE_BLOCK:
            for start in range(0, full, BLOCK):
                columns = start + offsets
                z, _jacobian = transform(
                    tl.load(logits_ptr + columns), bias_ptr, columns, None,
                    scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP,
                )  # fmt: skip
                largest, total, entropy_sum, smooth_sum, argmax, logit_sum, _exps = _merge(
                    z, columns, None, column_start, tile_weight_ptr, reference,
                    largest, total, entropy_sum, smooth_sum, argmax, logit_sum, WANT_MEAN_LOGIT=WANT_MEAN_LOGIT,
                    LANES=LANES, VECTOR=VECTOR, WANT_ENTROPY=WANT_ENTROPY, WANT_ARGMAX=WANT_ARGMAX, ASCENDING=not EDGES,
                    HAS_LABEL_SMOOTHING=HAS_LABEL_SMOOTHING,
                )  # fmt: skip
        if ONE_BLOCK:
            last_a = one_a
        else:
            last_a = tl.load(logits_ptr + last_columns, mask=readable, other=0.0)
        last_z, last_jacobian = transform(
            last_a, bias_ptr, last_columns, present, scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP
        )
        largest, total, entropy_sum, smooth_sum, argmax, logit_sum, last_exps = _merge(
            tl.where(present, last_z, float("-inf")), last_columns, present, column_start, tile_weight_ptr, reference,
            largest, total, entropy_sum, smooth_sum, argmax, logit_sum, WANT_MEAN_LOGIT=WANT_MEAN_LOGIT,
            LANES=LANES, VECTOR=VECTOR, WANT_ENTROPY=WANT_ENTROPY, WANT_ARGMAX=WANT_ARGMAX, ASCENDING=not EDGES,
            HAS_LABEL_SMOOTHING=HAS_LABEL_SMOOTHING,
        )  # fmt: skip

        row_max, row_sum = tl.reduce((largest, total), 0, softmax_merge)
        if WANT_ENTROPY:
            zero = tl.where(row_max == float("-inf"), 0.0, row_max)
            shifted = (entropy_sum + (largest - zero) * total) * tl.exp2((largest - zero) * LOG2_E)
            row_entropy_sum = tl.sum(tl.where(total > 0, shifted, 0.0), axis=0)
        if HAS_LABEL_SMOOTHING:
            row_smooth_sum = tl.sum(smooth_sum, axis=0)
        if WANT_ARGMAX:
            row_argmax = tl.min(tl.where(largest == row_max, argmax, _NO_COLUMN), axis=0)
        if WANT_MEAN_LOGIT:
            row_logit_sum = tl.sum(logit_sum, axis=0)

        if STORE_STATE:
            tl.store(state_ptr + _MAX * state_stride, row_max)
            tl.store(state_ptr + _SUM * state_stride, row_sum)
            tl.store(state_ptr + _TARGET_LOGIT * state_stride, target_logit)
            if WANT_ENTROPY:
                tl.store(state_ptr + _ENTROPY_SUM * state_stride, row_entropy_sum)
            if HAS_LABEL_SMOOTHING:
                tl.store(state_ptr + _REFERENCE * state_stride, reference)
                tl.store(state_ptr + _SMOOTH_SUM * state_stride, row_smooth_sum)
            if WANT_ARGMAX:
                # Exact: an index below 2^24 is a float32.
                tl.store(state_ptr + _ARGMAX * state_stride, row_argmax.to(ACCUM))
            if WANT_MEAN_LOGIT:
                tl.store(state_ptr + _LOGIT_SUM * state_stride, row_logit_sum)

        if FINISH:
            log_sum = tl.log(tl.where(valid, row_sum, 1.0))
            row_max = tl.where(valid, row_max, 0.0)
            # (m - z_y) first, then log_sum: exact if all logits share a large offset.
            nll = tl.where(in_range, log_sum + (row_max - target_logit), float("nan"))
            smooth = 0.0
            if HAS_LABEL_SMOOTHING:
                smooth = weight_sum * (log_sum + (row_max - reference)) - row_smooth_sum
            softmax_factor, target_factor, classes_factor, at_target = finish_row(
                offset=row_max, log_sum=log_sum, nll=nll, smooth=smooth, valid=valid, row_weight=row_weight,
                target_weight=target_weight, ce_scale=row_scale * ce_scale, z_loss_scale=row_scale * z_loss_scale,
                weight_sum=weight_sum, vocab_size=vocab_size, label_smoothing=label_smoothing, z_loss=z_loss, row=row,
                exists=None, loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr, normalizer_ptr=normalizer_ptr,
                logprob_ptr=logprob_ptr, normalizer_stride=normalizer_stride, HAS_LABEL_SMOOTHING=HAS_LABEL_SMOOTHING,
                HAS_Z_LOSS=HAS_Z_LOSS,
            )  # fmt: skip
            if WANT_ENTROPY:
                tl.store(entropy_ptr + row, tl.where(valid, log_sum - row_entropy_sum / row_sum, 0.0))
            if WANT_ARGMAX:
                tl.store(argmax_ptr + row, tl.where(valid, row_argmax, -1))
            if WANT_MEAN_LOGIT:
                tl.store(mean_logit_ptr + row, tl.where(valid, row_logit_sum / vocab_size, 0.0))

    if EXPONENTIALS:
        tl.static_assert(not HAS_LABEL_SMOOTHING)
        if LOAD_STATE:
            exp_reference = tl.load(state_ptr + _EXP_REFERENCE * state_stride)
            target_jacobian = tl.where(
                target_in_tile, target_jacobian, tl.load(state_ptr + _TARGET_JACOBIAN * state_stride)
            )
        else:
            exp_reference = row_max
        if valid & (row_max - exp_reference > _EXPONENTIAL_HEADROOM):
            lowered = tl.exp2((exp_reference - row_max) * LOG2_E)
            for start in range(0, column_start, LANES):  # few at a time: this is rare and should not need registers
                columns = start + tl.arange(0, LANES)
                before = grad_ptr - column_start + columns
                here = columns < column_start
                value = tl.load(before, mask=here, other=0.0).to(ACCUM) * lowered
                tl.store(before, value.to(grad_ptr.dtype.element_ty), mask=here)
            exp_reference = row_max
        tl.store(state_ptr + _EXP_REFERENCE * state_stride, exp_reference)
        tl.store(state_ptr + _TARGET_JACOBIAN * state_stride, target_jacobian)
        exp_reference = tl.where(exp_reference == float("-inf"), 0.0, exp_reference)

    if GRADIENT:
        # For an ignored row z is -inf and the row gradient is 0: its gradient is 0.
        if STATISTICS:
            entropy_factor = tl.full((), 0.0, ACCUM)
        if EXPONENTIALS:
            # The constant factor of the derivative of z is part of the row's factors, not of the exponentials.
            jacobian_factor = scale
            if HAS_SOFTCAP:
                jacobian_factor = scale * cap
                # Exponentials are divided by jacobian_factor. If it is 0, the derivative is 0, so 1 is as right.
                jacobian_factor = tl.where(tl.abs(jacobian_factor) > _LEAST_JACOBIAN_FACTOR, jacobian_factor, 1.0)
            if FINISH:
                factor = softmax_term(exp_reference, row_max, log_sum, softmax_factor, entropy_factor, False)
                factors_ptr += row
                tl.store(factors_ptr + _SOFTMAX * factors_stride, tl.where(valid, factor * jacobian_factor, 0.0))
                tl.store(factors_ptr + _TARGET * factors_stride, at_target * target_jacobian)
            row_max = exp_reference
            log_sum = tl.full((), 0.0, ACCUM)
            softmax_factor = tl.full((), 1.0, ACCUM)
            if HAS_SOFTCAP:
                softmax_factor /= jacobian_factor
            classes_factor = tl.full((), 0.0, ACCUM)
        # All threads have read the target's logit and the edges, which are overwritten from here on.
        tl.debug_barrier()
        if EDGES:
            edge_grad = logit_gradient(
                softmax_term(edge_z, row_max, log_sum, softmax_factor, entropy_factor, HAS_ENTROPY_GRADIENT),
                None, 0.0, tl.where(edge_present, edge_jacobian, 0.0), HAS_JACOBIAN,
                classes_factor, tile_weight_ptr, edge_columns, edge_present, HAS_LABEL_SMOOTHING,
            )  # fmt: skip
            tl.store(grad_ptr + edge_columns, edge_grad.to(grad_ptr.dtype.element_ty), mask=edge_columns < stop)
        if not ONE_BLOCK:
            for done in range(0, full, BLOCK):
                # Backwards, unless the gradient is narrower than the logits in the same memory.
                columns = (done if NARROWING else full - BLOCK - done) + offsets
                z, jacobian = transform(
                    tl.load(logits_ptr + columns, eviction_policy="evict_first"), bias_ptr, columns, None,
                    scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP,
                )  # fmt: skip
                grad = logit_gradient(
                    softmax_term(z, row_max, log_sum, softmax_factor, entropy_factor, HAS_ENTROPY_GRADIENT),
                    None, 0.0, jacobian, HAS_JACOBIAN,
                    classes_factor, tile_weight_ptr, columns, None, HAS_LABEL_SMOOTHING,
                )  # fmt: skip
                if NARROWING:
                    tl.debug_barrier()
                tl.store(grad_ptr + columns, grad.to(grad_ptr.dtype.element_ty), eviction_policy="evict_first")
        if ONE_BLOCK and STATISTICS and not HAS_SOFTCAP:
            # The first pass has computed exp(z - m), with the m of each lane. A lane that has only -inf adds 0; a row
            # that has only -inf is NaN.
            factor = softmax_term(largest, row_max, log_sum, softmax_factor, entropy_factor, False)
            term, jacobian = last_exps * broadcast_lanes(factor, LANES, VECTOR), last_jacobian
        else:
            # The last block comes last, although it was read last: this is 3 to 5% faster. A single block is read again
            # only if the values computed from it need registers.
            if ONE_BLOCK and not STATISTICS:
                a = one_a
            else:
                a = tl.load(logits_ptr + last_columns, mask=readable, other=0.0)
            z, jacobian = transform(a, bias_ptr, last_columns, present, scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP)
            term = softmax_term(
                tl.where(present, z, float("-inf")),
                row_max,
                log_sum,
                softmax_factor,
                entropy_factor,
                HAS_ENTROPY_GRADIENT,
            )
        grad = logit_gradient(
            term, None, 0.0, tl.where(present, jacobian, 0.0), HAS_JACOBIAN,
            classes_factor, tile_weight_ptr, last_columns, present, HAS_LABEL_SMOOTHING,
        )  # fmt: skip
        if NARROWING:
            tl.debug_barrier()
        tl.store(
            grad_ptr + last_columns, grad.to(grad_ptr.dtype.element_ty), mask=readable, eviction_policy="evict_first"
        )
        if not ONE_BLOCK:
            for start in range(0, tl.where(valid, 0, last), BLOCK):  # zeros of an ignored row
                tl.store(grad_ptr + start + offsets, tl.zeros((PARTS, LANES * VECTOR), grad_ptr.dtype.element_ty))
        if EXPONENTIALS:
            target_grad = tl.full((), 0.0, ACCUM)
        else:
            target_grad = logit_gradient(
                softmax_term(target_z, row_max, log_sum, softmax_factor, entropy_factor, HAS_ENTROPY_GRADIENT),
                None, target_factor, target_jacobian, HAS_JACOBIAN,
                classes_factor, tile_weight_ptr, target_column, target_in_tile, HAS_LABEL_SMOOTHING,
            )  # fmt: skip
        # All threads have written the row, with the target's column, which is overwritten now.
        tl.debug_barrier()
        tl.store(grad_ptr + target_column, target_grad.to(grad_ptr.dtype.element_ty), mask=target_in_tile)
