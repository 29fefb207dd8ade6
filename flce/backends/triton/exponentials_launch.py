"""Launches of the kernels in `exponentials.py` and `weight_gradient.py`, and of the product that writes exponentials.

`TritonBackend` calls this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce.backends.contract import E4M3_SAMPLES, QuantizedTile, StatisticsCall, TargetTerms, TileClasses
from flce.backends.triton import e4m3, product
from flce.backends.triton.exponentials import (
    FLAG_STRIDE,
    add_to_targets_kernel,
    combine_rows_kernel,
    finish_kernel,
    reference_kernel,
)
from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.replay import run
from flce.backends.triton.weight_gradient import target_slots_kernel, weight_gradient_kernel
from flce.core.devices import device_record
from flce.core.gemm import ALIGNMENT

# Classes whose logits are computed before the product, for the reference of each row: 0.2% of a vocabulary of 128,256.
SAMPLES = 256
# Elements of a row of hidden states per step. On an H200 512 to 4096 are equally fast.
BLOCK = 1024
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
# Classes of a program of `target_slots_kernel`.
SLOT_CLASSES = 256


def fused_exponentials(
    x: Tensor,
    weight: Tensor,
    exps: Sequence[Tensor],
    call: StatisticsCall,
    factors: Tensor,
    count: Tensor | None,
    scales: Callable[[], Tensor | None],
    quantized: QuantizedTile | None = None,
) -> None:
    num_rows, vocab_size = x.shape[0], weight.shape[0]
    if num_rows == 0:
        return
    new, blocks = call.out.loss.new_empty, -(-vocab_size // product.COLS)
    samples, planes, row_factor = (SAMPLES, 1, None) if quantized is None else (E4M3_SAMPLES, 2, new(num_rows))
    sampled = _sample_classes(weight, samples)
    if quantized is None:
        # The memory of the exponentials is free until the product writes them.
        sample = torch.mm(x, sampled.t(), out=exps[0][:, : sampled.shape[0]])
    else:
        exps, sample = [quantized.matrix[:, :vocab_size]], torch.mm(x, sampled.t())
    # Separate vectors, so that each address is aligned for the kernels.
    rows = _RowVectors(*[new(num_rows) for _ in range(3)])
    work = torch.empty(3, FLAG_STRIDE, dtype=torch.int32, device=x.device)
    x, partial = product.align_for_descriptor(x), new(planes, blocks, num_rows)
    memory = _Memory(x, weight, exps, partial, work, rows, samples, row_factor, quantized)
    run(_first_products, memory, call, sample, count)
    call = call._replace(inputs=call.inputs._replace(scales=scales()))
    run(_finish_and_retry, memory, call, factors)
    if quantized is not None:
        e4m3.compute_exponentials(x, weight, rows.reference, call, quantized.entries)


class _RowVectors(NamedTuple):
    """Vectors of `fused_exponentials`, (rows,) each."""

    reference: Tensor
    target_logit: Tensor
    target_jacobian: Tensor


class _Memory(NamedTuple):
    """Operands of the products of `fused_exponentials`, and what its launches hand to each other."""

    x: Tensor
    weight: Tensor
    exps: Sequence[Tensor]
    partial: Tensor  # (planes, blocks of classes, rows)
    work: Tensor  # (3, FLAG_STRIDE) int32, see `exponentials`
    rows: _RowVectors
    samples: int
    row_factor: Tensor | None  # (rows,) with `quantized`
    quantized: QuantizedTile | None


def _sample_classes(weight: Tensor, samples: int) -> Tensor:
    sampled = weight[:: _sample_step(weight, samples)]
    return sampled[: max(1, sampled.shape[0] // ALIGNMENT * ALIGNMENT)]


def _sample_step(weight: Tensor, samples: int) -> int:
    return -(-weight.shape[0] // samples)


def _first_products(memory: _Memory, call: StatisticsCall, sample: Tensor, count: Tensor | None) -> Iterator[Launch]:
    yield build_launch(
        reference_kernel,
        (len(memory.x),),
        call,
        {"BLOCK_ROWS": product.ROWS, "SAMPLES": memory.samples, "BLOCK": BLOCK},
        ("z_loss",),
        x=memory.x,
        weight=memory.weight,
        sample=sample,
        work=memory.work,
        count=count,
        hidden=memory.x.shape[1],
        samples=sample.shape[1],
        sample_step=_sample_step(memory.weight, memory.samples),
        row_factor=memory.row_factor,
        **memory.rows._asdict(),
    )
    yield from _products(memory, call, is_retry=False)


def _finish_and_retry(memory: _Memory, call: StatisticsCall, factors: Tensor) -> Iterator[Launch]:
    yield from _finish(memory, call, factors, is_retry=False)
    yield from _products(memory, call, is_retry=True)
    yield from _finish(memory, call, factors, is_retry=True)


def _products(memory: _Memory, call: StatisticsCall, *, is_retry: bool) -> Iterator[Launch]:
    weight, max_cols = memory.weight, product.classes_per_launch(memory.weight)
    transposed = None if memory.quantized is None else memory.quantized.transposed
    for tile, tile_exps in _tiles(memory.exps, len(weight), is_retry, max_cols):
        yield product.launch(
            memory.x,
            weight[tile.columns],
            call._replace(tile=tile),
            tile_exps,
            partial=memory.partial,
            reference=memory.rows.reference,
            transposed=None if transposed is None else transposed[tile.columns],
            row_factor=memory.row_factor,
            work=memory.work[int(is_retry)],
        )


def _finish(memory: _Memory, call: StatisticsCall, factors: Tensor, *, is_retry: bool) -> Iterator[Launch]:
    _, blocks, num_rows = memory.partial.shape
    yield build_launch(
        finish_kernel,
        (triton.cdiv(num_rows, product.FINISH_ROWS),),
        call,
        {
            "IS_SHARD": call.tile.is_shard,
            "HAS_SCALE": call.spec.scale != 1.0 and call.spec.softcap is None,
            "ROWS": product.FINISH_ROWS,
            "BLOCKS": product.FINISH_BLOCKS,
        },
        ("softcap",),
        partial=memory.partial,
        factors=factors,
        work=memory.work[int(is_retry)],
        blocks=blocks,
        **memory.rows._asdict(),
    )
    if memory.quantized is not None:
        work, partial = memory.work[int(is_retry)], memory.partial[int(call.spec.softcap is not None)]
        assert memory.row_factor is not None
        vocab_size = len(memory.weight)
        yield e4m3.find_large(memory.quantized, vocab_size, memory.row_factor, partial, product.COLS, work)


def _tiles(
    exps: Sequence[Tensor], vocab_size: int, is_retry: bool, max_cols: int
) -> Iterator[tuple[TileClasses, Tensor]]:
    """Yield the tile of each launch (`product.tiles`) and its exponentials. `is_retry`: few launches, because
    retries are rare."""
    start = 0
    for exps_tile in exps:
        stop = start + exps_tile.shape[1]
        single = [TileClasses(start, stop - start, vocab_size, stop - start)]
        for tile in single if is_retry and max_cols >= vocab_size else product.tiles(start, stop, vocab_size, max_cols):
            yield tile, exps_tile[:, tile.start - start : tile.start - start + tile.cols]
        start = stop


def combine_rows(
    x: Tensor,
    out: Tensor,
    weight: Tensor | None,  # None: only scale the rows
    target: Tensor,
    factors: Tensor,
    ignore_index: int,
    index: Tensor | None,
) -> Iterator[Launch]:
    yield build_launch(
        combine_rows_kernel,
        (len(x),),
        None,
        {"BLOCK": BLOCK, **thread_options(x.device, 4)},
        x=x,
        weight=weight,
        out=out,
        index=index,
        target=target,
        factors=factors,
        hidden=x.shape[1],
        vocab_size=0 if weight is None else len(weight),
        ignore_index=ignore_index,
    )


class SortedTargets(NamedTuple):
    """Rows of x in the order of their targets."""

    x: Tensor  # (N, H)
    target: Tensor  # (rows,) int32, ascending; -1 or V for targets that are not a class
    row: Tensor  # (rows,) index into x
    order: Tensor  # (rows,) index into factor
    factor: Tensor  # (rows,) factor of the row of x
    ignore_index: int

    @staticmethod
    def from_terms(terms: TargetTerms, vocab_size: int) -> SortedTargets:
        ascending, order = terms.target.clamp(-1, vocab_size).int().sort()  # sorting int32 costs half of int64
        row = order if terms.index is None else terms.index[order]
        return SortedTargets(terms.x, ascending, row, order, terms.factor, terms.ignore_index)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the kernels that add the rows."""
        return {
            "x": self.x,
            "target": self.target,
            "row": self.row,
            "order": self.order,
            "factor": self.factor,
            "hidden": self.x.shape[1],
            "ignore_index": self.ignore_index,
        }


def weight_gradient(grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, residual: Tensor, terms: TargetTerms) -> None:
    targets = SortedTargets.from_terms(terms, grad.shape[0])
    # The position of the first row of each target, and -1 for other classes.
    slots = torch.empty(grad.shape[0], dtype=torch.int32, device=grad.device)
    run(_weight_gradients, grad, exps, scaled, residual, targets, slots)


def _weight_gradients(
    grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, residual: Tensor, targets: SortedTargets, slots: Tensor
) -> Iterator[Launch]:
    yield _target_slots(targets, slots)
    stop = len(grad)
    for tile in reversed(exps):
        classes = slice(stop - tile.shape[1], stop)
        yield _weight_gradient(grad[classes], tile, scaled, slots=slots[classes], residual=residual)
        stop = classes.start
    yield from _add_target_terms([grad], targets, residual)


def _target_slots(targets: SortedTargets, slots: Tensor) -> Launch:
    return build_launch(
        target_slots_kernel,
        (triton.cdiv(len(slots), SLOT_CLASSES),),
        None,
        {"CLASSES": SLOT_CLASSES, **thread_options(slots.device, 4)},
        target=targets.target,
        slot=slots,
        rows=len(targets.target),
        vocab_size=len(slots),
        ignore_index=targets.ignore_index,
        steps=len(targets.target).bit_length(),
    )


def unscaled_weight_gradient(grad: Tensor, dlogits: Tensor, x: Tensor, gradient_scale: Tensor | None) -> None:
    run(_unscaled_weight_gradient, grad, dlogits, product.align_for_descriptor(x), gradient_scale)


def _unscaled_weight_gradient(
    grad: Tensor, dlogits: Tensor, x: Tensor, gradient_scale: Tensor | None
) -> Iterator[Launch]:
    yield _weight_gradient(grad, dlogits, x, gradient_scale=gradient_scale)


def _weight_gradient(
    grad: Tensor,
    exps: Tensor,  # or gradients of logits
    scaled: Tensor,
    *,
    slots: Tensor | None = None,
    residual: Tensor | None = None,
    gradient_scale: Tensor | None = None,
) -> Launch:
    programs = device_record(exps.device).multiprocessors
    options = {
        "INTERPRETED": os.environ.get("TRITON_INTERPRET") == "1", "CLASSES": WEIGHT_CLASSES, "COLS": WEIGHT_COLS,
        "DEPTH": WEIGHT_DEPTH, "GROUP": WEIGHT_GROUP, "PROGRAMS": programs, "num_stages": 3, "num_warps": 8,
    }  # fmt: skip
    return build_launch(
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
        args = {"rows": len(targets.target), "first_class": first_class, "classes": len(grad), **targets.arguments}
        options = {"ROWS": SUM_ROWS, "BLOCK": SUM_BLOCK, "SCAN": SCAN, **thread_options(grad.device, 4)}
        grid = len(targets.target), triton.cdiv(targets.x.shape[1], SUM_BLOCK)
        yield build_launch(add_to_targets_kernel, grid, None, options, grad=grad, residual=residual, **args)
        first_class += len(grad)
