"""A head that is divided over processes: each has some of the classes, and all have the same tokens.

The classes of a process are a problem of their own (`Slice.problem`): schedules and kernels work on it as on any other.
Where a token's target is elsewhere, one of the process's own classes stands in for it. What its statistics leave of
each row are a few numbers. One collective gives those of all processes to all, and every process puts the same whole
together. With lse_r the log-sum-exp of process r, y the target, which process o has, and nll_o = lse_o - z_y:

    lse = logsumexp over r of lse_r            -log p_y = nll_o + log(1 + sum over r != o of exp(lse_r - lse_o))

Both terms of the second are positive: it keeps its digits where p_y is nearly 1. The gradient of the logits is

    a p - o at the target - c w        a, o, c: see `Worth`; w: class weights, where labels are smoothed

which kernels make of the row's whole normalizer (`TileCall.row_gradient`). Where they have left exponentials, what
multiplies a row of them is that of the slice alone, times a exp(lse_r - lse).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import (
    CLASSES,
    LOG_SUM,
    OFFSET,
    ROW_GRADIENT_SLOTS,
    SOFTMAX,
    TARGET,
    RowOutputs,
    Tile,
    TileCall,
    unknown_to_products,
)
from flce.core.problem import LinearCrossEntropyProblem, LossSpec
from flce.core.shard import Shard, gather
from flce.engine.arena import Arena
from flce.engine.selection import Selection
from flce.engine.top import Top
from flce.engine.vectors import LossScales, allocate

IGNORED = -100
"""`ignore_index` of a slice, whose classes have numbers of their own."""
# What a slice's statistics leave of each row, by the names of `RowOutputs`, in the order in which it is sent.
SENT = ("logprob", "entropy", "argmax", "mean_logit", "log_sum_sq_prob")


def slice_spec(spec: LossSpec) -> LossSpec:
    """What is asked of a slice: log-probabilities and other statistics of the whole spec. With label smoothing the loss
    is the sum of ``w[k] * (lse - z[k])`` over its classes, divided by their number; without, it is not read."""
    stats = {"argmax" if name == "correct" else name for name in spec.stats} & set(SENT)
    return replace(
        spec,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=1.0 if spec.label_smoothing else 0.0,
        z_loss=0.0,
        stats=("logprob", *sorted(stats - {"logprob"})),
    )


class Whole(NamedTuple):
    """Some rows, over all classes: (rows,) each."""

    offset: Tensor  # some logit m, the largest of all offsets
    log_sum: Tensor  # log(sum(exp(z - m)))
    nll: Tensor  # minus the logarithm of the target's probability
    share: Tensor  # logarithm of the probability of all classes of this process
    own_logprob: Tensor  # log-probability of the slice's own target, among its classes
    own_logit: Tensor  # z of that
    smooth: Tensor | None  # sum of w[k] * (lse - z[k]) over all classes
    stats: dict[str, Tensor]  # the others of `SENT`


class Worth(NamedTuple):
    """What the parts of a row's gradient are multiplied by, (rows,) each; 0 for ignored rows, NaN for wrong targets."""

    of_softmax: Tensor
    of_target: Tensor
    of_classes: Tensor | None  # with label smoothing


class _Targets(NamedTuple):
    """What rows have at their targets, (rows,) each."""

    valid: Tensor  # bool: not ignored
    in_range: Tensor  # bool: a class
    owner: Tensor  # the process that has it, the nearest if none does
    here: Tensor  # bool: whether this process has it
    weight: Tensor | None  # its class weight
    own_weight: Tensor | None  # that of the slice's own target, with label smoothing

    def part(self, part: slice) -> _Targets:
        return _Targets(*(None if t is None else t[part] for t in self))  # type: ignore[arg-type]


@dataclass
class Slice:
    """The classes of this process in a pass, and what is known of all.

    Attributes:
        whole: the call, whose targets are of all classes.
        rows: the tokens that are worked on.
        scales: of the whole loss.
        arena: where memory comes from.
        normalizer: (slots, rows) of all classes.
        out: where the whole results of these rows go. None in backward.
        upstream: (rows,) gradient of each row's loss; None: that of all is in `scales`.
    """

    whole: LinearCrossEntropyProblem
    rows: Selection
    scales: LossScales
    arena: Arena
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.whole.shard is not None
        self.shard: Shard = self.whole.shard
        self.group: Any = self.shard.process_group
        self._reductions: dict[int, list[Any]] = {}

    # ------------------------------------------------------------------------------------------ the slice alone

    @functools.cached_property
    def problem(self) -> LinearCrossEntropyProblem:
        """That of the slice, as if there were no other classes."""
        p = self.whole
        return replace(
            p,
            target=self._local_target(),
            class_weight=self._class_weight if p.spec.label_smoothing else None,
            token_weight=None,
            num_items=None,
            spec=slice_spec(p.spec),
            token_weight_grad=False,
            shard=None,
        )

    def _local_target(self) -> Tensor:
        """(N,) Targets that are elsewhere are replaced by classes of this process, each by another: the terms of equal
        targets are summed one after the other."""
        target = self.whole.target
        local = self.local_ids(target)
        stand_in = torch.arange(len(target), device=target.device) % self.whole.slice_size
        return torch.where(target == self.whole.spec.ignore_index, IGNORED, torch.where(local >= 0, local, stand_in))

    @functools.cached_property
    def _class_weight(self) -> Tensor | None:
        """(V_local,)"""
        weight, start = self.whole.class_weight, self.shard.start
        if weight is None or self.shard.is_empty:
            return None
        return weight[start : start + self.whole.slice_size]

    @functools.cached_property
    def selection(self) -> Selection:
        """The same rows, of the slice."""
        return replace(self.rows, problem=self.problem)

    @functools.cached_property
    def local(self) -> RowOutputs:
        """Memory for what the slice's own statistics leave."""
        return allocate(self.problem, self.rows.most_rows, self.arena)

    @functools.cached_property
    def local_scales(self) -> LossScales:
        """Scales of the slice: 1, and the sum of its class weights."""
        return LossScales(self.problem, self.scales.backend, with_gradients=True)

    # -------------------------------------------------------------------------------------------- all classes

    def complete(self, part: slice) -> Whole:
        """The results of some rows, from what all processes have of them. One collective."""
        assert self.out is not None
        targets = self._targets.part(part)
        sent, names = self._sent(part)
        made = merged(self._received(sent, names), self.whole, targets.owner)
        _write(self.out.part(part), made, targets, self.whole, self._token_weight(part, for_loss=True))
        return made

    def _sent(self, part: slice) -> tuple[Tensor, list[str]]:
        """What all processes say of some rows, (processes, names * rows + 1), and its names. At the end is the number
        of classes of each process: nothing waits for it, but results are NaN where it is wrong. One collective."""
        local = self.local.part(part)
        values = {name: value for name in SENT if (value := getattr(local, name)) is not None}
        if "argmax" in values:  # an index below 2^24 is a float32
            values["argmax"] = values["argmax"] + self.shard.start
        if self.whole.spec.label_smoothing:
            values["smooth"] = local.loss * self.whole.slice_size
        offset, log_sum = local.normalizer[OFFSET], local.normalizer[LOG_SUM]
        if self.shard.is_empty:
            offset = torch.full_like(offset, -torch.inf)
        values = {"offset": offset, "log_sum": log_sum, **values}
        width = offset.new_full((1,), 0 if self.shard.is_empty else self.whole.slice_size)
        flat = [value.to(offset.dtype) for value in values.values()]
        return gather(torch.cat([*flat, width]), self.group), list(values)

    def _received(self, sent: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """By name, (processes, rows) each: what `merged` takes."""
        received = dict(zip(names, sent[:, :-1].view(len(sent), len(names), -1).unbind(1), strict=True))
        differ = (sent[:, -1] != self.shard.widths(sent)).any()
        received["offset"] = torch.where(differ, torch.nan, received["offset"])
        return received

    @functools.cached_property
    def _targets(self) -> _Targets:
        p, target = self.whole, self.rows.target
        known = target.clamp(0, p.vocab_size - 1)
        own = None
        if p.spec.label_smoothing and self._class_weight is not None:
            own = self._class_weight[self.selection.target.clamp(0, p.slice_size - 1)]
        return _Targets(
            valid=target != p.spec.ignore_index,
            in_range=(target >= 0) & (target < p.vocab_size),
            owner=known // self.shard.most_classes,
            here=self.local_ids(target) >= 0,
            weight=None if p.class_weight is None else p.class_weight[known],
            own_weight=own,
        )

    def _token_weight(self, part: slice, for_loss: bool) -> Tensor | None:
        """Losses come without the tokens' weights where these have a gradient, which is made of them."""
        weight = self.rows.token_weight
        return None if weight is None or (for_loss and self.whole.token_weight_grad) else weight[part]

    @property
    def has_target(self) -> Tensor:
        """(rows,) bool: whether the target is a class of this process."""
        return self._targets.here

    def local_ids(self, ids: Tensor) -> Tensor:
        """Classes by their numbers here; -1 for those of other processes."""
        start = self.shard.start
        here = (ids >= start) & (ids < min(start + self.whole.slice_size, self.shard.vocab_size))
        return torch.where(here, ids - start, -1)

    def summed(self, x: Tensor) -> Tensor:
        """`x`, summed over all processes in place. One collective."""
        dist.all_reduce(x, group=self.group)
        return x

    def complete_top(self, top: Top) -> Top:
        """The largest logits of all classes, from those of each process. Two collectives."""
        k = top.ids.shape[1]
        nothing = -torch.inf if top.largest else torch.inf
        # A process with fewer than k classes has found as many; one without any, none.
        found = 0 if self.shard.is_empty else min(k, self.whole.slice_size)
        top.logits[:, found:], top.ids[:, found:] = nothing, 0
        logits, ids = (gather(x, self.group).movedim(0, 1).flatten(1) for x in (top.logits, top.ids + self.shard.start))
        best, place = logits.topk(k, largest=top.largest)
        return replace(top, logits=best, ids=ids.gather(1, place))

    # ---------------------------------------------------------------------------------------------- gradients

    def worth(self, part: slice, lse: Tensor) -> Worth:
        """The worth of some rows, (rows,) each."""
        p, targets, scales = self.whole, self._targets.part(part), self.scales.of_gradient
        assert scales is not None
        spec, row = p.spec, torch.ones_like(lse)
        for factor in (
            self._token_weight(part, for_loss=False),
            None if self.upstream is None else self.upstream[part],
        ):
            row = row if factor is None else row * factor
        row = torch.where(targets.in_range, row, torch.nan)
        ce = row * scales[0]
        of_target = ce * (1.0 - spec.label_smoothing)
        if targets.weight is not None:
            of_target = of_target * targets.weight
        of_softmax, of_classes = of_target, None
        if spec.label_smoothing:
            of_classes = ce * (spec.label_smoothing / p.vocab_size)
            of_softmax = of_softmax + of_classes * scales[2]
        if spec.z_loss:
            of_softmax = of_softmax + row * scales[1] * (2.0 * spec.z_loss) * lse

        def counted(x: Tensor) -> Tensor:
            return torch.where(targets.valid, x, 0.0)

        return Worth(counted(of_softmax), counted(of_target), None if of_classes is None else counted(of_classes))

    def complete_row_gradient(self, part: slice) -> Tensor:
        """The results of some rows, and their `row_gradient`."""
        if not self._has_kernel:
            self.complete(part)
            return self.row_gradient(part)
        made = self.arena.new((ROW_GRADIENT_SLOTS, part.stop - part.start), self.normalizer.dtype, zero=True)
        self._complete_by_kernel(part, made, row_gradient=True)
        return made

    def row_gradient(self, part: slice) -> Tensor:
        """(`ROW_GRADIENT_SLOTS`, rows) of some rows, see `TileCall.row_gradient`, from the whole normalizer."""
        normalizer = self.normalizer[:, part]
        worth = self.worth(part, normalizer[OFFSET] + normalizer[LOG_SUM])
        made = self.arena.new((ROW_GRADIENT_SLOTS, len(worth.of_softmax)), normalizer.dtype, zero=True)
        made[SOFTMAX] = worth.of_softmax
        made[TARGET] = torch.where(self._targets.here[part], worth.of_target, 0.0)
        if worth.of_classes is not None:
            made[CLASSES] = worth.of_classes
        return made

    def complete_factors(self, part: slice, factors: Tensor) -> None:
        """The results of some rows, and what their exponentials are multiplied by.

        Args:
            factors: (2 or 3, rows), see `Backend.exponentials`. The first is what makes exponentials the derivative of
                the slice's own log-sum-exp; all are written.
        """
        if self._has_kernel:
            self._complete_by_kernel(part, factors, row_gradient=False)
            return
        made, targets = self.complete(part), self._targets.part(part)
        of_softmax, of_target, of_classes = self.worth(part, made.offset + made.log_sum)
        factor = self.rows.row_factor
        # A slice that has no class, or nothing but logits of -inf, has no probabilities of its own: NaN.
        counts = made.share != -torch.inf
        own_logit = torch.where(counts, made.own_logit, 0.0)
        jacobian = self.whole.spec.jacobian(own_logit[:, None], None if factor is None else factor[part])
        jacobian = jacobian[:, 0] if isinstance(jacobian, Tensor) else jacobian
        # a p - o, of which a is nearly o and p nearly 1 where a model is certain.
        at_target = (of_softmax - of_target) + of_softmax * torch.expm1(-made.nll)
        of_stand_in = torch.where(counts, (made.own_logprob + made.share).exp(), 0.0)
        own = torch.where(targets.here, at_target, of_softmax * of_stand_in)
        if of_classes is not None:
            own = own - (of_classes if targets.own_weight is None else of_classes * targets.own_weight)
            factors[2] = of_classes * self.whole.spec.scale
        relative = torch.where(counts, factors[0] * made.share.exp(), 0.0)
        factors[0] = torch.where(targets.valid, of_softmax * relative, 0.0)
        factors[1] = torch.where(targets.valid, own * jacobian, 0.0)

    def _complete_by_kernel(self, part: slice, factors: Tensor, row_gradient: bool) -> None:
        (sent, _), shard, call = self._sent(part), self.shard, self._whole_call(part)
        self.scales.backend.complete_slices(sent, shard.rank, shard.most_classes, call, factors, row_gradient)

    @functools.cached_property
    def _has_kernel(self) -> bool:
        """Whether one launch puts rows together: where a product makes exponentials, whose losses have no more."""
        p, in_float32 = self.whole, self.normalizer.dtype == torch.float32
        return (
            self.scales.backend.name == "triton"
            and in_float32
            and not (unknown_to_products(p.spec) or p.token_weight_grad)
        )

    def _whole_call(self, part: slice) -> TileCall:
        """The call of all classes, for the results of some rows."""
        assert self.out is not None
        width, p = self.whole.slice_size, self.whole
        inputs = self.rows.row_inputs(part, self.scales.of_gradient)
        return TileCall(inputs, p.spec, Tile(self.shard.start, width, p.vocab_size, width), self.out.part(part))

    # ---------------------------------------------------------------------------------------- sums over processes

    def reduce(self, term: int, share: Tensor) -> None:
        """Begins to sum a part of dX of a term over all processes, in place."""
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._reductions.setdefault(term, []).append(dist.all_reduce(share, group=self.group, async_op=True))

    def reduced(self, term: int, grad: Tensor) -> None:
        """Waits for the sums of dX of a term, and begins them if no part of it was reduced."""
        if term not in self._reductions:
            self.reduce(term, grad)
        for work in self._reductions.pop(term, ()):
            work.wait()


def with_all_class_weights(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """The same problem with the weights of all classes, where it has those of this process. Then, one collective."""
    weight, shard = p.class_weight, p.shard
    if shard is None or weight is None or shard.process_group.size() == 1:
        return p
    if len(weight) == p.vocab_size:
        if shard.most_classes < p.vocab_size:
            return p
        # Of the process that has all classes these may be its own. The others, which have none, ask for them then.
        weight = weight[:0] if shard.is_empty else weight
    return replace(p, class_weight=shard.whole(weight))


def merged(sent: Mapping[str, Tensor], p: LinearCrossEntropyProblem, owner: Tensor) -> Whole:
    """All classes, from what processes have sent, by name, (processes, rows) each.

    Args:
        owner: (rows,) the process that has the target.
    """
    assert p.shard is not None
    offsets, spec = sent["offset"], p.spec
    widths = p.shard.widths(offsets)
    offset = offsets.amax(0)
    nothing = offset.isinf()  # no row with such a logit has probabilities
    safe = torch.where(nothing, 0.0, offset)
    lse = torch.where(offsets == -torch.inf, -torch.inf, (offsets - safe) + sent["log_sum"])  # less the offset
    log_sum = lse.logsumexp(0)

    at_owner = owner[None]
    own_lse, own_nll = lse.gather(0, at_owner)[0], -sent["logprob"].gather(0, at_owner)[0]
    others = lse.scatter(0, at_owner, -torch.inf).logsumexp(0)
    # log(1 + exp(x)). The difference of two -inf would be NaN.
    x = torch.where(others == -torch.inf, others, others - own_lse)
    nll = torch.where(own_lse == -torch.inf, torch.inf, own_nll + torch.logaddexp(x, torch.zeros_like(x)))
    nll = torch.where(nothing, torch.nan, nll)

    rank = p.shard.rank
    own_logprob, share = sent["logprob"][rank], lse[rank] - log_sum
    own_logit = offsets[rank] + (sent["log_sum"][rank] + own_logprob)
    away = log_sum - lse  # minus the logarithm of the probability of a process's classes
    smooth = None
    if spec.label_smoothing:
        sums = widths if p.class_weight is None else p.shard.split_sums(p.class_weight)
        # A slice without weights has none in the sum, whatever its logits are.
        terms = sent["smooth"] + sums[:, None] * away
        smooth = torch.where((sums == 0.0)[:, None] & (away == torch.inf), 0.0, terms).sum(0)
    stats = {}
    if "entropy" in sent:
        terms = (-away).exp() * (sent["entropy"] + away)
        stats["entropy"] = torch.where(away == torch.inf, 0.0, terms).sum(0)
    if "argmax" in sent:
        found = torch.where(offsets == offset, sent["argmax"], torch.inf).amin(0)
        stats["argmax"] = torch.where(found == torch.inf, 0.0, found).long()
    if "mean_logit" in sent:
        stats["mean_logit"] = torch.where(widths > 0, widths * sent["mean_logit"].t(), 0.0).sum(1) / p.vocab_size
    if "log_sum_sq_prob" in sent:
        terms = torch.where(away == torch.inf, -torch.inf, sent["log_sum_sq_prob"] - 2.0 * away)
        stats["log_sum_sq_prob"] = terms.logsumexp(0)
    return Whole(offset, log_sum, nll, share, own_logprob, own_logit, smooth, stats)


def _write(
    out: RowOutputs, made: Whole, targets: _Targets, p: LinearCrossEntropyProblem, token_weight: Tensor | None
) -> None:
    """The whole results of rows to their places, as `RowOutputs` has them."""

    def kept(values: Tensor, place: Tensor | None, ignored: float = 0.0) -> None:
        if place is not None:
            place.copy_(torch.where(targets.valid, values, ignored))

    weight = 1.0 if token_weight is None else token_weight
    nll = torch.where(targets.in_range, made.nll, torch.nan)
    loss = nll if targets.weight is None else nll * targets.weight
    if made.smooth is not None:
        share = p.spec.label_smoothing
        loss = (1.0 - share) * loss + (share / p.vocab_size) * made.smooth
    kept(loss * weight, out.loss)
    kept(p.spec.z_loss * (made.offset + made.log_sum).square() * weight, out.z_loss)
    kept(made.offset, out.normalizer[OFFSET])
    kept(made.log_sum, out.normalizer[LOG_SUM])
    kept(-nll, out.logprob)
    for name, values in made.stats.items():
        kept(values, getattr(out, name), -1 if name == "argmax" else 0.0)
