"""Kernels around the product that writes exponentials, which are normalized after the matrix products of the gradients,
and their launches: `Backend.fused_exponentials` and `combine_rows`.

With a reference c of each row, e_k = exp(z_k - c) (0 for the target y), S = sum_k e_k and Z = S + exp(z_y - c), the
gradient of the loss with respect to the logits is

    d/dz_k = f e_k   for k != y,     d/dz_y = t,      f = a / Z,     t = (a - o) - a S / Z

where p is multiplied by a, and the one-hot vector of the target by o: the scale of the loss, weights, z-loss
(`cross_entropy.py` has the formulas). f multiplies a whole row. Therefore the matrix of exponentials E does not include
f. The epilogue of the product that computes the logits writes E (`product.py`). Then

    dX = f * (E W) + t * W[y]                            row by row
    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

The logits are neither written to memory nor rounded. E is written to memory: E and f * X are rounded to bfloat16, as p
is in other schedules. The targets' own terms are most of the gradient of a model that is not sure yet. Neither these
terms nor the products are rounded before they are added, because they may cancel: E W is float32. For dW see
`weight_gradient.py`.

The reference need not be the largest logit, which is unknown until all logits have been computed. The reference is the
largest logit of a sample of classes plus HEADROOM octaves, because other logits may be larger, and at least the
target's logit. bfloat16 has a range of 252 octaves: exponentials are correct if the largest is between 2^-HEADROOM, by
construction, and 2^LIMIT, which is 88 nats above the largest logit of the sample. If a row has a larger exponential,
the product's epilogue writes its logarithm, and the product is computed again with a correct reference. (For logits of
10^8 float32 has too few digits for a correct reference: the result is NaN.)

The device decides this. `work` has three numbers, FLAG_STRIDE apart: 1 + the blocks of rows of the first product; the
same of the second product, or 0 if none is needed; and a number that is never read. The second product is always
launched, and its programs return at once if none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends import contract
from flce.backends.contract import StatisticsCall
from flce.backends.triton import product
from flce.backends.triton.launch import FLAG_STRIDE, Launch, build_launch, thread_options
from flce.backends.triton.math import (
    LN_2,
    LOG2_E,
    finish_fused_rows,
    load_scale,
    log1p,
    transform,
)
from flce.backends.triton.replay import run
from flce.core.gemm import ALIGNMENT, offset_slice, slice_columns

# Classes whose logits are computed before the product, for the reference of each row: 0.2% of a vocabulary of 128,256.
SAMPLES = 256
# Elements of a row of hidden states per step. On an H200 512 to 4096 are equally fast.
BLOCK = 1024
_SOFTMAX = tl.constexpr(contract.SOFTMAX)
_TARGET = tl.constexpr(contract.TARGET)
_FLAG_STRIDE = tl.constexpr(FLAG_STRIDE)
# The largest relative rounding error of the entries of a bfloat16 product.
_ROUNDING = tl.constexpr(2.0**-8)
# A correct normalizer is at least 2^-HEADROOM. A normalizer up to this value is an error.
_LEAST = tl.constexpr(2.0**-96)
# The reference of a row if the logits of its sample and of its target are -inf.
_VERY_SMALL = tl.constexpr(-(2.0**20))
# Octaves between the largest logit of the sample and the reference.
HEADROOM = 64.0
_HEADROOM = tl.constexpr(HEADROOM)


@triton.jit(do_not_specialize=["rows", "samples", "sample_step", "ignore_index"])
def reference_kernel(
    x_ptr,  # (rows, hidden), row stride x_stride
    weight_ptr,  # (V, hidden), row stride weight_stride
    sample_ptr,  # (rows, samples) logits before bias and scale, sample_step classes apart, row stride sample_stride
    target_ptr,  # (rows,) int64
    bias_ptr,  # (V,)
    reference_ptr,  # (rows,) output, in octaves; inf for ignored rows
    target_logit_ptr,  # (rows,) output: z of the target
    target_jacobian_ptr,  # (rows,) output: dz/da of the target
    work_ptr,  # (3,) int32, FLAG_STRIDE apart, output
    count_ptr,  # () int64: the number of rows that the product computes, the others are ignored; None: all
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
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of the product
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale, cap = load_scale(scale, cap, None, row, None, HAS_SOFTCAP, tl.float32)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size) & valid
    column = tl.where(in_range, target, 0)

    number = tl.arange(0, SAMPLES)
    a = tl.load(sample_ptr + row * sample_stride + number, mask=number < samples, other=0.0)
    z, _jacobian = transform(
        a, bias_ptr, number * sample_step, number < samples, scale, cap, tl.float32, HAS_SCALE, HAS_SOFTCAP
    )
    # The product has rounded the sample to bfloat16. Subtract the rounding error: a reference that is too small is
    # detected, a reference that is too large is not.
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
        tl.sum(dot, axis=0), bias_ptr, column, in_range, scale, cap, tl.float32, HAS_SCALE, HAS_SOFTCAP
    )
    tl.store(target_logit_ptr + row, target_z)
    tl.store(target_jacobian_ptr + row, target_jacobian)

    reference = largest * LOG2_E + _HEADROOM
    reference = tl.where(in_range, tl.maximum(reference, target_z * LOG2_E), reference)
    # If all these logits are -inf, the reference is so small that any finite logit triggers the second product.
    reference = tl.where(reference == float("-inf"), _VERY_SMALL, reference)
    tl.store(reference_ptr + row, tl.where(valid, reference, float("inf")))
    if row == 0:
        if count_ptr is not None:
            rows = tl.minimum(rows, tl.load(count_ptr).to(tl.int32))
        launch = tl.arange(0, 4)
        work = tl.where(launch == 0, 1 + tl.cdiv(rows, BLOCK_ROWS), 0)
        tl.store(work_ptr + launch * _FLAG_STRIDE, work, mask=launch < 3)


@triton.jit(
    do_not_specialize=[
        "rows", "blocks", "vocab_size", "ignore_index", "upstream_stride", "normalizer_stride", "factors_stride",
    ]
)  # fmt: skip
def finish_kernel(
    partial_ptr,  # (blocks, rows), output of `product_kernel`
    reference_ptr,  # (rows,) in octaves; overwritten for rows that need the second product
    target_logit_ptr,  # (rows,)
    target_jacobian_ptr,  # (rows,)
    target_ptr,  # (rows,) int64
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    upstream_ptr,  # (rows,), stride upstream_stride
    scales_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    loss_ptr,  # (rows,); from here on output
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    # (2, rows), row stride factors_stride: f and t, for logits before bias and scale; of a shard f for its
    # log-sum-exp alone, and dz/da of the target.
    factors_ptr,
    work_ptr,  # (2,) int32, FLAG_STRIDE apart: the first is read, the second written if a second product is needed
    upstream_stride,
    normalizer_stride,
    factors_stride,
    rows,
    blocks,
    vocab_size,
    ignore_index,
    scale: tl.float64,
    z_loss: tl.float64,
    HAS_SCALE: tl.constexpr,  # False with softcap: the exponentials include the scale
    HAS_Z_LOSS: tl.constexpr,
    IS_SHARD: tl.constexpr,
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
        totals += tl.where(partial < 0.0, 0.0, partial)  # NaN is added
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
        at_target = tl.where(in_range, tl.exp2(target_octaves), 0.0)  # The target may be in another shard.
        normalizer = tl.where(valid, total + at_target, 1.0)
        # lse = offset + log_sum. If p is not tiny, it is computed from 1 / p - 1, which is exact for p near 1.
        near = target_octaves > -_HEADROOM - 32.0
        odds = total * tl.exp2(tl.where(near, -target_octaves, 0.0))
        exact = log1p(odds)
        near = near & in_range & (odds < 65536.0)
        offset = tl.where(near, target_z, reference * LN_2)
        log_sum = tl.where(near, exact, tl.log2(normalizer) * LN_2)
        nll = tl.where(near, exact, log_sum + (offset - target_z))
        # NaN for targets out of range, and for rows whose exponentials are all out of range.
        nll = tl.where(in_range & (normalizer > _LEAST), nll, float("nan"))
        softmax_factor, at_target = finish_fused_rows(
            row=row, exists=exists, target=target, valid=valid, in_range=in_range, nll=nll, offset=offset,
            log_sum=log_sum, class_weight_ptr=class_weight_ptr, token_weight_ptr=token_weight_ptr,
            upstream_ptr=upstream_ptr, scales_ptr=scales_ptr, loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr,
            normalizer_ptr=normalizer_ptr, logprob_ptr=logprob_ptr, upstream_stride=upstream_stride,
            normalizer_stride=normalizer_stride, z_loss=z_loss, HAS_Z_LOSS=HAS_Z_LOSS, IS_SHARD=IS_SHARD,
        )  # fmt: skip
        factor = tl.where(normalizer > _LEAST, softmax_factor / normalizer, float("nan"))
        if HAS_SCALE:
            factor *= scale
        at_target *= tl.load(target_jacobian_ptr + row, mask=exists, other=0.0)
        tl.store(factors_ptr + _SOFTMAX * factors_stride + row, tl.where(valid, factor, 0.0), mask=exists)
        tl.store(factors_ptr + _TARGET * factors_stride + row, tl.where(valid, at_target, 0.0), mask=exists)


@triton.jit(do_not_specialize=["factors_stride", "vocab_size", "ignore_index"])
def combine_rows_kernel(
    x_ptr,  # (rows, hidden), strides x_stride and x_col_stride
    weight_ptr,  # (V, hidden), strides weight_stride and weight_col_stride; None: without this term
    out_ptr,  # (N, hidden), row stride out_stride; may be x_ptr
    index_ptr,  # (rows,) int64: the row of `out` for each row of x; None: the same rows
    target_ptr,  # (rows,) int64
    factors_ptr,  # (2, rows), row stride factors_stride: for the row of x, and for the target's row of the weight
    x_stride,
    x_col_stride,
    weight_stride,
    weight_col_stride,
    out_stride,
    factors_stride,
    hidden,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size) & valid
    factor = tl.load(factors_ptr + row)
    if weight_ptr is not None:
        target_factor = tl.load(factors_ptr + factors_stride + row)
    if index_ptr is not None:
        out_ptr += tl.load(index_ptr + row) * out_stride
    else:
        out_ptr += row * out_stride
    for start in range(0, hidden, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < hidden
        # An ignored row is not read, because it may contain NaN: 0 is written.
        x = tl.load(x_ptr + row * x_stride + offsets.to(tl.int64) * x_col_stride, mask=mask & valid, other=0.0)
        out = factor * x.to(tl.float32)
        if weight_ptr is not None:
            places = target * weight_stride + offsets.to(tl.int64) * weight_col_stride
            w = tl.load(weight_ptr + places, mask=mask & in_range, other=0.0)
            out += target_factor * w.to(tl.float32)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------
# Launches


def fused_exponentials(
    x: Tensor,
    weight: Tensor,
    exps: Sequence[Tensor],
    call: StatisticsCall,
    factors: Tensor,
    count: Tensor | None,
    scales: Callable[[], Tensor | None],
) -> None:
    num_rows, vocab_size = x.shape[0], weight.shape[0]
    if num_rows == 0:
        return
    new, blocks = call.out.loss.new_empty, triton.cdiv(vocab_size, product.COLS)
    sampled = weight[:: triton.cdiv(vocab_size, SAMPLES)]
    sampled = sampled[: max(1, sampled.shape[0] // ALIGNMENT * ALIGNMENT)]
    # The memory of the exponentials is free until the product writes them.
    sample = torch.mm(x, sampled.t(), out=exps[0][:, : sampled.shape[0]])
    # Separate vectors, so that each address is aligned for the kernels.
    rows = _RowVectors(*[new(num_rows) for _ in range(3)])
    work = torch.empty(3, FLAG_STRIDE, dtype=torch.int32, device=x.device)
    memory = _Memory(product.align_for_descriptor(x), weight, exps, new(blocks, num_rows), work, rows)
    run(_first_products, memory, call, sample, count)
    call = call._replace(inputs=call.inputs._replace(scales=scales()))
    run(_finish_and_retry, memory, call, factors)


class _RowVectors(NamedTuple):
    """Vectors of `fused_exponentials`, (rows,) each."""

    reference: Tensor
    target_logit: Tensor
    target_jacobian: Tensor


class _Memory(NamedTuple):
    """Operands of the products of `fused_exponentials`, and what its launches hand to each other."""

    x: Tensor
    weight: Tensor
    exps: Sequence[Tensor]
    partial: Tensor  # (blocks of classes, rows)
    work: Tensor  # (3, FLAG_STRIDE) int32, see `exponentials`
    rows: _RowVectors


def _first_products(memory: _Memory, call: StatisticsCall, sample: Tensor, count: Tensor | None) -> Iterator[Launch]:
    yield build_launch(
        reference_kernel,
        (len(memory.x),),
        call,
        {"BLOCK_ROWS": product.ROWS, "SAMPLES": SAMPLES, "BLOCK": BLOCK},
        ("z_loss",),
        x=memory.x,
        weight=memory.weight,
        sample=sample,
        work=memory.work,
        count=count,
        hidden=memory.x.shape[1],
        samples=sample.shape[1],
        sample_step=triton.cdiv(len(memory.weight), SAMPLES),
        **memory.rows._asdict(),
    )
    yield from _products(memory, call, is_retry=False)


def _finish_and_retry(memory: _Memory, call: StatisticsCall, factors: Tensor) -> Iterator[Launch]:
    yield from _finish(memory, call, factors, is_retry=False)
    yield from _products(memory, call, is_retry=True)
    yield from _finish(memory, call, factors, is_retry=True)


def _products(memory: _Memory, call: StatisticsCall, *, is_retry: bool) -> Iterator[Launch]:
    weight, max_cols, start = memory.weight, product.classes_per_launch(memory.weight), 0
    for exps in memory.exps:
        stop = start + exps.shape[1]
        for tile in product.tiles(start, stop, len(weight), max_cols):
            yield product.launch(
                memory.x,
                weight[tile.columns],
                call._replace(tile=tile),
                slice_columns(exps, offset_slice(tile.columns, -start)),
                partial=memory.partial,
                reference=memory.rows.reference,
                work=memory.work[int(is_retry)],
            )
        start = stop


def _finish(memory: _Memory, call: StatisticsCall, factors: Tensor, *, is_retry: bool) -> Iterator[Launch]:
    blocks, num_rows = memory.partial.shape
    yield build_launch(
        finish_kernel,
        (triton.cdiv(num_rows, product.FINISH_ROWS),),
        call,
        {"IS_SHARD": call.tile.is_shard, "ROWS": product.FINISH_ROWS, "BLOCKS": product.FINISH_BLOCKS},
        ("softcap",),
        HAS_SCALE=call.spec.scale != 1.0 and call.spec.softcap is None,
        partial=memory.partial,
        factors=factors,
        work=memory.work[int(is_retry)],
        blocks=blocks,
        **memory.rows._asdict(),
    )


def combine_rows(
    x: Tensor,
    out: Tensor,
    weight: Tensor | None,  # None: only scale the rows
    target: Tensor,
    factors: Tensor,
    ignore_index: int,
    index: Tensor | None,
) -> Iterator[Launch]:
    yield build_launch(
        combine_rows_kernel,
        (len(x),),
        None,
        {"BLOCK": BLOCK, **thread_options(x.device, 4)},
        x=x,
        weight=weight,
        out=out,
        index=index,
        target=target,
        factors=factors,
        hidden=x.shape[1],
        vocab_size=0 if weight is None else len(weight),
        ignore_index=ignore_index,
    )
