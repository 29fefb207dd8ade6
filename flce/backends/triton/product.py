"""The fused product: a matrix product whose epilogue processes the logits in registers, and its launches.

It replaces the vendor's product and a pass over the logits. `TritonBackend` and `exponentials` call this module.

A block of ``x W^T`` is summed in float32 and stays in registers: the logits are neither written to memory nor rounded.
There are three epilogues:

* statistics of the rows, if only these are needed: the statistics of each block, which `finish_statistics_kernel`
  merges;
* the gradient of the logits, if the logits are computed a second time and the statistics are complete. Both passes sum
  in the same order, so the logits are the same to the bit;
* exponentials relative to a reference of each row, and their sums, if losses and gradients are computed in one pass:
  see `backends/triton/exponentials.py`.

There is one program for each multiprocessor. A program computes one block after the other, all blocks of GROUP blocks
of rows before the next group, so that cached operands are read again. Operands are loaded by tensor descriptors (the
bulk copies of Hopper). The operands of the next block are loaded while the epilogue of a block runs: this requires a
loop without branches (otherwise a product takes 0.35 of its time longer). A compile-time number of programs saves 0.04.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.contract import (
    FUSED_PRODUCT_BLOCK,
    FUSED_PRODUCT_ROWS,
    LEAST_LOGPROB,
    WORD_CLASSES,
    GradientCall,
    Marks,
    StatisticsCall,
    TileCall,
    TileClasses,
    num_partial_statistics,
)
from flce.backends.formulas import LOGIT_FIELDS
from flce.backends.triton.entries import pack_marks, random_mantissa
from flce.backends.triton.launch import Launch, build_launch, overlap_options
from flce.backends.triton.math import (
    LOG2_E,
    balanced_group,
    block_in_groups,
    finish_fused_rows,
    load_normalizer,
    load_row_gradient,
    load_scale,
    logit_gradient,
    softmax_merge,
    softmax_term,
    transform,
)
from flce.backends.triton.replay import run
from flce.core.devices import device_record

# A block has ROWS x COLS logits, summed over DEPTH per step. The time of statistics on an H200, relative to a bare
# product that writes its logits: 0.96 (8192 x 4096 x 128256), 1.01 (8192 x 2304 x 256000) and 1.02 (16384 x 1024 x
# 151936); at least 0.97 with blocks of 128 x 128, at least 1.0 with 256 x 128. Statistics and gradients have to sum in
# the same order, so both use these sizes.
ROWS, COLS, DEPTH, GROUP, STAGES, WARPS = FUSED_PRODUCT_ROWS, FUSED_PRODUCT_BLOCK, 64, 16, 3, 8
# `finish_statistics_kernel`: rows of a program, and blocks per step. With 32 and 32 a call in twelve chunks of 1,408
# rows takes 0.1 to 0.2 ms more (16384 x 1024 x 151936).
FINISH_ROWS, FINISH_BLOCKS = 8, 128
# Descriptors need addresses and strides that are multiples of these bytes.
DESCRIPTOR_BYTES = 16
# If a weight does not begin at such an address, it is copied in blocks of at most these bytes.
COPY_BYTES = 8 << 20
# Exponentials above 2^LIMIT are out of range. A sum of 2^18 such exponentials, times weights, is far from the limits of
# float32 and bfloat16, and so is the inverse of the sum, divided by a number of tokens, times an input.
LIMIT = 64.0
_LIMIT = tl.constexpr(LIMIT)
_LEAST_LOGPROB = tl.constexpr(LEAST_LOGPROB)
_WORD = tl.constexpr(WORD_CLASSES)
_NO_COLUMN = tl.constexpr(2**31 - 1)
_NO_MARKS = {"threshold": None, "seeds": None, "first_class": 0, "words": None}


@triton.jit(
    do_not_specialize=[
        "entropy_ptr",
        "argmax_ptr",
        "mean_logit_ptr",
        "ignore_index",
        "column_start",
        "first_class",
        "words_stride",
        "normalizer_stride",
        "row_gradient_stride",
        "rows",
        "cols",
        "vocab_size",
    ]
)
def product_kernel(
    x_desc,  # (rows, hidden)
    weight_desc,  # (cols, hidden)
    out_desc,  # (rows, cols) the gradient or the exponentials; None: statistics
    # Statistics: (planes, blocks of all classes, rows). With m, the largest z of a row in a block, the planes are m and
    # the sum of exp(z - m), then, if requested, the sum of exp(z - m) (z - m), the argmax, the sum of z, the sum of
    # exp(z - m)^2.
    # Exponentials: (blocks of all classes, rows), their sum or, if one exceeds 2^LIMIT, minus its logarithm.
    partial_ptr,
    target_logit_ptr,  # (rows,): written if the target is one of the columns
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of these columns
    inverse_temperature_ptr,  # (rows,)
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride; None: no gradient
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    reference_ptr,  # (rows,) of exponentials, in octaves; None: no exponentials
    threshold_ptr,  # (rows,) of marks, see `contract.Marks`
    seeds_ptr,  # (rows,) int32
    words_ptr,  # (rows, words) int32; None: no marks
    entropy_ptr,  # of this and the next two only whether they are requested: `finish_statistics_kernel` writes them
    argmax_ptr,
    mean_logit_ptr,
    work_ptr,  # () exponentials: 1 + the number of blocks of rows to compute, or 0 for none
    normalizer_stride,
    row_gradient_stride,
    words_stride,
    rows,
    cols,
    hidden,
    column_start,  # the class of column 0
    first_class,  # of this process
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    HAS_TAIL: tl.constexpr,  # cols is not divisible by COLS
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    LAUNCH_NEXT: tl.constexpr,  # the next kernel may start on multiprocessors that this kernel leaves idle
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    if LAUNCH_NEXT:
        gdc_launch_dependents()
    row_blocks = tl.cdiv(rows, ROWS)
    if reference_ptr is not None:
        row_blocks = tl.minimum(row_blocks, tl.load(work_ptr) - 1)
    col_blocks = tl.cdiv(cols, COLS)
    group = balanced_group(row_blocks, GROUP)
    group_blocks = group * col_blocks
    for block in tl.range(tl.program_id(0), row_blocks * col_blocks, PROGRAMS, flatten=True):
        row_block, col_block = block_in_groups(block, row_blocks, group_blocks, group)
        row_start = row_block * ROWS
        col_start = col_block * COLS

        a = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, hidden, DEPTH):
            a = tl.dot(x_desc.load([row_start, k]), weight_desc.load([col_start, k]).T, a)

        row = row_start + tl.arange(0, ROWS)
        exists = row < rows
        columns = col_start + tl.arange(0, COLS)[None, :]
        present = columns < cols
        if bias_ptr is not None:
            # Not in `transform`: the compiler would convert the block to the layout of the loads there, which needs
            # more shared memory than is left.
            column = col_start + tl.arange(0, COLS)
            a += tl.load(bias_ptr + column, mask=column < cols, other=0.0).to(tl.float32)[None, :]
        row_scale, row_cap = load_scale(scale, cap, inverse_temperature_ptr, row, exists, HAS_SOFTCAP, tl.float32)
        z, jacobian = transform(
            a, None, columns, present, row_scale[:, None], row_cap[:, None], tl.float32, HAS_SCALE, HAS_SOFTCAP
        )
        target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
        valid = target != ignore_index
        target_column = target - column_start
        target_in_tile = valid & (target_column >= col_start) & (target_column < tl.minimum(col_start + COLS, cols))
        target_column = tl.where(target_in_tile, target_column, -1).to(tl.int32)

        # 64-bit: blocks x rows exceeds 2^31 only at a billion rows, but costs no time here.
        place = (column_start // COLS + col_block).to(tl.int64) * rows + row
        if reference_ptr is not None:
            # Ignored and missing rows have a reference of inf: their exponentials are 0.
            reference = tl.load(reference_ptr + row, mask=exists, other=float("inf"))
            octaves = z * LOG2_E - reference[:, None]
            # The target's exponential is 0, so that the sum gives 1 - p without cancellation.
            others = tl.arange(0, COLS)[None, :] != (target_column - col_start)[:, None]
            if HAS_TAIL:
                others = others & present
            octaves = tl.where(others, octaves, float("-inf"))
            largest = tl.max(octaves, axis=1)
            exps = tl.exp2(octaves)
            total = tl.sum(exps, axis=1)
            tl.store(partial_ptr + place, tl.where(largest > _LIMIT, -largest, total), mask=exists)
            if HAS_SOFTCAP:
                exps *= jacobian
            out_desc.store([row_start, col_start], exps.to(out_desc.dtype))
        elif row_gradient_ptr is not None:
            row_max, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, exists)
            softmax_factor, target_factor, _classes_factor, entropy_factor = load_row_gradient(
                row_gradient_ptr, row_gradient_stride, row, exists, HAS_ENTROPY_GRADIENT, False
            )
            if HAS_SCALE and not HAS_SOFTCAP:  # all columns of a row have one derivative
                softmax_factor *= row_scale
                target_factor *= row_scale
                entropy_factor *= row_scale
            term = softmax_term(
                z,
                row_max[:, None],
                log_sum[:, None],
                softmax_factor[:, None],
                entropy_factor[:, None],
                HAS_ENTROPY_GRADIENT,
            )
            is_target = columns == target_column[:, None]
            grad = logit_gradient(
                term, is_target, target_factor[:, None], jacobian, HAS_SOFTCAP, 0.0, None, columns, None, False
            )
            grad = tl.where(valid[:, None], grad, 0.0)
            out_desc.store([row_start, col_start], grad.to(out_desc.dtype))
        else:
            target_logit = tl.sum(tl.where(columns == target_column[:, None], z, 0.0), axis=1)
            tl.store(target_logit_ptr + row, target_logit, mask=target_in_tile)
            if HAS_TAIL:
                z = tl.where(present, z, float("-inf"))
            largest = tl.max(z, axis=1)
            # If all logits are -inf, the reference is 0, because -inf - -inf is NaN.
            reference = tl.where(largest == float("-inf"), 0.0, largest)
            exps = tl.exp2((z - reference[:, None]) * LOG2_E)
            tl.store(partial_ptr + place, largest, mask=exists)
            plane = tl.cdiv(vocab_size, COLS).to(tl.int64) * rows
            place += plane
            tl.store(partial_ptr + place, tl.sum(exps, axis=1), mask=exists)
            if words_ptr is not None:
                threshold = tl.load(threshold_ptr + row, mask=exists, other=float("inf"))
                seeds = tl.load(seeds_ptr + row, mask=exists, other=0)
                # The factor is finite: infinity times an exponential of 0 would be NaN. Columns that are no classes
                # have exponentials of 0.
                ratio = exps * tl.exp2(tl.minimum((reference - threshold) * LOG2_E, 126.0))[:, None]
                marks = random_mantissa(seeds[:, None], column_start + columns + first_class) < ratio + 1.0
                word = (column_start + col_start) // _WORD + tl.arange(0, COLS // _WORD)
                out = words_ptr + row.to(tl.int64)[:, None] * words_stride + word[None, :]
                tl.store(out, pack_marks(marks, ROWS, COLS), mask=exists[:, None])
            if entropy_ptr is not None:
                place += plane
                terms = exps * tl.maximum(z - reference[:, None], _LEAST_LOGPROB)  # 0 if z is -inf
                tl.store(partial_ptr + place, tl.sum(terms, axis=1), mask=exists)
            if argmax_ptr is not None:
                place += plane
                # The lowest column wins a tie. Exact: an index below 2^24 is a float32.
                found = tl.min(tl.where(z == largest[:, None], column_start + columns, _NO_COLUMN), axis=1)
                tl.store(partial_ptr + place, found.to(tl.float32), mask=exists)
            if mean_logit_ptr is not None:
                place += plane
                if HAS_TAIL:
                    z = tl.where(present, z, 0.0)
                tl.store(partial_ptr + place, tl.sum(z, axis=1), mask=exists)


@triton.jit(do_not_specialize=["rows", "blocks", "vocab_size", "ignore_index", "normalizer_stride"])
def finish_statistics_kernel(
    partial_ptr,  # (planes, blocks, rows), output of `product_kernel`
    target_logit_ptr,  # (rows,), output of `product_kernel`
    target_ptr,  # (rows,) int64
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    loss_ptr,  # (rows,); from here on output
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    entropy_ptr,  # (rows,)
    argmax_ptr,  # (rows,) int64
    mean_logit_ptr,  # (rows,)
    normalizer_stride,
    rows,
    blocks,
    vocab_size,
    ignore_index,
    z_loss: tl.float64,
    HAS_Z_LOSS: tl.constexpr,
    IS_SHARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    z_loss = tl.full((), z_loss, tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    largest = tl.full((BLOCKS, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((BLOCKS, ROWS), tl.float32)
    plane = blocks.to(tl.int64) * rows
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & exists[None, :]
        place = block.to(tl.int64) * rows + row[None, :]
        more = tl.load(partial_ptr + place, mask=mask, other=float("-inf"))
        sums = tl.load(partial_ptr + plane + place, mask=mask, other=0.0)
        largest, total = softmax_merge(largest, total, more, sums)
    row_max, row_sum = tl.reduce((largest, total), 0, softmax_merge)
    target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    target_logit = tl.load(target_logit_ptr + row, mask=exists & in_range, other=0.0)
    log_sum = tl.log(tl.where(valid, row_sum, 1.0))
    # (m - z_y) first, then log_sum: exact if all logits share a large offset. NaN for targets out of range.
    nll = tl.where(in_range, log_sum + (row_max - target_logit), float("nan"))
    finish_fused_rows(
        row=row, exists=exists, target=target, valid=valid, in_range=in_range, nll=nll, offset=row_max, log_sum=log_sum,
        class_weight_ptr=class_weight_ptr, token_weight_ptr=token_weight_ptr, upstream_ptr=None, scales_ptr=None,
        loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr, normalizer_ptr=normalizer_ptr, logprob_ptr=logprob_ptr,
        upstream_stride=0, normalizer_stride=normalizer_stride, z_loss=z_loss, HAS_Z_LOSS=HAS_Z_LOSS,
        IS_SHARD=IS_SHARD,
    )  # fmt: skip
    if entropy_ptr is not None or argmax_ptr is not None or mean_logit_ptr is not None:
        zero = tl.where(row_max == float("-inf"), 0.0, row_max)[None, :]
        entropy_sum = tl.zeros((BLOCKS, ROWS), tl.float32)
        lowest = tl.full((BLOCKS, ROWS), float("inf"), tl.float32)
        logit_sum = tl.zeros((BLOCKS, ROWS), tl.float32)
        for start in range(0, blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)[:, None]
            mask = (block < blocks) & exists[None, :]
            place = block.to(tl.int64) * rows + row[None, :]
            block_max = tl.load(partial_ptr + place, mask=mask, other=float("-inf"))
            shift = block_max - zero
            decay = tl.exp2(shift * LOG2_E)
            place += plane
            if entropy_ptr is not None:
                sums = tl.load(partial_ptr + place, mask=mask, other=0.0)
                place += plane
                terms = tl.load(partial_ptr + place, mask=mask, other=0.0)
                entropy_sum += decay * (terms + tl.maximum(shift, _LEAST_LOGPROB) * sums)
            if argmax_ptr is not None:
                place += plane
                found = tl.load(partial_ptr + place, mask=mask, other=float("inf"))
                lowest = tl.minimum(lowest, tl.where(block_max == row_max[None, :], found, float("inf")))
            if mean_logit_ptr is not None:
                place += plane
                logit_sum += tl.load(partial_ptr + place, mask=mask, other=0.0)
        if entropy_ptr is not None:
            entropy = log_sum - tl.sum(entropy_sum, axis=0) / row_sum
            tl.store(entropy_ptr + row, tl.where(valid, entropy, 0.0), mask=exists)
        if argmax_ptr is not None:
            found = tl.min(lowest, axis=0)
            found = tl.where(found == float("inf"), 0.0, found)  # for a row of NaN
            tl.store(argmax_ptr + row, tl.where(valid, found.to(tl.int64), -1), mask=exists)
        if mean_logit_ptr is not None:
            mean = tl.sum(logit_sum, axis=0) / vocab_size
            tl.store(mean_logit_ptr + row, tl.where(valid, mean, 0.0), mask=exists)


def has_descriptor_layout(x: Tensor) -> bool:
    """Return True if a tensor descriptor can describe the matrix."""
    stride = x.stride(0)
    aligned = x.data_ptr() % DESCRIPTOR_BYTES == 0 and stride * x.element_size() % DESCRIPTOR_BYTES == 0
    return aligned and x.stride(1) == 1 and stride >= x.shape[1]


def align_for_descriptor(x: Tensor) -> Tensor:
    """Return the matrix, or a copy that a descriptor can describe."""
    return x if has_descriptor_layout(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def classes_per_launch(weight: Tensor) -> int:
    """Return the number of classes of a launch: all, or few if the weight has to be copied, to keep the copy small."""
    if has_descriptor_layout(weight):
        return len(weight)
    return max(1, COPY_BYTES // (weight.shape[1] * weight.element_size()) // COLS) * COLS


def fused_statistics(x: Tensor, weight: Tensor, call: StatisticsCall, marks: Marks | None = None) -> None:
    planes, blocks = num_partial_statistics(call.spec), triton.cdiv(len(weight), COLS)
    partial = call.out.loss.new_empty(planes, blocks, len(x))
    target_logit = call.out.loss.new_empty(len(x))
    run(_statistics, align_for_descriptor(x), weight, call, partial, target_logit, marks)


def _statistics(
    x: Tensor,
    weight: Tensor,
    call: StatisticsCall,
    partial: Tensor,  # (planes, blocks of classes, rows)
    target_logit: Tensor,  # (rows,)
    marks: Marks | None,
) -> Iterator[Launch]:
    vocab_size, (_, blocks, num_rows) = len(weight), partial.shape
    for tile in tiles(0, vocab_size, vocab_size, classes_per_launch(weight)):
        tile_call = call._replace(tile=tile)
        yield launch(x, weight[tile.columns], tile_call, partial=partial, target_logit=target_logit, marks=marks)
    yield build_launch(
        finish_statistics_kernel,
        (triton.cdiv(num_rows, FINISH_ROWS),),
        call,
        {"IS_SHARD": call.tile.is_shard, "ROWS": FINISH_ROWS, "BLOCKS": FINISH_BLOCKS},
        LOGIT_FIELDS,
        partial=partial,
        target_logit=target_logit,
        blocks=blocks,
    )


def tiles(first: int, end: int, vocab_size: int, max_cols: int) -> list[TileClasses]:
    """Return tiles of the classes from `first` to `end`, with at most `max_cols` classes each.

    The tiles have full blocks, except the last tile, which has the rest: only this tile needs a mask, which costs up
    to 6%.
    """
    full_end = first + (end - first) // COLS * COLS
    borders = sorted({*range(first, full_end, max_cols), first, full_end, end})
    return [TileClasses(start, stop - start, vocab_size, stop - start) for start, stop in pairwise(borders)]


def fused_gradient(x: Tensor, weight: Tensor, grad: Tensor, call: GradientCall) -> None:
    run(_gradient, align_for_descriptor(x), weight, grad, call)


def _gradient(x: Tensor, weight: Tensor, grad: Tensor, call: GradientCall) -> Iterator[Launch]:
    step, tile = classes_per_launch(weight), call.tile
    for start in range(0, tile.cols, step):
        cols = slice(start, min(start + step, tile.cols))
        tile_call = call._replace(tile=tile._replace(start=tile.start + start, cols=cols.stop - start))
        yield launch(x, weight[cols], tile_call, grad[:, cols])


def launch(
    x: Tensor,  # (rows, hidden)
    weight: Tensor,  # (cols, hidden)
    call: TileCall,
    out: Tensor | None = None,  # (rows, cols) the gradient or the exponentials; None: statistics
    *,
    partial: Tensor | None = None,
    target_logit: Tensor | None = None,
    reference: Tensor | None = None,  # given: exponentials
    work: Tensor | None = None,
    marks: Marks | None = None,
) -> Launch:
    """Return a launch of `product_kernel`. If a descriptor cannot describe `weight`, the weight is copied."""
    x_desc = TensorDescriptor.from_tensor(x, [ROWS, DEPTH])
    weight_desc = TensorDescriptor.from_tensor(align_for_descriptor(weight), [COLS, DEPTH])
    out_desc = None if out is None else TensorDescriptor.from_tensor(out, [ROWS, COLS])
    programs = device_record(x.device).multiprocessors
    options = {
        # A gradient's store needs no mask.
        "HAS_TAIL": call.tile.cols % COLS != 0 and not isinstance(call, GradientCall),
        "ROWS": ROWS,
        "COLS": COLS,
        "DEPTH": DEPTH,
        "GROUP": GROUP,
        "PROGRAMS": programs,
        "num_stages": STAGES,
        "num_warps": WARPS,
        "LAUNCH_NEXT": overlap_options(x.device)["OVERLAP"],  # without launch_pdl: this kernel does not start early
    }
    return build_launch(
        product_kernel,
        (programs,),
        call,
        options,
        ("z_loss",),
        x_desc=x_desc,
        weight_desc=weight_desc,
        out_desc=out_desc,
        partial=partial,
        target_logit=target_logit,
        reference=reference,
        work=work,
        **(_NO_MARKS if marks is None else marks._asdict()),
        hidden=x.shape[1],
    )
