"""Kernels for the gradient of the head: a matrix product that also keeps what its rounding removes, or divides.

`exponentials_launch` launches them: `Backend.weight_gradient` and `unscaled_weight_gradient`.

    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

(`exponentials.py` defines E, f and t.) If a class is often a target, both sums are large, and nearly equal in a model
that has learned the frequency of the class. Therefore dW must not be rounded before the second sum is added. The
product writes dW rounded to bfloat16 and, only for the classes that are targets, the residual: the difference to the
float32 sum, also in bfloat16. Both together have an error of 2^-17. `add_to_targets_kernel` then adds the second sum to
them, and rounds once.

An epilogue that adds the second sum itself needs a loop, so the operands of the next block are not loaded meanwhile.
The time, relative to the vendor's product without targets (H100; targets are random, or their frequency is 1/rank):

    head                            4096 x 4096 x 128256    16384 x 1024 x 151936    2048 x 4096 x 128256
    targets added in the epilogue   1.06 to 1.09, 1.14      1.05 to 1.12, 1.22       1.10 to 1.12, 1.12 to 1.14
    residuals                       1.03                    1.02                     1.02 to 1.03, 1.02

Gradients of float16 logits are multiples of a unit. Then dW is the product divided by the unit. The epilogue divides
before it rounds, which the vendor's products cannot do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flce.backends.triton.math import balanced_group, block_in_groups

# Arguments: two neighbouring 16-bit numbers, the address of their row or 0, and their columns or -1. `tl.store` would
# convert the block to another layout first, through 128 KiB of shared memory that are not left.
_STORE_PAIR = tl.constexpr(
    """{
    .reg .pred stored;
    .reg .b64 address;
    setp.ne.s64 stored, $2, 0;
    setp.ge.and.s32 stored, $4, 0, stored;
    mad.wide.s32 address, $4, 2, $2;
    @stored st.global.b32 [address], $1;
    mov.b32 $0, 0;
    }"""
)


@triton.jit
def _store_residuals(residual, residual_ptr, slot, columns, hidden, INTERPRETED: tl.constexpr):
    """Store the rows of `residual` that have a slot."""
    exists = columns < hidden
    if INTERPRETED:
        place = slot.to(tl.int64)[:, None] * hidden + columns[None, :]
        tl.store(residual_ptr + place, residual, mask=(slot >= 0)[:, None] & exists[None, :])
    else:
        address = tl.where(slot >= 0, residual_ptr.to(tl.int64) + slot.to(tl.int64) * hidden * 2, 0)
        pairs = [residual, address[:, None], tl.where(exists, columns, -1)[None, :]]
        tl.inline_asm_elementwise(_STORE_PAIR, "=r,r,l,l,r,r", pairs, dtype=tl.int16, is_pure=False, pack=2)


@triton.jit(do_not_specialize=["rows", "classes"])
def weight_gradient_kernel(
    exps_desc,  # (rows, classes)
    scaled_desc,  # (rows, hidden) f * X
    grad_desc,  # (classes, hidden)
    slot_ptr,  # (classes,) int32: the row of `residual` of each class that is a target, or -1
    residual_ptr,  # (rows, hidden), contiguous: output
    gradient_scale_ptr,  # () with HAS_GRADIENT_SCALE
    rows,
    hidden,
    classes,
    HAS_SLOT: tl.constexpr,
    HAS_GRADIENT_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CLASSES: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    class_blocks = tl.cdiv(classes, CLASSES)
    col_blocks = tl.cdiv(hidden, COLS)
    group = balanced_group(class_blocks, GROUP)
    group_blocks = group * col_blocks
    for block in tl.range(tl.program_id(0), class_blocks * col_blocks, PROGRAMS, flatten=True):
        class_block, col_block = block_in_groups(block, class_blocks, group_blocks, group)
        class_start = class_block * CLASSES
        col_start = col_block * COLS
        a = tl.zeros((CLASSES, COLS), tl.float32)
        for k in range(0, rows, DEPTH):
            a = tl.dot(exps_desc.load([k, class_start]).T, scaled_desc.load([k, col_start]), a)
        if HAS_GRADIENT_SCALE:
            a *= 1.0 / tl.load(gradient_scale_ptr)
        rounded = a.to(grad_desc.dtype)
        grad_desc.store([class_start, col_start], rounded)
        if HAS_SLOT:
            row = class_start + tl.arange(0, CLASSES)
            slot = tl.load(slot_ptr + row, mask=row < classes, other=-1)
            residual = (a - rounded.to(tl.float32)).to(rounded.dtype)
            _store_residuals(residual, residual_ptr, slot, col_start + tl.arange(0, COLS), hidden, INTERPRETED)


@triton.jit(do_not_specialize=["rows", "vocab_size", "ignore_index", "steps"])
def target_slots_kernel(
    target_ptr,  # (rows,) int32, ascending
    slot_ptr,  # (V,) int32, output: the position of the first row with this target, or -1
    rows,
    vocab_size,
    ignore_index,
    steps,  # 2^steps > rows
    CLASSES: tl.constexpr,
):
    column = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    position = tl.zeros((CLASSES,), tl.int32)  # rows with a smaller target: binary search
    for step in range(steps):
        stop = position + (1 << (steps - 1 - step))
        target = tl.load(target_ptr + stop - 1, mask=stop <= rows, other=vocab_size)
        position = tl.where(target < column, stop, position)
    target = tl.load(target_ptr + position, mask=position < rows, other=-1)
    slot = tl.where((target == column) & (target != ignore_index), position, -1)
    tl.store(slot_ptr + column, slot, mask=column < vocab_size)
