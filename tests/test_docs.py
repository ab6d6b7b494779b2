"""Every Python snippet of README and docs runs, in order, in one namespace for each page."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import mola

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```|<!-- setup[^\n]*\n(.*?)-->", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    namespace = {"torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)
        for match in SNIPPET.finditer(page.read_text()):
            exec(compile(match.group(1) or match.group(2), f"{page.name}", "exec"), namespace)
    if page.name == "README.md":
        assert namespace["probs"].shape == (10, 3)
        assert torch.allclose(namespace["anything"](namespace["x"]).sum(1), torch.ones(10), atol=1e-6)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
