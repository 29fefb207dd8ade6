"""Kernels for single entries of logits and of their gradients, and their launches.

`TritonBackend` launches them for candidates, which are K classes of each row, selected by ids, and for gradients from
sampled entries. See `flce/engine/schedules/sampled.py`. `backends/sampling.py` has the same in PyTorch.
The fused product marks entries, too (`product.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends import sampling
from flce.backends.contract import (
    LEAST_LOGPROB,
    WORD_CLASSES,
    ExactEntries,
    GradientCall,
    Marks,
    SampledEntries,
    Samples,
    StatisticsCall,
)
from flce.backends.triton.launch import Launch, build_launch, thread_options
from flce.backends.triton.math import LOG2_E, load_normalizer, load_row_gradient, load_scale, transform
from flce.backends.triton.replay import run
from flce.core.problem import accumulation_dtype

_GOLDEN = tl.constexpr(sampling.GOLDEN)
_MIX_1 = tl.constexpr(sampling.MIX_1)
_MIX_2 = tl.constexpr(sampling.MIX_2)
_WORD = tl.constexpr(WORD_CLASSES)
_LEAST_LOGPROB = tl.constexpr(LEAST_LOGPROB)
# Options of the loss that only the end of a row needs: gradients of entries follow from the row gradient.
_LEFT_OUT = ("ignore_index", "label_smoothing", "z_loss", "candidates", "top_k", "row_temperature")
# Rows and columns of a program of `mark_kernel`, and words of a step of the kernels that read words.
MARK_ROWS, MARK_COLS, WORDS = 16, 256, 1024
# Bytes of rows of W of a step of a program, and steps in flight; the same of rows of x for the columns of dW of a
# program. Loads of whole vectors, and of the next steps before they are needed, take half of the time (H200).
STEP_BYTES, MAX_ENTRIES = 16 << 10, 8
WEIGHT_COLS, WEIGHT_ENTRIES = 2048, 2


@triton.jit
def random_mantissa(seeds, classes):
    """Return 1 + k / 2^23 for the random numbers (k + 1/2) / 2^23 of entries, see `sampling.uniform`."""
    # The first three operations are of the classes alone, so that an entry of a tile costs four.
    mixed = classes.to(tl.uint32) * _GOLDEN
    mixed ^= mixed >> 15
    h = ((mixed * _MIX_1) ^ seeds.to(tl.uint32)) * _MIX_2
    return ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def pack_marks(marks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return (ROWS, COLS) marks as (ROWS, COLS / WORD_CLASSES) words."""
    bit = (tl.arange(0, COLS) % _WORD)[None, :]
    return tl.sum(tl.reshape(marks.to(tl.int32) << bit, (ROWS, COLS // _WORD, _WORD)), axis=2)


@triton.jit(do_not_specialize=["rows", "cols", "first_class", "words_stride"])
def mark_kernel(
    logits_ptr,  # (rows, cols)
    bias_ptr,  # (cols,)
    inverse_temperature_ptr,  # (rows,)
    threshold_ptr,  # (rows,)
    seeds_ptr,  # (rows,) int32
    words_ptr,  # (rows, words) int32
    logits_stride,
    words_stride,
    rows,
    cols,
    first_class,
    scale: tl.float64,
    cap: tl.float64,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    exists, present = row < rows, column < cols
    a = tl.load(
        logits_ptr + row.to(tl.int64)[:, None] * logits_stride + column, mask=exists[:, None] & present, other=0.0
    )
    row_scale, row_cap = load_scale(scale, cap, inverse_temperature_ptr, row, exists, HAS_SOFTCAP, tl.float32)
    z, _jacobian = transform(
        a, bias_ptr, column, present, row_scale[:, None], row_cap[:, None], tl.float32, HAS_SCALE, HAS_SOFTCAP
    )
    threshold = tl.load(threshold_ptr + row, mask=exists, other=float("inf"))
    seeds = tl.load(seeds_ptr + row, mask=exists, other=0)
    ratio = tl.exp2((z - threshold[:, None]) * LOG2_E)
    marks = (random_mantissa(seeds[:, None], column + first_class) < ratio + 1.0) & present
    word = tl.program_id(1) * (COLS // _WORD) + tl.arange(0, COLS // _WORD)[None, :]
    out = words_ptr + row.to(tl.int64)[:, None] * words_stride + word
    tl.store(out, pack_marks(marks, ROWS, COLS), mask=exists[:, None] & (word * _WORD < cols))


@triton.jit
def popcount(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_words(words_ptr, omitted_ptr, word, size):
    """Return words of a row as uint32, without the bits of frequent classes."""
    words = tl.load(words_ptr + word, mask=word < size, other=0)
    return (words & ~tl.load(omitted_ptr + word, mask=word < size, other=0)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["words_stride", "size", "capacity"])
def list_kernel(
    words_ptr,  # (rows, size) int32
    omitted_ptr,  # (size,) int32
    bounds_ptr,  # (rows + 1,) int64: with classes the first entry of each row, else output: their number behind it
    classes_ptr,  # (capacity,) int32; None: the entries are only counted
    words_stride,
    size,
    capacity,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds_ptr + row)
    total = tl.zeros((WORDS,), tl.int32)
    for start in range(0, size, WORDS):
        word = start + tl.arange(0, WORDS)
        words = load_words(words_ptr + row * words_stride, omitted_ptr, word, size)
        count = popcount(words)
        if classes_ptr is not None:
            place = first + tl.cumsum(count, axis=0) - count
            first += tl.sum(count, axis=0)
            while tl.max((words != 0).to(tl.int32), axis=0) > 0:
                lowest = words & ((words ^ 0xFFFFFFFF) + 1)
                column = word * _WORD + popcount(lowest - 1)
                tl.store(classes_ptr + place, column, mask=(words != 0) & (place < capacity))
                place += 1
                words &= words - 1
        else:
            total += count
    if classes_ptr is None:
        tl.store(bounds_ptr + row + 1, tl.sum(total, axis=0).to(tl.int64))


@triton.jit
def entry_rows(
    weight_ptr, classes, exists, weight_stride, weight_col_stride, hidden, HIDDEN: tl.constexpr, ACCUM: tl.constexpr
):
    """Return rows of W, (entries, HIDDEN)."""
    column = tl.arange(0, HIDDEN)[None, :]
    mask = exists[:, None] & (column < hidden)
    place = classes[:, None] * weight_stride + column.to(tl.int64) * weight_col_stride
    return tl.load(weight_ptr + place, mask=mask, other=0.0).to(ACCUM)


@triton.jit(do_not_specialize=["normalizer_stride", "row_gradient_stride", "num_exact", "first_class", "vocab_size"])
def gradient_kernel(
    x_ptr,  # (rows, hidden)
    weight_ptr,  # (V, hidden)
    bias_ptr,  # (V,)
    target_ptr,  # (rows,) int64
    inverse_temperature_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows)
    row_gradient_ptr,  # (slots, rows)
    bounds_ptr,  # (rows + 1,) int64
    seeds_ptr,  # (rows,) int32
    classes_ptr,  # (entries,) int32
    logits_ptr,  # (entries,); with ONLY_LOGITS the logits are added, and nothing else is written
    dense_ptr,  # (rows, hidden), contiguous
    place_ptr,  # (rows,) int64: rows of the call
    exact_values_ptr,  # (rows, num_exact), contiguous
    exact_classes_ptr,  # (rows, num_exact) int64, contiguous
    gradient_scale_ptr,  # ()
    grad_ptr,  # (N, hidden)
    entry_rows_ptr,  # (entries,) int32 output
    entry_values_ptr,  # (entries,) output
    entry_classes_ptr,  # (entries,) int32 output
    x_stride,
    x_col_stride,
    weight_stride,
    weight_col_stride,
    grad_stride,
    normalizer_stride,
    row_gradient_stride,
    num_exact,
    first_class,
    vocab_size,
    hidden,
    sample_below: tl.float64,
    scale: tl.float64,
    cap: tl.float64,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    ONLY_LOGITS: tl.constexpr,
    ACCUM: tl.constexpr,
    ENTRIES: tl.constexpr,
    HIDDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    sample_below = tl.full((), sample_below, ACCUM)
    row = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    column = tl.arange(0, HIDDEN)
    in_bounds = column < hidden
    x = tl.load(x_ptr + row * x_stride + column.to(tl.int64) * x_col_stride, mask=in_bounds, other=0.0).to(ACCUM)
    scale, cap = load_scale(scale, cap, inverse_temperature_ptr, row, None, HAS_SOFTCAP, ACCUM)
    target = tl.load(target_ptr + row)
    seed = tl.load(seeds_ptr + row)
    offset, log_sum = load_normalizer(normalizer_ptr, normalizer_stride, row, None)
    softmax_factor, _target_factor, _classes_factor, entropy_factor = load_row_gradient(
        row_gradient_ptr, row_gradient_stride, row, None, HAS_ENTROPY_GRADIENT, False
    )
    place = tl.load(place_ptr + row)

    total = tl.zeros((HIDDEN,), ACCUM)
    if dense_ptr is not None:
        total = tl.load(dense_ptr + row * hidden + column, mask=in_bounds, other=0.0).to(ACCUM)
    for start in tl.range(first, stop, ENTRIES, num_stages=STAGES):
        entry = start + tl.arange(0, ENTRIES)
        exists = entry < stop
        classes = tl.load(classes_ptr + entry, mask=exists, other=0).to(tl.int64)
        rows = entry_rows(weight_ptr, classes, exists, weight_stride, weight_col_stride, hidden, HIDDEN, ACCUM)
        if logits_ptr is not None and not ONLY_LOGITS:
            a = tl.load(logits_ptr + entry, mask=exists, other=0.0)
        else:
            a = tl.sum(rows * x[None, :], axis=1)
        if ONLY_LOGITS:
            before = tl.load(logits_ptr + entry, mask=exists, other=0.0)
            tl.store(logits_ptr + entry, before + a, mask=exists)
        else:
            z, jacobian = transform(a, bias_ptr, classes, exists, scale, cap, ACCUM, HAS_SCALE, HAS_SOFTCAP)
            logprob = (z - offset) - log_sum
            p = tl.exp2(logprob * LOG2_E)
            factor = softmax_factor
            if HAS_ENTROPY_GRADIENT:
                factor = softmax_factor - entropy_factor * tl.maximum(logprob, _LEAST_LOGPROB)
            u = random_mantissa(seed, classes + first_class).to(ACCUM) - 0.99999994
            is_kept = exists & (classes != target) & (u < p / sample_below)
            value = tl.where(is_kept, tl.maximum(p, sample_below) * factor * jacobian, 0.0)
            total += tl.sum(rows * value[:, None], axis=0)
            tl.store(entry_rows_ptr + entry, tl.full((ENTRIES,), place, tl.int64).to(tl.int32), mask=exists)
            tl.store(entry_values_ptr + entry, value, mask=exists)
            tl.store(entry_classes_ptr + entry, tl.where(is_kept, classes, vocab_size).to(tl.int32), mask=exists)
    if grad_ptr is not None:
        for start in range(0, num_exact, ENTRIES):
            number = start + tl.arange(0, ENTRIES)
            classes = tl.load(exact_classes_ptr + row * num_exact + number, mask=number < num_exact, other=vocab_size)
            exists = classes < vocab_size
            values = tl.load(exact_values_ptr + row * num_exact + number, mask=exists, other=0.0)
            rows = entry_rows(weight_ptr, classes, exists, weight_stride, weight_col_stride, hidden, HIDDEN, ACCUM)
            total += tl.sum(rows * values[:, None], axis=0)
        if gradient_scale_ptr is not None:
            total /= tl.load(gradient_scale_ptr).to(ACCUM)
        tl.store(grad_ptr + place * grad_stride + column, total.to(grad_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def weight_gradient_kernel(
    x_ptr,  # (N, hidden)
    place_ptr,  # (V,) int64, -1: not frequent
    bounds_ptr,  # (V + 1,) int64
    order_ptr,  # (entries,) int64
    entry_rows_ptr,  # (entries,) int32
    entry_values_ptr,  # (entries,)
    dense_ptr,  # (K, hidden), contiguous
    gradient_scale_ptr,  # ()
    class_weight_ptr,  # (V,)
    subtracted_ptr,  # (hidden,) times the class weight
    grad_ptr,  # (V, hidden) the sums are added
    x_stride,
    x_col_stride,
    grad_stride,
    grad_col_stride,
    hidden,
    ACCUM: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLS: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + c)
    first, stop = tl.load(bounds_ptr + c), tl.load(bounds_ptr + c + 1)
    if (place < 0) & (first == stop) & (class_weight_ptr is None):
        return
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = column < hidden
    total = tl.load(dense_ptr + place * hidden + column, mask=mask & (place >= 0), other=0.0).to(ACCUM)
    for start in range(first, stop, ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        exists = number < stop
        entry = tl.load(order_ptr + number, mask=exists, other=0)
        value = tl.load(entry_values_ptr + entry, mask=exists, other=0.0)
        row = tl.load(entry_rows_ptr + entry, mask=exists, other=0).to(tl.int64)
        x_place = row[:, None] * x_stride + column[None, :].to(tl.int64) * x_col_stride
        x = tl.load(x_ptr + x_place, mask=exists[:, None] & mask[None, :], other=0.0)
        total += tl.sum(x.to(ACCUM) * value[:, None], axis=0)
    if class_weight_ptr is not None:
        total -= tl.load(class_weight_ptr + c) * tl.load(subtracted_ptr + column, mask=mask, other=0.0)
    if gradient_scale_ptr is not None:
        total /= tl.load(gradient_scale_ptr).to(ACCUM)
    grad_ptr += c * grad_stride + column.to(tl.int64) * grad_col_stride
    total += tl.load(grad_ptr, mask=mask, other=0.0)  # float64 if either is
    tl.store(grad_ptr, total.to(grad_ptr.dtype.element_ty), mask=mask)


def mark_entries(logits: Tensor, call: StatisticsCall, marks: Marks) -> Iterator[Launch]:
    rows, cols = logits.shape
    yield build_launch(
        mark_kernel, (triton.cdiv(rows, MARK_ROWS), triton.cdiv(cols, MARK_COLS)), call,
        {"ROWS": MARK_ROWS, "COLS": MARK_COLS, **thread_options(logits.device, 4)},
        leaves_out=_LEFT_OUT, logits=logits, **marks._asdict(),
    )  # fmt: skip


def list_entries(words: Tensor, omitted: Tensor, out: Samples) -> None:
    run(_list_entries, words, omitted, out.bounds, None)
    out.bounds.cumsum_(0)
    run(_list_entries, words, omitted, out.bounds, out.classes)


def _list_entries(words: Tensor, omitted: Tensor, bounds: Tensor, classes: Tensor | None) -> Iterator[Launch]:
    """classes: None to count the entries of each row."""
    yield build_launch(
        list_kernel, (len(words),), None, {"WORDS": WORDS, **thread_options(words.device, 4)}, words=words,
        omitted=omitted, bounds=bounds, classes=classes, size=words.shape[1],
        capacity=0 if classes is None else len(classes),
    )  # fmt: skip


def sampled_gradient(
    x: Tensor, weight: Tensor, call: GradientCall, samples: Samples, exact: ExactEntries, out: SampledEntries,
    dense: Tensor | None, grad: Tensor | None, gradient_scale: Tensor | None, only_logits: bool,
) -> Iterator[Launch]:  # fmt: skip
    # A program has a row of x and some rows of W in registers.
    hidden, accum = triton.next_power_of_2(x.shape[1]), accumulation_dtype(x.dtype)
    entries = max(1, min(MAX_ENTRIES, STEP_BYTES // (hidden * x.element_size())))
    options = {
        "ONLY_LOGITS": only_logits,
        "ACCUM": tl.float64 if accum == torch.float64 else tl.float32, "ENTRIES": entries, "HIDDEN": hidden,
        "STAGES": 2 if entries == MAX_ENTRIES else 3,
        **thread_options(x.device, min(16, max(4, hidden * accum.itemsize >> 12))),
    }  # fmt: skip
    yield build_launch(
        gradient_kernel, (len(x),), call, options,
        leaves_out=_LEFT_OUT, x=x, weight=weight, bounds=samples.bounds, seeds=samples.seeds, classes=samples.classes,
        logits=out.logits, dense=dense, place=exact.rows, exact_values=exact.values, exact_classes=exact.classes,
        gradient_scale=gradient_scale, grad=grad, entry_rows=out.rows, entry_values=out.values,
        entry_classes=out.classes, num_exact=exact.values.shape[1], first_class=out.first_class, hidden=x.shape[1],
        sample_below=out.sample_below,
    )  # fmt: skip


def sampled_weight_gradient(
    x: Tensor, entries: SampledEntries, order: Tensor, bounds: Tensor, place: Tensor, dense: Tensor, grad: Tensor,
    gradient_scale: Tensor | None, class_weight: Tensor | None, subtracted: Tensor | None,
) -> Iterator[Launch]:  # fmt: skip
    cols = min(WEIGHT_COLS, triton.next_power_of_2(x.shape[1]))
    accum = tl.float64 if dense.dtype == torch.float64 else tl.float32
    yield build_launch(
        weight_gradient_kernel, (len(grad), triton.cdiv(x.shape[1], cols)), None,
        {"ACCUM": accum, "ENTRIES": WEIGHT_ENTRIES, "COLS": cols, **thread_options(x.device, max(1, cols // 512))},
        x=x, place=place, bounds=bounds, order=order, entry_rows=entries.rows, entry_values=entries.values, dense=dense,
        gradient_scale=gradient_scale, class_weight=class_weight, subtracted=subtracted, grad=grad, hidden=x.shape[1],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# Candidates

# For a program of four warps: the maximum number of a row's ids, and the columns of the hidden states per step.
ENTRIES, DEPTH = 32, 128
BLOCK = 1024


@triton.jit(do_not_specialize=["hidden", "vocab_size", "size", "ids_stride", "ids_col_stride", "out_stride"])
def row_products_kernel(
    x_ptr,  # (rows, hidden)
    weight_ptr,  # (vocab_size, hidden)
    ids_ptr,  # (rows, size) int64
    out_ptr,  # (rows, size): the products are added
    x_stride,
    x_col_stride,
    weight_stride,
    weight_col_stride,
    ids_stride,
    ids_col_stride,
    out_stride,
    hidden,
    vocab_size,
    size,
    ACCUM: tl.constexpr,
    ENTRIES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add the logits of ENTRIES ids of one row. The order of a sum depends only on `hidden`."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ids = tl.load(ids_ptr + row * ids_stride + entry * ids_col_stride, mask=entry < size, other=-1)
    present = (ids >= 0) & (ids < vocab_size)
    hidden = tl.where(tl.max(present.to(tl.int32), axis=0) > 0, hidden, 0)
    weight_ptr += tl.where(present, ids, 0)[:, None] * weight_stride
    x_ptr += row * x_stride
    total = tl.zeros((ENTRIES, DEPTH), ACCUM)
    for start in range(0, hidden, DEPTH):
        column = start + tl.arange(0, DEPTH)
        in_bounds = column < hidden
        x = tl.load(x_ptr + column * x_col_stride, mask=in_bounds, other=0.0).to(ACCUM)
        weight = tl.load(
            weight_ptr + column[None, :] * weight_col_stride, mask=present[:, None] & in_bounds[None, :], other=0.0
        )
        total += weight.to(ACCUM) * x[None, :]
    out_ptr += row * out_stride + entry
    before = tl.load(out_ptr, mask=present, other=0.0)
    tl.store(out_ptr, before + tl.sum(total, axis=1), mask=present)


@triton.jit(do_not_specialize=["size", "ids_stride", "ids_col_stride", "values_stride", "values_col_stride"])
def sum_equal_kernel(
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    out_ptr,  # (rows, size) contiguous
    ids_stride,
    ids_col_stride,
    values_stride,
    values_col_stride,
    size,
    ENTRIES: tl.constexpr,
):
    """Sum the values of equal ids of a row, for ENTRIES of its ids."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ids_ptr += row * ids_stride
    values_ptr += row * values_stride
    ids = tl.load(ids_ptr + entry * ids_col_stride, mask=entry < size, other=-1)
    total = tl.zeros((ENTRIES,), out_ptr.dtype.element_ty)
    for start in range(0, size, ENTRIES):
        others = start + tl.arange(0, ENTRIES)
        in_bounds = others < size
        other_ids = tl.load(ids_ptr + others * ids_col_stride, mask=in_bounds, other=-2)
        values = tl.load(values_ptr + others * values_col_stride, mask=in_bounds, other=0.0).to(total.dtype)
        total += tl.sum(tl.where(ids[:, None] == other_ids[None, :], values[None, :], 0.0), axis=1)
    tl.store(out_ptr + row * size + entry, total, mask=entry < size)


@triton.jit(do_not_specialize=["total", "size", "start", "cols", "ids_stride", "ids_col_stride", "values_stride"])
def write_entries_kernel(
    tile_ptr,  # (rows, cols)
    ids_ptr,  # (rows, size) int64
    values_ptr,  # (rows, size)
    tile_stride,
    ids_stride,
    ids_col_stride,
    values_stride,
    total,  # rows * size
    size,
    start,  # the class of column 0
    cols,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, entry = number // size, number % size
    exists = number < total
    column = tl.load(ids_ptr + row * ids_stride + entry * ids_col_stride, mask=exists, other=-1) - start
    in_bounds = exists & (column >= 0) & (column < cols)
    value = tl.load(values_ptr + row * values_stride + entry, mask=in_bounds, other=0.0)
    # Equal ids of a row have equal values, so the order of the writes does not matter.
    tl.store(tile_ptr + row * tile_stride + column, value.to(tile_ptr.dtype.element_ty), mask=in_bounds)


def _entries(ids: Tensor) -> int:
    return min(ENTRIES, triton.next_power_of_2(ids.shape[1]))


def row_products(x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Iterator[Launch]:
    entries, accum = _entries(ids), tl.float64 if out.dtype == torch.float64 else tl.float32
    yield build_launch(
        row_products_kernel,
        (len(ids), triton.cdiv(ids.shape[1], entries)),
        None,
        {"ACCUM": accum, "ENTRIES": entries, "DEPTH": DEPTH, **thread_options(x.device, 4)},
        x=x,
        weight=weight,
        ids=ids,
        out=out,
        hidden=x.shape[1],
        vocab_size=len(weight),
        size=ids.shape[1],
    )


def sum_equal(ids: Tensor, values: Tensor, out: Tensor) -> Iterator[Launch]:
    entries, size = _entries(ids), ids.shape[1]
    options = {"ENTRIES": entries, **thread_options(ids.device, 1)}
    grid = len(ids), triton.cdiv(size, entries)
    yield build_launch(sum_equal_kernel, grid, None, options, ids=ids, values=values, out=out, size=size)


def write_entries(tile: Tensor, ids: Tensor, values: Tensor, start: int) -> Iterator[Launch]:
    yield build_launch(
        write_entries_kernel,
        (triton.cdiv(ids.numel(), BLOCK),),
        None,
        {"BLOCK": BLOCK, **thread_options(ids.device, 4)},
        tile=tile,
        ids=ids,
        values=values,
        total=ids.numel(),
        size=ids.shape[1],
        start=start,
        cols=tile.shape[1],
    )
