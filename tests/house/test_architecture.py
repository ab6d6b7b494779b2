"""House rules: no grab-bag modules, a light import, a documented public API, no pickle. import-linter checks the layers."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_origin

import molaplace as mola

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "molaplace"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = ("molaplace.report", "molaplace.cli", "molaplace.__main__", "molaplace_lab")
"""Above the library: `import molaplace` loads none of them."""


def test_no_grab_bags():
    banned = re.compile(r"(^|_)(utils?|helpers?|misc|common|tools)$")
    assert [str(path) for path in FILES if banned.search(path.stem)] == []


def test_only_likelihoods_compute_probabilities():
    """Nothing in structures/ does."""
    for path in (PACKAGE / "structures").glob("*.py"):
        assert "softmax(" not in path.read_text(), path.name


HEAVY = {
    *(
        "sklearn",
        "scipy",
        "matplotlib",
        "typer",
        "click",
        "rich",
        "torchmetrics",
        "pooch",
        "PIL",
        "onnx",
        "timm",
        "transformers",
    ),
    *("torchvision", "curvlinops", "gradio"),
}


def test_importing_mola_costs_little_more_than_torch():
    """Counted in modules, not in seconds: `import molaplace` loads no third-party module beyond torch and the core dependencies."""
    code = (
        "import sys, torch.distributed.nn, numpy.random, safetensors.torch, tqdm.auto; before = set(sys.modules); "
        "import molaplace; print(' '.join(sorted(set(sys.modules) - before))); import molaplace_lab.models; print(' '.join(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    added, everything = (line.split() for line in said.splitlines())
    assert [name for name in added if name.split(".")[0] != "molaplace"] == []
    assert [name for name in added if name.startswith(FLOORS)] == [], "what only commands need"
    assert len(added) < 130
    assert HEAVY.isdisjoint(name.split(".")[0] for name in everything), "an extra, for the library or for its networks"


def test_public_names_are_documented():
    for name in mola.__all__:
        assert getattr(mola, name).__doc__, name
    for module in ("rules", "structures", "links", "likelihoods", "calibration", "export", "whole", "errors"):
        public = getattr(mola, module)
        for name in getattr(public, "__all__", ()):
            value = getattr(public, name)
            assert get_origin(value) or value.__doc__, f"mola.{module}.{name}"  # the alias of a type has no docstring


def unsafe_loads(source):
    """Uses of torch's loader other than `torch.load(..., weights_only=True)`, which builds tensors and runs nothing."""
    tree = ast.parse(source)
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value).startswith("torch"):
            if id(node) not in safe:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"from {node.module} import load" for alias in node.names if alias.name == "load")
        elif isinstance(node, ast.Import):
            # The checks above would miss torch under another name.
            yield from (
                f"import torch as {alias.asname}" for alias in node.names if alias.name == "torch" and alias.asname
            )


TRUSTED = {"export/reading.py": ["torch.export.load"]}
"""Loaders that unpickle, called only for files that the user trusts (test_export.py) or that were just written."""


def test_no_pickle():
    for path in FILES:
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        assert list(unsafe_loads(text)) == TRUSTED.get(name, []), name
        assert not re.search(r"^\s*(import|from) pickle", text, re.M)
