"""Softmax and its gradient without a pass over the logits: exponentials are normalized after the products, not before.

With a reference c of each row, e_k = exp(z_k - c) (0 for the target y), S = sum_k e_k and Z = S + exp(z_y - c), the
gradient of the loss with respect to the logits is

    d/dz_k = f e_k   for k != y,     d/dz_y = t,      f = a / Z,     t = (a - o) - a S / Z

where a is what p, and o what the one-hot vector of the target is multiplied by: the scale of the loss, weights, z-loss
(`cross_entropy.py` has the formulas). f multiplies a whole row, so it can be left out of E, the matrix of exponentials,
which the epilogue of the product that makes the logits writes (`product.py`):

    dX = f * (E W) + t * W[y]                            row by row
    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

The logits themselves are never in memory, nor are they rounded; E, which is, and f * X are rounded to bfloat16, as p is
elsewhere. The targets' own terms, which are most of the gradient of a model that is not sure yet, are not rounded
before they are added, nor are the products, whose large terms they may cancel: E W is float32, and for dW see
`weight_gradient.py` or, for sums over chunks (float32, unless bfloat16 is asked for), `add_to_targets_kernel`.

The reference need not be the largest logit, which is not known before all are made. It is the largest of some of them
plus HEADROOM octaves, since others may be larger, and no less than the target's. bfloat16 reaches over 252 octaves:
exponentials are right as long as the largest is between 2^-HEADROOM, by construction, and 2^LIMIT, which is 88 nats
above the largest of the sample. Where a row has a larger one, the product's epilogue says how large, and the product is
made again with a reference that is right. (Where float32 has no digits left for that, at logits of 10^8, it is NaN.)

All that is decided on the device. `work` has three numbers, FLAG_STRIDE apart: 1 + the blocks of rows of the first
product, the same of the second, or 0 if there is none, and one that is never read. The second product is always
launched, and its programs return at once when there is nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends.triton.math import LN_2, LOG2_E, finish_rows, log1p, transform

# Distance of the flags: kernels are built for addresses that are multiples of 16 bytes.
FLAG_STRIDE = 4
_FLAG_STRIDE = tl.constexpr(FLAG_STRIDE)
# The largest rounding error of the entries of a bfloat16 product, relative to them.
_ROUNDING = tl.constexpr(2.0**-8)
# A right normalizer is 2^-HEADROOM or more. What is as small as this is none.
_LEAST = tl.constexpr(2.0**-96)
# The reference of a row whose sample and target are -inf.
_VERY_SMALL = tl.constexpr(-(2.0**20))
# Octaves between the largest logit of the sample and the reference.
HEADROOM = 64.0
_HEADROOM = tl.constexpr(HEADROOM)


@triton.jit(do_not_specialize=["rows", "samples", "sample_step", "ignore_index"])
def reference_kernel(
    x_ptr,  # (rows, hidden), row stride x_stride
    weight_ptr,  # (V, hidden), row stride weight_stride
    sample_ptr,  # (rows, samples) logits as a product left them, sample_step classes apart, row stride sample_stride
    target_ptr,  # (rows,) int64
    bias_ptr,  # (V,)
    reference_ptr,  # (rows,) written: in octaves; inf for ignored rows
    target_logit_ptr,  # (rows,) written: z of the target
    target_jacobian_ptr,  # (rows,) written: dz/da of the target
    work_ptr,  # (3,) int32, FLAG_STRIDE apart, written
    count_ptr,  # () int64: how many of the rows the product is to be made of, the others being ignored
    x_stride,
    weight_stride,
    sample_stride,
    rows,
    hidden,
    samples,
    sample_step,
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of the product
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.full((), scale, tl.float32)
    cap = tl.full((), cap, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size) & valid
    column = tl.where(in_range, target, 0)

    number = tl.arange(0, SAMPLES)
    a = tl.load(sample_ptr + row * sample_stride + number, mask=number < samples, other=0.0)
    z, _jacobian = transform(
        a, bias_ptr, number * sample_step, number < samples, scale, cap, tl.float32, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP
    )
    # The product has rounded them to bfloat16. Not larger than they are: too small is noticed, too large is not.
    margin = tl.abs(a.to(tl.float32)) * (tl.abs(scale * cap) * _ROUNDING)
    if HAS_SOFTCAP:
        margin = tl.minimum(margin, 2.0 * tl.abs(cap))
    z -= margin
    largest = tl.max(tl.where(number < samples, z, float("-inf")), axis=0)

    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = (offsets < hidden) & in_range
        x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        dot += x * tl.load(weight_ptr + column * weight_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    target_z, target_jacobian = transform(
        tl.sum(dot, axis=0), bias_ptr, column, in_range, scale, cap, tl.float32, HAS_SCALE, HAS_BIAS, HAS_SOFTCAP
    )
    tl.store(target_logit_ptr + row, target_z)
    tl.store(target_jacobian_ptr + row, target_jacobian)

    reference = largest * LOG2_E + _HEADROOM
    reference = tl.where(in_range, tl.maximum(reference, target_z * LOG2_E), reference)
    # A row that seems to have nothing but -inf: so small that any other logit asks for another reference.
    reference = tl.where(reference == float("-inf"), _VERY_SMALL, reference)
    tl.store(reference_ptr + row, tl.where(valid, reference, float("inf")))
    if row == 0:
        if HAS_COUNT:
            rows = tl.minimum(rows, tl.load(count_ptr).to(tl.int32))
        launch = tl.arange(0, 4)
        work = tl.where(launch == 0, 1 + tl.cdiv(rows, BLOCK_ROWS), 0)
        tl.store(work_ptr + launch * _FLAG_STRIDE, work, mask=launch < 3)


@triton.jit(do_not_specialize=["rows", "blocks", "vocab_size", "ignore_index", "normalizer_stride", "factors_stride"])
def finish_kernel(
    partial_ptr,  # (blocks, rows) as `product_kernel` left it
    reference_ptr,  # (rows,) in octaves; written where the product has to be made again
    target_logit_ptr,  # (rows,)
    target_jacobian_ptr,  # (rows,)
    target_ptr,  # (rows,) int64
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    scales_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    loss_ptr,  # (rows,) from here on written
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    factors_ptr,  # (2, rows), row stride factors_stride: f and t, with respect to the logits as a product left them
    work_ptr,  # (2,) int32, FLAG_STRIDE apart: read; written if the product is to be made again
    normalizer_stride,
    factors_stride,
    rows,
    blocks,
    vocab_size,
    ignore_index,
    scale: tl.float64,
    z_loss: tl.float64,
    HAS_SCALE: tl.constexpr,  # without softcap: it is in the exponentials
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    scale = tl.full((), scale, tl.float32)
    z_loss = tl.full((), z_loss, tl.float32)
    work = tl.load(work_ptr)
    blocks = tl.where(work == 0, 0, blocks)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    totals = tl.zeros((BLOCKS, ROWS), tl.float32)
    beyond = tl.zeros((BLOCKS, ROWS), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        place = block.to(tl.int64) * rows + row[None, :]
        partial = tl.load(partial_ptr + place, mask=(block < blocks) & exists[None, :], other=0.0)
        totals += tl.where(partial < 0.0, 0.0, partial)  # a NaN stays
        beyond = tl.maximum(beyond, -partial)
    if blocks > 0:
        total = tl.sum(totals, axis=0)
        octaves = tl.max(beyond, axis=0)
        target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
        valid = target != ignore_index
        in_range = (target >= 0) & (target < vocab_size)
        reference = tl.load(reference_ptr + row, mask=exists, other=0.0)
        again = valid & (octaves > 0.0)
        tl.store(reference_ptr + row, reference + octaves, mask=exists & again)
        flag = tl.full((ROWS,), _FLAG_STRIDE, tl.int32)
        tl.store(work_ptr + flag, work + tl.zeros((ROWS,), tl.int32), mask=exists & again)

        reference = tl.where(valid, reference, 0.0)
        target_z = tl.load(target_logit_ptr + row, mask=exists, other=0.0)
        target_octaves = target_z * LOG2_E - reference
        normalizer = tl.where(valid, total + tl.exp2(target_octaves), 1.0)
        # lse = offset + log_sum. Where p is not tiny, of 1 / p - 1, which keeps its digits where p is nearly 1.
        near = target_octaves > -_HEADROOM - 32.0
        odds = total * tl.exp2(tl.where(near, -target_octaves, 0.0))
        exact = log1p(odds)
        near = near & (odds < 65536.0)
        offset = tl.where(near, target_z, reference * LN_2)
        log_sum = tl.where(near, exact, tl.log2(normalizer) * LN_2)
        nll = tl.where(near, exact, log_sum + (offset - target_z))
        # Wrong targets make NaN, not nonsense; as do rows whose exponentials are all out of range.
        nll = tl.where(in_range & (normalizer > _LEAST), nll, float("nan"))
        others = tl.where(normalizer > _LEAST, total / normalizer, float("nan"))
        softmax_factor, grad_at_target = finish_rows(
            row=row, exists=exists, target=target, valid=valid, in_range=in_range, nll=nll, others=others,
            offset=offset, log_sum=log_sum, class_weight_ptr=class_weight_ptr, token_weight_ptr=token_weight_ptr,
            scales_ptr=scales_ptr, loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr, normalizer_ptr=normalizer_ptr,
            logprob_ptr=logprob_ptr, normalizer_stride=normalizer_stride, z_loss=z_loss,
            HAS_CLASS_WEIGHT=HAS_CLASS_WEIGHT, HAS_TOKEN_WEIGHT=HAS_TOKEN_WEIGHT, HAS_Z_LOSS=HAS_Z_LOSS,
            WANT_LOGPROB=WANT_LOGPROB, FACTORS=True,
        )  # fmt: skip
        factor = tl.where(normalizer > _LEAST, softmax_factor / normalizer, float("nan"))
        if HAS_SCALE:
            factor *= scale
        grad_at_target *= tl.load(target_jacobian_ptr + row, mask=exists, other=0.0)
        tl.store(factors_ptr + row, tl.where(valid, factor, 0.0), mask=exists)
        tl.store(factors_ptr + factors_stride + row, tl.where(valid, grad_at_target, 0.0), mask=exists)


@triton.jit(do_not_specialize=["factors_stride", "vocab_size", "ignore_index"])
def combine_rows_kernel(
    x_ptr,  # (rows, hidden), strides x_stride and x_col_stride
    weight_ptr,  # (V, hidden), strides weight_stride and weight_col_stride
    out_ptr,  # (N, hidden), row stride out_stride; may be x_ptr
    index_ptr,  # (rows,) int64: the row of `out` that each of x is written to
    target_ptr,  # (rows,) int64
    factors_ptr,  # (2, rows), row stride factors_stride: of the row of x, and of the target's row of the weight
    x_stride,
    x_col_stride,
    weight_stride,
    weight_col_stride,
    out_stride,
    factors_stride,
    hidden,
    vocab_size,
    ignore_index,
    ADD_TARGETS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size) & valid
    factor = tl.load(factors_ptr + row)
    if ADD_TARGETS:
        target_factor = tl.load(factors_ptr + factors_stride + row)
    if HAS_INDEX:
        out_ptr += tl.load(index_ptr + row) * out_stride
    else:
        out_ptr += row * out_stride
    for start in range(0, hidden, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < hidden
        # An ignored row is not read: 0 is written, whatever it holds.
        x = tl.load(x_ptr + row * x_stride + offsets.to(tl.int64) * x_col_stride, mask=mask & valid, other=0.0)
        out = factor * x.to(tl.float32)
        if ADD_TARGETS:
            places = target * weight_stride + offsets.to(tl.int64) * weight_col_stride
            w = tl.load(weight_ptr + places, mask=mask & in_range, other=0.0)
            out += target_factor * w.to(tl.float32)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "first_class", "classes", "ignore_index"])
def add_to_targets_kernel(
    grad_ptr,  # (classes, hidden), contiguous: what is added to, of the classes from first_class on
    x_ptr,  # (N, hidden), strides x_stride and x_col_stride
    target_ptr,  # (rows,) int32, ascending
    row_ptr,  # (rows,) int64: rows of x, in that order
    factor_ptr,  # (rows,) what they are multiplied by, in that order
    x_stride,
    x_col_stride,
    rows,
    hidden,
    first_class,
    classes,
    ignore_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The first of the rows with a target adds all of them, in their order: the same bits every time."""
    first = tl.program_id(0)
    target = tl.load(target_ptr + first)
    before = tl.load(target_ptr + first - 1, mask=first > 0, other=-1)
    place = target.to(tl.int64) - first_class
    if (target != before) & (place >= 0) & (place < classes) & (target != ignore_index):
        stop = first + 1
        found = SCAN
        while found == SCAN:
            candidates = stop + tl.arange(0, SCAN)
            same = tl.load(target_ptr + candidates, mask=candidates < rows, other=-1) == target
            found = tl.sum(same.to(tl.int32), axis=0)
            stop += found
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < hidden
        grad_ptr += place * hidden
        total = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for start in range(first, stop, ROWS):
            number = start + tl.arange(0, ROWS)
            row = tl.load(row_ptr + number, mask=number < stop, other=0)
            factor = tl.load(factor_ptr + number, mask=number < stop, other=0.0)
            both = (number < stop)[:, None] & mask[None, :]
            places = row[:, None] * x_stride + offsets[None, :].to(tl.int64) * x_col_stride
            x = tl.load(x_ptr + places, mask=both, other=0.0)
            total += tl.sum(x.to(tl.float32) * factor[:, None], axis=0)
        tl.store(grad_ptr + offsets, total.to(grad_ptr.dtype.element_ty), mask=mask)
