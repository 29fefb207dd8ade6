"""Row mathematics shared by every kernel of the package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh_and_derivative(x):
    """tanh(x) and 1 - tanh(x)^2, from t = exp(-2|x|), which cannot overflow.

    The derivative is 4t / (1 + t)^2, which keeps its digits where tanh(x) is nearly 1.
    """
    t = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + t)
    magnitude = (1.0 - t) * inverse
    return tl.where(x < 0, -magnitude, magnitude), 4.0 * t * inverse * inverse


@triton.jit
def softmax_update(row_max, row_sum, z):
    """One step of the online softmax: merges the block `z` into the running maximum and sum.

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Returns the new maximum and
    sum, the exponentials of the block relative to the new maximum (to 0 while the maximum is -inf, so that
    -inf - -inf does not make a NaN), that reference, and the factor that the old sum was scaled by.
    """
    new_max = tl.maximum(row_max, tl.max(z, axis=0))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    exps = tl.exp(z - reference)
    decay = tl.exp(row_max - reference)
    return new_max, row_sum * decay + tl.sum(exps, axis=0), exps, reference, decay
