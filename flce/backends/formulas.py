"""The formulas of the loss in plain PyTorch, on vectors of one value per row.

The PyTorch backend and the merging of shards call them: they finish the statistics of the online softmax, merge the
statistics of several processes, compute losses, results and row gradients, and reduce losses. `triton/math.py` and
`triton/reduction.py` have the same formulas for kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from flce.backends.contract import (
    ARGMAX,
    CLASSES,
    DIVERGENCE,
    ENTROPY,
    ENTROPY_SUM,
    LEAST_LOGPROB,
    LOG_SUM,
    LOGIT_SUM,
    LOSS_GRADIENT_SLOTS,
    MAX,
    MEAN_WEIGHT,
    NORMALIZER_SLOTS,
    OFFSET,
    REFERENCE,
    SMOOTH_SUM,
    SOFTMAX,
    STUDENT,
    SUM,
    TARGET,
    TARGET_LOGIT,
    GradientCall,
    RowInputs,
    RowOutputs,
    RowProblem,
    StatisticsCall,
    TileCall,
    log_sum_exp,
)
from flce.core.problem import LossSpec


def write_empty_state(state: Tensor) -> None:
    """Write the state before the first class."""
    state.zero_()
    state[MAX] = -torch.inf


class Targets(NamedTuple):
    """Positions and masks of the targets of rows. None for masks that are True everywhere."""

    column: Tensor  # (rows, 1) the target's column of the tile; the nearest column if the target is outside
    in_tile: Tensor | None  # (rows,) True if the target is a class of the tile
    in_range: Tensor | None  # (rows,) True if the target is a class
    valid: Tensor | None  # (rows,) True if the target is not ignored

    @staticmethod
    def from_call(call: TileCall) -> Targets:
        target, tile, ignore_index = call.inputs.target, call.tile, call.spec.ignore_index
        local = target if tile.start == 0 else target - tile.start
        if target.device.type == "cpu" and len(target):  # On other devices the host would have to wait.
            lowest, highest = [bound.item() for bound in local.aminmax()]
            if 0 <= lowest <= highest < tile.cols and not lowest <= ignore_index - tile.start <= highest:
                return Targets(local[:, None], None, None, None)
        column = local.clamp(0, tile.cols - 1)
        in_range = (target >= 0) & (target < tile.vocab_size)
        return Targets(column[:, None], column == local, in_range, target != ignore_index)


def is_class(ids: Tensor, vocab_size: int) -> Tensor:
    """Return for each id True if it is the index of a class."""
    return (ids >= 0) & (ids < vocab_size)


# ------------------------------------------------------------------------------------------------- the loss

# Fields of a LossSpec that change logits, and fields that `finish_row` and the statistics compute.
LOGIT_FIELDS = frozenset({"softcap", "logit_scale", "temperature"})
RESULT_FIELDS = frozenset({"reduction", "ignore_index", "label_smoothing", "z_loss", "stats", "empty_loss"})


@functools.lru_cache(maxsize=256)
def refuse_unknown_fields(spec: LossSpec) -> None:
    """Raise NotImplementedError for an option that is set, and that these formulas do not have."""
    for option in fields(LossSpec):
        is_known = option.name in LOGIT_FIELDS or option.name in RESULT_FIELDS
        if not is_known and getattr(spec, option.name) != option.default:
            raise NotImplementedError(f"the losses of `backends/formulas.py` have no {option.name} yet")


def finish_row(
    state: RowStatistics, inputs: RowInputs, spec: LossSpec, vocab_size: int, targets: Targets
) -> tuple[dict[str, Tensor], Tensor | None]:
    """End rows: return their results, by the names of `RowOutputs`, and their row gradient
    (`GradientCall.row_gradient`), (LOSS_GRADIENT_SLOTS, rows); None if the inputs have no scales.

    `triton/math.py` has the same function for kernels. Results of ignored rows and their row gradient are 0. If the
    target is not a class, the loss and the row gradient are NaN.

    Args:
        state: statistics of all classes. Backward has only the normalizer: then the losses have no meaning.
    """
    refuse_unknown_fields(spec)
    nll = -state.logprob
    if targets.in_range is not None:
        nll = torch.where(targets.in_range, nll, torch.nan)
    normalizer = torch.stack((state.offset, state.log_sum, -nll))
    lse, target_weight = log_sum_exp(normalizer), inputs.target_weight(vocab_size)
    smoothing = spec.label_smoothing / vocab_size
    loss = nll if target_weight is None else nll * target_weight
    if state.smooth is not None:
        loss = (1.0 - spec.label_smoothing) * loss + smoothing * state.smooth
    z_loss = spec.z_loss * lse.square()
    if inputs.token_weight is not None:
        loss, z_loss = loss * inputs.token_weight, z_loss * inputs.token_weight
    values = {**state._asdict(), "loss": loss, "z_loss": z_loss, "logprob": -nll, "normalizer": normalizer}
    results = {name: value for name, value in values.items() if value is not None}
    if targets.valid is not None:
        for name, value in results.items():
            results[name] = torch.where(targets.valid, value, -1 if name == "argmax" else 0.0)
    if inputs.scales is None:
        return results, None

    ce_scale, z_loss_scale, weight_sum = inputs.scales.unbind()
    row = torch.ones_like(lse)
    if targets.in_range is not None:
        row = torch.where(targets.in_range, row, torch.nan)
    for factor in (inputs.token_weight, inputs.upstream):
        row = row if factor is None else row * factor
    row_gradient = lse.new_zeros(LOSS_GRADIENT_SLOTS, *lse.shape)
    row_gradient[TARGET] = row * ce_scale * (1.0 - spec.label_smoothing)
    if target_weight is not None:
        row_gradient[TARGET] *= target_weight
    row_gradient[SOFTMAX] = row_gradient[TARGET]
    if spec.label_smoothing:
        row_gradient[CLASSES] = row * ce_scale * smoothing
        row_gradient[SOFTMAX] += row_gradient[CLASSES] * weight_sum
    if spec.z_loss:
        row_gradient[SOFTMAX] += row * z_loss_scale * (2.0 * spec.z_loss) * lse
    return results, row_gradient if targets.valid is None else torch.where(targets.valid, row_gradient, 0.0)


def softmax_factor_with_entropy(row_gradient: Tensor, logprob: Tensor) -> Tensor:
    """Return the factor of p in the gradient in z of classes: SOFTMAX and, if there is this slot, ENTROPY."""
    if len(row_gradient) <= ENTROPY:
        return row_gradient[SOFTMAX]
    return row_gradient[SOFTMAX] - row_gradient[ENTROPY] * logprob.clamp(min=LEAST_LOGPROB)


def softmax_minus_target(softmax_factor: Tensor, target_factor: Tensor, logprob: Tensor) -> Tensor:
    """Return ``SOFTMAX * p - TARGET`` without cancellation: both factors may be nearly equal and p nearly 1, or TARGET
    and p may be small."""
    near_one = (softmax_factor - target_factor) + softmax_factor * torch.expm1(logprob)
    return torch.where(logprob < -1.0, softmax_factor * logprob.exp() - target_factor, near_one)


def row_gradient(call: GradientCall) -> Tensor:
    """Return the result of `Backend.row_gradient`."""
    targets, nothing = Targets.from_call(call), [None] * (len(RowStatistics._fields) - NORMALIZER_SLOTS)
    state = RowStatistics(*call.normalizer, *nothing)
    _, result = finish_row(state, call.inputs, call.spec, call.tile.vocab_size, targets)
    assert result is not None
    return result


def loss_scales(p: RowProblem) -> Tensor:
    """Return the result of `Backend.loss_scales`."""
    accum, target = p.accum, p.target
    if p.class_weight is None:
        weight_sum = torch.full((), p.vocab_size, dtype=accum, device=p.device)
    else:
        weight_sum = p.class_weight.sum(dtype=accum)
    if p.spec.reduction == "mean":
        valid = target != p.spec.ignore_index
        divisor = z_divisor = valid.sum().to(accum)
        if p.class_weight is not None:
            weights = p.class_weight[target.clamp(0, p.vocab_size - 1)].to(accum)
            divisor = torch.where(valid, weights, 0.0).sum()
    else:
        divisor = z_divisor = torch.ones_like(weight_sum) if p.num_items is None else p.num_items.to(accum)
    divisors = torch.stack((divisor, z_divisor, weight_sum))
    factors = divisors[:2].reciprocal()
    divisors[:2] = torch.where(divisors[:2] == 0.0, 0.0, factors) if p.spec.empty_loss == "zero" else factors
    return divisors


def scale_losses(losses: Tensor, factor: Tensor, spec: LossSpec) -> Tensor:
    """Return the product, and with ``empty_loss="zero"`` 0 for infinite losses times 0."""
    product = losses * factor
    return product.masked_fill_(factor == 0.0, 0.0) if spec.empty_loss == "zero" else product


def reduce(p: RowProblem, out: RowOutputs, scales: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the result of `Backend.reduce`."""
    scales = loss_scales(p) if scales is None else scales
    loss = scale_losses(out.loss.sum(), scales[0], p.spec)
    if out.z_loss is None:
        return loss, None, scales
    total_z_loss = scale_losses(out.z_loss.sum(), scales[1], p.spec)
    return loss + total_z_loss, total_z_loss, scales


# ----------------------------------------------------------------------------------------------- statistics


class RowStatistics(NamedTuple):
    """Finished statistics of rows over some or all classes: (rows,) each, or (shards, rows). None for statistics that
    the call does not request. Fields have the names of `RowOutputs`. Processes send them in this order."""

    offset: Tensor  # a logit m, usually the largest; -inf: no class has a probability
    log_sum: Tensor  # log(sum(exp(z - m)))
    logprob: Tensor  # of the target; any number if the target is in another shard
    smooth: Tensor | None  # with label smoothing, the sum of w[k] * (lse - z[k])
    entropy: Tensor | None
    argmax: Tensor | None
    mean_logit: Tensor | None

    @staticmethod
    def requested_names(spec: LossSpec) -> list[str]:
        """Return the names of the statistics that a call needs."""
        argmax = "argmax" in spec.stats or "correct" in spec.stats
        needed = {"smooth": spec.label_smoothing != 0.0, "argmax": argmax}
        always = ("offset", "log_sum", "logprob")
        return [name for name in RowStatistics._fields if name in always or needed.get(name, name in spec.stats)]


def results_from_state(
    state: Mapping[int, Tensor] | Tensor, spec: LossSpec, classes: int, weight_sum: Tensor | float
) -> RowStatistics:
    """Compute the results from a finished state. `classes`, `weight_sum`: the number of classes in the state and the
    sum of their weights."""
    stats, row_max, log_sum = spec.stats, state[MAX], state[SUM].log()
    return RowStatistics(
        offset=row_max,
        log_sum=log_sum,
        # (z_y - m) before - log_sum: exact where all logits share a large offset.
        logprob=(state[TARGET_LOGIT] - row_max) - log_sum,
        smooth=weight_sum * (log_sum + (row_max - state[REFERENCE])) - state[SMOOTH_SUM]
        if spec.label_smoothing
        else None,
        entropy=log_sum - state[ENTROPY_SUM] / state[SUM] if "entropy" in stats else None,
        argmax=state[ARGMAX] if "argmax" in stats or "correct" in stats else None,
        mean_logit=state[LOGIT_SUM] / classes if "mean_logit" in stats else None,
    )


def merge_shards(shards: RowStatistics, widths: Tensor, weight_sums: Tensor, owner: Tensor) -> RowStatistics:
    """Merge the results of shards, (shards, rows) each in the order of their classes, into the results of all classes.

    With lse_r the log-sum-exp of shard r, y the target, which shard o has, and nll_o = lse_o - z_y:

        lse = logsumexp over r of lse_r            -log p_y = nll_o + log(1 + sum over r != o of exp(lse_r - lse_o))

    Both terms of -log p_y are positive, so that no digits cancel if p_y is nearly 1.

    Args:
        widths, weight_sums: (shards, 1) the number of classes of each shard, and the sum of their weights.
        owner: (rows,) the shard that has the target.
    """
    offset = shards.offset.amax(0)
    nothing = offset.isinf()  # If a logit is infinite, the row has no probabilities.
    lse = log_sum_exps(shards, offset)
    log_sum = lse.logsumexp(0)
    own_lse, own_logprob = (x.gather(0, owner[None])[0] for x in (lse, shards.logprob))
    others = lse.scatter(0, owner[None], -torch.inf).logsumexp(0)
    # log(1 + exp(x)). The difference of two -inf would be NaN.
    x = torch.where(others == -torch.inf, others, others - own_lse)
    logprob = own_logprob - torch.logaddexp(x, torch.zeros_like(x))
    logprob = torch.where(own_lse == -torch.inf, -torch.inf, logprob)
    minus_log_share = log_sum - lse  # minus the logarithm of the probability of a shard's classes
    has_no_share = minus_log_share == torch.inf
    smooth = entropy = argmax = mean_logit = None
    if shards.smooth is not None:
        # Classes of weight 0 add nothing to the sum, even if their logits are -inf.
        impossible = torch.where(weight_sums == 0.0, 0.0, torch.inf)
        smooth = torch.where(has_no_share, impossible, shards.smooth + weight_sums * minus_log_share).sum(0)
    if shards.entropy is not None:
        entropy = torch.where(has_no_share, 0.0, (-minus_log_share).exp() * (shards.entropy + minus_log_share)).sum(0)
    if shards.argmax is not None:
        # Of the shards with the largest logit the first has the lowest index. (NaN is never the largest.)
        found = torch.where(shards.offset == offset, shards.argmax, torch.inf).amin(0)
        argmax = torch.where(found == torch.inf, 0.0, found)
    if shards.mean_logit is not None:
        mean_logit = torch.where(widths > 0, widths * shards.mean_logit, 0.0).sum(0) / widths.sum()
    logprob = torch.where(nothing, torch.nan, logprob)
    return RowStatistics(offset, log_sum, logprob, smooth, entropy, argmax, mean_logit)


# Slots of the offsets and of the sums of teacher and student in `Teacher.rows`.
_OFFSETS, _SUMS = (slice(slot, DIVERGENCE, STUDENT) for slot in (OFFSET, LOG_SUM))


def merge_divergences(states: Tensor, kind: str) -> Tensor:
    """Merge the statistics of `Backend.divergence` of several tiles or shards, (tiles, DIVERGENCE_SLOTS, rows)."""
    merged, (weights, other) = states.amax(0), (0, 1) if kind == "forward_kl" else (1, 0)
    shifts = states[:, _OFFSETS] - torch.where(merged[_OFFSETS] == -torch.inf, 0.0, merged[_OFFSETS])
    decays, sums = shifts.exp(), states[:, _SUMS]
    merged[_SUMS] = (decays * sums).sum(0)
    terms = states[:, DIVERGENCE] + (shifts[:, weights] - shifts[:, other]) * sums[:, weights]
    merged[DIVERGENCE] = torch.where(decays[:, weights] > 0.0, decays[:, weights] * terms, 0.0).sum(0)
    return merged


def finish_divergence(rows: Tensor, kind: str) -> None:
    """Turn the statistics of all classes into normalizers, KL and mean weight, in place. For "jsd" into normalizers."""
    sums, sign = rows[_SUMS], -1.0 if kind == "forward_kl" else 1.0
    if kind == "jsd":
        rows[_SUMS], rows[DIVERGENCE:] = sums.log(), 0.0
        return
    rows[DIVERGENCE] /= sums[0 if kind == "forward_kl" else 1]
    sums.log_()
    rows[DIVERGENCE] += (sums[0] - sums[1]) * sign
    rows[MEAN_WEIGHT] = -1.0 if kind == "forward_kl" else rows[DIVERGENCE]


def divergence_terms(s: Tensor, t: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return the sums of a divergence over classes, weighted by the probabilities of the student and of the teacher,
    (...) each. s, t: (..., classes) log-probabilities, or logits relative to other numbers of their row."""

    def weighted_sum(weight: float, logprob: Tensor, ratio: Tensor) -> Tensor:
        if weight == 0.0:
            return logprob.new_zeros(logprob.shape[:-1])
        p = logprob.exp()  # Classes of probability 0 add 0, also if the ratio is infinite.
        return torch.where(p > 0.0, weight * p * ratio, 0.0).sum(-1)

    student, teacher = log_ratios(s, t, kind, beta)
    return weighted_sum(1.0 - beta, s, student), weighted_sum(beta, t, teacher)


def log_ratios(s: Tensor, t: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Return s and t relative to each other, or for "jsd" relative to the logarithm of the mixture (1 - beta) p + beta
    q. Small differences of s and t lose no digits."""
    difference = s - t
    if kind != "jsd":
        return difference, -difference
    below, above = torch.where(difference < 0.0, difference, 0.0), torch.where(difference < 0.0, 0.0, difference)
    share = (difference < 0.0).to(difference.dtype) * (1.0 - 2.0 * beta) + beta  # of the less probable of the two
    shared = -torch.log1p(share * torch.expm1(below - above))
    return shared + below, shared - above


def log_sum_exps(shards: RowStatistics, offset: Tensor) -> Tensor:
    """Return the log-sum-exp of each shard, minus the offset of all classes, (shards, rows)."""
    safe = torch.where(offset.isinf(), 0.0, offset)
    return (shards.offset - safe) + shards.log_sum  # -inf where no class has a probability, NaN where a logit is NaN


def write_results(state: RowStatistics, call: StatisticsCall, targets: Targets) -> Tensor | None:
    """End rows, and write their results to ``call.out``. Return their row gradient, see `finish_row`."""
    results, gradient = finish_row(state, call.inputs, call.spec, call.tile.vocab_size, targets)
    for name, memory in call.out._asdict().items():
        if memory is not None:
            memory.copy_(results[name])
    return gradient


def write_state_results(
    state: Mapping[int, Tensor] | Tensor, call: StatisticsCall, targets: Targets
) -> tuple[RowStatistics, Tensor | None]:
    """Run `write_results` from the state of all classes. Return the statistics and the row gradient."""
    vocab_size, scales = call.tile.vocab_size, call.inputs.scales
    weight_sum = float(vocab_size) if scales is None else scales[2]
    results = results_from_state(state, call.spec, vocab_size, weight_sum)
    return results, write_results(results, call, targets)
