"""Head of runs with made-up figures."""

from __future__ import annotations

from typing import Any

HEAD: dict[str, Any] = {
    "date": "2026-11-26T01:02:03Z",
    "command": "python -m benchmarks operator",
    "commit": None,
    "versions": {"torch": "2.11.0"},
    "device": {"type": "cuda", "name": "made up"},
}
