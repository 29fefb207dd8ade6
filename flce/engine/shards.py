"""The vocabulary of a pass: all classes, or the shard of one process of a divided head. `passes.py` builds it.

Each process of a divided head has a shard of the classes, and all processes have the same tokens. A shard is a separate
problem (`VocabularyShard.problem`), which schedules and kernels process like any other. If a token's target is in
another shard, a class of the process's own shard replaces it (the stand-in). Statistics of a shard are a few numbers
for each row. One collective gathers the statistics of all shards, and every process merges them into the same results
(`formulas.merge_shards`).

The gradient of the logits is then computed from the row gradient (`TileCall.row_gradient`) and the normalizer of all
classes. If kernels have written exponentials, the factor of a row is the factor for the shard alone, times the softmax
factor and the probability of the shard's classes.
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
    unsupported_by_fused_products,
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
"""`ignore_index` of a shard, whose targets are local class numbers."""
# A normalizer with which every probability is 0. It is finite, so that differences are not NaN.
OFFSET_OF_EMPTY_SHARD = 1e30
# Statistics of a shard that are gathered, by the names of `RowResults`.
GATHERED_STATS = ("logprob", "entropy", "argmax", "mean_logit", "log_sum_sq_prob")
# Fields of a LossSpec that change logits. The spec of a shard has the same values.
LOGIT_FIELDS = ("softcap", "logit_scale", "temperature", "candidates", "top_k", "row_temperature")
# Fields that are used when results are merged, see `formulas.write_results` and `formulas.row_gradient`.
RESULT_FIELDS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "stats")


def shard_spec(spec: LossSpec) -> LossSpec:
    """Return the spec of a shard: log-probabilities and the other statistics of the full spec. With label smoothing the
    loss of the shard is the sum of ``w[k] * (lse - z[k])`` over its classes, divided by their number. Otherwise the
    loss is not read.

    Raises:
        NotImplementedError: the spec has a field that a divided head does not support.
    """
    names = {field.name for field in fields(spec)}
    unsupported = names.difference(LOGIT_FIELDS, RESULT_FIELDS)
    for name in sorted(unsupported):
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
class Vocabulary:
    """All classes, for a pass of one process. `VocabularyShard` overrides the methods that merge results of processes.

    Attributes:
        full_problem: the problem of all classes.
        full_selection: the selected tokens of the full problem.
        scales: loss scales.
        arena: allocator.
        normalizer: (slots, rows), of all classes.
        out: memory for the results of these rows. None in backward.
        upstream: (rows,) gradient of each row's loss; None: `scales` include the gradient of the loss.
    """

    full_problem: LinearCrossEntropyProblem
    full_selection: Selection
    scales: LossScales
    arena: Arena
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    is_sharded = False
    """True if other processes have other classes."""
    first_class = 0
    """Index of the first of these classes among all classes."""

    def __post_init__(self) -> None:
        self.problem, self.selection, self.local_out = self.full_problem, self.full_selection, self.out
        """Inputs of schedules, and memory for statistics of these classes."""
        self.local_scales, self.gradient_normalizer = self.scales, self.normalizer
        """Inputs of the gradient of the logits of these classes."""

    def merge_results(self, tokens: slice) -> None:
        """Merge the statistics of some rows of all processes into their results. One collective."""

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        """Merge the results of some rows, and replace the factors of their exponentials.

        Args:
            factors: (2 or 3, rows), see `Backend.exponentials`. On entry the first are the factors for the derivative
                of the shard's own log-sum-exp. On return all are the factors for the full loss.
        """

    def compute_row_gradient(self, tokens: slice) -> Tensor:
        """Compute `TileCall.row_gradient` of some rows from the normalizer of all classes."""
        call = self._call(tokens, out=None)
        factors = self.arena.new((LOSS_GRADIENT_SLOTS, tokens.stop - tokens.start), self.normalizer.dtype)
        self.scales.backend.row_gradient(call, factors)
        return factors

    def _call(self, tokens: slice, out: RowOutputs | None) -> TileCall:
        """Return the call of the full loss for results or gradients of some rows. Its tile has these classes."""
        size = self.full_problem.local_vocab_size
        tile = Tile(self.first_class, size, self.full_problem.vocab_size, size)
        inputs, spec = self.full_selection.row_inputs(tokens, self.scales.for_gradient()), self.full_problem.spec
        upstream, normalizer = None if self.upstream is None else self.upstream[tokens], self.normalizer[:, tokens]
        return TileCall(inputs, spec, tile, None if out is None else out.select_rows(tokens), normalizer, upstream)

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        """Return `factor`, (rows,), with 0 for rows whose target is a class of another process."""
        return factor

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the local indices of classes; -1 for classes of other processes."""
        return ids

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """Sum `x` over all processes in place and return it. One collective."""
        return x

    def merge_top_k(self, top_k: TopK) -> TopK:
        """Return the largest logits of all classes from the largest of each process. Two collectives."""
        return top_k

    def start_dx_sum(self, term: int, dx: Tensor) -> None:
        """Start to sum dX of a term, of some tokens or of all, over all processes, in place."""

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        """Wait for the sums of dX of a term. If none was started, sum `dx`, of all tokens."""


class VocabularyShard(Vocabulary):
    """Shard of one process, for a pass whose results are of all classes."""

    is_sharded = True

    def __post_init__(self) -> None:
        p, shard = self.full_problem, self.full_problem.shard
        assert shard is not None
        self.shard: Shard = shard
        self.first_class = shard.start
        self.group: Any = shard.process_group
        self._dx_sums: dict[int, list[Any]] = {}
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
            None if self.out is None else allocate_outputs(self.problem, self.full_selection.max_num_rows, self.arena)
        )
        # Scales of 1, and the sum of the shard's class weights.
        self.local_scales = LossScales(self.problem, self.scales.backend, with_gradients=True)
        # An empty shard has a stand-in class. Its logit may be the largest of all, but its probability must be 0.
        if shard.is_empty:
            self.gradient_normalizer = torch.full_like(self.normalizer, OFFSET_OF_EMPTY_SHARD)
        else:
            self.gradient_normalizer = self.normalizer

    def _local_target(self) -> Tensor:
        """Return the targets as local classes, (N,). Targets in other shards are replaced by different local classes,
        because the terms of equal targets are summed one after the other."""
        target, ignored = self.full_problem.target, self.full_problem.spec.ignore_index
        local = self.local_ids(target)
        stand_in = torch.arange(len(target), device=target.device) % self.full_problem.local_vocab_size
        return torch.where(target == ignored, LOCAL_IGNORE_INDEX, torch.where(local >= 0, local, stand_in))

    # -------------------------------------------------------------------------------------------- all classes

    def merge_results(self, tokens: slice) -> None:
        if self._has_merge_kernel:
            self._merge_by_kernel(tokens, None)
        else:
            self._merge_results(tokens)

    def _merge_results(self, tokens: slice) -> tuple[TileCall, Targets, RowResults, RowResults]:
        """Write the results of some rows. Return the call, its targets, the results, and the results of each
        process."""
        p, call = self.full_problem, self._call(tokens, self.out)
        if p.token_weight_grad:  # It is computed from losses without token weights.
            call = call._replace(inputs=call.inputs._replace(token_weight=None))
        targets, (gathered, names) = Targets.from_call(call), self._gather_results(tokens)
        shards = unpack_shard_results(gathered, names, self.shard)
        results = merge_shard_results(shards, call.inputs.target, p.class_weight, self.shard)
        write_results(results, call, targets)
        return call, targets, results, shards

    def _gather_results(self, tokens: slice) -> tuple[Tensor, Sequence[str]]:
        """Gather the results of some rows of all processes. Return them packed, see `unpack_shard_results`, and their
        names. One collective."""
        assert self.local_out is not None
        local = self.local_out.select_rows(tokens)
        offset, smooth = local.normalizer[OFFSET], None
        if self.shard.is_empty:
            offset = torch.full_like(offset, -torch.inf)
        if self.full_problem.spec.label_smoothing:
            smooth = local.loss * self.full_problem.local_vocab_size
        stats = {name: getattr(local, name) for name in GATHERED_STATS}
        if local.argmax is not None:  # An index below 2^24 is exact in float32.
            stats["argmax"] = local.argmax + self.shard.start
        local_results = RowResults(offset=offset, log_sum=local.normalizer[LOG_SUM], smooth=smooth, **stats)
        return gather_shard_results(
            local_results, 0 if self.shard.is_empty else self.full_problem.local_vocab_size, self.shard
        )

    @property
    def _class_weight_of_targets(self) -> Tensor | None:
        """Class weights of the local targets, (rows,), with label smoothing."""
        weight = self.problem.class_weight
        return None if weight is None else weight[self.selection.target.clamp(0, self.problem.local_vocab_size - 1)]

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        return factor.where(self.local_ids(self.full_selection.target) >= 0, 0.0)

    def local_ids(self, ids: Tensor) -> Tensor:
        start = self.shard.start
        is_local = (ids >= start) & (ids < min(start + self.full_problem.local_vocab_size, self.shard.vocab_size))
        return torch.where(is_local, ids - start, -1)

    def sum_over_processes(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def merge_top_k(self, top_k: TopK) -> TopK:
        k = top_k.ids.shape[1]
        # A shard with fewer than k classes has as many results as classes. The others must lose the comparison.
        num_found = 0 if self.shard.is_empty else min(k, self.full_problem.local_vocab_size)
        top_k.logits[:, num_found:], top_k.ids[:, num_found:] = -torch.inf if top_k.largest else torch.inf, 0
        logits, ids = (
            all_gather(x, self.group).movedim(0, 1).flatten(1) for x in (top_k.logits, top_k.ids + self.shard.start)
        )
        best, position = logits.topk(k, largest=top_k.largest)
        return replace(top_k, logits=best, ids=ids.gather(1, position))

    # ---------------------------------------------------------------------------------------- exponentials

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        if self._has_merge_kernel:
            self._merge_by_kernel(tokens, factors)
            return
        call, targets, results, shards = self._merge_results(tokens)
        if self.full_problem.token_weight_grad:
            call = call._replace(inputs=self._call(tokens, None).inputs)
        softmax_factor, target_factor, classes_factor = row_gradient(call, targets)
        own = RowResults(*(None if t is None else t[self.shard.rank] for t in shards))  # type: ignore[arg-type]
        # The logarithm of the probability of this shard's classes.
        shard_logprob = log_sum_exps(shards, results.offset)[self.shard.rank] - results.log_sum
        # An empty shard, or a shard with only logits of -inf, has no probability. Its terms would be NaN.
        has_probability, factor = shard_logprob != -torch.inf, call.inputs.row_factor
        own_logit = torch.where(has_probability, own.offset + (own.log_sum + own.logprob), 0.0)
        jacobian = call.spec.jacobian(own_logit[:, None], factor)
        jacobian = jacobian[:, 0] if isinstance(jacobian, Tensor) else jacobian
        # softmax_factor * p - target_factor without cancellation: if a model is certain, p is nearly 1 and both factors
        # are nearly equal.
        grad_at_target = (softmax_factor - target_factor) + softmax_factor * torch.expm1(results.logprob)
        stand_in_probability = torch.where(has_probability, (own.logprob + shard_logprob).exp(), 0.0)
        grad_at_own_target = where(targets.in_tile, grad_at_target, softmax_factor * stand_in_probability)
        if call.spec.label_smoothing:
            weight = self._class_weight_of_targets
            grad_at_own_target = grad_at_own_target - (
                classes_factor if weight is None else classes_factor * weight[tokens]
            )
            factors[2] = classes_factor * call.spec.scale
        factors[0] = softmax_factor * torch.where(has_probability, factors[0] * shard_logprob.exp(), 0.0)
        factors[1] = grad_at_own_target * jacobian
        factors.copy_(where(targets.valid, factors, 0.0))

    def _merge_by_kernel(self, tokens: slice, factors: Tensor | None) -> None:
        (gathered, _), shard = self._gather_results(tokens), self.shard
        call = self._call(tokens, self.out)
        self.scales.backend.finish_sharded_rows(gathered, shard.rank, shard.max_local_vocab_size, call, factors)

    @functools.cached_property
    def _has_merge_kernel(self) -> bool:
        """True if a kernel can merge the rows: for losses that fused products with exponentials support."""
        p, in_float32 = self.full_problem, self.normalizer.dtype == torch.float32
        unsupported = (
            unsupported_by_fused_products(p.spec) or set(p.spec.stats) - EXPONENTIAL_STATS or p.token_weight_grad
        )
        return self.scales.backend.name == "triton" and in_float32 and not unsupported

    # ---------------------------------------------------------------------------------------- sums over processes

    def start_dx_sum(self, term: int, dx: Tensor) -> None:
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._dx_sums.setdefault(term, []).append(dist.all_reduce(dx, group=self.group, async_op=True))

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        if term not in self._dx_sums:
            self.start_dx_sum(term, dx)
        for work in self._dx_sums.pop(term, ()):
            work.wait()


def build_vocab(problem: LinearCrossEntropyProblem, *rest: Any) -> Vocabulary:
    """Return the vocabulary of a pass of this process. The arguments are the fields of `Vocabulary`."""
    return (Vocabulary if problem.shard is None else VocabularyShard)(problem, *rest)


def gather_class_weights(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """Return the problem with the weights of all classes. If it has only the weights of this shard, they are gathered
    with one collective."""
    weight, shard = p.class_weight, p.shard
    if shard is None or weight is None or shard.process_group.size() == 1:
        return p
    if len(weight) == p.vocab_size:
        if shard.max_local_vocab_size < p.vocab_size:
            return p
        # One process has all classes: `weight` may be the weights of its shard, and empty shards gather them then.
        weight = weight[:0] if shard.is_empty else weight
    return replace(p, class_weight=shard.gather_full(weight))


def gather_shard_results(local_results: RowResults, width: int, shard: Shard) -> tuple[Tensor, Sequence[str]]:
    """Gather the results of rows over the classes of each process. One collective. `width`: classes of this process.

    Return them, (processes, names * rows + 1), and their names in order. The last number is the process's number of
    classes.
    """
    values = {
        name: value.to(local_results.offset.dtype)
        for name, value in local_results._asdict().items()
        if value is not None
    }
    return all_gather(
        torch.cat([*values.values(), local_results.offset.new_full((1,), width)]), shard.process_group
    ), list(values)


def unpack_shard_results(gathered: Tensor, names: Sequence[str], shard: Shard) -> RowResults:
    """Return the results of all processes, (processes, rows) each, from `gather_shard_results`. They are NaN if
    processes have other numbers of classes than `shard` expects. The host does not wait to check this."""
    values = dict(zip(names, gathered[:, :-1].view(len(gathered), len(names), -1).unbind(1), strict=True))
    differ = (gathered[:, -1] != shard.local_vocab_sizes(gathered)).any()
    values["offset"] = torch.where(differ, torch.nan, values["offset"])
    return RowResults(*(values.get(name) for name in RowResults._fields))  # type: ignore[arg-type]


def merge_shard_results(shards: RowResults, target: Tensor, class_weight: Tensor | None, shard: Shard) -> RowResults:
    """Return the results of all classes from the results of processes. `class_weight`: of all classes."""
    widths = shard.local_vocab_sizes(shards.offset)
    sums = widths if class_weight is None or shards.smooth is None else shard.sums_by_process(class_weight)
    owner = target.clamp(0, shard.vocab_size - 1) // shard.max_local_vocab_size
    return merge_shards(shards, widths[:, None], sums[:, None].to(widths.dtype), owner)
