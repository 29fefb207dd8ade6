"""Check that the supported versions are the versions of the test environments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flce
from flce.tools.machine import BY_HAND, TESTED

ROOT = Path(flce.__file__).parents[1]


def pinned(environment: str, package: str) -> str:
    found = re.search(rf"^{package}==(\S+) ", (ROOT / f"requirements-{environment}.txt").read_text(), re.M)
    assert found
    return found[1]


@pytest.mark.parametrize("package", TESTED)
def test_oldest_and_newest_versions(package: str) -> None:
    """Compare the versions of the environments, the package's metadata and the README."""
    oldest, newest = TESTED[package]
    assert (pinned("oldest", package), pinned("newest", package)) == (oldest, newest)
    assert f'"{package}>={oldest.rpartition(".")[0]}' in (ROOT / "pyproject.toml").read_text()
    readme = (ROOT / "README.md").read_text()
    by_hand = BY_HAND.get(package)
    assert f"{oldest} to {newest}{f' ({by_hand} only by hand)' if by_hand else ''}" in readme
