"""Creation of a Transformers model on the meta device from its config, and the inputs of a training step.

The class of the model is the class that a user would train, including an encoder and the parts for images and sound.
`StepInputs.remarks` describes inputs that a step omits. ``training_memory.py`` and ``flce plan`` call this module.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
# Patterns of arguments of a model that are not text.
MEDIA = {
    "images": r".*(pixel|image)_?\w*(values|embeds|patches)",
    "videos": r".*video.*",
    "sound": r"input_values|input_features|.*audio.*",
}


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
    """Return a model of a config's class, in ``train()``, on the meta device. Raise ValueError if there is none."""
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
    if getattr(config, "is_encoder_decoder", False):  # the model shifts labels, which needs these tokens
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(model.config, name, None) is None:
                setattr(model.config, name, 0)
    return model


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that the config of a model allows, or None if it has no limit."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


class StepInputs:
    """The inputs of a model in a training step. Raises ValueError if the model has no argument ``input_ids``."""

    def __init__(self, model: Any) -> None:
        config, self._arguments = model.config, inspect.signature(model.forward).parameters
        if "input_ids" not in self._arguments:
            raise ValueError(f"a {type(model).__name__} expects {model.main_input_name} instead of tokens")
        self._token = _text_token(config)
        self.remarks: list[str] = []
        """Sentences about additional and omitted inputs of a step."""
        if getattr(config, "is_encoder_decoder", False):
            self.remarks.append("The encoder and the decoder get a sequence of this length each.")
        media = dict.fromkeys(kind for name in self._arguments if (kind := _media_kind(name)) is not None)
        if media:
            self.remarks.append(f"A step has text alone, without {' or '.join(media)}; all weights are counted.")

    def tensors(self, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the arguments of a call on the meta device, and the values of the tensors among them, by name."""
        tokens = torch.full((batch_size, length), self._token, dtype=torch.int64)
        values = {"labels": tokens, "input_ids": tokens}
        if any(map(_media_kind, self._arguments)):  # models of text and images need the type of each token
            names = {"token_type_ids", "mm_token_type_ids"} & self._arguments.keys()
            values |= dict.fromkeys(sorted(names), torch.zeros_like(tokens))
        meta_tensors = {id(value): torch.empty_like(value, device="meta") for value in values.values()}
        arguments: dict[str, Any] = {name: meta_tensors[id(value)] for name, value in values.items()}
        if "use_cache" in self._arguments or any(p.kind is p.VAR_KEYWORD for p in self._arguments.values()):
            arguments["use_cache"] = False
        return arguments, values


def _media_kind(argument: str) -> str | None:
    return next((kind for kind, pattern in MEDIA.items() if re.fullmatch(pattern, argument)), None)


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
