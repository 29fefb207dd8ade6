"""The kernel for the gradient of the head: a matrix product whose epilogue adds the targets' own terms or divides.

`exponentials_launch` launches it: `Backend.weight_gradient` and `divided_weight_gradient`.

    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

(`exponentials.py` defines E, f and t.) If a class is often a target, both sums are large, and nearly equal in a model
that has learned the frequency of the class. Therefore the sums are added before they are rounded: while a block is in
float32 registers, the terms of the targets among its classes are added, as products with a matrix that has one entry in
each column. This entry, t, is represented by the sum of two bfloat16 numbers, with an error of 2^-17.

Gradients of float16 logits are multiples of a unit. Then dW is the product divided by the unit. The epilogue divides
before it rounds, which the vendor's products cannot do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends.triton.math import balanced_group, block_in_groups


@triton.jit
def _load_targets(
    target_ptr, row_ptr, order_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index, columns, hidden
):
    """Return targets, factors and inputs of some of the sorted rows."""
    target = tl.load(target_ptr + number, mask=number < stop, other=-1)
    counts = (number < stop) & (target != ignore_index)
    row = tl.load(row_ptr + number, mask=counts, other=0)
    index = tl.load(order_ptr + number, mask=counts, other=0)
    factor = tl.load(factor_ptr + index, mask=counts, other=0.0)
    mask = counts[:, None] & (columns < hidden)[None, :]
    return target, factor, tl.load(x_ptr + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_targets(a, class_start, target, factor, x):
    """Return `a`, a block of (classes, columns), plus the terms of the rows."""
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
    row_ptr,  # (rows,) int64: rows of x, in the order of target_ptr
    order_ptr,  # (rows,) int64: indices of factor_ptr, in the order of target_ptr
    factor_ptr,  # (rows,) t
    start_ptr,  # (blocks of classes + 1,) int32: the first sorted row with a target in or behind a block
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
    TARGETS: tl.constexpr,  # per step
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    class_blocks = tl.cdiv(classes, CLASSES)
    col_blocks = tl.cdiv(hidden, COLS)
    group = balanced_group(class_blocks, GROUP)
    group_blocks = group * col_blocks
    # A flattened loop is 1 to 3% faster, but cannot contain the loop over targets.
    for block in tl.range(tl.program_id(0), class_blocks * col_blocks, PROGRAMS, flatten=not HAS_TARGETS):
        class_block, col_block = block_in_groups(block, class_blocks, group_blocks, group)
        class_start = class_block * CLASSES
        col_start = col_block * COLS
        if HAS_TARGETS:
            columns = col_start + tl.arange(0, COLS)
            # Load the first targets before the product, which hides the latency. Usually there are no others.
            start = tl.load(start_ptr + class_block)
            stop = tl.load(start_ptr + class_block + 1)
            number = start + tl.arange(0, TARGETS)
            target, factor, x = _load_targets(
                target_ptr, row_ptr, order_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index, columns, hidden
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
                    target_ptr, row_ptr, order_ptr, factor_ptr, x_ptr, x_stride, number, stop, ignore_index,
                    columns, hidden,
                )  # fmt: skip
                a = _add_targets(a, first_class + class_start, target, factor, x)
        if HAS_GRADIENT_SCALE:
            a *= 1.0 / tl.load(gradient_scale_ptr)
        grad_desc.store([class_start, col_start], a.to(grad_desc.dtype))
