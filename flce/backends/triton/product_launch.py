"""Launches of the product with an epilogue, and where it can be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.contract import PRODUCT_BLOCK, Tile, TileCall, product_planes
from flce.backends.triton.launch import Launch, launch_of, overlap
from flce.backends.triton.product import finish_statistics_kernel, product_kernel
from flce.backends.triton.replay import run
from flce.core.devices import device_record


@dataclass(frozen=True)
class ProductLaunch:
    """Sizes of a block, rows x cols summed over depth at a time, and options of the launch."""

    rows: int
    cols: int
    depth: int
    group: int
    num_stages: int
    num_warps: int


# On an H200, statistics in times a bare product that writes its logits: 0.96 (8192 x 4096 x 128256), 1.01
# (8192 x 2304 x 256000) and 1.02 (16384 x 1024 x 151936); with blocks of 128 x 128 0.97 and more, 256 x 128 1.0 and
# more. Both kernels have to sum in the same order: one launch for both.
LAUNCH = ProductLaunch(rows=128, cols=PRODUCT_BLOCK, depth=64, group=16, num_stages=3, num_warps=8)
# `finish_statistics_kernel`: rows for a program, and blocks of their sums at a time. With 32 and 32 a call in twelve
# chunks of 1,408 rows takes 0.1 to 0.2 ms more (16384 x 1024 x 151936).
FINISH_ROWS, FINISH_BLOCKS = 8, 128
# Descriptors ask for addresses and strides that are multiples of this many bytes.
DESCRIPTOR_BYTES = 16
# The most that is copied at a time of a weight that does not begin at such an address.
COPY_BYTES = 8 << 20


def can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can stand for the matrix."""
    stride = x.stride(0)
    aligned = x.data_ptr() % DESCRIPTOR_BYTES == 0 and stride * x.element_size() % DESCRIPTOR_BYTES == 0
    return aligned and x.stride(1) == 1 and stride >= x.shape[1]


def described(x: Tensor) -> Tensor:
    """The matrix, or a copy for which a descriptor can stand."""
    return x if can_describe(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def most_classes(weight: Tensor) -> int:
    """Classes of a launch: all of a weight; of one that has to be copied only a few, so that the copy is small."""
    if can_describe(weight):
        return len(weight)
    return max(1, COPY_BYTES // (weight.shape[1] * weight.element_size()) // LAUNCH.cols) * LAUNCH.cols


def product_statistics(x: Tensor, weight: Tensor, call: TileCall) -> None:
    assert call.out is not None
    planes, blocks = product_planes(call.spec), triton.cdiv(len(weight), LAUNCH.cols)
    partial = call.out.loss.new_empty(planes, blocks, len(x))
    target_logit = call.out.loss.new_empty(len(x))
    run(_statistics, described(x), weight, call, partial, target_logit)


def _statistics(
    x: Tensor,
    weight: Tensor,
    call: TileCall,
    partial: Tensor,  # (planes, blocks of classes, rows)
    target_logit: Tensor,  # (rows,)
) -> Iterator[Launch]:
    vocab_size, (_, blocks, num_rows) = len(weight), partial.shape
    for tile in tiles(0, vocab_size, vocab_size, most_classes(weight)):
        of_tile = call._replace(tile=tile)
        yield launch(x, weight[tile.columns], of_tile, partial=partial, target_logit=target_logit)
    yield launch_of(
        finish_statistics_kernel,
        (triton.cdiv(num_rows, FINISH_ROWS),),
        call,
        {"ROWS": FINISH_ROWS, "BLOCKS": FINISH_BLOCKS},
        partial_ptr=partial,
        target_logit_ptr=target_logit,
        blocks=blocks,
    )


def tiles(first: int, end: int, vocab_size: int, most: int) -> list[Tile]:
    """Tiles of these classes, at most `most` in each: whole blocks, and a last one of fewer columns. Only that needs a
    mask, which costs up to 6%."""
    whole = first + (end - first) // LAUNCH.cols * LAUNCH.cols
    borders = sorted({*range(first, whole, most), first, whole, end})
    return [Tile(start, stop - start, vocab_size, stop - start) for start, stop in pairwise(borders)]


def product_gradient(x: Tensor, weight: Tensor, grad: Tensor, call: TileCall) -> None:
    run(_gradient, described(x), weight, grad, call)


def _gradient(x: Tensor, weight: Tensor, grad: Tensor, call: TileCall) -> Iterator[Launch]:
    step, tile = most_classes(weight), call.tile
    for start in range(0, tile.cols, step):
        cols = slice(start, min(start + step, tile.cols))
        of_part = call._replace(tile=tile._replace(start=tile.start + start, cols=cols.stop - start))
        yield launch(x, weight[cols], of_part, grad[:, cols])


def launch(
    x: Tensor,  # (rows, hidden)
    weight: Tensor,  # (cols, hidden)
    call: TileCall,
    out: Tensor | None = None,  # (rows, cols) the gradient or the exponentials; None: statistics
    *,
    partial: Tensor | None = None,
    target_logit: Tensor | None = None,
    reference: Tensor | None = None,  # makes it exponentials
    work: Tensor | None = None,
) -> Launch:
    """The arguments are those of `product_kernel`. Of `weight` a copy is made where no descriptor can stand for it."""

    def pointer(t: Tensor | None) -> Tensor:
        return call.inputs.target if t is None else t  # what a flag switches off is never read

    x_desc = TensorDescriptor.from_tensor(x, [LAUNCH.rows, LAUNCH.depth])
    weight_desc = TensorDescriptor.from_tensor(described(weight), [LAUNCH.cols, LAUNCH.depth])
    out_desc = x_desc if out is None else TensorDescriptor.from_tensor(out, [LAUNCH.rows, LAUNCH.cols])
    programs = device_record(x.device).multiprocessors
    gradient = out is not None and reference is None
    options = {
        "GRADIENT": gradient,
        "EXPONENTIALS": reference is not None,
        "HAS_TAIL": call.tile.cols % LAUNCH.cols != 0 and not gradient,  # whose store needs no mask
        "ROWS": LAUNCH.rows,
        "COLS": LAUNCH.cols,
        "DEPTH": LAUNCH.depth,
        "GROUP": LAUNCH.group,
        "PROGRAMS": programs,
        "num_stages": LAUNCH.num_stages,
        "num_warps": LAUNCH.num_warps,
        "OVERLAP": overlap(x.device)["OVERLAP"],  # it does not begin early itself
    }
    return launch_of(
        product_kernel,
        (programs,),
        call,
        options,
        x_desc=x_desc,
        weight_desc=weight_desc,
        out_desc=out_desc,
        partial_ptr=pointer(partial),
        target_logit_ptr=pointer(target_logit),
        reference_ptr=pointer(reference),
        work_ptr=pointer(work),
        hidden=x.shape[1],
    )
