"""MkDocs hook that adds the files outside `docs/` that pages link to, so that every link works on the site.

Markdown files become pages. Source files become pages that show their code, and folders become pages that list their files. Records
(JSON) and images are copied; weights, which take megabytes, are only named. All added files are under `repository/` and keep their paths
in the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = "repository/"
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)#\s]+)")
FENCED = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
WEIGHTS = ".safetensors"
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Front matter that excludes file lists and source code from the search index."""
ALWAYS = ("CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
"""Files that the navigation always includes."""


def site_path(path: str) -> str:
    """Return the path, relative to `docs/`, that a repository file has among the site's source files."""
    if _is_page(path):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{HERE}{path}/index.md"
    if path.endswith(tuple(LANGUAGES)) or path in ("Makefile", "LICENSE"):
        return f"{HERE}{path}.md"
    return HERE + path


def _is_page(path: str) -> bool:
    """Return True for files that MkDocs reads without this hook: all files in `docs/` except code."""
    return path.startswith("docs/") and not path.endswith(".py")


def links(markdown: str, folder: str) -> list[str]:
    """Return the existing files and folders outside `docs/` that a page in `folder` links to."""
    plain = FENCED.sub("", markdown)
    targets = {posixpath.normpath(posixpath.join(folder, target)) for _, target in LINK.findall(plain)}
    return sorted(path for path in targets if not (_is_page(path) or path.startswith("..")) and (ROOT / path).exists())


def _content(path: str) -> str | None:
    """Return the Markdown text of the page for a path, or None if the file is copied unchanged."""
    whole = ROOT / path
    if whole.is_dir():
        inside = sorted(file for file in whole.rglob("*") if file.is_file() and not _hidden(file.relative_to(ROOT)))
        by_folder = groupby(inside, key=lambda file: file.parent.relative_to(whole))
        lines = [f"* {inner.as_posix()}/: {_listed(files, whole)}" for inner, files in by_folder]
        return f"{UNSEARCHED}# `{path}/`\n\n" + "\n".join(lines) + "\n"
    if whole.suffix == ".md":
        return whole.read_text(encoding="utf-8")
    if site_path(path).endswith(".md"):
        language = LANGUAGES.get(whole.suffix, "text")
        return f"{UNSEARCHED}# `{path}`\n\n````{language}\n{whole.read_text(encoding='utf-8')}````\n"
    return None


def _listed(files: Iterable[Path], folder: Path) -> str:
    return ", ".join(
        f"`{file.name}`" if file.suffix == WEIGHTS else f"[{file.name}]({file.relative_to(folder).as_posix()})"
        for file in files
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add all linked files and, recursively, the files that they link to."""
    pages = [file for file in files.documentation_pages() if file.src_uri and not file.src_uri.startswith(HERE)]
    waiting = [path for file in pages for path in links(file.content_string, posixpath.dirname(f"docs/{file.src_uri}"))]
    waiting += ALWAYS
    known: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        content = _content(path)
        inclusion = InclusionLevel.INCLUDED if path in ALWAYS else InclusionLevel.NOT_IN_NAV
        if content is None:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path), inclusion=inclusion))
        else:
            files.append(File.generated(config, site_path(path), content=content, inclusion=inclusion))
            folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
            waiting += links(content, folder)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite links from or to files outside `docs/` so that they use the paths on the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(HERE) if uri.startswith(HERE) else f"docs/{uri}"
    folder = posixpath.dirname(path)

    def site_link(match: re.Match[str]) -> str:
        start, target = match.groups()
        aim = posixpath.normpath(posixpath.join(folder, target))
        if aim.startswith("..") or not (ROOT / aim).exists():
            return match.group()  # left unchanged, so that MkDocs warns about it
        return start + posixpath.relpath(site_path(aim), posixpath.dirname(uri) or ".")

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(site_link, part) for part in parts[::2]]
    return "".join(parts)
