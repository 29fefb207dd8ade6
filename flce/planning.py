"""How a call is cut into chunks, and the bytes that it takes. Pure arithmetic on shapes.

The policy, in full:

* **Strategy** ``tokens`` unless a budget rules it out: the logits of `chunk_rows` tokens and all classes at
  a time, three matrix products in all. ``vocab`` takes all tokens and `block_cols` classes at a time and
  multiplies a fourth time, but needs no float32 copy of the weight gradient.
* **Without a budget** the logits take at most the bytes of `chunk_plan.DEFAULTS`, absolute figures (twice that for
  chunks of float32 logits with a gradient of half precision beside them): the workspace does not grow with the number
  of tokens. All tokens are one chunk where that fits, because a weight gradient that is summed over chunks in float32
  takes as much memory again (`halfway`) and its traffic.
* **With** ``max_workspace_bytes`` the chunk is as large as the budget allows. ``tokens`` is taken if it gets
  at least `MIN_EFFICIENT_ROWS` rows, or all of them, or is as fast as ``vocab`` in the way that comes next; else
  ``vocab``; if neither gets so much, whichever fits.
* **In between**: sums over chunks of the weight gradient of half of the classes fit in the memory of that gradient
  (`halfway`). Where the sums of the others would leave little room for chunks, some or all of these are not summed:
  their logits are made once more afterwards, of all tokens at once, as in ``vocab`` (`ChunkPlan.remade_cols`).
* **Loans**: the gradient of the head's weight is written a block of classes after the other, and the memory of those
  that are not yet written is free. ``vocab`` makes its tiles there while that gives larger ones (`Sweep.blocks`).
  Where the budget leaves less than `EFFICIENT_COLS` classes beside the sum of the input gradient over blocks, N x H
  in float32, that sum is in the memory of the last classes, whose own logits are then made once more.
  ``tokens`` with all tokens in one chunk, normalized late (see below), has exponentials of the last classes there
  where tokens are not too many (`LENT_RATIO`) or a budget asks for it: their share of dW is made first, that of the
  others over them.
* **Split**: where that is no way out either, because the tokens are many or rows are dropped or the head is frozen,
  gradients of inputs and of weights are made in a sweep each, with a fifth product: the first is summed over classes
  for a few tokens at a time, the second over tokens for a few classes.
* **Products with an epilogue**: where the device has them (`backends.has_product`) and the call asks for nothing that
  they do not make (`ChunkPlan.fused_product`), logits that are wanted for their statistics, or a second time for their
  gradient, are never in memory; the tile then holds their gradient only.
* **Normalized late**: where the device has those products and gradients are made in forward, from bfloat16 and for a
  head of `chunk_plan.LATE_HEAD` entries or more, a tile holds exponentials (`ChunkPlan.late_normalization`) and no
  logits.
* Chunks are of equal size, a multiple of `ROW_MULTIPLE` rows where they can be.

Nothing here depends on anything but the arguments, so every call of one shape has the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from flce.backends import backend_name, has_product
from flce.borrowing import BLOCK_MULTIPLE, halfway
from flce.chunk_plan import (
    LARGE_BLOCK,
    ROW_MULTIPLE,
    STATISTICS_ROWS,
    CallShape,
    ChunkPlan,
    ceil_div,
    defaults_of,
    dtype_text,
    size_text,
    whole_blocks,
)
from flce.gemm import ALIGNMENT, COLUMN_MULTIPLE
from flce.problem import LossSpec, Needs, accumulation_dtype
from flce.scalars import INT64_MAX, integer

# Below this many rows the traffic of accumulating the weight gradient costs more than the fourth matrix
# product of `vocab`. Per chunk it is 8VH bytes against 6HV flops a row: on an H200 (4 TB/s, 700 TFLOP/s)
# a chunk of 768 rows spends a third of its time on it, which is what `vocab` adds. Measured at 8192 x 2304 x 256000,
# milliseconds: in one chunk 40.6, in 5 of 1664 rows 47.3, in 11 of 768 58.0, `vocab` 55.5 to 56.3. That is 1.6 a chunk,
# and the two are even at 10 chunks, of 850 rows.
MIN_EFFICIENT_ROWS = {"cpu": 32, "other": 850}
# To make the logits of some classes again after the chunks (`ChunkPlan.remade_cols`), in times their share of what
# `vocab` takes for it. On an H200, milliseconds, with 0, 1, 2, 3 and 4 eighths of the classes made again, and `vocab`:
# 16384 x 1024 x 151936 in 594 MiB 27.8, 26.6, 25.6, 25.9, 26.2, and 28.2; 8192 x 4096 x 128256 in 800 MiB with 2, 3, 4
# 40.7, 41.8, 40.6, and 45.2, in 512 MiB with 4 (1,664 rows) 42.1 and 45.2, in 300 MiB (1,024) 41.8 and 43.9, in 256 MiB
# (896) 46.2 and 44.8; 8192 x 2304 x 256000 in 700 MiB with 4 (1,280) 50.0 and 52.0, in 600 MiB (1,024) 51.5 and 51.7.
REMAKING = 1.15
# By the same count, 8NH bytes a block for the input gradient: with fewer classes a fifth product costs less.
EFFICIENT_COLS = 1024
# CUDA's caching allocator hands out blocks that are up to 1 MiB larger than asked for. What it counts as allocated is
# to keep the budget too.
ALLOCATOR_SLACK = {"cuda": 2 << 20}
# Tiles of exponentials in lent memory, the first that keeps a budget. More take less memory of their own, and more
# time: of 4,096 tokens with H = 4096 and 128,256 classes 1/2, 1/4 and 1/8 of the exponentials are not lent.
LENT_TILES = (1, 3, 7)
# Tokens for each entry of a row of the head, at most, with which one tile is lent in any case. It takes no more time
# than none where it takes less memory, in times the bare products 1.02 for 1.03 (8192 x 4096 x 128256), 1.05 and 1.05
# (4096 tokens), 1.07 for 1.13 (2048), 1.02 for 1.04 (8192 x 3584 x 152064). Three: 1.02, 1.08, 1.09, 1.00; seven: 1.01,
# 1.14, 1.10, 1.03. With more tokens there is little to lend.
LENT_RATIO = 4


@dataclass(frozen=True)
class ChunkOptions:
    """How `fused_linear_cross_entropy` may use memory and precision. The defaults are exact and fast.

    Args:
        chunk_rows: tokens per chunk, instead of the planner's choice (for ``strategy="vocab"``: tokens per
            block of classes).
        max_workspace_bytes: upper bound of the memory, in bytes, that a call takes above its inputs and the
            gradients that it returns. An error names the least possible where this is less.
        strategy: "auto", "tokens" or "vocab"; see `flce.planning`.
        logits_dtype: dtype of the logits between the matrix product and the softmax, where they are in memory.
            Default: the dtype of the input (on a CPU float32, which is what its matrix products are made
            in). ``torch.float32`` with bfloat16 inputs removes the largest rounding error of the usual path.
        accum_dtype: dtype in which gradients are summed over chunks: ``torch.float32`` or, for bfloat16
            inputs, ``torch.bfloat16``, which halves that buffer and loses digits with every chunk.
        skip_ignored: whether rows whose target is `ignore_index` are dropped before the matrix products.
            Their number must be known to the host: on a CPU that is free, on an accelerator it waits for the
            device. That costs about a millisecond and pays from a tenth of the rows on; with
            `ChunkPlan.late_normalization` the device has the first product to do meanwhile. "auto": True on
            a CPU, False elsewhere: nothing waits that was not asked to.

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
            value = integer(name, value, "None or an int")
            if value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
            # Bounds: of a larger one as much is left as the custom operators take.
            object.__setattr__(self, name, min(value, INT64_MAX))
        if self.strategy not in ("auto", "tokens", "vocab"):
            raise ValueError(f"strategy must be 'auto', 'tokens' or 'vocab', got {self.strategy!r}")
        if self.logits_dtype is not None and not isinstance(self.logits_dtype, torch.dtype):
            raise TypeError(f"logits_dtype must be None or a torch.dtype, got {self.logits_dtype!r}")
        if not isinstance(self.accum_dtype, torch.dtype):
            raise TypeError(f"accum_dtype must be a torch.dtype, got {self.accum_dtype!r}")
        if self.skip_ignored is not True and self.skip_ignored is not False and self.skip_ignored != "auto":
            raise ValueError(f"skip_ignored must be True, False or 'auto', got {self.skip_ignored!r}")


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
    sizes = {name: integer(name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value < (0 if name == "num_tokens" else 1):
            raise ValueError(f"{name} must be positive, got {value}")
    num_tokens, hidden_size, vocab_size, *ranks = sizes.values()
    if options is not None and not isinstance(options, ChunkOptions):
        raise TypeError(f"options must be None or a flce.ChunkOptions, got {type(options).__name__}")
    device = torch.device(device)
    of_adapters = (True,) * len(ranks)
    shape = CallShape(
        num_tokens=num_tokens,
        hidden_sizes=(hidden_size, *ranks),
        vocab_size=vocab_size,
        dtype=dtype,
        device_type=device.type,
        backend=backend_name(device),
        has_product=has_product(device),
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
        return _lending(base)[0]
    room = budget - ALLOCATOR_SLACK.get(shape.device_type, 0)
    if options.chunk_rows is not None and base.strategy == "tokens":
        plans = _lending(base)
        fitted = _first_within(plans, room) or plans[-1]
    else:
        fitted = _fit(base, room)
        if fitted.workspace_bytes > room:
            fitted = _fit(base, budget)
    if fitted.workspace_bytes > budget:
        raise ValueError(
            f"max_workspace_bytes={budget} is too small for N={shape.num_tokens}, H={size_text(shape.hidden_sizes)}, "
            f"V={shape.vocab_size} in {dtype_text(shape.dtype)} with strategy={options.strategy!r} and "
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
    skip = options.skip_ignored
    tokens = ChunkPlan(
        **vars(shape),
        strategy="tokens",
        max_rows=options.chunk_rows or 1,
        equal_rows=options.chunk_rows is None,
        block_cols=vocab_size,
        logits_dtype=logits_dtype,
        grad_dtype=grad_dtype,
        # Sums on a CPU are made in float32 in any case, see `gemm`.
        accum_dtype=torch.float32 if device_type == "cpu" else options.accum_dtype,
        skip_ignored=(device_type == "cpu") if skip == "auto" else bool(skip),
        max_workspace_bytes=options.max_workspace_bytes,
    )
    if options.chunk_rows is None:
        tokens = replace(tokens, max_rows=_default_rows(tokens))
    if options.strategy == "tokens" or (options.strategy == "auto" and options.max_workspace_bytes is None):
        return tokens
    rows = max(1, shape.num_tokens)
    # Without a budget a quarter of what a chunk of `tokens` would take: `vocab` is for saving memory. With fewer tokens
    # a block is no wider: its weight gradient has to be summed over them.
    cols = defaults_of(device_type).chunk // 4 // (rows * logits_dtype.itemsize)
    vocab = replace(
        tokens,
        strategy="vocab",
        max_rows=options.chunk_rows or rows,
        equal_rows=False,
        block_cols=min(vocab_size, max(COLUMN_MULTIPLE, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE)),
    )
    if options.strategy == "vocab":
        return vocab
    return _cheaper_within_budget(tokens, vocab, options.chunk_rows is not None)


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


def _efficient_rows(device_type: str) -> int:
    return MIN_EFFICIENT_ROWS["cpu" if device_type == "cpu" else "other"]


def _default_rows(tokens: ChunkPlan) -> int:
    """Of a chunk with all classes."""
    defaults = defaults_of(tokens.device_type)
    if not tokens.needs.any and defaults.statistics is not None:
        return STATISTICS_ROWS
    per_row = tokens._logits_bytes(1, tokens.vocab_size)
    gradient_apart = not tokens.in_place and not tokens.late_normalization
    if tokens.dtype.itemsize >= 4:
        limit = defaults.no_sum
    elif tokens.num_tokens * per_row <= defaults.one_chunk:
        limit = defaults.one_chunk
    else:
        limit = defaults.chunk * (2 if gradient_apart else 1)  # logits, and their gradient beside them
    return max(ROW_MULTIPLE, limit // per_row // ROW_MULTIPLE * ROW_MULTIPLE)


def _cheaper_within_budget(tokens: ChunkPlan, vocab: ChunkPlan, rows_are_given: bool) -> ChunkPlan:
    """The first in order of preference that keeps the budget, or the smallest of all."""
    assert tokens.max_workspace_bytes is not None
    budget = tokens.max_workspace_bytes - ALLOCATOR_SLACK.get(tokens.device_type, 0)
    if rows_are_given:
        return vocab if _first_within(_lending(tokens), budget) is None else tokens
    efficient_rows = _efficient_rows(tokens.device_type)
    # All tokens at once have no sum of their weight gradient apart, and may take less than a few of them.
    if _with_rows(tokens, efficient_rows).workspace_bytes <= budget or _in_one_chunk(tokens, budget) is not None:
        return tokens
    remaking = _least_remaking(tokens)
    if _can_remake(remaking) and remaking.workspace_bytes <= budget and _more_work(remaking) <= 1.0:
        return tokens
    if _efficient(vocab, budget) is not None:
        return vocab
    if _with_rows(tokens, efficient_rows // 8).workspace_bytes <= budget:
        return tokens
    return tokens if _smallest(tokens).workspace_bytes <= _smallest(vocab).workspace_bytes else vocab


def _with_rows(plan: ChunkPlan, rows: int) -> ChunkPlan:
    return replace(plan, max_rows=min(rows, max(1, plan.num_tokens)), equal_rows=rows >= ROW_MULTIPLE)


def _in_one_chunk(tokens: ChunkPlan, budget: int) -> ChunkPlan | None:
    """All tokens at once, with some exponentials in lent memory if need be; None if neither fits."""
    return _first_within(_lending(_with_rows(tokens, tokens.num_tokens)), budget)


def _in_chunks(tokens: ChunkPlan, budget: int) -> ChunkPlan | None:
    """Some tokens at a time, with as many classes made once more as is best; None if nothing fits."""
    least = _least_remaking(tokens)
    most = least.remade_cols
    remade = (0, *(whole_blocks(most * k // 4) for k in range(1, 4)), most)
    plans = [_fit_size(replace(tokens, remade_cols=cols), budget) for cols in remade]
    # Workspace may be less with more rows, where dX then is in freed memory. The search may have missed that.
    plans.append(least if least.workspace_bytes <= budget else None)
    # Whether a plan can make classes once more depends on its rows, too.
    possible = [plan for plan in plans if plan is not None and (not plan.remade_cols or _can_remake(plan))]
    return min(possible, key=_more_work, default=None)


def _least_remaking(tokens: ChunkPlan) -> ChunkPlan:
    """All classes made once more whose sums have no place in the memory of the gradient, that is half of them, and
    chunks of so many rows that this is as fast as `vocab` (see `_more_work`)."""
    most = tokens.vocab_size - halfway(tokens.vocab_size)
    rows = ceil_div(int(_efficient_rows(tokens.device_type) / (2.0 - REMAKING)), ROW_MULTIPLE) * ROW_MULTIPLE
    return _with_rows(replace(tokens, remade_cols=most), rows)


def _more_work(tokens: ChunkPlan) -> float:
    """What a plan has to do beside three products, in times what `vocab` has to do: to make all logits again."""
    if tokens.num_chunks <= 1:
        return 0.0
    remade = tokens.remade_cols / tokens.vocab_size
    return REMAKING * remade + (1.0 - remade) * _efficient_rows(tokens.device_type) / tokens.chunk_rows


def _can_remake(plan: ChunkPlan) -> bool:
    return (
        plan.late_normalization
        and plan.in_place  # operands that cannot be fused after all have nothing else for their logits
        and plan.sweeps[0].weight_halves
        and not plan.skip_ignored
    )


def _first_within(plans: Sequence[ChunkPlan], budget: int) -> ChunkPlan | None:
    return next((plan for plan in plans if plan.workspace_bytes <= budget), None)


def _lending(plan: ChunkPlan) -> list[ChunkPlan]:
    """The plan as it is and, if it has a single chunk, with exponentials in lent memory: in order of preference, each
    with less workspace than the one before; without the first, where the others are as fast."""
    lends = (
        plan.late_normalization
        and 0 < plan.num_tokens <= plan.max_rows
        and plan.needs.weights[0]
        and not plan.skip_ignored
    )
    plans = [plan]
    for count in LENT_TILES if lends else ():
        lent = replace(plan, lent_tiles=count)
        # The float32 gradient of the inputs takes memory, too.
        if len(lent.exponential_tiles) > 1 and lent.workspace_bytes < plans[-1].workspace_bytes:
            plans.append(lent)
    in_any_case = len(plans) > 1 and plan.num_tokens <= LENT_RATIO * plan.hidden_sizes[0]
    return plans[1:] if in_any_case else plans


def _with_cols(plan: ChunkPlan, cols: int) -> ChunkPlan:
    return replace(plan, block_cols=min(cols, plan.vocab_size))


def _with_size(plan: ChunkPlan, size: int) -> ChunkPlan:
    """With tiles of `size` rows (``tokens``) or classes (``vocab``)."""
    return _with_rows(plan, size) if plan.strategy == "tokens" else _with_cols(plan, size)


def _largest_size(plan: ChunkPlan) -> int:
    # A lent sum needs classes that are not in the first block.
    return max(1, plan.num_tokens) if plan.strategy == "tokens" else plan.vocab_size - int(plan.lent_input_sum)


def _smallest(plan: ChunkPlan) -> ChunkPlan:
    """The plan with the least workspace.

    Not always that of the smallest tile: a single tile needs no sums over tiles, an aligned one no float32 copy.
    """
    most = _largest_size(plan)
    candidates = [_with_size(plan, size) for size in (1, min(ALIGNMENT, most), most)]
    if plan.strategy == "tokens":
        candidates += _lending(_with_size(plan, most))
        remaking = _with_rows(_least_remaking(plan), plan.least_late_rows)
        candidates += [remaking] if _can_remake(remaking) else []
    if _can_lend_input_sum(plan):
        candidates += [replace(c, lent_input_sum=True) for c in candidates if c.block_cols < plan.vocab_size]
    if _can_split(plan):
        tile = (1, min(ALIGNMENT, plan.vocab_size))
        candidates += [replace(c, input_tile=tile) for c in candidates if not c.lent_input_sum]
    return min(candidates, key=lambda candidate: candidate.workspace_bytes)


def _can_split(plan: ChunkPlan) -> bool:
    return plan.strategy == "vocab" and plan.num_tokens > 0 and any(plan.needs.inputs)


def _can_lend_input_sum(plan: ChunkPlan) -> bool:
    return (
        len(plan.hidden_sizes) == 1
        and plan.needs.inputs[0]
        and plan._accum != plan.dtype
        and plan.vocab_size > 1
        and not plan.skip_ignored  # rows of the sum would have to be dealt out to others
        and 0 < plan.num_tokens <= plan.max_rows
        and _with_cols(plan, 1)._lends
        # Logits of those classes are made three times. If they were half of all, that would be half a product more;
        # gradients in sweeps of their own take a whole one.
        and 2 * plan.input_sum_start >= plan.vocab_size
    )


def _efficient(vocab: ChunkPlan, budget: int) -> ChunkPlan | None:
    """The plan with one sweep if that gets `EFFICIENT_COLS` classes, else with a lent sum, else split; None if none
    of them fits."""
    whole = _with_cols(vocab, EFFICIENT_COLS)
    if whole.workspace_bytes <= budget:
        return _fit_size(vocab, budget)
    if _can_lend_input_sum(vocab):
        lent = replace(vocab, lent_input_sum=True)
        # Only the last blocks are so narrow.
        if _with_cols(lent, min(EFFICIENT_COLS // 4, _largest_size(lent))).workspace_bytes <= budget:
            return _fit_size(lent, budget)
    return _fit_split(vocab, budget) if _can_split(vocab) else None


def _fit(plan: ChunkPlan, budget: int) -> ChunkPlan:
    """The plan with the largest tiles within the budget, or that with the least workspace if none is."""
    if plan.strategy == "vocab":
        return _efficient(plan, budget) or _fit_size(plan, budget) or _smallest(plan)
    return _in_one_chunk(plan, budget) or _in_chunks(plan, budget) or _smallest(plan)


def _fit_split(vocab: ChunkPlan, budget: int) -> ChunkPlan | None:
    """Two sweeps, each as large as the budget allows."""
    none = replace(vocab, input_tile=(1, 1))
    fitted = _fit_size(none, budget)
    if fitted is None:
        return None
    # The sum for a chunk of tokens, R x H in float32, and its tile, R x C, get about the same memory.
    cols = min(vocab.vocab_size, max(COLUMN_MULTIPLE, 2 * vocab.hidden_sizes[0] // COLUMN_MULTIPLE * COLUMN_MULTIPLE))

    def split(rows: int) -> ChunkPlan:
        return replace(fitted, input_tile=(min(rows, vocab.num_tokens), cols))

    rows = _largest(lambda rows: split(rows).workspace_bytes <= budget, vocab.num_tokens, ROW_MULTIPLE)
    return split(rows) if rows else None


def _fit_size(plan: ChunkPlan, budget: int) -> ChunkPlan | None:
    """The plan with the largest tiles of one sweep within the budget, None if none is."""
    multiple = ROW_MULTIPLE if plan.strategy == "tokens" else BLOCK_MULTIPLE
    size = _largest(lambda size: _with_size(plan, size).workspace_bytes <= budget, _largest_size(plan), multiple)
    if plan.strategy == "vocab" and LARGE_BLOCK <= size < plan.vocab_size:
        size = whole_blocks(size)
    return _with_size(plan, size) if size else None


def _largest(fits: Callable[[int], bool], most: int, multiple: int) -> int:
    """`most` if that fits, else the largest multiple of `multiple`, or of less, that does; 0 if none does."""
    if fits(most):
        return most
    for step, limit in ((multiple, most), (ALIGNMENT, min(multiple, most)), (1, min(ALIGNMENT, most))):
        low, high = 0, (limit - 1) // step  # of the sizes that fit, the largest seen; the largest that may
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle * step):
                low = middle
            else:
                high = middle - 1
        if low:
            return low * step
    return 0
