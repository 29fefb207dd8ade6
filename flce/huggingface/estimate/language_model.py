"""Creation of a Transformers model on the meta device from its config, its adapters, and the inputs of a training step.

The class of the model is the class that a user would train, including an encoder and the parts for images and sound.
A step has tokens alone. Adapters are PEFT's. For weights in 4 bits bitsandbytes is not
needed: `Linear4bit` has the memory of its layer. ``training_memory.py`` and ``flce plan`` call this module.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Transformers' tables of classes with a language-model head, each with the class that creates the table's models. If a
# config does not name its class, the first table with the config is used. Older versions lack some of the tables.
MODEL_CLASSES = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_MULTIMODAL_LM_MAPPING", "AutoModelForMultimodalLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
)
# Entries that share a float32 scale: the default of bitsandbytes, without double quantization.
BLOCK_ENTRIES = 64


def load_config(source: str) -> Any:
    """Load the config of a model from a folder, a ``config.json``, or by a hub id from the cache of Transformers.

    Raises ValueError if no config was found, or if this version of Transformers does not support its model.
    """
    from transformers import AutoConfig

    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: give the folder of a model of Transformers, or its config.json")
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers raises several kinds of exceptions for invalid configs
        needs_code, message = "trust_remote_code" in str(error), format_in_one_line(error)
    if not path.exists():
        raise ValueError(
            f"{source} does not exist, and the cache of Transformers has no config of this name: give the folder "
            "of a model, its config.json, or the hub id of a model that was downloaded"
        )
    if needs_code:
        raise ValueError(f"{source} needs Python code from its repository, which flce plan does not run")
    raise ValueError(f"{source} is not a config that Transformers can read: {message}")


def format_in_one_line(error: BaseException) -> str:
    """Return the message of an error in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def make_model(config: Any, dtype: torch.dtype) -> Any:
    """Return a model of a config's class, in ``train()``, on the meta device. Raise ValueError if there is none, or if
    it expects images or sound instead of tokens."""
    import transformers

    names = set(getattr(config, "architectures", None) or ())
    found: list[tuple[bool, str]] = []
    for table, auto_class in MODEL_CLASSES:
        known = getattr(transformers, table, {}).get(type(config), ())
        known = known if isinstance(known, tuple) else (known,)
        found += [(any(one.__name__ in names for one in known), auto_class)] if known else []
    if not found:
        raise ValueError(f"Transformers has no class with a language-model head for a {config.model_type}")
    auto_class = getattr(transformers, max(found, key=lambda entry: entry[0])[1])  # of several the first
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype).train()
    except Exception as error:  # the model's code may raise any exception for inconsistent sizes
        message = f"this config of a {config.model_type} does not define a model: {format_in_one_line(error)}"
        raise ValueError(message) from None
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"a {type(model).__name__} expects {model.main_input_name} instead of tokens")
    if getattr(config, "is_encoder_decoder", False):  # the model shifts labels, which needs these tokens
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(model.config, name, None) is None:
                setattr(model.config, name, 0)
    return model


def output_embedding(model: Any) -> Any:
    """Return the output embedding of a model, or None."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that the config of a model allows, or None if it has no limit."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def step_inputs(model: Any, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the arguments of a call in a training step on the meta device, and the values of the tensors among them,
    by name."""
    parameters = inspect.signature(model.forward).parameters
    tokens = torch.full((batch_size, length), _text_token(model.config), dtype=torch.int64)
    values = {"labels": tokens, "input_ids": tokens}
    # Models of text and images need the type of each token.
    names = {"token_type_ids", "mm_token_type_ids"} & parameters.keys()
    values |= dict.fromkeys(sorted(names), torch.zeros_like(tokens))
    meta_tensors = {id(value): torch.empty_like(value, device="meta") for value in values.values()}
    arguments: dict[str, Any] = {name: meta_tensors[id(value)] for name, value in values.items()}
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments["use_cache"] = False
    return arguments, values


def _text_token(config: Any) -> int:
    """Return a token of ordinary text: not of padding, an end, or an image. If no class is left, return 0."""
    special = {
        value
        for part in (config, config.get_text_config(decoder=True))
        for name, value in vars(part).items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index"))
    }
    classes = getattr(config.get_text_config(decoder=True), "vocab_size", None) or 2
    return next((token for token in range(1, classes) if token not in special), 0)


# ------------------------------------------------------------------------------------------ adapters and 4 bits


class AdapterError(RuntimeError):
    """PEFT does not find the layers."""


@dataclass(frozen=True)
class Lora:
    """LoRA adapters. Only they are trained."""

    rank: int
    targets: str | None = None
    """"all-linear" (all linear layers except the head), names separated by commas, or None: PEFT's default."""


def add_adapters(model: Any, lora: Lora) -> None:
    """Add adapters to a model in place, and freeze all other weights. Raise AdapterError if PEFT cannot."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it warns of its kernels for a CPU
    peft = importlib.import_module("peft")
    names: str | list[str] | None = lora.targets
    kind = model.config.model_type
    if isinstance(names, str) and names != "all-linear":
        names = [name.strip() for name in names.split(",")]
        layers = [layer for layer, _ in model.named_modules()]
        for name in names:  # PEFT ignores a name without a layer if another name has one
            if not any(f".{layer}".endswith(f".{name}") for layer in layers if name):
                raise AdapterError(f"a {kind} has no layer {name!r}: give all-linear, or names such as q_proj,v_proj")
    try:
        peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules=names))
    except ValueError as error:
        if names is None:
            message = f"PEFT has no default layers for a {kind}: give all-linear, or names such as q_proj,v_proj"
            raise AdapterError(message) from None
        raise AdapterError(f"PEFT cannot add adapters to the layers {lora.targets!r} of a {kind}: {error}") from None
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        # PEFT's code of these adapters does not run on the meta device.
        message = f"a {kind} has experts, whose adapters cannot be planned: give names of layers, such as q_proj,v_proj"
        raise AdapterError(message)


def quantize_linear_layers(model: Any) -> None:
    """Replace linear layers by layers in 4 bits, as Transformers does with bitsandbytes.

    The head, the layers that the model names in `_keep_in_fp32_modules`, and subclasses of `nn.Linear` are left.
    """
    from transformers.pytorch_utils import Conv1D

    head = output_embedding(model)
    left = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, layer in list(model.named_modules()):
        is_linear = type(layer) is nn.Linear or isinstance(layer, Conv1D)
        if is_linear and layer is not head and not any(f".{part}." in f".{name}." for part in left):
            model.set_submodule(name, Linear4bit(layer))


class Linear4bit(nn.Linear):
    """A frozen linear layer on the meta device with weights in 4 bits. Each product allocates the full weight."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        sizes = layer.weight.shape  # those of GPT-2's `Conv1D` are in the other order
        self.out_features, self.in_features = sizes if isinstance(layer, nn.Linear) else reversed(sizes)
        entries = layer.weight.numel()
        packed = torch.empty((entries + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("absmax", torch.empty(-(-entries // BLOCK_ENTRIES), device="meta"), persistent=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Product4bit.apply(input, self.weight, (self.out_features, self.in_features))
        return out if self.bias is None else out + self.bias


class _Product4bit(torch.autograd.Function):
    """``x @ weight.T``. Forward and backward each allocate the weight in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(x, packed.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ packed.new_empty(ctx.shape, dtype=grad.dtype), None, None
