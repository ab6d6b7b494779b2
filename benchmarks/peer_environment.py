"""Separate environments for the libraries that molaplace is compared with.

laplace-torch requires torchvision and several curvature libraries, and TorchCP requires graph libraries. Each environment is
created in the user's cache folder on first use. It contains the library without its declared dependencies, plus the packages
needed to import the library. molaplace is imported from this repository, so that both libraries run in one process.
"""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


@dataclass(frozen=True)
class Packages:
    """The packages to install in an environment."""

    name: str
    peer: tuple[str, ...]
    """Libraries to compare with molaplace, installed without their dependencies."""
    needs: tuple[str, ...]
    alone: tuple[str, ...] = ()
    """Packages installed without their dependencies, because those dependencies are never imported."""


LAPLACE_TORCH = Packages(
    "laplace-torch",
    ("laplace-torch==0.3", "curvlinops-for-pytorch==3.0.1", "backpack-for-pytorch==1.7.1", "asdfghjkl==0.1a4"),
    ("torch", "numpy", "scipy", "tqdm", "safetensors", "torchmetrics", "opt-einsum", "einops", "einconv"),
    ("unfoldNd", "linear-operator", "jaxtyping", "wadler-lindig"),
)
CONFORMAL = Packages(
    "conformal",
    ("MAPIE==1.6.0", "torchcp==1.2.1"),
    ("torch", "numpy", "scipy", "tqdm", "safetensors", "scikit-learn", "cloudpickle"),
)


def cache_folder(packages: Packages = LAPLACE_TORCH) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "molaplace" / f"{packages.name}-venv"


def prepare(folder: Path, packages: Packages = LAPLACE_TORCH) -> Path:
    """Return the environment's interpreter; create the environment if it is missing or has different packages."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = json.dumps([packages.peer, packages.needs, packages.alone, sys.version_info[:2]])
    marker = folder / "ready.json"
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return python
    print(f"creating an environment for {packages.name} (once)", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--constraint", REPOSITORY / "constraints.txt", *packages.needs], check=True)
    subprocess.run([*install, "--no-deps", *packages.peer, *packages.alone], check=True)
    marker.write_text(wanted, encoding="utf-8")
    return python


def run(python: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script from this folder in the environment, and return the JSON that it prints."""
    surroundings = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [python, "-W", "ignore", HERE / script, *arguments]
    return json.loads(subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, check=True).stdout)
