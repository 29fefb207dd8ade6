"""Dry runs: memory, FLOPs and time of a plan. The engine runs on meta tensors, and an arena and a backend count.

`ChunkPlan` calls `count_costs`. The default plan depends on `rates`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flce.backends import contract, eager, sampling
from flce.backends.contract import GradientCall, RowOutputs, StatisticsCall
from flce.backends.formulas import RowStatistics
from flce.core import gemm, private
from flce.core.devices import KNOWN_KINDS, DeviceRecord
from flce.core.problem import LinearCrossEntropyProblem, LinearTerm, LogprobSpec, accumulation_dtype
from flce.engine import per_token
from flce.engine.case import Case, ceil_div
from flce.engine.pass_context import PassContext
from flce.engine.passes import Plan, Runtime, backward, forward
from flce.engine.rows import Rows, Selection, statistics_shape
from flce.engine.schedules.sampled import Sampled
from flce.engine.vectors import Arena

# About the number of borrowed blocks that a dry run executes.
BLOCK_SAMPLES = 6
# About the number of sampled entries of a token, for the estimated time.
TYPICAL_ENTRIES = 128
# Vectors of a number for each process and token that are live at once while results are merged, in addition to the
# gathered numbers: if three numbers are gathered for each token, and if more are gathered.
MERGE_VECTORS, MERGE_VECTORS_WITH_STATISTICS = 4, 7


class PlanCosts(NamedTuple):
    """Costs of a plan, see `ChunkPlan`."""

    workspace_bytes: int
    flops: int
    seconds: float


def count_costs(plan: Plan) -> PlanCosts:
    """Return the costs of a plan, counted by a dry run of its passes on tensors without values."""
    c, arena = plan.case, CountingArena()
    meter = CountingBackend(c, arena)
    with private.disable_current_modes(), private.disable_torch_function(), torch.no_grad():
        grads = dry_run_passes(plan, Runtime(cast(Any, meter), arena, CountingContext))
    if grads and not plan.deferred and c.backend == "torch" and c.dtype.itemsize < 4:
        arena.count_temporary(eager.SCALING_BYTES)
    workspace = arena.peak_bytes - c.returned_bytes
    if isinstance(plan.schedule, Sampled):
        workspace = max(workspace, count_costs(replace(plan, schedule=plan.schedule.fallback)).workspace_bytes)
    return PlanCosts(workspace, round(meter.flops), meter.seconds)


def dry_run_passes(plan: Plan, runtime: Runtime) -> list[Tensor]:
    """Run forward and backward of a call as `ops.linear_cross_entropy` does, on operands without values.

    Return the gradients, allocated from the arena."""

    c, arena = plan.case, runtime.arena
    n, accum = c.num_tokens, accumulation_dtype(c.dtype)

    def new_operand(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=arena.device)

    # Memory of a call's vectors: the target that was shifted or cast to int64, and a mask. If rows are gathered, also
    # their indices, their targets, and the results scattered to all rows.
    target, _mask = arena.new((n,), torch.int64), arena.new((n,), torch.bool)
    terms = tuple(LinearTerm(new_operand(n, size), new_operand(c.vocab_size, size)) for size in c.hidden_sizes)
    problem = LinearCrossEntropyProblem(terms, target, None, None, None, None, c.spec, c.needs, c.options)
    if c.adds_dw:  # Adding to gradients of another dtype than the weights needs less memory.
        targets = {k: new_operand(c.vocab_size, size) for k, size in enumerate(c.hidden_sizes) if c.needs.weights[k]}
        problem = replace(problem, dw_targets=targets)
    if c.teacher is not None:
        sizes, dtype = c.teacher
        pairs = [[new_operand(rows, size, dtype=dtype) for rows in (n, c.vocab_size)] for size in sizes]
        problem = replace(problem, teacher_terms=tuple(LinearTerm(*pair) for pair in pairs))
    if isinstance(c.spec, LogprobSpec) and c.spec.candidates:
        problem = replace(problem, candidates=arena.new((n, c.spec.candidates), torch.int64))
    index = arena.new((n,), torch.int64) if c.skip_ignored else None
    selection = AllRows(problem, index, arena=arena, live_vectors=[])
    if index is not None:
        selection.live_vectors.extend((selection.target, RowOutputs.allocate(c.spec, accum, (n,), arena.new)))
    runtime = runtime._replace(select=lambda *_: selection)
    if isinstance(c.spec, LogprobSpec):
        return _dry_run_token_passes(problem, plan, runtime)
    result = forward(problem, plan, plan.deferred, runtime)
    if plan.deferred:
        upstream = new_operand(*([n] if c.spec.reduction == "none" else []), dtype=accum)
        return backward(problem, plan, result.outputs.normalizer, upstream, runtime, result.samples)
    grads = result.grads
    del result
    selection.live_vectors.clear()
    # Backward multiplies gradients by the upstream gradient, in place or, if they are cast or unscaled, in new memory.
    has_gradient_scale = plan.dtypes.logits_grad == torch.float16
    scaled = [g for g in grads if has_gradient_scale or (g.dim() == 2 and g.dtype != c.dtype)]
    return [*grads, *(arena.new(g.shape, c.dtype if g.dim() == 2 else g.dtype) for g in scaled)]


def _dry_run_token_passes(problem: LinearCrossEntropyProblem, plan: Plan, runtime: Runtime) -> list[Tensor]:
    """Run forward and, if gradients are needed, backward. A call runs forward by the plan without gradients, which
    takes as long."""
    n, arena, accum = problem.num_tokens, runtime.arena, problem.accum
    samples = per_token.forward(problem, plan, runtime).samples
    if not problem.needs_gradients:
        return []

    def vector() -> Tensor:
        return arena.new((n,), accum)

    candidates = problem.candidates
    candidate_values = None if candidates is None else arena.new(candidates.shape, accum)
    normalizer = arena.new((contract.NORMALIZER_SLOTS, n), accum)
    teacher_rows = arena.new((contract.DIVERGENCE_SLOTS, n), accum) if problem.teacher_terms else None
    saved = per_token.SavedRows(normalizer, vector(), candidate_values, teacher_rows, samples)
    divergence = None if teacher_rows is None else vector()
    upstream = per_token.UpstreamGradients(vector(), vector(), vector(), candidate_values, divergence)
    return per_token.backward(problem, plan, saved, upstream, runtime)


@dataclass(frozen=True, kw_only=True)
class AllRows(Selection):
    """Selection of all rows, gathered or not. Their vectors stay allocated until the end of both passes."""

    arena: Arena
    live_vectors: list[Any]

    def scatter_outputs(self, out: RowOutputs) -> RowOutputs:
        self.live_vectors.append(out)
        return out

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        # Gathered normalizers are part of `live_vectors`.
        return x if self.index is None or dim > 0 else self.arena.new(x.shape, x.dtype)


class CountingArena(Arena):
    """Arena that counts live bytes. A storage is live until its last view is freed."""

    def __init__(self, device: torch.device | str = "meta") -> None:
        super().__init__(device)
        self.live_bytes = self.peak_bytes = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
        tensor = super().new(shape, dtype, zero)
        storage = tensor.untyped_storage()
        self.live_bytes += storage.nbytes()
        self.count_temporary(0)
        weakref.finalize(storage, self._count_freed, storage.nbytes()).atexit = False
        return tensor

    def count_temporary(self, size: int) -> None:
        """Count temporary memory that one product or one operation of the backend allocates and frees."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)

    def _count_freed(self, size: int) -> None:
        self.live_bytes -= size


class CountingBackend:
    """Backend of a dry run: it adds up the time and the FLOPs of products and passes, and counts their temporary
    memory."""

    def __init__(self, c: Case, arena: CountingArena) -> None:
        self.case, self.seconds, self.flops, self.launches = c, 0.0, 0.0, 0.0
        self.add_scratch, self.rates = arena.count_temporary, rates(c.device)

    def add_product(self, m: int, n: int, k: int) -> None:
        self.flops += 2 * m * n * k
        self.launches += 1
        self.seconds += product_seconds(self.case.device, m, n, k, self.case.dtype.itemsize)

    def add_pass(self, *tensors: Tensor, launches: int = 1) -> None:
        """Count a pass that reads or writes each of these tensors once."""
        self.seconds += sum(t.numel() * t.element_size() for t in tensors) / self.rates.bandwidth
        self.seconds += launches * self.rates.launch_seconds
        self.launches += launches

    def add_torch_scratch(self, size: int) -> None:
        """Count temporary memory that only the PyTorch backend allocates."""
        if self.case.backend == "torch":
            self.add_scratch(size)

    def repeat_tiles(self, items: Iterable[tuple[slice, float]]) -> Iterator[slice]:
        """Yield the slices of `items`, and count the costs of each `times` times. A slice takes at least the seconds in
        which the host launches its kernels.

        Args:
            items: (slice, times).
        """
        for item, times in items:
            seconds, flops, launches = self.seconds, self.flops, self.launches
            yield item
            host_seconds = (self.launches - launches) * self.rates.host_seconds_per_launch
            self.seconds = seconds + times * max(self.seconds - seconds, host_seconds)
            self.flops = flops + times * (self.flops - flops)
            self.launches = launches + times * (self.launches - launches)

    # ----------------------------------------------------------------------------- the methods of `Backend`

    def _pass(self, tile: Tensor, grad: Tensor | None = None, keep_logits: bool = False) -> None:
        self.add_pass(tile, *(() if grad is None else (grad,)))
        self.add_torch_scratch(eager.temporary_bytes(self.case.spec, tile, self.case.device_type, grad, keep_logits))

    def loss_scales(self, p: LinearCrossEntropyProblem) -> None:
        """Return None. The three numbers are not counted."""

    def reduce(self, p: LinearCrossEntropyProblem, rows: RowOutputs, scales: None) -> tuple[Tensor | None, ...]:
        return rows.loss, rows.z_loss, None

    def row_gradient(self, call: GradientCall) -> None:
        self.add_pass(call.row_gradient)

    def statistics(self, logits: Tensor, call: StatisticsCall, *args: Any) -> None:
        self._pass(logits, keep_logits=call.tile.keep_logits)

    def gradient(self, logits: Tensor, grad: Tensor, *args: Any) -> None:
        self._pass(logits, grad)

    loss_and_gradient = exponentials = gradient

    def divergence(self, logits: Tensor, teacher_logits: Tensor, call: Any, teacher: Any, grad: Any = None) -> None:
        self.add_pass(logits, teacher_logits, *([] if grad is None else [grad]))
        sizes = (eager.divergence_bytes(t, self.case.device_type) for t in (logits, teacher_logits))
        self.add_torch_scratch(max(sizes))

    def fused_statistics(self, x: Tensor, weight: Tensor, *args: Any) -> None:
        self.add_product(len(x), len(weight), x.shape[1])
        self.add_pass(launches=1)
        self.add_scratch(
            contract.fused_product_scratch_bytes(len(x), len(weight), contract.num_partial_statistics(self.case.spec))
        )

    def fused_gradient(self, x: Tensor, weight: Tensor, *args: Any) -> None:
        self.add_product(len(x), len(weight), x.shape[1])
        self.add_pass(launches=1)

    def fused_exponentials(self, x: Tensor, weight: Tensor, exps: Sequence[Tensor], *args: Any) -> None:
        for tile in exps:
            self.add_product(len(x), tile.shape[1], x.shape[1])
        self.add_pass(launches=10)
        self.add_scratch(contract.fused_product_scratch_bytes(len(x), len(weight), 1))

    def row_products(self, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> None:
        # Each id reads a row of the weight.
        self.seconds += ids.numel() * weight.shape[1] * weight.element_size() / self.rates.bandwidth
        self.add_pass(x)
        self._add_entry_scratch(ids, 2 * x.shape[1])  # rows of the weight, and a copy in another dtype

    def sum_equal(self, ids: Tensor, values: Tensor, out: Tensor) -> None:
        self.add_pass(ids, values, out)
        self._add_entry_scratch(ids, ids.shape[1])

    def _add_entry_scratch(self, ids: Tensor, numbers: int) -> None:
        """Count the temporary memory of `numbers` numbers for each id."""
        self._add_slab(len(ids), ids.shape[1] * numbers * accumulation_dtype(self.case.dtype).itemsize)

    def write_entries(self, tile: Tensor, ids: Tensor, values: Tensor, start: int) -> None:
        self.add_pass(ids, values)

    def combine_rows(self, x: Tensor, out: Tensor, *args: Any) -> None:
        self.add_pass(x, out)

    def weight_gradient(self, grad: Tensor, exps: Sequence[Tensor], scaled: Tensor, *args: Any) -> None:
        for tile in exps:
            self.add_product(tile.shape[1], grad.shape[1], len(tile))
        self.add_pass(launches=6)
        self.add_scratch(self.case.num_tokens * contract.SORT_ROW_BYTES + len(grad) * contract.SLOT_BYTES)

    def unscaled_weight_gradient(self, grad: Tensor, dlogits: Tensor, *args: Any) -> None:
        self.add_product(len(grad), grad.shape[1], len(dlogits))

    def add_target_terms(self, grads: Sequence[Tensor], *args: Any) -> None:
        self.add_pass(launches=4)
        self.add_scratch(self.case.num_tokens * contract.SORT_ROW_BYTES)

    def mark_entries(self, logits: Tensor, call: Any, marks: contract.Marks) -> None:
        self._pass(logits, keep_logits=True)
        self._add_slab(len(logits), sampling.MARK_BYTES * logits.shape[1])

    def list_entries(self, words: Tensor, *args: Any) -> None:
        self.add_pass(words, words, launches=3)
        self._add_slab(len(words), sampling.LIST_BYTES * contract.WORD_CLASSES * words.shape[1])

    def _add_slab(self, rows: int, row_bytes: int) -> None:
        """Count the temporary memory of a slab of the PyTorch backend."""
        self.add_torch_scratch(row_bytes * eager.slab_rows(self.case.device_type, rows, row_bytes, 1))

    def sampled_gradient(
        self, x: Tensor, weight: Tensor, call: Any, samples: Any, exact: Any, out: Any, dense: Tensor | None, *args: Any
    ) -> None:  # fmt: skip
        self._gather(len(x), weight)
        self.add_pass(x, *([] if dense is None else [dense, dense]))

    def sampled_weight_gradient(self, x: Tensor, *args: Any) -> None:
        dense, grad = args[4:6]
        self._gather(len(x), x)
        self.add_pass(grad)
        self.add_torch_scratch(sampling.temporary_bytes(grad.shape[1], len(grad) + len(dense)))

    def _gather(self, rows: int, table: Tensor) -> None:
        """Count the rows of a table that the entries of some tokens read."""
        size = rows * TYPICAL_ENTRIES * table.shape[1] * table.element_size()
        self.seconds += size / self.rates.bandwidth
        self.add_pass(launches=1)
        self.add_torch_scratch(sampling.temporary_bytes(table.shape[1]))


@dataclass
class CountingShard(Rows):
    """Rows of a process of a divided head in a dry run: count the memory of `ShardRows`."""

    num_processes: int = field(kw_only=True)

    is_shard = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, dtype = self.selection.num_rows, self.normalizer.dtype
        # Targets as local classes, and statistics of the shard in forward.
        if self.out is not None:
            self._statistics = self.arena.new(statistics_shape(self.spec, rows), dtype)
        self._targets = self.arena.new((rows,), torch.int64)

    def merge_results(self, tokens: slice) -> None:
        rows, processes = tokens.stop - tokens.start, self.num_processes
        numbers, itemsize = len(RowStatistics.requested_names(self.spec)), self.normalizer.dtype.itemsize
        merging = (MERGE_VECTORS if numbers == 3 else MERGE_VECTORS_WITH_STATISTICS) * processes
        gathered_bytes = processes * (numbers * rows + 1) * itemsize
        cast(CountingArena, self.arena).count_temporary(gathered_bytes + (numbers + merging) * rows * itemsize)

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        self.merge_results(tokens)

    def merge_divergences(self, rows: Tensor, kind: str) -> None:
        cast(CountingArena, self.arena).count_temporary(4 * self.num_processes * rows.nbytes)


class CountingContext(PassContext):
    """Context of a dry run. It counts products and passes. Its loops are shortened, see `_sample_equal_slices`."""

    def __post_init__(self) -> None:
        self._meter, c = cast(CountingBackend, self.backend), self.rows
        if self._meter.case.num_processes is not None:
            fields = c.selection, c.scales, c.arena, c.normalizer, c.out, c.upstream
            self.rows = CountingShard(*fields, num_processes=self._meter.case.num_processes)
        super().__post_init__()

    def chunks(self, rows: int) -> Iterator[slice]:
        return self._meter.repeat_tiles(_sample_equal_slices(0, self.selection.num_rows, rows))

    def borrowed_blocks(self, blocks: Sequence[slice]) -> Iterator[slice]:
        return self._meter.repeat_tiles(_sample_blocks(blocks))

    def split_range(self, range_: slice, step: int) -> Iterator[slice]:
        return self._meter.repeat_tiles(_sample_equal_slices(range_.start, range_.stop, step))

    def unscale_and_round(self, x: Tensor, out: Tensor, add: bool = False) -> None:
        self._meter.add_pass(x, out, *[out] * add)
        if add and self._meter.case.device_type == "cpu":  # copies in the dtype of the sum
            self._meter.add_scratch(2 * x.numel() * x.element_size())

    def take_rows(self, x: Tensor, out: Tensor, tokens: slice) -> None:
        self._meter.add_pass(out, out)

    def scatter_rows(self, x: Tensor, out: Tensor, tokens: slice, add: bool = False) -> None:
        self._meter.add_pass(x, *[x] * (1 + add))

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        self._meter.add_pass(x)

    def count_entries(self) -> Callable[[], int | None]:
        return lambda: contract.ENTRIES_PER_TOKEN * self.problem.num_tokens

    def draw_seeds(self, bounds: Tensor, tokens: slice, seeds: Tensor) -> None:
        self._meter.add_pass(launches=12)
        self._meter.add_scratch(len(bounds) * sampling.SEED_BYTES)

    def write_largest(self, x: Tensor, out: Tensor) -> None:
        self._meter.add_pass(*[x] * 8, launches=12)
        # And targets, whose numbers are read and written.
        self._meter.add_scratch(len(x) * sampling.CHOICE_BYTES + self.selection.num_rows * 16)

    def sort_entries(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        self._meter.add_pass(*[classes] * 8, launches=10)
        self._meter.add_scratch(contract.sort_scratch_bytes(len(classes), self.vocab_size))
        return self.arena.new(classes.shape, classes.dtype), self.arena.new(classes.shape, torch.int64)

    def collect_top_k(self, logits: Tensor, tokens: slice, classes: slice) -> None:
        if self.top_k is not None:
            self._meter.add_pass(logits, launches=5)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        (m, k), n = a.shape, b.shape[1]
        self._meter.add_product(m, n, k)
        if accumulate or out.element_size() > a.element_size():
            self._meter.add_pass(*[out] * (1 + accumulate), launches=0)
        self._meter.add_scratch(gemm.scratch_bytes(a, b, out, accumulate, self._meter.case.device_type))


def _sample_equal_slices(start: int, stop: int, step: int) -> Iterator[tuple[slice, float]]:
    """Yield some of the slices of length `step`, each with the number of slices that it represents: the second
    represents all full slices between the first and the last."""
    num_full, rest = divmod(stop - start, max(1, step))
    numbers = {0: 1, 1: num_full - 2, num_full - 1: 1} if num_full > 2 else dict.fromkeys(range(num_full), 1)
    for number, times in numbers.items():
        yield slice(start + number * step, start + (number + 1) * step), times
    if rest:
        yield slice(stop - rest, stop), 1


def _sample_blocks(blocks: Sequence[slice]) -> Iterator[tuple[slice, float]]:
    """Yield some of the blocks, each with a weight: a block represents all classes up to the next. Later blocks have
    fewer classes."""
    step = max(1, len(blocks) // BLOCK_SAMPLES)
    for number in range(0, len(blocks), step):
        block, last = blocks[number], blocks[min(number + step, len(blocks)) - 1]
        yield block, (last.stop - block.start) / (block.stop - block.start)


# ---------------------------------------------------------------------------------------------------------
# The estimated time of products and passes: flops / F + bytes / B + launches * L
#
# The constants were measured on an H200. For another GPU we assume the same share of the data sheet's rates, and the
# same constants of the host, of launches and of blocks. A CPU has separate constants.


class Rates(NamedTuple):
    """Rates that calls reach on a device."""

    half_flops: float
    """Flops per second of products in half precision."""
    wide_flops: float
    """Flops per second of products in float32 and float64."""
    bandwidth: float
    """Bytes per second of passes, and of sums that products accumulate into."""
    operand_bandwidth: float
    """Bytes per second that a product reads and writes while it multiplies."""
    launch_seconds: float
    """Seconds from the end of one kernel to the start of the next."""
    block_shape: tuple[int, int]
    """Rows and columns of the result that a multiprocessor computes at a time."""
    min_block_depth: int
    """The least inner dimension of a block for which a separate multiprocessor is used."""
    host_seconds_per_launch: float
    """Seconds in which Python launches a product or a kernel, while the device processes the tile before."""


# Fitted to benchmarks/results/h200-earlier.json and the run before it.
_ON_H200 = Rates(710e12, 50e12, 4e12, 2.5e12, 3e-6, (128, 256), 1024, 30e-6)


@functools.cache
def rates(device: DeviceRecord) -> Rates:
    """Return the rates that calls reach on a device: the same share of its data sheet's rates as on an H200.

    Every Hopper GPU has the rates of an H200, because plans of all of them were measured with these.
    """
    if not device.arch:
        flops = device.half_flops, device.wide_flops
        return Rates(*flops, device.bandwidth, device.bandwidth, 20e-6, (16, 16), 1 << 30, 0.0)
    measured, h200 = _ON_H200, KNOWN_KINDS["H200"]
    if device.arch == h200.arch and device.profile is None:
        return measured
    return measured._replace(
        half_flops=measured.half_flops * (device.half_flops / h200.half_flops),
        wide_flops=measured.wide_flops * (device.wide_flops / h200.wide_flops),
        bandwidth=measured.bandwidth * (device.bandwidth / h200.bandwidth),
        operand_bandwidth=measured.operand_bandwidth * (device.bandwidth / h200.bandwidth),
    )


@functools.lru_cache(maxsize=4096)
def product_seconds(device: DeviceRecord, m: int, n: int, k: int, itemsize: int) -> float:
    """Return the seconds for (m, k) times (k, n), with the launch.

    Blocks of the result are computed in waves, one block for each multiprocessor. If k is large, several
    multiprocessors share a block, so that the last wave is shorter.
    """
    device_rates = rates(device)
    tall, wide = device_rates.block_shape
    blocks = min(ceil_div(m, tall) * ceil_div(n, wide), ceil_div(m, wide) * ceil_div(n, tall))
    parts = max(1, k // device_rates.min_block_depth)
    waves = ceil_div(blocks * parts, device.multiprocessors) / parts
    rate = device_rates.half_flops if itemsize < 4 else device_rates.wide_flops
    compute = 2 * waves * device.multiprocessors * tall * wide * k / rate
    return (
        max(compute, (m * k + k * n + m * n) * itemsize / device_rates.operand_bandwidth) + device_rates.launch_seconds
    )
