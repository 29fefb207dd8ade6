"""Fused linear + cross-entropy loss for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flce import log
from flce.functional import cross_entropy, fused_linear_cross_entropy, plan
from flce.modules import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LinearCrossEntropyLoss
from flce.options import ChunkOptions
from flce.plans import ChunkPlan
from flce.problem import LinearCrossEntropyOutput
from flce.softmax_op import log_softmax, softmax

if TYPE_CHECKING:
    from flce.huggingface import is_patched, patch_model, report, unpatch_model

__version__ = "0.1.0"

log.follow_environment()

__all__ = [
    "ChunkOptions",
    "ChunkPlan",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "is_patched",
    "log_softmax",
    "patch_model",
    "plan",
    "report",
    "softmax",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    # Loaded when first used: most who import the operator have no model to patch.
    if name in ("is_patched", "patch_model", "report", "unpatch_model"):
        from flce import huggingface

        return getattr(huggingface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
