"""`ChunkOptions`: options of a call for memory, precision and ignored rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from flce.core.numbers import check_bool, check_dtype, check_float, check_int
from flce.core.sizes import parse_bytes

_WIDE = torch.float32, torch.float64
SkipIgnored: TypeAlias = bool | Literal["auto"]


@dataclass(frozen=True)
class ChunkOptions:
    """Options of `fused_linear_cross_entropy` for memory and precision. The defaults are exact and fast.

    Args:
        chunk_rows: tokens of a chunk, instead of the planner's choice (for ``strategy="vocab"``: tokens per block of
            classes).
        max_workspace_bytes: upper limit of the memory that a call allocates beyond its inputs and the gradients that it
            returns: a number of bytes, or a text such as ``"256MiB"``, which is stored as a number. If the limit is too
            small, an error names the smallest possible limit. Not included: the copies of gradients
            that a backward with ``retain_graph=True`` returns; with inputs in half precision, float32 copies of a bias
            and of class weights, and the gradient of the bias in float32, 4 bytes for each class. For all inputs: with
            weights of classes or tokens, at most four numbers and a mask for each token.
        strategy: "auto", "tokens" or "vocab"; see `flce.planning.search`.
        logits_dtype: dtype of logits that are written to memory. Default: float32 (float64 for float64 inputs). With
            inputs in half precision, their dtype (``torch.bfloat16`` or ``torch.float16``) rounds logits where this
            saves time. Then the gradients have the same error as the gradients of PyTorch's operators, about four times
            the default error. It has no effect on a CPU, if logits stay in registers, or if logits are computed
            twice (``reduction="none"``, ``strategy="vocab"``).
        accum_dtype: dtype of the sums of gradients over chunks: ``torch.float32`` or, for bfloat16 inputs,
            ``torch.bfloat16``. bfloat16 halves this buffer and loses digits with every chunk: of a sum of N chunks or
            blocks of classes, up to a share of N / 256 is lost.
        skip_ignored: True: rows whose target is `ignore_index` are removed before the matrix products. Faster if 10% or
            more of the tokens are ignored. The host must know the number of these rows: on a CPU this is free; on a GPU
            the host waits about 1 ms for the device. A schedule that can count the rows on the device computes its
            first product meanwhile. "auto": on a CPU, True if 1/16 or more of the tokens are ignored and their hidden
            states are finite; otherwise False. A NaN or infinity in the hidden state of an ignored token is multiplied
            by 0, so that its column of the gradient of the weight is NaN. Not so with True.
        sample_below: a number s from 2^-20 to 2^-4, for gradients without their matrix products: of the probabilities
            of a token that are below s, a random choice is multiplied with W and x instead of all. The gradients are
            right on average, and have noise that grows with s; losses are exact. See `docs/sampled-gradients.md`.
            Default: all probabilities are multiplied. Gradients that cannot be sampled are dense, and ``str(plan)``
            names the reason. They are dense, too, if too many probabilities are above s, and while a CUDA graph is
            captured.
        gradient_accumulation_fusion: True: backward adds dW, block by block, to the `main_grad` that Megatron-Core
            gives a weight, or else to its `.grad`: there is no second matrix of V x H. A mean or sum of losses then has
            a fourth product. See "Gradients in main_grad" in `docs/trainers.md`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an impossible value.
    """

    chunk_rows: int | None = None
    max_workspace_bytes: int | str | None = None
    strategy: Literal["auto", "tokens", "vocab"] = "auto"
    logits_dtype: torch.dtype | None = None
    accum_dtype: torch.dtype = torch.float32
    skip_ignored: SkipIgnored = "auto"
    sample_below: float | None = None
    gradient_accumulation_fusion: bool = False

    def __post_init__(self) -> None:
        for name, expected in (("chunk_rows", "None or an int"), ("max_workspace_bytes", "None, an int or a size")):
            value = getattr(self, name)
            if value is None:
                continue
            if name == "max_workspace_bytes" and isinstance(value, str):
                value = parse_bytes(value, name)
            value = check_int(name, value, expected)
            if value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
            object.__setattr__(self, name, value)
        if self.strategy not in ("auto", "tokens", "vocab"):
            raise ValueError(f"strategy must be 'auto', 'tokens' or 'vocab', got {self.strategy!r}")
        for name, dtypes, expected in (
            ("logits_dtype", (torch.float16, torch.bfloat16, *_WIDE), "float16, bfloat16, float32 or float64"),
            ("accum_dtype", (torch.bfloat16, *_WIDE), "bfloat16, float32 or float64"),
        ):
            value, may_be_none = getattr(self, name), name != "accum_dtype"
            if value is None and may_be_none:
                continue
            check_dtype(name, value, "None or a torch.dtype" if may_be_none else "a torch.dtype")
            if value not in dtypes:
                raise ValueError(f"{name} must be {expected}, got {value}")
        if self.sample_below is not None:
            value = check_float("sample_below", self.sample_below)
            object.__setattr__(self, "sample_below", value)
            if not 2.0**-20 <= value <= 2.0**-4:
                raise ValueError(f"sample_below must be from 2**-20 to 2**-4, or None, got {value:g}")
        check_bool("gradient_accumulation_fusion", self.gradient_accumulation_fusion)
        if self.skip_ignored is not True and self.skip_ignored is not False and self.skip_ignored != "auto":
            raise ValueError(f"skip_ignored must be True, False or 'auto', got {self.skip_ignored!r}")


def _refuse_removed(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` with an error that names the replacement of an argument that was removed."""

    @functools.wraps(init)  # with the signature of `init`
    def checked_init(self: ChunkOptions, *args: Any, **options: Any) -> None:
        if "grad_dtype" in options:
            raise TypeError("ChunkOptions has no argument 'grad_dtype', which was removed: give sample_below=2**-12")
        init(self, *args, **options)

    return checked_init


ChunkOptions.__init__ = _refuse_removed(ChunkOptions.__init__)  # type: ignore[method-assign]

DEFAULT_OPTIONS = ChunkOptions()
