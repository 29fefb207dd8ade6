"""References of `flce check`, the benchmarks and the tests: problems, stock operators, float64 oracle, tolerances.

`tiny_model` creates small language models with random weights from a configuration, without a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 1000
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "use_cache": False,
}


def tiny_model(architecture: str = "Qwen3", seed: int = 0, **sizes: Any) -> Any:
    """Create a model of two layers without dropout, in float32 on the CPU. The same seed gives the same weights.

    Args:
        architecture: the prefix of the class in Transformers: ``Qwen3`` of ``Qwen3ForCausalLM``.
        seed: the seed of the weights.
        sizes: values of the configuration that differ from `SIZES`.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **sizes})
    torch.manual_seed(seed)
    return getattr(transformers, f"{architecture}ForCausalLM")(config)
