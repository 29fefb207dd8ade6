"""The pass over the logits by itself, beside a copy of the same bytes: its measure is the bandwidth of the copy.

A case is a line of a preset, a contender a method of `Tiles` and a line in `CONTENDERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from benchmarks.benchmark import Benchmark, Plan, planned
from benchmarks.reports import overview
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, Tile, TileCall
from flce.gemm import padded_cols
from flce.problem import LossSpec, accumulation_dtype
from flce.tools.bench.cases import BenchCase, Contender, Effort
from flce.tools.bench.measure import Entrant, Meter, Prepared, release
from flce.tools.bench.results import NO_RESULT, BenchResult, Entry
from flce.tools.bench.tables import NONE, Columns, Table, gigabytes, percent, table_of
from flce.tools.machine import DTYPES


@dataclass(frozen=True)
class KernelCase(BenchCase):
    """One tile of logits, in a buffer as the engine has it."""

    tokens: int
    columns: int  # of the tile
    vocab: int = 0  # of which the tile is a part; 0: the whole
    dtype: str = "bfloat16"
    grad_dtype: str | None = None  # None: in the place of the logits

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab", self.vocab or self.columns)

    @property
    def whole(self) -> bool:
        return self.columns == self.vocab

    @property
    def title(self) -> str:
        part = "" if self.whole else f" of {self.vocab}"
        gradient = "" if self.grad_dtype is None else f", {self.grad_dtype} gradient"
        return f"{self.tokens} x {self.columns}{part}, {self.dtype}{gradient}"


# --- cases ---

SMALL = KernelCase(32, 500, dtype="float32")
TINY = [SMALL, replace(SMALL, vocab=1100), replace(SMALL, dtype="float64", grad_dtype="float32")]
SHAPES = [(4096, 128256), (8192, 128256), (8192, 152064), (16384, 151936), (8192, 256000), (16384, 50257)]
LARGE = [
    *(KernelCase(*shape) for shape in (*SHAPES, (16384, 32000))),
    KernelCase(8192, 16384, 131072),
    KernelCase(4096, 128256, dtype="float32", grad_dtype="bfloat16"),
]
PRESETS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: planned(TINY, rounds=2, seconds=1.0),  # a second on a CPU, for the tests
    "h200": lambda: planned(LARGE, rounds=20, seconds=1.0),  # half a minute of one large GPU
}


class Tiles:
    """The operands of a case, random logits of standard deviation 4 with the scale of a mean, and what is done to them.

    The gradient may be written over the logits: `restore` before every call.
    """

    def __init__(self, case: KernelCase, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        dtype, tokens, columns = DTYPES[case.dtype], case.tokens, case.columns
        accum = accumulation_dtype(dtype)
        self.source = torch.empty(tokens, padded_cols(columns), dtype=dtype, device=device)
        for part in self.source.split(1024):  # in parts, because random numbers are made in float32
            part.copy_(torch.randn(part.shape, device=device, generator=generator).mul_(4.0))
        self.buffer = self.source.clone()
        grad = self.buffer if case.grad_dtype is None else torch.empty_like(self.source, dtype=DTYPES[case.grad_dtype])
        self.logits, self.grad = self.buffer[:, :columns], grad[:, :columns]
        target = torch.randint(case.vocab, (tokens,), device=device, generator=generator)
        scales = torch.tensor([1.0 / tokens, 1.0 / tokens, case.vocab], dtype=accum, device=device)
        # A part of the vocabulary leaves the statistics unfinished: for its gradient these are the normalizers.
        z = self.source[:, :columns]
        largest = z.amax(1).to(accum)
        lse = torch.cat([part.to(accum).logsumexp(1) for part in z.split(1024)])
        normalizer = torch.stack((largest, lse - largest))
        loss = torch.empty(tokens, dtype=accum, device=device)
        self.state = None if case.whole else torch.empty(STATE_SLOTS, tokens, dtype=accum, device=device)
        tile = Tile(0, columns, case.vocab, self.source.shape[1])
        inputs = RowInputs(target, None, None, None, scales)
        self.out = RowOutputs(loss, None, normalizer, None, None, None)
        self.writing = TileCall(inputs, LossSpec(), tile, self.out)
        self.reading = TileCall(inputs, LossSpec(), tile, normalizer=normalizer)
        self.backend, self.copied = get_backend(device), torch.empty_like(self.source)

    def restore(self) -> None:
        self.buffer.copy_(self.source)

    def copy(self) -> None:
        self.copied.copy_(self.source)

    def statistics(self) -> None:
        self.backend.statistics(self.logits, self.writing, self.state)

    def gradient(self) -> None:
        self.backend.gradient(self.logits, self.grad, self.reading)

    def both(self) -> None:
        self.backend.loss_and_gradient(self.logits, self.grad, self.writing)


# --- contenders ---


@dataclass(frozen=True)
class KernelContender(Contender):
    step: Callable[[Tiles], None]
    writes: int = field(default=0, kw_only=True)  # times the gradient; the logits are read once

    def bytes(self, case: KernelCase) -> int:
        """What has to be moved at least: every logit read once, every entry of the gradient written once."""
        logit = DTYPES[case.dtype].itemsize
        entry = logit if case.grad_dtype is None or self.family == "floor" else DTYPES[case.grad_dtype].itemsize
        columns = padded_cols(case.columns) if self.family == "floor" else case.columns
        return case.tokens * columns * (logit + self.writes * entry)


CONTENDERS = [
    KernelContender("copy", "copy of the logits", "floor", Tiles.copy, writes=1),
    KernelContender("statistics", "statistics", "ours", Tiles.statistics),
    KernelContender("gradient", "gradient", "ours", Tiles.gradient, writes=1),
    # It begins and ends with a row: a part of the vocabulary is not enough.
    KernelContender("both", "statistics and gradient", "ours", Tiles.both, writes=1, applies=lambda c, _: c.whole),
]


def prepare(case: KernelCase, device: torch.device) -> Prepared:
    release()
    problem = Tiles(case, device)
    meter = Meter(device, problem.restore)

    def enter(contender: KernelContender, result: BenchResult) -> Entrant:
        result.moved_bytes = contender.bytes(case)
        step = functools.partial(contender.step, problem)
        meter.warm_up(step)
        return Entrant(step)

    return meter, enter


def table(entry: Entry) -> Table:
    copied = entry.by_name("copy")
    columns: Columns = {
        "": lambda r: r.title,
        "median ms": lambda r: f"{r.median_ms:.3g}",
        "least ms": lambda r: f"{min(r.samples_ms):.3g}",
        "calls": lambda r: str(len(r.samples_ms)),
        "bytes per logit": lambda r: f"{(r.moved_bytes or 0) / (entry.case.tokens * entry.case.columns):.3g}",
        "GB/s": lambda r: gigabytes(r.gigabytes_per_second),
        "of copy": lambda r: percent(r.share_of(copied)),
    }
    return table_of(entry, [result for result in entry.results if result.samples_ms], columns)


def cell(entry: Entry, result: BenchResult) -> str:
    if result.median_ms is None:
        return NONE
    copied = entry.by_name("copy")
    share = "" if copied in (NO_RESULT, result) else f", {percent(result.share_of(copied))}"
    return f"{result.median_ms:.3g}{share}"


KERNELS = Benchmark(
    kind="kernels",
    about="GB/s of the pass over the logits (statistics, gradient, both), beside a copy in the same run.",
    noun="the kernels",
    case_type=KernelCase,
    sizes="tokens,columns",
    presets=PRESETS,
    effort=Effort(10, 5.0),
    contenders=lambda case: CONTENDERS,
    prepare=prepare,
    case_tables=lambda entry: [table(entry)],
    tables=overview("Median ms, bandwidth of the copy's", "tokens x columns", cell, table),
)
