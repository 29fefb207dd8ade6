"""The running state of the online softmax outside of kernels: states of shards are merged, and a complete one becomes
the results of its rows.

Plain PyTorch on vectors of one value per row, for every backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import (
    ARGMAX,
    ENTROPY_SUM,
    LOG_SUM,
    LOGIT_SUM,
    MAX,
    OFFSET,
    REFERENCE,
    SMOOTH_SUM,
    SQUARE_SUM,
    STATE_SLOTS,
    SUM,
    TARGET_LOGIT,
    TileCall,
)
from flce.core.problem import LossSpec


def used_slots(spec: LossSpec) -> list[int]:
    """The slots of the state that mean something; backends leave the others as they are."""
    slots = [MAX, SUM, TARGET_LOGIT]
    if "entropy" in spec.stats:
        slots.append(ENTROPY_SUM)
    if spec.label_smoothing:
        slots += [REFERENCE, SMOOTH_SUM]
    if "argmax" in spec.stats or "correct" in spec.stats:
        slots.append(ARGMAX)
    if "mean_logit" in spec.stats:
        slots.append(LOGIT_SUM)
    if "log_sum_sq_prob" in spec.stats:
        slots.append(SQUARE_SUM)
    return slots


def empty_shard(state: Tensor) -> None:
    """The state of no classes."""
    state.zero_()
    state[MAX] = -torch.inf


def merge_shards(states: Tensor, weight_sums: Sequence[Tensor], spec: LossSpec) -> Tensor:
    """The state of all classes from those of shards.

    Args:
        states: (shards, STATE_SLOTS, rows), in the order of their classes, each made with ``Tile.shard``; the first
            has a class.
        weight_sums: () for each shard: the sum of its class weights (their number, without weights); read with label
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


class Targets(NamedTuple):
    """What rows have at their targets. None for masks that are known to be True everywhere."""

    column: Tensor  # (rows, 1) of the tile, the nearest if the target is not there
    inside: Tensor | None  # (rows,) whether it is
    in_range: Tensor | None  # (rows,) whether the target is a class
    valid: Tensor | None  # (rows,) whether it is not ignored

    @staticmethod
    def of(call: TileCall) -> Targets:
        target, tile, ignore_index = call.inputs.target, call.tile, call.spec.ignore_index
        local = target if tile.start == 0 else target - tile.start
        if target.device.type == "cpu" and len(target):  # elsewhere the host would wait for the device
            least, most = (bound.item() for bound in local.aminmax())
            if 0 <= least <= most < tile.cols and not least <= ignore_index - tile.start <= most:
                return Targets(local[:, None], None, None, None)
        column = local.clamp(0, tile.cols - 1)
        in_range = (target >= 0) & (target < tile.vocab_size)
        return Targets(column[:, None], column == local, in_range, target != ignore_index)


def is_class(ids: Tensor, vocab_size: int) -> Tensor:
    """Whether each is an index of a class."""
    return (ids >= 0) & (ids < vocab_size)


def where(mask: Tensor | None, x: Tensor, other: Tensor | float) -> Tensor:
    """`torch.where`, with None for a mask that is True everywhere."""
    return x if mask is None else torch.where(mask, x, other)


def finish(state: Mapping[int, Tensor] | Tensor, call: TileCall, targets: Targets | None = None) -> Tensor:
    """Turn the state of all classes, by slot, into the losses and statistics of the rows. Returns log(sum).

    `targets`: those of the call, if they are made already.
    """
    targets = Targets.of(call) if targets is None else targets
    inputs, spec, tile, out = call.inputs, call.spec, call.tile, call.out
    assert out is not None
    valid, row_max, log_sum, weight = targets.valid, state[MAX], state[SUM].log(), inputs.token_weight
    # (m - z_y) before + log_sum: exact where all logits share a large offset.
    nll = log_sum + (row_max - state[TARGET_LOGIT])
    nll = where(targets.in_range, nll, torch.nan)
    loss = nll
    if inputs.class_weight is not None:
        loss = loss * inputs.class_weight[inputs.target.clamp(0, tile.vocab_size - 1)]
    if spec.label_smoothing:
        smooth = inputs.weight_sum(tile.vocab_size) * (log_sum + (row_max - state[REFERENCE])) - state[SMOOTH_SUM]
        loss = (1.0 - spec.label_smoothing) * loss + (spec.label_smoothing / tile.vocab_size) * smooth
    out.loss.copy_(where(valid, loss if weight is None else loss * weight, 0.0))
    out.normalizer[OFFSET] = where(valid, row_max, 0.0)
    out.normalizer[LOG_SUM] = where(valid, log_sum, 0.0)
    if out.z_loss is not None:
        z_loss = spec.z_loss * (row_max + log_sum).square()
        out.z_loss.copy_(where(valid, z_loss if weight is None else z_loss * weight, 0.0))
    if out.logprob is not None:
        out.logprob.copy_(where(valid, -nll, 0.0))
    if out.entropy is not None:
        out.entropy.copy_(where(valid, log_sum - state[ENTROPY_SUM] / state[SUM], 0.0))
    if out.argmax is not None:
        out.argmax.copy_(where(valid, state[ARGMAX].long(), -1))
    if out.mean_logit is not None:
        out.mean_logit.copy_(where(valid, state[LOGIT_SUM] / tile.vocab_size, 0.0))
    if out.log_sum_sq_prob is not None:
        out.log_sum_sq_prob.copy_(where(valid, state[SQUARE_SUM].log() - 2.0 * log_sum, 0.0))
    return log_sum
