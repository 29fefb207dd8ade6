"""Small models of all architectures of Transformers, and a comparison of patched and stock models.

``python -m tests.huggingface.architectures > docs/models.md`` writes the table of all architectures.

:data:`RULES` reduce the fields of configs and sub-configs by the names of the fields. :data:`OVERRIDES` is one table of
exceptions.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import inspect
import os
import platform
import re
import signal
import sys
import textwrap
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flce
from flce.huggingface import LazyLogits, MaterializedLogitsWarning
from flce.huggingface.lazy import state as lazy_state

MAPPINGS = {
    "causal": ("Causal language models", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("Encoder-decoders", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("Masked language models", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "image": ("Image and text to text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
}
VOCAB, BATCH, TOKENS = 160, 2, 16
FIRST_WORD = 100  # the ids below are for special tokens
MAX_PARAMETERS = 20_000_000
SECONDS = 60.0  # for one architecture
TOLERANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}


# ------------------------------------------------------------------------------------------ small configs

# A field gets the value of the first pattern that matches its full name. A number is an upper bound.
RULES: list[tuple[str, float]] = [
    (r".*vocab_size.*|vocab_dim|n_vocab", VOCAB),
    (r".*(dropout|drop_path|dropout_rate|layerdrop|_pdrop|jitter_noise|drop).*", 0.0),
    (r".*logit.*(softcap|cap).*", 0.5),
    (r"initializer_range|init_std", 0.1),
    (r"(num_|n_|.*_num_|.*_n_)?(key_value|kv)_(heads|head)|.*num_(key_value|kv)_heads|multi_query_group_num", 2),
    (r".*(heads|n_head|num_head|nhead)|.*_attention_heads", 4),
    (r".*(num_|n_)(shared|null|zero)_?\w*experts?", 1),
    (r".*experts_per_tok(en)?.*|.*top_?k.*experts.*|(moe_)?top_?k|moe_k|router_top_k|expert_capacity", 2),
    (r"(n|num|topk)_(expert_)?groups?|n_group|topk_group", 1),
    (r".*(num|n)_\w*experts|ffn_num_experts|num_experts", 4),
    (r".*((num|n)_\w*(layers?|blocks)|_layers|n_layer|depth|layers)", 2),
    (
        r".*(qk_nope|qk_rope|v|index|attention|mamba|linear_key|linear_value|kv)?_?head_(dim|size)|d_kv|d_head|.*head_dim",
        8,
    ),
    (r".*lora_rank|.*_rank", 16),
    (
        r".*(intermediate|ffn|mlp|feed_?forward|ff|inner).*(size|dim|hidden|channels).*|d_ff|.*ffn_dim|d_inner|n_inner",
        64,
    ),
    (
        r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim|projection_dim|output_dim"
        r"|out_hidden_size|lru_width|emb_dim|model_dim|dim_model|proj_dim|cross_attention_dim|embed_dims)|dim|width",
        32,
    ),
    (r".*(ssm_state_size|state_size|d_state)|mamba_chunk_size|chunk_size", 8),
    (r"time_step_rank|dt_rank", 4),
    (r".*max_.*(position|seq).*|n_positions|n_ctx|seq_length|max_(source|target)_.*", 64),
    (r".*sliding_window|.*(attention|local)_window(_size)?|window_size", 8),
    (r"image_size|img_size", 28),
]

# Exceptions to the rules: fields of the config (nested as in the config), by architecture.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 1, 1]}
_MROPE_PARTIAL = {**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_REFORMER = {
    "attention_head_size": 8,
    "axial_pos_shape": (4, 4),
    "axial_pos_embds_dim": (16, 16),
    "local_attn_chunk_length": 8,
    "lsh_attn_chunk_length": 8,
    "num_buckets": 2,
    "attn_layers": ["local", "lsh"],
    "num_hidden_layers": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "blip-2": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblip": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 90, "num_query_tokens": 4},
    "blip": {"vision_config": {"image_size": 32}},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "hy_v4_vl": {"text_config": {"rope_parameters": _MROPE, "qk_rope_head_dim": 8}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 1},
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
    },
    "molmo2": {"adapter_config": {"vision_feature_layers": [1, 0], "vision_feature_layer": [1, 0]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90, "text_config": {"rope_parameters": _MROPE}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vision-encoder-decoder": {"config": lambda: _vision_encoder_decoder()},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cosmos3_edge": {"text_config": {"rope_parameters": _MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {**_MOE, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": _MOE,
    "deepseek_v3": {"qk_head_dim": 16},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "image-dots3_note": {
        "audio_config": {"adapter_input_size": 32, "adapter_output_size": 32},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "dense"]},
    },
    "dots1": _MOE,
    "encoder-decoder": {"config": lambda: _encoder_decoder()},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "fast_vlm": {"config": lambda: _without_timm("FastVlm")},
    "gemma3n": {"config": lambda: _without_timm("Gemma3n"), "text_config": {"num_kv_shared_layers": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "perception_lm": {"config": lambda: _without_timm("PerceptionLM")},
    "git": {"vision_config": {"image_size": 32}},
    "gemma4_assistant": {"config": lambda: _draft_model("Gemma4", 4)},
    "gemma4_unified_assistant": {"config": lambda: _draft_model("Gemma4Unified", 2)},
    "glm46v": {"text_config": {"rope_parameters": _MROPE}},
    "glm4v": {"text_config": {"rope_parameters": _MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": _MROPE_PARTIAL, "head_dim": 8}},
    "glm_ocr": {"text_config": {"rope_parameters": _MROPE_PARTIAL}},
    "glmga": {"text_config": {"rope_parameters": _MROPE_PARTIAL}},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 1, 1]}}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "longt5": {"decoder_start_token_id": 0},
    "mistral4": {"head_dim": 16},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "mobilebert": {"intra_bottleneck_size": 32},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": (32,) * 4, "depths": (1,) * 4}},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 32},
    "paddleocr_vl": {"text_config": {"rope_parameters": _MROPE}},
    "perceiver": {
        "max_position_embeddings": TOKENS,
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
    },
    "qwen2_5_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "causal-reformer": {**_REFORMER, "is_decoder": True},
    "masked-reformer": _REFORMER,
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "udop": {"decoder_start_token_id": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
        "kv_channels": 8,
        "num_query_groups": 4,
    },
}
# Further exceptions for the fields of Transformers 4.
_MROPE_4 = {"text_config": {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}}
_MLLAMA_ROPE_4 = {"rope_scaling": {"rope_type": "default"}}
OVERRIDES_4: dict[str, dict[str, Any]] = {
    "evolla": {"num_key_value_heads": 4},
    "glm4v": _MROPE_4,
    "glm4v_moe": {"text_config": {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_d_head": 16},
    "jamba": {**OVERRIDES["jamba"], "use_mamba_kernels": False},
    "causal-mllama": _MLLAMA_ROPE_4,
    "image-mllama": {"text_config": _MLLAMA_ROPE_4},
    "phi4_multimodal": {"config": lambda: _phi4_multimodal()},
    "qwen2_5_vl": {**_MROPE_4, "vision_start_token_id": 90},
    "qwen2_vl": {**_MROPE_4, "vision_start_token_id": 90},
    "transfo-xl": {"cutoffs": [40, 80]},
    "zamba": {
        **OVERRIDES["zamba"],
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "use_mamba_kernels": False,
    },
}
OVERRIDES["qwen4_exp"] = {"text_config": OVERRIDES["qwen4_exp_text"]}
OVERRIDES["causal-qwen4_exp"] = OVERRIDES["qwen4_exp_text"]


def _encoder_decoder() -> Any:
    from transformers import BertConfig, EncoderDecoderConfig

    parts = [small_config(BertConfig(), {}) for _ in range(2)]
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _vision_encoder_decoder() -> Any:
    from transformers import BertConfig, VisionEncoderDecoderConfig, ViTConfig

    parts = [small_config(ViTConfig(), {"image_size": 32}), small_config(BertConfig(), {})]
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _phi4_multimodal() -> Any:
    from transformers import Phi4MultimodalConfig

    return small_config(Phi4MultimodalConfig(vision_config={}, audio_config={}), {})


def _draft_model(family: str, shared: int) -> Any:
    """Create a config whose ``shared`` last layers of four use keys and values of another model.

    The default values are not a valid config.
    """
    import transformers

    fields = {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 8,
    }
    text = small_config(getattr(transformers, f"{family}TextConfig")(), fields)
    return getattr(transformers, f"{family}AssistantConfig")(text_config=text, backbone_hidden_size=16)


def _without_timm(family: str) -> Any:
    """Create a config with an image encoder of Transformers instead of one that needs timm. No images are given."""
    import transformers
    from transformers import SiglipVisionConfig

    config_class = getattr(transformers, f"{family}Config")
    config = small_config(config_class(), OVERRIDES.get(config_class.model_type, {}))
    vision = small_config(SiglipVisionConfig(), {})
    for name, value in vars(config.vision_config).items():
        if not hasattr(vision, name):
            setattr(vision, name, value)
    vision.model_args = {"embed_dim": vision.hidden_size}
    vars(config)["vision_config"] = vision  # some configs check its class
    return config


def _words(*shape: int) -> Tensor:
    return torch.randint(FIRST_WORD, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def _pixels(size: int, **more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1)), **more}


def _image_tokens() -> dict[str, Any]:
    ids = _words(BATCH, TOKENS)
    ids[:, :4] = 90
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 90, -100)}


def _codebooks() -> dict[str, Any]:
    return {"input_ids": _words(BATCH * 4, TOKENS), "attention_mask": None, "labels": _words(BATCH, TOKENS, 4)}


def _assistant() -> dict[str, Any]:
    """Return the inputs that a draft model gets from its target model."""
    keys = torch.randn(2, BATCH, 1, TOKENS, 8)
    return {
        "input_ids": None,
        "attention_mask": None,
        "inputs_embeds": torch.randn(BATCH, TOKENS, 2 * 16),
        "shared_kv_states": dict.fromkeys(("full_attention", "sliding_attention"), (keys[0], keys[1])),
        "position_ids": torch.arange(TOKENS).expand(BATCH, TOKENS),
    }


# Arguments of a model in addition to `input_ids`, `attention_mask` and `labels`; None removes one of them.
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "blip": lambda: _pixels(32),
    "blip-2": lambda: _pixels(28, **_image_tokens()),
    "blt": lambda: {"use_cache": False},
    "diffusion_gemma": lambda: {"decoder_input_ids": _words(BATCH, TOKENS)},
    "fnet": lambda: {"attention_mask": None},
    "gemma4_assistant": _assistant,
    "gemma4_unified_assistant": _assistant,
    "git": lambda: _pixels(32),
    "idefics": lambda: {
        "pixel_values": torch.randn(BATCH, 1, 3, 28, 28),
        "image_attention_mask": torch.ones(BATCH, TOKENS, 1),
    },
    "instructblip": lambda: _pixels(28, **_image_tokens(), qformer_input_ids=_words(BATCH, 4)),
    "instructblipvideo": lambda: {
        **_image_tokens(),
        "pixel_values": torch.randn(BATCH, 1, 3, 28, 28),
        "qformer_input_ids": _words(BATCH, 4),
    },
    "pix2struct": lambda: {
        "input_ids": None,
        "attention_mask": None,
        "flattened_patches": torch.cat([torch.ones(BATCH, 4, 2), torch.randn(BATCH, 4, 32)], -1),
    },
    "molmo2": lambda: {"mm_token_type_ids": torch.zeros(BATCH, TOKENS, dtype=torch.int64)},
    "pp_formulanet": lambda: {
        "input_ids": None,
        "attention_mask": None,
        "decoder_input_ids": _words(BATCH, TOKENS),
        **_pixels(28),
    },
    "transfo-xl": lambda: {"attention_mask": None},
    "udop": lambda: {"bbox": torch.rand(BATCH, TOKENS, 4)},
    "voxtral_realtime": lambda: {"encoder_inputs_embeds": torch.randn(BATCH, 4 * TOKENS, 32)},
    "vision-encoder-decoder": lambda: {"input_ids": None, "attention_mask": None, **_pixels(32)},
    "kosmos-2": lambda: {
        "image_embeds": torch.randn(BATCH, 4, 32),
        "image_embeds_position_mask": (torch.arange(TOKENS) < 4).expand(BATCH, TOKENS),
    },
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
}


def small_config(config: Any, override: Mapping[str, Any]) -> Any:
    """Return a small config of the class of ``config``, which has the default values."""
    return type(config)(**_small_fields(config, override, iter(range(3, FIRST_WORD))))


def _small_fields(config: Any, override: Mapping[str, Any], ids: Iterator[int]) -> dict[str, Any]:
    """Return the fields of a small config. Sub-configs are mappings as in a config.json, which all versions accept."""
    fields = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    usual = vars(type(config)())  # a config that contains this one may have set other values
    known = inspect.signature(type(config).__init__).parameters
    changed: dict[str, Any] = {}
    layers = _kept_layers(fields)
    for name, value in fields.items():
        if name == "top_k" and name not in known:
            continue  # options of sampling, which configs had before 5.0
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed[name] = _small_fields(value, override.get(name, {}), ids)
            if value.model_type:
                changed[name]["model_type"] = value.model_type
            continue
        new = _small_field(name, value, ids)
        if isinstance(value, list) and layers and len(value) == layers[0]:
            new = [value[i] for i in layers[1]]
        elif layers and name in _LAYERS:
            new = len(layers[1])
        if new is not value or usual.get(name) != value:
            changed[name] = new
    # If each attention head has its own key and value head, keep that.
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads is not None and heads == groups:
        changed["num_key_value_heads"] = changed.get("num_attention_heads", heads)
    changed.update({key: value for key, value in override.items() if not hasattr(fields.get(key), "model_type")})
    return changed


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def _kept_layers(fields: Mapping[str, Any]) -> tuple[int, list[int]] | None:
    """Return the number of layers, and the layers to keep if there are several kinds: the first of each kind."""
    count = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), None)
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == count]
    if count is None or not lists:
        return None
    first: dict[Any, int] = {}
    for i, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(repr(kind), i)
    kept = list(first.values())[:4]
    return count, sorted({*kept, 0, *([1] if count > 1 and len(kept) < 2 else [])})


def _small_field(name: str, value: Any, ids: Iterator[int]) -> Any:
    if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        new = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}[name]
        return value if value is None else new
    if re.fullmatch(r".*(token_id|token_index|_token|token_idx)", name) and type(value) is int and value >= 0:
        return next(ids)
    if name == "vocab_size":
        return VOCAB
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    for pattern, bound in RULES:
        if re.fullmatch(pattern, name):
            return min(value, type(value)(bound)) if value > 0 else value
    return value


@dataclass(frozen=True)
class Architecture:
    """A name in one of Transformers' mappings."""

    kind: str
    model_type: str
    class_name: str

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.model_type}"

    def lookup(self, table: Mapping[str, Any], default: Any) -> Any:
        """Return the table's entry for this name in this mapping, else for the model type, else ``default``."""
        return table.get(self.id, table.get(self.model_type, default))


def architectures(kinds: Iterator[str] | None = None) -> list[Architecture]:
    """Return all architectures of the installed Transformers."""
    from transformers.models.auto import modeling_auto

    found = []
    for kind in MAPPINGS if kinds is None else kinds:
        for model_type, class_name in getattr(modeling_auto, MAPPINGS[kind][1], {}).items():
            names = class_name if isinstance(class_name, (tuple, list)) else [class_name]
            found += [Architecture(kind, model_type, name) for name in names]
    return found


def build(architecture: Architecture) -> Any:
    """Return a small model in training mode, with the same random weights in each call."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, architecture.class_name)
    config_class = CONFIG_MAPPING[architecture.model_type]
    if model_class.config_class is not None and not issubclass(config_class, model_class.config_class):
        config_class = model_class.config_class
    override = dict(architecture.lookup(OVERRIDES, {}))
    if transformers.__version__.startswith("4."):
        override = dict(architecture.lookup(OVERRIDES_4, override))
    make_config = override.pop("config", None)
    config = make_config() if make_config is not None else small_config(config_class(), override)
    config._attn_implementation = "eager"
    with contextlib.suppress(Exception), torch.device("meta"):
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
        if count > MAX_PARAMETERS:
            return _too_large(count)
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # some models leave parameters uninitialised
            if parameter.is_floating_point() and not (parameter.abs() < 1e3).all():
                parameter.normal_(std=0.1)
    return model.float().train()


def _too_large(count: int) -> Any:
    raise ValueError(f"{count:,} parameters: the config is not small")


def batch(architecture: Architecture) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_WORD, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    torch.manual_seed(3)
    inputs.update(architecture.lookup(INPUTS, dict)())
    return {key: value for key, value in inputs.items() if value is not None}


# --------------------------------------------------------------------------------------------- comparison

FUSED = "fused"
DIFFERS = "differs"
MATERIALISES = "computes its logits"
NOT_FUSED = "not fused"
NOT_PATCHED = "cannot be patched"
STOCK_FAILS = "stock fails"


@dataclass(frozen=True)
class Result:
    architecture: Architecture
    status: str
    reason: str = ""
    seconds: float = 0.0


class TooSlow(Exception):
    pass


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"took more than {seconds:g} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def examine(architecture: Architecture, seconds: float = SECONDS) -> Result:
    """Run one training step stock and one patched, from the same state. Return the result of the comparison."""
    start = time.perf_counter()
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status, reason = _examine(architecture)
    except TooSlow as error:
        status, reason = STOCK_FAILS, str(error)
    gc.collect()
    return Result(architecture, status, reason, time.perf_counter() - start)


def _examine(architecture: Architecture) -> tuple[str, str]:
    try:
        stock = build(architecture)
        patched = copy.deepcopy(stock)
        stock_outputs = _step(stock, batch(architecture))
    except TooSlow:
        raise
    except Exception as error:
        return STOCK_FAILS, _one_line(error)
    try:
        flce.patch_model(patched)
    except TypeError as error:
        return NOT_PATCHED, _one_line(error)
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return flce.fused_linear_cross_entropy(*args, **kwargs)

    with (
        unittest.mock.patch.object(lazy_state, "fused_linear_cross_entropy", counted),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", MaterializedLogitsWarning)
        try:
            outputs = _step(patched, batch(architecture))
        except Exception as error:  # also if only the patched step is too slow
            return DIFFERS, _one_line(error)
    read = [str(w.message) for w in caught if issubclass(w.category, MaterializedLogitsWarning)]
    if not read and any(value.is_materialized for value in _lazy_logits_in(outputs)):
        return DIFFERS, "the logits were computed without a warning"
    try:
        compare(stock, stock_outputs, patched, outputs)
    except AssertionError as error:
        return DIFFERS, _one_line(error)
    if read:
        return MATERIALISES, read[0].split(" at ")[0]  # the operation
    return (FUSED, "") if calls else (NOT_FUSED, "the loss does not come from the output embedding")


def _step(model: Any, inputs: dict[str, Any]) -> Any:
    """Run a training step and return its outputs. If the model computes no loss, compute the loss of its trainer."""
    torch.manual_seed(2)
    if "labels" in inspect.signature(model.forward).parameters:
        outputs = model(**inputs)
        loss = outputs["loss"]
    else:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten())
    if not torch.isfinite(loss).all():
        raise ValueError(f"the loss is {loss.item()}")
    loss.sum().backward()
    return outputs


def _lazy_logits_in(value: Any) -> list[LazyLogits]:
    if isinstance(value, LazyLogits):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [lazy for item in value for lazy in _lazy_logits_in(item)] if isinstance(value, (tuple, list)) else []


def compare(stock: nn.Module, stock_outputs: Any, patched: nn.Module, outputs: Any) -> None:
    """Compare the loss, the fields of the outputs, and the gradient of each parameter."""
    assert type(outputs) is type(stock_outputs)
    assert list(outputs.keys()) == list(stock_outputs.keys())
    for key, want in stock_outputs.items():
        _assert_same(f"outputs.{key}", outputs[key], want)
    for (name, left), (other, right) in zip(stock.named_parameters(), patched.named_parameters(), strict=True):
        assert name == other
        _assert_same(f"gradient of {name}", right.grad, left.grad)


def _assert_same(name: str, got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        if isinstance(got, LazyLogits):
            assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device), name
            got = got.materialize()
        # Gradients are small numbers, so the absolute tolerance is relative to the largest.
        largest = float(want.detach().abs().max()) if want.numel() and want.is_floating_point() else 1.0
        atol = TOLERANCE["atol"] * max(largest, 1e-3) if largest < float("inf") else TOLERANCE["atol"]
        torch.testing.assert_close(
            got, want, rtol=TOLERANCE["rtol"], atol=atol, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    elif isinstance(want, Mapping):
        assert isinstance(got, Mapping), name
        for key in want:
            _assert_same(f"{name}.{key}", got[key], want[key])
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), name
        for i, (left, right) in enumerate(zip(got, want, strict=True)):
            _assert_same(f"{name}[{i}]", left, right)
    else:
        assert type(got) is type(want), name


def _one_line(error: BaseException) -> str:
    """Format an exception in one line for a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 90 else text[:87] + "..."


# --------------------------------------------------------------------------------------------- the table


def report(results: list[Result], command: str) -> str:
    """Return the text of ``docs/models.md``."""
    import transformers

    lines = [
        "# Models",
        "",
        "This page lists the architectures in four mappings of Transformers. Each architecture is built small from its",
        "configuration, and trained for one step twice from the same weights: as it is (stock), and after",
        "`flce.patch_model`. If a model takes no labels, the loss is `F.cross_entropy` of its logits.",
        "",
        "* *Fused*: flce computed the loss. No operation computed the logits. Loss, outputs and the gradient of each",
        "  parameter equal those of stock up to rounding.",
        "* *Computes its logits*: the named operation computed the logits, with a warning. Loss, outputs and gradients",
        "  equal those of stock up to rounding.",
        "* *Stock fails*: stock Transformers cannot build or train the small model. The error follows.",
        "",
        f"Command: `{command}`, {datetime.date.today()}, Transformers {transformers.__version__}, "
        f"PyTorch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| | architectures | trained by stock | fused |",
        "|---|---:|---:|---:|",
    ]
    for kind, (title, mapping) in MAPPINGS.items():
        rows = [result for result in results if result.architecture.kind == kind]
        lines.append(_count_row(f"{title} (`{mapping}`)", [(str(i), row) for i, row in enumerate(rows)]))
    by_type = [(result.architecture.model_type, result) for result in results]
    lines.append(_count_row("all four mappings, each architecture counted once", by_type))
    by_class = [(result.architecture.class_name, result) for result in results]
    lines.append(_count_row("all four mappings, each class counted once", by_class))
    lines += ["", "## Not fused", "", "| architecture | class | result |", "|---|---|---|"]
    for result in results:
        if result.status != FUSED:
            reason = result.reason.replace("|", "\\|").replace("<", "&lt;")
            text = f"{result.status}: {reason}" if reason else result.status
            lines.append(f"| {result.architecture.model_type} | {result.architecture.class_name} | {text} |")
    lines += ["", "## Fused", "", "The names are those of `model_type` in a config.", ""]
    fused = sorted({result.architecture.model_type for result in results if result.status == FUSED})
    lines += textwrap.wrap(", ".join(fused) + ".", 120, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _count_row(title: str, results: list[tuple[str, Result]]) -> str:
    """Return a row with numbers of names: all names, names that stock trains, and names of which all are fused."""
    trained = {name for name, result in results if result.status != STOCK_FAILS}
    other = {name for name, result in results if result.status not in (STOCK_FAILS, FUSED)}
    return f"| {title} | {len({name for name, _ in results})} | {len(trained)} | {len(trained - other)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=MAPPINGS, nargs="+", default=list(MAPPINGS))
    parser.add_argument("--only", default="", help="a regular expression that the model type has to match")
    arguments = parser.parse_args()
    os.environ.setdefault("FLCE_BACKEND", "torch")
    table = sys.stdout
    sys.stdout = sys.stderr  # models print
    silence()
    results = []
    for architecture in architectures(arguments.kind):
        if re.search(arguments.only, architecture.model_type):
            result = examine(architecture)
            results.append(result)
            print(f"{result.seconds:5.1f} s  {architecture.id:30} {result.status} {result.reason}", flush=True)
    command = "python -m tests.huggingface.architectures > docs/models.md"
    table.write(report(results, command))


def silence() -> None:
    """Disable warnings of Transformers about missing fields of the small configs."""
    import transformers

    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
