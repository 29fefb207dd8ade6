"""The case of a call: shapes, dtypes, needed gradients, options and device. Plans are computed from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flce.backends.contract import FUSED_PRODUCT_BLOCK, num_partial_statistics, unsupported_by_fused_products
from flce.core.devices import DeviceRecord
from flce.core.gemm import ALIGNMENT, COLUMN_MULTIPLE, padded_cols
from flce.core.options import ChunkOptions, SkipIgnored
from flce.core.problem import LossSpec, Needs, accumulation_dtype


@dataclass(frozen=True)
class DefaultBytes:
    """Maximum bytes of a tile (logits, or their gradients or exponentials) if there is no budget."""

    one_chunk: int  # up to this size, all tokens are one chunk
    chunk: int  # maximum size of one of several chunks
    chunk_without_sum: int  # the same if dW has the dtype of its sum, so that no separate sum is allocated
    statistics: int | None  # maximum size in a forward without gradients; None: as with gradients


# Measured on an H200, in half precision (benchmarks/notes.md):
#
# | field      | tile, in 2 bytes each            | compared to other sizes                                            |
# |------------|----------------------------------|--------------------------------------------------------------------|
# | one_chunk  | 16,384 x 151,936                 | two chunks: dW is summed, 1.6 ms more (36 in all), equal workspace |
# | chunk      | 8,192 x 128,256                  | larger ones: less than 2% faster                                   |
# | statistics | 2,048 x 31,680 (float32: 14,784) | each tile: 12 us more than its products                            |
#
# On a CPU with two cores smaller chunks are as fast, with 16 cores they are slower: 128 MiB is 1,024 tokens of 32,000
# classes in float32 (see `gemm.MAX_CAST_BYTES`).
DEFAULTS = {
    "cpu": DefaultBytes(128 << 20, 128 << 20, 128 << 20, None),
    "other": DefaultBytes(4864 << 20, 2 << 30, 1 << 30, 124 << 20),
}
# The planner's numbers of tokens of a chunk are divisible by this.
ROW_MULTIPLE = 128
# Wide tiles for statistics have a multiple of STATISTICS_COLS = 132 * 16 classes: 2048 x 2112 logits are as many as 132
# product blocks of 256 x 128 have, one for each multiprocessor of an H100 or H200.
#
# | tiles of 8192 x 4096 x 128256 | times the product of all at once |
# |-------------------------------|----------------------------------|
# | 2048 x 31680 = 2048 x 15*2112 | 1.014                            |
# | others of about that size     | 1.03 to 1.08                     |
STATISTICS_ROWS = 2048
STATISTICS_COLS = 2112
TEACHER_ROWS, TEACHER_BYTES = 512, 300 << 20  # With a teacher: as many logits as 512 full rows have, at most 300 MiB.
# Maximum number of tokens of a chunk for statistics if logits stay in registers. The fused product then allocates 33
# MiB for 128,256 classes.
STATISTICS_ROWS_IN_REGISTERS = 8192
# If all logits of a call have at most this many bytes, one pass over them in memory is used. For more logits, stored
# exponentials need less memory:
#
# | bfloat16 inputs, H200  | MiB  | times the bare products: pass | exponentials in registers |
# |------------------------|------|-------------------------------|---------------------------|
# |   64 x 4096 x 128256   |   31 | 1.05                          | 1.38                      |
# |  512 x 2048 x 128256   |  251 | 1.21                          | 1.19, with host time 1.85 |
# | 1024 x 4096 x 128256   |  501 | 1.11                          | 1.16                      |
# | 4096 x 4096 x  32768   |  512 | 1.12                          | 1.06, with host time 1.25 |
# | 2048 x 2048 x 128256   | 1002 | 1.06                          | 1.08                      |
FEW_LOGITS_BYTES = 512 << 20
# Maximum bytes of a block of logits: float32 logits of some tokens and classes of a half-precision tile, which stay in
# memory only until their gradients or exponentials are written to the tile. Small enough for the cache, large enough
# for the host, which launches two kernels for each block. 16384 x 1024 x 151936 without fused products, in multiples of
# the time of the bare products (H200):
#
# | rows, MiB | device time only | with host time |
# |-----------|------------------|----------------|
# | 2048, 24  | 1.35             | 3.2            |
# | 2048, 32  | 1.38             | 3.0            |
# | 2048, 64  | 1.35             | 1.6            |
# | 4096, 32  | 1.36             | 1.9            |
# | 4096, 64  | 1.35             | 1.4            |
BLOCK_BYTES = 64 << 20
# A block has at least this share of the bytes of a large tile, so that the host launches few kernels.
MIN_BLOCK_SHARE = 1 / 32
BLOCK_ROWS = 2048
# Gradients overwrite the float32 logits of a tile of at most this many bytes. The host then launches one product and
# one kernel for a tile. With blocks, half of these bytes of gradients need a quarter of these bytes for logits.
OVERLAPPING_BYTES = 256 << 20
# If the gradient of all logits of a call has at most this many bytes and gradients are deferred, forward and backward
# compute all logits in one product. Two products of the same shape agree to the bit. If logits have values in the
# thousands, a difference in their last bits changes a probability by a thousandth.
SINGLE_PRODUCT_BYTES = 16 << 20
# If a tile has fewer than COLUMN_MULTIPLE classes, a block of its logits has at most 1 / NARROW_TILE_DIVISOR of the
# tile's bytes. Only plans of the least memory have such tiles.
NARROW_TILE_DIVISOR = 32


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of the tensors that a call computes."""

    logits: torch.dtype
    """Logits in memory."""
    logits_grad: torch.dtype
    """Gradients of logits, and exponentials."""
    sums: torch.dtype
    """Sums of gradients over tiles."""
    grads: torch.dtype
    """dX and dW that a schedule returns."""
    has_teacher: bool = False
    """True if the logits of a teacher need as much memory as the logits."""

    @functools.cached_property
    def unscales_sums(self) -> bool:
        """True if sums of gradients are divided by the gradient scale when they are rounded. Gradients of logits have a
        scale in float16, which has no numbers below 6e-8: a probability times 1 / N is smaller. If forward computes the
        gradients, sums stay float32 and scaled, and backward divides the upstream gradient by the scale."""
        return self.logits_grad == torch.float16 == self.grads

    @property
    def has_wider_logits(self) -> bool:
        """True if logits have more bytes than their gradients. Then gradients overwrite the logits of a small tile
        (`can_overlap`). Logits of a larger tile are computed in blocks, and their gradients are written to the tile."""
        return self.logits.itemsize > self.logits_grad.itemsize

    def fits_single_product(self, rows: int, cols: int) -> bool:
        """Return True if deferred gradients of a call of this size compute all logits in one product."""
        return rows <= BLOCK_ROWS and rows * padded_cols(cols) * self.logits_grad.itemsize <= SINGLE_PRODUCT_BYTES

    def can_overlap(self, rows: int, cols: int) -> bool:
        """Return True if gradients overwrite the logits of a tile of this size, which have more bytes. The tile must be
        small, and not so narrow that most of it is padding."""
        is_small = rows * padded_cols(cols) * self.logits.itemsize <= OVERLAPPING_BYTES
        is_wide = cols >= COLUMN_MULTIPLE or self.fits_single_product(rows, cols)
        return self.has_wider_logits and is_small and is_wide and not self.has_teacher

    def logits_per_block(self, rows: int, cols: int) -> int:
        """Return the number of logits of a block for a tile of this size, at most half of the tile's bytes."""
        tile_bytes = rows * padded_cols(cols) * self.logits_grad.itemsize
        divisor = 2 if cols >= COLUMN_MULTIPLE else NARROW_TILE_DIVISOR
        block_bytes = min(max(BLOCK_BYTES, int(tile_bytes * MIN_BLOCK_SHARE)), tile_bytes // divisor)
        return max(COLUMN_MULTIPLE, block_bytes // self.logits.itemsize)


@dataclass(frozen=True)
class Case:
    """Everything that the choice of a schedule depends on: a call's shapes, dtypes, options and device."""

    num_tokens: int
    hidden_sizes: tuple[int, ...]
    """H of each linear term, the head first."""
    vocab_size: int
    dtype: torch.dtype
    device_type: str
    backend: str
    has_fused_products: bool
    """True if the backend has fused products for the device (`backends.has_fused_products`) and the rows are
    contiguous."""
    device: DeviceRecord
    spec: LossSpec
    needs: Needs
    options: ChunkOptions
    num_processes: int | None = None
    """Number of processes over which the head is divided, or None. `vocab_size` is then of the process with most
    classes."""
    teacher: tuple[tuple[int, ...], torch.dtype] | None = None
    """H of each term and dtype of the teacher of a divergence, or None."""

    def check(self) -> None:
        """Raise TypeError or ValueError if flce or an option does not support the dtype. Called once for each plan."""
        dtype, accum, logits = self.dtype, self.options.accum_dtype, self.options.logits_dtype
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
        if accum not in {torch.float32, accumulation_dtype(dtype)} | ({dtype} & {torch.bfloat16}):
            raise ValueError(
                "accum_dtype must be torch.float32 or, for bfloat16 and float64 inputs, the dtype of the input; "
                f"got {accum} with {dtype} inputs"
            )
        if logits not in (None, dtype, accumulation_dtype(dtype)):
            raise ValueError(
                f"logits_dtype must be the dtype of the input or {accumulation_dtype(dtype)}; "
                f"got {logits} with {dtype} inputs"
            )

    @functools.cached_property
    def adds_dw(self) -> bool:
        """True if backward adds dW to the gradients of weights: `ChunkOptions.gradient_accumulation_fusion`."""
        return self.options.gradient_accumulation_fusion and any(self.needs.weights)

    @property
    def must_defer(self) -> bool:
        """True if gradients cannot be computed in forward."""
        return self.spec.reduction == "none" or self.adds_dw

    @property
    def samples(self) -> bool:
        """True if gradients are computed from sampled entries: `ChunkOptions.sample_below` is set, and they can."""
        return self.options.sample_below is not None and self.dense_reason is None

    @property
    def dense_reason(self) -> str | None:
        """The reason why gradients cannot be sampled, in words; None if they can."""
        if self.options.strategy == "vocab":
            return "strategy 'vocab'"
        if self.teacher is not None:
            return "a divergence"
        if self.spec.label_smoothing and self.spec.softcap is not None:
            return "label smoothing with a softcap"
        return None

    def dtypes(self, deferred: bool) -> Dtypes:
        """Return the dtypes of a schedule. `deferred`: gradients are computed in backward."""
        logits, logits_grad = logits_dtypes(self.dtype, self.device_type, self.options)
        if deferred:  # Rounded logits of two products of different shapes would differ.
            logits = accumulation_dtype(self.dtype)
        sums = accumulation_dtype(self.dtype)
        if self.dtype == torch.bfloat16 and self.device_type != "cpu":  # CPU products sum in float32, see `gemm`.
            sums = self.options.accum_dtype
        # If a float16 gradient were rounded before it is multiplied by the upstream gradient (with a GradScaler, its
        # loss scale), it would underflow.
        grads = torch.float32 if self.dtype == torch.float16 and not deferred else self.dtype
        return Dtypes(logits, logits_grad, sums, grads, self.teacher is not None)

    @functools.cached_property
    def skip_ignored(self) -> SkipIgnored:
        """True if rows of ignored tokens are dropped. "auto" on a CPU: if this is faster, and dW would not lose a NaN
        (`rows._has_nonfinite_ignored_rows`). Otherwise, and for a divided head, "auto" is False."""
        skip = self.options.skip_ignored
        return False if skip == "auto" and (self.device_type != "cpu" or self.num_processes is not None) else skip

    @functools.cached_property
    def supports_fused_products(self) -> bool:
        """True if fused products compute everything that the case requests, so that logits can stay in registers."""
        return self.logits_in_memory_reason is None

    @property
    def logits_in_memory_reason(self) -> str | None:
        """The reason why logits are written to memory, in words; None if they can stay in registers."""
        if not self.has_fused_products:
            return "no kernel keeps them in registers on this device, or the rows are not contiguous"
        if len(self.hidden_sizes) != 1:
            return "adapters"
        if self.hidden_sizes[0] % ALIGNMENT:
            return f"H is not divisible by {ALIGNMENT}"
        if self.dtype.itemsize != 2:
            return dtype_text(self.dtype)
        return ", ".join(unsupported_by_fused_products(self.spec)) or None

    @functools.cached_property
    def can_multiply_exponentials(self) -> bool:
        """True if matrix products can read exponentials, and their results can be normalized. Products write the
        exponentials, or a kernel computes them from logits that are in memory one block at a time."""
        dtypes = self.dtypes(False)
        return (
            (self.supports_fused_products or (self.backend == "triton" and dtypes.has_wider_logits))
            and self.dtype == torch.bfloat16 == dtypes.logits_grad  # The range of float16 is too small.
            and not self.spec.label_smoothing
        )

    @property
    def has_few_logits(self) -> bool:
        """True if all logits may be in memory at once."""
        return self.num_tokens * self.vocab_size * self.dtypes(False).logits.itemsize <= FEW_LOGITS_BYTES

    @property
    def can_borrow(self) -> bool:
        """True if gradients of a tile of logits may be stored in the memory of dW of the head."""
        return self.needs.weights[0] and not self.adds_dw and self.dtypes(True).logits_grad == self.dtype

    @property
    def chunk_rows(self) -> int:
        """Number of tokens of a chunk: all, or at most `ChunkOptions.chunk_rows`."""
        return max(1, min(self.num_tokens, self.options.chunk_rows or self.num_tokens))

    @property
    def defaults(self) -> DefaultBytes:
        return DEFAULTS["cpu" if self.device_type == "cpu" else "other"]

    @property
    def default_chunk_entries(self) -> int:
        """Number of entries of the gradient of a chunk's logits, if there is no budget."""
        return self.defaults.chunk // self.dtypes(True).logits_grad.itemsize

    def equal_chunk_rows(self, rows: int) -> int:
        """Return the number of tokens of a chunk, at most `rows`, so that chunks have about equal lengths."""
        if self.num_tokens <= rows or rows < ROW_MULTIPLE or self.options.chunk_rows is not None:
            return max(1, min(self.num_tokens, rows))
        equal = ceil_div(self.num_tokens, ceil_div(self.num_tokens, rows))
        return min(rows, ceil_div(equal, ROW_MULTIPLE) * ROW_MULTIPLE)

    def statistics_tile_size(self, rows: int, cols: int, in_registers: bool) -> tuple[int, int]:
        """Return the numbers of tokens and classes of a tile for statistics. `rows`, `cols`: of a tile for gradients;
        without gradients rows * cols is the wanted number of logits in memory.

        The tile may be as large as the tile for gradients or as all returned gradients: neither is allocated yet.
        """
        limit, dtypes = self.defaults.statistics, self.dtypes(self.needs.any)
        has_all_logits = self.needs.any and not in_registers and rows >= self.num_tokens and cols >= self.vocab_size
        if limit is None or (has_all_logits and dtypes.fits_single_product(rows, cols)):
            return rows, cols
        is_gradient = self.needs.any and (in_registers or not dtypes.can_overlap(rows, cols))
        tile_bytes = rows * padded_cols(cols) * (dtypes.logits_grad if is_gradient else dtypes.logits).itemsize
        if self.teacher is not None:
            limit = max(limit, min(TEACHER_ROWS * padded_cols(self.vocab_size) * dtypes.logits.itemsize, TEACHER_BYTES))
        available_bytes = min(limit, max(tile_bytes, self.returned_bytes))
        max_rows = rows if self.needs.any or self.options.chunk_rows else max(1, self.num_tokens)
        if in_registers:
            row_bytes = 4 * num_partial_statistics(self.spec) * ceil_div(self.vocab_size, FUSED_PRODUCT_BLOCK)
            fitting = max(1, available_bytes // row_bytes)
            if fitting > ROW_MULTIPLE:  # results of later chunks are then aligned
                fitting -= fitting % ROW_MULTIPLE
            return min(max_rows, STATISTICS_ROWS_IN_REGISTERS, fitting), cols
        entries = available_bytes // dtypes.logits.itemsize
        rows = min(max_rows, STATISTICS_ROWS, entries)
        width = entries // rows
        multiple = STATISTICS_COLS if width >= STATISTICS_COLS else COLUMN_MULTIPLE
        cols = min(self.vocab_size, width // multiple * multiple or width)
        full_rows = rows * cols // padded_cols(self.vocab_size) // ROW_MULTIPLE * ROW_MULTIPLE
        has_mixture = getattr(self.spec, "divergence", None) == "jsd" and self.num_processes is None
        return (full_rows, self.vocab_size) if has_mixture and full_rows else (rows, cols)

    @functools.cached_property
    def returned_bytes(self) -> int:
        """Bytes of the returned gradients."""
        dx_entries = self.num_tokens * sum(select_needed(self.hidden_sizes, self.needs.inputs))
        dw_entries = 0 if self.adds_dw else self.vocab_size * sum(select_needed(self.hidden_sizes, self.needs.weights))
        db_bytes = self.vocab_size * accumulation_dtype(self.dtype).itemsize if self.needs.bias else 0
        return self.dtype.itemsize * (dx_entries + dw_entries) + db_bytes

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.hidden_sizes))
        each = "" if self.num_processes is None else f" of each of {self.num_processes} processes"
        return f"N={self.num_tokens}, H={sizes}, V={self.vocab_size}{each} in {dtype_text(self.dtype)}"


def logits_dtypes(dtype: torch.dtype, device_type: str, options: ChunkOptions) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of logits in memory, if they are computed once, and the dtype of their gradient."""
    if device_type == "cpu":
        # Without processor instructions for them, CPU products in half precision are up to a hundred times slower than
        # in float32. So products on CPUs are in float32.
        return accumulation_dtype(dtype), accumulation_dtype(dtype)
    return options.logits_dtype or accumulation_dtype(dtype), dtype


def select_needed(sizes: tuple[int, ...], needed: tuple[bool, ...]) -> list[int]:
    return [size for size, need in zip(sizes, needed, strict=True) if need]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
