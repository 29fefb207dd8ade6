"""Text of messages: numbers of bytes, shapes, and addresses of the documents."""

from __future__ import annotations

import re

MIB, GIB = 1 << 20, 1 << 30
UNITS = {"kb": 1000, "kib": 1 << 10, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": MIB, "gib": GIB, "tib": 1 << 40}
# A wheel does not contain the documents. A release sets this address, here and in the files that describe the project
# (.github/workflows/release.yml).
REPOSITORY_URL = ""
MAX_SIZE = 1 << 30  # of a dimension: the bytes of all tensors of a plan then fit into 64 bits


def parse_bytes(text: str, name: str = "") -> int:
    """Return the bytes of "256MiB" or "1.5 GB". Raise ValueError for another text. Its message begins with `name`, the
    name of an argument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        expected = f"{name} must be an int or" if name else "expected"
        raise ValueError(f"{expected} a size such as 80GiB, 80GB or 256MiB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def parse_sizes(text: str, names: str = "N,H,V") -> tuple[int, ...]:
    """Return one number for each of the names, from "4096,2048,32000" or "4096x2048x32000". Raise ValueError for
    another text."""
    parts = text.replace("x", ",").split(",")
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    count = len(names.split(","))
    if len(sizes) != count or not all(0 < size <= MAX_SIZE for size in sizes):
        raise ValueError(f"expected {names} as {count} positive numbers, at most {MAX_SIZE}, got {text!r}")
    return sizes


def size_text(size: float) -> str:
    """Return a size as text, such as "823 MiB" or "7.84 GiB"; small sizes as "300 bytes"."""
    if size < MIB / 100:
        return f"{size:,.0f} bytes" if size else "0"
    if size >= GIB:
        return f"{size / GIB:.3g} GiB" if size < 1000 * GIB else f"{size / GIB:,.0f} GiB"
    return f"{size / MIB:,.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.2f} MiB"


def locate_page(page: str) -> str:
    """Return the address of a page of the documents. ``page``: such as ``trainers.md``."""
    if not REPOSITORY_URL:
        return f"docs/{page} in flce's repository"
    return f"{REPOSITORY_URL}/blob/main/docs/{page}"
