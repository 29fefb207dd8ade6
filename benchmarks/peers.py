"""Versions of the compared libraries: released today, and in the result files (`make peers`)."""

from __future__ import annotations

import json
from urllib.request import urlopen

from benchmarks.pages import ROOT
from benchmarks.tables import NONE, Table
from flce.tools.machine import PEERS

LIBRARIES = ("torch", "triton", "transformers", "trl", *PEERS)


def released_version(library: str) -> str:
    try:
        with urlopen(f"https://pypi.org/pypi/{library}/json", timeout=20) as answer:
            return str(json.load(answer)["info"]["version"])
    except OSError as error:
        return f"unknown ({error})"


def measured_versions(library: str) -> dict[str, str]:
    """Return the newest date of a result file for each version of the library in result files."""
    dates: dict[str, str] = {}
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        document = json.loads(file.read_text())
        version = document.get("versions", {}).get(library)
        if version is not None:
            version = version.partition("+")[0]  # without the build
            dates[version] = max(dates.get(version, ""), document["date"][:10])
    return dates


def version_table() -> Table:
    rows = []
    for library in LIBRARIES:
        released, measured = released_version(library), measured_versions(library)
        dates = [f"{version} ({date})" for version, date in sorted(measured.items(), key=lambda item: item[1])]
        rows.append([library, released, ", ".join(dates) or NONE, "" if released in measured else "measure again"])
    return Table("Versions", ["library", "released", "measured", "verdict"], rows)
