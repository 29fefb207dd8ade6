"""Lists of checks for a device and a backend, for `flce check`: all checks or the quick checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from flce.core.options import ChunkOptions
from flce.engine.case import dtype_text
from flce.testing.models import VOCAB_SIZE
from flce.tools.check.checks import (
    Check,
    Inputs,
    LogitsCheck,
    LogprobsCheck,
    ModelCheck,
    OperatorCheck,
    Shape,
    SoftmaxCheck,
)
from flce.tools.machine import BACKENDS, distinct_devices, why_no_backend, why_no_dtype

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = BF16, F32, F16, F64

SMALL = Shape(512, 128, 2048)
SMALLER = Shape(256, 64, 1000)  # for the quick checks on a CPU
# More than 2^28 logits of a head of 2^25 entries: for these Hopper has separate kernels (docs/architecture.md).
LARGE = Shape(8192, 2048, 33000)
LARGE_BYTES = 16 << 30  # memory for stock's results and the float64 results, with a margin
# Given logits: rows of an odd length, and rows as long as a model's.
ROWS, LONG_ROWS = Shape(64, None, 2049), Shape(64, None, 50257)
TOKENS = Shape(64, None, VOCAB_SIZE)  # of a model


@dataclass(frozen=True)
class SkippedCheck:
    """A check that was not run, and the reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Regime:
    """One set of arguments of a function."""

    title: str
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further fields of `Inputs`."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the check."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    kind: Any = OperatorCheck


def loss(**arguments: Any) -> dict[str, Any]:
    return {"loss": tuple(arguments.items())}


DEFAULT = Regime("default")
NONE = Regime("reduction none", loss(reduction="none"))
FROZEN = Regime("frozen head", fields={"grads": "xbaB"})
IGNORED_LABELS = Regime("ignored labels", {"ignored": 0.5}, {"options": ChunkOptions(skip_ignored=True)})
NO_GRADIENTS = Regime("no gradients", fields={"grads": "", "stats": ("lse", "logprob")})
REGIMES = (
    NONE,
    Regime("small budget", fields={"options": ChunkOptions(max_workspace_bytes=640 << 10)}),
    Regime("softcap and more", loss(label_smoothing=0.1, softcap=6.0, logit_scale=2.0, z_loss=1e-3)),
    Regime("blocks of classes", fields={"options": ChunkOptions(strategy="vocab")}),
    Regime("chunks of tokens", fields={"options": ChunkOptions(strategy="tokens", chunk_rows=100)}),
    FROZEN,
    IGNORED_LABELS,
    Regime("shift and bias", {**loss(shift=1), "bias": True, "ignored": 0.2}),
    Regime("adapters", {"adapter_ranks": (3, 16)}),
    Regime("rounded logits", fields={"options": ChunkOptions(logits_dtype=BF16)}, dtypes=(BF16,)),
    Regime("statistics", fields={"stats": ("lse", "logprob", "entropy")}),
    NO_GRADIENTS,
)
LARGE_BUDGET = Regime("small budget", fields={"options": ChunkOptions(max_workspace_bytes=64 << 20)})
LARGE_REGIMES = (LARGE_BUDGET, FROZEN, NO_GRADIENTS, NONE, IGNORED_LABELS)
CAPPED = {**loss(softcap=6.0, logit_scale=2.0), "bias": True, "ignored": 0.2}
LOGPROBS = (
    Regime("linear_logprobs", {"ignored": 0.2}, kind=LogprobsCheck),
    # Only two dtypes: each kernel has to be compiled.
    Regime(
        "linear_logprobs and more",
        CAPPED,
        {"temperatures": True, "options": ChunkOptions(skip_ignored=True)},
        (BF16, F32),
        LogprobsCheck,
    ),
)
ROW_LOSS, ROW_STATS = loss(label_smoothing=0.1, softcap=6.0, z_loss=1e-3, shift=1), {"stats": ("lse", "entropy")}
ROW_REGIMES = (
    Regime("cross_entropy", kind=LogitsCheck),
    Regime("softmax", kind=SoftmaxCheck),
    Regime("cross_entropy in place", fields={"inplace": True}, kind=LogitsCheck),
    Regime("cross_entropy and more", ROW_LOSS, ROW_STATS, kind=LogitsCheck),
    Regime("log_softmax", kind=SoftmaxCheck),
)
MODELS = tuple(
    Regime(title, {"ignored": 0.25}, dtypes=(F32, BF16), kind=ModelCheck)
    for title in ("Llama, labels", "Llama, own loss", "Qwen3, labels", "Qwen3, own loss")
)
# Further quick checks of the Triton backend. They run in bfloat16 only: the compilation of a kernel takes up to 1 s.
QUICK = ("reduction none", "small budget", "softcap and more", "cross_entropy", "softmax")


def list_backend_checks(device: torch.device, backend: str, quick: bool) -> tuple[list[Check], list[SkippedCheck]]:
    """Return the checks of a backend, the most informative first, and the skipped checks."""
    why = why_no_backend(device, backend)
    if why is not None:
        return [], [SkippedCheck(f"{device}, {backend} backend", why)]
    reasons = {dtype: why_no_dtype(device, dtype) for dtype in DTYPES}
    dtypes = [dtype for dtype, reason in reasons.items() if reason is None]
    missing = [SkippedCheck(f"{device}, {dtype_text(dtype)}", reason) for dtype, reason in reasons.items() if reason]
    compiled = backend == "triton"

    def create(
        shape: Shape, *regimes: Regime, only: Sequence[torch.dtype] = dtypes, prefix: str = ""
    ) -> Iterator[Check]:
        for regime, dtype in itertools.product(regimes, dtypes):
            if dtype in regime.dtypes and dtype in only:
                inputs = Inputs(shape, dtype, device, **regime.inputs)
                yield regime.kind(prefix + regime.title, backend, inputs, **regime.fields)

    small = SMALLER if quick and not compiled else SMALL
    found = list(create(small, DEFAULT))
    if backend == usual_backend(device) and find_spec("transformers") is None:
        missing.append(SkippedCheck(f"{device}, patched models", "Transformers is not installed"))
    elif backend == usual_backend(device):
        found += create(TOKENS, MODELS[0], only=[F32]) if quick else create(TOKENS, *MODELS)
    if compiled and (free := torch.cuda.mem_get_info(device)[0]) < LARGE_BYTES:
        needed = f"{free >> 30} GiB are free, {LARGE_BYTES >> 30} are needed"
        missing.append(SkippedCheck(f"{device}, large shapes", needed))
    elif compiled and quick:
        found += create(LARGE, DEFAULT, only=[BF16], prefix="large: ")
    elif compiled:
        found += create(LARGE, DEFAULT, *LARGE_REGIMES, *LOGPROBS, only=[BF16], prefix="large: ")
        found += create(LARGE, DEFAULT, only=[F16], prefix="large: ")
        found += create(LONG_ROWS, *ROW_REGIMES, only=[BF16, F32], prefix="long: ")
    rest = [*create(small, *REGIMES, *LOGPROBS), *create(ROWS, *ROW_REGIMES)]
    if quick and compiled:
        rest = [check for check in rest if check.inputs.dtype == BF16 and check.title in QUICK]
    return [*found, *rest], missing


def usual_backend(device: torch.device) -> str:
    """Return the default backend of calls on a device."""
    return next(backend for backend in BACKENDS if why_no_backend(device, backend) is None)


def list_checks(device: torch.device | None, quick: bool) -> tuple[list[Check], list[SkippedCheck]]:
    """Return the checks of a device (None: of one device of each kind) and the skipped checks."""
    checks: list[Check] = []
    missing: list[SkippedCheck] = []
    devices, same = ([device], {}) if device is not None else distinct_devices()
    for one, backend in itertools.product(devices, BACKENDS):
        more, skipped = list_backend_checks(one, backend, quick)
        checks += more
        missing += skipped
    missing += [
        SkippedCheck(str(other), f"it is the same as {one}; --device {other} checks it") for other, one in same.items()
    ]
    return checks, missing
