"""The kernel that merges the statistics of all shards of a head into losses and factors of rows, and its launch.

`flce/engine/shards.py` calls it (`Backend.finish_sharded_rows`), and has the same formulas in PyTorch for all losses.
This kernel is for losses whose exponentials a fused product computes. It replaces a hundred launches of PyTorch, which
take 2 to 5% of the time of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from flce.backends.contract import TileCall
from flce.backends.formulas import RowStatistics
from flce.backends.triton.launch import Launch, build_launch
from flce.backends.triton.math import LN_2, LOG2_E, finish_rows, log1p

ROWS = 64
# The order of the gathered numbers of a row is the order of the fields of `RowStatistics`.
_OFFSET = tl.constexpr(RowStatistics._fields.index("offset"))
_LOG_SUM = tl.constexpr(RowStatistics._fields.index("log_sum"))
_LOGPROB = tl.constexpr(RowStatistics._fields.index("logprob"))


@triton.jit
def load_log_sum_exp(gathered_ptr, process, stride, row, rows, exists):
    """Return m and log(sum(exp(z - m))) of a process's classes; m is -inf if the process has no class."""
    gathered_ptr += process * stride + row
    offset = tl.load(gathered_ptr + _OFFSET * rows, mask=exists, other=0.0)
    return offset, tl.load(gathered_ptr + _LOG_SUM * rows, mask=exists, other=0.0)


@triton.jit(
    do_not_specialize=[
        *("processes", "rank", "classes", "gathered_stride", "rows", "vocab_size", "column_start", "ignore_index"),
        *("normalizer_stride", "factors_stride"),
    ]
)
def finish_sharded_rows_kernel(
    gathered_ptr,  # (processes, 3 * rows + 1): offset, log_sum, target's log-probability of the rows; number of classes
    target_ptr,  # (rows,) int64, of all classes
    class_weight_ptr,  # (V,)
    token_weight_ptr,  # (rows,)
    scales_ptr,  # (3,) cross-entropy scale, z-loss scale, sum of the class weights
    loss_ptr,  # (rows,); from here on output
    z_loss_ptr,  # (rows,)
    normalizer_ptr,  # (slots, rows), row stride normalizer_stride
    logprob_ptr,  # (rows,)
    # With HAS_FACTORS (2, rows), row stride factors_stride: the input is f of the shard, the output f and t of all
    # classes.
    factors_ptr,
    gathered_stride,
    normalizer_stride,
    factors_stride,
    rows,
    processes,
    rank,  # of this process
    classes,  # of the largest shard
    column_start,  # the first class of this process
    vocab_size,
    ignore_index,
    scale: tl.float64,
    cap: tl.float64,
    z_loss: tl.float64,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    WANT_LOGPROB: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
):
    scale = tl.full((), scale, tl.float32)
    cap = tl.full((), cap, tl.float32)
    z_loss = tl.full((), z_loss, tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    target = tl.load(target_ptr + row, mask=exists, other=ignore_index)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    owner = tl.where(in_range, target, 0) // classes

    # All log-sum-exps are relative to the largest. Offsets may be large, so their difference is computed first.
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    wrong = tl.full((), 0.0, tl.float32)
    for process in range(processes):
        offset, log_sum = load_log_sum_exp(gathered_ptr, process, gathered_stride, row, rows, exists)
        lse = tl.where(offset == float("inf"), offset, offset + log_sum)
        largest = tl.where((lse > largest) | (lse != lse), lse, largest)
        num_classes = tl.load(gathered_ptr + process * gathered_stride + 3 * rows)
        expected = tl.minimum(tl.maximum(vocab_size - process * classes, 0), classes)
        wrong = tl.where(num_classes == expected.to(tl.float32), wrong, float("nan"))
    reference = tl.where(largest == float("-inf"), 0.0, largest) + wrong

    total = tl.zeros((ROWS,), tl.float32)
    others = tl.zeros((ROWS,), tl.float32)
    owner_lse = tl.zeros((ROWS,), tl.float32)
    own_lse = tl.zeros((ROWS,), tl.float32)
    for process in range(processes):
        offset, log_sum = load_log_sum_exp(gathered_ptr, process, gathered_stride, row, rows, exists)
        lse = (offset - reference) + log_sum
        term = tl.exp2(lse * LOG2_E)
        total += term
        others += tl.where(owner == process, 0.0, term)
        owner_lse = tl.where(owner == process, lse, owner_lse)
        own_lse = tl.where(process == rank, lse, own_lse)
    log_sum = tl.log2(tl.where(valid, total, 1.0)) * LN_2
    target_logprob_ptr = gathered_ptr + owner.to(tl.int64) * gathered_stride + _LOGPROB * rows + row
    nll = -tl.load(target_logprob_ptr, mask=exists & in_range, other=0.0)
    # log(1 + exp(x)), where x is the log-sum-exp of all other shards relative to the shard with the target.
    x = tl.where(others == 0.0, float("-inf"), tl.log2(others) * LN_2 - owner_lse)
    more = tl.maximum(x, 0.0) + log1p(tl.exp2(-tl.abs(x) * LOG2_E))
    nll = tl.where(owner_lse == float("-inf"), float("inf"), nll + tl.where(others == 0.0, 0.0, more))
    nll = tl.where(in_range & (tl.abs(largest) != float("inf")), nll, float("nan")) + wrong

    softmax_factor, grad_at_target = finish_rows(
        row=row, exists=exists, target=target, valid=valid, in_range=in_range, nll=nll,
        offset=reference, log_sum=log_sum, class_weight_ptr=class_weight_ptr, token_weight_ptr=token_weight_ptr,
        scales_ptr=scales_ptr, loss_ptr=loss_ptr, z_loss_ptr=z_loss_ptr, normalizer_ptr=normalizer_ptr,
        logprob_ptr=logprob_ptr, normalizer_stride=normalizer_stride, z_loss=z_loss, HAS_CLASS_WEIGHT=HAS_CLASS_WEIGHT,
        HAS_TOKEN_WEIGHT=HAS_TOKEN_WEIGHT, HAS_Z_LOSS=HAS_Z_LOSS, WANT_LOGPROB=WANT_LOGPROB, WANT_GRADIENT=HAS_FACTORS,
    )  # fmt: skip
    if not HAS_FACTORS:
        return
    share = own_lse - log_sum
    # The probabilities of a shard without classes, or with logits that are all -inf, are NaN: they count as 0.
    counts = share != float("-inf")
    own = tl.load(gathered_ptr + rank * gathered_stride + _LOGPROB * rows + row, mask=exists, other=0.0)
    # The probability of the target or, if another shard has the target, of the class that replaces it in this shard.
    local_target_probability = tl.where(counts, tl.exp2((own + share) * LOG2_E), 0.0)
    grad_at_target = tl.where(in_range & (owner == rank), grad_at_target, softmax_factor * local_target_probability)
    if HAS_SOFTCAP:
        offset, log_sum = load_log_sum_exp(gathered_ptr, rank, gathered_stride, row, rows, exists)
        tanh = tl.where(counts, (offset + (log_sum + own)) / cap, 0.0)
        grad_at_target *= scale * cap * ((1.0 - tanh) * (1.0 + tanh))
    elif HAS_SCALE:
        grad_at_target *= scale
    factor = tl.load(factors_ptr + row, mask=exists, other=0.0) * tl.exp2(share * LOG2_E)
    factor = softmax_factor * tl.where(counts, factor, 0.0)
    tl.store(factors_ptr + row, tl.where(valid, factor, 0.0), mask=exists)
    tl.store(factors_ptr + factors_stride + row, tl.where(valid, grad_at_target, 0.0), mask=exists)


def finish_sharded_rows(
    gathered: Tensor, rank: int, classes: int, call: TileCall, factors: Tensor | None
) -> Iterator[Launch]:
    yield build_launch(
        finish_sharded_rows_kernel,
        (triton.cdiv(len(call.inputs.target), ROWS),),
        call,
        {"ROWS": ROWS},
        gathered=gathered,
        factors=factors,
        processes=len(gathered),
        rank=rank,
        classes=classes,
    )
