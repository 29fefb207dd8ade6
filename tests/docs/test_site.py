"""Tests of the documentation site (`make docs`): links have the targets of the repository, or fail the build."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "integrations/README", "benchmarks/notes")
GOOD = """# A page

[another](b.md), [its part](b.md#two-words--more), [the changelog](../CHANGELOG.md#changelog),
[a file](../benchmarks/x.json), [a script](../scripts/mkdocs_hooks.py), [elsewhere](https://example.org/none)

![a picture](picture.png)
"""


def write(folder: Path, page: str) -> None:
    """Write a repository of a few documents to ``folder``, with this project's settings and hooks."""
    for name in ("docs", "scripts", "benchmarks", "integrations"):
        (folder / name).mkdir()
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copy(ROOT / "scripts" / "mkdocs_hooks.py", folder / "scripts")
    shutil.copy(ROOT / "docs" / "h200.png", folder / "docs" / "picture.png")
    (folder / "benchmarks" / "x.json").write_text("{}")
    for name in NAMES:
        (folder / f"{name}.md").write_text(f"# {name.title()}\n\n[a page]({'../' * name.count('/')}docs/a.md)\n")
    (folder / "docs" / "a.md").write_text(page)
    (folder / "docs" / "b.md").write_text("# Another\n\n## Two `words` & more\n\n[readme](../README.md)\n")


def build(folder: Path, page: str, nav: list[Any]) -> Path:
    """Build the site of a repository of `write`. Return its folder.

    Raises:
        mkdocs.exceptions.Abort: `mkdocs build --strict` would fail.
    """
    config = pytest.importorskip("mkdocs.config")
    pytest.importorskip("material")
    from mkdocs.commands.build import build

    write(folder, page)
    settings = config.load_config(str(folder / "mkdocs.yml"), strict=True, nav=nav, plugins=["search"])
    build(settings)
    return folder / "site"


ROOT_PAGES = [f"{name}.md" for name in NAMES]
NAV = [*ROOT_PAGES, "docs/a.md", "docs/b.md"]


def test_links_have_the_targets_of_the_repository(tmp_path: Path) -> None:
    site = build(tmp_path, GOOD, NAV)
    page = (site / "a" / "index.html").read_text()
    for link in (
        "../b/",
        "../b/#two-words--more",
        "../CHANGELOG/#changelog",
        "../benchmarks/x.json",
        "../scripts/mkdocs_hooks.py",
        "https://example.org/none",
    ):
        assert f'href="{link}"' in page
    assert 'src="../picture.png"' in page
    assert 'href="a/"' in (site / "index.html").read_text()
    assert 'href="../a/"' in (site / "integrations" / "index.html").read_text()
    for file in ("picture.png", "benchmarks/x.json", "scripts/mkdocs_hooks.py", "b/index.html", "CHANGELOG/index.html"):
        assert (site / file).is_file(), file
    assert 'id="two-words--more"' in (site / "b" / "index.html").read_text()


BROKEN = {
    "[gone](gone.md)": "'gone.md'",
    "[no such part](b.md#gone)": "'b.md#gone'",
    "[no such part here](#gone)": "'#gone'",
    "[no such part above](../CHANGELOG.md#gone)": "'../CHANGELOG.md#gone'",
    "[no such file](../benchmarks/gone.json)": "'../benchmarks/gone.json'",
    "[a folder](../benchmarks)": "'../benchmarks'",
    "[absolute](/docs/b.md)": "'/docs/b.md'",
    "[out of the repository](../../gone.md)": "'../../gone.md'",
    "![no such picture](gone.png)": "'gone.png'",
}


def test_a_link_without_target_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that each broken link has a warning, and that the build fails."""
    assert "-m mkdocs build --strict" in (ROOT / "Makefile").read_text()
    exceptions = pytest.importorskip("mkdocs.exceptions")
    with pytest.raises(exceptions.Abort, match=f"{len(BROKEN)} warnings"):
        build(tmp_path, "# A page\n\n" + "\n\n".join(BROKEN), NAV)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for link, target in BROKEN.items():
        assert any(target in line for line in warned), (link, warned)
