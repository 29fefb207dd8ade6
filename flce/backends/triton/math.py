"""Row mathematics shared by every kernel of the package."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def balanced_group(row_blocks, GROUP: tl.constexpr):
    """1 to GROUP, so that no group is much smaller than the others: it would use less of what it loads."""
    groups = tl.maximum(tl.cdiv(row_blocks, GROUP), 1)
    return tl.maximum(tl.cdiv(row_blocks, groups), 1)


@triton.jit
def block_in_groups(block, row_blocks, group_blocks, group):
    """Row and column of a block of a product. All blocks of `group` rows of blocks, group_blocks, come before the next,
    so that what they load is used again while it is in the cache."""
    first = block // group_blocks * group
    in_group = tl.minimum(row_blocks - first, group)
    return first + block % group_blocks % in_group, block % group_blocks // in_group


@triton.jit
def row_head(start, VECTOR: tl.constexpr):
    """Elements of a row before its first boundary of VECTOR (a power of two) elements, the row beginning `start` of
    them behind one: fewer than VECTOR."""
    return ((-start) & (VECTOR - 1)).to(tl.int32)


@triton.jit
def tanh_and_derivative(x):
    """tanh(x) and 1 - tanh(x)^2, from t = exp(-2|x|), which cannot overflow.

    The derivative is 4t / (1 + t)^2, which keeps its digits where tanh(x) is nearly 1.
    """
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    inverse = 1.0 / (1.0 + t)
    magnitude = (1.0 - t) * inverse
    return tl.where(x < 0, -magnitude, magnitude), 4.0 * t * inverse * inverse


@triton.jit
def address_head(row_ptr, BYTES: tl.constexpr):
    """Elements until the first multiple of BYTES, a power of two, in memory."""
    return ((-row_ptr.to(tl.int64)) & (BYTES - 1)).to(tl.int32) // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def lane_max(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(parts, lanes * vector) to (lanes,). Both steps stay within a thread, and lay out the result as the next wants it
    (a reduction of three dimensions at once does not, in every version of Triton)."""
    return tl.max(tl.reshape(tl.max(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def lane_min(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    return tl.min(tl.reshape(tl.min(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def lane_sum(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(x, axis=0), (LANES, VECTOR)), axis=1)


@triton.jit
def over_lanes(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(lanes,) to (1, lanes * vector)."""
    return tl.reshape(tl.broadcast_to(x[:, None], (LANES, VECTOR)), (LANES * VECTOR,))[None, :]


@triton.jit
def softmax_update(largest, total, z, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """One step of the online softmax: merges the block `z` into the running maximum and sum of each lane.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Returns the new maximum and
    sum, the exponentials of the block relative to the new maximum (to 0 while the maximum is -inf, so that
    -inf - -inf does not make a NaN), that reference, and the factor that the old sum was scaled by.
    """
    new_largest = tl.maximum(largest, lane_max(z, LANES, VECTOR))
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    # exp2 is one instruction of the GPU; exp adds four, for the sake of denormal results.
    exps = tl.exp2((z - over_lanes(reference, LANES, VECTOR)) * LOG2_E)
    decay = tl.exp2((largest - reference) * LOG2_E)
    return new_largest, total * decay + lane_sum(exps, LANES, VECTOR), exps, reference, decay


@triton.jit
def softmax_merge(largest, total, other_largest, other_total):
    """Maximum and sum of exponentials of two parts of a row, for `tl.reduce`."""
    new_largest = tl.maximum(largest, other_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    left = total * tl.exp2((largest - reference) * LOG2_E)
    return new_largest, left + other_total * tl.exp2((other_largest - reference) * LOG2_E)
