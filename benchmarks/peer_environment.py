"""laplace-torch in an environment of its own.

It asks for torchvision and several curvature libraries. The environment is made on the first use and kept in the user's cache
folder: laplace-torch without its declared dependencies, and those that its import really needs; torchvision is not among
them. mola comes from this repository's sources, so that both libraries run there in one process.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PEER = ("laplace-torch==0.3", "curvlinops-for-pytorch==3.0.1", "backpack-for-pytorch==1.7.1", "asdfghjkl==0.1a4")
NEEDS = ("torch", "numpy", "scipy", "tqdm", "safetensors", "torchmetrics", "opt-einsum", "einops", "einconv")
NEEDS_ALONE = ("unfoldNd", "linear-operator", "jaxtyping", "wadler-lindig")
"""Installed without dependencies: nothing of theirs that would be added is imported."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mola" / "laplace-torch-venv"


def prepare(folder: Path) -> Path:
    """The environment's interpreter, after making the environment if it is not there or was meant for other packages."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = json.dumps([PEER, NEEDS, NEEDS_ALONE, sys.version_info[:2]])
    marker = folder / "ready.json"
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return python
    print("making an environment for laplace-torch, once", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--constraint", REPOSITORY / "constraints.txt", *NEEDS], check=True)
    subprocess.run([*install, "--no-deps", *PEER, *NEEDS_ALONE], check=True)
    marker.write_text(wanted, encoding="utf-8")
    return python


def run(python: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script of this folder there, and read the JSON that it prints; what it says on stderr is passed on."""
    surroundings = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [python, "-W", "ignore", HERE / script, *arguments]
    return json.loads(subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, check=True).stdout)
