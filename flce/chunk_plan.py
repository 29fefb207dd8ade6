"""What a call will do, as data: its tiles and sweeps, and the bytes that these take. `planning` chooses the sizes.

Pure arithmetic on shapes. Nothing here depends on anything but the plan's fields.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flce.backends.contract import PRODUCT_BLOCK, STATE_SLOTS, products_know
from flce.backends.eager import SCALE_SLAB, slab_rows, slab_temporaries
from flce.borrowing import (
    BLOCK_MULTIPLE,
    COMPACTION_ROWS,
    BorrowedBlocks,
    ExponentialTile,
    exponential_tiles,
    halfway,
)
from flce.gemm import ALIGNMENT, CAST_BYTES, COLUMN_MULTIPLE, padded_cols
from flce.problem import LossSpec, Needs, accumulation_dtype


@dataclass(frozen=True)
class Defaults:
    """Bytes of logits without a budget."""

    one_chunk: int  # all tokens, if their logits take no more
    chunk: int  # otherwise
    no_sum: int  # where that takes no copy of it: the gradient is not of half precision
    statistics: int | None  # of a forward that makes no gradients; None: what else the plan says


# On an H200, in half precision:
# * a weight gradient of 128256 x 4096 that is summed over two chunks takes 0.8 ms more in its products and 0.8 ms in
#   its cast, of 36 ms for 8192 tokens; with the logits in one piece (2004 MiB) that time is saved at the same
#   workspace, since there is no float32 copy. 4.75 GiB are 16,384 tokens of 151,936 classes.
# * more than 2 GiB a chunk (8,192 tokens of 128,256 classes) gains less than 2% over that.
# * where nothing is summed over chunks, less does as well, see `planning.WITHIN`.
# * statistics of a tile take 13 us and 12 us more for each 64 MiB (part of it is still in the L2 cache): the larger,
#   the better, and 128 MiB are to be enough for a call without gradients. See `STATISTICS_COLS`.
# On a CPU smaller chunks lose nothing: 64 MiB is 512 tokens of 32,000 classes in float32.
DEFAULTS = {
    "cpu": Defaults(64 << 20, 64 << 20, 64 << 20, None),
    "other": Defaults(4864 << 20, 2 << 30, 1 << 30, 124 << 20),
}
ROW_MULTIPLE = 128
# Tokens of a tile for statistics, and what its classes are a multiple of: a product of 2,048 x 2,112 is 132 blocks of
# 256 x 128, one for each multiprocessor of an H100 or H200, so that none waits for the last ones. (At
# 8192 x 4096 x 128256 the tiles' products take 1.014 times that of all at once, others of their size 1.03 to 1.08.)
STATISTICS_ROWS = 2048
STATISTICS_COLS = 2112
# Tokens whose statistics are made at once where no logits are in memory: 33 MiB for 128,256 classes.
PRODUCT_ROWS = 8192
# Where exponentials are normalized after the products (`backends/triton/exponentials.py`): of dtypes with the range for
# it, and from so many entries of the head on, V x H. It takes some fifteen more launches, a millisecond of the host,
# which a device that is through with a small head sooner would wait for.
LATE_DTYPES = (torch.bfloat16,)
LATE_HEAD = 1 << 25
# Of several chunks, for the same reason, those of so many entries or more, rows x V x H: 0.4 ms for a product. (16384 x
# 768 x 50257 in ten chunks of 2^36, 256 MiB: 11 to 20 ms, with a pass 7.4; in four of 2^37, 512 MiB: from 6.4.)
LATE_CHUNK = 1 << 37
# Bytes of vectors with an entry per token that it takes: factors, references, targets in ascending order and what
# sorting takes.
LATE_ROW_BYTES = 72


@dataclass(frozen=True)
class CallShape:
    """What a plan is made for: all that is known of a call but its `ChunkOptions`."""

    num_tokens: int
    hidden_sizes: tuple[int, ...]
    """Of each linear term, the head first."""
    vocab_size: int
    dtype: torch.dtype
    device_type: str
    backend: str
    has_product: bool
    """Of the backend, on the device: `backends.has_product`."""
    spec: LossSpec
    needs: Needs


@dataclass(frozen=True)
class Sweep:
    """One pass over all tiles in which gradients are made, and in which dtypes they are summed.

    A sweep that makes gradients of weights goes through all tokens of a block of classes before the next block;
    one that does not, through all classes of a chunk of tokens.
    """

    rows: int
    cols: int
    inputs: bool
    weights: bool
    """With the bias."""
    input_dtype: torch.dtype
    weight_dtype: torch.dtype
    """Of the gradients as the sweep leaves them."""
    input_sum: torch.dtype | None
    """Of the sum over classes for one chunk of tokens, where it is made apart and rounded when it is complete."""
    weight_sum: torch.dtype | None
    """Of the sum over tokens for one block of classes, likewise."""
    weight_halves: bool
    """Whether the sum over tokens is in float32, of the classes before `halfway` in the memory of the gradient."""
    start: int
    stop: int
    """Its classes."""
    weight_stop: int
    """With `weight_halves`: the classes from there on have no gradient of the weight made."""
    lent_cols: int
    """Columns of the weight gradient whose rows from `stop` of a block to that of the sweep lend their memory; or 0."""
    most_cols: int
    """Of a tile in lent memory."""

    def blocks(self) -> Iterator[tuple[slice, bool]]:
        """The blocks of classes in their order, and whether a tile of one is made in lent memory."""
        return self.borrowed.of(self.start, self.stop)

    @property
    def borrowed(self) -> BorrowedBlocks:
        return BorrowedBlocks(self.rows, self.cols, self.lent_cols, self.most_cols)

    @property
    def widest(self) -> int:
        """Classes of the largest block, which is the first."""
        first, _ = next(self.blocks())
        return first.stop - first.start


@dataclass(frozen=True)
class ChunkPlan(CallShape):
    """What a call will do. Made by `flce.plan`; ``str(plan)`` is a summary."""

    strategy: str
    max_rows: int
    """Upper bound of the rows of a chunk, independent of `num_tokens` unless there is a budget."""
    equal_rows: bool
    """Whether chunks are made equally long, rather than `max_rows` each and a rest."""
    block_cols: int
    """Classes of a tile: all of them for "tokens"."""
    logits_dtype: torch.dtype
    grad_dtype: torch.dtype
    """Of the gradient of the logits, which is what the gradient matrix products read."""
    accum_dtype: torch.dtype
    skip_ignored: bool
    max_workspace_bytes: int | None
    input_tile: tuple[int, int] | None = None
    """Tokens and classes of the tiles of a sweep of its own for the gradients of inputs; None: one sweep for all."""
    lent_input_sum: bool = False
    """Whether the gradient of the head's input is summed in the memory of its weight's."""
    lent_tiles: int = 0
    """How many tiles of exponentials are to be in the memory of the weight gradient, see `exponential_tiles`."""
    remade_cols: int = 0
    """Classes, the last, whose weight gradient is not summed over chunks: their logits are made once more, of all
    tokens at once, when every row's normalizer is known."""

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of a chunk (the last may be shorter)."""
        if self.num_tokens <= self.max_rows or not self.equal_rows:
            return min(self.num_tokens, self.max_rows)
        equal = ceil_div(self.num_tokens, ceil_div(self.num_tokens, self.max_rows))
        return min(self.max_rows, ceil_div(equal, ROW_MULTIPLE) * ROW_MULTIPLE)

    @property
    def num_chunks(self) -> int:
        return ceil_div(self.num_tokens, self.chunk_rows) if self.num_tokens else 0

    @property
    def num_blocks(self) -> int:
        return ceil_div(self.vocab_size, self.block_cols)

    @functools.cached_property
    def fused_product(self) -> bool:
        """Whether logits that are wanted for their statistics, or a second time, are not in memory at all."""
        return (
            (self.deferred or self.remade_cols > 0 or not self.needs.any)
            and self._product_suffices
            and self.logits_dtype == self.grad_dtype == self.dtype
        )

    @functools.cached_property
    def late_normalization(self) -> bool:
        """Whether logits that are wanted once are not in memory, and exponentials are in the place of their gradient.

        That they must be in the range of, and the work so large that more launches do not matter.
        """
        return (
            self.needs.any
            and not self.deferred
            and not self.needs.bias
            and self.dtype in LATE_DTYPES
            and self.vocab_size * self.hidden_sizes[0] >= LATE_HEAD
            and self._product_suffices
            and self.grad_dtype == self.dtype
            and (not self.in_place or self.num_chunks <= 1 or self._chunk_work >= LATE_CHUNK)
        )

    @property
    def _chunk_work(self) -> int:
        return self.chunk_rows * self.vocab_size * self.hidden_sizes[0]

    @property
    def least_late_rows(self) -> int:
        """Of the smallest chunks of equal size that are normalized late."""
        rows = ceil_div(LATE_CHUNK, self.vocab_size * self.hidden_sizes[0])
        too_few = (rows - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        if too_few:
            most_chunks = max(1, (self.num_tokens - 1) // too_few)  # each of more than so few, to be rounded up
            rows = max(rows, ceil_div(self.num_tokens, most_chunks))
        return ceil_div(rows, ALIGNMENT) * ALIGNMENT

    @property
    def exponential_tiles(self) -> tuple[ExponentialTile, ...]:
        return exponential_tiles(self.num_tokens, self.hidden_sizes[0], self.vocab_size, self.lent_tiles)

    @functools.cached_property
    def own_cols(self) -> int:
        """Classes of a tile in memory of its own."""
        return self.exponential_tiles[0].stop if self.lent_tiles else self.block_cols

    @functools.cached_property
    def _product_suffices(self) -> bool:
        """Whether the backend's products make all that is asked for."""
        return (
            self.has_product
            and len(self.hidden_sizes) == 1
            and self.hidden_sizes[0] % ALIGNMENT == 0
            and self.dtype.itemsize == 2
            and products_know(self.spec)
        )

    @property
    def product_rows(self) -> int:
        """Tokens whose statistics `fused_product` makes at a time."""
        rows = self.num_tokens if self.equal_rows and not self.needs.any else self.chunk_rows
        return min(rows, PRODUCT_ROWS, max(1, self._statistics_room // self._product_bytes(1)))

    def _product_bytes(self, rows: int) -> int:
        return 2 * 4 * ceil_div(self.vocab_size, PRODUCT_BLOCK) * rows

    @property
    def _statistics_room(self) -> int:
        """As many bytes as the other tiles have, or the gradients that are to be returned: they do not exist yet."""
        tile = self.chunk_rows * padded_cols(self.block_cols) * self.logits_dtype.itemsize
        limit = defaults_of(self.device_type).statistics
        return tile if limit is None else min(limit, max(tile, self._returned_bytes))

    @property
    def statistics_tile(self) -> tuple[int, int]:
        """Tokens and classes of the tiles of a forward that makes no gradients, where logits are in memory."""
        limit = defaults_of(self.device_type).statistics
        if limit is None:
            return self.chunk_rows, self.block_cols
        itemsize = self.logits_dtype.itemsize
        rows = min(STATISTICS_ROWS, self.num_tokens if self.equal_rows else self.chunk_rows)
        cols = self._statistics_room // max(1, rows * itemsize)
        multiple = STATISTICS_COLS if cols >= STATISTICS_COLS else COLUMN_MULTIPLE
        return rows, min(self.vocab_size, max(1, cols // multiple * multiple))

    @functools.cached_property
    def deferred(self) -> bool:
        """Whether gradients are computed in backward, from recomputed logits, rather than in forward.

        With ``reduction="none"`` every token has an upstream gradient of its own, which a weight gradient
        that is already summed could not be multiplied by. ``vocab`` recomputes in any case.
        """
        return self.needs.any and (self.strategy == "vocab" or self.spec.reduction == "none")

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether the gradient of the logits overwrites them."""
        return self.grad_dtype == self.logits_dtype

    @functools.cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        """The passes over all tiles in which gradients are made: in forward, or in backward if `deferred`."""
        inputs, weights = any(self.needs.inputs), any(self.needs.weights) or self.needs.bias
        rows, cols = self.chunk_rows, self.block_cols
        if not self.needs.any:
            return ()
        if not self.deferred:
            summed = self._sweep(rows, cols, inputs, weights)
            if not self.remade_cols:
                return (summed,)
            start = self.vocab_size - self.remade_cols
            remade = self._sweep(self.num_tokens, self._remade_block, False, True, start=start)
            return (replace(summed, weight_stop=start), remade)
        if self.input_tile is not None:
            first = self._sweep(*self.input_tile, True, False)
            return (first, self._sweep(rows, cols, False, True)) if weights else (first,)
        if not self.lent_input_sum:
            return (self._sweep(rows, cols, inputs, weights),)
        lender = self.input_sum_start
        # Otherwise the rounded gradient would be the sum itself, in memory that is written over.
        assert self.block_cols < self.vocab_size
        assert self._accum != self.dtype
        return (
            self._sweep(rows, cols, True, True, stop=lender),
            replace(self._sweep(rows, cols, True, False, start=lender), input_dtype=self._accum, input_sum=None),
            self._sweep(rows, cols, False, True, start=lender),
        )

    @property
    def _remade_block(self) -> int:
        """Classes of a block of `remade_cols`: as many as there is room for where the chunks were."""
        cols = self.chunk_rows * self.vocab_size // max(1, self.num_tokens)
        return max(BLOCK_MULTIPLE, min(self.remade_cols, whole_blocks(cols)))

    def _sweep(
        self, rows: int, cols: int, inputs: bool, weights: bool, start: int = 0, stop: int | None = None
    ) -> Sweep:
        whole_rows, whole_cols = rows >= self.num_tokens, cols >= self.vocab_size
        input_dtype, weight_dtype = self.input_grad_dtype, self.weight_grad_dtype
        input_sum = weight_sum = None
        if self.deferred:
            input_dtype = self.dtype if whole_cols or not weights else self._accum
            if self._accum != self.dtype:
                input_sum = None if weights or whole_cols else self._accum
                weight_sum = None if whole_rows or whole_cols else self._accum
        halves = weights and whole_cols and not whole_rows and weight_dtype == self.dtype != self._accum
        lends = weights and self._lends and whole_rows
        most = defaults_of(self.device_type).chunk // (max(1, rows) * self.logits_dtype.itemsize)
        return Sweep(
            rows=rows,
            cols=cols,
            inputs=inputs,
            weights=weights,
            input_dtype=input_dtype,
            weight_dtype=weight_dtype,
            input_sum=input_sum,
            weight_sum=weight_sum,
            weight_halves=halves,
            start=start,
            stop=self.vocab_size if stop is None else stop,
            weight_stop=self.vocab_size,
            lent_cols=self.hidden_sizes[0] if lends else 0,
            most_cols=most,
        )

    @property
    def _lends(self) -> bool:
        """Whether the memory of the gradient of the head's weight is of use before that is written."""
        return (
            self.strategy == "vocab"
            and self.needs.weights[0]
            and self.block_cols < self.vocab_size
            and self.logits_dtype == self.grad_dtype == self.dtype
        )

    @property
    def input_sum_start(self) -> int:
        """The first of the classes in the memory of whose weight gradient `lent_input_sum` is."""
        classes = ceil_div(self.num_tokens * self._accum.itemsize, self.dtype.itemsize)
        return max(0, self.vocab_size - classes) // COLUMN_MULTIPLE * COLUMN_MULTIPLE

    @property
    def input_grad_dtype(self) -> torch.dtype:
        """In which gradients of inputs leave forward; they are cast in backward where that differs."""
        # A float16 gradient must not be rounded before the loss scale has arrived: it would underflow.
        return torch.float32 if self.dtype == torch.float16 and not self.deferred else self.dtype

    @property
    def weight_grad_dtype(self) -> torch.dtype:
        """As `input_grad_dtype`, for the gradients of weights."""
        return torch.float32 if self.dtype == torch.float16 and not self.deferred else self.dtype

    @functools.cached_property
    def _accum(self) -> torch.dtype:
        return self.accum_dtype if self.dtype == torch.bfloat16 else accumulation_dtype(self.dtype)

    @property
    def num_matmuls(self) -> int:
        """Matrix products of 2NHV flops each: for each term its logits, perhaps several times, and its gradients.

        What `lent_input_sum` and `remade_cols` make again for some classes is not among them.
        """
        of_logits = len(self.hidden_sizes) * (1 + self.deferred * (1 + (self.input_tile is not None)))
        return of_logits + sum(self.needs.inputs) + sum(self.needs.weights)

    @property
    def flops(self) -> int:
        """Of the matrix products of forward and backward."""
        again = sum(sweep.stop - sweep.start for sweep in self.sweeps) if self.deferred else self.remade_cols
        of_logits = sum(self.hidden_sizes) * (self.vocab_size + again)
        of_gradients = (self._input_grad_width + self._weight_grad_width) * self.vocab_size
        return 2 * self.num_tokens * (of_logits + of_gradients)

    @property
    def _input_grad_width(self) -> int:
        """Columns of all gradients of inputs together."""
        return sum(h for h, needed in zip(self.hidden_sizes, self.needs.inputs, strict=True) if needed)

    @property
    def _weight_grad_width(self) -> int:
        """Columns of all gradients of weights together."""
        return sum(h for h, needed in zip(self.hidden_sizes, self.needs.weights, strict=True) if needed)

    @property
    def logits_bytes(self) -> int:
        """Of the buffers that hold a tile's logits and their gradient."""
        return self._logits_bytes(self.chunk_rows, self.own_cols)

    def _logits_bytes(self, rows: int, cols: int) -> int:
        sizes = [self.grad_dtype.itemsize] if self.needs.any else []
        if not (sizes and self.in_place) and not self.late_normalization:
            sizes.append(self.logits_dtype.itemsize)
        return rows * padded_cols(cols) * sum(sizes)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Peak bytes above the inputs and the returned gradients, over forward and backward."""
        # No product with a truth value below: not every version of torch.compile has those of symbols.
        peak = self._statistics_peak() if self.deferred or not self.needs.any else 0
        return max(peak, self._gradients_peak()) - self._returned_bytes if self.needs.any else peak

    def _statistics_peak(self) -> int:
        """Of a forward that makes no gradients."""
        rows = self.num_tokens * self._row_bytes()
        if self.fused_product:
            fused = self.product_rows
            gathered = fused * sum(self.hidden_sizes) * self.dtype.itemsize if self.skip_ignored else 0
            return rows + self._product_bytes(fused) + gathered + 4 * fused  # and the targets' logits
        chunk, block = self.statistics_tile
        state = STATE_SLOTS * chunk * accumulation_dtype(self.dtype).itemsize if block < self.vocab_size else 0
        logits = chunk * padded_cols(block) * self.logits_dtype.itemsize
        return rows + logits + self._tile_temporaries(chunk, block, None) + state

    def _gradients_peak(self) -> int:
        """The returned gradients included."""
        itemsize, rows = self.dtype.itemsize, self.num_tokens * self._row_bytes()
        peak = 0
        held = 0  # gradients, those of the sweeps before included
        weights_held = False
        for number, sweep in enumerate(self.sweeps):
            of_inputs = self.num_tokens * self._input_grad_width if sweep.inputs else 0
            # All of the weight's and the bias's from the first sweep on that makes some.
            makes_weights = sweep.weights and not weights_held
            of_weights = self.vocab_size * self._weight_grad_width if makes_weights else 0
            of_bias = self.vocab_size if makes_weights and self.needs.bias else 0
            weights_held |= sweep.weights
            if self.lent_input_sum:
                # The input's own memory after the second.
                if number == 1:
                    held += of_inputs * itemsize
                of_inputs = 0
            held += of_inputs * sweep.input_dtype.itemsize + of_weights * sweep.weight_dtype.itemsize
            held += of_bias * accumulation_dtype(self.dtype).itemsize
            sums = 0
            if sweep.input_sum is not None and sweep.inputs:
                sums += sweep.rows * self._input_grad_width * sweep.input_sum.itemsize
            if sweep.weight_sum is not None and sweep.weights:
                sums += sweep.cols * self._weight_grad_width * sweep.weight_sum.itemsize
            if sweep.weight_halves:
                half = halfway(self.vocab_size)
                first = min(half, COMPACTION_ROWS) * itemsize
                sums += ((sweep.weight_stop - half) * self._accum.itemsize + first) * self._weight_grad_width
            temporaries = max(self._tile_temporaries(sweep.rows, cols, sweep) for cols in (sweep.cols, sweep.widest))
            if self.late_normalization and number == 0:
                temporaries += self._late_temporaries(sweep)
            tile = self._logits_bytes(sweep.rows, self.own_cols if self.lent_tiles else sweep.cols) + temporaries
            peak = max(peak, rows + held + tile + sums)
            # Casting what is not in the dtype that is returned, when the tile has been given back.
            cast = of_inputs if sweep.input_dtype != self.dtype else 0
            cast += of_weights if sweep.weight_dtype != self.dtype else 0
            casting = held + cast * itemsize
            if self.deferred:
                casting += rows
            elif self.backend == "torch" and itemsize < 4:
                casting += 2 * 4 * SCALE_SLAB
            peak = max(peak, casting)
        return peak

    def _late_temporaries(self, sweep: Sweep) -> int:
        """What normalizing after the products takes beside a tile of the sweep and the gradients."""
        row_bytes = self.hidden_sizes[0] * self.dtype.itemsize
        vectors = self.num_tokens * LATE_ROW_BYTES
        sums = self._product_bytes(sweep.rows) // 2
        if self.lent_tiles:
            # What the sums take, the gradient of the inputs may have when they have been given back.
            sums -= self.num_tokens * row_bytes if sweep.inputs else 0
            inputs = sweep.rows * self.hidden_sizes[0] * (4 if sweep.inputs else self.dtype.itemsize)
            return vectors + max(inputs, sums)
        scaled = 0 if sweep.inputs or self.skip_ignored else sweep.rows * row_bytes
        if sweep.rows >= self.num_tokens:
            sums = max(0, sums - self._returned_bytes)  # which are made when the sums have been given back
        return vectors + max(scaled, sums)

    @property
    def _returned_bytes(self) -> int:
        """Of the gradients that the caller gets."""
        of_inputs, of_weights = self.num_tokens * self._input_grad_width, self.vocab_size * self._weight_grad_width
        of_bias = self.vocab_size if self.needs.bias else 0
        return self.dtype.itemsize * (of_inputs + of_weights) + accumulation_dtype(self.dtype).itemsize * of_bias

    def _row_bytes(self) -> int:
        """Bytes of the vectors with an entry per token."""
        accum = accumulation_dtype(self.dtype).itemsize
        stats = self.spec.stats
        vectors = 3 + (self.spec.z_loss != 0) + ("lse" in stats) + ("logprob" in stats) + ("entropy" in stats)
        size = vectors * accum + (9 if "argmax" in stats or "correct" in stats else 0)
        if self.skip_ignored:
            size = 2 * size + 16  # the same of the rows that are left, which they are, and their targets
        return size + 9  # a copy of the target, shifted or in int64, and a mask

    def _tile_temporaries(self, rows: int, cols: int, sweep: Sweep | None) -> int:
        """Bytes that gathering rows, casting operands and the PyTorch backend take beside a tile of a sweep, or, with
        None, of statistics."""
        # All terms' rows are gathered at once. What a product takes, it gives back before the next: the widest counts.
        sizes = self.hidden_sizes
        makes_inputs = sweep is not None and sweep.inputs
        wanted = [h for h, needed in zip(sizes, self.needs.inputs, strict=True) if needed and makes_inputs]
        widest_grad = max(wanted, default=0)
        size = 0
        part = 0  # the gradient of gathered rows, before it goes to its place
        if self.skip_ignored:
            part = rows * widest_grad * (0 if sweep is None else sweep.input_dtype.itemsize)
            size += rows * sum(sizes) * self.dtype.itemsize
        if self.device_type == "cpu" and self.dtype.itemsize < 4:
            # float32 copies of the rows, or their gradient before it is rounded, and of a piece of W
            piece = min(CAST_BYTES, cols * max(sizes) * 4)
            size += max(rows * max(sizes) * 4, part + min(CAST_BYTES, rows * widest_grad * 4)) + piece
        elif self.late_normalization:
            size += 0 if self.lent_tiles else rows * widest_grad * 4
        elif self.dtype.itemsize < 4 and (cols % ALIGNMENT or (part and self._rounds_last_block(sweep))):
            # see gemm: the gradient of the rows, before it is rounded
            size += part + rows * widest_grad * 4
        else:
            size += part
        if self.backend == "torch":
            accum = accumulation_dtype(self.logits_dtype).itemsize
            slab = slab_rows(self.device_type, rows, cols, accum) * cols * accum
            size += slab_temporaries(self.spec, self.logits_dtype) * slab
        return size

    def _rounds_last_block(self, sweep: Sweep | None) -> bool:
        """Whether its classes are no multiple of `ALIGNMENT`, for a gradient of gathered rows in half precision."""
        return sweep is not None and sweep.input_dtype.itemsize < 4 and self.vocab_size % ALIGNMENT != 0

    def __str__(self) -> str:
        where = f"N={self.num_tokens}, H={size_text(self.hidden_sizes)}, V={self.vocab_size}, {dtype_text(self.dtype)}"
        one = 2 * self.num_tokens * sum(self.hidden_sizes) * self.vocab_size  # flops of a product
        apart = self.fused_product or self.late_normalization
        parts = [
            f"strategy '{self.strategy}'",
            *self._tiles_text(),
            f"logits {'not in memory' if apart else 'in ' + dtype_text(self.logits_dtype)}",
            f"{self.flops / one if one else 0:.3g} matrix products ({self.flops / 1e12:.3g} TFLOP)",
            f"workspace {self.workspace_bytes / 2**20:.1f} MiB",
        ]
        return f"{where} on {self.device_type} ({self.backend} backend): {', '.join(parts)}"

    def _tiles_text(self) -> Iterator[str]:
        """Of the pass that makes gradients, or of the only one."""
        rows, cols = (self.chunk_rows, self.block_cols) if self.needs.any else self.statistics_tile
        if self.fused_product and not self.needs.any:
            rows, cols = self.product_rows, self.vocab_size
        chunks = ceil_div(self.num_tokens, max(1, rows))
        yield f"{chunks} chunks of {rows} tokens" if chunks > 1 else f"all {self.num_tokens} tokens at once"
        if self.strategy == "tokens" and (self.needs.any or self.fused_product):
            yield "all classes"
        else:
            widths = [cols]
            if self.needs.any:
                sweeps = self.sweeps[-1:] if self.input_tile is not None else self.sweeps
                widths = [block.stop - block.start for sweep in sweeps for block, _ in sweep.blocks()]
            number = len(widths) if self.needs.any else ceil_div(self.vocab_size, cols)
            sizes = f"{max(widths)}" if len(set(widths[:-1])) <= 1 else f"{max(widths)} to {widths[-2]}"
            yield f"{number} blocks of {sizes} classes"
        if self.lent_tiles:
            yield f"{self.lent_tiles} of {self.lent_tiles + 1} tiles borrowed from the weight gradient"
        if self.remade_cols:
            yield f"the last {self.remade_cols} classes recomputed"
        if self.input_tile is not None:
            yield "input gradients in a pass of their own"
        if self.lent_input_sum:
            yield "the sum of input gradients borrowed from the weight gradient"


def defaults_of(device_type: str) -> Defaults:
    return DEFAULTS["cpu" if device_type == "cpu" else "other"]


def whole_blocks(cols: int) -> int:
    """As many classes, or a few less, that products are best made of."""
    return cols // BLOCK_MULTIPLE * BLOCK_MULTIPLE


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def size_text(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes))


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
