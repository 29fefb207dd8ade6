"""Text to train on, and a tokenizer for it: both from what every Python installation has on disk.

The libraries that take a while to import are imported by the functions that use them, so that `--help` does not wait.
The scripts in integrations/ train on it too.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
SAMPLE = 10_000  # characters that show whether a tokenizer knows the text
# Parts of the standard library that are tests, tables, or installed by other packages.
NOT_PROSE = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def read_documents(source: Path | None) -> list[str]:
    """The text of a file, of every file in a folder, or (None) of Python's own standard library.

    Raises:
        ValueError: there is none.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if NOT_PROSE.isdisjoint(f.relative_to(root).parts)]
    elif source.is_dir():
        files = [f for f in source.rglob("*") if f.is_file()]
    else:
        files = [source]
    documents = []
    for file in sorted(files):
        try:
            documents.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a binary file among the text
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError("no text to train on: the file or folder has none")
    return documents


def byte_level_tokenizer(vocab_size: int, cache: Path) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer, trained on the standard library, or found trained in `cache`."""
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    key = f"{vocab_size} {platform.python_version()} {tokenizers.__version__} {sysconfig.get_path('stdlib')}"
    file = cache / f"tokenizer-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END_OF_TEXT],
            show_progress=False,
        )
        tokenizer.train_from_iterator(read_documents(None), trainer)
        if tokenizer.get_vocab_size() < vocab_size:
            raise ValueError(
                f"the standard library has text for {tokenizer.get_vocab_size():,} tokens, "
                f"and {vocab_size:,} were asked for: take a smaller --vocab-size, or a --model"
            )
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(unfinished))
        unfinished.replace(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END_OF_TEXT)


def token_batches(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    steps: int,
    batch_size: int,
    seq_len: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """The shuffled documents, packed into (steps, batch_size, seq_len); used again if they are few.

    Raises:
        ValueError: the tokenizer does not know the words of the text.
    """
    import numpy as np

    sample = tokenizer.encode(" ".join(documents)[:SAMPLE], add_special_tokens=False)
    known = len([token for token in sample if token != tokenizer.unk_token_id])
    if known <= len(sample) / 2:
        raise ValueError(
            f"the tokenizer knows {known} of {len(sample)} tokens of the text: give a model with its tokenizer"
        )
    order = random.Random(seed).sample(documents, len(documents))

    def tokens() -> Iterator[int]:
        for document in itertools.cycle(order):
            yield from tokenizer.encode(document, add_special_tokens=False)
            if tokenizer.eos_token_id is not None:
                yield tokenizer.eos_token_id

    count = steps * batch_size * seq_len
    return np.fromiter(tokens(), dtype=np.int64, count=count).reshape(steps, batch_size, seq_len)
