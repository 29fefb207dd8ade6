"""Public functions that compute the loss of Hugging Face models without logits. The models' code runs unchanged."""

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
    # Only the callback needs to import Transformers.
    if name == "FlceCallback":
        from flce.huggingface.callback import FlceCallback

        return FlceCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
