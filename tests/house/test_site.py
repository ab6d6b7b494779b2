"""The documentation site builds without warnings, has no dead links, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "embed": "src", "object": "data"}
"""Elements that load a resource, and the attribute with its address."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert build.returncode == 0, build.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def elements(text):
    """All opening tags of a page, with their attributes."""
    parser = HTMLParser()
    tags = []
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(text)
    return tags


def test_every_page_of_docs_is_on_the_site(pages):
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages


def test_nothing_is_loaded_from_another_host(site, pages):
    for name, text in pages.items():
        for tag, attributes in elements(text):
            address = attributes.get(LOADING.get(tag, "")) or (attributes.get("href") if tag == "link" else None)
            if address is not None and (tag != "link" or attributes.get("rel") not in ("canonical", "next", "prev")):
                assert not re.match(r"(https?:)?//", address), (name, tag, address)
            # The theme would load a library from another host for diagrams.
            assert "mermaid" not in (attributes.get("class") or ""), name
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name
    scripts = list((site / "assets").glob("*.js"))
    assert [path.name for path in scripts] == ["iframe-worker.js"]
    assert "http" not in scripts[0].read_text(encoding="utf-8").split("*/")[1]


def test_what_pages_point_to_is_there(site, pages):
    count = 0
    for name, text in pages.items():
        if name == "404.html":
            continue
        for tag, attributes in elements(text):
            address = attributes.get(LOADING.get(tag, "")) or (attributes.get("href") if tag in ("a", "link") else None)
            if not address or urlsplit(address).scheme or address.startswith("#"):
                continue
            target = (site / name).parent / unquote(urlsplit(address).path)
            assert target.is_file(), (name, tag, address)
            count += 1
    assert count > 1000


def test_formulas_are_mathml(pages):
    for page in ("method", "links", "scale"):
        source = re.sub(r"^```.*?^```|`[^`\n]+`", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.M | re.S)
        formulas = re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", source, re.S)
        assert pages[f"{page}.html"].count("<math ") == len(formulas) > 5
    assert "<math " in pages["reference/structures.html"]
    for name, text in pages.items():
        assert 'class="arithmatex"' not in text, name
        # Unknown LaTeX commands pass through the conversion unchanged: a backslash and a name.
        assert re.findall(r"<(?:mi|mo|mtext)[^>]*>\\\w+", text) == [], name
        if not name.startswith("repository/"):  # which holds sources
            assert ":math:" not in text, name
            assert ".. math" not in text, name


def test_records_that_pages_cite_are_on_the_site(site):
    for path in ("benchmarks/results/speed.json", "results/cifar10/cost.json"):
        assert (site / "repository" / path).read_bytes() == (ROOT / path).read_bytes()


def test_search_works_from_files_too(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {")
    for word in ("Mahalanobis", "with_pooling", "DistributedSampler"):
        assert word in index
