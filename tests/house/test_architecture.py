"""House rules: a light import, a documented public API, no pickle. import-linter checks the layers."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

from torch.utils._device import _device_constructors

import molaplace as mola

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "molaplace"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = ("molaplace.report", "molaplace.cli", "molaplace.__main__", "molaplace_lab")
"""Above the library: `import molaplace` loads none of them."""


HEAVY = {
    *(
        "sklearn",
        "scipy",
        "matplotlib",
        "typer",
        "click",
        "cyclopts",
        "rich",
        "torchmetrics",
        "pooch",
        "PIL",
        "onnx",
        "timm",
    ),
    *("transformers", "torchvision", "curvlinops", "gradio", "botorch", "gpytorch"),
}


def test_importing_mola_costs_little_more_than_torch():
    """Counted in modules, not in seconds: `import molaplace` loads no third-party module beyond torch and the core dependencies."""
    code = (
        "import sys, torch.distributed.nn, numpy.random, safetensors.torch, tqdm.auto; before = set(sys.modules); "
        "import molaplace; print(' '.join(sorted(set(sys.modules) - before))); import molaplace_lab.models; print(' '.join(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    added, everything = (line.split() for line in printed.splitlines())
    assert [name for name in added if name.split(".")[0] != "molaplace"] == []
    assert [name for name in added if name.startswith(FLOORS)] == [], "what only commands need"
    assert HEAVY.isdisjoint(name.split(".")[0] for name in everything), "an extra, for the library or for its networks"


PUBLIC_MODULES = (
    *("calibration", "distributed", "errors", "export", "hub", "images"),
    *("likelihoods", "links", "monitoring", "rules", "structures", "whole"),
)
UNLISTED = {"distributed": ("Team", "join", "shard"), "hub": ("load", "push", "save")}
"""Public names of modules without `__all__`; those of `errors` are its classes."""


def public_objects():
    """Classes and functions that users import, by name."""
    for name in mola.__all__:
        if not inspect.ismodule(getattr(mola, name)):
            yield f"molaplace.{name}", getattr(mola, name)
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(f"molaplace.{module_name}")
        classes = [name for name in vars(module) if name.startswith("Mola") or name.endswith("Error")]
        for name in getattr(module, "__all__", UNLISTED.get(module_name, classes)):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in (mola.evaluate, mola.baselines):
                yield f"{module.__name__}.{name}", value


def exists(name):
    """A dotted name leads to a module, or to something in one."""
    module, _, attribute = name.rpartition(".")
    home = importlib.import_module(module)
    return hasattr(home, attribute) or (hasattr(home, "__path__") and importlib.util.find_spec(name) is not None)


def test_every_public_name_has_a_docstring_and_an_entry_in_the_reference():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")]
    entries = set(re.findall(r"^::: ([\w.]+)", "\n".join(pages), re.M))
    public = dict(public_objects())
    assert len(public) > 60
    assert [name for name, value in public.items() if not value.__doc__] == []
    assert public.keys() - entries == set()
    assert [entry for entry in sorted(entries) if not exists(entry)] == []


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
        text = path.read_text()
        name = path.relative_to(PACKAGE).as_posix()
        assert list(unsafe_loads(text)) == TRUSTED.get(name, []), name
        assert not re.search(r"^\s*(import|from) pickle", text, re.M)


def factory_calls_without_a_device(source):
    """Calls such as `torch.zeros(3)`, whose tensor would be on torch's default device, which the user may have changed."""
    factories = {function.__name__ for function in _device_constructors()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in factories}:
            on_device = any(word.arg in ("device", None) for word in node.keywords)
            if not on_device:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            # The check above would miss them without their module.
            yield from (f"from torch import {alias.name}" for alias in node.names if alias.name in factories)


def test_no_tensor_is_made_on_the_default_device():
    for path in FILES:
        assert list(factory_calls_without_a_device(path.read_text())) == [], path.relative_to(PACKAGE).as_posix()


def test_factories_without_a_device_are_noticed():
    source = "torch.zeros(2)\ntorch.as_tensor(x)\ntorch.rand(2, device='cpu')\nx.new_zeros(2)\ntorch.zeros_like(x)\n"
    assert list(factory_calls_without_a_device(source)) == ["torch.zeros(2)", "torch.as_tensor(x)"]
