"""Writes the project's address into what is packaged, in place of the placeholder: python scripts/set_address.py URL

The release does this before it builds. `flce.core.project.ADDRESS` has the placeholder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("flce/core/project.py", "pyproject.toml", "CITATION.cff", "docs/quick-start.ipynb")
ADDRESS = re.compile(r'^ADDRESS = "(.*)"$', re.MULTILINE)


def set_address(root: Path, address: str) -> None:
    """Replace the address in all files.

    Raises:
        ValueError: ``address`` is no URL of a repository, or a file does not have the address of the others.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        raise ValueError(f"expected a URL such as https://github.com/owner/flce, got {address!r}")
    texts = {root / name: (root / name).read_text() for name in FILES}
    found = ADDRESS.search(texts[root / FILES[0]])
    for file, text in texts.items():
        if found is None or found[1] not in text:
            raise ValueError(f"{file} does not have the address of {FILES[0]}")
        file.write_text(text.replace(found[1], address))


if __name__ == "__main__":
    set_address(ROOT, sys.argv[1])
