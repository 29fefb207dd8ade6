"""Device functions that the kernels of this package share, among them the formulas of the loss and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flce.backends import contract

# A kernel can read only global variables that are constexpr.
_OFFSET = tl.constexpr(contract.OFFSET)
_LOG_SUM = tl.constexpr(contract.LOG_SUM)
_LOGPROB = tl.constexpr(contract.LOGPROB)
_LEAST_LOGPROB = tl.constexpr(contract.LEAST_LOGPROB)
_SOFTMAX = tl.constexpr(contract.SOFTMAX)
_TARGET = tl.constexpr(contract.TARGET)
_ENTROPY = tl.constexpr(contract.ENTROPY)
_CLASSES = tl.constexpr(contract.CLASSES)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Wait for the end of the previous kernel, and let the next kernel start, if kernels may start before the previous
    one ends (`launch.overlap_options`)."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def balanced_group(row_blocks, GROUP: tl.constexpr):
    """Return a group size from 1 to GROUP with which all groups have nearly the same size. A small group reuses less of
    the memory that it loads."""
    groups = tl.maximum(tl.cdiv(row_blocks, GROUP), 1)
    return tl.maximum(tl.cdiv(row_blocks, groups), 1)


@triton.jit
def block_in_groups(block, row_blocks, group_blocks, group):
    """Return row and column of a block of a product. All group_blocks blocks of `group` rows of blocks precede the next
    group, so that operands are read again while they are in the cache."""
    first = block // group_blocks * group
    in_group = tl.minimum(row_blocks - first, group)
    return first + block % group_blocks % in_group, block % group_blocks // in_group


@triton.jit
def tanh_and_derivative(x):
    """Return tanh(x) and 1 - tanh(x)^2, computed from t = exp(-2|x|), which cannot overflow.

    The derivative is computed as 4t / (1 + t)^2, which is exact for tanh(x) near 1.
    """
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    inverse = 1.0 / (1.0 + t)
    magnitude = (1.0 - t) * inverse
    return tl.where(x < 0, -magnitude, magnitude), 4.0 * t * inverse * inverse


@triton.jit
def log1p(x):
    """Return log(1 + x). The logarithm is corrected for the rounding of 1 + x."""
    one_more = 1.0 + x
    lost = one_more - 1.0
    return tl.where(lost == 0.0, x, tl.log2(one_more) * LN_2 * (x / lost))


@triton.jit
def address_head(row_ptr, BYTES: tl.constexpr):
    """Return the number of elements from row_ptr to the next multiple of BYTES, a power of two, in memory."""
    return ((-row_ptr.to(tl.int64)) & (BYTES - 1)).to(tl.int32) // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def lane_max(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Reduce (parts, lanes * vector) to (lanes,) in two steps. Both steps stay within a thread, and the result has the
    layout that the caller needs. (One reduction of three dimensions does not have it in every version of Triton.)"""
    return tl.max(tl.reshape(tl.max(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def lane_min(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    return tl.min(tl.reshape(tl.min(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def lane_sum(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def broadcast_lanes(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Broadcast (lanes,) to (1, lanes * vector)."""
    return tl.reshape(tl.broadcast_to(x[:, None], (LANES, VECTOR)), (LANES * VECTOR,))[None, :]


@triton.jit
def softmax_update(largest, total, z, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Merge the block `z` into the running maximum and sum of each lane: one step of the online softmax.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Return the new maximum and sum, the
    exponentials of the block relative to a reference, this reference, and the factor by which the old sum was scaled.
    The reference is the new maximum, or 0 while the maximum is -inf, because -inf - -inf is NaN.
    """
    new_largest = tl.maximum(largest, lane_max(z, LANES, VECTOR))
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    # exp2 is one instruction of the GPU; exp adds four for denormal results.
    exps = tl.exp2((z - broadcast_lanes(reference, LANES, VECTOR)) * LOG2_E)
    decay = tl.exp2((largest - reference) * LOG2_E)
    return new_largest, total * decay + lane_sum(exps, LANES, VECTOR), exps, reference, decay


@triton.jit
def softmax_merge(largest, total, other_largest, other_total):
    """Merge the maxima and sums of exponentials of two blocks of a row, for `tl.reduce`."""
    new_largest = tl.maximum(largest, other_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    left = total * tl.exp2((largest - reference) * LOG2_E)
    return new_largest, left + other_total * tl.exp2((other_largest - reference) * LOG2_E)


@triton.jit
def load_columns(pointers, mask, EVICTION: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """Load the values, and OTHER for elements whose mask is False. Without a mask (None) load all."""
    if mask is None:
        return tl.load(pointers, eviction_policy=EVICTION)
    else:
        return tl.load(pointers, mask=mask, other=OTHER, eviction_policy=EVICTION)


@triton.jit
def load_scale(scale, cap, factor_ptr, row, exists, HAS_SOFTCAP: tl.constexpr, ACCUM: tl.constexpr):
    """Return scale and cap of rows for `transform`. factor_ptr: (rows,) multiplies the z of a row; None: 1."""
    scale = tl.full(row.shape, scale, ACCUM)
    cap = tl.full(row.shape, cap, ACCUM)
    if factor_ptr is not None:
        factor = load_columns(factor_ptr + row, exists, "", 1.0).to(ACCUM)
        if HAS_SOFTCAP:
            cap *= factor
        else:
            scale *= factor
    return scale, cap


@triton.jit
def transform(
    a,  # logits before bias and scale, as loaded
    bias_ptr,
    columns,
    mask,  # True for columns that are classes; None: all are
    scale,
    cap,
    ACCUM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Return z and dz/da of some columns of a row.

    Without softcap ``z = scale * a``; with it ``z = cap * tanh(scale * a)``. Adding 0 to the product prevents the
    compiler from fusing it with a later subtraction. Otherwise z - max(z) would not be 0 for the largest z, and two
    kernels would compute different z.
    """
    a = a.to(ACCUM)
    if bias_ptr is not None:
        a += load_columns(bias_ptr + columns, mask, "").to(ACCUM)
    if HAS_SOFTCAP:
        tanh, derivative = tanh_and_derivative(a * scale)
        return tanh * cap + 0.0, derivative * (scale * cap)
    elif HAS_SCALE:
        return a * scale + 0.0, scale
    else:
        return a, scale


@triton.jit
def load_normalizer(normalizer_ptr, normalizer_stride, row, mask):
    """Return m and log(sum(exp(z - m))) of rows, from the slots of the normalizer."""
    offset = load_columns(normalizer_ptr + _OFFSET * normalizer_stride + row, mask, "")
    return offset, load_columns(normalizer_ptr + _LOG_SUM * normalizer_stride + row, mask, "")


@triton.jit
def load_scales(scales_ptr, ACCUM: tl.constexpr):
    """Return the scale of the cross entropies, the scale of the z-losses, and the sum of the class weights."""
    weight_sum = tl.load(scales_ptr + 2).to(ACCUM)
    return tl.load(scales_ptr).to(ACCUM), tl.load(scales_ptr + 1).to(ACCUM), weight_sum


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(-x) for x >= 0, without cancellation for small x."""
    # The series has an error of x^6 / 5040.
    series = x * (1.0 - x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0 - x * (1.0 / 120.0 - x * (1.0 / 720.0))))))
    return tl.where(x < 0.25, series, 1.0 - tl.exp2(-x * LOG2_E))


@triton.jit
def softmax_minus_target(softmax_factor, target_factor, more_softmax, nll):
    """Return SOFTMAX * p - TARGET. For p near 1 the factors cancel, for a small p and a small TARGET 1 - (1 - p) does.
    more_softmax: SOFTMAX - TARGET."""
    small_p = softmax_factor * tl.exp2(-nll * LOG2_E) - target_factor
    return tl.where(nll > 1.0, small_p, more_softmax - softmax_factor * one_minus_exp(nll))


@triton.jit
def store_normalizer(row, mask, valid, nll, offset, log_sum, normalizer_ptr, stride):
    """Store the normalizers of rows, 0 for ignored rows."""
    normalizer_ptr += row
    tl.store(normalizer_ptr + _OFFSET * stride, tl.where(valid, offset, 0.0), mask=mask)
    tl.store(normalizer_ptr + _LOG_SUM * stride, tl.where(valid, log_sum, 0.0), mask=mask)
    tl.store(normalizer_ptr + _LOGPROB * stride, tl.where(valid, -nll, 0.0), mask=mask)


@triton.jit
def finish_row(
    offset,  # the normalizer: offset + log_sum is lse
    log_sum,
    nll,  # lse - z_y, NaN for targets that are not a class
    smooth,  # with label smoothing sum_k w_k (lse - z_k)
    valid,  # False for ignored rows, whose results and row gradients are 0
    row_weight,  # of the loss
    target_weight,
    ce_scale,  # of the gradient of the cross entropy, with all weights and upstream gradients
    z_loss_scale,
    weight_sum,  # of all classes
    vocab_size,
    label_smoothing,
    z_loss,
    row,
    exists,  # True for rows that exist; None: all do
    loss_ptr,  # (rows,); None: only return the row gradient
    z_loss_ptr,
    normalizer_ptr,
    logprob_ptr,
    normalizer_stride,
    HAS_LABEL_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
):
    """End rows: store losses, normalizers and log-probabilities.

    Return the row gradient: the factors of softmax, of the target's one-hot vector and of the class weights; and the
    gradient in z of the target, whose two terms cancel for p near 1.

    `formulas.finish_row` has the same formulas. Call by keyword."""
    lse = tl.where(offset == float("inf"), offset, offset + log_sum)
    loss = nll * target_weight
    target_factor = ce_scale * target_weight
    classes_factor = tl.zeros_like(nll)
    more_softmax = tl.zeros_like(nll)  # The factor of softmax exceeds the factor of the target by this number.
    if HAS_LABEL_SMOOTHING:
        loss = (1.0 - label_smoothing) * loss + (label_smoothing / vocab_size) * smooth
        target_factor = ce_scale * (1.0 - label_smoothing) * target_weight
        classes_factor = ce_scale * (label_smoothing / vocab_size)
        more_softmax += classes_factor * weight_sum
    row_z_loss = tl.zeros_like(nll)
    if HAS_Z_LOSS:
        row_z_loss = z_loss * lse * lse
        more_softmax += z_loss_scale * 2.0 * z_loss * lse
    softmax_factor = target_factor + more_softmax
    at_target = softmax_minus_target(softmax_factor, target_factor, more_softmax, nll)
    at_target -= classes_factor * target_weight
    if loss_ptr is not None:
        store_normalizer(row, exists, valid, nll, offset, log_sum, normalizer_ptr, normalizer_stride)
        tl.store(loss_ptr + row, tl.where(valid, loss * row_weight, 0.0), mask=exists)
        if z_loss_ptr is not None:
            tl.store(z_loss_ptr + row, tl.where(valid, row_z_loss * row_weight, 0.0), mask=exists)
        if logprob_ptr is not None:
            tl.store(logprob_ptr + row, tl.where(valid, -nll, 0.0), mask=exists)
    return (
        tl.where(valid, softmax_factor, 0.0),
        tl.where(valid, target_factor, 0.0),
        tl.where(valid, classes_factor, 0.0),
        tl.where(valid, at_target, 0.0),
    )


@triton.jit
def load_weights(
    row,
    exists,
    target,
    in_range,
    class_weight_ptr,
    token_weight_ptr,
    upstream_ptr,
    upstream_stride,
    ACCUM: tl.constexpr,
):
    """Return the weights of the losses of rows, of their gradients, and of their targets' classes."""
    row_weight = tl.full(row.shape, 1.0, ACCUM)
    if token_weight_ptr is not None:
        row_weight = load_columns(token_weight_ptr + row, exists, "").to(ACCUM)
    gradient_weight = tl.where(in_range, row_weight, float("nan"))  # NaN for targets out of range
    if upstream_ptr is not None:
        gradient_weight *= load_columns(upstream_ptr + row * upstream_stride, exists, "").to(ACCUM)
    target_weight = tl.full(row.shape, 1.0, ACCUM)
    if class_weight_ptr is not None:
        target_weight = tl.load(class_weight_ptr + target, mask=in_range, other=1.0).to(ACCUM)
    return row_weight, gradient_weight, target_weight


@triton.jit
def finish_fused_rows(
    row, exists, target, valid, in_range, nll, offset, log_sum, class_weight_ptr, token_weight_ptr, upstream_ptr,
    scales_ptr, loss_ptr, z_loss_ptr, normalizer_ptr, logprob_ptr, upstream_stride, normalizer_stride, z_loss,
    HAS_Z_LOSS: tl.constexpr, IS_SHARD: tl.constexpr,
):  # fmt: skip
    """Run `finish_row` after a fused product: in float32, without label smoothing. With a `scales_ptr` return the
    factor of softmax, and the gradient in z of the target. Call by keyword.

    The rows of a shard are ended when the shards are merged: store their normalizer, and return 1."""
    if IS_SHARD:
        store_normalizer(row, exists, valid, nll, offset, log_sum, normalizer_ptr, normalizer_stride)
        return tl.full(row.shape, 1.0, tl.float32), tl.full(row.shape, 1.0, tl.float32)
    else:
        row_weight, gradient_weight, target_weight = load_weights(
            row, exists, target, in_range, class_weight_ptr, token_weight_ptr, upstream_ptr, upstream_stride, tl.float32
        )
        ce_scale, z_loss_scale = 0.0, 0.0
        if scales_ptr is not None:
            ce_scale, z_loss_scale, _weight_sum = load_scales(scales_ptr, tl.float32)
        softmax_factor, _target_factor, _classes_factor, at_target = finish_row(
            offset=offset, log_sum=log_sum, nll=nll, smooth=None, valid=valid, row_weight=row_weight,
            target_weight=target_weight, ce_scale=gradient_weight * ce_scale,
            z_loss_scale=gradient_weight * z_loss_scale, weight_sum=None, vocab_size=None, label_smoothing=None,
            z_loss=z_loss, row=row, exists=exists, loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr,
            normalizer_ptr=normalizer_ptr, logprob_ptr=logprob_ptr, normalizer_stride=normalizer_stride,
            HAS_LABEL_SMOOTHING=False, HAS_Z_LOSS=HAS_Z_LOSS,
        )  # fmt: skip
        return softmax_factor, at_target


@triton.jit
def load_row_gradient(
    row_gradient_ptr,
    stride,
    row,
    mask,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    HAS_LABEL_SMOOTHING: tl.constexpr,
):
    """Load a row gradient: the factors of softmax, of the target's one-hot vector, of the class weights and of
    entropy."""
    softmax_factor = load_columns(row_gradient_ptr + _SOFTMAX * stride + row, mask, "")
    target_factor = load_columns(row_gradient_ptr + _TARGET * stride + row, mask, "")
    classes_factor = tl.zeros_like(softmax_factor)
    if HAS_LABEL_SMOOTHING:
        classes_factor = load_columns(row_gradient_ptr + _CLASSES * stride + row, mask, "")
    entropy_factor = tl.zeros_like(softmax_factor)
    if HAS_ENTROPY_GRADIENT:
        entropy_factor = load_columns(row_gradient_ptr + _ENTROPY * stride + row, mask, "")
    return softmax_factor, target_factor, classes_factor, entropy_factor


@triton.jit(
    do_not_specialize=[
        "upstream_stride", "normalizer_stride", "row_gradient_stride", "rows", "vocab_size", "ignore_index",
    ]
)  # fmt: skip
def row_gradient_kernel(
    target_ptr,  # (rows,) int64
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    upstream_ptr,  # (rows,), stride upstream_stride: 0 if all rows share one value
    scales_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride, output
    upstream_stride,
    normalizer_stride,
    row_gradient_stride,
    rows,
    vocab_size,
    ignore_index,
    label_smoothing: tl.float64,
    z_loss: tl.float64,
    ACCUM: tl.constexpr,
    HAS_LABEL_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see `wait_for_previous_kernel`
    ROWS: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    label_smoothing = tl.full((), label_smoothing, ACCUM)
    z_loss = tl.full((), z_loss, ACCUM)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, exists)
    nll = -tl.load(normalizer_ptr + _LOGPROB * normalizer_stride + row, mask=exists, other=0.0)
    row_weight, scale, target_weight = load_weights(
        row, exists, target, in_range, class_weight_ptr, token_weight_ptr, upstream_ptr, upstream_stride, ACCUM
    )  # fmt: skip
    ce_scale, z_loss_scale, weight_sum = load_scales(scales_ptr, ACCUM)
    softmax_factor, target_factor, classes_factor, _at_target = finish_row(
        offset=offset, log_sum=log_sum, nll=nll, smooth=0.0, valid=valid, row_weight=row_weight,
        target_weight=target_weight, ce_scale=scale * ce_scale, z_loss_scale=scale * z_loss_scale,
        weight_sum=weight_sum, vocab_size=vocab_size, label_smoothing=label_smoothing, z_loss=z_loss, row=row,
        exists=exists, loss_ptr=None, z_loss_ptr=None, normalizer_ptr=None, logprob_ptr=None, normalizer_stride=0,
        HAS_LABEL_SMOOTHING=HAS_LABEL_SMOOTHING, HAS_Z_LOSS=HAS_Z_LOSS,
    )  # fmt: skip
    row_gradient_ptr += row
    tl.store(row_gradient_ptr + _SOFTMAX * row_gradient_stride, softmax_factor, mask=exists)
    tl.store(row_gradient_ptr + _TARGET * row_gradient_stride, target_factor, mask=exists)
    if HAS_LABEL_SMOOTHING:
        tl.store(row_gradient_ptr + _CLASSES * row_gradient_stride, classes_factor, mask=exists)


@triton.jit
def softmax_term(z, offset, log_sum, softmax_factor, entropy_factor, HAS_ENTROPY_GRADIENT: tl.constexpr):
    """Return the softmax's term of the gradient: `softmax_factor` times p = exp(z - m) / sum(exp(z - m)), where m is
    the offset. With the gradient of an entropy, p is multiplied by ``softmax_factor - entropy_factor * log(p)``."""
    if HAS_ENTROPY_GRADIENT:
        softmax_factor = softmax_factor - entropy_factor * tl.maximum((z - offset) - log_sum, _LEAST_LOGPROB)
    # exp((z - m) - log_sum): one operation does the second subtraction and the change of base.
    return softmax_factor * tl.exp2((z - offset) * LOG2_E - log_sum * LOG2_E)


@triton.jit
def logit_gradient(
    term,  # `softmax_term`
    is_target,  # True for the target's column; None: for all columns
    target_factor,
    jacobian,  # dz/da
    HAS_JACOBIAN: tl.constexpr,
    classes_factor,
    class_weight_ptr,  # multiplies `classes_factor`; None: 1
    columns,
    mask,  # True for columns that are classes; None: all are
    HAS_LABEL_SMOOTHING: tl.constexpr,
):
    """Return the gradient of a row's loss with respect to its logits, from its row gradient."""
    grad = term - target_factor
    if is_target is not None:
        grad = tl.where(is_target, grad, term)
    if HAS_LABEL_SMOOTHING:
        if class_weight_ptr is not None:
            classes_factor *= load_columns(class_weight_ptr + columns, mask, "").to(term.dtype)
        grad -= classes_factor
    if HAS_JACOBIAN:
        grad *= jacobian
    return grad
