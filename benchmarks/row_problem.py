"""Losses and softmaxes of whole rows that are in memory: a case, its operands, and the fewest bytes that it can move.

Counted is what no implementation can do without, in entries of the rows x columns matrix; targets, losses and what is
one number a row are left out.

* cross_entropy, forward: every logit is read.
* cross_entropy, backward: every logit is read, every entry of the gradient is written.
* cross_entropy, in-place forward+backward: every logit is read, and the gradient written over it.
* softmax and log_softmax, forward: the input is read, the output written.
* softmax and log_softmax, backward: the output and its gradient are read, the gradient of the input is written.
* copy: the input is read, as many entries are written; see `row_contenders.copy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, MIB, Case
from benchmarks.results import Result

ON_CHIP_BYTES = 128 * 1024  # of a row: half of the registers of a multiprocessor (256 KiB), so that two rows fit
CPU_CACHE_BYTES = 8 * MIB  # PyTorch does not tell that of a CPU
CACHES = 4  # the inputs of one timed region are more than this many times the cache
# On a GPU as many calls are timed as one that they take a tenth of a millisecond or more, beside which the
# microseconds between an event and the first of them count little.
REGION_BYTES = 512 * MIB
ENOUGH_CALLS = 256
MOST_CALLS = 1024  # whatever the cache


class Operation(str, Enum):
    cross_entropy = "cross_entropy"
    softmax = "softmax"
    log_softmax = "log_softmax"


class Direction(str, Enum):
    forward = "forward"  # without gradients
    backward = "backward"  # by itself: the forward pass has been made before
    in_place = "in-place forward+backward"  # the gradient in the memory of the logits, for those that can


@dataclass(frozen=True)
class Task:
    """What a call does."""

    operation: Operation
    direction: Direction
    entries: int  # read or written, for each entry of the input

    @property
    def title(self) -> str:
        return f"{self.operation.value} {self.direction.value}"


TASKS = (
    Task(Operation.cross_entropy, Direction.forward, 1),
    Task(Operation.cross_entropy, Direction.backward, 2),
    Task(Operation.cross_entropy, Direction.in_place, 2),
    Task(Operation.softmax, Direction.forward, 2),
    Task(Operation.softmax, Direction.backward, 3),
    Task(Operation.log_softmax, Direction.forward, 2),
    Task(Operation.log_softmax, Direction.backward, 3),
)
COPY_ENTRIES = 2


@dataclass(frozen=True)
class RowCase(Case):
    """A matrix of rows, and what is done with it."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    operations: tuple[Operation, ...] = tuple(Operation)
    compiled: bool = False  # also by torch.compile, which takes seconds to compile each task
    calls: int | None = None  # in one timed region; None: so many that the cache cannot hold their inputs

    @property
    def title(self) -> str:
        return f"{self.rows} x {self.columns}, {self.dtype}"

    @property
    def row_bytes(self) -> int:
        return self.columns * DTYPES[self.dtype].itemsize

    @property
    def on_chip(self) -> bool:
        """Whether a row is read once because it fits on chip."""
        return self.row_bytes <= ON_CHIP_BYTES

    @property
    def tasks(self) -> list[Task]:
        return [task for task in TASKS if task.operation in self.operations]

    def bytes(self, entries: int) -> int:
        return self.rows * self.row_bytes * entries

    def calls_for(self, cache_bytes: int, region_bytes: int = 0) -> int:
        """The calls of one timed region, each on an input of its own: beyond the cache, and long enough."""
        beyond = CACHES * cache_bytes // self.bytes(1) + 1
        enough = min(ENOUGH_CALLS, region_bytes // self.bytes(1))
        return self.calls or min(MOST_CALLS, max(beyond, enough))


@dataclass
class RowResult(Result):
    """One contender on one task on rows. A sample is the time of `calls` calls, made one after the other."""

    operation: str = ""
    direction: str = ""
    moved_bytes: int = 0  # the fewest that a call can read and write
    calls: int = 1
    method: str = ""  # how they were timed, see `row_calls.Method`
    note: str | None = None  # why they were not captured

    @property
    def task(self) -> str:
        return f"{self.operation} {self.direction}"

    @property
    def gigabytes_per_second(self) -> float | None:
        return None if self.median_ms is None else self.moved_bytes * self.calls / self.median_ms / 1e6

    def share_of(self, other: RowResult | None) -> float | None:
        """Of its bandwidth."""
        speed, whole = self.gigabytes_per_second, None if other is None else other.gigabytes_per_second
        return None if speed is None or whole is None else speed / whole


def cache_bytes(device: torch.device) -> int:
    """Of the largest cache that all of the device shares."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@dataclass(frozen=True)
class RowProblem:
    """The operands of the calls of one timed region, in turn."""

    case: RowCase
    x: Tensor  # (calls, rows, columns); may be overwritten
    spare: Tensor  # the same numbers: what `x` is restored from, and the gradients that arrive at softmaxes
    target: Tensor

    @property
    def calls(self) -> int:
        return len(self.x)

    def restore(self) -> None:
        self.x.copy_(self.spare)


def make_rows(case: RowCase, device: torch.device, calls: int | None = None, seed: int = 0) -> RowProblem:
    """Random logits of standard deviation 4, random targets."""
    generator = torch.Generator(device).manual_seed(seed)
    region = REGION_BYTES if device.type == "cuda" else 0
    count = calls or case.calls_for(cache_bytes(device), region)
    spare = torch.empty(count, case.rows, case.columns, dtype=DTYPES[case.dtype], device=device)
    spare.normal_(0.0, 4.0, generator=generator)
    target = torch.randint(case.columns, (case.rows,), device=device, generator=generator)
    return RowProblem(case, spare.clone(), spare, target)
