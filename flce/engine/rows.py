"""The rows of a pass: the tokens that it processes, all or those that are not ignored, and their results in this
process, of all classes or of the shard of one process of a divided head. `passes.py` and `per_token.py` build them.

Each process of a divided head has a shard of the classes, and all processes have the same tokens. Kernels process a
shard like a head of fewer classes: targets of other processes are out of range. The statistics of a shard are a few
numbers for each row. One collective gathers the statistics of all shards, and every process merges them
(`formulas.merge_shards`) before it ends the rows (`formulas.finish_row`).

The gradient of the logits is then computed from the row gradient and the normalizer of all classes. If kernels have
written exponentials, the factor of a row is the factor for the shard alone, times the softmax factor and the
probability of the shard's classes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce.backends.contract import (
    DIVERGENCE,
    LOSS_GRADIENT_SLOTS,
    NORMALIZER_SLOTS,
    SOFTMAX,
    STUDENT,
    TARGET,
    GradientCall,
    RowInputs,
    RowOutputs,
    RowProblem,
    StatisticsCall,
    TileClasses,
)
from flce.backends.formulas import (
    RowStatistics,
    Targets,
    is_class,
    log_sum_exps,
    merge_divergences,
    merge_shards,
    results_from_state,
    softmax_minus_target,
    write_results,
)
from flce.core.gemm import padded_cols, slice_columns
from flce.core.options import SkipIgnored
from flce.core.problem import LinearCrossEntropyProblem, LossSpec
from flce.core.shard import Shard, all_gather
from flce.engine import vectors
from flce.engine.vectors import Arena, LossScales, TopK

# A normalizer with which every probability is 0. It is finite, so that differences are not NaN.
OFFSET_OF_EMPTY_SHARD = 1e30
# With "auto", rows that are not ignored are gathered if at least this share is dropped. Below, gathering is slower.
MIN_IGNORED_SHARE = 1 / 16


def _has_nonfinite_ignored_rows(p: LinearCrossEntropyProblem) -> bool:
    """Return True if the gradient of a weight is NaN unless ignored rows are dropped: the gradient of an ignored row's
    logits is 0, and 0 times an infinity in the row's input is NaN. The host waits for the device."""
    ignored = p.target == p.spec.ignore_index
    inputs = [term.input for term, needed in zip(p.terms, p.needs.weights, strict=True) if needed]
    largest = (torch.linalg.vector_norm(x.detach(), torch.inf, dim=1) for x in inputs)
    return not all(bool(norm.isfinite().logical_or_(~ignored).all()) for norm in largest)


class DeviceInt:
    """Integer on the device, of which a copy to the host is started."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._on_host, self._copy_event = value, None
        if value.is_cuda:
            self._on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._on_host.copy_(value, non_blocking=True)
            self._copy_event = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> int:
        """Wait for the copy and return it."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return int(self._on_host)


@dataclass(frozen=True)
class Selection:
    """Selected rows: all N rows, or the rows that are not ignored.

    Attributes:
        index: (max_num_rows,) into the N rows; None: all rows.
        num_rows_on_device: the number of selected rows, if the device counts them. `index` then has all N rows, the
            selected rows first.
    """

    problem: RowProblem
    index: Tensor | None
    num_rows_on_device: DeviceInt | None = None

    @staticmethod
    def from_problem(p: LinearCrossEntropyProblem, skip_ignored: SkipIgnored, count_on_device: bool) -> Selection:
        if not skip_ignored or p.num_tokens == 0 or (skip_ignored == "auto" and _has_nonfinite_ignored_rows(p)):
            return Selection(p, None)
        valid = p.target != p.spec.ignore_index
        if count_on_device:
            numbers = torch.arange(p.num_tokens, device=p.device)
            num_valid_up_to = valid.cumsum(0)
            count = num_valid_up_to[-1].clone()  # A clone, because kernels are compiled for aligned addresses.
            position = torch.where(valid, num_valid_up_to - 1, count + numbers - num_valid_up_to)
            return Selection(p, torch.empty_like(position).scatter_(0, position, numbers), DeviceInt(count))
        # The host waits for the number of rows, and the device is idle. The first logits should be launched as early as
        # possible afterwards, so the vectors of selected rows, loss scales, dX and dW are computed at their first use.
        index = valid.nonzero()[:, 0]
        min_dropped = MIN_IGNORED_SHARE * valid.numel() if skip_ignored == "auto" else 1
        return Selection(p, index if valid.numel() - index.numel() >= min_dropped else None)

    @functools.cached_property
    def max_num_rows(self) -> int:
        """Upper bound of `num_rows`, for allocation."""
        return self.problem.num_tokens if self.index is None else self.index.numel()

    @property
    def num_rows_without_waiting(self) -> int:
        """`num_rows` if the host has read it, else `max_num_rows`."""
        is_known = self.num_rows_on_device is None or "num_rows" in vars(self)
        return self.num_rows if is_known else self.max_num_rows

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of selected rows. If the device counts them, the host waits for the number."""
        return self.max_num_rows if self.num_rows_on_device is None else self.num_rows_on_device.wait()

    @functools.cached_property
    def target(self) -> Tensor:
        """(rows,) targets of the selected rows."""
        return self.take(self.problem.target)

    @functools.cached_property
    def token_weight(self) -> Tensor | None:
        """(rows,) token weights of the selected rows."""
        token_weight = self.problem.token_weight
        return None if token_weight is None else self.take(token_weight)

    @functools.cached_property
    def inverse_temperature(self) -> Tensor | None:
        """(rows,) 1 / temperature of the selected rows."""
        inverse = self.problem.inverse_temperature
        return None if inverse is None else self.take(inverse)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the selected rows of `x`, whose dimension `dim` has N rows."""
        return x if self.index is None else x.index_select(dim, self.index)

    def row_inputs(self, tokens: slice, scales: Tensor | None, weighted: bool = True) -> RowInputs:
        """Return the inputs of some of the selected rows. `weighted`: with token weights, if there are any."""
        p = self.problem
        token_weight = self.token_weight if weighted and p.token_weight is not None else None
        factor = self.inverse_temperature if p.inverse_temperature is not None else None
        token_weight, factor = [None if x is None else slice_columns(x, tokens) for x in (token_weight, factor)]
        target = slice_columns(self.target, tokens)
        return RowInputs(target, token_weight, p.class_weight, p.linear_bias, scales, factor)

    def scatter_outputs(self, out: RowOutputs) -> RowOutputs:
        """Return results of all N rows from results of the selected rows. Other rows get the results of ignored
        rows."""
        if self.index is None:
            return out
        return out.map(lambda values: self.scatter(values[..., : self.num_rows], -1))

    def scatter(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values of all N rows along `dim` from values of the selected rows. Other rows get 0, or -1 for
        indices."""
        if self.index is None:
            return values
        shape, index = list(values.shape), self.index[: self.num_rows]
        shape[dim] = self.problem.num_tokens
        fill_value = 0 if values.is_floating_point() else -1
        return values.new_full(shape, fill_value).index_copy_(dim, index, values)


@dataclass
class Rows:
    """Rows of a pass in this process, and their results. `ShardRows` has a shard of the classes: it overrides the
    methods that merge statistics of processes.

    Attributes:
        selection: the selected tokens.
        scales: see `LossScales`.
        arena: allocator.
        normalizer: (slots, rows), of all classes.
        out: memory for the results of these rows. None in backward.
        upstream: gradient of each row's loss, (rows,), or of the loss, (); None: `scales` include it.
    """

    selection: Selection
    scales: LossScales
    arena: Arena
    normalizer: Tensor
    out: RowOutputs | None = None
    upstream: Tensor | None = None

    is_shard = False
    """True if this process has only some of the classes."""
    first_class = 0
    """The first class of this process."""

    def __post_init__(self) -> None:
        self.problem: RowProblem = self.selection.problem
        self.spec = self.problem.spec
        """Options of the tiles of this process."""
        self.class_weight = self.problem.class_weight
        """Weights of the classes of this process."""
        self.gradient_normalizer = self.normalizer
        """The normalizer of all classes, from which this process computes gradients. In an empty shard it makes every
        probability 0."""

    @property
    def target(self) -> Tensor:
        """(rows,) targets, as classes of this process."""
        return self.selection.target

    def inputs(self, tokens: slice, scaled: bool) -> RowInputs:
        """Return the inputs of `finish_row` for some rows. If the gradient of token weights is needed, losses are
        unweighted, and token weights reach the gradient as upstream gradients. `scaled`: with loss scales."""
        inputs = self.selection.row_inputs(tokens, self.scales.for_gradient if scaled else None)
        if self.upstream is not None:
            return inputs._replace(upstream=self.upstream[tokens] if self.upstream.dim() else self.upstream)
        if self.problem.needs_token_weight and self.out is not None:
            return inputs._replace(token_weight=None, upstream=inputs.token_weight)
        return inputs

    def tile_inputs(self, tokens: slice) -> RowInputs:
        """Return the inputs of tiles of some rows whose losses or gradients do not follow from this process alone."""
        inputs = self.selection.row_inputs(tokens, None, weighted=False)
        return inputs._replace(target=slice_columns(self.target, tokens), class_weight=self.class_weight)

    def tile_classes(self, classes: slice) -> TileClasses:
        vocab_size, size = self.problem.local_vocab_size, classes.stop - classes.start
        return TileClasses(classes.start, size, vocab_size, padded_cols(size), is_shard=self.is_shard)

    def statistics_call(self, tokens: slice, scaled: bool = True) -> StatisticsCall:
        """Return the call that writes statistics of some rows for all classes of this process. `scaled`: with loss
        scales."""
        assert self.out is not None
        tile = self.tile_classes(slice(0, self.problem.local_vocab_size))
        return StatisticsCall(self.inputs(tokens, scaled), self.spec, tile, self.out.select_rows(tokens))

    def keep_state(self, tokens: slice, state: Tensor | None) -> None:
        """Keep the statistics of some rows of a shard until they are merged. state: (STATE_SLOTS, rows)."""

    def merge_results(self, tokens: slice) -> Tensor | None:
        """Merge the statistics of some rows of all processes and end the rows. One collective. Return the row gradient
        if rows were merged and have loss scales."""
        return None

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        """Merge the results of some rows, and replace the factors of their exponentials.

        Args:
            factors: (slots, rows), see `Backend.exponentials`, of the head. On entry `factors[SOFTMAX]` times the
                exponentials is the derivative of the shard's own log-sum-exp, and `factors[TARGET]` is dz/da of the
                target.
        """

    def compute_row_gradient(self, tokens: slice) -> Tensor:
        """Compute `GradientCall.row_gradient` of some rows from the normalizer of all classes."""
        factors = self.arena.new((LOSS_GRADIENT_SLOTS, tokens.stop - tokens.start), self.normalizer.dtype)
        size = self.problem.vocab_size
        tile, normalizer = TileClasses(0, size, size, size), slice_columns(self.normalizer, tokens)
        call = GradientCall(self.inputs(tokens, True), self.problem.spec, tile, normalizer, factors)
        self.scales.backend.row_gradient(call)
        return factors

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the local indices of classes; -1 for classes of other processes."""
        return ids

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """Sum `x` over all processes in place and return it. One collective."""
        return x

    def max_over_processes(self, x: Tensor) -> Tensor:
        """Replace `x` by its maximum over all processes and return it. One collective. An empty shard does not
        count."""
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


class ShardRows(Rows):
    """Rows of a pass whose classes are divided over processes. This process has one shard."""

    is_shard = True

    def __post_init__(self) -> None:
        super().__post_init__()
        p, shard = self.problem, self.problem.shard
        assert shard is not None
        self.shard: Shard = shard
        self.group: Any = shard.process_group
        self.first_class = shard.start
        self._dx_sums: dict[int, list[Any]] = {}
        # The ignored target is shifted as all targets are, in 64 bits.
        shifted = (p.spec.ignore_index - shard.start + 2**63) % 2**64 - 2**63
        self.spec = replace(p.spec, ignore_index=shifted)
        if p.class_weight is not None:
            own = p.class_weight[shard.start : shard.start + p.local_vocab_size]
            self.class_weight = None if shard.is_empty else own
        self._names = RowStatistics.requested_names(p.spec)
        if self.out is not None:
            shape = statistics_shape(p.spec, self.selection.max_num_rows)
            self._statistics = self.arena.new(shape, self.normalizer.dtype)
        # An empty shard has one class of zeros. Its logit may be the largest of all, but its probability must be 0.
        if shard.is_empty:
            self.gradient_normalizer = torch.full_like(self.normalizer, OFFSET_OF_EMPTY_SHARD)

    @functools.cached_property
    def target(self) -> Tensor:
        return self.selection.target - self.shard.start

    def _own_statistics(self, tokens: slice) -> RowStatistics:
        """Return memory of the statistics of some rows over the classes of this process."""
        memory = dict(zip(self._names, slice_columns(self._statistics, tokens), strict=True))
        return RowStatistics(*(memory.get(name) for name in RowStatistics._fields))  # type: ignore[arg-type]

    def statistics_call(self, tokens: slice, scaled: bool = True) -> StatisticsCall:
        own = self._own_statistics(tokens)._asdict()
        normalizer = slice_columns(self._statistics[:NORMALIZER_SLOTS], tokens)
        out = RowOutputs(*(own.get(name) for name in RowOutputs._fields))._replace(  # type: ignore[arg-type]
            loss=normalizer[0], normalizer=normalizer, logprob=None
        )
        tile = self.tile_classes(slice(0, self.problem.local_vocab_size))
        return StatisticsCall(self.tile_inputs(tokens), self.spec, tile, out)

    def keep_state(self, tokens: slice, state: Tensor | None) -> None:
        if state is None:  # The kernels of fused products have written the statistics.
            return
        cols, weight = self.problem.local_vocab_size, self.class_weight
        weight_sum = cols if weight is None else weight.sum(dtype=state.dtype)
        results = results_from_state(state, self.spec, cols, weight_sum)
        for memory, values in zip(self._own_statistics(tokens), results, strict=True):
            if memory is not None and values is not None:
                memory.copy_(values)

    def merge_results(self, tokens: slice) -> Tensor | None:
        return self._merge_results(tokens)[2]

    def _merge_results(self, tokens: slice) -> tuple[RowStatistics, RowStatistics, Tensor | None]:
        """End some rows. Return the statistics of each process, of all classes, and the row gradient."""
        p, shard, inputs = self.problem, self.shard, self.inputs(tokens, self.scales.needs_scales)
        own, width = self._own_statistics(tokens), p.local_vocab_size
        if shard.is_empty:
            own, width = own._replace(offset=torch.full_like(own.offset, -torch.inf)), 0
        shards = gather_shard_results(own, width, shard)
        if shards.argmax is not None:  # An index below 2^24 is exact in float32.
            starts = torch.arange(len(shards.argmax), device=shards.argmax.device) * shard.max_local_vocab_size
            shards = shards._replace(argmax=shards.argmax + starts[:, None])
        widths = shard.local_vocab_sizes(shards.offset)
        sums = widths if p.class_weight is None or shards.smooth is None else shard.sums_by_process(p.class_weight)
        owner = inputs.target.clamp(0, p.vocab_size - 1) // shard.max_local_vocab_size
        merged = merge_shards(shards, widths[:, None], sums[:, None].to(widths.dtype), owner)
        assert self.out is not None
        tile = TileClasses(0, p.vocab_size, p.vocab_size, p.vocab_size)
        call = StatisticsCall(inputs, p.spec, tile, self.out.select_rows(tokens))
        return shards, merged, write_results(merged, call, Targets.from_call(call))

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        shards, merged, row_gradient = self._merge_results(tokens)
        assert row_gradient is not None
        target = slice_columns(self.target, tokens)
        # The logarithm of the probability of this shard's classes. An empty shard, or a shard with only logits of -inf,
        # has no probability. Its terms would be NaN.
        shard_logprob = log_sum_exps(shards, merged.offset)[self.shard.rank] - merged.log_sum
        of_shard = torch.where(shard_logprob != -torch.inf, factors[SOFTMAX] * shard_logprob.exp(), 0.0)
        at_target = softmax_minus_target(row_gradient[SOFTMAX], row_gradient[TARGET], merged.logprob) * factors[TARGET]
        factors[SOFTMAX] = row_gradient[SOFTMAX] * of_shard
        factors[TARGET] = torch.where(is_class(target, self.problem.local_vocab_size), at_target, 0.0)
        factors.masked_fill_(target == self.spec.ignore_index, 0.0)

    def local_ids(self, ids: Tensor) -> Tensor:
        start = self.shard.start
        is_local = (ids >= start) & (ids < min(start + self.problem.local_vocab_size, self.shard.vocab_size))
        return torch.where(is_local, ids - start, -1)

    def sum_over_processes(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def max_over_processes(self, x: Tensor) -> Tensor:
        if self.shard.is_empty:
            x.fill_(-torch.inf)
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def merge_divergences(self, rows: Tensor, kind: str) -> None:
        offsets = rows[:DIVERGENCE:STUDENT]
        if self.shard.is_empty:
            offsets.fill_(-torch.inf)
        rows.copy_(merge_divergences(all_gather(rows, self.group), kind))
        if self.shard.is_empty:  # The probability of its class is 0.
            offsets.fill_(OFFSET_OF_EMPTY_SHARD)

    def merge_top_k(self, top_k: TopK) -> TopK:
        k = top_k.ids.shape[1]
        # A shard with fewer than k classes has as many results as classes. The others must lose the comparison.
        num_found = 0 if self.shard.is_empty else min(k, self.problem.local_vocab_size)
        top_k.logits[:, num_found:], top_k.ids[:, num_found:] = -torch.inf if top_k.largest else torch.inf, 0
        logits, ids = (
            all_gather(x, self.group).movedim(0, 1).flatten(1) for x in (top_k.logits, top_k.ids + self.shard.start)
        )
        best, position = logits.topk(k, largest=top_k.largest)
        return replace(top_k, logits=best, ids=ids.gather(1, position))

    def start_dx_sum(self, term: int, dx: Tensor) -> None:
        # With sequence parallelism the backward of `flce::gather_sequence` sums dX.
        if self.group.size() > 1 and not self.shard.sequence_parallel:
            self._dx_sums.setdefault(term, []).append(dist.all_reduce(dx, group=self.group, async_op=True))

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        if term not in self._dx_sums:
            self.start_dx_sum(term, dx)
        for work in self._dx_sums.pop(term, ()):
            work.wait()


def statistics_shape(spec: LossSpec, rows: int) -> tuple[int, int]:
    """Return the shape of the memory of statistics. Each begins at an aligned address, for which kernels are built."""
    return len(RowStatistics.requested_names(spec)), padded_cols(rows)


def gather_class_weights(p: LinearCrossEntropyProblem, shard: Shard) -> LinearCrossEntropyProblem:
    """Return the problem with the weights of all classes. If it has only the weights of this shard, they are gathered
    with one collective."""
    weight = p.class_weight
    if weight is None or shard.process_group.size() == 1:
        return p
    if len(weight) == p.vocab_size:
        if shard.max_local_vocab_size < p.vocab_size:
            return p
        # The first process has all classes, so its weight of length V may be its shard or the weights of all classes.
        # If it is the shard, the other processes gave empty shards and call the collective. So all call it. An empty
        # shard sends nothing.
        weight = weight[:0] if shard.is_empty else weight
    return replace(p, class_weight=shard.gather_full(weight))


def gather_shard_results(own: RowStatistics, width: int, shard: Shard) -> RowStatistics:
    """Return the results of rows over the classes of each process, (processes, rows) each. One collective.

    Processes also exchange their numbers of classes. If a number differs from the number that `shard` implies, the
    results are NaN in all processes or, on a CPU and with ``FLCE_DEBUG=1``, a ValueError is raised. `own`, `width`:
    results and number of classes of this process."""
    named = {name: value.to(own.offset.dtype) for name, value in own._asdict().items() if value is not None}
    gathered = all_gather(torch.cat([*named.values(), own.offset.new_full((1,), width)]), shard.process_group)
    values = dict(zip(named, gathered[:, :-1].view(len(gathered), len(named), -1).unbind(1), strict=True))
    widths, expected = gathered[:, -1], shard.local_vocab_sizes(gathered)
    if vectors.can_read_values(widths.device) and not torch.equal(widths, expected):
        raise ValueError(
            f"the processes of the group have logits of {widths.int().tolist()} classes, expected "
            f"{expected.int().tolist()}: give vocab_size where torch.chunk divides them unevenly"
        )
    values["offset"] = torch.where((widths != expected).any(), torch.nan, values["offset"])
    return RowStatistics(*(values.get(name) for name in RowStatistics._fields))  # type: ignore[arg-type]
