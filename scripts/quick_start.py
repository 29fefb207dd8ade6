"""Files for the quick start of README.md: its commands, a small model and a text; `quick_start.sh` calls this."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]

from demo import tiny_tokenizer  # noqa: E402
from flce.testing import tiny_model  # noqa: E402


def commands() -> str:
    """Return the commands of the section."""
    section = (ROOT / "README.md").read_text().partition("## Quick start\n")[2].partition("\n## ")[0]
    found = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("README.md: expected a block of sh in the quick start")
    return found[1]


def main(folder: Path) -> None:
    (folder / "quick_start.sh").write_text(commands())
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(Path(re.__file__).read_text()).input_ids
    # The last chunk has one token, which has no next token to predict.
    (folder / "my-text.txt").write_text(str(tokenizer.decode(tokens[: len(tokens) // 1024 * 1024 + 1])))
    tiny_model().save_pretrained(folder / "my-model")
    tokenizer.save_pretrained(folder / "my-model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
