"""The kernel that turns the exponentials of `cross_entropy.py` into the gradient of the logits, in place.

`TritonBackend` launches it.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flce.backends.contract import TileCall
from flce.backends.triton.launch import Launch, build_launch, overlap_options, thread_options


@triton.jit(do_not_specialize=["ignore_index", "factors_stride"])
def gradient_of_exponentials_kernel(
    exps_ptr,  # (rows, cols), row stride exps_stride; overwritten
    factors_ptr,  # (2, rows), or 3 with label smoothing, row stride factors_stride, see `Backend.exponentials`
    target_ptr,  # (rows,) int64
    class_weight_ptr,  # (V,)
    exps_stride,
    factors_stride,
    cols,
    ignore_index,
    HAS_LABEL_SMOOTHING: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,  # this kernel may start before the previous one ends, and the next before this one ends
    BLOCK: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    factor = tl.load(factors_ptr + row)
    target_factor = tl.load(factors_ptr + factors_stride + row)
    if HAS_LABEL_SMOOTHING:
        classes_factor = tl.load(factors_ptr + 2 * factors_stride + row)
    exps_ptr += row * exps_stride
    # An ignored row contains only zeros.
    for start in range(0, tl.where(target == ignore_index, 0, cols), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < cols
        grad = factor * tl.load(exps_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_LABEL_SMOOTHING:
            if HAS_CLASS_WEIGHT:
                grad -= classes_factor * tl.load(class_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            else:
                grad -= classes_factor
        grad = tl.where(columns == target, target_factor, grad)
        tl.store(exps_ptr + columns, grad.to(exps_ptr.dtype.element_ty), mask=mask)


def gradient_of_exponentials(exps: Tensor, factors: Tensor, call: TileCall) -> Iterator[Launch]:
    yield build_launch(
        gradient_of_exponentials_kernel,
        (len(exps),),
        call,
        {"BLOCK": 4096, **thread_options(exps.device, 8), **overlap_options(exps.device)},
        exps_ptr=exps,
        factors_ptr=factors,
        exps_stride=exps.stride(0),
        factors_stride=factors.stride(0),
    )
