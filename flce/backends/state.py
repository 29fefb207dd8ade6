"""The running state of the online softmax where no kernel holds it: shards of the vocabulary.

Plain PyTorch on vectors of one value per row, for every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flce.backends.contract import ARGMAX, ENTROPY_SUM, MAX, REFERENCE, SMOOTH_SUM, STATE_SLOTS, SUM, TARGET_LOGIT
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
