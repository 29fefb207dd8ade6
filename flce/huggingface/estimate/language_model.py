"""A model of Transformers without values, made from its config, and the tensors that a training step gives it.

The class is the one that a user would train: with its encoder where it has one, and with its parts for images and
sound. What a step of it leaves out is told in sentences.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flce.core.shard import shard_bounds

# Transformers' tables of classes with a language-model head, each with the class that makes models of it. A config that
# does not name its class gets that of the first table that has one. Older Transformers lack some.
MODEL_CLASSES = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_MULTIMODAL_LM_MAPPING", "AutoModelForMultimodalLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
)
# Arguments of a model that are no text: by name, what they are.
MEDIA = {
    "images": r".*(pixel|image)_?\w*(values|embeds|patches)",
    "videos": r".*video.*",
    "sound": r"input_values|input_features|.*audio.*",
}


def load_config(source: str) -> Any:
    """The config of a model, from a folder, a ``config.json``, or the cache of Transformers. Nothing is downloaded.

    Args:
        source: a path, or a hub id whose config has been downloaded before.

    Raises:
        ValueError: there is none, or none of a model that this Transformers knows.
    """
    from transformers import AutoConfig

    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: give the folder of a model of Transformers, or its config.json")
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers has classes of its own for what is wrong with a config
        needs_code, message = "trust_remote_code" in str(error), format_in_one_line(error)
    if not path.exists():
        raise ValueError(
            f"{source} does not exist, and is no model whose config is in the cache of Transformers: give the folder "
            "of a model, its config.json, or the hub id of a model that was downloaded"
        )
    if needs_code:
        raise ValueError(f"{source} needs Python code of its own, which flce plan does not run")
    raise ValueError(f"{source} is no config that Transformers can read: {message}")


def format_in_one_line(error: BaseException) -> str:
    """An error in one line, cut where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def make_model(config: Any, dtype: torch.dtype) -> Any:
    """A model of a config's class, in ``train()``, on the meta device.

    Raises:
        ValueError: Transformers has no class with a language-model head for the config, or cannot make it.
    """
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
    except Exception as error:  # whatever the model's own code makes of sizes that do not go together
        raise ValueError(f"no {config.model_type} can be made of this config: {format_in_one_line(error)}") from None
    if getattr(config, "is_encoder_decoder", False):  # what it makes of labels begins with a token of its config
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(model.config, name, None) is None:
                setattr(model.config, name, 0)
    return model


def shard_config(config: Any, shards: int) -> Any:
    """A config of the model as the process of a group has it that has most classes: of the embedding and the head, that
    is ceil(V / shards) of V. All else is whole."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ValueError(f"the config of a {config.model_type} has no vocab_size that could be divided")
    classes = shard_bounds(text.vocab_size, shards, 0)[1]
    for each in (config, text):
        for name, value in list(vars(each).items()):
            if name == "vocab_size":
                setattr(each, name, classes)
            elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= classes:
                setattr(each, name, 0)  # an embedding refuses padding that it has not
    return config


def max_positions(config: Any) -> int | None:
    """The longest sequence that a model was made for; None: its config names none."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


class StepInputs:
    """What a training step gives to a model.

    Args:
        model: as `make_model` makes it.

    Raises:
        ValueError: the model takes no tokens.
    """

    def __init__(self, model: Any) -> None:
        config, self._arguments = model.config, inspect.signature(model.forward).parameters
        if "input_ids" not in self._arguments:
            raise ValueError(f"a {type(model).__name__} takes {model.main_input_name} in the place of tokens")
        self._token = _text_token(config)
        self.remarks: list[str] = []
        """What a step has besides a sequence of tokens, or has not, in sentences."""
        if getattr(config, "is_encoder_decoder", False):
            self.remarks.append("The encoder and the decoder get a sequence of this length each.")
        media = dict.fromkeys(kind for name in self._arguments if (kind := _media_kind(name)) is not None)
        if media:
            self.remarks.append(f"A step has text alone, without {' or '.join(media)}; all weights are counted.")

    def tensors(self, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The arguments of a call on the meta device, and the values of those that are tensors; both by name."""
        tokens = torch.full((batch_size, length), self._token, dtype=torch.int64)
        values = {"labels": tokens, "input_ids": tokens}
        if any(map(_media_kind, self._arguments)):  # models of text and images ask which tokens are which
            kinds = {"token_type_ids", "mm_token_type_ids"} & self._arguments.keys()
            values |= dict.fromkeys(sorted(kinds), torch.zeros_like(tokens))
        made = {id(value): torch.empty_like(value, device="meta") for value in values.values()}
        arguments: dict[str, Any] = {name: made[id(value)] for name, value in values.items()}
        if "use_cache" in self._arguments or any(p.kind is p.VAR_KEYWORD for p in self._arguments.values()):
            arguments["use_cache"] = False
        return arguments, values


def _media_kind(argument: str) -> str | None:
    return next((kind for kind, pattern in MEDIA.items() if re.fullmatch(pattern, argument)), None)


def _text_token(config: Any) -> int:
    """One that stands for a word: not for padding, an end, or an image."""
    special = {
        value
        for each in (config, config.get_text_config(decoder=True))
        for name, value in vars(each).items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index"))
    }
    return next(token for token in itertools.count(1) if token not in special)
