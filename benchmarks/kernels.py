"""The pass over the logits by itself: what is measured of it. Its measure is the bandwidth of a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, Effort
from benchmarks.contenders import Outcome, Step
from flce.backends import get_backend
from flce.backends.contract import STATE_SLOTS, RowInputs, RowOutputs, Tile
from flce.gemm import padded_cols
from flce.problem import LossSpec, accumulation_dtype


@dataclass(frozen=True)
class KernelCase:
    """One tile of logits, in a buffer as the engine has it."""

    tokens: int
    columns: int  # of the tile
    vocab: int  # of which the tile is a part, or the whole
    dtype: str = "bfloat16"
    grad_dtype: str | None = None  # None: in the place of the logits

    @property
    def whole(self) -> bool:
        return self.columns == self.vocab

    @property
    def title(self) -> str:
        part = "" if self.whole else f" of {self.vocab}"
        gradient = "" if self.grad_dtype is None else f", {self.grad_dtype} gradient"
        return f"{self.tokens} x {self.columns}{part}, {self.dtype}{gradient}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> KernelCase:
        return cls(**fields)


class KernelPreset(str, Enum):
    tiny = "tiny"  # a second on a CPU; for the tests
    h200 = "h200"  # half a minute of one large GPU


def preset_kernels(preset: KernelPreset) -> list[KernelCase]:
    if preset is KernelPreset.tiny:
        tiny = KernelCase(32, 500, 500, "float32")
        return [tiny, replace(tiny, vocab=1100), replace(tiny, dtype="float64", grad_dtype="float32")]
    shapes = [(4096, 128256), (8192, 128256), (8192, 152064), (16384, 151936), (8192, 256000), (16384, 50257)]
    return [
        *(KernelCase(tokens, vocab, vocab) for tokens, vocab in shapes),
        KernelCase(16384, 32000, 32000),
        KernelCase(8192, 16384, 131072),
        KernelCase(4096, 128256, 128256, "float32", "bfloat16"),
    ]


def preset_kernel_effort(preset: KernelPreset) -> Effort:
    return {
        KernelPreset.tiny: Effort(rounds=2, seconds=1.0),
        KernelPreset.h200: Effort(rounds=20, seconds=1.0),
    }[preset]


@dataclass(frozen=True)
class TileProblem:
    """The operands of a case. The gradient may be written over the logits: `restore` before every call."""

    case: KernelCase
    source: Tensor  # the logits once more, (tokens, room)
    buffer: Tensor
    grad_buffer: Tensor  # may be `buffer`
    rows: RowInputs
    out: RowOutputs
    state: Tensor | None

    def restore(self) -> None:
        self.buffer.copy_(self.source)

    @property
    def logits(self) -> Tensor:
        return self.buffer[:, : self.case.columns]

    @property
    def grad(self) -> Tensor:
        return self.grad_buffer[:, : self.case.columns]

    @property
    def tile(self) -> Tile:
        return Tile(0, self.case.columns, self.case.vocab, self.source.shape[1])


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
    rows = RowInputs(target, None, None, None, constants)
    return TileProblem(
        case, source, buffer, grad_buffer, rows, RowOutputs(loss, None, normalizer, None, None, None), state
    )


@dataclass(frozen=True)
class KernelContender:
    name: str
    title: str
    family: str  # "floor" or "ours"
    prepare: Callable[[TileProblem], Step]
    reads: int = 1  # times the logits
    writes: int = 0  # times the gradient
    applies: Callable[[KernelCase], bool] = lambda case: True

    def bytes(self, case: KernelCase) -> int:
        """What has to be moved at least: every logit read once, every entry of the gradient written once."""
        logit = DTYPES[case.dtype].itemsize
        entry = logit if case.grad_dtype is None or self.family == "floor" else DTYPES[case.grad_dtype].itemsize
        columns = padded_cols(case.columns) if self.family == "floor" else case.columns
        return case.tokens * columns * (self.reads * logit + self.writes * entry)


def prepare_copy(problem: TileProblem) -> Step:
    target = torch.empty_like(problem.source)

    def step() -> Outcome:
        target.copy_(problem.source)
        return Outcome(None)

    return step


def prepare_statistics(problem: TileProblem) -> Step:
    backend = get_backend(problem.source.device)

    def step() -> Outcome:
        backend.statistics(problem.logits, problem.rows, LossSpec(), problem.tile, problem.state, problem.out)
        return Outcome(problem.out.loss)

    return step


def prepare_gradient(problem: TileProblem) -> Step:
    backend = get_backend(problem.source.device)

    def step() -> Outcome:
        normalizer = problem.out.normalizer
        backend.gradient(problem.logits, problem.grad, problem.rows, LossSpec(), problem.tile, normalizer, None)
        return Outcome(None)

    return step


def prepare_both(problem: TileProblem) -> Step:
    backend = get_backend(problem.source.device)

    def step() -> Outcome:
        backend.loss_and_gradient(problem.logits, problem.grad, problem.rows, LossSpec(), problem.tile, problem.out)
        return Outcome(problem.out.loss)

    return step


KERNEL_CONTENDERS = [
    KernelContender("copy", "copy of the logits", "floor", prepare_copy, writes=1),
    KernelContender("statistics", "statistics", "ours", prepare_statistics),
    KernelContender("gradient", "gradient", "ours", prepare_gradient, writes=1),
    KernelContender("both", "statistics and gradient", "ours", prepare_both, writes=1, applies=lambda case: case.whole),
]
