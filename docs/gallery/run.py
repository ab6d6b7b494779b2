"""Run the notebooks of the gallery and store their outputs: `python docs/gallery/run.py [--check] [NOTEBOOK ...]`.

Each notebook runs without Jupyter, in an empty namespace and an empty folder. Printed text and figures become the outputs of their
cells, and the last figure, reduced, becomes the thumbnail on the page of the gallery. With `--check`, nothing is written. Needs the
packages that the notebooks name.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")

import matplotlib.pyplot as plt
from PIL import Image

FOLDER = Path(__file__).resolve().parent
DPI = 110
THUMBNAIL = 480
"""Width of a thumbnail in pixels."""
COLOURS = 64
"""Number of colours of a stored figure, which keeps the notebooks small."""


def execute(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the code cells in order, in the current folder, and return the outputs of each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            stream = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            outputs.append([*stream, *map(_drawn, plt.get_fignums())])
            plt.close("all")
    return outputs


def _drawn(number: int) -> dict[str, Any]:
    # An open figure as an output, described by its title.
    figure = plt.figure(number)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    reduced = Image.open(buffer).convert("RGB").quantize(COLOURS)
    data = {"image/png": _encoded(reduced), "text/plain": [figure.get_suptitle()]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def _encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def figures(outputs: list[list[dict[str, Any]]]) -> list[bytes]:
    """Return the figures among the outputs of all cells, as PNG."""
    return [base64.b64decode(output["data"]["image/png"]) for cell in outputs for output in cell if "data" in output]


def store(path: Path, notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]) -> None:
    """Write the outputs into the notebook, and the thumbnail beside it."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, values) in enumerate(zip(cells, outputs, strict=True), 1):
        cell.update(outputs=values, execution_count=number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    picture = Image.open(io.BytesIO(figures(outputs)[-1])).convert("RGB")
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.quantize(COLOURS).save(path.with_suffix(".png"), optimize=True)


def main() -> None:
    """Run the notebooks given as arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    for path in map(Path.resolve, options.notebooks):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            outputs = execute(notebook)
        if not options.check:
            store(path, notebook, outputs)
        print(f"{path.name}: ran {len(outputs)} cells")


if __name__ == "__main__":
    main()
