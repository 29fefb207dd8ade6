"""The classes of a pass: all of them, or those of one process of a head that is divided.

Each process of a divided head has some of the classes, and all have the same tokens. The classes of a process are a
problem of their own (`VocabShard.problem`): schedules and kernels work on it as on any other. Where a token's target is
elsewhere, one of the process's own classes stands in for it. Statistics of the slice leave a few numbers of each row.
One collective gives those of all processes to all, and every process puts the same results together
(`formulas.merge_shards`).

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
    unsupported_by_products,
)
from flce.backends.formulas import (
    RowResults,
    Targets,
    log_sum_exps,
    merge_shards,
    row_gradient,
    where,
    write_results,
)
from flce.core.problem import LinearCrossEntropyProblem, LossSpec
from flce.core.shard import Shard, all_gather
from flce.engine.arena import Arena
from flce.engine.selection import Selection
from flce.engine.top_k import TopK
from flce.engine.vectors import LossScales, allocate_outputs

LOCAL_IGNORE_INDEX = -100
"""`ignore_index` of a slice, whose classes have numbers of their own."""
# A normalizer beside which no logit has a probability above 0. Not infinite, so that differences are numbers.
OFFSET_OF_EMPTY_SHARD = 1e30
# Statistics that a slice sends, by the names of `RowResults`, in the order in which they are sent.
GATHERED_STATS = ("logprob", "entropy", "argmax", "mean_logit", "log_sum_sq_prob")
# Fields of a LossSpec that make logits: those of a slice, too.
LOGIT_FIELDS = ("softcap", "logit_scale", "temperature", "candidates", "top_k", "row_temperature")
# Fields that the results of all classes know, see `formulas.write_results` and `formulas.row_gradient`.
RESULT_FIELDS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "stats")


def shard_spec(spec: LossSpec) -> LossSpec:
    """Return what is asked of a slice: log-probabilities and other statistics of the full spec. With label smoothing
    the loss is the sum of ``w[k] * (lse - z[k])`` over its classes, divided by their number; without, nothing reads it.

    Raises:
        NotImplementedError: the spec has a field that a divided head does not know.
    """
    names = {field.name for field in fields(spec)}
    unknown = names.difference(LOGIT_FIELDS, RESULT_FIELDS)
    for name in sorted(unknown):
        if getattr(spec, name) != getattr(type(spec), name):
            raise NotImplementedError(f"a head that is divided over processes has no {name} yet")
    stats = {"argmax" if name == "correct" else name for name in spec.stats} & set(GATHERED_STATS)
    return type(spec)(
        **{name: getattr(spec, name) for name in LOGIT_FIELDS if name in names},
        reduction="none",
        ignore_index=LOCAL_IGNORE_INDEX,
        label_smoothing=1.0 if spec.label_smoothing else 0.0,
        stats=("logprob", *sorted(stats - {"logprob"})),
    )


@dataclass
class FullVocab:
    """The classes of a pass that has all of them. What a `VocabShard` does beside is nothing here.

    Attributes:
        full_problem: the call.
        full_selection: the tokens that are worked on.
        scales: of the loss.
        arena: where memory comes from.
        normalizer: (slots, rows).
        out: where the results of these rows go. None in backward.
        upstream: (rows,) gradient of each row's loss; None: that of all is in `scales`.
    """

    full_problem: LinearCrossEntropyProblem
    full_selection: Selection
    scales: LossScales
    arena: Arena
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    is_sharded = False
    """Whether there are other processes with other classes."""
    first_class = 0
    """The number of the first of these classes among all."""

    def __post_init__(self) -> None:
        self.problem, self.selection, self.local_out = self.full_problem, self.full_selection, self.out
        """What schedules work on, and where statistics of these classes go."""
        self.local_scales, self.gradient_normalizer = self.scales, self.normalizer
        """What the gradient of the logits of these classes is made of."""

    def merge_results(self, part: slice) -> None:
        """Write the results of some rows, from what all processes have of them. One collective."""

    def merge_factors(self, part: slice, factors: Tensor) -> None:
        """Write the results of some rows, and what their exponentials are multiplied by.

        Args:
            factors: (2 or 3, rows), see `Backend.exponentials`. The first is what makes exponentials the derivative of
                the slice's own log-sum-exp; all are written.
        """

    def compute_row_gradient(self, part: slice) -> Tensor:
        """Return `TileCall.row_gradient` of some rows, from the normalizer of all classes."""
        call = self._call(part, out=None)
        factors = self.arena.new((LOSS_GRADIENT_SLOTS, part.stop - part.start), self.normalizer.dtype)
        self.scales.backend.row_gradient(call, factors)
        return factors

    def _call(self, part: slice, out: RowOutputs | None) -> TileCall:
        """The call of the full loss, for results or gradients of some rows; its tile is that of these classes."""
        size = self.full_problem.local_vocab_size
        tile = Tile(self.first_class, size, self.full_problem.vocab_size, size)
        inputs, spec = self.full_selection.row_inputs(part, self.scales.for_gradient()), self.full_problem.spec
        upstream, normalizer = None if self.upstream is None else self.upstream[part], self.normalizer[:, part]
        return TileCall(inputs, spec, tile, None if out is None else out.select_rows(part), normalizer, upstream)

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        """``factor``, (rows,), of targets: 0 where they are classes of other processes."""
        return factor

    def local_ids(self, ids: Tensor) -> Tensor:
        """Classes by their numbers here; -1 for those of other processes."""
        return ids

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """`x`, summed over all processes in place. One collective."""
        return x

    def merge_top_k(self, top_k: TopK) -> TopK:
        """The largest logits of all classes, from those of each process. Two collectives."""
        return top_k

    def start_dx_sum(self, term: int, share: Tensor) -> None:
        """Begin to sum a part of dX of a term over all processes, in place."""

    def finish_dx_sum(self, term: int, grad: Tensor) -> None:
        """Wait for the sums of dX of a term, and begin them if no part of it was summed."""


class VocabShard(FullVocab):
    """The classes of this process in a pass, and what is known of all."""

    is_sharded = True

    def __post_init__(self) -> None:
        p, shard = self.full_problem, self.full_problem.shard
        assert shard is not None
        self.shard: Shard = shard
        self.first_class = shard.start
        self.group: Any = shard.process_group
        self._sums: dict[int, list[Any]] = {}
        weight = None
        if p.class_weight is not None and p.spec.label_smoothing and not shard.is_empty:
            weight = p.class_weight[shard.start : shard.start + p.local_vocab_size]
        self.problem = replace(
            p,
            target=self._local_target(),
            class_weight=weight,
            token_weight=None,
            num_items=None,
            spec=shard_spec(p.spec),
            token_weight_grad=False,
            shard=None,
        )
        self.selection = replace(self.full_selection, problem=self.problem)
        self.local_out = (
            None if self.out is None else allocate_outputs(self.problem, self.full_selection.row_capacity, self.arena)
        )
        # Scales of 1, and the sum of the slice's class weights.
        self.local_scales = LossScales(self.problem, self.scales.backend, with_gradients=True)
        # The class that stands for a slice without any may be above all others, which has no probability.
        if shard.is_empty:
            self.gradient_normalizer = torch.full_like(self.normalizer, OFFSET_OF_EMPTY_SHARD)
        else:
            self.gradient_normalizer = self.normalizer

    def _local_target(self) -> Tensor:
        """(N,) Targets that are elsewhere are replaced by classes of this process, each by another: the terms of equal
        targets are summed one after the other."""
        target, ignored = self.full_problem.target, self.full_problem.spec.ignore_index
        local = self.local_ids(target)
        stand_in = torch.arange(len(target), device=target.device) % self.full_problem.local_vocab_size
        return torch.where(target == ignored, LOCAL_IGNORE_INDEX, torch.where(local >= 0, local, stand_in))

    # -------------------------------------------------------------------------------------------- all classes

    def merge_results(self, part: slice) -> None:
        if self._has_merge_kernel:
            self._merge_by_kernel(part, None)
        else:
            self._merge_results(part)

    def _merge_results(self, part: slice) -> tuple[TileCall, Targets, RowResults, RowResults]:
        """The results of some rows and those of each process, with the call that they are for."""
        p, call = self.full_problem, self._call(part, self.out)
        if p.token_weight_grad:  # which is made of losses without the weights
            call = call._replace(inputs=call.inputs._replace(token_weight=None))
        targets, (sent, names) = Targets.from_call(call), self._gather_results(part)
        shards = unpack_shard_results(sent, names, self.shard)
        results = merge_shard_results(shards, call.inputs.target, p.class_weight, self.shard)
        write_results(results, call, targets)
        return call, targets, results, shards

    def _gather_results(self, part: slice) -> tuple[Tensor, Sequence[str]]:
        """What all processes say of some rows, see `unpack_shard_results`, and its names. One collective."""
        assert self.local_out is not None
        local = self.local_out.select_rows(part)
        offset, smooth = local.normalizer[OFFSET], None
        if self.shard.is_empty:
            offset = torch.full_like(offset, -torch.inf)
        if self.full_problem.spec.label_smoothing:
            smooth = local.loss * self.full_problem.local_vocab_size
        stats = {name: getattr(local, name) for name in GATHERED_STATS}
        if local.argmax is not None:  # an index below 2^24 is a float32
            stats["argmax"] = local.argmax + self.shard.start
        local_results = RowResults(offset=offset, log_sum=local.normalizer[LOG_SUM], smooth=smooth, **stats)
        return gather_shard_results(
            local_results, 0 if self.shard.is_empty else self.full_problem.local_vocab_size, self.shard
        )

    @property
    def _class_weight_of_targets(self) -> Tensor | None:
        """(rows,) class weights of the slice's own targets, with label smoothing."""
        weight = self.problem.class_weight
        return None if weight is None else weight[self.selection.target.clamp(0, self.problem.local_vocab_size - 1)]

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        return factor.where(self.local_ids(self.full_selection.target) >= 0, 0.0)

    def local_ids(self, ids: Tensor) -> Tensor:
        start = self.shard.start
        here = (ids >= start) & (ids < min(start + self.full_problem.local_vocab_size, self.shard.vocab_size))
        return torch.where(here, ids - start, -1)

    def sum_over_processes(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def merge_top_k(self, top_k: TopK) -> TopK:
        k = top_k.ids.shape[1]
        nothing = -torch.inf if top_k.largest else torch.inf
        # A process with fewer than k classes has found as many; one without any, none.
        found = 0 if self.shard.is_empty else min(k, self.full_problem.local_vocab_size)
        top_k.logits[:, found:], top_k.ids[:, found:] = nothing, 0
        logits, ids = (
            all_gather(x, self.group).movedim(0, 1).flatten(1) for x in (top_k.logits, top_k.ids + self.shard.start)
        )
        best, place = logits.topk(k, largest=top_k.largest)
        return replace(top_k, logits=best, ids=ids.gather(1, place))

    # ---------------------------------------------------------------------------------------- exponentials

    def merge_factors(self, part: slice, factors: Tensor) -> None:
        if self._has_merge_kernel:
            self._merge_by_kernel(part, factors)
            return
        call, targets, results, shards = self._merge_results(part)
        if self.full_problem.token_weight_grad:
            call = call._replace(inputs=self._call(part, None).inputs)
        softmax_factor, target_factor, classes_factor = row_gradient(call, targets)
        # A slice that has no class, or nothing but logits of -inf, has no probabilities of its own: NaN.
        own = RowResults(*(None if t is None else t[self.shard.rank] for t in shards))  # type: ignore[arg-type]
        share = log_sum_exps(shards, results.offset)[self.shard.rank] - results.log_sum
        counts, factor = share != -torch.inf, call.inputs.row_factor
        own_logit = torch.where(counts, own.offset + (own.log_sum + own.logprob), 0.0)
        jacobian = call.spec.jacobian(own_logit[:, None], factor)
        jacobian = jacobian[:, 0] if isinstance(jacobian, Tensor) else jacobian
        # a p - o, of which a is nearly o and p nearly 1 where a model is certain.
        grad_at_target = (softmax_factor - target_factor) + softmax_factor * torch.expm1(results.logprob)
        stand_in_probability = torch.where(counts, (own.logprob + share).exp(), 0.0)
        grad_at_own_target = where(targets.in_tile, grad_at_target, softmax_factor * stand_in_probability)
        if call.spec.label_smoothing:
            weight = self._class_weight_of_targets
            grad_at_own_target = grad_at_own_target - (
                classes_factor if weight is None else classes_factor * weight[part]
            )
            factors[2] = classes_factor * call.spec.scale
        factors[0] = softmax_factor * torch.where(counts, factors[0] * share.exp(), 0.0)
        factors[1] = grad_at_own_target * jacobian
        factors.copy_(where(targets.valid, factors, 0.0))

    def _merge_by_kernel(self, part: slice, factors: Tensor | None) -> None:
        (sent, _), shard = self._gather_results(part), self.shard
        call = self._call(part, self.out)
        self.scales.backend.finish_sharded_rows(sent, shard.rank, shard.max_local_vocab_size, call, factors)

    @functools.cached_property
    def _has_merge_kernel(self) -> bool:
        """Whether one launch puts rows together: where a product makes exponentials, whose losses have no more."""
        p, in_float32 = self.full_problem, self.normalizer.dtype == torch.float32
        unknown = unsupported_by_products(p.spec) or set(p.spec.stats) - EXPONENTIAL_STATS or p.token_weight_grad
        return self.scales.backend.name == "triton" and in_float32 and not unknown

    # ---------------------------------------------------------------------------------------- sums over processes

    def start_dx_sum(self, term: int, share: Tensor) -> None:
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._sums.setdefault(term, []).append(dist.all_reduce(share, group=self.group, async_op=True))

    def finish_dx_sum(self, term: int, grad: Tensor) -> None:
        if term not in self._sums:
            self.start_dx_sum(term, grad)
        for work in self._sums.pop(term, ()):
            work.wait()


def build_vocab(problem: LinearCrossEntropyProblem, *rest: Any) -> FullVocab:
    """The classes of a problem that this process has. The arguments are those of `FullVocab`."""
    return (FullVocab if problem.shard is None else VocabShard)(problem, *rest)


def gather_class_weights(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """The same problem with the weights of all classes, where it has those of this process. Then, one collective."""
    weight, shard = p.class_weight, p.shard
    if shard is None or weight is None or shard.process_group.size() == 1:
        return p
    if len(weight) == p.vocab_size:
        if shard.max_local_vocab_size < p.vocab_size:
            return p
        # Of the process that has all classes these may be its own. The others, which have none, ask for them then.
        weight = weight[:0] if shard.is_empty else weight
    return replace(p, class_weight=shard.gather_full(weight))


def gather_shard_results(local_results: RowResults, width: int, shard: Shard) -> tuple[Tensor, Sequence[str]]:
    """Send results of rows over the classes of this process, `width` of them, to all. One collective.

    Returns (processes, names * rows + 1), and the names. At the end is the number of classes of each process.
    """
    values = {
        name: value.to(local_results.offset.dtype)
        for name, value in local_results._asdict().items()
        if value is not None
    }
    return all_gather(
        torch.cat([*values.values(), local_results.offset.new_full((1,), width)]), shard.process_group
    ), list(values)


def unpack_shard_results(sent: Tensor, names: Sequence[str], shard: Shard) -> RowResults:
    """Return results of all processes, (processes, rows) each, see `gather_shard_results`. They are NaN where
    processes have
    other numbers of classes than `shard` takes them to have: nothing waits for that."""
    values = dict(zip(names, sent[:, :-1].view(len(sent), len(names), -1).unbind(1), strict=True))
    differ = (sent[:, -1] != shard.local_vocab_sizes(sent)).any()
    values["offset"] = torch.where(differ, torch.nan, values["offset"])
    return RowResults(*(values.get(name) for name in RowResults._fields))  # type: ignore[arg-type]


def merge_shard_results(shards: RowResults, target: Tensor, class_weight: Tensor | None, shard: Shard) -> RowResults:
    """Results of all classes from those of processes. `class_weight`: of all classes."""
    widths = shard.local_vocab_sizes(shards.offset)
    sums = widths if class_weight is None or shards.smooth is None else shard.sums_by_process(class_weight)
    owner = target.clamp(0, shard.vocab_size - 1) // shard.max_local_vocab_size
    return merge_shards(shards, widths[:, None], sums[:, None].to(widths.dtype), owner)
