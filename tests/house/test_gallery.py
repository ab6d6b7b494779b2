"""The notebooks of the gallery run, and print what they have stored."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery"
NOTEBOOKS = sorted(GALLERY.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def printed(outputs):
    """The printed text of all cells."""
    return "".join(line for cell in outputs for output in cell for line in output.get("text", []))


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_its_stored_outputs(path, tmp_path, monkeypatch):
    """Figures and words are the same. Numbers differ where training takes another course on another processor."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_default_dtype(torch.float32)
    run = runpy.run_path(str(GALLERY / "run.py"))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    fresh = run["execute"](notebook)
    stored = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert NUMBER.sub("#", printed(fresh)).split() == NUMBER.sub("#", printed(stored)).split()
    numbers = [[float(number) for number in NUMBER.findall(printed(outputs))] for outputs in (fresh, stored)]
    assert len(numbers[0]) > 2
    assert numbers[0] == pytest.approx(numbers[1], rel=0.25, abs=15)  # shares in per cent, and counts of inputs
    assert len(run["figures"](fresh)) == len(run["figures"](stored)) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_links_to_files_and_ends_with_what_to_do_next(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert "**The problem.**" in text[0]
    assert re.search(r"Install `molaplace\[[\w,]+\]`", text[0])
    assert text[-1].startswith("## What to do next")
    for target in re.findall(r"\]\((?!http)([^)#]+)", "\n".join(text)):
        assert (GALLERY / target).exists(), target
    assert f"({path.name})" in (GALLERY / "index.md").read_text(encoding="utf-8")
