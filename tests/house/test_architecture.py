"""The house rules, as tests: direction of imports, no grab-bags, a light import, a documented public API."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mola

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "mola"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = (
    "errors",
    "choices",
    "exactness",
    "schema",
    "randomness",
    "distributed",
    "likelihood",
    "networks",
    "fingerprints",
    "heads",
    "features",
    "laplace",
    "links",
    "metrics",
    "class_order",
    "overlap",
    "uncertainty",
    "compare",
    "detectors",
    "search",
    "tuning",
    "prior",
    "weights",
    "component",
    "bounds",
    "storage",
    "folders",
    "summing",
    "archive",
    "sampling",
    "prediction",
    "mixture",
    "posterior",
    "fitting",
    "export",
    "whole",
    "baselines",
    "data",
    "models",
    "training",
    "estimators",
    "hub",
    "bench",
    "jobs",
    "report",
    "explore",
    "cli",
    "__main__",
)
"""A room imports only from rooms above it."""

LAPLACE = (
    "base",
    "basis",
    "symmetric",
    "memory",
    "damped",
    "moments",
    "kron",
    "kron_exact",
    "kron_diag",
    "diag",
    "full_factors",
    "full",
    "registry",
    "__init__",
)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mola":
            if node.module == "mola":
                yield from (f"mola.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mola")


def room_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize(
    "path", [file for file in FILES if file.parent != PACKAGE or file.name != "__init__.py"], ids=str
)
def test_rooms_import_only_from_rooms_above(path):
    room = room_of(path)
    assert room in ROOMS, f"{room} has no place in the house: add it to ROOMS and to ARCHITECTURE.md"
    for imported in imports(path):
        parts = imported.split(".")
        other = parts[1] if len(parts) > 1 else "__init__"
        if other == "__version__" or (len(parts) == 1 and room in ("bench", "report", "cli", "__main__")):
            continue  # the outer rooms use the public API, as a user would
        if other == room:
            if room == "laplace" and len(parts) > 2:
                assert LAPLACE.index(parts[2]) < LAPLACE.index(path.stem), f"{path.name} imports {imported}"
            continue
        if other in ROOMS:
            assert ROOMS.index(other) < ROOMS.index(room), (
                f"{path.relative_to(ROOT)} imports {imported}, which lies below it"
            )
        else:
            assert room in ("bench", "report", "cli", "__main__"), f"{path.relative_to(ROOT)} imports {imported}"


def test_no_grab_bags():
    banned = re.compile(r"(^|_)(utils?|helpers?|misc|common|tools)$")
    assert [str(path) for path in FILES if banned.search(path.stem)] == []


def test_the_likelihood_alone_knows_the_softmax_of_logits():
    """Curvature code asks the likelihood; nothing in laplace/ computes probabilities itself."""
    for path in (PACKAGE / "laplace").glob("*.py"):
        assert "softmax(" not in path.read_text(), path.name


def test_importing_mola_imports_no_extra():
    heavy = {
        "sklearn",
        "scipy",
        "matplotlib",
        "typer",
        "rich",
        "torchmetrics",
        "pooch",
        "PIL",
        "onnx",
        "timm",
        "transformers",
        "curvlinops",
        "gradio",
    }
    code = "import sys, mola; print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)


def test_importing_mola_costs_little_more_than_torch():
    """Counted in modules, not in seconds: nothing foreign that torch and the core's own needs have not loaded already."""
    code = (
        "import sys, torch, numpy, safetensors.torch, tqdm.auto; before = set(sys.modules); import mola; "
        "print(' '.join(sorted(set(sys.modules) - before)))"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in added if name.split(".")[0] != "mola"] == []
    outer = (
        "mola.lab.data",
        "mola.lab.models",
        "mola.training",
        "mola.lab",
        "mola.app.jobs",
        "mola.compare.report",
        "mola.app.explore",
        "mola.app.cli",
    )
    assert [name for name in added if name.startswith(outer)] == [], "what only benchmarks need"
    assert len(added) < 130


def test_public_names_are_documented():
    public = [name for name in vars(mola) if not name.startswith("_") and hasattr(vars(mola)[name], "__module__")]
    assert {"fit", "ensemble", "load", "MoLA", "Mixture", "Prediction", "ConfidenceThreshold", "Evidence"} <= set(
        public
    )
    for name in public:
        assert vars(mola)[name].__doc__, name


def test_the_architecture_page_names_every_room():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    existing = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert [room for room in sorted(existing) if f"`{room}" not in page and f"  {room}" not in page] == []


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
            # Under another name, the checks above would not see it.
            yield from (
                f"import torch as {alias.asname}" for alias in node.names if alias.name == "torch" and alias.asname
            )


TRUSTED = {"jobs/exported.py": ["torch.export.load"], "export/torch_file.py": ["torch.export.load"]}
"""Loaders that unpickle. Called only for files that the user says to trust (tested in test_jobs.py), or that were found to
hold nothing pickled but plain tensors (tested in test_export.py)."""


def test_no_pickle():
    for path in FILES:
        text = path.read_text()
        assert list(unsafe_loads(text)) == TRUSTED.get(path.relative_to(PACKAGE).as_posix(), []), path.name
        assert not re.search(r"^\s*(import|from) pickle", text, re.M)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.jit.load(path)",
        "read = torch.load",
        "from torch import load",
        "from torch.serialization import load",
        "import torch as t",
    ],
)
def test_unsafe_loading_would_be_noticed(source):
    assert len(list(unsafe_loads(source))) == 1
    assert list(unsafe_loads("torch.load(path, map_location='cpu', weights_only=True)")) == []
