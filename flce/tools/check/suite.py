"""Which checks there are for a device and a backend: all of them, or the quick ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from flce.core.options import ChunkOptions
from flce.core.problem import LossSpec
from flce.engine.case import dtype_text
from flce.tools.check.figures import ExactnessCheck
from flce.tools.check.inputs import PLAIN, Inputs, Shape
from flce.tools.check.logits import LogitsCheck, SoftmaxCheck
from flce.tools.check.logprobs import LogprobsCheck
from flce.tools.check.model import ModelCheck
from flce.tools.check.operator import OperatorCheck
from flce.tools.machine import BACKENDS, DTYPES, interpreted, why_no_backend, why_no_dtype

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SMALL = Shape(512, 128, 2048)
SMALLER = Shape(256, 64, 1000)  # the quick checks' on a CPU
TINY = Shape(48, 48, 384)  # in Triton's interpreter
# More than 2^28 logits of a head of 2^25 entries: on Hopper these have kernels of their own (docs/architecture.md).
LARGE = Shape(8192, 2048, 33000)
LARGE_BYTES = 16 << 30  # of stock's results and those in float64, with room
# Logits that exist: rows of an odd length, and as long as those of a model.
ROWS, LONG_ROWS, TINY_ROWS = Shape(64, None, 2049), Shape(64, None, 50257), Shape(8, None, 151)


@dataclass(frozen=True)
class Regime:
    """A way to call `flce.fused_linear_cross_entropy`."""

    title: str
    loss: LossSpec = PLAIN
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further fields of `Inputs`."""
    how: dict[str, Any] = field(default_factory=dict)
    """Further fields of `OperatorCheck`."""
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())

    def check(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, backend: str, prefix: str = ""
    ) -> OperatorCheck:
        inputs = Inputs(shape, dtype, device, self.loss, **self.inputs)
        return OperatorCheck(prefix + self.title, inputs, backend, **self.how)


DEFAULT = Regime("default")
NONE = Regime("reduction none", LossSpec(reduction="none"))
FROZEN = Regime("frozen head", how={"weight_grad": False})
IGNORED = Regime("ignored labels", inputs={"ignored": 0.5}, how={"options": ChunkOptions(skip_ignored=True)})
NO_GRADIENTS = Regime("no gradients", how={"grad": False, "stats": ("lse", "logprob")})
REGIMES = (
    DEFAULT,
    NONE,
    Regime("small budget", how={"least_memory": True}),
    Regime("softcap and more", LossSpec(label_smoothing=0.1, softcap=6.0, logit_scale=2.0, z_loss=1e-3)),
    Regime("blocks of classes", how={"options": ChunkOptions(strategy="vocab")}),
    Regime("chunks of tokens", how={"options": ChunkOptions(strategy="tokens", chunk_rows=100)}),
    FROZEN,
    IGNORED,
    Regime("shift and bias", inputs={"shift": 1, "bias": True, "ignored": 0.2}),
    Regime("adapters", inputs={"adapter_ranks": (3, 16)}),
    Regime("rounded logits", how={"options": ChunkOptions(logits_dtype=BF16)}, dtypes=(BF16,)),
    Regime("statistics", how={"stats": ("lse", "logprob", "entropy")}),
    NO_GRADIENTS,
)
LARGE_REGIMES = (
    DEFAULT,
    Regime("small budget", how={"options": ChunkOptions(max_workspace_bytes=64 << 20)}),
    FROZEN,
    NO_GRADIENTS,
    NONE,
    IGNORED,
)
ROW_LOSS = LossSpec(label_smoothing=0.1, softcap=6.0, z_loss=1e-3)
CAPPED = LossSpec(softcap=6.0, logit_scale=2.0)
ARCHITECTURES = ("Llama", "Qwen3")

# What the quick checks take of the Triton backend, which needs up to a second to compile a kernel, beside the default.
QUICK = {BF16: ("reduction none", "small budget", "softcap and more", "cross_entropy", "softmax")}
# What is checked in Triton's interpreter, which takes a second for a call.
INTERPRETED = {
    F32: ("default", "reduction none", "softcap and more", "linear_logprobs", "cross_entropy", "softmax"),
    BF16: ("default",),
}
QUICK_INTERPRETED = {F32: ("default", "softmax")}


@dataclass(frozen=True)
class Missing:
    """What is not checked."""

    what: str
    why: str


@dataclass(frozen=True)
class Suite:
    """The checks of a device and a backend, and what it has no checks of."""

    checks: tuple[ExactnessCheck, ...]
    missing: tuple[Missing, ...]


def suite(device: torch.device, backend: str, quick: bool) -> Suite:
    """The most telling checks first: time may not suffice for all."""
    why = why_no_backend(device, backend)
    if why is not None:
        return Suite((), (Missing(f"{device}, {backend} backend", why),))
    in_turn = {dtype: why_no_dtype(device, dtype) for dtype in (BF16, F32, F16, F64)}
    dtypes = [dtype for dtype, reason in in_turn.items() if reason is None]
    missing = [Missing(f"{device}, {dtype_text(dtype)}", reason) for dtype, reason in in_turn.items() if reason]
    if interpreted(device, backend):
        why = "in Triton's interpreter the order of sums depends on where memory begins"
        missing.append(Missing(f"{device}, {backend} backend, a second run", why))
        every = (
            *_of_regimes(TINY, REGIMES, dtypes, device, backend),
            *_of_logprobs(TINY, dtypes, device, backend),
            *_of_rows(TINY_ROWS, dtypes, device, backend),
        )
        return Suite(_only(every, QUICK_INTERPRETED if quick else INTERPRETED), tuple(missing))
    compiled = backend == "triton"
    small = SMALLER if quick and not compiled else SMALL
    first = list(_of_regimes(small, REGIMES[:1], dtypes, device, backend))
    if backend == usual_backend(device):
        if find_spec("transformers") is not None:
            first += _of_models(dtypes, device, quick)
        else:
            missing.append(Missing(f"{device}, patched models", "Transformers is not installed"))
    if compiled:
        why = _why_not_large(device, dtypes)
        if why is None:
            first += _of_large(device, backend, quick)
        else:
            missing.append(Missing(f"{device}, large shapes", why))
    rest = (
        *_of_regimes(small, REGIMES[1:], dtypes, device, backend),
        *_of_logprobs(small, dtypes, device, backend),
        *_of_rows(ROWS, dtypes, device, backend),
    )
    return Suite((*first, *(_only(rest, QUICK) if quick and compiled else rest)), tuple(missing))


def _only(
    checks: tuple[ExactnessCheck, ...], titles: Mapping[torch.dtype, tuple[str, ...]]
) -> tuple[ExactnessCheck, ...]:
    return tuple(check for check in checks if check.title in titles.get(check.dtype, ()))


def _of_regimes(
    shape: Shape, regimes: Sequence[Regime], dtypes: Sequence[torch.dtype], device: torch.device, backend: str
) -> Iterator[ExactnessCheck]:
    for regime, dtype in itertools.product(regimes, dtypes):
        if dtype in regime.dtypes:
            yield regime.check(shape, dtype, device, backend)


def _of_logprobs(
    shape: Shape, dtypes: Sequence[torch.dtype], device: torch.device, backend: str, prefix: str = ""
) -> Iterator[LogprobsCheck]:
    for dtype in dtypes:
        plain = Inputs(shape, dtype, device, ignored=0.2)
        yield LogprobsCheck(prefix + "linear_logprobs", plain, backend)
        if dtype in (BF16, F32):  # every kernel has to be compiled
            more, skipping = replace(plain, loss=CAPPED, bias=True), ChunkOptions(skip_ignored=True)
            title = prefix + "linear_logprobs and more"
            yield LogprobsCheck(title, more, backend, temperatures=True, options=skipping)


def _of_rows(
    shape: Shape, dtypes: Sequence[torch.dtype], device: torch.device, backend: str, prefix: str = ""
) -> Iterator[ExactnessCheck]:
    for dtype in dtypes:
        plain = Inputs(shape, dtype, device)
        yield LogitsCheck(prefix + "cross_entropy", plain, backend)
        yield SoftmaxCheck(prefix + "softmax", plain, backend, log=False)
        yield LogitsCheck(prefix + "cross_entropy in place", plain, backend, inplace=True)
        yield LogitsCheck(
            prefix + "cross_entropy and more", replace(plain, loss=ROW_LOSS, shift=1), backend, stats=("lse", "entropy")
        )
        yield SoftmaxCheck(prefix + "log_softmax", plain, backend, log=True)


def _of_models(dtypes: Sequence[torch.dtype], device: torch.device, quick: bool) -> Iterator[ExactnessCheck]:
    if quick:
        yield ModelCheck("Llama, labels", "Llama", F32, device, own_loss=False)
        return
    for dtype, architecture, own_loss in itertools.product((F32, BF16), ARCHITECTURES, (False, True)):
        if dtype in dtypes:
            title = f"{architecture}, {'own loss' if own_loss else 'labels'}"
            yield ModelCheck(title, architecture, dtype, device, own_loss, tied=architecture == "Qwen3")


def _of_large(device: torch.device, backend: str, quick: bool) -> Iterator[ExactnessCheck]:
    for regime in LARGE_REGIMES[:1] if quick else LARGE_REGIMES:
        yield regime.check(LARGE, BF16, device, backend, "large: ")
    if not quick:
        yield DEFAULT.check(LARGE, F16, device, backend, "large: ")
        yield from _of_logprobs(LARGE, [BF16], device, backend, "large: ")
        yield from _of_rows(LONG_ROWS, [BF16, F32], device, backend, "long: ")


def usual_backend(device: torch.device) -> str:
    """That calls take if nothing says otherwise."""
    return next(
        backend for backend in BACKENDS if why_no_backend(device, backend) is None and not interpreted(device, backend)
    )


def _why_not_large(device: torch.device, dtypes: Sequence[torch.dtype]) -> str | None:
    if BF16 not in dtypes:
        return f"{device} has no bfloat16"
    free, _ = torch.cuda.mem_get_info(device)
    if free < LARGE_BYTES:
        return f"{free >> 30} GiB are free, {LARGE_BYTES >> 30} are needed"
    return None
