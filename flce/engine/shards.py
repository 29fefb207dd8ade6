"""The classes of a pass: all of them, or those of one process of a head that is divided.

Each process of a divided head has some of the classes, and all have the same tokens. The classes of a process are a
problem of their own (`Slice.problem`): schedules and kernels work on it as on any other. Where a token's target is
elsewhere, one of the process's own classes stands in for it. Statistics of the slice leave a few numbers of each row.
One collective gives those of all processes to all, and every process puts the same results together
(`state.merge_shards`).

The gradient of the logits is then made of the gradient of a row (`TileCall.row_gradient`) and the normalizer of all
classes. Where kernels have left exponentials, what multiplies a row of them is that of the slice alone, times the
factor of softmax and the probability of the slice's classes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import (
    EXPONENTIAL_STATS,
    LOG_SUM,
    LOSS_GRADIENT_SLOTS,
    OFFSET,
    RowOutputs,
    Tile,
    TileCall,
    unknown_to_products,
)
from flce.backends.state import (
    RowResults,
    Targets,
    log_sum_exps,
    merge_shards,
    row_gradient,
    where,
    write_results,
)
from flce.core.problem import LinearCrossEntropyProblem, LossSpec
from flce.core.shard import Shard, gather
from flce.engine.arena import Arena
from flce.engine.selection import Selection
from flce.engine.top import Top
from flce.engine.vectors import LossScales, allocate

IGNORED = -100
"""`ignore_index` of a slice, whose classes have numbers of their own."""
# A normalizer beside which no logit has a probability above 0. Not infinite, so that differences are numbers.
BEYOND_LOGITS = 1e30
# Statistics that a slice sends, by the names of `RowResults`, in the order in which they are sent.
SENT = ("logprob", "entropy", "argmax", "mean_logit", "log_sum_sq_prob")
# Fields of a LossSpec that make logits: those of a slice, too.
OF_LOGITS = ("softcap", "logit_scale", "temperature", "candidates", "top_k", "row_temperature")
# Fields that the results of all classes know, see `state.write_results` and `state.row_gradient`.
OF_RESULTS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "stats")


def slice_spec(spec: LossSpec) -> LossSpec:
    """Return what is asked of a slice: log-probabilities and other statistics of the full spec. With label smoothing
    the loss is the sum of ``w[k] * (lse - z[k])`` over its classes, divided by their number; without, nothing reads it.

    Raises:
        NotImplementedError: the spec has a field that a divided head does not know.
    """
    names = {field.name for field in fields(spec)}
    unknown = names.difference(OF_LOGITS, OF_RESULTS)
    for name in sorted(unknown):
        if getattr(spec, name) != getattr(type(spec), name):
            raise NotImplementedError(f"a head that is divided over processes has no {name} yet")
    stats = {"argmax" if name == "correct" else name for name in spec.stats} & set(SENT)
    return type(spec)(
        **{name: getattr(spec, name) for name in OF_LOGITS if name in names},
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=1.0 if spec.label_smoothing else 0.0,
        stats=("logprob", *sorted(stats - {"logprob"})),
    )


@dataclass
class AllClasses:
    """The classes of a pass that has all of them. What a `Slice` does beside is nothing here.

    Attributes:
        full_problem: the call.
        rows: the tokens that are worked on.
        scales: of the loss.
        arena: where memory comes from.
        normalizer: (slots, rows).
        out: where the results of these rows go. None in backward.
        upstream: (rows,) gradient of each row's loss; None: that of all is in `scales`.
    """

    full_problem: LinearCrossEntropyProblem
    rows: Selection
    scales: LossScales
    arena: Arena
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    divided = False
    """Whether there are other processes with other classes."""
    first_class = 0
    """The number of the first of these classes among all."""

    def __post_init__(self) -> None:
        self.problem, self.selection, self.local = self.full_problem, self.rows, self.out
        """What schedules work on, and where statistics of these classes go."""
        self.local_scales, self.gradient_normalizer = self.scales, self.normalizer
        """What the gradient of the logits of these classes is made of."""

    def complete(self, part: slice) -> None:
        """Write the results of some rows, from what all processes have of them. One collective."""

    def complete_factors(self, part: slice, factors: Tensor) -> None:
        """Write the results of some rows, and what their exponentials are multiplied by.

        Args:
            factors: (2 or 3, rows), see `Backend.exponentials`. The first is what makes exponentials the derivative of
                the slice's own log-sum-exp; all are written.
        """

    def row_gradient(self, part: slice) -> Tensor:
        """Return `TileCall.row_gradient` of some rows, from the normalizer of all classes."""
        call = self._call(part, out=None)
        made = self.arena.new((LOSS_GRADIENT_SLOTS, part.stop - part.start), self.normalizer.dtype)
        self.scales.backend.row_gradient(call, made)
        return made

    def _call(self, part: slice, out: RowOutputs | None) -> TileCall:
        """The call of the full loss, for results or gradients of some rows; its tile is that of these classes."""
        size = self.full_problem.slice_size
        tile = Tile(self.first_class, size, self.full_problem.vocab_size, size)
        inputs, spec = self.rows.row_inputs(part, self.scales.for_gradient()), self.full_problem.spec
        upstream, normalizer = None if self.upstream is None else self.upstream[part], self.normalizer[:, part]
        return TileCall(inputs, spec, tile, None if out is None else out.part(part), normalizer, upstream)

    def without_targets_elsewhere(self, factor: Tensor) -> Tensor:
        """``factor``, (rows,), of targets: 0 where they are classes of other processes."""
        return factor

    def local_ids(self, ids: Tensor) -> Tensor:
        """Classes by their numbers here; -1 for those of other processes."""
        return ids

    def summed(self, x: Tensor) -> Tensor:
        """`x`, summed over all processes in place. One collective."""
        return x

    def complete_top(self, top: Top) -> Top:
        """The largest logits of all classes, from those of each process. Two collectives."""
        return top

    def begin_sum(self, term: int, share: Tensor) -> None:
        """Begin to sum a part of dX of a term over all processes, in place."""

    def finish_sum(self, term: int, grad: Tensor) -> None:
        """Wait for the sums of dX of a term, and begin them if no part of it was summed."""


class Slice(AllClasses):
    """The classes of this process in a pass, and what is known of all."""

    divided = True

    def __post_init__(self) -> None:
        p, shard = self.full_problem, self.full_problem.shard
        assert shard is not None
        self.shard: Shard = shard
        self.first_class = shard.start
        self.group: Any = shard.process_group
        self._sums: dict[int, list[Any]] = {}
        weight = None
        if p.class_weight is not None and p.spec.label_smoothing and not shard.is_empty:
            weight = p.class_weight[shard.start : shard.start + p.slice_size]
        self.problem = replace(
            p,
            target=self._local_target(),
            class_weight=weight,
            token_weight=None,
            num_items=None,
            spec=slice_spec(p.spec),
            token_weight_grad=False,
            shard=None,
        )
        self.selection = replace(self.rows, problem=self.problem)
        self.local = None if self.out is None else allocate(self.problem, self.rows.most_rows, self.arena)
        # Scales of 1, and the sum of the slice's class weights.
        self.local_scales = LossScales(self.problem, self.scales.backend, with_gradients=True)
        # The class that stands for a slice without any may be above all others, which has no probability.
        if shard.is_empty:
            self.gradient_normalizer = torch.full_like(self.normalizer, BEYOND_LOGITS)
        else:
            self.gradient_normalizer = self.normalizer

    def _local_target(self) -> Tensor:
        """(N,) Targets that are elsewhere are replaced by classes of this process, each by another: the terms of equal
        targets are summed one after the other."""
        target, ignored = self.full_problem.target, self.full_problem.spec.ignore_index
        local = self.local_ids(target)
        stand_in = torch.arange(len(target), device=target.device) % self.full_problem.slice_size
        return torch.where(target == ignored, IGNORED, torch.where(local >= 0, local, stand_in))

    # -------------------------------------------------------------------------------------------- all classes

    def complete(self, part: slice) -> None:
        if self._has_kernel:
            self._complete_by_kernel(part, None)
        else:
            self._complete(part)

    def _complete(self, part: slice) -> tuple[TileCall, Targets, RowResults, RowResults]:
        """The results of some rows and those of each process, with the call that they are for."""
        p, call = self.full_problem, self._call(part, self.out)
        if p.token_weight_grad:  # which is made of losses without the weights
            call = call._replace(inputs=call.inputs._replace(token_weight=None))
        targets, (sent, names) = Targets.of(call), self._sent(part)
        shards = received(sent, names, self.shard)
        results = put_together(shards, call.inputs.target, p.class_weight, self.shard)
        write_results(results, call, targets)
        return call, targets, results, shards

    def _sent(self, part: slice) -> tuple[Tensor, Sequence[str]]:
        """What all processes say of some rows, see `received`, and its names. One collective."""
        assert self.local is not None
        local = self.local.part(part)
        offset, smooth = local.normalizer[OFFSET], None
        if self.shard.is_empty:
            offset = torch.full_like(offset, -torch.inf)
        if self.full_problem.spec.label_smoothing:
            smooth = local.loss * self.full_problem.slice_size
        stats = {name: getattr(local, name) for name in SENT}
        if local.argmax is not None:  # an index below 2^24 is a float32
            stats["argmax"] = local.argmax + self.shard.start
        mine = RowResults(offset=offset, log_sum=local.normalizer[LOG_SUM], smooth=smooth, **stats)
        return sent_to_all(mine, 0 if self.shard.is_empty else self.full_problem.slice_size, self.shard)

    @property
    def _class_weight_of_targets(self) -> Tensor | None:
        """(rows,) class weights of the slice's own targets, with label smoothing."""
        weight = self.problem.class_weight
        return None if weight is None else weight[self.selection.target.clamp(0, self.problem.slice_size - 1)]

    def without_targets_elsewhere(self, factor: Tensor) -> Tensor:
        return factor.where(self.local_ids(self.rows.target) >= 0, 0.0)

    def local_ids(self, ids: Tensor) -> Tensor:
        start = self.shard.start
        here = (ids >= start) & (ids < min(start + self.full_problem.slice_size, self.shard.vocab_size))
        return torch.where(here, ids - start, -1)

    def summed(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def complete_top(self, top: Top) -> Top:
        k = top.ids.shape[1]
        nothing = -torch.inf if top.largest else torch.inf
        # A process with fewer than k classes has found as many; one without any, none.
        found = 0 if self.shard.is_empty else min(k, self.full_problem.slice_size)
        top.logits[:, found:], top.ids[:, found:] = nothing, 0
        logits, ids = (gather(x, self.group).movedim(0, 1).flatten(1) for x in (top.logits, top.ids + self.shard.start))
        best, place = logits.topk(k, largest=top.largest)
        return replace(top, logits=best, ids=ids.gather(1, place))

    # ---------------------------------------------------------------------------------------- exponentials

    def complete_factors(self, part: slice, factors: Tensor) -> None:
        if self._has_kernel:
            self._complete_by_kernel(part, factors)
            return
        call, targets, results, shards = self._complete(part)
        if self.full_problem.token_weight_grad:
            call = call._replace(inputs=self._call(part, None).inputs)
        of_softmax, of_target, of_classes = row_gradient(call, targets)
        # A slice that has no class, or nothing but logits of -inf, has no probabilities of its own: NaN.
        own = RowResults(*(None if t is None else t[self.shard.rank] for t in shards))  # type: ignore[arg-type]
        share = log_sum_exps(shards, results.offset)[self.shard.rank] - results.log_sum
        counts, factor = share != -torch.inf, call.inputs.row_factor
        own_logit = torch.where(counts, own.offset + (own.log_sum + own.logprob), 0.0)
        jacobian = call.spec.jacobian(own_logit[:, None], factor)
        jacobian = jacobian[:, 0] if isinstance(jacobian, Tensor) else jacobian
        # a p - o, of which a is nearly o and p nearly 1 where a model is certain.
        at_target = (of_softmax - of_target) + of_softmax * torch.expm1(results.logprob)
        of_stand_in = torch.where(counts, (own.logprob + share).exp(), 0.0)
        at_own = where(targets.inside, at_target, of_softmax * of_stand_in)
        if call.spec.label_smoothing:
            weight = self._class_weight_of_targets
            at_own = at_own - (of_classes if weight is None else of_classes * weight[part])
            factors[2] = of_classes * call.spec.scale
        factors[0] = of_softmax * torch.where(counts, factors[0] * share.exp(), 0.0)
        factors[1] = at_own * jacobian
        factors.copy_(where(targets.valid, factors, 0.0))

    def _complete_by_kernel(self, part: slice, factors: Tensor | None) -> None:
        (sent, _), shard = self._sent(part), self.shard
        call = self._call(part, self.out)
        self.scales.backend.complete_slices(sent, shard.rank, shard.most_classes, call, factors)

    @functools.cached_property
    def _has_kernel(self) -> bool:
        """Whether one launch puts rows together: where a product makes exponentials, whose losses have no more."""
        p, in_float32 = self.full_problem, self.normalizer.dtype == torch.float32
        unknown = unknown_to_products(p.spec) or set(p.spec.stats) - EXPONENTIAL_STATS or p.token_weight_grad
        return self.scales.backend.name == "triton" and in_float32 and not unknown

    # ---------------------------------------------------------------------------------------- sums over processes

    def begin_sum(self, term: int, share: Tensor) -> None:
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._sums.setdefault(term, []).append(dist.all_reduce(share, group=self.group, async_op=True))

    def finish_sum(self, term: int, grad: Tensor) -> None:
        if term not in self._sums:
            self.begin_sum(term, grad)
        for work in self._sums.pop(term, ()):
            work.wait()


def classes_of(problem: LinearCrossEntropyProblem, *rest: Any) -> AllClasses:
    """The classes of a problem that this process has. The arguments are those of `AllClasses`."""
    return (AllClasses if problem.shard is None else Slice)(problem, *rest)


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


def sent_to_all(mine: RowResults, width: int, shard: Shard) -> tuple[Tensor, Sequence[str]]:
    """Send results of rows over the classes of this process, `width` of them, to all. One collective.

    Returns (processes, names * rows + 1), and the names. At the end is the number of classes of each process.
    """
    values = {name: value.to(mine.offset.dtype) for name, value in mine._asdict().items() if value is not None}
    return gather(torch.cat([*values.values(), mine.offset.new_full((1,), width)]), shard.process_group), list(values)


def received(sent: Tensor, names: Sequence[str], shard: Shard) -> RowResults:
    """Return results of all processes, (processes, rows) each, see `sent_to_all`. They are NaN where processes have
    other numbers of classes than `shard` takes them to have: nothing waits for that."""
    values = dict(zip(names, sent[:, :-1].view(len(sent), len(names), -1).unbind(1), strict=True))
    differ = (sent[:, -1] != shard.widths(sent)).any()
    values["offset"] = torch.where(differ, torch.nan, values["offset"])
    return RowResults(*(values.get(name) for name in RowResults._fields))  # type: ignore[arg-type]


def put_together(shards: RowResults, target: Tensor, class_weight: Tensor | None, shard: Shard) -> RowResults:
    """Results of all classes from those of processes. `class_weight`: of all classes."""
    widths = shard.widths(shards.offset)
    sums = widths if class_weight is None or shards.smooth is None else shard.split_sums(class_weight)
    owner = target.clamp(0, shard.vocab_size - 1) // shard.most_classes
    return merge_shards(shards, widths[:, None], sums[:, None].to(widths.dtype), owner)
