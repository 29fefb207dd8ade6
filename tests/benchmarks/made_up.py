"""Results with made-up figures."""

from __future__ import annotations

from typing import Any

from benchmarks.runs import BenchResult, Entry, Run
from flce.core.sizes import MIB

HEAD: dict[str, Any] = {
    "date": "2026-11-26T01:02:03Z",
    "command": "python -m benchmarks operator",
    "commit": None,
    "versions": {"torch": "2.11.0"},
    "device": {"type": "cuda", "name": "made up"},
}


def measured(
    name: str, milliseconds: float, mib: float | None = None, family: str = "ours", **more: Any
) -> BenchResult:
    """Return a result with the same time as called, alone and of the host."""
    times = {f"{kind}samples_ms": [milliseconds] for kind in ("", "alone_", "host_")}
    return BenchResult(
        name, name, family, workspace_bytes=None if mib is None else round(mib * MIB), **{**times, **more}
    )


def run_of(*entries: Entry) -> Run:
    return Run("operator", HEAD, list(entries))
