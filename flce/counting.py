"""What a schedule takes: its own code, run on tensors without memory, with an arena, products and passes that count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce import cost, gemm, private, vectors
from flce.arena import Arena, CountingArena
from flce.backends import contract, eager
from flce.case import Case
from flce.problem import LinearCrossEntropyProblem, LinearTerm
from flce.schedules.schedule import Schedule
from flce.selection import Selection
from flce.stage import Stage

# Borrowed blocks that are looked at.
SAMPLES = 6


@dataclass(frozen=True)
class Count:
    workspace_bytes: int
    """Peak of memory above the inputs and the returned gradients, over forward and backward."""
    flops: int
    """Of the matrix products."""
    seconds: float
    """An estimate."""


def count(c: Case, schedule: Schedule) -> Count:
    arena = CountingArena()
    meter = Meter(c, arena)
    with private.disable_current_modes(), private.disable_torch_function(), torch.no_grad():
        grads = rehearse(c, schedule, arena, meter, CountingStage)
    if grads and not schedule.deferred and c.backend == "torch" and c.dtype.itemsize < 4:
        arena.for_a_moment(eager.SCALING_BYTES)
    return Count(arena.peak - c.returned_bytes, round(meter.flops), meter.seconds)


def rehearse(c: Case, schedule: Schedule, arena: Arena, backend: Any, stage_of: Callable[..., Stage]) -> list[Tensor]:
    """Forward and backward of a call, as `engine` and `operators` make them, on operands without values. The gradients
    are returned, with all memory in the arena."""
    n = c.num_tokens

    def given(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=c.dtype, device=arena.device)

    # The shifted target, or one of int64, and a mask. Of gathered rows also where they are, and their targets.
    target, _mask = arena.new((n,), torch.int64), arena.new((n,), torch.bool)
    index = arena.new((n,), torch.int64) if c.skip_ignored else None
    terms = tuple(LinearTerm(given(n, size), given(c.vocab_size, size)) for size in c.hidden_sizes)
    problem = LinearCrossEntropyProblem(terms, target, None, None, None, None, c.spec, c.needs)
    selection = Selection(problem, index)
    if index is not None:
        selection.__dict__["target"] = arena.new((n,), torch.int64)
    out = vectors.allocate(problem, n, arena)
    # Of gathered rows once more, at their places among all.
    results = out.map(lambda t: arena.new(t.shape, t.dtype)) if c.skip_ignored else out
    dtypes, products = c.dtypes(schedule.deferred), c.products and schedule.products
    stage = stage_of(problem, backend, dtypes, arena, selection, None, out.normalizer, out, None, products)
    schedule.forward(stage)
    if schedule.deferred:
        of_each = arena.new((n,), out.loss.dtype) if c.skip_ignored and c.spec.reduction == "none" else None
        stage = stage_of(problem, backend, dtypes, arena, selection, None, results.normalizer, None, of_each, products)
        schedule.backward(stage)
    if not c.needs.any:
        return []
    grads = stage.gradients()
    if schedule.deferred:
        return grads
    del stage, out, results
    # They are multiplied by the upstream gradient, and cast.
    return [*grads, *(arena.new(g.shape, c.dtype) for g in grads if g.dim() == 2 and g.dtype != c.dtype)]


class Meter:
    """Adds up the time of what is launched. It stands for a backend, too."""

    def __init__(self, c: Case, arena: CountingArena) -> None:
        self.case, self.seconds, self.flops = c, 0.0, 0.0
        self.scratch, self._device = arena.for_a_moment, cost.device_of(c.device_type)

    def product(self, m: int, n: int, k: int) -> None:
        self.flops += 2 * m * n * k
        self.seconds += cost.product(self._device, m, n, k, self.case.dtype.itemsize)

    def moved(self, *tensors: Tensor, launches: int = 1) -> None:
        """A pass that reads or writes each of these."""
        self.seconds += sum(t.numel() * t.element_size() for t in tensors) / self._device.bandwidth
        self.seconds += launches * self._device.launch

    def repeated(self, items: Iterable[tuple[slice, float]]) -> Iterator[slice]:
        """Each of the items, which stands for so many. While a tile is made, the host launches what the next needs."""
        for item, times in items:
            seconds, flops = self.seconds, self.flops
            yield item
            self.seconds = seconds + times * max(self.seconds - seconds, self._device.host)
            self.flops = flops + times * (self.flops - flops)

    # ----------------------------------------------------------------------------- as a backend, see `Backend`

    def _pass(self, *tiles: Tensor) -> None:
        self.moved(*tiles)
        if self.case.backend == "torch":
            self.scratch(eager.temporary_bytes(self.case.spec, tiles[0], self.case.device_type))

    def statistics(self, logits: Tensor, *args: Any) -> None:
        self._pass(logits)

    def gradient(self, logits: Tensor, grad: Tensor, *args: Any) -> None:
        self._pass(logits, grad)

    loss_and_gradient = gradient

    def product_statistics(self, x: Tensor, weight: Tensor, *args: Any) -> None:
        self.product(len(x), len(weight), x.shape[1])
        self.moved(launches=1)
        self.scratch(contract.product_scratch_bytes(len(x), len(weight), 2))

    def product_gradient(self, x: Tensor, weight: Tensor, *args: Any) -> None:
        self.product(len(x), len(weight), x.shape[1])
        self.moved(launches=1)

    def product_exponentials(self, x: Tensor, weight: Tensor, exps: Sequence[Tensor], *args: Any) -> None:
        for tile in exps:
            self.product(len(x), tile.shape[1], x.shape[1])
        self.moved(launches=10)
        self.scratch(contract.product_scratch_bytes(len(x), len(weight), 1))

    def scale_valid_rows(self, x: Tensor, out: Tensor, *args: Any) -> None:
        self.moved(x, out)

    def combine_rows(self, x: Tensor, weight: Tensor, out: Tensor, *args: Any) -> None:
        self.moved(x, out)

    def weight_gradient(self, grads: Sequence[Tensor], exps: Sequence[Tensor], scaled: Tensor, *args: Any) -> None:
        for grad, tile in zip(grads, exps, strict=True):
            self.product(len(grad), grad.shape[1], len(tile))
        self.add_target_terms(grads)

    def add_target_terms(self, grads: Sequence[Tensor], *args: Any) -> None:
        self.moved(launches=4)
        self.scratch(self.case.num_tokens * contract.SORT_ROW_BYTES)


class CountingStage(Stage):
    """A stage that measures what it is asked for. Its loops are shortened, see `_shortened`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.backend, Meter)
        self._meter = self.backend

    def chunks(self, step: int) -> Iterator[slice]:
        return self._meter.repeated(_shortened(0, self.selection.num_rows, step))

    def blocks(
        self, step: int, start: int = 0, stop: int | None = None, first: Sequence[slice] = ()
    ) -> Iterator[slice]:
        stop = self.vocab_size if stop is None else stop
        others = _shortened(first[-1].stop if first else start, stop, step)
        return self._meter.repeated(itertools.chain(_sampled(first), others))

    def copy(self, x: Tensor, out: Tensor) -> None:
        self._meter.moved(x, out)

    def take_rows(self, x: Tensor, out: Tensor, rows: slice) -> None:
        self._meter.moved(out, out)

    def put_rows(self, x: Tensor, out: Tensor, rows: slice, add: bool = False) -> None:
        self._meter.moved(x, *[x] * (1 + add))

    def add_column_sums(self, x: Tensor, out: Tensor) -> None:
        self._meter.moved(x)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
        (m, k), n = a.shape, b.shape[1]
        self._meter.product(m, n, k)
        if accumulate or out.element_size() > a.element_size():
            self._meter.moved(*[out] * (1 + accumulate), launches=0)
        self._meter.scratch(gemm.scratch_bytes(a, b, out, accumulate, self._meter.case.device_type))


def _shortened(start: int, stop: int, step: int) -> Iterator[tuple[slice, float]]:
    """Pieces of `step`, and how many each stands for: the second for all but the first and the last whole one."""
    whole, rest = divmod(stop - start, max(1, step))
    numbers = {0: 1, 1: whole - 2, whole - 1: 1} if whole > 2 else dict.fromkeys(range(whole), 1)
    for number, times in numbers.items():
        yield slice(start + number * step, start + (number + 1) * step), times
    if rest:
        yield slice(stop - rest, stop), 1


def _sampled(blocks: Sequence[slice]) -> Iterator[tuple[slice, float]]:
    """Some of the blocks, which become smaller: each stands for all classes up to the next."""
    step = max(1, len(blocks) // SAMPLES)
    for number in range(0, len(blocks), step):
        block, last = blocks[number], blocks[min(number + step, len(blocks)) - 1]
        yield block, (last.stop - block.start) / (block.stop - block.start)
