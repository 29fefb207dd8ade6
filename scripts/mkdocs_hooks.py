"""Hooks of `mkdocs.yml`: the site has the files that the documents link to, with their paths in the repository.

MkDocs supports one folder of documents. README.md and other pages are above this folder, and documents link to files of
the repository (`../benchmarks/results/h200.json`). The hook gives each file its path in the repository. So a link that
works in the repository works on the site, too, without copies.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "integrations/README.md", "benchmarks/notes.md")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Rename all documents to their paths in the repository. Documents of docs/ keep their addresses on the site."""
    root = Path(config.config_file_path).parent
    folder = Path(config.docs_dir).relative_to(root)
    for file in list(files):
        if file.src_dir == config.docs_dir:  # other files belong to the theme
            files.remove(file)
            files.append(_file(root, folder / file.src_uri, config, dest_uri=file.dest_uri))
    for name in PAGES:
        files.append(_file(root, Path(name), config))
    for page in list(files.documentation_pages()):
        for target in _linked(root, Path(page.src_uri)):
            if target.as_posix() not in files.src_uris:
                files.append(_file(root, target, config))
    return files


def _linked(root: Path, document: Path) -> list[Path]:
    """Return the files of the repository that a document links to. MkDocs reports the other links."""
    targets = [(root / document.parent / link).resolve() for link in _LINK.findall((root / document).read_text())]
    return [target.relative_to(root) for target in targets if target.is_file() and target.is_relative_to(root)]


def _file(root: Path, path: Path, config: MkDocsConfig, dest_uri: str | None = None) -> File:
    return File(path.as_posix(), str(root), config.site_dir, config.use_directory_urls, dest_uri=dest_uri)
