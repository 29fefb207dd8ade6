"""The gradient of the head from exponentials, and the targets' own terms, in one sum.

    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

(`exponentials.py` says what E, f and t are.) For a class that is often a target both sums are large, and nearly equal
in a model that has learned how frequent it is: they have to meet before they are rounded. So this is a product with an
epilogue, too: while a block is in float32 registers, the targets among its classes are added, as products with a matrix
that has one entry in each column. That entry, t, is the sum of two bfloat16 numbers, which it is to 2^-17.

From gradients of float16 logits, which are multiples of a unit, dW is the product divided by the unit, which the
epilogue does before it rounds. The vendor's products have no such epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends.triton.math import balanced_group, block_in_groups


@triton.jit
def _load_targets(target_ptr, row_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index, columns, hidden):
    """Some of the sorted rows: their targets, factors and inputs."""
    target = tl.load(target_ptr + number, mask=number < stop, other=-1)
    counts = (number < stop) & (target != ignore_index)
    row = tl.load(row_ptr + number, mask=counts, other=0)
    factor = tl.load(factor_ptr + number, mask=counts, other=0.0)
    mask = counts[:, None] & (columns < hidden)[None, :]
    return target, factor, tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_targets(a, class_start, target, factor, x):
    """`a`, a block of (classes, columns), and the terms of these rows."""
    classes = class_start + tl.arange(0, a.shape[0])
    entries = tl.where(classes[:, None] == target[None, :], factor[None, :], 0.0)
    high = entries.to(x.dtype)
    low = (entries - high.to(tl.float32)).to(x.dtype)
    return tl.dot(low, x, tl.dot(high, x, a))


@triton.jit(do_not_specialize=["rows", "first_class", "classes", "ignore_index"])
def weight_gradient_kernel(
    exps_desc,  # (rows, classes)
    scaled_desc,  # (rows, hidden) f * X
    grad_desc,  # (classes, hidden)
    x_ptr,  # (N, hidden), row stride x_stride
    target_ptr,  # (rows,) int32, ascending
    row_ptr,  # (rows,) int64: rows of x, in that order
    factor_ptr,  # (rows,) t, in that order
    start_ptr,  # (blocks of classes + 1,) int32: the first of the sorted rows with a target in a block, or behind it
    gradient_scale_ptr,  # () with HAS_GRADIENT_SCALE
    x_stride,
    rows,
    hidden,
    first_class,
    classes,
    ignore_index,
    HAS_TARGETS: tl.constexpr,
    HAS_GRADIENT_SCALE: tl.constexpr,
    CLASSES: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TARGETS: tl.constexpr,  # at a time
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    class_blocks = tl.cdiv(classes, CLASSES)
    col_blocks = tl.cdiv(hidden, COLS)
    group = balanced_group(class_blocks, GROUP)
    group_blocks = group * col_blocks
    # Flattened loops are 1 to 3% faster, and a loop over targets does not allow them.
    for block in tl.range(tl.program_id(0), class_blocks * col_blocks, PROGRAMS, flatten=not HAS_TARGETS):
        class_block, col_block = block_in_groups(block, class_blocks, group_blocks, group)
        class_start = class_block * CLASSES
        col_start = col_block * COLS
        if HAS_TARGETS:
            columns = col_start + tl.arange(0, COLS)
            # Loaded ahead of the product, which takes longer: usually these are all.
            start = tl.load(start_ptr + class_block)
            stop = tl.load(start_ptr + class_block + 1)
            number = start + tl.arange(0, TARGETS)
            target, factor, x = _load_targets(
                target_ptr, row_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index, columns, hidden
            )

        a = tl.zeros((CLASSES, COLS), tl.float32)
        for k in range(0, rows, DEPTH):
            a = tl.dot(exps_desc.load([k, class_start]).T, scaled_desc.load([k, col_start]), a)

        if HAS_TARGETS:
            if start < stop:
                a = _add_targets(a, first_class + class_start, target, factor, x)
            for more in range(start + TARGETS, stop, TARGETS):
                number = more + tl.arange(0, TARGETS)
                target, factor, x = _load_targets(
                    target_ptr, row_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index, columns, hidden
                )
                a = _add_targets(a, first_class + class_start, target, factor, x)
        if HAS_GRADIENT_SCALE:
            a *= 1.0 / tl.load(gradient_scale_ptr)
        grad_desc.store([class_start, col_start], a.to(grad_desc.dtype))
