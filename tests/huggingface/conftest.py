"""Tiny models built from their configs, and a count of the fused calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flce
from flce.huggingface.lazy import state as lazy_state
from tests.huggingface import scripts

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Operations of each architecture between head and loss, with factors that are large enough to change results.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 0.3, "initializer_range": 0.2},
    "Granite": {"logits_scaling": 4.0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
}


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLCE_BACKEND", "torch")


@pytest.fixture
def build() -> Callable[..., Any]:
    """``build("Llama", **config)``: a model in training mode, the same on every call, without dropout."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, **config: Any) -> Any:
        settings = {**SIZES, **ARCHITECTURES[name], **config}
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(attn_implementation="eager", **settings)
        )
        return model.train()

    return make


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list of the keyword arguments of each call of the fused functions."""
    calls: list[dict[str, Any]] = []

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return getattr(flce, name)(*args, **kwargs)

    for name in ("fused_linear_cross_entropy", "linear_logprobs"):
        monkeypatch.setattr(lazy_state, name, functools.partial(counted, name))
    return calls


@pytest.fixture
def compare(
    request: pytest.FixtureRequest, build: Callable[..., Any], fused_calls: list[dict[str, Any]]
) -> Callable[..., Any]:
    """``compare(script, **names)`` runs it on a stock model and on a patched one."""
    given = {**vars(request.module), "build": build}
    return lambda script, **names: scripts.compare(script, fused_calls, {**given, **names})
