"""Writes what the quick start of README.md needs into a folder: its two blocks as files, a small model, a text.

    python scripts/quick_start.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def block(language: str) -> str:
    """The first of the section."""
    section = (ROOT / "README.md").read_text().partition("## Quick start\n")[2].partition("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"README.md has no block of {language} in its quick start")
    return found[1]


def save_model(folder: Path) -> None:
    """A model of one's own: a small Qwen3 with a tokenizer trained on Python's standard library."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from flce.demo.corpus import byte_level_tokenizer

    tokenizer = byte_level_tokenizer(1000, ROOT / ".cache")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    (folder / "quick_start.sh").write_text(block("sh"))
    (folder / "finetune.py").write_text(block("python"))
    (folder / "my-text.txt").write_text(Path(re.__file__).read_text())
    save_model(folder / "my-model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
