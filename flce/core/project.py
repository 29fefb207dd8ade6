"""Address of the project, for messages: a wheel does not contain the documents."""

from __future__ import annotations

# A release sets this address, here and in the files that describe the project (.github/workflows/release.yml).
REPOSITORY_URL = ""
# Packages that the command line needs, by their names on PyPI.
COMMAND_LINE_PACKAGES = "matplotlib numpy rich typer"


def locate_page(page: str) -> str:
    """Return the address of a page of the documents. ``page``: such as ``trainers.md``."""
    if not REPOSITORY_URL:
        return f"docs/{page} in flce's repository"
    return f"{REPOSITORY_URL}/blob/main/docs/{page}"
