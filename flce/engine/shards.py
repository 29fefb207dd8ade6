"""The problem of a pass in this process: all classes, or the shard of one process of a divided head. `passes.py` and
`per_token.py` build it.

Each process of a divided head has a shard of the classes, and all processes have the same tokens. A shard is a separate
problem (`ShardProblem.problem`), which schedules and kernels process like any other. If a token's target is in
another shard, a class of the process's own shard replaces it (the stand-in). Statistics of a shard are a few numbers
for each row. One collective gathers the statistics of all shards, and every process merges them into the same results
(`formulas.merge_shards`).

The gradient of the logits is then computed from the row gradient (factors, `TileCall.row_gradient`) and the normalizer
of all classes. If kernels have written exponentials, the factor of a row is the factor for the shard alone, times the
softmax factor and the probability of the shard's classes.
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
    DIVERGENCE,
    EXPONENTIAL_STATS,
    LOG_SUM,
    LOSS_GRADIENT_SLOTS,
    OFFSET,
    STUDENT,
    RowOutputs,
    TileCall,
    TileClasses,
    unsupported_by_fused_products,
)
from flce.backends.formulas import (
    RowStatistics,
    Targets,
    log_sum_exps,
    merge_divergences,
    merge_shards,
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
# Statistics of a shard that are gathered, by the names of `RowStatistics`.
GATHERED_STATS = ("logprob", "entropy", "argmax", "mean_logit", "log_sum_sq_prob")
# Fields of a LossSpec that change logits. The spec of a shard has the same values.
LOGIT_FIELDS = (
    "softcap", "logit_scale", "temperature", "candidates", "top_k", "row_temperature", "divergence", "beta",
    "teacher_softcap", "teacher_logit_scale",
)  # fmt: skip
# Fields that are used when results are merged, see `formulas.write_results` and `formulas.row_gradient`.
RESULT_FIELDS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "stats", "empty_loss")


def shard_spec(spec: LossSpec) -> LossSpec:
    """Return the spec of a shard: log-probabilities and the other statistics of the full spec. With label smoothing the
    loss of the shard is the sum of ``w[k] * (lse - z[k])`` over its classes, divided by their number. Otherwise the
    loss is not read. Raise NotImplementedError for a field that a divided head does not support."""
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
class LocalProblem:
    """Problem of a pass in this process, and the results of its rows. `full_*`, `out`, `scales`, `normalizer`: of all
    classes. `problem`, `selection`, `local_out`, `local_scales`: of the classes of this process. Here both are the same
    objects. `ShardProblem` has a part of the classes and overrides the methods that merge results of processes.

    Attributes:
        full_problem: the problem of all classes.
        full_selection: the selected tokens of the full problem.
        scales: see `LossScales`.
        arena: allocator.
        normalizer: (slots, rows).
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
    """True if this process has only some of the classes."""
    first_class = 0
    """The first class of this process."""

    def __post_init__(self) -> None:
        self.problem, self.selection = self.full_problem, self.full_selection
        """Schedules process this problem and its selected tokens."""
        self.local_out = self.out
        """Memory for statistics. None in backward."""
        self.local_scales, self.gradient_normalizer = self.scales, self.normalizer
        """`gradient_normalizer` is the normalizer of all classes, from which this process computes gradients. In an
        empty shard it makes every probability 0."""

    def merge_results(self, tokens: slice) -> None:
        """Merge the statistics of some rows of all processes into their results. One collective."""

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        """Merge the results of some rows, and replace the factors of their exponentials.

        Args:
            factors: (slots, rows), see `Backend.exponentials`. On entry `factors[0]` belongs to the derivative of the
                shard's own log-sum-exp. On return all factors are for the full loss.
        """

    def compute_row_gradient(self, tokens: slice) -> Tensor:
        """Compute `TileCall.row_gradient` of some rows from the normalizer of all classes."""
        call = self._call(tokens, out=None)
        factors = self.arena.new((LOSS_GRADIENT_SLOTS, tokens.stop - tokens.start), self.normalizer.dtype)
        self.scales.backend.row_gradient(call, factors)
        return factors

    def _call(self, tokens: slice, out: RowOutputs | None) -> TileCall:
        """Return the call of the full loss for results or gradients of some rows. Its tile has the classes of this
        process."""
        size = self.full_problem.local_vocab_size
        tile = TileClasses(self.first_class, size, self.full_problem.vocab_size, size)
        inputs, spec = self.full_selection.row_inputs(tokens, self.scales.for_gradient()), self.full_problem.spec
        inputs = inputs._replace(upstream=None if self.upstream is None else self.upstream[tokens])
        return TileCall(
            inputs, spec, tile, None if out is None else out.select_rows(tokens), self.normalizer[:, tokens]
        )

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        """Return `factor`, (rows,), with 0 for rows whose target is a class of another process."""
        return factor

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the local indices of classes; -1 for classes of other processes."""
        return ids

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """Sum `x` over all processes in place and return it. One collective."""
        return x

    def merge_divergences(self, rows: Tensor, kind: str) -> None:
        """Merge the statistics in `Teacher.rows` of all processes, in place. One collective."""

    def merge_top_k(self, top_k: TopK) -> TopK:
        """Return the largest logits of all classes from the largest of each process. Two collectives."""
        return top_k

    def start_dx_sum(self, term: int, dx: Tensor) -> None:
        """Start to sum dX of a term, of some tokens or of all, over all processes, in place."""

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        """Wait for the sums of dX of a term. If none was started, sum `dx`, of all tokens."""


class ShardProblem(LocalProblem):
    """Problem of a pass whose classes are divided over processes. This process has one shard."""

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
        self.local_scales = LossScales(self.problem, self.scales.backend, needs_scales=True)
        # An empty shard has a stand-in class. Its logit may be the largest of all, but its probability must be 0.
        self.gradient_normalizer = self.normalizer
        if shard.is_empty:
            self.gradient_normalizer = torch.full_like(self.normalizer, OFFSET_OF_EMPTY_SHARD)

    def _local_target(self) -> Tensor:
        """Return the targets as local classes, (N,). Targets in other shards are replaced by different local classes:
        the target terms of one class in dW are added one after the other, which is slow for many rows."""
        target, ignored = self.full_problem.target, self.full_problem.spec.ignore_index
        local = self.local_ids(target)
        stand_in = torch.arange(len(target), device=target.device) % self.full_problem.local_vocab_size
        return torch.where(target == ignored, LOCAL_IGNORE_INDEX, torch.where(local >= 0, local, stand_in))

    def merge_results(self, tokens: slice) -> None:
        if self._has_merge_kernel:
            self._merge_by_kernel(tokens, None)
        else:
            self._merge_results(tokens)

    def _merge_results(self, tokens: slice) -> tuple[TileCall, Targets, RowStatistics, RowStatistics, Tensor | None]:
        """Write the results of some rows. Return the call, its targets, the results, the results of each process, and
        the row gradient."""
        p, call = self.full_problem, self._call(tokens, self.out)
        if p.token_weight_grad:  # It is computed from losses without token weights.
            call = call._replace(inputs=call.inputs._replace(token_weight=None, upstream=call.inputs.token_weight))
        targets, (gathered, names) = Targets.from_call(call), self._gather_results(tokens)
        shards = unpack_shard_results(gathered, names, self.shard)
        results = merge_shard_results(shards, call.inputs.target, p.class_weight, self.shard)
        gradient = write_results(results, call, targets)
        return call, targets, results, shards, gradient

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
        local_results = RowStatistics(offset=offset, log_sum=local.normalizer[LOG_SUM], smooth=smooth, **stats)
        return gather_shard_results(
            local_results, 0 if self.shard.is_empty else self.full_problem.local_vocab_size, self.shard
        )

    def zero_remote_targets(self, factor: Tensor) -> Tensor:
        return factor.where(self.local_ids(self.full_selection.target) >= 0, 0.0)

    def local_ids(self, ids: Tensor) -> Tensor:
        start = self.shard.start
        is_local = (ids >= start) & (ids < min(start + self.full_problem.local_vocab_size, self.shard.vocab_size))
        return torch.where(is_local, ids - start, -1)

    def sum_over_processes(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def merge_divergences(self, rows: Tensor, kind: str) -> None:
        offsets = rows[:DIVERGENCE:STUDENT]
        if self.shard.is_empty:
            offsets.fill_(-torch.inf)
        rows.copy_(merge_divergences(all_gather(rows, self.group), kind))
        if self.shard.is_empty:  # The probability of the stand-in class is 0.
            offsets.fill_(OFFSET_OF_EMPTY_SHARD)

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
        call, targets, results, shards, gradient = self._merge_results(tokens)
        assert gradient is not None
        softmax_factor, target_factor, classes_factor = gradient
        shard_results = RowStatistics(*(None if t is None else t[self.shard.rank] for t in shards))  # type: ignore[arg-type]
        # The logarithm of the probability of this shard's classes.
        shard_logprob = log_sum_exps(shards, results.offset)[self.shard.rank] - results.log_sum
        # An empty shard, or a shard with only logits of -inf, has no probability. Its terms would be NaN.
        has_probability, inverse_temperature = shard_logprob != -torch.inf, call.inputs.inverse_temperature
        local_target_z = shard_results.offset + (shard_results.log_sum + shard_results.logprob)
        local_target_z = torch.where(has_probability, local_target_z, 0.0)
        jacobian = call.spec.jacobian(local_target_z[:, None], inverse_temperature)
        jacobian = jacobian[:, 0] if isinstance(jacobian, Tensor) else jacobian
        # softmax_factor * p - target_factor without cancellation: if a model is certain, p is nearly 1 and both factors
        # are nearly equal.
        grad_at_target = (softmax_factor - target_factor) + softmax_factor * torch.expm1(results.logprob)
        local_target_logprob = shard_results.logprob + shard_logprob
        local_target_probability = torch.where(has_probability, local_target_logprob.exp(), 0.0)
        # The gradient at the target or, if its class is remote, at the stand-in, which only has the softmax term.
        grad_at_local_target = where(targets.in_tile, grad_at_target, softmax_factor * local_target_probability)
        if call.spec.label_smoothing:
            weight = self.selection.row_inputs(tokens, None).target_weight(self.problem.local_vocab_size)
            smoothing_term = classes_factor if weight is None else classes_factor * weight
            grad_at_local_target = grad_at_local_target - smoothing_term
            factors[2] = classes_factor * call.spec.scale
        # Factor of the shard * softmax factor * probability of the shard.
        factors[0] = softmax_factor * torch.where(has_probability, factors[0] * shard_logprob.exp(), 0.0)
        factors[1] = grad_at_local_target * jacobian
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
        # With sequence parallelism the backward of `flce::gather_sequence` sums dX.
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._dx_sums.setdefault(term, []).append(dist.all_reduce(dx, group=self.group, async_op=True))

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        if term not in self._dx_sums:
            self.start_dx_sum(term, dx)
        for work in self._dx_sums.pop(term, ()):
            work.wait()


def build_local_problem(problem: LinearCrossEntropyProblem, *rest: Any) -> LocalProblem:
    """Return the problem of a pass in this process. The arguments are the fields of `LocalProblem`."""
    return (LocalProblem if problem.shard is None else ShardProblem)(problem, *rest)


def gather_class_weights(p: LinearCrossEntropyProblem) -> LinearCrossEntropyProblem:
    """Return the problem with the weights of all classes. If it has only the weights of this shard, they are gathered
    with one collective."""
    weight, shard = p.class_weight, p.shard
    if shard is None or weight is None or shard.process_group.size() == 1:
        return p
    if len(weight) == p.vocab_size:
        if shard.max_local_vocab_size < p.vocab_size:
            return p
        # The first process has all classes, so its weight of length V may be its slice or the weights of all classes.
        # If it is the slice, the other processes gave empty slices and call the collective. So all call it. An empty
        # shard sends nothing.
        weight = weight[:0] if shard.is_empty else weight
    return replace(p, class_weight=shard.gather_full(weight))


def gather_shard_results(local_results: RowStatistics, width: int, shard: Shard) -> tuple[Tensor, Sequence[str]]:
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


def unpack_shard_results(gathered: Tensor, names: Sequence[str], shard: Shard) -> RowStatistics:
    """Return the results of all processes, (processes, rows) each, from `gather_shard_results`. They are NaN if
    processes have other numbers of classes than `shard` expects. The host does not wait to check this."""
    values = dict(zip(names, gathered[:, :-1].view(len(gathered), len(names), -1).unbind(1), strict=True))
    differ = (gathered[:, -1] != shard.local_vocab_sizes(gathered)).any()
    values["offset"] = torch.where(differ, torch.nan, values["offset"])
    return RowStatistics(*(values.get(name) for name in RowStatistics._fields))  # type: ignore[arg-type]


def merge_shard_results(
    shards: RowStatistics, target: Tensor, class_weight: Tensor | None, shard: Shard
) -> RowStatistics:
    """Return the results of all classes from the results of processes. `class_weight`: of all classes."""
    widths = shard.local_vocab_sizes(shards.offset)
    sums = widths if class_weight is None or shards.smooth is None else shard.sums_by_process(class_weight)
    owner = target.clamp(0, shard.vocab_size - 1) // shard.max_local_vocab_size
    return merge_shards(shards, widths[:, None], sums[:, None].to(widths.dtype), owner)
