"""What `mkdocs.yml` does beside its settings: the site has the files that the documents link to, at their places.

MkDocs knows one folder of documents. README.md and its like are above it, and documents link to files of the repository
(`../benchmarks/results/h200.json`). Here each file gets the name that it has in the repository. So a link that leads
somewhere in the repository leads there on the site as well, and nothing is copied or written anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "integrations/README.md")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """All documents by their names in the repository; those of docs/ keep their addresses on the site."""
    root = Path(config.config_file_path).parent
    folder = Path(config.docs_dir).relative_to(root)
    for file in list(files):
        if file.src_dir == config.docs_dir:  # others are of the theme
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
    """The files of the repository that a document links to; MkDocs complains of the other links."""
    targets = [(root / document.parent / link).resolve() for link in _LINK.findall((root / document).read_text())]
    return [target.relative_to(root) for target in targets if target.is_file() and target.is_relative_to(root)]


def _file(root: Path, path: Path, config: MkDocsConfig, dest_uri: str | None = None) -> File:
    return File(path.as_posix(), str(root), config.site_dir, config.use_directory_urls, dest_uri=dest_uri)
