"""The Triton backend: it implements `flce.backends.contract.Backend` by launching kernels. `flce.backends` chooses it.

This module has the backend's class and the launch sizes of the cross-entropy kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce.backends.contract import GradientCall, RowInputs, RowOutputs, StatisticsCall, TileCall
from flce.backends.formulas import LOGIT_FIELDS
from flce.backends.triton import divergence, entries, product, reduction, softmax
from flce.backends.triton.cross_entropy import cross_entropy_kernel
from flce.backends.triton.exponentials import combine_rows, fused_exponentials
from flce.backends.triton.launch import (
    LINE_BYTES,
    MAX_REGISTERS,
    MIN_FILLED_SHARE,
    SECTOR_BYTES,
    VECTOR_BYTES,
    WARP,
    Launch,
    build_launch,
    fewest_warps,
    filled_share,
    is_amd,
    spills_more,
    thread_options,
)
from flce.backends.triton.math import row_gradient_kernel
from flce.backends.triton.replay import run
from flce.backends.triton.weight_gradient import add_target_terms, unscaled_weight_gradient, weight_gradient
from flce.core.devices import device_record
from flce.core.problem import LossSpec, accumulation_dtype


class LaunchShape(NamedTuple):
    """Launch sizes of one kind of pass."""

    # For a row that fits in one block. A program reads such a row once, without a loop, before it reads anything else.
    single_block_parts: int
    single_block_warps: int  # the maximum; a shorter row gets fewer
    # For a row of several blocks. `row_bytes` are limits: the number of warps is the first one whose limit is not
    # smaller than the bytes of a row, or the last one. Without limits `fewest_warps` chooses.
    parts: int
    warps: tuple[int, ...]
    row_bytes: tuple[int, ...] = ()
    # Parts for a row of 16-bit logits in one block that would otherwise need all of `single_block_warps`: the values
    # stay 16 bits wide. Not used with extras, because extras need registers.
    narrow_parts: int | None = None
    # Registers of a thread, for a row of one block whose gradient has the dtype of the logits.
    single_block_registers: int = MAX_REGISTERS
    # The minimum for a row of one block that fills these warps.
    single_block_min_warps: int = 1


# Figures were measured on an H200. They are percentages of the speed of a copy that moves the same number of bytes
# (each logit is read once, its gradient is written once). The logits are 4096 rows of bfloat16, unless another dtype is
# named. For a row of one block each thread has 64 bytes in flight.
SHAPES = {
    # One warp for a row needs no synchronization at the end of the row. Long rows reach 99 with nearly any choice. For
    # short rows the time of a launch counts: a copy of half the bytes reaches 89 at 4096 columns, 85 at 2048.
    #   columns                4096    10007    3001    3001 float32
    #   one warp               74      85       71      86
    #   four warps             67      73       55      74
    #   one block of eight             53
    "statistics": LaunchShape(4, 2, 4, (1, 4, 8), (32 << 10, 64 << 10)),
    # Very long rows reach 92.
    #   columns            12000 float32    16384    16384 float32    20000    32001    50257
    #   one of 4 parts     97               97       97                        84
    #   one of 8 parts     89                                         97       94       95
    #   several                             87       91               90       86       86
    "gradient": LaunchShape(4, 32, 2, (16,), narrow_parts=8),
    # 8192 x 152064 reaches 82 (32 warps), 16384 x 50257 reaches 81 (8 warps; 16: 77, 32: 55).
    #   columns                           4096    8192        16384
    #   one block of 48 registers         87      91          90
    #   one block of 64 registers         87      88          87
    #   values stay 16 bits wide                  81 to 84    87
    #   several                                   87          89
    "both": LaunchShape(4, 8, 4, (8, 16, 32), single_block_registers=48),
    #   columns                       2048    3001    4096    8192
    #   one block of 40 registers     92      95      92      97
    #   one block of 48 registers             92
    #   one block of 64 registers     80              81
    #   several                                               93
    "both, float32": LaunchShape(4, 16, 4, (8, 16, 32), single_block_registers=40),
    # Softcap, weights and entropies need registers: with them blocks of 2 parts are up to a quarter faster than blocks
    # of 4.
    "both, with extras": LaunchShape(2, 16, 2, (8, 16, 32)),
    # A half-precision gradient of float32 logits. A call of 8192 x 4096 x 128256 in blocks of 4096 columns takes 1.06
    # times the time of its products with 8 warps for a row, 1.15 with 4 and 1.13 with 16.
    "narrower": LaunchShape(4, 16, 4, (8, 16, 32), single_block_min_warps=8),
}
# If a row of several blocks fills less than MIN_FILLED_SHARE of them, the number of lanes is halved, down to this
# number. Statistics and gradient:
#   columns             10007                12000    5003 float32
#   more lanes          66 (61% of two)      76       79
#   half the lanes      82 (81% of three)    87       89
FEWEST_LANES = 128
# If rows with edges fill less than EDGED_FILLED of one block of at least EDGED_LANES lanes, several blocks are faster:
# 87 instead of 72 (10007 columns, gradient). Without edges 20000 columns reach 97 in such a block.
EDGED_LANES = 512
EDGED_FILLED = 2 / 3
# Results of a row that need registers, and the subset that each lane sums.
EXTRAS = ("entropy", "argmax", "mean_logit")
SUMS = ("entropy", "mean_logit")
# The maximum number of parts of a block with statistics, if 0, 1 or more of these are computed: SUMS, label smoothing,
# the argmax in addition to SUMS, class weights in addition to label smoothing. The table has the bytes that a thread
# with 64 registers spills to memory (bfloat16, compiled for compute capability 9.0, or for 8.6 if that spills more):
#   parts                                  4      2      1
#   entropy                                228    0
#   label smoothing, class weights         140    0      0
#   both, gradient over wider logits              140    0
#   entropy and argmax                     460    72     0
#   entropy and label smoothing            400    64     0
#   both, softcap, bias, weights           1336   288    12
MOST_PARTS = (4, 2, 1)
# The maximum for a gradient without statistics, with label smoothing and class weights: with all options 4 parts spill
# 268 bytes, 2 parts spill 0.
MOST_WEIGHTED_PARTS = 2
# The maximum over wider logits, if the compiler `spills_more`: with all options 4 parts spill 100 bytes in a gradient
# without statistics (10.0), and in exponentials 140 (10.0) or 164 (12.0).
MOST_NARROWER_PARTS = 2
# With one part, or if `_needs_more_registers`, a program has at most this number of warps, and its threads have twice
# MAX_REGISTERS. Spilled bytes with 32 warps of MAX_REGISTERS: 80 with one part (9.0), 300 in float64 (9.0), 336 on
# gfx942; with 8 such warps 72 in bfloat16 on 7.5.
DEMANDING_WARPS = 16

ROW_GRADIENT_BLOCK_ROWS = 128


def _row_gradient(call: GradientCall) -> Iterator[Launch]:
    out = call.row_gradient
    options = {
        "ACCUM": tl.float64 if out.dtype == torch.float64 else tl.float32,
        "ROWS": ROW_GRADIENT_BLOCK_ROWS,
    }
    grid = (triton.cdiv(out.shape[1], ROW_GRADIENT_BLOCK_ROWS),)
    yield build_launch(row_gradient_kernel, grid, call, options, LOGIT_FIELDS)


class TritonBackend:
    name = "triton"

    def statistics(self, logits: Tensor, call: StatisticsCall, state: Tensor | None) -> None:
        run(_cross_entropy, logits, None, call, state)

    def gradient(self, logits: Tensor, grad: Tensor, call: GradientCall) -> None:
        run(_cross_entropy, logits, grad, call, None)

    def loss_and_gradient(self, logits: Tensor, grad: Tensor, call: StatisticsCall) -> None:
        run(_cross_entropy, logits, grad, call, None)

    def exponentials(self, logits: Tensor, exps: Tensor, call: StatisticsCall, state: Tensor, factors: Tensor) -> None:
        run(_cross_entropy, logits, exps, call, state, factors)

    divergence = staticmethod(functools.partial(run, divergence.divergence))
    row_gradient = staticmethod(functools.partial(run, _row_gradient))
    fused_statistics = staticmethod(product.fused_statistics)
    fused_gradient = staticmethod(product.fused_gradient)
    fused_exponentials = staticmethod(fused_exponentials)
    combine_rows = staticmethod(functools.partial(run, combine_rows))
    weight_gradient = staticmethod(weight_gradient)
    unscaled_weight_gradient = staticmethod(unscaled_weight_gradient)
    add_target_terms = staticmethod(add_target_terms)
    mark_entries = staticmethod(functools.partial(run, entries.mark_entries))
    list_entries = staticmethod(entries.list_entries)
    sampled_gradient = staticmethod(functools.partial(run, entries.sampled_gradient))
    sampled_weight_gradient = staticmethod(functools.partial(run, entries.sampled_weight_gradient))
    row_products = staticmethod(functools.partial(run, entries.row_products))
    sum_equal = staticmethod(functools.partial(run, entries.sum_equal))
    write_entries = staticmethod(functools.partial(run, entries.write_entries))
    loss_scales = staticmethod(reduction.loss_scales)
    reduce = staticmethod(reduction.reduce)
    scale_rows_ = staticmethod(functools.partial(run, reduction.scale_rows))

    def scale_(self, xs: Sequence[Tensor], factor: Tensor) -> None:
        xs = [x for x in xs if x.numel()]
        for x, second in itertools.zip_longest(xs[::2], xs[1::2]):
            run(reduction.scale, x, x, second, factor)

    def scale_cast(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        run(reduction.scale, x, out, None, factor)
        return out

    def softmax(self, x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        return softmax.process_rows(x, None, dtype, log)

    def softmax_backward(self, grad: Tensor, y: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        return softmax.process_rows(y, grad, dtype, log)


def _cross_entropy(
    logits: Tensor,  # (rows, cols), unit column stride
    grad: Tensor | None,  # shape of logits; None: no gradient
    call: TileCall,
    state: Tensor | None,
    factors: Tensor | None = None,  # given: `grad` receives exponentials instead of the gradient
) -> Iterator[Launch]:
    inputs, spec, tile, *_ = call
    out = call.out if isinstance(call, StatisticsCall) else None
    num_rows, cols = logits.shape
    extras = (
        spec.softcap is not None
        or inputs.bias is not None
        or inputs.class_weight is not None
        or (out is not None and any(getattr(out, name) is not None for name in EXTRAS))
    )
    grad_dtype = None if grad is None else grad.dtype
    edges = (tile.is_first or out is None) and _rows_have_edges(logits, grad, tile.accessible_cols)
    narrower = grad_dtype is not None and grad_dtype.itemsize < logits.element_size()
    most_parts = _max_parts(spec, inputs, out, narrower, logits.device)
    launch = _launch_size(cols, logits.dtype, grad_dtype, out is not None, extras, logits.device, edges, most_parts)
    lanes, vector = launch["LANES"], launch["VECTOR"]
    head_bytes = _head_bytes(logits.element_size(), lanes, vector) if edges else 0
    one_block = launch["PARTS"] * lanes * vector >= (cols // vector * vector if head_bytes else cols)
    options = {
        "ACCUM": tl.float64 if accumulation_dtype(logits.dtype) == torch.float64 else tl.float32,
        "LOAD_STATE": not tile.is_first,
        "STORE_STATE": not tile.is_last,
        "FINISH": out is not None and tile.is_last,
        "NARROWING": grad is not None and grad.dtype != logits.dtype and grad.data_ptr() == logits.data_ptr(),
        "HEAD_BYTES": head_bytes,
        "ONE_BLOCK": one_block,
        **launch,
    }
    yield build_launch(
        cross_entropy_kernel,
        (num_rows,),
        call,
        options,
        logits=logits,
        grad=grad,
        state=state,
        factors=factors,
    )


def _rows_have_edges(logits: Tensor, grad: Tensor | None, accessible_cols: int) -> bool:
    """Return True if rows begin or end in the middle of a vector, and gradients at the same place of a vector.

    If logits and gradients begin at different places of a vector, the kernel has to load single elements.
    """
    tensors = [logits] if grad is None or grad is logits else [logits, grad]
    # The compiler distinguishes only arguments that are multiples of 16 from all others.
    numbers = [accessible_cols, *(n for t in tensors for n in (t.data_ptr(), t.stride(0)))]
    if not any(n % 16 for n in numbers):
        return False
    if len(tensors) == 1:
        return True
    if logits.element_size() != tensors[1].element_size():
        return False
    steps = [t.stride(0) * t.element_size() if len(t) > 1 else 0 for t in tensors]
    places = [(t.data_ptr() % VECTOR_BYTES, step % VECTOR_BYTES) for t, step in zip(tensors, steps, strict=True)]
    return places[0] == places[1]


def _head_bytes(itemsize: int, lanes: int, vector: int) -> int:
    """Return the alignment of vectors in bytes with which each lane has at most one column of head and tail, or 0 if
    there are too few lanes.

    A cache line is preferred: 50257 float32 columns in place reach 79% of the speed of a copy, with sectors 73%.
    """
    for size in (LINE_BYTES, SECTOR_BYTES, VECTOR_BYTES):
        if size // itemsize - 1 + vector - 1 <= lanes:
            return size
    return 0


def _max_parts(spec: LossSpec, inputs: RowInputs, out: RowOutputs | None, narrower: bool, device: torch.device) -> int:
    """Return the maximum number of parts of a block. `narrower`: the gradient has a narrower dtype than the logits."""
    smoothing = spec.label_smoothing != 0.0
    weighted = smoothing and inputs.class_weight is not None
    if out is None:
        most = MOST_WEIGHTED_PARTS if weighted else MOST_PARTS[0]
    else:
        num_sums = smoothing + weighted + any(getattr(out, name) is not None for name in SUMS)
        most = MOST_PARTS[min(2, num_sums + (num_sums > 0 and out.argmax is not None))]
    return min(most, MOST_NARROWER_PARTS) if narrower and spills_more(device) else most


def _needs_more_registers(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if kernels need more registers than usual: a float64 value needs two; a device older than compute
    capability 8.0 converts bfloat16 to float32 and back by several operations; AMD's compiler keeps more values live.
    """
    record = device_record(device)
    no_bfloat16 = dtype == torch.bfloat16 and 0 < record.capability < 80
    return dtype == torch.float64 or no_bfloat16 or is_amd(record)


@functools.lru_cache(maxsize=256)
def _launch_size(
    cols: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    statistics: bool,
    extras: bool,
    device: torch.device,
    edges: bool = False,
    most_parts: int = MOST_PARTS[0],
) -> dict[str, int]:
    """Return the shape of a block and the options of the launch."""
    # The narrower dtype decides: the compiler chooses one layout of a block for all of its accesses.
    vector = VECTOR_BYTES // min(dtype.itemsize, (grad_dtype or dtype).itemsize)
    if not statistics:
        shape = SHAPES["gradient"]
    elif grad_dtype is None:
        shape = SHAPES["statistics"]
    elif grad_dtype.itemsize < dtype.itemsize and not extras:
        shape = SHAPES["narrower"]
    elif extras or dtype == torch.float64:
        shape = SHAPES["both, with extras"]
    else:
        shape = SHAPES["both, float32" if dtype == grad_dtype == torch.float32 else "both"]
    vectors = max(1, cols // vector if edges else triton.cdiv(cols, vector))
    demanding = most_parts == 1 or _needs_more_registers(dtype, device)
    single_block_warps = min(shape.single_block_warps, DEMANDING_WARPS) if demanding else shape.single_block_warps
    parts = min(shape.single_block_parts, most_parts)
    if shape.narrow_parts and dtype.itemsize == 2 and not extras and vectors > parts * 16 * single_block_warps:
        parts = shape.narrow_parts
    one_block = vectors <= parts * 32 * single_block_warps
    if one_block:
        # One vector for each of many lanes is faster than several vectors for each of fewer lanes.
        while parts > 1 and 32 * shape.single_block_min_warps * parts // 2 >= vectors:
            parts //= 2
        lanes = triton.next_power_of_2(triton.cdiv(vectors, parts))
        if edges and lanes >= EDGED_LANES and filled_share(vectors, parts * lanes) < EDGED_FILLED:
            parts, lanes, one_block = min(shape.parts, most_parts), lanes // 2, False
    else:
        row_bytes = cols * dtype.itemsize
        if shape.row_bytes:
            limits = zip(shape.warps, (*shape.row_bytes, row_bytes), strict=True)
            warps = next(count for count, most in limits if row_bytes <= most)
        else:
            most_warps = DEMANDING_WARPS if demanding else max(shape.warps)
            warps = fewest_warps([count for count in shape.warps if count <= most_warps], row_bytes, device)
        parts, lanes = min(shape.parts, most_parts), 32 * warps
        # Second condition: the row is too long for `single_block_warps`, but shorter than one block of these lanes.
        while lanes > FEWEST_LANES and (
            filled_share(vectors, parts * lanes) < MIN_FILLED_SHARE or parts * lanes > vectors
        ):
            lanes //= 2
    is_plain = one_block and dtype == grad_dtype and not extras
    registers = 2 * MAX_REGISTERS if demanding else shape.single_block_registers if is_plain else MAX_REGISTERS
    options = thread_options(device, max(1, lanes // WARP), registers)
    return {"PARTS": parts, "LANES": lanes, "VECTOR": vector, **options}
