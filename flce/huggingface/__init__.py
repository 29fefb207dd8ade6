"""Hugging Face models with the fused loss: one module is patched, the model's own code runs unmodified."""

from flce.huggingface.lazy_logits import LazyLogits, MaterializedLogitsError, MaterializedLogitsWarning
from flce.huggingface.patch import is_patched, patch_model, unpatch_model

__all__ = [
    "LazyLogits",
    "MaterializedLogitsError",
    "MaterializedLogitsWarning",
    "is_patched",
    "patch_model",
    "unpatch_model",
]
