"""The options of a call: memory, precision, dropped rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from flce.core.numbers import check_dtype, check_int
from flce.core.sizes import parse_bytes

SkipIgnored: TypeAlias = bool | Literal["auto"]


@dataclass(frozen=True)
class ChunkOptions:
    """How `fused_linear_cross_entropy` may use memory and precision. The defaults are exact and fast.

    Args:
        chunk_rows: tokens per chunk, instead of the planner's choice (for ``strategy="vocab"``: tokens per
            block of classes).
        max_workspace_bytes: upper bound of the memory that a call takes above its inputs and the gradients that it
            returns: a number of bytes, or text such as ``"256MiB"``, which is stored as that number. An error names
            the least possible where this is less. A backward with ``retain_graph=True`` may take more:
            `ChunkPlan.retained_workspace_bytes`.
        strategy: "auto", "tokens" or "vocab"; see `flce.planning.search`.
        logits_dtype: dtype of logits that are written to memory. Default: float32 (float64 for float64 inputs).
            ``torch.bfloat16`` or ``torch.float16``, with inputs of that dtype, rounds them where that saves time:
            the gradients are then as far from exact ones as those of the stock operators, about four times as far
            as by default. It changes nothing on a CPU, where logits stay in registers, and where they are made
            twice (``reduction="none"``, ``strategy="vocab"``).
        accum_dtype: dtype in which gradients are summed over chunks: ``torch.float32`` or, for bfloat16
            inputs, ``torch.bfloat16``, which halves that buffer and loses digits with every chunk.
        skip_ignored: whether rows whose target is `ignore_index` are dropped before the matrix products.
            Their number must be known to the host: on a CPU that is free, on an accelerator it waits for the
            device. That costs about a millisecond and pays from a tenth of the rows on. A schedule that can count
            the rows on the device has the first product to do meanwhile. "auto": True on a CPU, False elsewhere:
            nothing waits that was not asked to. If a hidden state of an ignored token is NaN or infinite, its column
            of the gradient of the weight is NaN, as with PyTorch's operators, which multiply it by 0. With True the
            token contributes nothing.

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
        if self.logits_dtype is not None:
            check_dtype("logits_dtype", self.logits_dtype, "None or a torch.dtype")
            if self.logits_dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"logits_dtype must be float16, bfloat16, float32 or float64, got {self.logits_dtype}")
        check_dtype("accum_dtype", self.accum_dtype)
        if self.accum_dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"accum_dtype must be bfloat16, float32 or float64, got {self.accum_dtype}")
        if self.skip_ignored is not True and self.skip_ignored is not False and self.skip_ignored != "auto":
            raise ValueError(f"skip_ignored must be True, False or 'auto', got {self.skip_ignored!r}")
