"""Kernels for the gradient of the head: a matrix product that also keeps what its rounding removes, or divides; and
their launches: `Backend.weight_gradient`, `unscaled_weight_gradient` and `add_target_terms`.

    dW = E^T (f * X) + sum_i t_i X[i] at row y[i]

(`exponentials.py` defines E, f and t.) If a class is often a target, both sums are large, and nearly equal in a model
that has learned the frequency of the class. Therefore dW must not be rounded before the second sum is added. The
product writes dW rounded to bfloat16 and, only for the classes that are targets, the residual: the difference to the
float32 sum, also in bfloat16. Both together have an error of 2^-17. `add_to_targets_kernel` then adds the second sum to
them, and rounds once. It also adds the second sum to sums over chunks (float32, unless bfloat16 is requested).

An epilogue that adds the second sum itself needs a loop, so the operands of the next block are not loaded meanwhile.
The time, relative to the vendor's product without targets (H100; targets are random, or their frequency is 1/rank):

    head                            4096 x 4096 x 128256    16384 x 1024 x 151936    2048 x 4096 x 128256
    targets added in the epilogue   1.06 to 1.09, 1.14      1.05 to 1.12, 1.22       1.10 to 1.12, 1.12 to 1.14
    residuals                       1.03                    1.02                     1.02 to 1.03, 1.02

Gradients of float16 logits are multiples of a unit. Then dW is the product divided by the unit. The epilogue divides
before it rounds, which the vendor's products cannot do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.contract import TargetTerms
from flce.backends.formulas import is_class
from flce.backends.triton import product
from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.math import balanced_group, block_in_groups
from flce.backends.triton.replay import run
from flce.core.devices import device_record

# Sums for each target: rows and columns per step, and targets that are compared per step. Microseconds on an H200 for
# half of the classes of two heads. The targets are random, or their frequency is 1/rank (up to 896 and 477 rows of one
# target). 32 x 256 needs so many registers that few programs run at a time.
#   rows x columns                    8 x 1024    2 x 1024    32 x 256
#   16384 x 1024 x 151936, random     33          25          334
#   16384 x 1024 x 151936, 1/rank     255         281         321
#   8192 x 4096 x 128256, random      63          49          664
#   8192 x 4096 x 128256, 1/rank      175         180         629
SUM_ROWS, SUM_BLOCK, SCAN = 8, 1024, 128
# A block of the weight gradient, classes x columns; tokens per step; blocks of classes of a group. Blocks of 256 x 128
# took 1.06 to 1.12 of the vendor's time where blocks of 128 x 256 took 1.01 to 1.04. Groups of 8 and 32 are within 1%.
WEIGHT_CLASSES, WEIGHT_COLS, WEIGHT_DEPTH, WEIGHT_GROUP = 128, 256, 64, 16

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
    slot_ptr,  # (classes,) int32: the row of `residual` of each class that is a target, or -1; None: no residual
    residual_ptr,  # (rows, hidden), contiguous: output
    gradient_scale_ptr,  # ()
    rows,
    hidden,
    classes,
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
        if gradient_scale_ptr is not None:
            a *= 1.0 / tl.load(gradient_scale_ptr)
        rounded = a.to(grad_desc.dtype)
        grad_desc.store([class_start, col_start], rounded)
        if slot_ptr is not None:
            row = class_start + tl.arange(0, CLASSES)
            slot = tl.load(slot_ptr + row, mask=row < classes, other=-1)
            residual = (a - rounded.to(tl.float32)).to(rounded.dtype)
            _store_residuals(residual, residual_ptr, slot, col_start + tl.arange(0, COLS), hidden, INTERPRETED)


@triton.jit(do_not_specialize=["rows", "first_class", "classes"])
def add_to_targets_kernel(
    grad_ptr,  # (classes, hidden), contiguous: the sums, of the classes from first_class on
    x_ptr,  # (N, hidden), strides x_stride and x_col_stride
    target_ptr,  # (rows,) int32, ascending
    row_ptr,  # (rows,) int64: rows of x, in the order of target_ptr
    factor_ptr,  # (rows,) in the order of target_ptr
    residual_ptr,  # (rows, hidden), contiguous: what rounding has removed from each target, at its last row
    x_stride,
    x_col_stride,
    rows,
    hidden,
    first_class,
    classes,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Add the rows of each target to its class. The program of the first row of a target adds all rows of this target
    in order, so that results are reproducible to the bit."""
    first = tl.program_id(0)
    target = tl.load(target_ptr + first)
    before = tl.load(target_ptr + first - 1, mask=first > 0, other=-1)
    place = target.to(tl.int64) - first_class
    if (target != before) & (place >= 0) & (place < classes):
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
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + (stop - 1).to(tl.int64) * hidden + offsets, mask=mask, other=0.0)
            total += tl.where(tl.abs(total) == float("inf"), 0.0, residual.to(tl.float32))
        for start in range(first, stop, ROWS):
            number = start + tl.arange(0, ROWS)
            row = tl.load(row_ptr + number, mask=number < stop, other=0)
            factor = tl.load(factor_ptr + number, mask=number < stop, other=0.0)
            both = (number < stop)[:, None] & mask[None, :]
            places = row[:, None] * x_stride + offsets[None, :].to(tl.int64) * x_col_stride
            x = tl.load(x_ptr + places, mask=both, other=0.0)
            total += tl.sum(x.to(tl.float32) * factor[:, None], axis=0)
        tl.store(grad_ptr + offsets, total.to(grad_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------
# Launches


class SortedTargets(NamedTuple):
    """Rows of x in the order of their targets: arguments of `add_to_targets_kernel`, by name."""

    x: Tensor  # (N, H)
    target: Tensor  # (rows,) int32, ascending; -1 or V for ignored rows and targets that are not a class
    row: Tensor  # (rows,) index into x
    factor: Tensor  # (rows,) of the row of x

    @staticmethod
    def from_terms(terms: TargetTerms, vocab_size: int) -> SortedTargets:
        # In int64: an `ignore_index` may be 2^32 more than a class.
        target = terms.target.masked_fill(terms.target == terms.ignore_index, -1).clamp_(-1, vocab_size).int()
        ascending, order = target.sort()  # sorting int32 costs half of int64
        row = order if terms.index is None else terms.index[order]
        return SortedTargets(terms.x, ascending, row, terms.factor[order])


def weight_gradient(grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, residual: Tensor, terms: TargetTerms) -> None:
    targets = SortedTargets.from_terms(terms, grad.shape[0])
    target, vocab_size = targets.target, grad.shape[0]
    # The position of the last row of each target, and -1 for other classes.
    slots = torch.full((vocab_size,), -1, dtype=torch.int32, device=grad.device)
    positions = torch.arange(len(target), dtype=torch.int32, device=grad.device).where(is_class(target, vocab_size), -1)
    slots.scatter_reduce_(0, target.clamp(0, vocab_size - 1).long(), positions, "amax")
    run(_weight_gradients, grad, exps, scaled, residual, targets, slots)


def _weight_gradients(
    grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, residual: Tensor, targets: SortedTargets, slots: Tensor
) -> Iterator[Launch]:
    stop = len(grad)
    for tile in reversed(exps):
        classes = slice(stop - tile.shape[1], stop)
        yield from _weight_gradient(grad[classes], tile, scaled, slots[classes], residual, None)
        stop = classes.start
    yield from _add_target_terms([grad], targets, residual)


def unscaled_weight_gradient(grad: Tensor, dlogits: Tensor, x: Tensor, gradient_scale: Tensor | None) -> None:
    run(_weight_gradient, grad, dlogits, product.align_for_descriptor(x), None, None, gradient_scale)


def _weight_gradient(
    grad: Tensor,
    exps: Tensor,  # or gradients of logits
    scaled: Tensor,
    slots: Tensor | None,
    residual: Tensor | None,
    gradient_scale: Tensor | None,
) -> Iterator[Launch]:
    programs = device_record(exps.device).multiprocessors
    options = {
        "INTERPRETED": os.environ.get("TRITON_INTERPRET") == "1", "CLASSES": WEIGHT_CLASSES, "COLS": WEIGHT_COLS,
        "DEPTH": WEIGHT_DEPTH, "GROUP": WEIGHT_GROUP, "PROGRAMS": programs, "num_stages": 3, "num_warps": 8,
    }  # fmt: skip
    yield build_launch(
        weight_gradient_kernel,
        (programs,),
        None,
        options,
        exps_desc=TensorDescriptor.from_tensor(exps, [WEIGHT_DEPTH, WEIGHT_CLASSES]),
        scaled_desc=TensorDescriptor.from_tensor(scaled, [WEIGHT_DEPTH, WEIGHT_COLS]),
        grad_desc=TensorDescriptor.from_tensor(grad, [WEIGHT_CLASSES, WEIGHT_COLS]),
        slot=slots,
        residual=residual,
        gradient_scale=gradient_scale,
        rows=len(exps),
        hidden=scaled.shape[1],
        classes=len(grad),
    )


def add_target_terms(grads: Sequence[Tensor], terms: TargetTerms) -> None:
    run(_add_target_terms, grads, SortedTargets.from_terms(terms, sum(map(len, grads))), None)


def _add_target_terms(grads: Sequence[Tensor], targets: SortedTargets, residual: Tensor | None) -> Iterator[Launch]:
    first_class = 0
    for grad in grads:
        options = {"ROWS": SUM_ROWS, "BLOCK": SUM_BLOCK, "SCAN": SCAN, **thread_options(grad.device, 4)}
        rows, hidden = len(targets.target), targets.x.shape[1]
        yield build_launch(
            add_to_targets_kernel,
            (rows, triton.cdiv(hidden, SUM_BLOCK)),
            None,
            options,
            grad=grad,
            residual=residual,
            rows=rows,
            hidden=hidden,
            first_class=first_class,
            classes=len(grad),
            **targets._asdict(),
        )
        first_class += len(grad)
