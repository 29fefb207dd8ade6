"""Fused linear + cross-entropy loss for language models.

Importing this package imports neither PyTorch nor Triton: each public name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flce.core import log

if TYPE_CHECKING:
    from flce.core.options import ChunkOptions
    from flce.core.problem import LinearCrossEntropyOutput, LinearDivergenceOutput, LinearLogprobsOutput
    from flce.distillation import linear_divergence, topk_kl
    from flce.functional import cross_entropy, fused_linear_cross_entropy, linear_logprobs, plan
    from flce.huggingface import is_patched, patch_model, report, unpatch_model
    from flce.modules import CrossEntropyLoss, FusedLinearCrossEntropyLoss, LinearCrossEntropyLoss, LinearLogprobs
    from flce.ops.dtensors import gathered, global_num_items
    from flce.ops.softmax import log_softmax, softmax
    from flce.planning.plan import ChunkPlan

__version__ = "0.1.0"

log.configure_from_environment()

__all__ = [
    "ChunkOptions",
    "ChunkPlan",
    "CrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LinearLogprobs",
    "LinearLogprobsOutput",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "gathered",
    "global_num_items",
    "is_patched",
    "linear_divergence",
    "linear_logprobs",
    "log_softmax",
    "patch_model",
    "plan",
    "report",
    "softmax",
    "topk_kl",
    "unpatch_model",
]

# Module of each public name. The imports above are for type checkers and must list the same names.
_MODULES = {
    "core.options": ("ChunkOptions",),
    "core.problem": ("LinearCrossEntropyOutput", "LinearDivergenceOutput", "LinearLogprobsOutput"),
    "distillation": ("linear_divergence", "topk_kl"),
    "functional": ("cross_entropy", "fused_linear_cross_entropy", "linear_logprobs", "plan"),
    "huggingface": ("is_patched", "patch_model", "report", "unpatch_model"),
    "modules": ("CrossEntropyLoss", "FusedLinearCrossEntropyLoss", "LinearCrossEntropyLoss", "LinearLogprobs"),
    "ops.dtensors": ("gathered", "global_num_items"),
    "ops.softmax": ("log_softmax", "softmax"),
    "planning.plan": ("ChunkPlan",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # so that the next look-up does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
