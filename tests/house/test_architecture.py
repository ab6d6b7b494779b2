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

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
DOORS = ("compare", "lab", "app", "__main__")
"""Floors behind the library: they may use the public API, as a user would."""


def listings(page):
    """Folders as the page lists them: the names in each, from top to bottom."""
    found, folder = {}, None
    for line in page.splitlines():
        if opened := re.fullmatch(r"    src/(mola/(?:\w+/)*)", line):
            folder = found.setdefault(opened[1], [])
        elif folder is not None and (entry := re.match(r"      (\w+)(?:/|\.py)(?:\s|$)", line)):
            folder.append(entry[1])
        elif not line.startswith("      "):
            folder = None
    return found


LISTED = listings(PAGE)


def imports(path):
    """Modules that a file imports, each with the names it takes from there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mola":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mola")


def as_module(dotted):
    """The module that a dotted name is, or lies in, as a path inside the package."""
    parts = dotted.split(".")[1:]
    while parts and not (
        PACKAGE.joinpath(*parts).with_suffix(".py").exists() or PACKAGE.joinpath(*parts, "__init__.py").exists()
    ):
        parts = parts[:-1]
    return tuple(parts)


def out_of_order(path, imported):
    """Why a file may not import a module, if it may not."""
    mine, theirs = path.relative_to(PACKAGE).with_suffix("").parts, as_module(imported)
    if not theirs:  # the package itself: `import mola`, or `mola.__version__`
        allowed = mine[0] in DOORS or imported == "mola.__version__"
        return None if allowed else "only the floors behind the library use its public API"
    depth = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if depth is None:
        return None if mine == theirs else f"{imported} is the front door of its own folder"
    if mine[depth] == "__init__":
        return None  # a front door shows what is behind it
    order = LISTED["/".join(("mola", *mine[:depth])) + "/"]
    if missing := [name for name in (theirs[depth], mine[depth]) if name not in order]:
        return f"{missing[0]} is not on the page"
    return None if order.index(theirs[depth]) < order.index(mine[depth]) else f"it stands above {imported}"


def test_a_file_imports_only_from_what_stands_above_it():
    """On its own floor, and inside every folder."""
    wrong = [
        f"{path.relative_to(ROOT)}: {reason}"
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for imported in imports(path)
        if (reason := out_of_order(path, imported))
    ]
    assert wrong == []


def test_the_page_lists_every_file_and_no_other():
    folders = {path.parent for path in FILES}
    there = {}
    for folder in folders:
        names = {path.stem for path in FILES if path.parent == folder and path.stem != "__init__"}
        names |= {other.name for other in folders if other.parent == folder}
        there[folder.relative_to(PACKAGE.parent).as_posix() + "/"] = names
    assert {folder: set(names) for folder, names in LISTED.items()} == there
    assert all(len(names) == len(set(names)) for names in LISTED.values())


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("network/features.py", "mola.laplace.base.Factors"),
        ("laplace/base.py", "mola.laplace.kron.Kron"),
        ("laplace/base.py", "mola.laplace.Kron"),
        ("posterior.py", "mola.fit"),
        ("metrics.py", "mola.lab.models.lenet"),
        ("lab/suite.py", "mola.app.cli.fit"),
        ("app/jobs/job.py", "mola.app.jobs.fit.run_fit"),
    ],
)
def test_a_wrong_import_would_be_noticed(file, imported):
    assert (PACKAGE / file).exists()
    assert out_of_order(PACKAGE / file, imported)


def test_no_grab_bags():
    banned = re.compile(r"(^|_)(utils?|helpers?|misc|common|tools)$")
    assert [str(path) for path in FILES if banned.search(path.stem)] == []


def test_the_likelihood_alone_knows_the_softmax_of_logits():
    """Curvature code asks the likelihood; nothing in laplace/ computes probabilities itself."""
    for path in (PACKAGE / "laplace").glob("*.py"):
        assert "softmax(" not in path.read_text(), path.name


HEAVY = {
    *(
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
    ),
    *("torchvision", "curvlinops", "gradio"),
}


def test_importing_mola_costs_little_more_than_torch():
    """Counted in modules, not in seconds: nothing foreign that torch and the core's own needs have not loaded already."""
    code = (
        "import sys, torch, numpy, safetensors.torch, tqdm.auto; before = set(sys.modules); import mola; "
        "print(' '.join(sorted(set(sys.modules) - before))); import mola.lab.models; print(' '.join(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    added, everything = (line.split() for line in said.splitlines())
    assert [name for name in added if name.split(".")[0] != "mola"] == []
    outer = tuple(f"mola.{door}" for door in DOORS)
    assert [name for name in added if name.startswith(outer)] == [], "what only benchmarks need"
    assert len(added) < 130
    assert HEAVY.isdisjoint(name.split(".")[0] for name in everything), "an extra, for the library or for its networks"


def test_public_names_are_documented():
    public = [name for name in vars(mola) if not name.startswith("_") and hasattr(vars(mola)[name], "__module__")]
    assert {"fit", "ensemble", "load", "MoLA", "Mixture", "Prediction", "ConfidenceThreshold", "Evidence"} <= set(
        public
    )
    for name in public:
        assert vars(mola)[name].__doc__, name


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


TRUSTED = {"app/jobs/networks.py": ["torch.export.load"], "export/torch_file.py": ["torch.export.load"]}
"""Loaders that unpickle. Called only for files that the user says to trust (tested in test_jobs.py and
test_export.py), or that were just written (the check of an export)."""


RESTRICTED = "lab/data/readers.py"
"""The one file that may use pickle: by a subclass of its reader whose `find_class` allows next to nothing."""


def test_no_pickle():
    for path in FILES:
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        assert list(unsafe_loads(text)) == TRUSTED.get(name, []), name
        assert name == RESTRICTED or not re.search(r"^\s*(import|from) pickle", text, re.M)
    used = re.findall(r"pickle\.[\w.]+", (PACKAGE / RESTRICTED).read_text())
    assert set(used) == {
        "pickle._Unpickler",
        "pickle._Unpickler.dispatch.items",
        "pickle.UnpicklingError",
        "pickle.BYTEARRAY8",
    }
    (subclass,) = (
        node
        for node in ast.walk(ast.parse((PACKAGE / RESTRICTED).read_text()))
        if isinstance(node, ast.ClassDef) and "pickle._Unpickler" in map(ast.unparse, node.bases)
    )
    assert "find_class" in [node.name for node in subclass.body if isinstance(node, ast.FunctionDef)]
    assert used.count("pickle._Unpickler") == 1


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
