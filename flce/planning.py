"""How a call is cut into chunks, and the bytes that it takes. Pure arithmetic on shapes.

The policy, in full:

* **Strategy**: ``tokens`` makes the logits of some tokens and all classes at a time, three matrix products in all.
  ``vocab`` takes all tokens and `block_cols` classes at a time and multiplies a fourth time, but needs no float32 copy
  of the weight gradient. Without a budget it is ``tokens``, but see below.
* **Without a budget** the logits take at most the bytes of `chunk_plan.DEFAULTS`, absolute figures: the workspace does
  not grow with the number of tokens. All tokens are one chunk where that fits, because a weight gradient that is summed
  over chunks in float32 takes as much memory again (`halfway`) and its traffic.
* **Where nothing is summed over chunks** a large chunk gains little. Without a budget a GPU then has little workspace
  and nearly the speed of the fastest plan: with a frozen head the chunks of `_frozen_rows`, which do not depend on the
  number of tokens, with ``reduction="none"``, whose logits are made twice in any case, the smallest blocks of ``vocab``
  within `WITHIN` of it (`_unreduced`).
* **With** ``max_workspace_bytes`` the plan is the fastest that keeps it, by `cost.seconds`. `_affordable` chooses the
  strategy and `_fit` the sizes.
* **In between**: sums over chunks of the weight gradient of half of the classes fit in the memory of that gradient
  (`halfway`). Where the sums of the others would leave little room for chunks, these are not summed:
  their logits are made once more afterwards, of all tokens at once, as in ``vocab`` (`ChunkPlan.remade_cols`).
* **Loans**: the gradient of the head's weight is written a block of classes after the other, and the memory of those
  that are not yet written is free. ``vocab`` makes its tiles there while that gives larger ones (`Sweep.blocks`).
  The sum of the input gradient over blocks, N x H in float32, can be in the memory of the last classes, whose own
  logits are then made once more (`ChunkPlan.lent_input_sum`).
  ``tokens`` with all tokens in one chunk, normalized late (see below), has exponentials of the last classes there
  where tokens are not too many (`LENT_RATIO`) or a budget asks for it: their share of dW is made first, that of the
  others over them.
* **Split**: gradients of inputs and of weights can be made in a sweep each, with a fifth product: the first is summed
  over classes for a few tokens at a time, the second over tokens for a few classes. That is for many tokens, for rows
  that are dropped and for a frozen head.
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
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from flce import cost
from flce.backends import backend_name, has_product
from flce.borrowing import BLOCK_MULTIPLE, halfway
from flce.chunk_plan import (
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

# Of the fastest plan's time, what a plan without a budget may take to be the smallest.
WITHIN = 1.03
# Sizes among which the strategy is chosen; those of the plan are then fitted to the budget.
LADDER_ROWS = (32, 64, 128, 192, 224, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
LADDER_COLS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 32768, 65536)
# Tokens for which the times of these sizes are compared, of up to twice as many: the time of a token hardly depends on
# their number, and a traced graph does not know it.
LADDER_TOKENS = (2048, 8192, 32768)
# Classes of a block without a budget, at least: each is a handful of launches.
LEAST_COLS = 1024
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
        return _lending(_without_sums(base, options))[0]
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
    """The plan before its sizes are chosen: dtypes are final, and whether gradients are deferred.

    Sizes may be symbolic; only inequalities in the number of tokens are decided here.
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
    vocab = _vocab(tokens, options)
    if options.strategy == "vocab":
        return vocab
    return _affordable(tokens, vocab, options.chunk_rows is not None)


def _vocab(tokens: ChunkPlan, options: ChunkOptions) -> ChunkPlan:
    rows = max(1, tokens.num_tokens)
    # Without a budget a quarter of what a chunk of `tokens` would take: `vocab` is for saving memory. With fewer tokens
    # a block is no wider: its weight gradient has to be summed over them.
    cols = defaults_of(tokens.device_type).chunk // 4 // (rows * tokens.logits_dtype.itemsize)
    return replace(
        tokens,
        strategy="vocab",
        max_rows=options.chunk_rows or rows,
        equal_rows=False,
        block_cols=min(tokens.vocab_size, max(COLUMN_MULTIPLE, cols // COLUMN_MULTIPLE * COLUMN_MULTIPLE)),
    )


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


def _default_rows(tokens: ChunkPlan) -> int:
    """Of a chunk with all classes."""
    defaults = defaults_of(tokens.device_type)
    if not tokens.needs.any and defaults.statistics is not None:
        return STATISTICS_ROWS
    per_row = tokens._logits_bytes(1, tokens.vocab_size)
    if tokens.dtype.itemsize >= 4:
        limit = defaults.no_sum
    elif tokens.num_tokens * per_row <= defaults.one_chunk:
        limit = defaults.one_chunk
    else:
        limit = defaults.chunk
    return max(ROW_MULTIPLE, limit // per_row // ROW_MULTIPLE * ROW_MULTIPLE)


def _without_sums(base: ChunkPlan, options: ChunkOptions) -> ChunkPlan:
    """A small plan near the fastest, where no gradient of a weight is summed over chunks."""
    free = options.chunk_rows is None and base.strategy == "tokens" and base.num_tokens > 0
    if not free or not base.needs.any or base.device_type == "cpu":
        return base
    if not base.needs.weights[0]:
        return replace(base, max_rows=_frozen_rows(base), equal_rows=False)
    return _unreduced(base, _vocab(base, options)) if base.deferred and options.strategy == "auto" else base


def _frozen_rows(tokens: ChunkPlan) -> int:
    """Of a chunk whose gradient of the input is nearly one wave of blocks, one for each multiprocessor.

    On an H200 that is at most 2.4% slower than all tokens at once: 1.015, 1.024, 1.017 and 0.999 for H = 4096, 3584,
    2304 and 1024. With half of these rows: 1.09, 1.03, 1.09 and 1.03; with others between 1.02 and 1.14, in no order.
    """
    device, defaults = cost.device_of(tokens.device_type), defaults_of(tokens.device_type)
    limit = defaults.chunk if tokens.dtype.itemsize < 4 else defaults.no_sum
    tall, wide = device.block
    rows = max(1, int(0.97 * device.multiprocessors) // ceil_div(tokens.hidden_sizes[0], wide)) * tall
    most = limit // tokens._logits_bytes(1, tokens.vocab_size)
    return max(ROW_MULTIPLE, min(rows, most) // ROW_MULTIPLE * ROW_MULTIPLE)


def _unreduced(tokens: ChunkPlan, vocab: ChunkPlan) -> ChunkPlan:
    """Logits are made twice with either strategy, and ``vocab`` sums no gradient of a weight. It sums that of inputs,
    which takes more than `tokens` does where tokens are very many."""
    plans = [tokens, *(_with_cols(vocab, cols) for cols in LADDER_COLS if LEAST_COLS <= cols < vocab.vocab_size)]
    plans = [plan for plan in plans if plan.workspace_bytes <= tokens.workspace_bytes]
    times = [cost.seconds(plan) for plan in plans]
    limit = WITHIN * min(times)
    near = [(plan.workspace_bytes, time, plan) for plan, time in zip(plans, times, strict=True) if time <= limit]
    return min(near, key=lambda choice: choice[:2])[2]


class _Rung(NamedTuple):
    """A plan of one of a few sizes, for any number of tokens."""

    strategy: str
    size: int
    remade: bool = False
    lent_input_sum: bool = False
    split: bool = False

    def plan(self, tokens: ChunkPlan, vocab: ChunkPlan) -> ChunkPlan | None:
        """None: it is not possible."""
        if self.remade and not _may_remake(tokens):
            return None
        if self.remade:
            made = _remaking(tokens)
            made = _with_rows(made, max(self.size, made.least_late_rows))
            return made if _can_remake(made) else None
        if self.strategy == "tokens":
            return _with_rows(tokens, self.size)
        if self.split:
            # As many classes for the gradient of the weight as take about as much.
            cols = 4 * vocab.hidden_sizes[0] * self.size // max(1, vocab.num_tokens)
            made = _with_cols(vocab, max(COLUMN_MULTIPLE, cols))
            return _split(made, self.size) if _can_split(made) else None
        if self.size >= vocab.vocab_size:
            return None
        made = _with_cols(vocab, self.size)
        if self.lent_input_sum:
            return replace(made, lent_input_sum=True) if _can_lend_input_sum(made) else None
        return made


Family = tuple[tuple[_Rung, float], ...]


@functools.lru_cache(maxsize=256)
def _ladder(tokens: ChunkPlan, vocab: ChunkPlan, num_tokens: int) -> tuple[Family, ...]:
    """The rungs of each kind of plan, from the smallest on, with the time that the fastest so far takes; the kind with
    the fastest of all first."""

    def time(rung: _Rung) -> float:
        # Of several chunks.
        count = max(num_tokens, 2 * rung.size if rung.strategy == "tokens" else 0)
        plan = rung.plan(replace(tokens, num_tokens=count), replace(vocab, num_tokens=count, max_rows=count))
        return float("inf") if plan is None else cost.seconds(plan) / count

    families = []
    for rungs in (
        [_Rung("tokens", size) for size in LADDER_ROWS],
        [_Rung("tokens", size, remade=True) for size in LADDER_ROWS],
        [_Rung("vocab", size) for size in LADDER_COLS],
        [_Rung("vocab", size, lent_input_sum=True) for size in LADDER_COLS],
        [_Rung("vocab", size, split=True) for size in LADDER_ROWS],
    ):
        times = [(rung, time(rung)) for rung in rungs]
        possible = [rung for rung, seconds in times if seconds < float("inf")]
        fastest = itertools.accumulate((seconds for _, seconds in times if seconds < float("inf")), min)
        families.append(tuple(zip(possible, fastest, strict=True)))
    return tuple(sorted((family for family in families if family), key=lambda family: family[-1][1]))


def _without_tokens(plan: ChunkPlan) -> ChunkPlan:
    """What the ladder depends on. The sizes of a head that are symbols are not to change."""
    hidden_sizes, vocab_size = tuple(map(int, plan.hidden_sizes)), int(plan.vocab_size)
    return replace(
        plan,
        num_tokens=1,
        hidden_sizes=hidden_sizes,
        vocab_size=vocab_size,
        max_rows=1,
        block_cols=vocab_size,
        max_workspace_bytes=None,
    )


def _affordable(tokens: ChunkPlan, vocab: ChunkPlan, rows_are_given: bool) -> ChunkPlan:
    """Of the two strategies the one with the fastest rung that keeps the budget, or with the smallest plan of all.

    A traced graph that was made for one number of tokens has to have the same strategy for others: what depends on
    their number is compared with the budget, and nothing else.
    """
    assert tokens.max_workspace_bytes is not None
    budget = tokens.max_workspace_bytes - ALLOCATOR_SLACK.get(tokens.device_type, 0)
    if rows_are_given:
        return vocab if _first_within(_lending(tokens), budget) is None else tokens
    # All tokens at once have no sum of their weight gradient apart, and may take less than a few of them.
    if _in_one_chunk(tokens, budget) is not None:
        return tokens
    # Where no gradient of the head is summed over chunks, small ones are as good. On an H200, frozen heads of four
    # shapes in 64 MiB to 1 GiB: 0.6 to 0.75 times what `vocab` takes, in 14 of 16 pairs.
    summed = tokens.needs.weights[0] or tokens.needs.bias
    if not summed and _with_rows(tokens, ROW_MULTIPLE).workspace_bytes <= budget:
        return tokens
    best, least_time = None, float("inf")
    count = next((count for count in LADDER_TOKENS if tokens.num_tokens <= 2 * count), LADDER_TOKENS[-1])
    for family in _ladder(_without_tokens(tokens), _without_tokens(vocab), count):
        if family[-1][1] >= least_time:
            break
        # The largest rung that keeps the budget.
        low, high = -1, len(family)
        while high - low > 1:
            middle = (low + high) // 2
            plan = family[middle][0].plan(tokens, vocab)
            low, high = (middle, high) if plan is not None and plan.workspace_bytes <= budget else (low, middle)
        if low >= 0 and family[low][1] < least_time:
            best, least_time = family[low][0], family[low][1]
    if best is not None:
        return tokens if best.strategy == "tokens" else vocab
    return tokens if _smallest(tokens).workspace_bytes <= _smallest(vocab).workspace_bytes else vocab


def _with_rows(plan: ChunkPlan, rows: int) -> ChunkPlan:
    return replace(plan, max_rows=min(rows, max(1, plan.num_tokens)), equal_rows=rows >= ROW_MULTIPLE)


def _in_one_chunk(tokens: ChunkPlan, budget: int) -> ChunkPlan | None:
    """All tokens at once, with some exponentials in lent memory if need be; None if neither fits."""
    return _first_within(_lending(_with_rows(tokens, tokens.num_tokens)), budget)


def _in_chunks(tokens: ChunkPlan, budget: int) -> ChunkPlan | None:
    """Some tokens at a time, with half of the classes made once more or none; None if nothing fits."""
    most = _remaking(tokens).remade_cols
    remade = (0, most) if _may_remake(tokens) else (0,)
    plans = [_fit_size(replace(tokens, remade_cols=cols), budget) for cols in remade]
    # Whether a plan can make classes once more depends on its rows, too.
    possible = [plan for plan in plans if plan is not None and (not plan.remade_cols or _can_remake(plan))]
    return min(possible, key=cost.seconds, default=None)


def _remaking(tokens: ChunkPlan) -> ChunkPlan:
    """All classes made once more whose sums have no place in the memory of the gradient, that is half of them."""
    return replace(tokens, remade_cols=tokens.vocab_size - halfway(tokens.vocab_size))


def _may_remake(plan: ChunkPlan) -> bool:
    """Whatever its sizes are."""
    return (
        plan.has_product
        and plan.needs.weights[0]
        and not plan.deferred
        and plan.in_place  # operands that cannot be fused after all have nothing else for their logits
        and not plan.skip_ignored
    )


def _can_remake(plan: ChunkPlan) -> bool:
    return _may_remake(plan) and plan.late_normalization and plan.sweeps[0].weight_halves


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
        remaking = _with_rows(_remaking(plan), plan.least_late_rows)
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


def _fit(plan: ChunkPlan, budget: int) -> ChunkPlan:
    """The fastest plan of its strategy within the budget, or that with the least workspace if none is."""
    if plan.strategy == "vocab":
        return _in_blocks(plan, budget) or _smallest(plan)
    return _in_one_chunk(plan, budget) or _in_chunks(plan, budget) or _smallest(plan)


def _in_blocks(vocab: ChunkPlan, budget: int) -> ChunkPlan | None:
    """Some classes at a time, with whichever place for the gradient of inputs is best; None if nothing fits."""
    best = _fit_size(vocab, budget)
    lent = replace(vocab, lent_input_sum=True)
    for possible, largest, fit in (
        (_can_lend_input_sum(vocab), lent, lambda: _fit_size(lent, budget)),
        (_can_split(vocab), _split(vocab, vocab.num_tokens), lambda: _fit_split(vocab, budget)),
    ):
        # Not worth a search if it is slower even with all the memory that it could use.
        if possible and (
            best is None or cost.seconds(_with_cols(largest, _largest_size(largest))) < cost.seconds(best)
        ):
            plans = [plan for plan in (best, fit()) if plan is not None]
            best = min(plans, key=cost.seconds, default=None)
    return best


def _fit_split(vocab: ChunkPlan, budget: int) -> ChunkPlan | None:
    """Two sweeps, each as large as the budget allows."""
    fitted = _fit_size(replace(vocab, input_tile=(1, 1)), budget)
    if fitted is None:
        return None
    rows = _largest(lambda rows: _split(fitted, rows).workspace_bytes, budget, max(1, vocab.num_tokens), ROW_MULTIPLE)
    if not rows:
        return None
    # A power of two fills whole waves, and leaves no rest of most numbers of tokens.
    return min((_split(fitted, size) for size in (rows, 1 << rows.bit_length() - 1)), key=cost.seconds)


def _split(vocab: ChunkPlan, rows: int) -> ChunkPlan:
    """With a sweep of its own for the gradients of inputs, of some tokens at a time."""
    # Their sum, R x H in float32, and their tile, R x C, get about the same memory.
    cols = min(vocab.vocab_size, max(COLUMN_MULTIPLE, 2 * vocab.hidden_sizes[0] // COLUMN_MULTIPLE * COLUMN_MULTIPLE))
    return replace(vocab, input_tile=(min(rows, max(1, vocab.num_tokens)), cols))


def _fit_size(plan: ChunkPlan, budget: int) -> ChunkPlan | None:
    """The plan with the largest tiles of one sweep within the budget, or a little smaller and faster ones; None if none
    is within it."""
    most = _largest_size(plan)
    if plan.strategy == "vocab":
        size = _largest_cols(plan, budget, most)
        return _with_cols(plan, size) if size else None

    def taken(rows: int) -> int:
        # What chunks of equal size take is no line, and less. Statistics have tiles of another kind for them.
        made = _with_rows(plan, rows)
        return replace(made, equal_rows=made.equal_rows and not plan.needs.any).workspace_bytes

    size = _largest(taken, budget, most, ALIGNMENT)
    sizes = {size, *(size // multiple * multiple for multiple in (ROW_MULTIPLE, 2 * ROW_MULTIPLE))} - {0}
    fitted = (_with_rows(plan, rows) for rows in sizes)
    return min((plan for plan in fitted if plan.workspace_bytes <= budget), key=cost.seconds, default=None)


def _largest_cols(plan: ChunkPlan, budget: int, most: int) -> int:
    def taken(cols: int) -> int:
        return _with_cols(plan, cols).workspace_bytes

    size = _largest(taken, budget, most, BLOCK_MULTIPLE)
    if size == most or size >= 4 * BLOCK_MULTIPLE:
        return size if size == most else whole_blocks(size)
    size = _largest(taken, budget, min(most, size + BLOCK_MULTIPLE), COLUMN_MULTIPLE)
    half = BLOCK_MULTIPLE // 2
    return size // half * half if size >= BLOCK_MULTIPLE else size


def _largest(taken: Callable[[int], int], budget: int, most: int, multiple: int) -> int:
    """`most` if ``taken(most) <= budget``, else the largest multiple of `multiple`, or of less, for which that holds;
    0 if there is none. What is taken is nearly affine in the size, so most tries are where the line through the last
    two meets the budget.
    """
    if taken(most) <= budget:
        return most
    for step, limit in ((multiple, most), (ALIGNMENT, min(multiple, most)), (1, min(ALIGNMENT, most))):
        # Of the sizes that fit the largest seen, of those that do not the smallest, and the next to try.
        low, high, size = 0, (limit - 1) // step + 1, 1
        tries: list[tuple[int, int]] = []
        while high - low > 1:
            bytes_ = taken(size * step)
            low, high = (size, high) if bytes_ <= budget else (low, size)
            tries.append((size, bytes_))
            size = _next_try(tries, budget) if len(tries) % 4 else (low + high) // 2
            size = min(max(size, low + 1), high - 1)
        if low:
            return low * step
    return 0


def _next_try(tries: Sequence[tuple[int, int]], budget: int) -> int:
    if len(tries) == 1:
        return 16
    (size_1, bytes_1), (size_2, bytes_2) = tries[-2:]
    slope = (bytes_2 - bytes_1) / (size_2 - size_1) if size_2 != size_1 else 0.0
    return size_2 + int((budget - bytes_2) / slope) if slope > 0 else size_2
