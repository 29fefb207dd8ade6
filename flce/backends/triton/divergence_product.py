"""Fused products for a divergence of a student from a teacher: the logits of both models stay in registers.

As in `product.py`. A block has the logits of the same tokens and classes of both models, which one loop sums: the
operands of the smaller hidden size are 0 behind its end. The mixture of "jsd" needs more registers than there are, so
its logits are in memory. `TritonBackend` calls this module.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends import contract
from flce.backends.contract import TeacherCall, TileCall
from flce.backends.triton.divergence import (
    FORWARD,
    launch_arguments,
    store_row_results,
)
from flce.backends.triton.launch import Launch, build_launch
from flce.backends.triton.math import (
    LOG2_E,
    balanced_group,
    block_in_groups,
    load_normalizer,
    load_row_gradient,
    logit_gradient,
    softmax_merge,
    transform,
)
from flce.backends.triton.product import (
    DEPTH,
    FINISH_BLOCKS,
    FINISH_ROWS,
    GROUP,
    ROWS,
    STAGES,
    WARPS,
    align_for_descriptor,
    classes_per_launch,
    tiles,
)
from flce.backends.triton.replay import run
from flce.core.devices import device_record

COLS = contract.DIVERGENCE_PRODUCT_BLOCK

_LEAST_LOGPROB = tl.constexpr(contract.LEAST_LOGPROB)
_DIVERGENCE_FACTOR = tl.constexpr(contract.DIVERGENCE_FACTOR)


@triton.jit(
    do_not_specialize=[
        "ignore_index", "column_start", "normalizer_stride", "row_gradient_stride", "teacher_rows_stride", "rows",
        "cols", "vocab_size",
    ]
)  # fmt: skip
def divergence_product_kernel(
    x_desc,  # (rows, hidden size of the student)
    weight_desc,  # (cols, hidden size of the student)
    teacher_x_desc,  # (rows, hidden size of the teacher)
    teacher_weight_desc,  # (cols, hidden size of the teacher)
    out_desc,  # (rows, cols) the gradient; otherwise x_desc, unused
    # (planes, blocks of all classes, rows): the largest z and the sum of exp(z - largest) of the student, the same of
    # the teacher, the sum of the terms of the divergence, the sum for the entropy.
    partial_ptr,
    target_logit_ptr,  # (rows,): written if the target is one of the columns
    target_ptr,  # (rows,) int64
    bias_ptr,  # (cols,) of these columns
    teacher_bias_ptr,  # (cols,) of these columns
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride
    row_gradient_ptr,  # (slots, rows), row stride row_gradient_stride
    normalizer_stride,
    teacher_rows_stride,
    row_gradient_stride,
    rows,
    cols,
    hidden,  # the larger hidden size
    column_start,  # the class of column 0
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    teacher_scale: tl.float64,
    teacher_cap: tl.float64,
    GRADIENT: tl.constexpr,  # False: statistics
    KIND: tl.constexpr,  # index into `problem.DIVERGENCES`
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    OVERLAP: tl.constexpr,  # the next kernel may start on multiprocessors that this kernel leaves idle
    HAS_TAIL: tl.constexpr,  # cols is not divisible by COLS
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    scale = tl.full((), scale, tl.float32)
    cap = tl.full((), cap, tl.float32)
    teacher_scale = tl.full((), teacher_scale, tl.float32)
    teacher_cap = tl.full((), teacher_cap, tl.float32)
    row_blocks = tl.cdiv(rows, ROWS)
    col_blocks = tl.cdiv(cols, COLS)
    group = balanced_group(row_blocks, GROUP)
    group_blocks = group * col_blocks
    for block in tl.range(tl.program_id(0), row_blocks * col_blocks, PROGRAMS, flatten=True):
        row_block, col_block = block_in_groups(block, row_blocks, group_blocks, group)
        row_start = row_block * ROWS
        col_start = col_block * COLS
        a = tl.zeros((ROWS, COLS), tl.float32)
        b = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, hidden, DEPTH):
            a = tl.dot(x_desc.load([row_start, k]), weight_desc.load([col_start, k]).T, a)
            b = tl.dot(teacher_x_desc.load([row_start, k]), teacher_weight_desc.load([col_start, k]).T, b)

        row = row_start + tl.arange(0, ROWS)
        exists = row < rows
        column = col_start + tl.arange(0, COLS)
        columns = column[None, :]
        present = columns < cols
        if HAS_BIAS:
            a += tl.load(bias_ptr + column, mask=column < cols, other=0.0).to(tl.float32)[None, :]
        if HAS_TEACHER_BIAS:
            b += tl.load(teacher_bias_ptr + column, mask=column < cols, other=0.0).to(tl.float32)[None, :]
        z, jacobian = transform(a, bias_ptr, columns, present, scale, cap, tl.float32, HAS_SCALE, False, HAS_SOFTCAP)
        t, _teacher_jacobian = transform(
            b, bias_ptr, columns, present, teacher_scale, teacher_cap, tl.float32, HAS_TEACHER_SCALE, False,
            HAS_TEACHER_SOFTCAP,
        )  # fmt: skip
        target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
        valid = target != ignore_index
        target_column = target - column_start
        target_in_tile = valid & (target_column >= col_start) & (target_column < tl.minimum(col_start + COLS, cols))
        target_column = tl.where(target_in_tile, target_column, -1).to(tl.int32)
        is_target = columns == target_column[:, None]
        place = (column_start // COLS + col_block).to(tl.int64) * rows + row
        plane = tl.cdiv(vocab_size, COLS).to(tl.int64) * rows
        if GRADIENT:
            offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, exists)
            teacher_offset, teacher_log_sum = load_normalizer(teacher_rows_ptr, teacher_rows_stride, row, exists)
            s = (z - offset[:, None]) - log_sum[:, None]
            t = (t - teacher_offset[:, None]) - teacher_log_sum[:, None]
            p = tl.exp2(s * LOG2_E)
            softmax_factor, target_factor, _classes_factor, entropy_factor = load_row_gradient(
                row_gradient_ptr, row_gradient_stride, row, exists, True
            )
            factor_ptr = row_gradient_ptr + _DIVERGENCE_FACTOR * row_gradient_stride + row
            divergence_factor = tl.load(factor_ptr, mask=exists, other=0.0)[:, None]
            factor = softmax_factor[:, None] - entropy_factor[:, None] * tl.maximum(s, _LEAST_LOGPROB)
            if KIND == FORWARD:
                term = factor * p - divergence_factor * tl.exp2(t * LOG2_E)
            else:
                term = tl.where(p > 0.0, (factor + divergence_factor * (s - t)) * p, 0.0)
            grad = logit_gradient(term, is_target, target_factor[:, None], jacobian, HAS_SCALE or HAS_SOFTCAP)
            out_desc.store([row_start, col_start], tl.where(valid[:, None], grad, 0.0).to(out_desc.dtype))
        else:
            tl.store(target_logit_ptr + row, tl.sum(tl.where(is_target, z, 0.0), axis=1), mask=target_in_tile)
            if HAS_TAIL:
                z = tl.where(present, z, float("-inf"))
                t = tl.where(present, t, float("-inf"))
            largest = tl.max(z, axis=1)
            teacher_largest = tl.max(t, axis=1)
            tl.store(partial_ptr + place, largest, mask=exists)
            tl.store(partial_ptr + 2 * plane + place, teacher_largest, mask=exists)
            # If all logits are -inf, the reference is 0, because -inf - -inf is NaN.
            z -= tl.where(largest == float("-inf"), 0.0, largest)[:, None]
            t -= tl.where(teacher_largest == float("-inf"), 0.0, teacher_largest)[:, None]
            exps = tl.exp2(z * LOG2_E)
            teacher_exps = tl.exp2(t * LOG2_E)
            tl.store(partial_ptr + plane + place, tl.sum(exps, axis=1), mask=exists)
            tl.store(partial_ptr + 3 * plane + place, tl.sum(teacher_exps, axis=1), mask=exists)
            if KIND == FORWARD:
                terms = tl.where(teacher_exps > 0.0, teacher_exps * (t - z), 0.0)
            else:
                terms = tl.where(exps > 0.0, exps * (z - t), 0.0)
            tl.store(partial_ptr + 4 * plane + place, tl.sum(terms, axis=1), mask=exists)
            if WANT_ENTROPY:
                terms = tl.where(exps > 0.0, exps * z, 0.0)
                tl.store(partial_ptr + 5 * plane + place, tl.sum(terms, axis=1), mask=exists)


@triton.jit(
    do_not_specialize=["rows", "blocks", "vocab_size", "ignore_index", "normalizer_stride", "teacher_rows_stride"]
)
def finish_divergence_kernel(
    partial_ptr,  # (planes, blocks, rows), output of `divergence_product_kernel`
    target_logit_ptr,  # (rows,), output of `divergence_product_kernel`
    target_ptr,  # (rows,) int64
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride; from here on output
    logprob_ptr,  # (rows,)
    entropy_ptr,  # (rows,)
    teacher_rows_ptr,  # (slots, rows), row stride teacher_rows_stride
    normalizer_stride,
    teacher_rows_stride,
    rows,
    blocks,
    vocab_size,
    ignore_index,
    KIND: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    largest = tl.full((BLOCKS, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((BLOCKS, ROWS), tl.float32)
    teacher_largest, teacher_total, cross_sum, entropy_sum = largest, total, total, total
    plane = blocks.to(tl.int64) * rows
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & exists[None, :]
        place = partial_ptr + block.to(tl.int64) * rows + row[None, :]
        new, sums = tl.load(place, mask=mask, other=float("-inf")), tl.load(place + plane, mask=mask, other=0.0)
        largest, total = softmax_merge(largest, total, new, sums)
        place += 2 * plane
        new, sums = tl.load(place, mask=mask, other=float("-inf")), tl.load(place + plane, mask=mask, other=0.0)
        teacher_largest, teacher_total = softmax_merge(teacher_largest, teacher_total, new, sums)
    row_max, row_sum = tl.reduce((largest, total), 0, softmax_merge)
    teacher_max, teacher_sum = tl.reduce((teacher_largest, teacher_total), 0, softmax_merge)
    zero = tl.where(row_max == float("-inf"), 0.0, row_max)[None, :]
    teacher_zero = tl.where(teacher_max == float("-inf"), 0.0, teacher_max)[None, :]
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & exists[None, :]
        place = partial_ptr + block.to(tl.int64) * rows + row[None, :]
        # Terms are relative to the largest logits of their block. Here they become relative to those of the row.
        shift = tl.load(place, mask=mask, other=float("-inf")) - zero
        teacher_shift = tl.load(place + 2 * plane, mask=mask, other=float("-inf")) - teacher_zero
        sums = tl.load(place + plane, mask=mask, other=0.0)
        decay = tl.exp2(shift * LOG2_E)
        if KIND == FORWARD:
            gap, weight = teacher_shift - shift, tl.exp2(teacher_shift * LOG2_E)
            gap *= tl.load(place + 3 * plane, mask=mask, other=0.0)
        else:
            gap, weight = (shift - teacher_shift) * sums, decay
        terms = tl.load(place + 4 * plane, mask=mask, other=0.0) + gap
        cross_sum += tl.where(weight > 0.0, weight * terms, 0.0)
        if WANT_ENTROPY:
            terms = tl.load(place + 5 * plane, mask=mask, other=0.0) + shift * sums
            entropy_sum += tl.where(decay > 0.0, decay * terms, 0.0)
    target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    target_logit = tl.load(target_logit_ptr + row, mask=exists & in_range, other=0.0)
    none = tl.zeros_like(row_max)  # the weighted sums are relative to the largest logits
    store_row_results(
        row, exists, valid, in_range, target_logit, row_max, row_sum, teacher_max, teacher_sum, none, none,
        tl.sum(cross_sum, axis=0), tl.sum(entropy_sum, axis=0), normalizer_ptr, logprob_ptr, entropy_ptr,
        teacher_rows_ptr, normalizer_stride, teacher_rows_stride, KIND, WANT_LOGPROB, WANT_ENTROPY,
    )  # fmt: skip


def fused_divergence_statistics(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, call: TileCall, teacher: TeacherCall
) -> None:
    assert call.out is not None
    planes = 6 if call.out.entropy is not None else 5
    partial = teacher.rows.new_empty(planes, triton.cdiv(len(weight), COLS), len(x))
    target_logit, aligned = teacher.rows.new_empty(len(x)), [align_for_descriptor(t) for t in (x, teacher_x)]
    run(_statistics, aligned[0], weight, aligned[1], teacher_weight, call, teacher, partial, target_logit)


def fused_divergence_gradient(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, grad: Tensor, call: TileCall,
    teacher: TeacherCall,
) -> None:  # fmt: skip
    aligned = [align_for_descriptor(t) for t in (x, teacher_x)]
    run(_gradient, aligned[0], weight, aligned[1], teacher_weight, grad, call, teacher)


def _statistics(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, call: TileCall, teacher: TeacherCall,
    partial: Tensor, target_logit: Tensor,
) -> Iterator[Launch]:  # fmt: skip
    buffers = {"partial": partial, "target_logit": target_logit}
    yield from _launches(x, weight, teacher_x, teacher_weight, None, call, teacher, buffers)
    options, arguments = launch_arguments(x, call, teacher, overlap=False)
    sizes = {"KIND": options["KIND"], "ROWS": FINISH_ROWS, "BLOCKS": FINISH_BLOCKS}
    buffers["teacher_rows"] = arguments["teacher_rows"]
    grid, blocks = (triton.cdiv(len(x), FINISH_ROWS),), partial.shape[1]
    yield build_launch(finish_divergence_kernel, grid, call, sizes, blocks=blocks, **buffers)


def _gradient(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, grad: Tensor, call: TileCall,
    teacher: TeacherCall,
) -> Iterator[Launch]:  # fmt: skip
    return _launches(x, weight, teacher_x, teacher_weight, grad, call, teacher, {})


def _launches(
    x: Tensor,  # (rows, hidden)
    weight: Tensor,  # (cols, hidden) of the tile of the call
    teacher_x: Tensor,
    teacher_weight: Tensor,
    grad: Tensor | None,  # (rows, cols)
    call: TileCall,
    teacher: TeacherCall,
    buffers: dict[str, Tensor],
) -> Iterator[Launch]:
    """Yield launches of `divergence_product_kernel` for all classes of a tile. A weight that a descriptor cannot
    describe is copied in parts."""
    first, size, vocab_size = call.tile.start, call.tile.cols, call.tile.vocab_size
    for tile in tiles(first, first + size, vocab_size, min(map(classes_per_launch, (weight, teacher_weight)))):
        part = slice(tile.start - first, tile.start - first + tile.cols)
        out = None if grad is None else grad[:, part]
        options, arguments = launch_arguments(x, call._replace(tile=tile), teacher, overlap=False)
        descriptors = {
            "x_desc": TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
            "weight_desc": TensorDescriptor.from_tensor(align_for_descriptor(weight[part]), [COLS, DEPTH]),
            "teacher_x_desc": TensorDescriptor.from_tensor(teacher_x, [ROWS, DEPTH]),
            "teacher_weight_desc": TensorDescriptor.from_tensor(
                align_for_descriptor(teacher_weight[part]), [COLS, DEPTH]
            ),
        }
        descriptors["out_desc"] = (
            descriptors["x_desc"] if out is None else TensorDescriptor.from_tensor(out, [ROWS, COLS])
        )
        programs = device_record(x.device).multiprocessors
        options |= {
            "GRADIENT": grad is not None,
            "HAS_TAIL": tile.cols % COLS != 0 and grad is None,  # a gradient's store needs no mask
            "ROWS": ROWS,
            "COLS": COLS,
            "DEPTH": DEPTH,
            "GROUP": GROUP,
            "PROGRAMS": programs,
            "num_stages": STAGES,
            "num_warps": WARPS,
        }
        yield build_launch(
            divergence_product_kernel, (programs,), call._replace(tile=tile), options, **descriptors, **arguments,
            **{"partial": None, "target_logit": None, **buffers}, hidden=max(x.shape[1], teacher_x.shape[1]),
        )  # fmt: skip
