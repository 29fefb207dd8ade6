"""Hugging Face models with the fused loss: one module is patched, the model's own code runs unmodified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flce.huggingface.lazy import LazyLogits
from flce.huggingface.patch import is_patched, lazy_logits, patch_model, report, unpatch_model
from flce.huggingface.usage import MaterializedLogitsError, MaterializedLogitsWarning, NotFusedWarning, Report

if TYPE_CHECKING:
    from flce.huggingface.callback import FlceCallback

__all__ = [
    "FlceCallback",
    "LazyLogits",
    "MaterializedLogitsError",
    "MaterializedLogitsWarning",
    "NotFusedWarning",
    "Report",
    "is_patched",
    "lazy_logits",
    "patch_model",
    "report",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    # The callback is a class of Transformers', which everything else here does without.
    if name == "FlceCallback":
        from flce.huggingface.callback import FlceCallback

        return FlceCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
