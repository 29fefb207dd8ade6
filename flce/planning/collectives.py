"""The collectives of a call with a divided head, counted in a dry run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from flce.backends.formulas import RowStatistics
from flce.core.numbers import check_bool, check_int
from flce.core.problem import LossSpec
from flce.core.shard import HeadSharding
from flce.engine.arena import CountingArena
from flce.engine.shards import Rows, statistics_shape
from flce.engine.top_k import TopK

Operation = Literal["all-gather", "all-reduce", "reduce-scatter"]
# Vectors of a number for each process and token that are live at once while results are merged, in addition to the
# gathered numbers: if three numbers are gathered for each token, and if more are gathered.
MERGE_VECTORS, MERGE_VECTORS_WITH_STATISTICS = 4, 7


@dataclass(frozen=True)
class Collective:
    """Calls of one collective with the same operands."""

    operation: Operation
    what: str
    """Operands, in words."""
    calls: int
    bytes: int
    """Total bytes of all calls: of the results of gathers, of the operands of reductions."""

    def sent_bytes(self, processes: int) -> int:
        """Return the bytes that each process sends in a ring: (processes - 1) / processes of `bytes`, twice as many for
        an all-reduce."""
        return round(self.bytes * (1 + (self.operation == "all-reduce")) * (processes - 1) / processes)

    def __str__(self) -> str:
        return f"{self.calls} {self.operation}{'s' * (self.calls > 1)} of {self.what} ({self.bytes / 2**20:.1f} MiB)"


def sharding_from_arguments(shards: int | None, sequence_parallel: bool, num_tokens: int) -> HeadSharding | None:
    """Check the arguments of `flce.plan` and return the division; None without `shards`."""
    check_bool("sequence_parallel", sequence_parallel)
    if shards is None:
        if sequence_parallel:
            raise ValueError("sequence_parallel=True needs shards, the number of processes")
        return None
    shards = check_int("shards", shards, "None or an int")
    if shards < 1:
        raise ValueError(f"shards must be positive, got {shards}")
    if sequence_parallel and num_tokens % shards:
        raise ValueError(
            f"with sequence_parallel num_tokens must be a multiple of shards={shards}, as all processes have equally "
            f"many, got {num_tokens}"
        )
    return HeadSharding(shards, sequence_parallel)


class Tally(Counter[tuple[Operation, str, str]]):
    """Numbers of calls and bytes of collectives, by operation, operand, and "calls" or "bytes"."""

    def add(self, operation: Operation, what: str, size: int) -> None:
        self[operation, what, "calls"] += 1
        self[operation, what, "bytes"] += size

    def repeat_since(self, before: Tally, times: float) -> None:
        """Count collectives that were added since `before` `times` times instead of once."""
        for key, value in self.items():
            self[key] = before[key] + math.ceil(times * (value - before[key]))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        calls = [key for key in self if key[2] == "calls"]
        return tuple(Collective(*key[:2], self[key], self[(*key[:2], "bytes")]) for key in calls)


def numbers_sent(spec: LossSpec) -> int:
    """Return how many numbers each process sends for a token, see `ShardRows.merge_results`: 3 to 7."""
    return len(RowStatistics.requested_names(spec))


@dataclass
class CountingShard(Rows):
    """Rows of a process in a dry run: count the collectives of `ShardRows` and their memory."""

    sharding: HeadSharding = field(kw_only=True)
    tally: Tally = field(kw_only=True)

    is_shard = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, dtype = self.selection.num_rows, self.normalizer.dtype
        # Targets as local classes, and statistics of the shard in forward.
        if self.out is not None:
            self._statistics = self.arena.new(statistics_shape(self.spec, rows), dtype)
        self._targets = self.arena.new((rows,), torch.int64)
        self._started: set[int] = set()

    def merge_results(self, tokens: slice) -> None:
        rows, processes = tokens.stop - tokens.start, self.sharding.num_processes
        numbers, itemsize = numbers_sent(self.spec), self.normalizer.dtype.itemsize
        gathered_bytes = processes * (numbers * rows + 1) * itemsize
        self.tally.add("all-gather", f"{numbers} numbers a token", gathered_bytes)
        merging = (MERGE_VECTORS if numbers == 3 else MERGE_VECTORS_WITH_STATISTICS) * processes
        cast(CountingArena, self.arena).count_temporary(gathered_bytes + (numbers + merging) * rows * itemsize)

    def merge_factors(self, tokens: slice, factors: Tensor) -> None:
        self.merge_results(tokens)

    def start_dx_sum(self, term: int, dx: Tensor) -> None:
        self._started.add(term)
        if self.sharding.num_processes > 1 and not self.sharding.sequence_parallel:
            self.tally.add("all-reduce", "gradients of inputs", dx.nbytes)

    def finish_dx_sum(self, term: int, dx: Tensor) -> None:
        if term not in self._started:
            self.start_dx_sum(term, dx)

    def sum_over_processes(self, x: Tensor) -> Tensor:
        self.tally.add("all-reduce", "logits of candidates", x.nbytes)
        return x

    def max_over_processes(self, x: Tensor) -> Tensor:
        self.tally.add("all-reduce", "bounds of sums of exponentials", x.nbytes)
        return x

    def merge_divergences(self, rows: Tensor, kind: str) -> None:
        gathered = self.sharding.num_processes * rows.nbytes
        self.tally.add("all-gather", "teacher statistics", gathered)
        cast(CountingArena, self.arena).count_temporary(4 * gathered)

    def merge_top_k(self, top_k: TopK) -> TopK:
        for x in (top_k.logits, top_k.ids):
            self.tally.add("all-gather", "largest logits", self.sharding.num_processes * x.nbytes)
        return top_k
