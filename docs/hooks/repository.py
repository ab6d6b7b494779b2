"""What pages link to outside `docs/` becomes part of the site, so that no link needs a host.

Markdown of the repository becomes a page, source code a page that shows it, a folder a page that lists it, and records
(JSON) and pictures are copied as they are. All of it lies under `repository/`, by its path in the repository.
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
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Lists and source code would come up in every search."""
ALWAYS = ("CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
"""In the navigation, whether or not a page links to them."""


def place(path: str) -> str:
    """Where a file of the repository is among the sources of the site.

    Args:
        path: relative to the repository, with slashes.

    Returns:
        Relative to `docs/`.
    """
    if _is_page(path):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{HERE}{path}/index.md"
    if path.endswith(tuple(LANGUAGES)) or path in ("Makefile", "LICENSE"):
        return f"{HERE}{path}.md"
    return HERE + path


def _is_page(path: str) -> bool:
    """Whether MkDocs itself has it: all of `docs/` but the code that makes the site."""
    return path.startswith("docs/") and not path.endswith(".py")


def links(markdown: str, folder: str) -> list[str]:
    """Paths, relative to the repository, of what a page links to outside `docs/`.

    Args:
        markdown: the page.
        folder: where it lies in the repository.

    Returns:
        Existing files and folders.
    """
    plain = FENCED.sub("", markdown)
    found = {posixpath.normpath(posixpath.join(folder, target)) for _, target in LINK.findall(plain)}
    return sorted(path for path in found if not (_is_page(path) or path.startswith("..")) and (ROOT / path).exists())


def _content(path: str) -> str | None:
    """The page to make of a path; None for a file that is copied as it is."""
    whole = ROOT / path
    if whole.is_dir():
        inside = sorted(one for one in whole.rglob("*") if one.is_file() and not _hidden(one.relative_to(ROOT)))
        by_folder = groupby(inside, key=lambda one: one.parent.relative_to(whole))
        lines = [f"* {inner.as_posix()}/: {_listed(files, whole)}" for inner, files in by_folder]
        return f"{UNSEARCHED}# `{path}/`\n\n" + "\n".join(lines) + "\n"
    if whole.suffix == ".md":
        return whole.read_text(encoding="utf-8")
    if place(path).endswith(".md"):
        language = LANGUAGES.get(whole.suffix, "text")
        return f"{UNSEARCHED}# `{path}`\n\n````{language}\n{whole.read_text(encoding='utf-8')}````\n"
    return None


def _listed(files: Iterable[Path], folder: Path) -> str:
    return ", ".join(f"[{one.name}]({one.relative_to(folder).as_posix()})" for one in files)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add everything that pages link to, and what that links to in turn."""
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
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path), inclusion=inclusion))
        else:
            files.append(File.generated(config, place(path), content=content, inclusion=inclusion))
            folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
            waiting += links(content, folder)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Point links that leave `docs/`, and those of pages from outside, to where their targets are on the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(HERE) if uri.startswith(HERE) else f"docs/{uri}"
    folder = posixpath.dirname(path)

    def moved(match: re.Match[str]) -> str:
        start, target = match.groups()
        aim = posixpath.normpath(posixpath.join(folder, target))
        if aim.startswith("..") or not (ROOT / aim).exists():
            return match.group()  # left for MkDocs, which warns
        return start + posixpath.relpath(place(aim), posixpath.dirname(uri) or ".")

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)
