"""The pass over the logits by itself, beside a copy of as many bytes: its measure is the bandwidth of the copy.

A case is a line of a preset, a contender a function (TileProblem) -> Step and a line in `CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark
from benchmarks.cases import DTYPES, Case, Effort, Plan, planned
from benchmarks.contenders import Contender, Step
from benchmarks.measure import make_meter, release
from benchmarks.results import Bandwidth, Entry
from benchmarks.rounds import Entrant, Expired, compete
from benchmarks.tables import NONE, Columns, Table, gigabytes, percent, table_of
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, Tile
from flce.gemm import padded_cols
from flce.problem import LossSpec, accumulation_dtype


@dataclass(frozen=True)
class KernelCase(Case):
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


KernelEntry = Entry[KernelCase, Bandwidth]


# --- cases ---

SMALL = KernelCase(32, 500, dtype="float32")
TINY = [SMALL, replace(SMALL, vocab=1100), replace(SMALL, dtype="float64", grad_dtype="float32")]
SHAPES = [(4096, 128256), (8192, 128256), (8192, 152064), (16384, 151936), (8192, 256000), (16384, 50257)]
LARGE = [
    *(KernelCase(*shape) for shape in (*SHAPES, (16384, 32000))),
    KernelCase(8192, 16384, 131072),
    KernelCase(4096, 128256, dtype="float32", grad_dtype="bfloat16"),
]
PRESETS: dict[str, Callable[[], Plan[KernelCase]]] = {
    "tiny": lambda: planned(TINY, rounds=2, seconds=1.0),  # a second on a CPU, for the tests
    "h200": lambda: planned(LARGE, rounds=20, seconds=1.0),  # half a minute of one large GPU
}


@dataclass(frozen=True)
class TileProblem:
    """The operands of a case. The gradient may be written over the logits: `restore` before every call."""

    source: Tensor  # the logits once more, (tokens, room)
    buffer: Tensor
    logits: Tensor  # of the buffer
    grad: Tensor  # may be of the buffer too
    tile: Tile
    rows: RowInputs
    out: RowOutputs
    state: Tensor | None

    def restore(self) -> None:
        self.buffer.copy_(self.source)


def make_tile(case: KernelCase, device: torch.device, seed: int = 0) -> TileProblem:
    """Random logits of standard deviation 4, random targets, the scale of a mean."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[case.dtype]
    accum = accumulation_dtype(dtype)
    source = torch.empty(case.tokens, padded_cols(case.columns), dtype=dtype, device=device)
    for part in source.split(1024):  # in parts, because random numbers are made in float32
        part.copy_(torch.randn(part.shape, device=device, generator=generator).mul_(4.0))
    buffer = source.clone()
    grad_buffer = buffer if case.grad_dtype is None else torch.empty_like(source, dtype=DTYPES[case.grad_dtype])
    target = torch.randint(case.vocab, (case.tokens,), device=device, generator=generator)
    constants = torch.tensor([1.0 / case.tokens, 1.0 / case.tokens, case.vocab], dtype=accum, device=device)
    # Of a part of the vocabulary the statistics are unfinished: for its gradient these are the normalizers.
    z = source[:, : case.columns]
    largest = z.amax(1).to(accum)
    lse = torch.cat([part.to(accum).logsumexp(1) for part in z.split(1024)])
    normalizer = torch.stack((largest, lse - largest))
    loss = torch.empty(case.tokens, dtype=accum, device=device)
    state = None if case.whole else torch.empty(STATE_SLOTS, case.tokens, dtype=accum, device=device)
    logits, grad = buffer[:, : case.columns], grad_buffer[:, : case.columns]
    tile = Tile(0, case.columns, case.vocab, source.shape[1])
    rows, out = RowInputs(target, None, None, None, constants), RowOutputs(loss, None, normalizer, None, None, None)
    return TileProblem(source, buffer, logits, grad, tile, rows, out, state)


# --- contenders ---


@dataclass(frozen=True)
class KernelContender(Contender):
    prepare: Callable[[TileProblem], Step]
    reads: int = field(default=1, kw_only=True)  # times the logits
    writes: int = field(default=0, kw_only=True)  # times the gradient
    applies: Callable[[KernelCase], bool] = field(default=lambda case: True, kw_only=True)

    def bytes(self, case: KernelCase) -> int:
        """What has to be moved at least: every logit read once, every entry of the gradient written once."""
        logit = DTYPES[case.dtype].itemsize
        entry = logit if case.grad_dtype is None or self.family == "floor" else DTYPES[case.grad_dtype].itemsize
        columns = padded_cols(case.columns) if self.family == "floor" else case.columns
        return case.tokens * columns * (self.reads * logit + self.writes * entry)


def copy(p: TileProblem) -> Step:
    target = torch.empty_like(p.source)
    return lambda: target.copy_(p.source)


def statistics(p: TileProblem) -> Step:
    run = get_backend(p.source.device).statistics
    return lambda: run(p.logits, p.rows, LossSpec(), p.tile, p.state, p.out)


def gradient(p: TileProblem) -> Step:
    run = get_backend(p.source.device).gradient
    return lambda: run(p.logits, p.grad, p.rows, LossSpec(), p.tile, p.out.normalizer, None)


def both(p: TileProblem) -> Step:
    run = get_backend(p.source.device).loss_and_gradient
    return lambda: run(p.logits, p.grad, p.rows, LossSpec(), p.tile, p.out)


CONTENDERS = [
    KernelContender("copy", "copy of the logits", "floor", copy, writes=1),
    KernelContender("statistics", "statistics", "ours", statistics),
    KernelContender("gradient", "gradient", "ours", gradient, writes=1),
    KernelContender("both", "statistics and gradient", "ours", both, writes=1, applies=lambda case: case.whole),
]


class KernelBenchmark(Benchmark[KernelCase, Bandwidth]):
    kind = "kernels"
    noun = "the kernels"
    summary = "Median ms, bandwidth of the copy's", "tokens x columns"
    case_type = KernelCase
    result_type = Bandwidth
    presets = PRESETS
    sizes = "tokens,columns"
    effort = Effort(10, 5.0)

    def measure(self, case: KernelCase, device: torch.device, effort: Effort, expired: Expired) -> KernelEntry:
        release()
        problem = make_tile(case, device)
        meter = make_meter(device, problem.restore)

        def make(contender: KernelContender) -> Bandwidth:
            return Bandwidth.of(contender, moved_bytes=contender.bytes(case))

        def enter(contender: KernelContender, result: Bandwidth) -> Entrant:
            step = contender.prepare(problem)
            meter.warm_up(step)
            return Entrant(step)

        contenders = [contender for contender in CONTENDERS if contender.applies(case)]
        return Entry(case, compete(contenders, make, enter, meter, effort, expired))

    def table(self, entry: KernelEntry) -> Table:
        copied = entry.by_name("copy")
        columns: Columns[Bandwidth] = {
            "": lambda r: r.title,
            "median ms": lambda r: f"{r.median_ms:.3g}",
            "least ms": lambda r: f"{min(r.samples_ms):.3g}",
            "calls": lambda r: str(len(r.samples_ms)),
            "bytes per logit": lambda r: f"{r.moved_bytes / (entry.case.tokens * entry.case.columns):.3g}",
            "GB/s": lambda r: gigabytes(r.gigabytes_per_second),
            "of copy": lambda r: percent(r.share_of(copied)),
        }
        return table_of(entry, [result for result in entry.results if result.samples_ms], columns)

    def cell(self, entry: KernelEntry, result: Bandwidth) -> str:
        if result.median_ms is None:
            return NONE
        copied = entry.by_name("copy")
        share = "" if copied in (None, result) else f", {percent(result.share_of(copied))}"
        return f"{result.median_ms:.3g}{share}"


KERNELS = KernelBenchmark()
