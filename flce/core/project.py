"""Where the project is, for messages: a wheel has no documents."""

from __future__ import annotations

# A release puts the address in its place, here and in the files that describe the project.
REPOSITORY_URL = "https://example.invalid/flce"
# What the command line needs, by the names that pip knows.
COMMAND_LINE_PACKAGES = "matplotlib numpy rich typer"


def locate_page(page: str) -> str:
    """Where a page of the documents is. ``page``: such as ``trainers.md``."""
    if ".invalid" in REPOSITORY_URL:  # sources whose address nothing has filled in
        return f"docs/{page} in flce's repository"
    return f"{REPOSITORY_URL}/blob/main/docs/{page}"
