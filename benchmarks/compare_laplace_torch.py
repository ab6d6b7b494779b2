"""Agreement with laplace-torch wherever the two libraries define the same thing, in float64.

    python benchmarks/compare_laplace_torch.py [--venv DIR]

laplace-torch asks for torchvision and several curvature libraries, so it gets an environment of its own, made on the first
run and kept in the user's cache folder (or DIR). It is installed without its declared dependencies, and then with those
that its import really needs; torchvision is not among them. Both libraries run there, in one process, on the same networks
(`laplace_torch_cases.py`). Prints a table and fails if any difference is above the tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import record

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


def run(python: Path) -> dict[str, Any]:
    """Run both libraries in the environment; mola comes from this repository's sources."""
    surroundings = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [python, "-W", "ignore", HERE / "laplace_torch_cases.py"], env=surroundings, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def table(rows: list[dict[str, Any]]) -> str:
    precisions = [f"{value:g}" for value in rows[0]["prior_precision"]]
    head = f"{'network':20} {'structure':13} {'quantity':27}" + "".join(f"{value:>10}" for value in precisions)
    lines = [
        f"{row['network']:20} {row['structure']:13} {row['quantity']:27}"
        + "".join(f"{value:10.1e}" for value in row["difference"])
        for row in rows
    ]
    return "\n".join([head, "-" * len(head), *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=cache_folder(), help="where laplace-torch is installed")
    result = run(prepare(parser.parse_args().venv))
    record.write("compare_laplace_torch", result)
    tolerance = result["tolerance"]
    print("Largest difference relative to the largest value, by prior precision (the evidence slope: at mola's best)\n")
    print("The same definition:")
    print(table(result["same"]))
    print("\nNot the same definition or precision, for comparison (not judged):")
    print(table(result["different"]))
    above = [row for row in result["same"] if not max(row["difference"]) <= tolerance]
    print(f"\n{len(result['same']) - len(above)} of {len(result['same'])} rows within {tolerance:g}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
