"""Losses and softmaxes of whole rows that are in memory: what is measured, and the fewest bytes that it can move.

Counted is what no implementation can do without, in entries of the rows x columns matrix; targets, losses and what is
one number a row are left out.

* cross_entropy, forward: every logit is read.
* cross_entropy, backward: every logit is read, every entry of the gradient is written.
* cross_entropy, in-place forward+backward: every logit is read, and the gradient written over it.
* softmax and log_softmax, forward: the input is read, the output written.
* softmax and log_softmax, backward: the output and its gradient are read, the gradient of the input is written.
* copy: the input is read, as many entries are written; see `row_contenders.copy_function`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, MIB, Effort

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
class RowCase:
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"operations": [operation.value for operation in self.operations]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RowCase:
        return cls(**fields | {"operations": tuple(Operation(name) for name in fields["operations"])})


class RowPreset(str, Enum):
    tiny = "tiny"  # a second on a CPU; for the tests
    cpu = "cpu"  # a minute or two on a CPU
    h200_rows = "h200-rows"  # two to three minutes of one large GPU


# In the order of what is lost first at a deadline: torch.compile's, powers of two, odd sizes, small ones.
COMPILED_COLUMNS = (4096, 50257, 131072)  # in one piece on chip; odd; neither
POWERS = (2048, 8192, 16384, 32768, 65536, 262144)
ODD = (3001, 10007, 32001, 100003, 151937)
SMALL = (1024, 512, 256, 128, 1000, 129)


def preset_rows(preset: RowPreset) -> list[RowCase]:
    if preset is RowPreset.tiny:
        return [RowCase(8, columns, dtype, calls=3) for columns in (64, 2049) for dtype in ("float32", "bfloat16")]
    if preset is RowPreset.cpu:
        return [RowCase(256, columns, "float32") for columns in (128, 1000, 4096, 32768, 50257)]
    columns = (*COMPILED_COLUMNS, *POWERS, *ODD, *SMALL)
    return [
        RowCase(4096, count, dtype, compiled=count in COMPILED_COLUMNS)
        for count in columns
        for dtype in ("bfloat16", "float32")
    ]


def preset_row_effort(preset: RowPreset) -> Effort:
    return {
        RowPreset.tiny: Effort(rounds=2, seconds=1.0),
        RowPreset.cpu: Effort(rounds=5, seconds=1.0),
        RowPreset.h200_rows: Effort(rounds=6, seconds=0.12),
    }[preset]


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
