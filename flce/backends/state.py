"""The running state of the online softmax where no kernel holds it: shards of the vocabulary, and its end.

Plain PyTorch on vectors of one value per row, for every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flce.backends.contract import (
    ARGMAX,
    ENTROPY_SUM,
    MAX,
    REFERENCE,
    SMOOTH_SUM,
    STATE_SLOTS,
    SUM,
    TARGET_LOGIT,
    RowInputs,
    RowOutputs,
)
from flce.problem import LossSpec


def used_slots(spec: LossSpec) -> list[int]:
    """Those of the state that mean something; backends leave the others as they are."""
    slots = [MAX, SUM, TARGET_LOGIT]
    if "entropy" in spec.stats:
        slots.append(ENTROPY_SUM)
    if spec.label_smoothing:
        slots += [REFERENCE, SMOOTH_SUM]
    if "argmax" in spec.stats or "correct" in spec.stats:
        slots.append(ARGMAX)
    return slots


def empty_shard(state: Tensor) -> None:
    """The state of no classes."""
    state.zero_()
    state[MAX] = -torch.inf


def merge_shards(states: Tensor, weight_sums: Sequence[Tensor], spec: LossSpec) -> Tensor:
    """The state of all classes.

    Args:
        states: (shards, STATE_SLOTS, rows), in the order of their classes, each made with ``Tile.shard``; the first
            has a class.
        weight_sums: of each shard, () the sum of its class weights (their number, without weights); read with label
            smoothing only.
    """
    merged = states.new_zeros(STATE_SLOTS, states.shape[-1])
    maxima = states[:, MAX]
    row_max = maxima.amax(0)
    merged[MAX] = row_max
    # Nothing but -inf in the whole row: relative to 0, so that -inf - -inf makes no NaN here.
    safe_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    # What a shard with nothing but -inf holds is 0, and -inf * 0 would be NaN.
    shift = torch.where(maxima == -torch.inf, 0.0, maxima - safe_max)
    decay = torch.where(maxima == -torch.inf, 0.0, shift.exp())
    merged[SUM] = (decay * states[:, SUM]).sum(0)
    merged[TARGET_LOGIT] = states[:, TARGET_LOGIT].sum(0)  # 0 in all shards but one
    if "entropy" in spec.stats:
        merged[ENTROPY_SUM] = (decay * (states[:, ENTROPY_SUM] + shift * states[:, SUM])).sum(0)
    if spec.label_smoothing:
        # The sums are relative to a logit of the shard: now all to that of the first.
        references = states[:, REFERENCE]
        merged[REFERENCE] = references[0]
        weights = torch.stack(tuple(weight_sums)).to(states.dtype)[:, None]
        merged[SMOOTH_SUM] = (states[:, SMOOTH_SUM] + weights * (references - references[0])).sum(0)
    if "argmax" in spec.stats or "correct" in spec.stats:
        # The first of the shards with the largest logit has the lowest index. (NaN is nowhere the largest.)
        found = torch.where(maxima == row_max, states[:, ARGMAX], torch.inf).amin(0)
        merged[ARGMAX] = torch.where(found == torch.inf, 0.0, found)
    return merged


def finish(state: Tensor, rows: RowInputs, spec: LossSpec, vocab_size: int, out: RowOutputs) -> None:
    """Turn the state of all classes, (STATE_SLOTS, rows), into the losses and statistics of the rows."""
    valid = rows.target != spec.ignore_index
    row_max, log_sum = state[MAX], state[SUM].log()
    in_range = (rows.target >= 0) & (rows.target < vocab_size)
    # (m - z_y) before + log_sum: exact where all logits share a large offset.
    nll = log_sum + (row_max - state[TARGET_LOGIT])
    nll = torch.where(in_range, nll, torch.nan)
    loss = nll
    if rows.class_weight is not None:
        loss = loss * rows.class_weight[rows.target.clamp(0, vocab_size - 1)]
    if spec.label_smoothing:
        smooth = rows.weight_sum(vocab_size) * (log_sum + (row_max - state[REFERENCE])) - state[SMOOTH_SUM]
        loss = (1.0 - spec.label_smoothing) * loss + (spec.label_smoothing / vocab_size) * smooth
    weight = rows.token_weight
    lse = row_max + log_sum
    out.loss.copy_(torch.where(valid, loss if weight is None else loss * weight, 0.0))
    out.normalizer[0] = torch.where(valid, row_max, 0.0)
    out.normalizer[1] = torch.where(valid, log_sum, 0.0)
    if out.z_loss is not None:
        z_loss = spec.z_loss * lse.square()
        out.z_loss.copy_(torch.where(valid, z_loss if weight is None else z_loss * weight, 0.0))
    if out.logprob is not None:
        out.logprob.copy_(torch.where(valid, -nll, 0.0))
    if out.entropy is not None:
        out.entropy.copy_(torch.where(valid, log_sum - state[ENTROPY_SUM] / state[SUM], 0.0))
    if out.argmax is not None:
        out.argmax.copy_(torch.where(valid, state[ARGMAX].long(), -1))
