"""How a call is cut into chunks, and the bytes that it takes. Pure arithmetic on shapes.

The policy, in full:

* **Strategy** ``tokens`` unless a budget rules it out: the logits of `chunk_rows` tokens and all classes at
  a time, three matrix products in all. ``vocab`` takes all tokens and `block_cols` classes at a time and
  multiplies a fourth time, but needs no float32 copy of the weight gradient.
* **Without a budget** a chunk of logits takes at most `DEFAULT_LOGITS_BYTES` of the device, an absolute
  figure: the workspace does not grow with the number of tokens.
* **With** ``max_workspace_bytes`` the chunk is as large as the budget allows. ``tokens`` is taken if it gets
  at least `MIN_EFFICIENT_ROWS` rows, else ``vocab`` if it gets at least `EFFICIENT_COLS` classes; failing
  both, whichever fits.
* Chunks are of equal size, a multiple of `ROW_MULTIPLE` rows where they can be.

Nothing here depends on anything but the arguments, so every call of one shape has the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flce.backends import backend_name
from flce.backends.torch_ import SCALE_SLAB, slab_rows, slab_temporaries
from flce.gemm import ALIGNMENT, CAST_BYTES
from flce.problem import LossSpec, Needs, accumulation_dtype

# One chunk of logits. 1 GiB is 4,096 tokens of a 128,256-class vocabulary in bf16: enough for matrix
# products at full speed, and for the float32 accumulation of the weight gradient to cost a few percent.
# On a CPU smaller chunks lose nothing: 64 MiB is 512 tokens of 32,000 classes in float32.
DEFAULT_LOGITS_BYTES = {"cpu": 64 << 20, "other": 1 << 30}
# Below this many rows the traffic of accumulating the weight gradient costs more than the fourth matrix
# product of `vocab`. Per chunk it is 8VH bytes against 6HV flops a row: on an H200 (4 TB/s, 700 TFLOP/s)
# a chunk of 512 rows spends a third of its time on it, which is what `vocab` adds.
MIN_EFFICIENT_ROWS = {"cpu": 32, "other": 512}
ROW_MULTIPLE = 128
# As few classes per block as `vocab` is preferred with to short chunks of tokens.
EFFICIENT_COLS = 512
# Row stride of the logits buffer, in elements: matrix products on unaligned rows run several times slower.
COLUMN_MULTIPLE = 64


@dataclass(frozen=True)
class ChunkOptions:
    """How `fused_linear_cross_entropy` may use memory and precision. The defaults are exact and fast.

    Args:
        chunk_rows: tokens per chunk, instead of the planner's choice (for ``strategy="vocab"``: tokens per
            block of classes).
        max_workspace_bytes: upper bound of the memory, in bytes, that a call takes above its inputs and the
            gradients that it returns. An error names the least possible where this is less.
        strategy: "auto", "tokens" or "vocab"; see `flce.planning`.
        logits_dtype: dtype of the logits between the matrix product and the softmax. Default: the dtype of
            the input (on a CPU float32, which is what its matrix products are made in). ``torch.float32``
            with bfloat16 inputs removes the largest rounding error of the usual path.
        accum_dtype: dtype in which gradients are summed over chunks: ``torch.float32`` or, for bfloat16
            inputs, ``torch.bfloat16``, which halves that buffer and loses digits with every chunk.
        skip_ignored: whether rows whose target is `ignore_index` are dropped before the matrix products.
            Their number must be known to the host: on a CPU that is free, on an accelerator it waits for
            the device. "auto": True on a CPU, False elsewhere.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an impossible value.
    """

    chunk_rows: int | None = None
    max_workspace_bytes: int | None = None
    strategy: Literal["auto", "tokens", "vocab"] = "auto"
    logits_dtype: torch.dtype | None = None
    accum_dtype: torch.dtype = torch.float32
    skip_ignored: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "max_workspace_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be None or an int, got {type(value).__name__}")
            if value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if self.strategy not in ("auto", "tokens", "vocab"):
            raise ValueError(f"strategy must be 'auto', 'tokens' or 'vocab', got {self.strategy!r}")
        if self.logits_dtype is not None and not isinstance(self.logits_dtype, torch.dtype):
            raise TypeError(f"logits_dtype must be None or a torch.dtype, got {self.logits_dtype!r}")
        if not isinstance(self.accum_dtype, torch.dtype):
            raise TypeError(f"accum_dtype must be a torch.dtype, got {self.accum_dtype!r}")
        if self.skip_ignored not in (True, False, "auto"):
            raise ValueError(f"skip_ignored must be True, False or 'auto', got {self.skip_ignored!r}")


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
    spec: LossSpec
    needs: Needs


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

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk (the last may be shorter)."""
        if self.num_tokens <= self.max_rows or not self.equal_rows:
            return min(self.num_tokens, self.max_rows)
        equal = _ceil_div(self.num_tokens, _ceil_div(self.num_tokens, self.max_rows))
        return min(self.max_rows, _ceil_div(equal, ROW_MULTIPLE) * ROW_MULTIPLE)

    @property
    def num_chunks(self) -> int:
        return _ceil_div(self.num_tokens, self.chunk_rows) if self.num_tokens else 0

    @property
    def num_blocks(self) -> int:
        return _ceil_div(self.vocab_size, self.block_cols)

    @property
    def by_block(self) -> bool:
        """Whether weight gradients are finished a block of classes at a time, each cast to its place at once."""
        return self.num_blocks > 1

    @property
    def deferred(self) -> bool:
        """Whether gradients are computed in backward, from recomputed logits, rather than in forward.

        With ``reduction="none"`` every token has an upstream gradient of its own, which a weight gradient
        that is already summed could not be multiplied by. ``vocab`` recomputes in any case.
        """
        return self.needs.any and (self.strategy == "vocab" or self.spec.reduction == "none")

    @property
    def in_place(self) -> bool:
        """Whether the gradient of the logits overwrites them."""
        return self.grad_dtype == self.logits_dtype

    @property
    def input_grad_dtype(self) -> torch.dtype:
        """In which gradients of inputs are computed; they are cast in backward where that differs."""
        if self.deferred:
            return self._accum if self.num_blocks > 1 else self.dtype
        # A float16 gradient must not be rounded before the loss scale has arrived: it would underflow.
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    @property
    def weight_grad_dtype(self) -> torch.dtype:
        """As `input_grad_dtype`, for the gradients of weights."""
        if self._accum == self.dtype:
            return self.dtype
        # With a budget always, so that the dtype does not depend on the rows that the budget leaves:
        # torch.compile would otherwise make another graph for every number of tokens.
        if self.max_workspace_bytes is not None or self.num_tokens > self.max_rows:
            return self._accum
        return torch.float32 if self.dtype == torch.float16 and not self.deferred else self.dtype

    @property
    def _accum(self) -> torch.dtype:
        return self.accum_dtype if self.dtype == torch.bfloat16 else accumulation_dtype(self.dtype)

    @property
    def num_matmuls(self) -> int:
        """Matrix products of 2NHV flops each: for each term, logits once or twice and one for each gradient."""
        needs = self.needs
        return len(self.hidden_sizes) * (1 + self.deferred) + sum(needs.inputs) + sum(needs.weights)

    @property
    def flops(self) -> int:
        """Of the matrix products of forward and backward."""
        widths = sum(self.hidden_sizes) * (1 + self.deferred) + self._input_grad_width + self._weight_grad_width
        return 2 * self.num_tokens * self.vocab_size * widths

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
        sizes = [self.logits_dtype.itemsize]
        if self.needs.any and not self.in_place:
            sizes.append(self.grad_dtype.itemsize)
        return self.chunk_rows * padded_cols(self.block_cols) * sum(sizes)

    @property
    def workspace_bytes(self) -> int:
        """Peak bytes above the inputs and the returned gradients, over forward and backward."""
        n, v = self.num_tokens, self.vocab_size
        itemsize, accum = self.dtype.itemsize, accumulation_dtype(self.dtype).itemsize
        # Entries of the gradients of inputs, of weights and of the bias.
        of_inputs, of_weights, of_bias = n * self._input_grad_width, v * self._weight_grad_width, v * self.needs.bias
        returned = itemsize * (of_inputs + of_weights + of_bias)
        tile = self.logits_bytes + self._tile_temporaries()
        rows = n * self._row_bytes()

        # Gradients as they are while tiles are worked on, and what casting them at the end adds.
        held_input = of_inputs * self.input_grad_dtype.itemsize
        held_weight = of_weights * self.weight_grad_dtype.itemsize
        held_bias = of_bias * accum
        cast = of_inputs * itemsize * (self.input_grad_dtype != self.dtype)
        cast += of_bias * itemsize * (accum != itemsize)
        if self.weight_grad_dtype != self.dtype:
            if self.by_block:
                held_weight = of_weights * itemsize
                tile += self.block_cols * self._weight_grad_width * self.weight_grad_dtype.itemsize
            else:
                cast += of_weights * itemsize
        held = held_input + held_weight + held_bias
        working = rows + tile + held
        casting = rows * self.deferred + held + cast
        if self.backend == "torch" and not self.deferred and itemsize < 4:
            casting += 2 * 4 * SCALE_SLAB
        return max(working, casting) - returned if self.needs.any else rows + tile

    def _row_bytes(self) -> int:
        """Bytes of the vectors with an entry per token."""
        accum = accumulation_dtype(self.dtype).itemsize
        stats = self.spec.stats
        vectors = 3 + (self.spec.z_loss != 0) + ("lse" in stats) + ("logprob" in stats) + ("entropy" in stats)
        if self.num_blocks > 1:
            vectors += 7
        size = vectors * accum
        if "argmax" in stats or "correct" in stats:
            size += 9
        return size

    def _tile_temporaries(self) -> int:
        """Bytes that gathering rows, casting operands and the PyTorch backend take beside a tile."""
        # All terms' rows are gathered at once. What a product takes, it gives back before the next: the widest counts.
        rows, sizes = self.chunk_rows, self.hidden_sizes
        widest_grad = max(h * needed for h, needed in zip(sizes, self.needs.inputs, strict=True))
        size = 0
        if self.skip_ignored:
            size += rows * (sum(sizes) * self.dtype.itemsize + widest_grad * self.input_grad_dtype.itemsize)
        if self.device_type == "cpu" and self.dtype.itemsize < 4:
            # float32 copies of the rows (or their gradient, before it is rounded) and of a piece of W
            size += rows * max(sizes) * 4 + min(CAST_BYTES, self.block_cols * max(sizes) * 4)
        elif self.dtype.itemsize < 4 and self.block_cols % ALIGNMENT:
            # see gemm: the gradient of the rows, before it is rounded
            size += rows * widest_grad * 4
        if self.backend == "torch":
            accum = accumulation_dtype(self.logits_dtype).itemsize
            slab = slab_rows(self.device_type, rows, self.block_cols, accum) * self.block_cols * accum
            size += slab_temporaries(self.spec, self.logits_dtype) * slab
        return size

    def __str__(self) -> str:
        where = f"N={self.num_tokens}, H={_sum(self.hidden_sizes)}, V={self.vocab_size}, {_name(self.dtype)}"
        return (
            f"{where} on {self.device_type} ({self.backend} backend): strategy '{self.strategy}', "
            f"{self.num_chunks} x {self.chunk_rows} tokens, {self.num_blocks} x {self.block_cols} classes, "
            f"logits in {_name(self.logits_dtype)}, {self.num_matmuls} matrix products, "
            f"{self.flops / 1e12:.3g} TFLOP, workspace {self.workspace_bytes / 2**20:.1f} MiB"
        )


def plan(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cuda",
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    stats: tuple[str, ...] = (),
    input_grad: bool = True,
    weight_grad: bool = True,
    bias_grad: bool = False,
    adapter_ranks: Sequence[int] = (),
    options: ChunkOptions | None = None,
) -> ChunkPlan:
    """What `fused_linear_cross_entropy` will do for a shape, and the bytes it will take.

    Args:
        num_tokens: N, the tokens of `input` over all leading dimensions.
        hidden_size: H.
        vocab_size: V.
        dtype: of `input` and `linear_weight`, after autocast.
        device: where the tensors will be; only its type matters.
        reduction, label_smoothing, softcap, z_loss, stats: as in `fused_linear_cross_entropy`.
        input_grad, weight_grad, bias_grad: which gradients will be asked for (``False`` for a frozen head).
        adapter_ranks: the rank r of each of `adapters`; gradients of both of its tensors are assumed to be asked for.
        options: as in `fused_linear_cross_entropy`.

    Returns:
        A `ChunkPlan`; ``.workspace_bytes`` is the peak of memory above the inputs and the returned
        gradients, from the beginning of forward to the end of backward.

    Raises:
        ValueError: no plan keeps ``options.max_workspace_bytes`` (the message names the least that works),
            or an argument has an impossible value.
        TypeError: an argument has the wrong type.
    """
    if not isinstance(adapter_ranks, (tuple, list)):
        raise TypeError(f"adapter_ranks must be a sequence of ints, got {type(adapter_ranks).__name__}")
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    sizes |= {f"adapter_ranks[{k}]": rank for k, rank in enumerate(adapter_ranks)}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < (0 if name == "num_tokens" else 1):
            raise ValueError(f"{name} must be positive, got {value}")
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")
    device = torch.device(device)
    of_adapters = (True,) * len(adapter_ranks)
    shape = CallShape(
        num_tokens=num_tokens,
        hidden_sizes=(hidden_size, *adapter_ranks),
        vocab_size=vocab_size,
        dtype=dtype,
        device_type=device.type,
        backend=backend_name(device),
        spec=LossSpec(reduction, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, stats=stats),
        needs=Needs((input_grad, *of_adapters), (weight_grad, *of_adapters), bias_grad),
    )
    return make_plan(shape, options or ChunkOptions())


@functools.lru_cache(maxsize=1024)
def make_plan(shape: CallShape, options: ChunkOptions) -> ChunkPlan:
    """`plan` for callers that have checked their arguments."""
    base = base_plan(shape, options)
    budget = options.max_workspace_bytes
    if budget is None:
        return base
    fitted = base if options.chunk_rows is not None else _fit(base, budget)
    if fitted.workspace_bytes > budget:
        raise ValueError(
            f"max_workspace_bytes={budget} is too small for N={shape.num_tokens}, H={_sum(shape.hidden_sizes)}, "
            f"V={shape.vocab_size} in {_name(shape.dtype)} with strategy={options.strategy!r} and "
            f"chunk_rows={options.chunk_rows}: "
            f"the least is {fitted.workspace_bytes} bytes"
        )
    return fitted


def base_plan(shape: CallShape, options: ChunkOptions) -> ChunkPlan:
    """The plan before its sizes are fitted to a budget: strategy and dtypes are final.

    Sizes may be symbolic; only a few inequalities in them are decided here.
    """
    dtype, device_type, vocab_size = shape.dtype, shape.device_type, shape.vocab_size
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    accum_choices = {torch.float32, accumulation_dtype(dtype)} | ({dtype} & {torch.bfloat16})
    if options.accum_dtype not in accum_choices:
        raise ValueError(
            "accum_dtype must be torch.float32 or, for bfloat16 inputs, torch.bfloat16; "
            f"got {options.accum_dtype} with {dtype} inputs"
        )
    logits_dtype, grad_dtype = _logits_dtypes(dtype, device_type, options)
    kind = "cpu" if device_type == "cpu" else "other"
    skip = options.skip_ignored
    tokens = ChunkPlan(
        **vars(shape),
        strategy="tokens",
        max_rows=options.chunk_rows or _default_rows(vocab_size, logits_dtype, kind),
        equal_rows=options.chunk_rows is None,
        block_cols=vocab_size,
        logits_dtype=logits_dtype,
        grad_dtype=grad_dtype,
        # Sums on a CPU are made in float32 in any case, see `gemm`.
        accum_dtype=torch.float32 if device_type == "cpu" else options.accum_dtype,
        skip_ignored=(device_type == "cpu") if skip == "auto" else bool(skip),
        max_workspace_bytes=options.max_workspace_bytes,
    )
    if options.strategy == "tokens" or (options.strategy == "auto" and options.max_workspace_bytes is None):
        return tokens
    rows = max(1, shape.num_tokens) if options.chunk_rows is None else options.chunk_rows
    vocab = replace(
        tokens,
        strategy="vocab",
        max_rows=rows,
        equal_rows=False,
        block_cols=_default_block(rows, vocab_size, logits_dtype, kind),
    )
    if options.strategy == "vocab":
        return vocab
    return _cheaper_within_budget(tokens, vocab, MIN_EFFICIENT_ROWS[kind])


def padded_cols(cols: int) -> int:
    """Row stride of a buffer for `cols` logits, in elements."""
    return _ceil_div(cols, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def _logits_dtypes(dtype: torch.dtype, device_type: str, options: ChunkOptions) -> tuple[torch.dtype, torch.dtype]:
    """dtype of the logits and of their gradient."""
    if options.logits_dtype not in (None, dtype, accumulation_dtype(dtype)):
        raise ValueError(
            f"logits_dtype must be the dtype of the input or {accumulation_dtype(dtype)}; "
            f"got {options.logits_dtype} with {dtype} inputs"
        )
    if device_type == "cpu":
        # CPU matrix products in half precision are up to a hundred times slower than in float32 where the
        # processor has no instructions for them, so they are made in float32 everywhere.
        return accumulation_dtype(dtype), accumulation_dtype(dtype)
    return options.logits_dtype or dtype, dtype


def _default_rows(vocab_size: int, logits_dtype: torch.dtype, kind: str) -> int:
    rows = DEFAULT_LOGITS_BYTES[kind] // (padded_cols(vocab_size) * logits_dtype.itemsize)
    return max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)


def _default_block(rows: int, vocab_size: int, logits_dtype: torch.dtype, kind: str) -> int:
    # A quarter of what `tokens` would take: `vocab` is for saving memory.
    cols = DEFAULT_LOGITS_BYTES[kind] // 4 // (rows * logits_dtype.itemsize)
    return min(vocab_size, max(COLUMN_MULTIPLE, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE))


def _cheaper_within_budget(tokens: ChunkPlan, vocab: ChunkPlan, efficient_rows: int) -> ChunkPlan:
    """The first in order of preference that keeps the budget, or the smallest of all."""
    budget = tokens.max_workspace_bytes
    assert budget is not None
    for plan in (
        _with_rows(tokens, efficient_rows),
        _with_cols(vocab, EFFICIENT_COLS),
        _with_rows(tokens, efficient_rows // 8),
    ):
        if plan.workspace_bytes <= budget:
            return tokens if plan.strategy == "tokens" else vocab
    return tokens if _smallest(tokens).workspace_bytes <= _smallest(vocab).workspace_bytes else vocab


def _with_rows(plan: ChunkPlan, rows: int) -> ChunkPlan:
    return replace(plan, max_rows=min(rows, max(1, plan.num_tokens)), equal_rows=rows >= ROW_MULTIPLE)


def _with_cols(plan: ChunkPlan, cols: int) -> ChunkPlan:
    return replace(plan, block_cols=min(cols, plan.vocab_size))


def _with_size(plan: ChunkPlan, size: int) -> ChunkPlan:
    """With tiles of `size` rows (``tokens``) or classes (``vocab``)."""
    return _with_rows(plan, size) if plan.strategy == "tokens" else _with_cols(plan, size)


def _largest_size(plan: ChunkPlan) -> int:
    return max(1, plan.num_tokens) if plan.strategy == "tokens" else plan.vocab_size


def _smallest(plan: ChunkPlan) -> ChunkPlan:
    """The plan with the least workspace.

    Not always that of the smallest tile: a single tile needs no sums over tiles, an aligned one no float32 copy.
    """
    most = _largest_size(plan)
    candidates = [_with_size(plan, size) for size in (1, min(ALIGNMENT, most), most)]
    return min(candidates, key=lambda candidate: candidate.workspace_bytes)


def _fit(plan: ChunkPlan, budget: int) -> ChunkPlan:
    """The plan with the largest tiles within the budget, or that with the least workspace if none is."""
    most = _largest_size(plan)
    multiple = ROW_MULTIPLE if plan.strategy == "tokens" else COLUMN_MULTIPLE

    def largest(step: int, high: int) -> int:
        low = 0  # of the sizes that fit, the largest seen; 0: none
        while low < high:
            middle = (low + high + 1) // 2
            if _with_size(plan, middle * step).workspace_bytes <= budget:
                low = middle
            else:
                high = middle - 1
        return low * step

    if _with_size(plan, most).workspace_bytes <= budget:
        return _with_size(plan, most)
    for step, limit in ((multiple, most), (ALIGNMENT, min(multiple, most)), (1, min(ALIGNMENT, most))):
        size = largest(step, (limit - 1) // step)
        if size:
            return _with_size(plan, size)
    return _smallest(plan)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _sum(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
