"""Run every Python snippet of README, AGENTS and docs, in order, in one namespace per page.

Hidden comments add to a page: `<!-- setup ... -->` is code for objects that the reader already has, `<!-- file: NAME -->` writes the
next snippet to a file, `<!-- run -->` runs the commands of the next block, and `<!-- needs: PACKAGES -->` skips the next snippet if a
package is missing, unless MOLAPLACE_RECIPES is set (`make test-recipes`). The export for FastAPI takes long, so only that target runs it:
`<!-- needs: make test-recipes -->`.
"""

import os
import re
import runpy
import shlex
import shutil
import struct
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
import molaplace_lab.__main__
from molaplace.__main__ import main
from molaplace.saving.weights import save_weights
from molaplace_lab.models import lenet
from tests.workspace import make_workspace

ROOT = Path(__file__).resolve().parents[2]
RECIPES = bool(os.environ.get("MOLAPLACE_RECIPES"))
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]+) -->\n)?"
    r"(?:(?:^<!-- file: (?P<file>\S+) -->\n)?^```python\n(?P<code>.*?)^```"
    r"|<!-- setup[^\n]*\n(?P<setup>.*?)-->"
    r"|^<!-- run -->\n```console\n(?P<commands>.*?)^```)",
    re.M | re.S,
)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def run_command(line, monkeypatch):
    """Run a command line in this process; return its words."""
    words = shlex.split(line, comments=True)
    words = [path for word in words for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    laboratory = words[:3] == ["python", "-m", "molaplace_lab"]
    monkeypatch.setattr("sys.argv", words[2:] if laboratory else words)
    if laboratory:
        with pytest.raises(SystemExit) as stop:
            molaplace_lab.__main__.main()
        assert not stop.value.code, line
        return words
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return words
    assert words[0] == "molaplace", line
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, line
    return words


@pytest.mark.usefixtures("_blank_figures")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_run(page, tmp_path, monkeypatch):
    if "from botorch" in page.read_text():
        pytest.importorskip("botorch", reason="NO BOTORCH: pip install botorch to run this page.")
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.set_default_dtype(torch.float32)
    namespace = {"torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.errors.MolaWarning)
        for match in SNIPPET.finditer(page.read_text()):
            if match["needs"] and not RECIPES and not all(map(find_spec, match["needs"].split())):
                continue
            if match["file"]:
                (tmp_path / match["file"]).write_text(match["code"])
                monkeypatch.delitem(sys.modules, Path(match["file"]).stem, raising=False)
            elif match["commands"]:
                for line in match["commands"].replace("\\\n", " ").splitlines():
                    run_command(line, monkeypatch)
            else:
                exec(compile(match["code"] or match["setup"], page.name, "exec"), namespace)
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
    if page.name == "README.md":
        assert namespace["probs"].shape == (10, 3)
        assert torch.allclose(namespace["probs"].sum(1), torch.ones(10), atol=1e-6)


def test_links_to_files_exist():
    dead = [
        (name_of(page), target)
        for page in PAGES
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_files_for_adding_things_exist():
    """Each file in the table of ARCHITECTURE.md exists, and defines the name after `::`."""
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Adding things\n")[1]
    files = re.findall(r"`((?:[\w.]+/)*(?:\w+\.(?:py|yml)|(?<=/)))(?:::(\w+))?`", table)
    assert len(files) > 25
    for path, name in files:
        files = [index for index in (ROOT / "src" / "molaplace" / path, ROOT / path) if index.exists()]
        assert files, path
        if name:
            assert re.search(rf"^(?:class |def |){name}\b", files[0].read_text(encoding="utf-8"), re.M), (
                f"{path}::{name}"
            )


def commands():
    """Every `molaplace` command of README and of the page on the commands, in order."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "commands.md").read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        yield from (line for line in block.splitlines() if line.startswith(("molaplace ", "python -m molaplace_lab ")))


def write_idx(folder: Path, prefix: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
        heading = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
        (folder / name).write_bytes(heading + array.tobytes())


def bars(count: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Easy images in MNIST's format: a bar at the height of its class."""
    labels = np.arange(count, dtype=np.uint8) % 10
    pixels = draw.integers(0, 60, (count, 28, 28))
    for index, label in enumerate(labels):
        pixels[index, 2 * label + 3 : 2 * label + 6] += 150
    return pixels.astype(np.uint8), labels


def prepare(folder: Path) -> None:
    """Create what the pages assume: checkpoints, data in their standard files, images and a module."""
    draw = np.random.default_rng(0)
    for prefix, count in (("train", 200), ("t10k", 100)):
        write_idx(folder / "DIR" / "MNIST" / "raw", prefix, *bars(count, draw))
    noise = draw.integers(0, 256, (40, 28, 28)).astype(np.uint8)
    write_idx(folder / "DIR" / "FashionMNIST" / "raw", "t10k", noise, np.zeros(40, dtype=np.uint8))
    pixels, labels = bars(200, draw)
    inputs = torch.from_numpy(pixels)[:, None].float() / 255
    targets = torch.from_numpy(labels).long()
    for seed in range(2):
        torch.manual_seed(seed)
        network = lenet()
        optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(25):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(inputs), targets).backward()
            optimiser.step()
        save_weights(network, folder / "checkpoints" / f"{seed}.safetensors")
    # Images have 6 x 6 pixels; the pages resize to 32 x 32, the input size of the networks.
    workspace = make_workspace(folder, "models", side=32)
    for name, network in zip("ab", workspace.networks(2), strict=True):
        torch.save(network.state_dict(), folder / f"{name}.pt")
    (folder / "images").mkdir()
    for part in ("train", "val", "test", "strange"):
        shutil.copytree(folder / part, folder / "images" / part)
    shutil.copytree(folder / "strange", folder / "images" / "new")


@pytest.mark.slow
@pytest.mark.usefixtures("_blank_figures")
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_the_commands_for_own_models_run(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ran = [run_command(line, monkeypatch)[1] for line in commands()]
    assert {"fit", "evaluate", "predict", "info"} <= set(ran)
    assert "MoLA" in (tmp_path / "evaluation" / "index.html").read_text()
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 501  # the digits
    assert (tmp_path / "predictions.jsonl").read_text().count("prob_cat") == 12
    assert (tmp_path / "posterior-nll" / "job.toml").exists()
